"""The graph engine: an operation table, a pattern language, a registry of patterns, rewriting with legality checks.

Knows torch.fx only; which computations exist and what replaces them is `kernl.patterns`' business.
"""

from kernl.graph.canonical import canonicalize
from kernl.graph.match import Emitted, Match, Refused, emit, require
from kernl.graph.pattern import ANY, Pattern, anything, either, op, scalar, scaled, through, var
from kernl.graph.registry import Registry, default_registry, register_pattern
from kernl.graph.rewrite import PatternReport, Refusal, RewriteReport, rewrite
from kernl.graph.table import Call, call_of, value_of

__all__ = [
    "ANY",
    "Call",
    "Emitted",
    "Match",
    "Pattern",
    "PatternReport",
    "Refusal",
    "Refused",
    "Registry",
    "RewriteReport",
    "anything",
    "call_of",
    "canonicalize",
    "default_registry",
    "either",
    "emit",
    "op",
    "register_pattern",
    "require",
    "rewrite",
    "scalar",
    "scaled",
    "through",
    "value_of",
    "var",
]
