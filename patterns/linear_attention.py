"""Linear attention, written with einsum as in "Transformers are RNNs" (Katharopoulos et al. 2020).

    KV     = einsum("nshd,nshm->nhmd", K, V)
    Z      = 1 / (einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + eps)
    output = einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z)

and the causal form, which keeps a state per position:

    KV     = einsum("nshd,nshm->nshmd", K, V).cumsum(dim=1)
    Z      = 1 / (einsum("nlhd,nlhd->nlh", Q, K.cumsum(dim=1)) + eps)
    output = einsum("nlhd,nlhmd,nlh->nlhm", Q, KV, Z)

Q and K are whatever stands there. Where both are elu(x) + 1 or relu(x) of something, and nothing else reads them, that
is fused as well. A product with a mask of the keys stays outside: which keys it hides is not known here.

Seen in fast-transformers' LinearAttention and in what descends from it (letters in any order, "..." for batch and
heads, operands in any order).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph import Emitted, Match, anything, call_of, emit, op, register_pattern, require, value_of
from kernl.patterns.common import kernl_op, require_kernel_tensors

MAX_DIM = 256


@dataclass(frozen=True)
class Einsum:
    """A read einsum: its operands with the letter of each of their dimensions, and those of the result."""

    operands: tuple[Node, ...]
    letters: tuple[str, ...]
    output: str


@dataclass
class Parts:
    """What an attention is made of. Letters stand for the dimensions of the last einsum."""

    query: Node
    query_letters: str
    key: Node
    key_letters: str  # with `s` for the position
    value: Node
    value_letters: str
    output_letters: str
    is_causal: bool
    epsilon: float
    inside: list[Node] = field(default_factory=list)


@register_pattern(
    "linear_attention",
    op("einsum", equation=anything("equation"), operands=anything("operands")),
    priority=48,
)
def linear_attention(match: Match, equation: Any, operands: Any) -> Emitted | None:
    parts = _read(match.root)
    if parts is None:
        return None
    match.include(parts.inside)
    for node in parts.inside:
        require(not match.users_outside(node), "a normaliser or a state is returned, or used elsewhere")
    query, key, name = _feature_map(match, parts.query, parts.key)
    require_kernel_tensors(query, key, parts.value, autocast=match.autocast)

    position, dim, channel = "l", "d", "m"
    batch = [letter for letter in parts.query_letters if letter not in (position, dim)]
    require(len(batch) == 2, f"{len(batch)} dimensions for batch and heads (accepted: two)")
    for what, node, letters, letter in (
        ("head_dim", query, parts.query_letters, dim),
        ("value head_dim", parts.value, parts.value_letters, channel),
    ):
        size = value_of(node).shape[letters.index(letter)]
        require(not (type(size) is int and size > MAX_DIM), f"{what} {size} (accepted: up to {MAX_DIM})")
    if parts.is_causal:
        lengths = [
            value_of(node).shape[letters.index(letter)]
            for node, letters, letter in ((query, parts.query_letters, "l"), (key, parts.key_letters, "s"))
        ]
        require(bool(statically_known_true(lengths[0] == lengths[1])), "lengths are not known to be equal")
    arranged = [
        _permuted(node, letters, [*batch, *rest])
        for node, letters, rest in (
            (query, parts.query_letters, (position, dim)),
            (key, parts.key_letters, ("s", dim)),
            (parts.value, parts.value_letters, ("s", channel)),
        )
    ]
    arguments = (None, None, None, name, parts.is_causal, True, parts.epsilon, "auto")
    output = emit(kernl_op("linear_attention"), *arranged, *arguments)[0]
    result = _permuted(output, "".join([*batch, position, channel]), list(parts.output_letters))
    assert isinstance(result, Emitted)
    return result


def _permuted(node: Node | Emitted, letters: str, wanted: list[str]) -> Node | Emitted:
    order = [letters.index(letter) for letter in wanted]
    return node if order == sorted(order) else emit(torch.permute, node, order)


# Reading the formula


def _read(root: Node) -> Parts | None:
    """From the last einsum backwards; None when this is no linear attention."""
    last = _einsum(root)
    if last is None or len(last.operands) != 3:
        return None
    for state_place in range(3):
        for normalizer_place in range(3):
            if normalizer_place != state_place:
                query_place = 3 - state_place - normalizer_place
                parts = _read_as(last, query_place, state_place, normalizer_place)
                if parts is not None:
                    return parts
    return None


def _read_as(last: Einsum, query_place: int, state_place: int, normalizer_place: int) -> Parts | None:
    query = last.operands[query_place]
    query_letters, state_letters, normalizer_letters = (
        last.letters[place] for place in (query_place, state_place, normalizer_place)
    )
    # By what they share: d is summed, m comes from the state, all others are in the normaliser.
    summed = set(query_letters) & set(state_letters) - set(last.output)
    channels = set(state_letters) - set(query_letters)
    if len(summed) != 1 or len(channels) != 1 or set(normalizer_letters) != set(query_letters) - summed:
        return None
    (dim,), (channel,) = summed, channels
    if set(last.output) != set(normalizer_letters) | channels:
        return None
    positions = set(query_letters) - set(state_letters) - summed
    inside: list[Node] = []

    state = last.operands[state_place]
    product, cumulated = _einsum(state), None
    call = call_of(state)
    if call is not None and call.op == "cumsum":
        cumulated, product = call["dim"], _einsum(call["input"])
        inside.append(state)
        state = call["input"]
    if product is None or len(product.operands) != 2 or len(product.output) != len(state_letters):
        return None
    inside.append(state)
    if cumulated is None and len(positions) == 1:
        (position,) = positions
    elif cumulated is not None and not positions and type(cumulated) is int:
        position = state_letters[cumulated]
    else:
        return None
    is_causal = cumulated is not None
    # Letters of the product of keys and values, as the last einsum calls them; s is the position of a key.
    names = dict(zip(product.output, state_letters))
    if is_causal:
        names[product.output[cumulated]] = "s"  # type: ignore[index]
    unnamed = {letter for letters in product.letters for letter in letters if letter not in names}
    if len(unnamed) != (0 if is_causal else 1):
        return None
    names |= dict.fromkeys(unnamed, "s")
    renamed = ["".join(names[letter] for letter in letters) for letters in product.letters]
    batch = set(query_letters) - {dim, position}
    for key_place in (0, 1):
        key_letters, value_letters = renamed[key_place], renamed[1 - key_place]
        if set(key_letters) == batch | {"s", dim} and set(value_letters) == batch | {"s", channel}:
            break
    else:
        return None
    key, value = product.operands[key_place], product.operands[1 - key_place]

    found = _read_normalizer(last.operands[normalizer_place], query, key, key_letters, is_causal, inside)
    if found is None:
        return None
    epsilon, normalizer = found
    query_at = normalizer.operands.index(query)
    sum_at = 1 - query_at
    calls = dict(zip(normalizer.letters[query_at], query_letters))
    if normalizer.operands[sum_at] is query:
        return None
    sum_letters = [letter for letter in key_letters if is_causal or letter != "s"]
    expected = "".join(position if letter == "s" else letter for letter in sum_letters)
    given = "".join(calls.get(letter, "?") for letter in normalizer.letters[sum_at])
    if given != expected or "".join(calls.get(letter, "?") for letter in normalizer.output) != normalizer_letters:
        return None
    # Letters of our own, apart from each other.
    own = {position: "l", dim: "d", channel: "m", "s": "s"}
    own |= {letter: chr(ord("A") + place) for place, letter in enumerate(sorted(batch))}

    def spelled(letters: str) -> str:
        return "".join(own[letter] for letter in letters)

    return Parts(
        query,
        spelled(query_letters),
        key,
        spelled(key_letters),
        value,
        spelled(value_letters),
        spelled(last.output),
        is_causal,
        epsilon,
        inside,
    )


def _read_normalizer(
    node: Node, query: Node, key: Node, key_letters: str, is_causal: bool, inside: list[Node]
) -> tuple[float, Einsum] | None:
    """1 / (einsum(query, sum of keys) + epsilon): epsilon and the einsum. Notes what it goes through."""
    call = call_of(node)
    if call is None:
        return None
    inside.append(node)
    if call.op == "div" and call["input"] in (1, 1.0) and not isinstance(call["input"], (bool, Node)):
        node = call["other"]
    elif call.op == "reciprocal" or (call.op == "pow" and call["exponent"] == -1):
        node = call["input"]
    else:
        return None
    call, epsilon = call_of(node), 0.0
    if call is not None and call.op == "add":
        numbers = [value for value in (call["input"], call["other"]) if type(value) in (int, float)]
        tensors = [value for value in (call["input"], call["other"]) if isinstance(value, Node)]
        if len(numbers) != 1 or len(tensors) != 1 or call["alpha"] != 1:
            return None
        inside.append(node)
        node, epsilon = tensors[0], float(numbers[0])
    product = _einsum(node)
    if product is None or len(product.operands) != 2 or query not in product.operands:
        return None
    inside.append(node)
    sums = product.operands[1 - product.operands.index(query)]
    call = call_of(sums)
    if call is None or call.op != ("cumsum" if is_causal else "sum") or call["input"] is not key:
        return None
    dim = call["dim"]
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if dim != key_letters.index("s") or call.arguments.get("keepdim") or call["dtype"] is not None:
        return None
    inside.append(sums)
    return epsilon, product


def _einsum(node: Any) -> Einsum | None:
    """An einsum with explicit output and no diagonal; "..." becomes letters of its own."""
    call = call_of(node)
    if call is None or call.op != "einsum" or not isinstance(call["equation"], str):
        return None
    equation, operands = call["equation"].replace(" ", ""), call["operands"]
    left, arrow, output = equation.partition("->")
    letters = left.split(",")
    if not arrow or len(letters) != len(operands) or not all(isinstance(operand, Node) for operand in operands):
        return None
    hidden = {value_of(operand).dim() - len(each.replace("...", "")) for operand, each in zip(operands, letters)
              if "..." in each}  # fmt: skip
    if len(hidden) > 1 or (hidden and not all("..." in each for each in (*letters, output))):
        return None
    dots = "".join(chr(0x3B1 + place) for place in range(max(hidden, default=0)))  # Greek: no einsum has those
    spelled = tuple(each.replace("...", dots) for each in (*letters, output))
    if any(len(set(each)) != len(each) for each in spelled):
        return None
    return Einsum(tuple(operands), spelled[:-1], spelled[-1])


def _feature_map(match: Match, query: Node, key: Node) -> tuple[Node, Node, str]:
    """What the feature map was applied to, and its name; if that is not known, the operands and "identity"."""
    read = [_mapped(node) for node in (query, key)]
    if read[0] is None or read[1] is None or read[0][1] != read[1][1]:
        return query, key, "identity"
    for source, _, nodes in (part for part in read if part is not None):
        inside = match.nodes | set(nodes)
        if any(user not in inside for node in nodes for user in node.users) or source in inside:
            return query, key, "identity"
    match.include([node for part in read if part is not None for node in part[2]])
    return read[0][0], read[1][0], read[0][1]


def _mapped(node: Node) -> tuple[Node, str, list[Node]] | None:
    """x, the name of phi and the nodes in between, where `node` is phi(x)."""
    call = call_of(node)
    if call is None:
        return None
    if call.op == "relu" and isinstance(call["input"], Node):
        return call["input"], "relu", [node]
    if call.op != "add" or call["alpha"] != 1:
        return None
    for inner, one in ((call["input"], call["other"]), (call["other"], call["input"])):
        elu = call_of(inner)
        if type(one) in (int, float) and one == 1 and elu is not None and elu.op == "elu":
            if elu["alpha"] == 1 and isinstance(elu["input"], Node):
                return elu["input"], "elu", [node, inner]
    return None
