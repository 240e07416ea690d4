"""The front door skips TorchDynamo's guards. For each guard it skips: a call that the guard would have caught.

Every test here makes a model serve calls directly first, changes one thing, and compares the next result with plain
PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import kernl
from kernl.front_door import builder_of, read_call
from tests import tiny

pytestmark = pytest.mark.either_end


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def direct(model: nn.Module) -> int:
    return model.kernl.report().calls.direct  # type: ignore[union-attr,operator]


def check(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Compare with plain PyTorch. Returns whether the call went through the front door."""
    with kernl.disabled():
        want = model(*args, **kwargs)
    before = direct(model)
    got = model(*args, **kwargs)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want)
    return direct(model) > before


@pytest.fixture
def served() -> tiny.Encoder:
    """An encoder whose calls with activations() go through the front door."""
    model = kernl.optimize_model(tiny.encoder())
    x = tiny.activations()
    assert not check(model, x)
    assert check(model, x) and check(model, tiny.activations(seed=5))
    return model


def noticed(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The next call is not served as before, and right; the one after it is served directly again."""
    assert not check(model, *args, **kwargs)
    assert check(model, *args, **kwargs)


# What is used where it is needs no notice at all.


def test_weights_updated_in_place(served: tiny.Encoder) -> None:
    linear = served.blocks[0].up
    changes: list[Callable[[], Any]] = [
        lambda: linear.weight.mul_(2),
        lambda: linear.weight.data.add_(1),
        lambda: linear.weight.data.copy_(torch.randn_like(linear.weight)),
        lambda: served.load_state_dict(tiny.encoder(seed=3).state_dict()),
        lambda: linear.weight.data.add_(torch.randn(64, 4) @ torch.randn(4, 32)),  # a LoRA merge
        lambda: served.scale.zero_(),
    ]
    for change in changes:
        change()
        assert check(served, tiny.activations())


# The model.


def test_weights_moved(served: tiny.Encoder) -> None:
    weight = served.blocks[0].up.weight
    weight.data = torch.randn_like(weight)
    noticed(served, tiny.activations())


def test_weights_cast(served: tiny.Encoder) -> None:
    served.double()
    noticed(served, tiny.activations().double())


@pytest.mark.parametrize("guards", ["fast", "full"])
def test_weights_cast_behind_integer_inputs(guards: str) -> None:
    model, inputs = kernl.optimize_model(tiny.bert(), guards=guards), tiny.text()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        for _ in range(2):
            check(model, **inputs)
        assert model(**inputs).last_hidden_state.dtype == dtype
    assert len(model.kernl.report().graphs) == 3


def test_weights_of_another_shape(served: tiny.Encoder) -> None:
    block = served.blocks[0]
    block.up.weight.data, block.up.bias.data = torch.randn(16, 32), torch.randn(16)
    block.down.weight.data = torch.randn(32, 16)
    noticed(served, tiny.activations())


def test_parameter_replaced(served: tiny.Encoder) -> None:
    served.blocks[1].down.bias = nn.Parameter(torch.randn(32))
    noticed(served, tiny.activations())


def test_parameter_replaced_behind_the_modules_back(served: tiny.Encoder) -> None:
    served.blocks[1].down._parameters["bias"] = nn.Parameter(torch.randn(32))
    noticed(served, tiny.activations())


def test_parameter_removed(served: tiny.Encoder) -> None:
    served.blocks[1].down.bias = None
    noticed(served, tiny.activations())


def test_load_state_dict_by_assignment(served: tiny.Encoder) -> None:
    served.load_state_dict(tiny.encoder(seed=3).state_dict(), assign=True)
    noticed(served, tiny.activations())


def test_functional_call(served: tiny.Encoder) -> None:
    x = tiny.activations()
    weights = {name: torch.randn_like(tensor) for name, tensor in served.state_dict().items()}
    with kernl.disabled():
        want = torch.func.functional_call(served, weights, (x,))
    torch.testing.assert_close(torch.func.functional_call(served, weights, (x,)), want)
    check(served, x)


def test_buffer_replaced(served: tiny.Encoder) -> None:
    served.scale = torch.randn(32)
    noticed(served, tiny.activations())


def test_buffer_of_one_element_replaced_by_an_equal_one() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = kernl.optimize_model(Counted())
    for _ in range(2):
        check(model, torch.ones(2))
    model.factor = torch.tensor(2.0)
    model.factor.fill_(3.0)
    assert not check(model, torch.ones(2))


def test_submodule_replaced(served: tiny.Encoder) -> None:
    served.blocks[0].act = nn.ReLU()
    noticed(served, tiny.activations())
    served.blocks[1] = tiny.Block().eval()
    noticed(served, tiny.activations())
    served.blocks = nn.ModuleList([tiny.Block().eval()])
    noticed(served, tiny.activations())


def test_submodule_compiled() -> None:
    """By the user, after optimising: torch.compile puts a module without a training flag of its own in its place."""
    model = kernl.optimize_model(tiny.bert())
    ids = torch.randint(0, 50, (2, 7))
    assert not check(model, input_ids=ids) and check(model, input_ids=ids)
    model.encoder = torch.compile(model.encoder, backend="eager")
    for _ in range(3):
        check(model, input_ids=ids)


def test_submodule_removed_and_inserted(served: tiny.Encoder) -> None:
    del served.blocks[-1]
    noticed(served, tiny.activations())
    served.blocks.insert(0, tiny.Block().eval())
    noticed(served, tiny.activations())
    served.blocks.append(tiny.Block().eval())
    noticed(served, tiny.activations())


def test_tensor_in_a_plain_attribute() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.shift = torch.ones(4)
            self.inner.shift = torch.ones(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.shift + self.inner.shift

    model = kernl.optimize_model(Shifted())
    for _ in range(2):
        served = check(model, torch.ones(4))
    assert served
    model.shift = torch.zeros(4)
    noticed(model, torch.ones(4))
    model.inner.shift = torch.zeros(4)
    noticed(model, torch.ones(4))


def test_training_mode(served: tiny.Encoder) -> None:
    x = tiny.activations()
    served.train()
    first, second = served(x), served(x)
    assert not torch.equal(first, second)  # dropout is active
    served.eval()
    check(served, x)
    assert check(served, x)
    served.blocks[0].dropout.train()
    assert not torch.equal(served(x), served(x))


def test_hooks_on_submodules(served: tiny.Encoder) -> None:
    x = tiny.activations()
    handle = served.blocks[0].up.register_forward_hook(lambda module, args, output: output + 1)
    noticed(served, x)
    handle.remove()
    noticed(served, x)
    handle = served.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    noticed(served, x)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not check(served, x)
    finally:
        handle.remove()


def test_config() -> None:
    model = kernl.optimize_model(tiny.bert())
    inputs = tiny.text()
    for _ in range(2):
        result = model(**inputs)
    assert direct(model) == 1 and result.hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(**inputs).hidden_states) == 3
    model.config.output_hidden_states = False
    model.config.return_dict = False
    assert type(model(**inputs)) is tuple


def test_plain_attributes_are_the_documented_exception(served: tiny.Encoder) -> None:
    x = tiny.activations()
    before = served(x)
    served.factor = 4.0
    assert torch.equal(served(x), before)
    served.kernl.refresh()
    torch.testing.assert_close(served(x), 2 * before)

    careful = kernl.optimize_model(tiny.encoder(), guards="full")
    check(careful, x)
    careful.factor = 4.0
    check(careful, x)
    assert direct(careful) == 0


# The arguments.


def test_shapes_dtypes_and_strides(served: tiny.Encoder) -> None:
    x = tiny.activations()
    variants = [
        tiny.activations(3, 3),
        tiny.activations(1, 3),
        tiny.activations(2, 1),
        x.transpose(0, 1),
        tiny.activations(2, 6)[:, ::2],
        x[:1].expand(2, 3, tiny.WIDTH),
        torch.cat([x, x])[2:],  # another storage offset
        x[0],
    ]
    for variant in variants:
        assert not check(served, variant)
        assert check(served, variant)
    with pytest.raises(RuntimeError, match="dtype"):
        served(x.double())
    with pytest.raises(RuntimeError):
        served(x[..., :5])
    assert check(served, x)


def test_arguments_by_value(served: tiny.Encoder) -> None:
    x = tiny.activations()
    for double in (True, False, 1, 0):
        assert not check(served, x, double=double)
        assert check(served, x, double=double)
    bias = torch.randn(tiny.WIDTH)
    assert not check(served, x, bias)
    assert check(served, x, bias) and check(served, x, torch.randn(tiny.WIDTH))
    assert not check(served, x, bias=bias)
    assert check(served, x, bias=bias) and check(served, x)


def test_the_same_tensor_twice() -> None:
    class Add(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 2 * b

    model = kernl.optimize_model(Add())
    a, b = torch.randn(3), torch.randn(3)
    for _ in range(2):
        check(model, a, a)
    assert check(model, b, b)
    assert not check(model, a, b)
    assert check(model, a, b) and check(model, b, a) and check(model, a, a)


def test_a_weight_as_an_argument(served: tiny.Encoder) -> None:
    x = tiny.activations()
    for _ in range(2):
        check(served, x, served.scale)
    check(served, x, torch.randn(tiny.WIDTH))
    check(served, x, nn.Parameter(torch.randn(tiny.WIDTH)))


def test_nested_arguments() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, list[Any]], named: dict[str, Any]) -> dict[str, Any]:
            return {"sum": pair[0] + pair[1][0] * named["factor"], "rest": (pair[1][1], None, [pair[0]])}

    model = kernl.optimize_model(Nested())
    x, y = torch.randn(2), torch.randn(2)
    for factor in (2, 3.5):
        assert not check(model, (x, [y, 7]), {"factor": factor})
        assert check(model, (y, [x, 7]), {"factor": factor})


def test_signatures_tell_values_apart() -> None:
    def signature(*args: Any) -> Any:
        call = read_call(args, {})
        assert call is not None
        return call[0]

    different = [(1,), (True,), (1.0,), (0.0,), (-0.0,), ("1",), (None,), ((1,),), ([1],), ({"a": 1},), (1, 1)]
    assert len({signature(*args) for args in different}) == len(different)
    assert signature(2, "a") == signature(2, "a")
    assert read_call((object(),), {}) is None
    assert read_call((torch.ones(2, 2).to_sparse(),), {}) is None
    assert read_call((nn.Parameter(torch.ones(1)),), {}) is None


def test_sparse_and_unknown_arguments_still_work() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
            return x * scale.value

    class Scale:
        value = 3.0

    model = kernl.optimize_model(Plain())
    for _ in range(2):
        assert not check(model, torch.ones(2), Scale())
    assert "an argument cannot be compared by value" in model.kernl.report().calls.closed


# The state of torch.


def test_gradient_and_inference_mode(served: tiny.Encoder) -> None:
    x = tiny.activations()
    with torch.enable_grad():
        for _ in range(2):
            assert served(x).requires_grad
    with torch.inference_mode():
        for _ in range(2):
            assert served(x).is_inference()
    result = served(x)
    assert not result.requires_grad and not result.is_inference()
    assert check(served, x)


def test_gradients_without_anything_that_needs_them() -> None:
    model = tiny.encoder().requires_grad_(False)
    kernl.optimize_model(model)
    x = tiny.activations()
    with torch.enable_grad():
        assert not check(model, x)
        assert check(model, x)
        model.blocks[0].up.weight.requires_grad_()
        assert model(x).requires_grad
        assert model(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(served: tiny.Encoder, dtype: torch.dtype) -> None:
    x = tiny.activations()
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            assert check(served, x) in (True, False)
        assert check(served, x)
    with torch.autocast("cpu", dtype):
        assert check(served, x)
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other):
        assert not check(served, x)


def test_default_dtype() -> None:
    class Ones(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3)

    model = kernl.optimize_model(Ones())
    for _ in range(2):
        check(model, torch.ones(3))
    torch.set_default_dtype(torch.float64)
    try:
        assert not check(model, torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_deterministic_algorithms(served: tiny.Encoder) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert not check(served, tiny.activations())
    finally:
        torch.use_deterministic_algorithms(False)


def test_default_device(served: tiny.Encoder) -> None:
    x = tiny.activations()
    with torch.device("cpu"):
        assert not check(served, x)
    assert check(served, x)


def test_the_compilers_stance(served: tiny.Encoder) -> None:
    x = tiny.activations()
    with torch.compiler.set_stance("force_eager"):
        assert not check(served, x)
    assert check(served, x)


def test_modes_and_transforms(served: tiny.Encoder) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = tiny.activations()
    before = direct(served)
    with FlopCounterMode(display=False) as counter:
        served(x)
    assert counter.get_total_flops() > 0
    with kernl.disabled():
        want = torch.func.vmap(served)(x)
    torch.testing.assert_close(torch.func.vmap(served)(x), want)
    assert direct(served) == before


# What cannot be understood stays with TorchDynamo, and is right.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None


class CountsCalls(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 1


class KeepsInputs(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return x + 1


class KeepsAResult(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x + 1


class WritesAnArgument(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsCalls, "forward changes Python objects"),
        (KeepsInputs, "forward changes Python objects"),
        (KeepsAResult, "forward changes Python objects"),
        (WritesAnArgument, "the graph writes to an argument"),
    ],
)
def test_side_effects(kind: type[Counting], reason: str) -> None:
    plain, fast = kind(), kernl.optimize_model(kind())
    for step in range(4):
        x, y = torch.full((2,), float(step)), torch.full((2,), float(step))
        torch.testing.assert_close(fast(x), plain(y))
        torch.testing.assert_close(x, y)
        assert fast.calls == plain.calls and len(fast.seen) == len(plain.seen)
        torch.testing.assert_close(fast.last, plain.last)
    assert direct(fast) == 0
    assert any(closed.startswith(reason) for closed in fast.kernl.report().calls.closed)


def test_graph_breaks() -> None:
    printed: list[int] = []

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            printed.append(1)
            return x * 2

    model = kernl.optimize_model(Broken())
    for _ in range(4):
        torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 4.0))
    assert len(printed) == 4 and direct(model) == 0


def test_values_that_depend_on_data() -> None:
    class Data(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return x + 1, x.sum().item()

    model = kernl.optimize_model(Data())
    for value in (1.0, 2.0, 3.0):
        assert model(torch.full((2,), value))[1] == 2 * value
    assert direct(model) == 0


def test_random_numbers_are_drawn_anew() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    model = kernl.optimize_model(Noisy())
    results = [model(torch.zeros(4)) for _ in range(4)]
    assert len({tuple(result.tolist()) for result in results}) == 4
    torch.manual_seed(0)
    with kernl.disabled():
        want = model(torch.zeros(4))
    torch.manual_seed(0)
    torch.testing.assert_close(model(torch.zeros(4)), want)


def test_a_result_that_is_an_argument_or_a_constant() -> None:
    class Point(NamedTuple):
        x: torch.Tensor
        name: str

    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return [x, x + 1, None, 3, "text", {"a": x * 2}]

    model = kernl.optimize_model(Mixed())
    for _ in range(3):
        x = torch.randn(2)
        result = model(x)
        assert result[0] is x and result[2:5] == [None, 3, "text"]
        torch.testing.assert_close(result[5]["a"], x * 2)
    assert direct(model) == 2
    one = torch.ones(1)
    build = builder_of(Point(one, "p"), {id(one): ("output", 0)})
    assert build([torch.zeros(1)], []) == Point(torch.zeros(1), "p")


def test_signatures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernl.front_door._MAX_SIGNATURES", 4)
    model = kernl.optimize_model(tiny.encoder())
    for length in range(2, 10):
        check(model, tiny.activations(2, length))
    assert len(model.kernl._door.book.plans) == 4
    assert check(model, tiny.activations(2, 9)) and not check(model, tiny.activations(2, 2))


def test_a_loop_over_modes_keeps_every_plan(served: tiny.Encoder) -> None:
    x = tiny.activations()
    modes: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ]
    for mode in modes:
        with mode():
            served(x)
    guarded = served.kernl.report().calls.guarded
    for _ in range(3):
        for mode in modes:
            with mode():
                assert check(served, x)
    assert served.kernl.report().calls.guarded == guarded


class _Grows(nn.Module):
    """Reads state that it does not have at first."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.gate: torch.Tensor | None = None
        self.config: dict[str, Any] = {"scale": 2.0, "inner": {"shifts": [0.0, 1.0]}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.config["scale"] + self.config["inner"]["shifts"][1]
        if hasattr(self, "buffer"):
            x = x * self.buffer
        if self.gate is not None:
            x = x * self.gate
        return x if self.adapter is None else self.adapter(x)


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Grows()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inner(x))


@pytest.mark.parametrize(
    "grow",
    [
        lambda inner: setattr(inner, "adapter", nn.Linear(4, 4)),
        lambda inner: setattr(inner, "gate", nn.Parameter(torch.full((4,), 3.0))),
        lambda inner: setattr(inner, "gate", torch.full((4,), 3.0)),
        lambda inner: inner.register_buffer("buffer", torch.full((4,), 3.0)),
        lambda inner: inner.config.update(scale=5.0),
        lambda inner: inner.config["inner"]["shifts"].__setitem__(1, 7.0),
    ],
    ids=["submodule", "parameter", "tensor", "buffer", "config dict", "list in a config"],
)
def test_state_that_was_not_there_is_noticed(grow: Callable[[Any], Any]) -> None:
    model, x = kernl.optimize_model(_Holder().eval()), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        assert model.kernl.report().calls.direct
        grow(model.inner)
        got = model(x)
        with kernl.disabled():
            want = model(x)
    torch.testing.assert_close(got, want)


class _InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        self.calls.add_(1)
        torch._dynamo.graph_break()
        return self.linear(x) * self.calls * (2 if mode == "0" else 1)


def test_no_part_of_a_call_runs_twice() -> None:
    """Past the recompile limit, and after a mistake of the caller, effects of the part that has run stay single."""
    model, x = kernl.optimize_model(_InParts().eval(), recompile_limit=3), torch.randn(3, 4)
    with torch.no_grad():
        for call in range(8):
            model(x, str(call))
            assert model.calls.item() == call + 1
        with pytest.raises(Exception):  # noqa: B017 - PyTorch's own or TorchDynamo's, which carries its text
            model(torch.randn(3, 5), "0")
    assert model.calls.item() == 9
