"""scaled_dot_product_attention while a model is traced for every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kernl.sdpa_shape import sdpa_of_any_batch


def traced_guards(batch: int, *, on: bool, **options: bool) -> tuple[torch.Tensor, list[str]]:
    """The result for a symbolic batch and length with a mask, and the guards that it took."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        x = mode.from_tensor(torch.randn(batch, 4, 16, 8), symbolic_context=context)
        mask = torch.ones(())
        with mode, enable_python_dispatcher(), sdpa_of_any_batch(on), torch.inference_mode():
            mask = torch.ones(x.shape[0], 1, x.shape[2], x.shape[2], dtype=torch.bool, device="cpu")
            result = F.scaled_dot_product_attention(x, x, x, attn_mask=mask, **options)
    return result, [str(guard.expr) for guard in env.guards]


@pytest.mark.parametrize("batch", [1, 3])
def test_no_guard_on_the_batch(batch: int) -> None:
    result, guards = traced_guards(batch, on=True)
    assert guards == [] and len(result.shape[0].node.expr.free_symbols) == 1
    assert result.transpose(1, 2).is_contiguous()
    plain, _ = traced_guards(batch, on=False)
    assert [int(size) for size in plain.shape] == [int(size) for size in result.shape]


def test_gradients_and_other_batches_get_pytorchs_answer() -> None:
    query, key = torch.empty(2, 4, 5, 8), torch.empty(1, 4, 7, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher(), sdpa_of_any_batch():
        query, key = mode.from_tensor(query), mode.from_tensor(key)
        with torch.no_grad():
            assert F.scaled_dot_product_attention(query, key, key).shape == (2, 4, 5, 8)  # broadcast
        leaf = query.detach().requires_grad_()
        assert F.scaled_dot_product_attention(leaf, leaf, leaf).requires_grad


def test_other_tracers_take_it_apart() -> None:
    x = torch.randn(2, 4, 5, 8)
    with sdpa_of_any_batch(), torch.no_grad():
        traced = make_fx(lambda x: F.scaled_dot_product_attention(x, x, x), tracing_mode="fake")(x)
    assert "empty" not in traced.code
    torch.testing.assert_close(traced(x), F.scaled_dot_product_attention(x, x, x))


def test_values_are_never_taken_from_it() -> None:
    x = torch.randn(2, 4, 5, 8)
    expected = F.scaled_dot_product_attention(x, x, x)
    with sdpa_of_any_batch(), enable_python_dispatcher():
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), expected)


@pytest.mark.parametrize("shape", [(5, 3), (3, 6), (1, 1, 5, 7), (3, 1, 5, 6), (2, 3, 5, 6)])
def test_masks_that_do_not_fit_are_pytorchs_errors(shape: tuple[int, ...]) -> None:
    query, key = torch.empty(2, 4, 5, 8), torch.empty(2, 4, 6, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher(), torch.no_grad():
        query, key = mode.from_tensor(query), mode.from_tensor(key)
        mask = torch.ones(shape, dtype=torch.bool)
        with sdpa_of_any_batch(), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_masks_of_other_types_are_pytorchs_errors(dtype: torch.dtype) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher(), torch.no_grad():
        x = mode.from_tensor(torch.empty(2, 4, 5, 8))
        with sdpa_of_any_batch(), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5, dtype=dtype))


def test_strides_where_dimensions_differ() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher(), torch.no_grad():
        x, value = mode.from_tensor(torch.empty(2, 4, 5, 8)), mode.from_tensor(torch.empty(2, 4, 5, 6))
        expected = F.scaled_dot_product_attention(x, x, value).stride()
        with sdpa_of_any_batch():
            assert F.scaled_dot_product_attention(x, x, value).stride() == expected
