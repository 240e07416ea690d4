"""Options are checked where they are given, and a mistake is answered with what is accepted."""

from __future__ import annotations

import dataclasses

import pytest

from kernl.options import Options


def test_defaults() -> None:
    options = Options()
    assert options.lowering == "auto" and options.cuda_graph == "auto" and options.guards == "fast"
    assert not options.strict and options.patterns_disabled == () and options.changed() == {}


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("eager")  # type: ignore[misc]


def test_unknown_option_names_the_known_ones_and_the_closest() -> None:
    with pytest.raises(TypeError, match=r"'cuda_graphs'.*did you mean 'cuda_graph'.*max_graphs"):
        Options.from_kwargs(cuda_graphs="never")
    with pytest.raises(TypeError, match="unknown option 'zzz'; options are lowering"):
        Options.from_kwargs({"zzz": 1})


def test_dict_and_keywords_together() -> None:
    options = Options.from_kwargs({"strict": True}, lowering="eager")
    assert options.strict and options.lowering == "eager"
    assert options.changed() == {"strict": True, "lowering": "eager"}
    assert Options.from_kwargs() == Options.from_kwargs(None) == Options()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lowering", "inducter", "did you mean 'inductor'"),
        ("cuda_graph", True, "'auto', 'always', 'never'"),
        ("guards", "slow", "'fast', 'full'"),
    ],
)
def test_choices(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Options.from_kwargs({name: value})
    assert f"option {name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("static_outputs", "yes"),
        ("deterministic", None),
        ("dynamic", 1),
        ("dynamic", "auto"),
        ("max_graphs", 2.0),
        ("max_graphs", True),
        ("recompile_limit", "8"),
        ("patterns_disabled", 3),
        ("patterns_disabled", [3]),
    ],
)
def test_types(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"option {name}="):
        Options.from_kwargs({name: value})


@pytest.mark.parametrize("name", ["max_graphs", "recompile_limit"])
def test_counts_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match="from 1 up"):
        Options.from_kwargs({name: 0})


def test_disabled_patterns() -> None:
    assert Options(patterns_disabled="dropout").patterns_disabled == ("dropout",)  # type: ignore[arg-type]
    assert Options(patterns_disabled=["a", "b"]).patterns_disabled == ("a", "b")  # type: ignore[arg-type]
    options = Options(patterns_disabled=("dropuot",))
    with pytest.raises(ValueError, match=r"'dropuot'; did you mean 'dropout'\?; patterns are attention, dropout"):
        options.check_patterns(["dropout", "attention"])
    Options(patterns_disabled=("dropout",)).check_patterns(["dropout", "attention"])


def test_every_option_is_documented() -> None:
    text = Options.__doc__ or ""
    assert all(f"{field.name}:" in text for field in dataclasses.fields(Options))
