"""Is a result as precise as it can be asked to be? Error budgets for ops, kernels and whole models.

A fixed tolerance is either too tight for one shape or blind on another. The budget here comes from the computation
itself: with r the result in float64, b the same computation in plain PyTorch at the precision under test (the
baseline) and a the result under test,

    element by element    |a - r|   <=  2 max|b - r|  +  eps max(|r|, rms(r))
    over the tensor       ||a - r|| <=  2 ||b - r||   +  eps ||r||                (Euclidean norms)

where eps is one rounding step of a's type and rms(r) the root mean square of r: what is left of a sum of larger terms
carries the rounding of those terms. The first form sees a single wrong element, the second a small error that is
everywhere. Both must hold. The maximum over a handful of elements is a matter of luck: compare a hundred or more.

    exact = reference(x.double())
    assert_within_budget(op(x), exact, reference(x), name="layer_norm")

A NaN or an infinity must be where float64, rounded to the type under test, has it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ErrorReport", "assert_within_budget", "error_report", "interpreted_kernels", "poisoned"]


@dataclass(frozen=True)
class ErrorReport:
    """How far a result is from float64, and how far it may be.

    within_budget: the verdict.
    max_abs, max_rel: largest absolute and relative difference from float64 (finite elements; relative to |reference|).
    norm: ||actual - reference||; allowed_norm: its budget.
    allowed_abs: the smallest element-wise budget of the tensor, 2 max|baseline - reference| without the rounding step.
    mismatches: elements outside the element-wise budget, or non-finite where the reference is not (or the reverse).
    elements: elements in all.
    text: the whole story, several lines.
    """

    within_budget: bool
    max_abs: float
    max_rel: float
    norm: float
    allowed_abs: float
    allowed_norm: float
    mismatches: int
    elements: int
    text: str


def error_report(
    actual: torch.Tensor, reference64: torch.Tensor, baseline: torch.Tensor, *, name: str = ""
) -> ErrorReport:
    """Compare `actual` with the float64 result within the budget the baseline sets (see the module's docstring).

    actual: result under test, any dtype. Integers and bools must equal the reference.
    reference64: the same computation in float64 (integers: the expected values), same shape.
    baseline: the same computation in plain PyTorch in the dtype of `actual`, same shape and dtype as `actual`.

    Raises ValueError when shapes, or the dtypes of actual and baseline, differ.
    """
    label = name or "result"
    if actual.shape != reference64.shape or baseline.shape != reference64.shape:
        raise ValueError(
            f"{label}: shapes differ: actual {list(actual.shape)}, reference64 {list(reference64.shape)}, "
            f"baseline {list(baseline.shape)}"
        )
    if actual.dtype != baseline.dtype:
        raise ValueError(f"{label}: actual is {actual.dtype}, baseline {baseline.dtype}; both need the same dtype")
    actual, reference64, baseline = (tensor.detach().to("cpu") for tensor in (actual, reference64, baseline))
    if not actual.is_floating_point():
        return _exact_report(actual, reference64, label)
    if reference64.dtype != torch.float64:
        raise ValueError(f"{label}: reference64 must be float64, got {reference64.dtype}")

    epsilon = torch.finfo(actual.dtype).eps
    smallest_step = torch.finfo(actual.dtype).tiny * epsilon  # spacing of the subnormal numbers
    rounded = reference64.to(actual.dtype).double()
    value, base = actual.double(), baseline.double()

    # Elements that float64 itself has as NaN or infinity, or that overflow the type under test.
    special = ~rounded.isfinite()
    finite = ~special & value.isfinite()
    misplaced = (special & ~_same_special(value, rounded)) | (~special & ~value.isfinite())

    magnitude = torch.where(special, 0.0, reference64.abs())
    difference = torch.where(finite, (value - reference64).abs(), 0.0)
    baseline_error = torch.where(~special & base.isfinite(), (base - reference64).abs(), 0.0)
    allowed_abs = 2 * _max(baseline_error)
    typical = float(magnitude.norm()) / math.sqrt(max(magnitude.numel(), 1))
    too_far = finite & (difference > allowed_abs + epsilon * magnitude.clamp_min(typical) + smallest_step)
    wrong = too_far | misplaced

    norm = float(difference.norm())
    allowed_norm = 2 * float(baseline_error.norm()) + epsilon * float(magnitude.norm()) + smallest_step
    relative = torch.where(magnitude > 0, difference / magnitude.clamp_min(smallest_step), 0.0)
    mismatches = int(wrong.sum())
    within = mismatches == 0 and norm <= allowed_norm

    lines = [
        f"{label}: {'within' if within else 'exceeds'} the error budget "
        f"({str(actual.dtype).removeprefix('torch.')}, shape {list(actual.shape)})"
    ]
    if difference.numel():
        lines += [
            f"  max absolute difference  {_max(difference):.3e} at {_place(difference)}; "
            f"allowed {allowed_abs:.3e} + {epsilon:.1e} max(|reference|, {typical:.2g})",
            f"  max relative difference  {_max(relative):.3e} at {_place(relative)}",
            f"  norm of the difference   {norm:.3e}; allowed {allowed_norm:.3e}",
        ]
    if mismatches:
        lines += _mismatch_lines(wrong, actual, reference64)
    nans = int((value.isnan() & ~rounded.isnan()).sum())
    if nans:
        lines.append(f"  NaN                      {nans} where the reference has none")
    return ErrorReport(
        within_budget=within,
        max_abs=_max(difference),
        max_rel=_max(relative),
        norm=norm,
        allowed_abs=allowed_abs,
        allowed_norm=allowed_norm,
        mismatches=mismatches,
        elements=actual.numel(),
        text="\n".join(lines),
    )


def assert_within_budget(
    actual: torch.Tensor | Sequence[torch.Tensor],
    reference64: torch.Tensor | Sequence[torch.Tensor],
    baseline: torch.Tensor | Sequence[torch.Tensor],
    *,
    name: str = "",
) -> None:
    """Raise AssertionError, with differences and places, unless `actual` is within its error budget.

    Takes tensors, or sequences of tensors compared one by one. See `error_report` for the arguments.
    """
    if isinstance(actual, torch.Tensor):
        assert isinstance(reference64, torch.Tensor) and isinstance(baseline, torch.Tensor)
        report = error_report(actual, reference64, baseline, name=name)
        if not report.within_budget:
            raise AssertionError(report.text)
        return
    if not len(actual) == len(reference64) == len(baseline):
        raise ValueError(
            f"{name or 'result'}: {len(actual)} actual, {len(reference64)} reference64 and {len(baseline)} baseline "
            "tensors; the numbers must agree"
        )
    for position, triple in enumerate(zip(actual, reference64, baseline)):
        assert_within_budget(*triple, name=f"{name or 'result'}[{position}]")


def interpreted_kernels() -> contextlib.AbstractContextManager[None]:
    """Within this context ops given CPU tensors run their Triton kernels in Triton's interpreter.

    Without it the CPU path is the reference in plain PyTorch. Raises RuntimeError unless TRITON_INTERPRET=1 was set
    before kernl was imported.
    """
    from kernl.ops import common

    return common.interpreted_kernels()


def poisoned() -> contextlib.AbstractContextManager[None]:
    """Within this context outputs of kernl's ops are allocated full of NaN, so that an unwritten element shows."""
    from kernl.ops import common

    return common.poisoned()


def _exact_report(actual: torch.Tensor, reference: torch.Tensor, label: str) -> ErrorReport:
    wrong = actual != reference
    mismatches = int(wrong.sum())
    difference = (actual.double() - reference.double()).abs()
    lines = [f"{label}: {'differs from' if mismatches else 'equals'} the reference ({actual.dtype})"]
    if mismatches:
        lines += _mismatch_lines(wrong, actual, reference)
    return ErrorReport(
        within_budget=mismatches == 0,
        max_abs=_max(difference),
        max_rel=0.0,
        norm=float(difference.norm()),
        allowed_abs=0.0,
        allowed_norm=0.0,
        mismatches=mismatches,
        elements=actual.numel(),
        text="\n".join(lines),
    )


def _same_special(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (value == expected) | (value.isnan() & expected.isnan())


def _max(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


def _place(tensor: torch.Tensor) -> list[int]:
    return _unravel(int(tensor.argmax()), tensor.shape)


def _unravel(flat: int, shape: Sequence[int]) -> list[int]:
    place = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        place.append(position)
    return place[::-1]


def _mismatch_lines(wrong: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor) -> list[str]:
    flat = wrong.flatten().nonzero().flatten()
    shape = wrong.shape
    first, last = int(flat[0]), int(flat[-1])
    share = 100 * len(flat) / max(math.prod(shape), 1)
    lines = [
        f"  mismatches               {len(flat)} of {wrong.numel()} ({share:.3g} %), "
        f"from {_unravel(first, shape)} to {_unravel(last, shape)}"
    ]
    for position in flat[:3].tolist():
        got, want = actual.flatten()[position].item(), reference.flatten()[position].item()
        lines.append(f"    at {_unravel(position, shape)}: got {got:.8g}, reference {want:.8g}")
    return lines
