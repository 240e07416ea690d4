"""Can a sequence be padded on the right without changing what a graph gives for its true tokens?

    flow = trace_tokens(gm, fixed)      raises Refused, with the reason, where it cannot or is not known to

Take two runs of one graph: with length L, and with all arguments padded to a longer one. Each value of the graph has
*token dimensions*, those whose size is the length. A value is **kept** if, at true indices in all of them, the padded
run has what the other run has. Arguments are kept; `trace_tokens` shows it for every other value in turn, operation by
operation, down to the outputs. What is not in the tables of this file is refused by name.

* An elementwise operation keeps, and so does one along other dimensions (linear, layer norm, a head's view).
* Sums over tokens (a mean, a convolution, a product with probabilities) do not, unless what is summed is exactly 0 at
  padding. Therefore, beside each value, stands what it holds *at padding*, where that is a known number: the mask
  argument is padded with 0, and this number is followed through the arithmetic that makes a mask of it.
* softmax over tokens gives such zeros where the scores at padding are hidden: replaced by, or added to, -5000 or less.
  A query that sees no key at all gets the mean of all values, padding included: then somebody has to look at the mask
  first (`needs_visible_keys`), which is possible if nothing but the mask hides keys.
* scaled_dot_product_attention with a bool mask hides them too, and gives 0 to a query that sees no key.
* Of the tokens themselves a graph may take the first, a slice of a table up to the length, or each at its own position.

All other arguments are padded with copies of their last token, which has two merits: whatever a model computes at
padding is a number that it could have computed (0 * inf would not be 0), and an index made from arguments is as valid
there as at the last token. An index made from positions is not, and the rows of its table become `limit`.

Sizes are symbols; nothing here adds a guard. Floating-point sums over zeros are taken as the sums without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.mask import ARITHMETIC, COMPARISONS, FILLED, Sizes, read_additive, read_condition, round_to
from kernl.graph.match import Refused, require
from kernl.graph.memory import switches_mode, written_by
from kernl.graph.table import DROPOUTS, Call, call_of, does_nothing, op_name, placeholders_of, value_of

Tensor = torch.Tensor

# exp of this plus any difference of two scores is 0.
HIDDEN = -5000.0


@dataclass(frozen=True)
class TokenFlow:
    """How the tokens of a graph's arguments reach its outputs. Positions count placeholders.

    length: the symbol of the length. inputs: positions of the tensors that have it, all as dimension 1.
    mask: position of the input to pad with 0; None when the graph has no mask. attends: whether, without a mask, there
        is an attention that needs one: padding is then possible only in the graph of a call with a mask.
    outputs: the token dimensions of each output.
    limit: the longest length that every table of positions in the graph has rows for, None without such a table.
    needs_limit: there is an index made from positions that is not known to fit its table: only a length that the model
        is made for is safe.
    needs_visible_keys: the result is kept only if each row of the mask (of zeros and ones) has a one.
    shapes: of every tensor input, ints or symbols, by position. numbers: the inputs that are sizes, by position.
    conditions: what the graph was specialised on, in symbols. ranges: smallest and largest value of each symbol.
    """

    length: sympy.Symbol
    inputs: tuple[int, ...]
    mask: int | None
    attends: bool
    outputs: tuple[tuple[int, ...], ...]
    limit: int | None
    needs_limit: bool
    needs_visible_keys: bool
    shapes: Mapping[int, tuple[Any, ...]]
    numbers: Mapping[int, sympy.Symbol]
    conditions: tuple[Any, ...]
    ranges: Mapping[sympy.Symbol, tuple[Any, Any]]

    def sizes_of(self, shapes: Mapping[int, Sequence[int]]) -> dict[sympy.Symbol, int] | None:
        """The value of each symbol in a call whose inputs have these shapes; None if the graph is not for them."""
        sizes: dict[sympy.Symbol, int] = {}
        for position, shape in shapes.items():
            expected = self.shapes[position]
            if len(expected) != len(shape):
                return None
            for size, given in zip(expected, shape):
                if (sizes.setdefault(size, given) if isinstance(size, sympy.Symbol) else size) != given:
                    return None
        return sizes if self.length in sizes and self.serves(sizes) else None

    def serves(self, sizes: Mapping[sympy.Symbol, int]) -> bool:
        """Whether the graph is right for these sizes."""
        within = all(low <= sizes[symbol] <= high for symbol, (low, high) in self.ranges.items() if symbol in sizes)
        return within and all(condition.subs(sizes) == sympy.true for condition in self.conditions)


class Range(NamedTuple):
    """least <= integers of a tensor <= per_token * length + offset."""

    least: int
    per_token: int
    offset: int


BIT = Range(0, 0, 1)


class Hiding(NamedTuple):
    """What has hidden keys: a float `mask` that was added (subtracted, if `flipped`), or a bool one (True = hidden)."""

    mask: Node
    is_added: bool
    flipped: bool = False


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of a kept tensor.

    number: what it holds everywhere. padding: what it holds wherever the index of a token dimension is padding, by
    dimension. position: the dimension whose index it holds. range: of its integers.
    sources: what it is made from, element by element: "argument" and "mask" have tokens, "given" is an argument
        without, "position" an index, "other" what other than elementwise operations give; weights are nothing.
    hidings: the masks that have hidden keys in these scores.
    """

    number: float | None = None
    padding: Mapping[int, float] = field(default_factory=dict)
    position: int | None = None
    range: Range | None = None
    sources: frozenset[str] = frozenset()
    hidings: tuple[Hiding, ...] = ()

    def moved(self, dims: Mapping[int, int]) -> Value:
        """With dimensions renumbered; those that are not named go."""
        padding = {dims[dim]: number for dim, number in self.padding.items() if dim in dims}
        position = None if self.position is None else dims.get(self.position)
        return replace(self, padding=padding, position=position)


