"""`optimize_model` keeps every promise about the user's model: same results, nothing changed, everything undone."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel, BertTokenizerFast, pipeline

import kernl
from kernl.backend import CannotCapture
from kernl.handle import Handle
from kernl.report import KernlWarning, forget_warnings
from tests import tiny


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def same(got: Any, want: Any) -> None:
    """Equal types, keys and values."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want)
    elif hasattr(want, "keys"):
        assert list(got.keys()) == list(want.keys())
        for name in want.keys():
            same(got[name], want[name])
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            same(one, other)
    else:
        assert got == want


@pytest.fixture(scope="module")
def pair() -> tuple[BertModel, BertModel]:
    """A plain model and the same one optimised."""
    return tiny.bert(), kernl.optimize_model(tiny.bert())


def test_returns_the_same_object() -> None:
    model = tiny.encoder()
    assert kernl.optimize_model(model) is model
    assert isinstance(model.kernl, Handle)
    assert kernl.restore_model(model) is model


CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "keywords": ((), {}),
    "positional": (("input_ids", "attention_mask"), {}),
    "mixed": (("input_ids",), {}),
    "hidden states": ((), {"output_hidden_states": True}),
    "tuple": ((), {"return_dict": False}),
    "tuple of everything": ((), {"output_hidden_states": True, "return_dict": False}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call(name: str, pair: tuple[BertModel, BertModel]) -> None:
    plain, fast = pair
    positional, options = CALLS[name]
    for seed in (1, 2, 3):
        inputs = tiny.text(seed=seed)
        args = tuple(inputs.pop(argument) for argument in positional)
        same(fast(*args, **inputs, **options), plain(*args, **inputs, **options))


def test_attentions_from_the_eager_implementation() -> None:
    plain, fast = tiny.bert(attn_implementation="eager"), tiny.bert(attn_implementation="eager")
    kernl.optimize_model(fast)
    for seed in (1, 2):
        inputs = tiny.text(seed=seed)
        same(fast(**inputs, output_attentions=True), plain(**inputs, output_attentions=True))
    assert len(fast(**inputs, output_attentions=True).attentions) == 2


def test_no_mask(pair: tuple[BertModel, BertModel]) -> None:
    plain, fast = pair
    ids = tiny.text()["input_ids"]
    same(fast(ids), plain(ids))


def test_other_output_classes() -> None:
    plain, fast = tiny.classifier(), kernl.optimize_model(tiny.classifier())
    labels = torch.tensor([0, 1])
    for seed in (1, 2):
        inputs = tiny.text(seed=seed)
        same(fast(**inputs, labels=labels), plain(**inputs, labels=labels))


def test_shapes_up_and_down(pair: tuple[BertModel, BertModel]) -> None:
    plain, fast = pair
    for batch, length in [(2, 7), (4, 9), (1, 5), (3, 1), (1, 1), (4, 9), (2, 7)]:
        inputs = tiny.text(batch, length)
        same(fast(**inputs), plain(**inputs))


def test_results_are_not_overwritten(pair: tuple[BertModel, BertModel]) -> None:
    plain, fast = pair
    batches = [tiny.text(seed=seed) for seed in range(4)]
    results = [fast(**batch).last_hidden_state for batch in batches]
    for batch, result in zip(batches, results):
        torch.testing.assert_close(result, plain(**batch).last_hidden_state)


def test_pipeline(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "vocabulary", "is", "enough"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    texts = ["a small vocabulary is enough", "a vocabulary", "small is small is small"]
    want = pipeline("feature-extraction", model=tiny.bert(), tokenizer=tokenizer)(texts)
    model = kernl.optimize_model(tiny.bert())
    got = pipeline("feature-extraction", model=model, tokenizer=tokenizer)(texts)
    for one, other in zip(got, want):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
    classify = pipeline("text-classification", model=kernl.optimize_model(tiny.classifier()), tokenizer=tokenizer)
    assert len(classify(texts, batch_size=2)) == 3
    assert model.kernl.report().graphs


def test_twice_is_once() -> None:
    model = kernl.optimize_model(tiny.encoder())
    handle, forward = model.kernl, model.forward
    assert kernl.optimize_model(model).kernl is handle and model.forward is forward
    kernl.optimize_model(model, strict=True)
    assert model.kernl is not handle and model.kernl.options.strict
    kernl.restore_model(model)
    assert not hasattr(model, "kernl")


def test_restore_undoes_everything() -> None:
    model, x = tiny.encoder(), tiny.activations()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    want = model(x)
    kernl.optimize_model(model)
    model(x)
    model(x)
    kernl.restore_model(model)
    after = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert before.keys() == after.keys()
    for path, attributes in before.items():
        assert attributes.keys() == after[path].keys()
        assert all(attributes[name] is after[path][name] for name in attributes)
    assert model.forward.__func__ is tiny.Encoder.forward  # type: ignore[attr-defined]
    same(model(x), want)
    assert kernl.restore_model(model) is model  # once more changes nothing


def test_a_forward_set_after_optimising_survives_restore_and_copies() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    model(x)

    def own(x: torch.Tensor) -> str:
        return "mine"

    model.forward = own  # type: ignore[method-assign]
    assert copy.deepcopy(model)(x) == "mine"
    kernl.restore_model(model)
    assert model(x) == "mine" and "kernl" not in vars(model) and "__getstate__" not in vars(model)


def test_optimising_again_takes_the_forward_set_since() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    plain = model(x)
    inner = tiny.Encoder.forward.__get__(model)
    model.forward = lambda x: 2 * inner(x)  # type: ignore[method-assign]
    kernl.optimize_model(model)
    same(model(x), 2 * plain)
    assert model.kernl.report().graphs


def test_a_forward_set_by_the_user_is_kept() -> None:
    model, x = tiny.encoder(), tiny.activations()
    own = model.forward

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * own(x)

    model.forward = twice  # type: ignore[method-assign,assignment]
    want = model(x)
    kernl.optimize_model(model)
    for _ in range(3):
        same(model(x), want)
    assert kernl.restore_model(model).forward is twice


def test_weights_and_config_are_not_changed() -> None:
    model = tiny.bert()
    weights = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    config = model.config.to_json_string()
    kernl.optimize_model(model)
    for seed in (1, 2):
        model(**tiny.text(seed=seed))
    for name, parameter in model.named_parameters():
        assert parameter is weights[name][0] and torch.equal(parameter, weights[name][1])
    assert model.config.to_json_string() == config


def test_not_a_submodule_and_not_in_the_state_dict() -> None:
    model = tiny.encoder()
    names, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    kernl.optimize_model(model)
    assert list(model.state_dict()) == names and [name for name, _ in model.named_modules()] == modules


def test_signature() -> None:
    plain, fast = tiny.bert(), kernl.optimize_model(tiny.bert())
    assert inspect.signature(fast.forward) == inspect.signature(plain.forward)
    assert fast.forward.__name__ == "forward" and fast.forward.__doc__ == plain.forward.__doc__
    with pytest.raises(TypeError, match="no_such_argument"):
        kernl.optimize_model(tiny.encoder())(tiny.activations(), no_such_argument=1)


def test_deepcopy_is_plain_and_independent() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    want = model(x)
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert not hasattr(copied, "kernl") and "forward" not in vars(copied) and "__getstate__" not in vars(copied)
        same(copied(x), want)
    copied = copy.deepcopy(model)
    copied.scale.zero_()
    assert copied(x).abs().max() == 0
    same(model(x), want)
    kernl.optimize_model(copied)
    assert copied(x).abs().max() == 0 and copied.kernl is not model.kernl


def test_pickle_and_save() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    want = model(x)
    restored = pickle.loads(pickle.dumps(model))
    assert vars(restored).keys() == vars(tiny.encoder()).keys()
    same(restored(x), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    same(torch.load(file, weights_only=False)(x), want)
    same(model(x), want)


def test_save_pretrained(tmp_path: Path) -> None:
    model, inputs = kernl.optimize_model(tiny.bert()), tiny.text()
    want = model(**inputs)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["BertModel"]
    same(BertModel.from_pretrained(tmp_path).eval()(**inputs), want)


def test_replicas_of_data_parallel_are_plain() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    model(x)
    replica = model._replicate_for_data_parallel()
    assert not hasattr(replica, "kernl") and "forward" not in vars(replica)
    replica._parameters = model._parameters
    replica._buffers["scale"] = torch.zeros_like(model.scale)
    assert replica(x).abs().max() == 0 and model(x).abs().max() > 0


def test_freed_like_any_model() -> None:
    model = kernl.optimize_model(tiny.encoder())
    for _ in range(2):
        model(tiny.activations())
    gone, weight = weakref.ref(model), weakref.ref(model.blocks[0].up.weight)
    handle = model.kernl
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None and weight() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError):
        handle.verify(tiny.activations())


def test_disabled() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    with kernl.disabled():
        model(x)
        assert not model.kernl.report().graphs
    model(x)
    assert len(model.kernl.report().graphs) == 1
    calls = model.kernl.report().calls
    before = calls.direct, calls.guarded
    with kernl.disabled():
        model(x)
        seen: list[Any] = []
        other = threading.Thread(target=lambda: seen.append(model(x)))
        other.start()
        other.join()
    # Another thread is not disabled.
    assert (calls.direct + calls.guarded) == sum(before) + 1 and len(seen) == 1


def test_moves_and_casts() -> None:
    plain, fast = tiny.encoder(), kernl.optimize_model(tiny.encoder())
    x = tiny.activations()
    for _ in range(2):
        same(fast(x), plain(x))
    plain.double()
    fast.double()
    for _ in range(2):
        same(fast(x.double()), plain(x.double()))
    plain.bfloat16().to("cpu")
    fast.bfloat16().to("cpu")
    for _ in range(2):
        same(fast(x.bfloat16()), plain(x.bfloat16()))


def test_hooks_of_the_model_run() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    want = model(x)
    handle = model.register_forward_hook(lambda module, args, output: output + 1)
    for _ in range(2):
        same(model(x), want + 1)
    handle.remove()
    same(model(x), want)


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    model = kernl.optimize_model(tiny.bert())
    result = model.kernl.verify(tiny.text())
    assert result and set(result.outputs) == {"last_hidden_state", "pooler_output"}
    printed = capsys.readouterr().out
    assert "last_hidden_state" in printed and "within" in printed
    assert model.kernl.verify(tuple(tiny.text().values()), verbose=False)
    assert not capsys.readouterr().out


def test_verify_finds_a_wrong_result() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    model(x)
    graph = model.kernl._door.graphs[0]
    right = graph._function
    graph._function = lambda *inputs: tuple(value * 1.001 for value in right(*inputs))
    result = model.kernl.verify(x, verbose=False)
    assert not result and "EXCEEDS" in str(result) and "mismatches" in str(result)


def test_warmup() -> None:
    model = kernl.optimize_model(tiny.bert())
    model.kernl.warmup([(1, 4), (2, 8), {"input_ids": torch.ones(3, 5, dtype=torch.long)}], progress=False)
    calls = model.kernl.report().calls
    guarded = calls.guarded
    inputs = tiny.text(2, 8)
    model(**inputs)
    assert calls.guarded == guarded and calls.direct > 0
    unknown = kernl.optimize_model(tiny.encoder())
    with pytest.raises(ValueError, match="inputs of a Encoder cannot be guessed"):
        unknown.kernl.warmup([(2, 3)], progress=False)
    with pytest.raises(TypeError, match="shapes holds 'text'"):
        model.kernl.warmup(["text"], progress=False)


def test_verify_says_when_a_model_cannot_run_in_float64() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.float())

    model = kernl.optimize_model(Casting())
    with pytest.raises(ValueError, match="compares with the model in float64, which the Casting cannot run in"):
        model.kernl.verify(torch.randn(2, 8), verbose=False)


def test_always_on_the_cpu_says_why_it_cannot() -> None:
    model = kernl.optimize_model(tiny.encoder(), cuda_graph="always")
    with pytest.raises(CannotCapture, match=r"^cuda_graph=.always., but no CUDA graph can be captured: inputs are on"):
        model(tiny.activations())


def test_refresh_sees_attributes() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    want = model(x)
    model(x)
    model.factor = 4.0
    model.kernl.refresh()
    for _ in range(2):
        same(model(x), 2 * want)


def test_memory_and_release_without_a_gpu() -> None:
    model = kernl.optimize_model(tiny.encoder())
    model(tiny.activations())
    memory = model.kernl.memory()
    if not torch.cuda.is_available():
        assert memory == {"graphs": [], "pool": 0, "static_inputs": 0, "generation": 0}
    model.kernl.release()
    model(tiny.activations())


def test_profile_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    forget_warnings()
    model = kernl.optimize_model(tiny.encoder())
    with pytest.warns(KernlWarning, match="there is no GPU"):
        model.kernl.report(profile=tiny.activations())


def test_repr() -> None:
    model = kernl.optimize_model(tiny.encoder())
    assert repr(model.kernl) == "<kernl: Encoder, 0 graphs, 0 direct calls; see .report()>"


@pytest.mark.parametrize("thing", ["bert", None, BertModel])
def test_only_modules(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"accepted is an nn\.Module"):
        kernl.optimize_model(thing)
    with pytest.raises(TypeError, match=r"accepted is an nn\.Module"):
        kernl.restore_model(thing)


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="did you mean 'lowering'"):
        kernl.optimize_model(tiny.encoder(), lowerin="eager")
    with pytest.raises(ValueError, match="no pattern is named 'atention'"):
        kernl.optimize_model(tiny.encoder(), patterns_disabled=["atention"])


