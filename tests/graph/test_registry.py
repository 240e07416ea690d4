"""Registering patterns: order, switching off, and errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

import kernl
from kernl.graph import Registry, default_registry, op, register_pattern, var


def nothing(x: Any) -> None: ...


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register("low", op("exp", var("x")), nothing, priority=-1)
    registry.register("first", op("exp", var("x")), nothing)
    registry.register("second", op("exp", var("x")), nothing)
    registry.register("high", op("exp", var("x")), nothing, priority=5)
    return registry


def test_priority_then_order_of_registration(registry: Registry) -> None:
    assert [pattern.name for pattern in registry.active()] == ["high", "first", "second", "low"]
    assert [pattern.name for pattern in registry] == ["high", "first", "second", "low"]


def test_switching_off(registry: Registry) -> None:
    registry.disable("high", "low")
    assert not registry.enabled("high") and registry.enabled("first")
    assert [pattern.name for pattern in registry.active(without=["second"])] == ["first"]
    registry.enable("high")
    assert [pattern.name for pattern in registry.active()] == ["high", "first", "second"]
    registry.unregister("first")
    assert "first" not in registry and registry.names() == ["low", "second", "high"]


def test_unknown_names_are_named(registry: Registry) -> None:
    for call in (
        registry.disable,
        registry.enable,
        registry.enabled,
        registry.unregister,
        lambda name: registry.active([name]),
    ):
        with pytest.raises(ValueError, match="'middle'; there are first, high, low, second"):
            call("middle")


def test_where_a_pattern_was_written() -> None:
    registry = Registry()

    @register_pattern("decorated", op("exp", var("x")), registry=registry)
    def rewrite(x: Any) -> None: ...

    register_pattern("called", op("exp", var("x")), nothing, registry=registry)
    for pattern in registry:
        name, line = pattern.where.rsplit(":", 1)
        assert name == "graph/test_registry.py" and int(line) > 1
    assert len({pattern.where for pattern in registry}) == 2


def test_a_duplicate_says_where_the_first_one_is(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"'low' is registered already, at graph/test_registry.py:\d+"):
        registry.register("low", op("exp", var("x")), nothing)


def test_bad_patterns_and_rewrites() -> None:
    registry = Registry()
    with pytest.raises(TypeError, match="pattern is a str"):
        registry.register("p", "exp", nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rewrite is a int"):
        registry.register("p", op("exp", var("x")), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="could match any node"):
        registry.register("p", var("x"), nothing)
    with pytest.raises(ValueError, match="takes y, z, but the pattern binds x"):
        registry.register("p", op("exp", var("x")), lambda y, z: None)
    assert not registry.names()


def test_the_public_call_registers_in_the_default_registry() -> None:
    kernl.register_pattern("of_a_user", op("exp", var("x")), nothing)
    try:
        assert "of_a_user" in default_registry
    finally:
        default_registry.unregister("of_a_user")