OTHER = Value(sources=frozenset({"other"}))

_NUMERIC: dict[str, Callable[..., float]] = {
    **ARITHMETIC,
    **COMPARISONS,
    "maximum": max,
    "minimum": min,
    "neg": lambda x: -x,
    "abs": abs,
}
_COPIES = frozenset({"contiguous", "clone", "detach", "to", *DROPOUTS})
_REPEATS = frozenset({"expand", "expand_as", "repeat"})
_LOGIC = frozenset("and or xor invert logical_and logical_or logical_xor logical_not".split())
_ELEMENTWISE = (
    frozenset(_NUMERIC)
    | _COPIES
    | _LOGIC
    | _REPEATS
    | frozenset(
        "pow clamp where masked_fill floordiv remainder isinf isnan gelu relu silu mish relu6 hardswish hardsigmoid "
        "hardtanh leaky_relu elu celu selu threshold tanh sigmoid softplus exp log sqrt rsqrt square reciprocal sin "
        "cos erf".split()
    )
)
_RESHAPES = frozenset({"view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze"})
_SHAPES = frozenset({"size", "repeats"})  # arguments that are sizes, and may be made from the length


def trace_tokens(gm: GraphModule, fixed: Collection[int]) -> TokenFlow:
    """Follow the tokens through a canonical graph.

    fixed: positions of the placeholders that are parameters and buffers.

    Each argument of shape [batch, length] is tried as the mask, those called so first. Raises Refused with the reason.
    """
    placeholders = placeholders_of(gm)
    arguments = [
        node
        for position, node in enumerate(placeholders)
        if position not in fixed and isinstance(value_of(node), Tensor)
    ]
    length = _length_of(arguments)
    with_tokens = [node for node in arguments if any(_depends(size, length) for size in value_of(node).shape)]
    candidates = [node for node in with_tokens if value_of(node).dim() == 2]
    called_mask = [node for node in candidates if _is_called_mask(node)]
    others = [node for node in candidates if node not in called_mask and not value_of(node).is_floating_point()]
    environment = value_of(with_tokens[0]).fake_mode.shape_env
    refused: list[Refused] = []
    for mask in (*called_mask, *others, *(() if called_mask else (None,))):
        try:
            tracer = _Tracer(length, arguments, mask)
            outputs = tracer.trace(gm)
        except Refused as refusal:
            refused.append(refusal)
            continue
        longest = environment.var_to_range[length].upper
        if longest.is_Integer:
            tracer.at_most(int(longest))
        return TokenFlow(
            length=length,
            inputs=tuple(position for position, node in enumerate(placeholders) if node in with_tokens),
            mask=None if mask is None else placeholders.index(mask),
            attends=mask is None and tracer.attends,
            outputs=outputs,
            limit=tracer.limit,
            needs_limit=tracer.needs_limit,
            needs_visible_keys=tracer.needs_visible_keys,
            shapes={
                position: tuple(map(_expression, value.shape))
                for position, node in enumerate(placeholders)
                if isinstance(value := value_of(node), Tensor)
            },
            numbers={
                position: value.node.expr
                for position, node in enumerate(placeholders)
                if isinstance(value := value_of(node), torch.SymInt)
            },
            # Symbols that have turned out to be equal, or constant, have been replaced in shapes already.
            conditions=tuple(environment.replace(guard.expr) for guard in environment.guards),
            ranges={symbol: (each.lower, each.upper) for symbol, each in environment.var_to_range.items()},
        )
    raise refused[0] if called_mask else refused[-1]