def test_compiled_models_are_refused() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        kernl.optimize_model(torch.compile(tiny.encoder()))
    model = tiny.encoder()
    model.compile()
    with pytest.raises(ValueError, match="compiled already"):
        kernl.optimize_model(model)
    model = tiny.encoder()
    model.forward = torch.compile(model.forward)
    with pytest.raises(ValueError, match="compiled already"):
        kernl.optimize_model(model)
    model = tiny.bert()
    model.encoder = torch.compile(model.encoder)
    with pytest.raises(ValueError, match=r"module 'encoder', a OptimizedModule, is compiled already"):
        kernl.optimize_model(model)
    model = tiny.bert()
    model.encoder.layer[1].compile()
    with pytest.raises(ValueError, match=r"module 'encoder\.layer\.1', a BertLayer, is compiled already"):
        kernl.optimize_model(model)
    with pytest.raises(ValueError, match="TorchScript"):
        kernl.optimize_model(torch.jit.trace(tiny.encoder(), tiny.activations()))


def test_quantised_models_are_refused() -> None:
    model = tiny.bert()
    model.config.quantization_config = {"load_in_8bit": True}
    with pytest.raises(ValueError, match="quantised"):
        kernl.optimize_model(model)

    class Int4Tensor(torch.Tensor):
        pass

    linear = nn.Sequential(nn.Linear(4, 4))
    linear[0].weight = nn.Parameter(torch.ones(4, 4).as_subclass(Int4Tensor))
    with pytest.raises(ValueError, match=r"'0\.weight' is a Int4Tensor"):
        kernl.optimize_model(linear)