def _length_of(arguments: Sequence[Node]) -> sympy.Symbol:
    """The symbol of the length: dimension 1 of the arguments, and not their dimension 0."""
    shapes = [value_of(node).shape for node in arguments if value_of(node).dim() >= 2]
    found = {_expression(shape[1]) for shape in shapes}
    symbols = {size for size in found if isinstance(size, sympy.Symbol)}
    require(bool(shapes), "no argument has the shape [batch, length]")
    require(bool(symbols), "sizes are fixed in this graph")
    require(len(symbols) == 1, "the arguments have several lengths")
    (length,) = symbols
    for node in arguments:
        places = [dim for dim, size in enumerate(value_of(node).shape) if _depends(size, length)]
        if places not in ([], [1]):
            also = "batch and length are one size in this graph" if places[0] == 0 else "a length elsewhere"
            raise Refused(f"argument {_name(node)} has {also}")
    return length


def _is_called_mask(node: Node) -> bool:
    return "mask" in _name(node)


def _name(node: Node) -> str:
    return str(node.target).removeprefix("L_").removeprefix("kwargs_").strip("_")


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _depends(number: Any, length: sympy.Symbol) -> bool:
    """Whether a number (or a node that is one) is made from the length."""
    number = value_of(number)
    if isinstance(number, (tuple, list, torch.Size)):
        return any(_depends(each, length) for each in number)
    expression = number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
    return expression is not None and length in expression.free_symbols