def test_offloaded_and_split_models_are_refused() -> None:
    model = tiny.bert()
    model.encoder.layer[0]._hf_hook = object()
    with pytest.raises(ValueError, match=r"'encoder\.layer\.0' has a hook"):
        kernl.optimize_model(model)
    model = tiny.bert()
    model.hf_device_map = {"embeddings": 0, "encoder": "cpu"}
    with pytest.raises(ValueError, match="split over several devices"):
        kernl.optimize_model(model)
    with torch.device("meta"):
        empty = tiny.encoder()
    with pytest.raises(ValueError, match="no weights yet"):
        kernl.optimize_model(empty)


def test_two_models_of_one_class() -> None:
    one, other = kernl.optimize_model(tiny.encoder(0)), kernl.optimize_model(tiny.encoder(1))
    x = tiny.activations()
    for _ in range(2):
        same(one(x), tiny.encoder(0)(x))
        same(other(x), tiny.encoder(1)(x))
    assert len(one.kernl.report().graphs) == len(other.kernl.report().graphs) == 1


def test_an_optimised_model_inside_another() -> None:
    inner, outer = tiny.encoder(), tiny.encoder(1)
    want = outer(inner(tiny.activations()))
    whole = kernl.optimize_model(nn.Sequential(kernl.optimize_model(inner), outer))
    for _ in range(2):
        same(whole(tiny.activations()), want)
    assert not inner.kernl.report().graphs  # it became part of the outer graph