class _Tracer:
    """Goes through a graph once, with one argument as the mask."""

    def __init__(self, length: sympy.Symbol, arguments: Sequence[Node], mask: Node | None) -> None:
        self.length = length
        self.arguments = arguments
        self.mask = mask
        self.values: dict[Node, Any] = {}
        self.attends = False
        self.limit: int | None = None
        self.needs_limit = False
        self.needs_visible_keys = False

    def trace(self, gm: GraphModule) -> tuple[tuple[int, ...], ...]:
        """The token dimensions of each output. Raises Refused when some value is not kept."""
        for node in gm.graph.nodes:
            if node.op == "output":
                given = [value_of(each) for each in node.args[0]]
                require(all(each is None or isinstance(each, Tensor) for each in given), "the graph returns numbers")
                return tuple(() if each is None else self.tokens(each) for each in node.args[0])
            if node.op == "placeholder":
                self.values[node] = self.argument(node)
            elif node.op == "get_attr":
                self.values[node] = Value()
            else:
                self.visit(node)
        raise Refused("the graph has no output")

    def argument(self, node: Node) -> Value:
        if node is self.mask:
            is_bit = value_of(node).dtype == torch.bool or (
                _is_called_mask(node) and not value_of(node).is_floating_point()
            )
            return Value(padding={1: 0.0}, range=BIT if is_bit else None, sources=frozenset({"mask"}))
        if node not in self.arguments:
            return Value()
        return Value(sources=frozenset({"argument" if self.tokens(node) else "given"}))

    def visit(self, node: Node) -> None:
        value = value_of(node)
        require(not written_by(node), f"{op_name(node)} writes to a tensor")
        if not isinstance(value, Tensor) and not _are_tensors(value):
            # Sizes and other numbers; a number read from a tensor is the same in both runs, as the tensor is kept.
            known = value is not None or switches_mode(node) or not node.users
            require(known, f"{op_name(node)} gives something unknown")
            return
        call = call_of(node)
        require(call is not None, f"{op_name(node)} is not known to keep tokens apart")
        assert call is not None
        if isinstance(value, Tensor):
            self.tokens(node)  # refuses sizes that are made from the length in other ways
        self.values[node] = self.evaluate(node, call, value)

    def evaluate(self, node: Node, call: Call, value: Any) -> Any:
        op = call.op
        if op in _ELEMENTWISE:
            return self.elementwise(node, call, value)
        if op in FILLED:
            return self.filled(node, call)
        rule: Callable[..., Any] | None = getattr(self, f"of_{'reshape' if op in _RESHAPES else op}", None)
        require(rule is not None, f"{op} is not known to keep tokens apart")
        assert rule is not None
        return rule(node, call)

    # -- what the rules ask --

    def tokens(self, node: Any) -> tuple[int, ...]:
        """The token dimensions of a tensor."""
        value = value_of(node)
        return tuple(dim for dim, size in enumerate(value.shape) if self.is_length(size, node)) if value.dim() else ()

    def is_length(self, size: Any, node: Any = None) -> bool:
        expression = _expression(size)
        if expression == self.length:
            return True
        if not _depends(size, self.length):
            return False
        # A table of c rows, cut at the length, has min(c, length) of them.
        rows = [int(each) for each in expression.args if each.is_Integer]
        is_cut = type(expression).__name__ == "Min" and len(rows) == 1 and self.length in expression.args
        require(is_cut, f"{op_name(node) if node is not None else 'a value'} gives a size made from the length")
        self.at_most(rows[0])
        return True

    def at_most(self, limit: int) -> None:
        self.limit = limit if self.limit is None else min(self.limit, limit)

    def is_no_length(self, *numbers: Any) -> None:
        """Refuse the length as a number to compute with: it differs between the two runs."""
        for number in numbers:
            is_tensor = isinstance(value_of(number), Tensor)
            require(is_tensor or not _depends(number, self.length), "the length is used as a number")

    def operands(self, call: Call) -> list[Node]:
        """The tensors among the arguments of an elementwise operation."""
        self.is_no_length(*(argument for name, argument in call.arguments.items() if name not in _SHAPES))
        return [
            each for each in call.arguments.values() if isinstance(each, Node) and isinstance(value_of(each), Tensor)
        ]

    def no_tokens(self, *arguments: Any, what: str) -> None:
        for argument in arguments:
            if isinstance(argument, Node) and isinstance(value_of(argument), Tensor):
                require(not self.tokens(argument), what)

    def known(self, argument: Any) -> Value:
        """What is known of an operand; of a number too."""
        if isinstance(argument, Node) and isinstance(value_of(argument), Tensor):
            return self.values[argument]
        number = argument if isinstance(argument, (bool, int, float)) else None
        return Value(number=None if number is None else float(number))

    # -- elementwise --

    def elementwise(self, node: Node, call: Call, value: Tensor) -> Value:
        if call.op in DROPOUTS:
            require(does_nothing(call), "dropout is active")
        operands = [self.known(operand) for operand in self.operands(call)]
        rank = value.dim()

        def anywhere(argument: Any) -> float | None:
            return self.known(argument).number

        def at_padding(argument: Any) -> float | None:
            """An operand's number where the index of dimension `dim` of the result is padding."""
            known, operand = self.known(argument), value_of(argument)
            own = dim - rank + operand.dim() if isinstance(operand, Tensor) else None
            return known.number if own is None else known.padding.get(own, known.number)

        number = _evaluate(call, value.dtype, anywhere)
        if number is not None:
            return Value(number=number)
        padding = {}
        for dim in self.tokens(node):
            number = _evaluate(call, value.dtype, at_padding)
            if number is not None:
                padding[dim] = number
        is_copy = call.op in _COPIES
        return Value(
            padding=padding,
            position=self.known(call["input"]).position if is_copy else None,
            range=self.range_of(call, value.dtype),
            sources=frozenset().union(*(operand.sources for operand in operands)),
            hidings=(*(hiding for operand in operands for hiding in operand.hidings), *self.new_hidings(call, padding)),
        )

    def range_of(self, call: Call, dtype: torch.dtype) -> Range | None:
        if dtype == torch.bool:
            return BIT
        if dtype.is_floating_point or dtype.is_complex:
            return None
        first = _range(self.known(call.arguments.get("input")))
        if call.op in _COPIES | _REPEATS:
            return first
        second = _range(self.known(call.arguments.get("other")))
        if first is None or second is None:
            return None
        if call.op == "add" and call["alpha"] == 1:
            return Range(*map(sum, zip(first, second)))
        if call.op == "mul" and first.least >= 0 and second.least >= 0 and 0 in (first.per_token, second.per_token):
            factor, other = (second, first) if first.per_token else (first, second)
            return Range(0, other.per_token * factor.offset, other.offset * factor.offset)
        return None

    def new_hidings(self, call: Call, padding: Mapping[int, float]) -> tuple[Hiding, ...]:
        """The mask, if this operation puts one on scores."""
        if not any(number <= HIDDEN for number in padding.values()):
            return ()
        are_scores = ["other" in self.known(call.arguments.get(name)).sources for name in ("input", "other", "value")]
        if call.op in ("add", "sub") and sum(are_scores) == 1:
            mask = call["other"] if are_scores[0] else call["input"]
            return (Hiding(mask, True, call.op == "sub"),)
        if call.op == "masked_fill" and are_scores[0]:
            return (Hiding(call["mask"], False, True),)
        if call.op == "where" and sum(are_scores) == 1:
            return (Hiding(call["condition"], False, are_scores[1]),)
        return ()

    def filled(self, node: Node, call: Call) -> Value:
        if call.op == "tensor":
            number = call["data"]
        elif "full" in call.op:
            number = call["fill_value"]
        else:
            number = float("ones" in call.op)
        self.is_no_length(number)
        number = self.known(number).number
        return Value(number=None if number is None else round_to(number, value_of(node).dtype))

    def of_arange(self, node: Node, call: Call) -> Value:
        start, step = call["start"], call["step"]
        self.is_no_length(start, step)
        if not self.tokens(node):
            return Value()
        require(start == 0 and step == 1, "arange up to the length that does not count from 0 by 1")
        return Value(position=0, range=Range(0, 1, -1), sources=frozenset({"position"}))

    # -- other views --

    def of_reshape(self, node: Node, call: Call) -> Value:
        """A token dimension stays one if the elements before it are as many as before."""
        source = call["input"]
        before, after = self.tokens(source), self.tokens(node)
        shapes = value_of(source).shape, value_of(node).shape
        stay = len(before) == len(after) and all(
            statically_known_true(math.prod(shapes[0][:dim]) == math.prod(shapes[1][:new]))
            for dim, new in zip(before, after)
        )
        require(stay, f"{call.op} merges the tokens with another dimension")
        return self.values[source].moved(dict(zip(before, after)))

    def of_transpose(self, node: Node, call: Call) -> Value:
        first, second = call["dim0"], call["dim1"]
        rank = value_of(node).dim()
        swapped = {first: second, second: first}
        return self.values[call["input"]].moved({dim: swapped.get(dim, dim) for dim in range(rank)})

    def of_permute(self, node: Node, call: Call) -> Value:
        return self.values[call["input"]].moved({dim: place for place, dim in enumerate(call["dims"])})

    def of_getitem(self, node: Node, call: Call) -> Value:
        source, index = call["input"], call["index"]
        if not isinstance(value_of(source), Tensor):  # one of several tensors, from chunk or split
            return self.values[source]
        entries = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(value_of(entry), Tensor) for entry in entries):
            return self.looked_up(node, source, entries)
        taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
        missing = [slice(None)] * (value_of(source).dim() - taken)
        place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
        entries[place : place + 1] = missing
        dims: dict[int, int] = {}
        old = new = 0
        for entry in entries:
            if entry is None:
                new += 1
                continue
            if isinstance(entry, slice):
                if self.is_length(value_of(source).shape[old]) or self.is_length(value_of(node).shape[new]):
                    self.cut(entry, value_of(node).shape[new])
                    dims[old] = new
                else:
                    self.is_no_length(entry.start, entry.stop, entry.step)
                new += 1
            elif self.is_length(value_of(source).shape[old]):
                require(type(entry) is int and entry == 0, f"token {entry} is read, and only the first is at its place")
            else:
                self.is_no_length(entry)
            old += 1
        return self.values[source].moved(
            {dim: to for dim, to in dims.items() if self.is_length(value_of(node).shape[to])}
        )

    def cut(self, entry: slice, size: Any) -> None:
        """Refuse a slice of tokens (or of a table) that is not the first one, or the first `length`."""
        from_start = entry.start is None or (type(entry.start) is int and entry.start == 0)
        whole = self.is_length(size) or (type(entry.stop) is int and entry.stop == 1)
        require(from_start and entry.step in (None, 1) and whole, "a part of the tokens is taken")

    def of_select(self, node: Node, call: Call) -> Value:
        dim, index = call["dim"], call["index"]
        self.is_no_length(index)
        if self.is_length(value_of(call["input"]).shape[dim]):
            require(index == 0, f"token {index} is read, and only the first is at its place")
        rank = value_of(call["input"]).dim()
        return self.values[call["input"]].moved({old: old - (old > dim) for old in range(rank) if old != dim})

    def of_chunk(self, node: Node, call: Call) -> Value:
        """chunk, split, unbind: the same is known of all parts."""
        source, dim = call["input"], call["dim"]
        require(dim not in self.tokens(source), f"{call.op} divides the tokens")
        gone = call.op == "unbind"
        rank = value_of(source).dim()
        return self.values[source].moved({old: old - (gone and old > dim) for old in range(rank) if old != dim})

    of_split = of_unbind = of_chunk

    def of_cat(self, node: Node, call: Call) -> Value:
        joined = [tensor for tensor in call["tensors"] if value_of(tensor).dim()]
        dim = call["dim"] % value_of(node).dim()
        require(all(dim not in self.tokens(tensor) for tensor in joined), "tokens are joined with others")
        return Value(sources=frozenset().union(*(self.values[tensor].sources for tensor in joined)))

    # -- tables --

    def of_embedding(self, node: Node, call: Call) -> Value:
        self.no_tokens(call["weight"], what="a table that is made from tokens")
        self.is_index(call["input"], value_of(call["weight"]).shape[0])
        return OTHER

    def of_gather(self, node: Node, call: Call) -> Value:
        self.no_tokens(call["input"], what="gather among tokens")
        self.is_index(call["index"], value_of(call["input"]).shape[call["dim"]])
        return Value(sources=self.values[call["input"]].sources)

    def looked_up(self, node: Node, source: Node, entries: Sequence[Any]) -> Value:
        """x[i, j] with a tensor for each dimension: of tokens each may only take what stands at its own position."""
        shape, rank = value_of(source).shape, value_of(node).dim()
        full = len(entries) == len(shape) and all(isinstance(value_of(entry), Tensor) for entry in entries)
        require(full, "indexing with tensors and slices together")
        padding, sources = {}, self.values[source].sources
        for dim, entry in enumerate(entries):
            index = self.values[entry]
            require(value_of(entry).dtype != torch.bool, "tokens are picked by a bool mask")
            if self.is_length(shape[dim]):
                require(index.position is not None, "tokens are gathered")
                assert index.position is not None
                place = index.position - value_of(entry).dim() + rank
                if dim in self.values[source].padding:
                    padding[place] = self.values[source].padding[dim]
            else:
                self.is_index(entry, shape[dim])
                sources |= index.sources
        return Value(padding=padding, sources=sources)

    def is_index(self, index: Node, rows: Any) -> None:
        """Refuse an index that may be out of its table at padding; note the length up to which it is not."""
        known, tokens = self.values[index], self.tokens(index)
        at_padding = [known.padding.get(dim) for dim in tokens]
        if all(number is not None and 0 <= number < rows for number in at_padding):
            return
        reach = known.range
        if reach is not None and reach.least >= 0 and reach.per_token and type(rows) is int:
            self.at_most((rows - 1 - reach.offset) // reach.per_token)
        elif known.sources <= {"position"} and known.sources:
            self.needs_limit = True
        else:
            in_table = reach is not None and reach.least >= 0 and type(rows) is int and reach.offset < rows
            require(in_table or known.sources <= {"argument"}, "an index may be out of its table at padding")

    # -- along dimensions --

    def of_linear(self, node: Node, call: Call) -> Value:
        self.no_tokens(call["weight"], call["bias"], what="a weight that is made from tokens")
        require(value_of(call["input"]).dim() - 1 not in self.tokens(call["input"]), "linear mixes tokens")
        return OTHER

    def of_layer_norm(self, node: Node, call: Call) -> Value:
        self.no_tokens(call["weight"], call.arguments.get("bias"), what="a weight that is made from tokens")
        rank = value_of(node).dim()
        first = rank - len(value_of(call["normalized_shape"]))
        require(all(dim < first for dim in self.tokens(node)), f"{call.op} mixes tokens")
        return OTHER

    of_rms_norm = of_layer_norm

    def of_matmul(self, node: Node, call: Call) -> Value:
        left, right = (call[name] for name in call.arguments)
        ranks = value_of(left).dim(), value_of(right).dim()
        require(min(ranks) >= 2, "a product with a vector")
        if ranks[0] - 1 in self.tokens(left) or ranks[1] - 2 in self.tokens(right):
            zeros = self.values[left].padding.get(ranks[0] - 1), self.values[right].padding.get(ranks[1] - 2)
            require(0 in zeros, f"{call.op} mixes tokens")
        return OTHER

    of_bmm = of_matmul

    def of_conv1d(self, node: Node, call: Call) -> Value:
        self.no_tokens(call["weight"], call["bias"], what="a weight that is made from tokens")
        alone = value_of(call["weight"]).shape[-1] == 1 and call["stride"] in (1, (1,)) and call["padding"] in (0, (0,))
        require(alone, "conv1d mixes tokens")
        return OTHER

    def of_cumsum(self, node: Node, call: Call) -> Value:
        """Sums from the left: padding on the right takes no part in what is true."""
        known, dim = self.values[call["input"]], call["dim"]
        if dim not in self.tokens(node):
            return OTHER
        reach = _range(known)
        grows = reach is not None and reach.least >= 0 and not reach.per_token
        counted = Range(0, reach.offset, 0) if grows and reach is not None else None
        counts_all = known.sources <= {"position"}
        return Value(range=counted, sources=frozenset({"position" if counts_all else "other"}))

    def of_sum(self, node: Node, call: Call) -> Value:
        """sum, mean, any, all, amax, amin: over tokens only a sum (or any) of what is 0 at padding."""
        source, dims = call["input"], call["dim"]
        rank = value_of(source).dim()
        dims = tuple(range(rank)) if dims in (None, ()) else dims if isinstance(dims, tuple) else (dims,)
        known = self.values[source]
        for dim in set(dims) & set(self.tokens(source)):
            require(call.op in ("sum", "any") and known.padding.get(dim) == 0, f"{call.op} mixes tokens")
        kept = [dim for dim in range(rank) if dim not in dims]
        places = {dim: dim if call["keepdim"] else place for place, dim in enumerate(kept)}
        zeros = {dim: number for dim, number in known.padding.items() if number == 0}
        return replace(OTHER, padding=zeros).moved(places)

    of_mean = of_any = of_all = of_amax = of_amin = of_sum

    def of_softmax(self, node: Node, call: Call) -> Value:
        known, dim = self.values[call["input"]], call["dim"]
        if dim not in self.tokens(node):
            return OTHER
        if self.mask is None:
            self.is_unmasked(known)
        else:
            require(known.padding.get(dim, 0) <= HIDDEN, "an attention does not hide padding by a mask")
            require(dim == value_of(node).dim() - 1, "softmax is not over the last dimension")
            self.is_safe_for_rows(value_of(node).shape, known.hidings)
        return replace(OTHER, padding={dim: 0.0})

    def of_log_softmax(self, node: Node, call: Call) -> Value:
        require(call["dim"] not in self.tokens(node), "log_softmax mixes tokens")
        return OTHER

    def of_scaled_dot_product_attention(self, node: Node, call: Call) -> Value:
        query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
        self.is_no_length(call["scale"])
        require(call["dropout_p"] == 0, "attention dropout is active")
        require(call["is_causal"] is False, "a causal attention")
        ranks = [value_of(each).dim() for each in (query, key, value)]
        places = [self.tokens(each) for each in (query, key, value)]
        require(
            all(set(dims) <= {rank - 2} for dims, rank in zip(places, ranks)), "an attention over another dimension"
        )
        if not places[1] and not places[2]:
            return OTHER
        if self.mask is None:
            self.is_unmasked(self.known(mask))
            return OTHER
        require(mask is not None, "an attention has no mask")
        known, last = self.values[mask], value_of(mask).dim() - 1
        if value_of(mask).dtype == torch.bool:
            require(known.padding.get(last) == 0, "an attention does not hide padding by the mask")
        else:
            require(known.padding.get(last, 0) <= HIDDEN, "an attention does not hide padding by a mask")
            shape = (*value_of(query).shape[:-1], value_of(key).shape[-2])
            self.is_safe_for_rows(shape, known.hidings or (Hiding(mask, True),))
        return OTHER

    def is_unmasked(self, known: Value) -> None:
        """The graph of a call without a mask: its attention needs one, and may have none that is made from tokens."""
        require("argument" not in known.sources, "an attention is masked by something that is no mask argument")
        self.attends = True

    def is_safe_for_rows(self, shape: Sequence[Any], hidings: Sequence[Hiding]) -> None:
        """Refuse numbers as masks unless only the mask argument can hide all keys of a query."""
        sizes = Sizes(shape[0], shape[-2], shape[-1], -len(shape))
        for hiding in hidings:
            sources, last = self.values[hiding.mask].sources, value_of(hiding.mask).dim() - 1
            hides_alike = sources == {"mask"} and self.tokens(hiding.mask) == (last,)
            alone = hides_alike or (sources <= {"mask", "position"} and _hides_padding_only(hiding, sizes))
            require(alone, "a query may see no key, for other reasons than the mask")
        require(bool(hidings), "it is not known which mask hides padding")
        self.needs_visible_keys = True


def _hides_padding_only(hiding: Hiding, sizes: Sizes) -> bool:
    """Whether all queries of a sequence see the same keys, whatever a mask's shape."""
    if hiding.is_added:
        additive = read_additive(hiding.mask, sizes, negated=hiding.flipped)
        visibility = None if additive is None else additive.visibility
    else:
        visibility = read_condition(hiding.mask, sizes, true_hides=hiding.flipped)
    return visibility is not None and visibility.complete and not visibility.by_position


def _are_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value)


def _range(known: Value) -> Range | None:
    if known.number is None:
        return known.range
    return Range(int(known.number), 0, int(known.number)) if known.number.is_integer() else None


def _evaluate(call: Call, dtype: torch.dtype, number_of: Callable[[Any], float | None]) -> float | None:
    """The number an elementwise operation gives for operands of which some are known numbers; None if unknown."""
    number: float | None = None
    op = call.op
    if op in _COPIES | _REPEATS:
        number = number_of(call["input"])
    elif op in ("where", "masked_fill"):
        yes, no = (call["input"], call["other"]) if op == "where" else (call["value"], call["input"])
        chosen = number_of(call["condition" if op == "where" else "mask"])
        number = None if chosen is None else number_of(yes if chosen else no)
    elif op in ("invert", "logical_not"):
        operand = number_of(call["input"])
        is_truth = op == "logical_not" or dtype == torch.bool
        number = None if operand is None or not is_truth else float(not operand)
    elif op in _LOGIC:
        number = _logic(op.removeprefix("logical_"), number_of(call["input"]), number_of(call["other"]), dtype)
    elif op in _NUMERIC and call.arguments.get("alpha", 1) == 1 and call.arguments.get("rounding_mode") is None:
        operands = [number_of(call[name]) for name in ("input", "other") if name in call.arguments]
        number = _arithmetic(op, operands, dtype)
    return None if number is None or math.isnan(number) else round_to(number, dtype)


def _logic(op: str, left: float | None, right: float | None, dtype: torch.dtype) -> float | None:
    if op == "and" and 0 in (left, right):
        return 0.0
    if dtype != torch.bool or op == "xor":
        return None
    if op == "or" and (left or right):
        return 1.0
    return None if left is None or right is None else float(bool(left and right if op == "and" else left or right))


def _arithmetic(op: str, operands: Sequence[float | None], dtype: torch.dtype) -> float | None:
    if op == "mul" and 0 in operands and not any(each is not None and math.isinf(each) for each in operands):
        return 0.0
    known = [each for each in operands if each is not None]
    is_sum = op in ("add", "sub")
    if is_sum and len(known) == 1 and len(operands) == 2 and dtype.is_floating_point:
        # What is low enough vanishes in a softmax whatever is added to it; -inf stands for all of that.
        added = -known[0] if op == "sub" and operands[0] is None else known[0]
        return -math.inf if added <= HIDDEN else None
    if len(known) < len(operands) or (not is_sum and any(map(math.isinf, known))):
        return None
    try:
        return float(_NUMERIC[op](*known))
    except (ZeroDivisionError, OverflowError):
        return None