def test_export_and_torch_compile_of_an_optimised_model() -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    want = model(x)
    same(torch.compile(lambda x: model(x), backend="eager")(x), want)
    same(torch.export.export(model, (x,)).module()(x), want)


def test_threads() -> None:
    plain, fast = tiny.encoder(), kernl.optimize_model(tiny.encoder())
    batches = [tiny.activations(batch, length, seed) for seed, (batch, length) in enumerate([(2, 3), (3, 4)] * 4)]
    wants = [plain(batch) for batch in batches]
    failures: list[Any] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(5):
                    for batch, want in zip(batches, wants):
                        same(fast(batch), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_users_compiler_settings_come_back() -> None:
    names = ("specialize_float", "recompile_limit", "fail_on_recompile_limit_hit", "skip_nnmodule_hook_guards")
    before = [getattr(torch._dynamo.config, name) for name in names]
    model = kernl.optimize_model(tiny.encoder())
    threads = [threading.Thread(target=model, args=(tiny.activations(2, length),)) for length in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert [getattr(torch._dynamo.config, name) for name in names] == before


def test_a_failure_of_the_compiler_leaves_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("the compiler is broken")

    monkeypatch.setattr("kernl.front_door.compile_graph", fail)
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    with pytest.warns(KernlWarning, match="Encoder as plain PyTorch: RuntimeError: the compiler is broken"):
        same(model(x), tiny.encoder()(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernlWarning)
        same(model(x), tiny.encoder()(x))
    assert "the compiler is broken" in str(model.kernl.report()) and model.kernl.report().calls.plain == 1
    with pytest.raises(Exception, match="the compiler is broken"):
        kernl.optimize_model(tiny.encoder(), strict=True)(x)


def test_the_recompile_limit_is_ours_and_reported() -> None:
    limit = torch._dynamo.config.recompile_limit
    model = kernl.optimize_model(tiny.encoder(blocks=1), dynamic=False, recompile_limit=10)
    plain = tiny.encoder(blocks=1)
    for length in range(2, 12):
        same(model(tiny.activations(1, length)), plain(tiny.activations(1, length)))
    assert len(model.kernl.report().graphs) == 10  # more than TorchDynamo's own limit
    with pytest.warns(KernlWarning, match="limit of 10 compiled graphs is reached"):
        same(model(tiny.activations(1, 12)), plain(tiny.activations(1, 12)))
    assert "limit of 10" in str(model.kernl.report())
    same(model(tiny.activations(1, 5)), plain(tiny.activations(1, 5)))
    assert torch._dynamo.config.recompile_limit == limit


def test_floats_of_modules_stay_numbers() -> None:
    model = kernl.optimize_model(tiny.encoder(), dynamic=True)
    for length in (3, 4, 6):
        same(model(tiny.activations(2, length)), tiny.encoder()(tiny.activations(2, length)))
    report = model.kernl.report()
    assert report.matched("layer_norm") + report.matched("add_layer_norm") == 2
    assert len(model.kernl.report().graphs) == 1


def test_models_that_are_refused_with_a_reason() -> None:
    named = nn.Module()
    named.kernl = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="attribute `kernl` of its own"):
        kernl.optimize_model(named)
    with pytest.raises(ValueError, match="lazy weights without a shape"):
        kernl.optimize_model(nn.Sequential(nn.LazyLinear(3)))


def test_forward_alone_says_that_its_model_is_gone() -> None:
    forward = kernl.optimize_model(nn.Linear(2, 2)).forward
    gc.collect()
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(torch.ones(1, 2))


class _Counts(nn.Module):
    """Writes to a buffer and to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.add_(1))


def test_verify_and_warmup_leave_buffers_and_inputs_alone() -> None:
    model, x = kernl.optimize_model(_Counts().train()), torch.randn(5, 4)
    before = x.clone()
    with torch.no_grad():
        assert model.kernl.verify(x, verbose=False)
        model.kernl.warmup([x], progress=False)
    assert torch.equal(x, before)
    assert model.norm.num_batches_tracked == 0 and model.norm.running_mean.abs().max() == 0
