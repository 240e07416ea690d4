"""One name and one argument schema for every spelling of an operation.

Dynamo's torch-level graph says the same thing in many ways: `x + y`, `torch.add(x, y)`, `x.add(other=y)`; `x.float()`
and `x.to(torch.float32)`; `F.softmax(x, -1)` and `x.softmax(dim=3)`. Patterns would have to know them all. Here they
become one: `call_of(node)` reads a node as an operation of the table below, its arguments by name and its defaults
filled in. It changes nothing; a node that is not understood reads as None.

Arguments called `dim`, `dim0`, `dim1`, `dims`, `start_dim` and `end_dim` count from zero when the operand's rank is
known, and `transpose` has `dim0 < dim1`. In-place spellings read as the operation's name with an underscore (`add_`),
so that no pattern takes a write for the functional operation.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

Tensor = torch.Tensor
REQUIRED: Any = inspect.Parameter.empty

# operation(parameters) = spellings | in-place spellings
#
# `.name` is a method, `nn` is torch._C._nn. The first line of an operation is its schema; further lines are spellings
# that take the same arguments in another order. Parameters that begin with an underscore are read over. A spelling
# that this version of PyTorch does not have is left out.
_TABLE = """
add(input, other, alpha=1) = operator.add torch.add .add .__add__ | operator.iadd .add_ .__iadd__
add(other, input) = .__radd__
sub(input, other, alpha=1) = operator.sub torch.sub torch.subtract .sub .subtract .__sub__ \
    | operator.isub .sub_ .subtract_ .__isub__
sub(other, input, alpha=1) = torch.rsub .__rsub__
mul(input, other) = operator.mul torch.mul torch.multiply .mul .multiply .__mul__ \
    | operator.imul .mul_ .multiply_ .__imul__
mul(other, input) = .__rmul__
div(input, other, rounding_mode=None) = operator.truediv torch.div torch.divide torch.true_divide .div .divide \
    .true_divide .__truediv__ | operator.itruediv .div_ .divide_ .true_divide_ .__itruediv__
div(other, input) = .__rtruediv__
floordiv(input, other) = operator.floordiv torch.floor_divide .floor_divide .__floordiv__
remainder(input, other) = operator.mod torch.remainder .remainder .__mod__
pow(input, exponent) = operator.pow torch.pow .pow .__pow__ | operator.ipow .pow_ .__ipow__
pow(exponent, input) = .__rpow__
neg(input) = operator.neg torch.neg torch.negative .neg .negative .__neg__ | torch.neg_ .neg_ .negative_
abs(input) = operator.abs torch.abs torch.absolute .abs .absolute .__abs__ | torch.abs_ .abs_ .absolute_
maximum(input, other) = torch.maximum .maximum
minimum(input, other) = torch.minimum .minimum
clamp(input, min=None, max=None) = torch.clamp torch.clip .clamp .clip | torch.clamp_ torch.clip_ .clamp_ .clip_

ge(input, other) = operator.ge torch.ge torch.greater_equal .ge .greater_equal .__ge__ | .ge_
gt(input, other) = operator.gt torch.gt torch.greater .gt .greater .__gt__ | .gt_
le(input, other) = operator.le torch.le torch.less_equal .le .less_equal .__le__ | .le_
lt(input, other) = operator.lt torch.lt torch.less .lt .less .__lt__ | .lt_
eq(input, other) = operator.eq torch.eq .eq .__eq__ | .eq_
ne(input, other) = operator.ne torch.ne torch.not_equal .ne .not_equal .__ne__ | .ne_
and(input, other) = operator.and_ torch.bitwise_and .bitwise_and .__and__ .__rand__ \
    | operator.iand .bitwise_and_ .__iand__
or(input, other) = operator.or_ torch.bitwise_or .bitwise_or .__or__ .__ror__ | operator.ior .bitwise_or_ .__ior__
xor(input, other) = operator.xor torch.bitwise_xor .bitwise_xor .__xor__ .__rxor__ \
    | operator.ixor .bitwise_xor_ .__ixor__
invert(input) = operator.invert operator.inv torch.bitwise_not .bitwise_not .__invert__ | .bitwise_not_
logical_and(input, other) = torch.logical_and .logical_and | .logical_and_
logical_or(input, other) = torch.logical_or .logical_or | .logical_or_
logical_xor(input, other) = torch.logical_xor .logical_xor | .logical_xor_
logical_not(input) = torch.logical_not .logical_not | .logical_not_
where(condition, input=None, other=None) = torch.where
where(input, condition, other) = .where
masked_fill(input, mask, value) = torch.masked_fill .masked_fill | .masked_fill_
isinf(input) = torch.isinf .isinf
isnan(input) = torch.isnan .isnan

linear(input, weight, bias=None) = nn.linear F.linear
matmul(input, other) = operator.matmul torch.matmul .matmul .__matmul__
bmm(input, mat2) = torch.bmm .bmm
mm(input, mat2) = torch.mm .mm
addmm(input, mat1, mat2, beta=1, alpha=1) = torch.addmm .addmm | .addmm_
baddbmm(input, batch1, batch2, beta=1, alpha=1) = torch.baddbmm .baddbmm | .baddbmm_
einsum(equation, *operands) = torch.einsum
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, \
    enable_gqa=False) = nn.scaled_dot_product_attention F.scaled_dot_product_attention
multi_head_attention_forward(query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, \
    bias_v, add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None, \
    need_weights=True, attn_mask=None, use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, \
    v_proj_weight=None, static_k=None, static_v=None, average_attn_weights=True, is_causal=False) \
    = F.multi_head_attention_forward
transformer_encoder_layer(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, \
    norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, \
    ffn_bias_2, mask=None, mask_type=None) = torch._transformer_encoder_layer_fwd
conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) = torch.conv1d F.conv1d
conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) = torch.conv2d F.conv2d
conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) = torch.conv3d F.conv3d

layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5) = F.layer_norm
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, _cudnn_enable=True) = torch.layer_norm
rms_norm(input, normalized_shape, weight=None, eps=None) = F.rms_norm torch.rms_norm
softmax(input, dim=None, dtype=None) = torch.softmax .softmax
softmax(input, dim=None, _stacklevel=3, dtype=None) = F.softmax
log_softmax(input, dim=None, dtype=None) = torch.log_softmax .log_softmax
log_softmax(input, dim=None, _stacklevel=3, dtype=None) = F.log_softmax
dropout(input, p=0.5, training=True, inplace=False) = F.dropout
dropout(input, p, training) = torch.dropout | torch.dropout_
dropout1d(input, p=0.5, training=True, inplace=False) = F.dropout1d
dropout2d(input, p=0.5, training=True, inplace=False) = F.dropout2d
dropout3d(input, p=0.5, training=True, inplace=False) = F.dropout3d
alpha_dropout(input, p=0.5, training=False, inplace=False) = F.alpha_dropout
feature_alpha_dropout(input, p=0.5, training=False, inplace=False) = F.feature_alpha_dropout
embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False) \
    = F.embedding

gelu(input, approximate='none') = nn.gelu F.gelu
relu(input, inplace=False) = F.relu
relu(input) = torch.relu .relu | torch.relu_ F.relu_ .relu_
silu(input, inplace=False) = F.silu
silu(input) = nn.silu | nn.silu_
mish(input, inplace=False) = F.mish
relu6(input, inplace=False) = F.relu6
hardswish(input, inplace=False) = F.hardswish
hardsigmoid(input, inplace=False) = F.hardsigmoid
hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False) = F.hardtanh
leaky_relu(input, negative_slope=0.01, inplace=False) = F.leaky_relu
elu(input, alpha=1.0, inplace=False) = F.elu
celu(input, alpha=1.0, inplace=False) = F.celu
selu(input, inplace=False) = F.selu
threshold(input, threshold, value, inplace=False) = F.threshold
tanh(input) = torch.tanh F.tanh .tanh | torch.tanh_ .tanh_
sigmoid(input) = torch.sigmoid F.sigmoid torch.special.expit .sigmoid | torch.sigmoid_ .sigmoid_
softplus(input, beta=1.0, threshold=20.0) = F.softplus nn.softplus
glu(input, dim=-1) = F.glu nn.glu

exp(input) = torch.exp .exp | torch.exp_ .exp_
log(input) = torch.log .log | torch.log_ .log_
sqrt(input) = torch.sqrt .sqrt | torch.sqrt_ .sqrt_
rsqrt(input) = torch.rsqrt .rsqrt | torch.rsqrt_ .rsqrt_
square(input) = torch.square .square | torch.square_ .square_
reciprocal(input) = torch.reciprocal .reciprocal | torch.reciprocal_ .reciprocal_
sin(input) = torch.sin .sin | torch.sin_ .sin_
cos(input) = torch.cos .cos | torch.cos_ .cos_
erf(input) = torch.erf torch.special.erf .erf | torch.erf_ .erf_

mean(input, dim=None, keepdim=False, dtype=None) = torch.mean .mean
sum(input, dim=None, keepdim=False, dtype=None) = torch.sum .sum
any(input, dim=None, keepdim=False) = torch.any .any
all(input, dim=None, keepdim=False) = torch.all .all
amax(input, dim=(), keepdim=False) = torch.amax .amax
amin(input, dim=(), keepdim=False) = torch.amin .amin
cumsum(input, dim, dtype=None) = torch.cumsum .cumsum | .cumsum_
diff(input, n=1, dim=-1, prepend=None, append=None) = torch.diff .diff
triu(input, diagonal=0) = torch.triu .triu | .triu_
tril(input, diagonal=0) = torch.tril .tril | .tril_

view(input, *size) = .view
reshape(input, *size) = torch.reshape .reshape
expand(input, *size) = torch.broadcast_to .expand .broadcast_to
expand_as(input, other) = .expand_as
view_as(input, other) = .view_as
permute(input, *dims) = torch.permute .permute
transpose(input, dim0, dim1) = torch.transpose torch.swapaxes torch.swapdims .transpose .swapaxes .swapdims
t(input) = torch.t .t
unsqueeze(input, dim) = torch.unsqueeze .unsqueeze
squeeze(input, dim=None) = torch.squeeze .squeeze
flatten(input, start_dim=0, end_dim=-1) = torch.flatten .flatten
contiguous(input, memory_format=torch.contiguous_format) = .contiguous
clone(input, memory_format=None) = torch.clone .clone
detach(input) = torch.detach .detach
repeat(input, *repeats) = .repeat
split(input, split_size, dim=0) = torch.split .split
chunk(input, chunks, dim=0) = torch.chunk .chunk
unbind(input, dim=0) = torch.unbind .unbind
narrow(input, dim, start, length) = torch.narrow .narrow
select(input, dim, index) = torch.select .select
cat(tensors, dim=0) = torch.cat torch.concat torch.concatenate
stack(tensors, dim=0) = torch.stack
gather(input, dim, index) = torch.gather .gather
index_select(input, dim, index) = torch.index_select .index_select
size(input, dim=None) = .size
getitem(input, index) = operator.getitem .__getitem__

tensor(data, dtype=None, device=None, requires_grad=False, pin_memory=False) = torch.tensor
zeros(*size, dtype=None, layout=None, device=None, pin_memory=False, requires_grad=False) = torch.zeros
ones(*size, dtype=None, layout=None, device=None, pin_memory=False, requires_grad=False) = torch.ones
full(size, fill_value, dtype=None, layout=None, device=None, pin_memory=False, requires_grad=False) = torch.full
new_zeros(input, *size, dtype=None, device=None, requires_grad=False) = .new_zeros
new_ones(input, *size, dtype=None, device=None, requires_grad=False) = .new_ones
new_full(input, size, fill_value, dtype=None, device=None, requires_grad=False) = .new_full
zeros_like(input, dtype=None, layout=None, device=None, requires_grad=False, memory_format=None) = torch.zeros_like
ones_like(input, dtype=None, layout=None, device=None, requires_grad=False, memory_format=None) = torch.ones_like
full_like(input, fill_value, dtype=None, layout=None, device=None, requires_grad=False, memory_format=None) \
    = torch.full_like
"""

COMMUTATIVE = frozenset(
    ["add", "mul", "and", "or", "xor", "eq", "ne", "logical_and", "logical_or", "logical_xor", "maximum", "minimum"]
)
DIM_NAMES = frozenset({"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"})
DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
# Other names that torch accepts for a parameter.
_SYNONYMS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "axis0": "dim0",
    "axis1": "dim1",
    "x": "input",
    "self": "input",
    "train": "training",
    "split_size_or_sections": "split_size",
    "shape": "size",
}
_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
}

Parameters = tuple[tuple[str, Any], ...]  # (name, default), in order


@dataclass(frozen=True)
class Call:
    """A node read as an operation of the table.

    `arguments` holds every parameter of the operation by name, in the order of its schema; values are nodes, Python
    values or (nested) tuples of them. `call["dim"]` is `call.arguments["dim"]`.
    """

    op: str
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True)
class _Spelling:
    """How one function or method takes the arguments of an operation."""

    op: str
    parameters: Parameters
    variadic: str | None  # the parameter that swallows the remaining positional arguments
    inplace: bool

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.parameters)


SCHEMAS: dict[str, Parameters] = {
    # read by functions of their own, below
    "to": (("input", REQUIRED), ("dtype", None), ("device", None), ("copy", False), ("memory_format", None)),
    "arange": (("start", 0), ("end", REQUIRED), ("step", 1), ("dtype", None), ("device", None)),
}
_FUNCTIONS: dict[Any, _Spelling] = {}
_METHODS: dict[str, _Spelling] = {}


def _read_table() -> None:
    homes = {"torch": torch, "F": F, "operator": operator, "nn": torch._C._nn}
    for line in filter(None, _TABLE.replace("\\\n", " ").splitlines()):
        head, _, spellings = " ".join(line.split()).partition(") = ")
        name, _, signature = head.partition("(")
        parameters: list[tuple[str, Any]] = []
        variadic = None
        for parameter in inspect.signature(eval(f"lambda {signature}: 0", {"torch": torch})).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                variadic = parameter.name
            parameters.append((parameter.name, parameter.default))
        plain, _, inplace = spellings.partition("|")
        for names, writes in ((plain, False), (inplace, True)):
            spelling = _Spelling(name, tuple(parameters), variadic, writes)
            for path in names.split():
                if path.startswith("."):
                    _METHODS[path[1:]] = spelling
                    continue
                home, *attributes = path.split(".")
                found: Any = homes[home]
                for attribute in attributes:
                    found = getattr(found, attribute, None)
                if found is not None:
                    _FUNCTIONS[found] = spelling
        SCHEMAS.setdefault(name, tuple(each for each in parameters if each[0] != "inplace"))


_read_table()


def placeholders_of(gm: GraphModule) -> list[Node]:
    """The nodes that stand for the graph's inputs, in their order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def value_of(argument: Any) -> Any:
    """The fake value of a node (None when the node has none); anything else is its own value."""
    return argument.meta.get("example_value") if isinstance(argument, Node) else argument


_EXTREMA = {"min": "minimum", "max": "maximum"}


def call_of(node: Any) -> Call | None:
    """Read `node` as an operation of the table; None when it is not a call or not understood.

    An operator of `torch.ops` is read by its own schema and named as there (`"kernl::linear"`).
    """
    if not isinstance(node, Node):
        return None
    known = _calls_read.get(node)
    if known is None or not (known[0] is node.target and known[1] is node.args and known[2] is node.kwargs):
        known = _calls_read[node] = (node.target, node.args, node.kwargs, _read(node))
    return known[3]


# A node is looked at by many patterns; it gets new arguments, as objects, when one of them is replaced.
_calls_read: weakref.WeakKeyDictionary[Node, tuple[Any, Any, Any, Call | None]] = weakref.WeakKeyDictionary()


def _read(node: Node) -> Call | None:
    target = node.target
    spelling: _Spelling | None = None
    if node.op == "call_method":
        assert isinstance(target, str)
        if target == "to":
            return _read_to(node)
        if target in _CASTS or target in ("type", "type_as"):
            return _read_cast(node, target)
        if target in _EXTREMA:
            return _read_extremum(node, _EXTREMA[target])
        spelling = _METHODS.get(target)
    elif node.op == "call_function":
        if target in (torch.min, torch.max):
            return _read_extremum(node, _EXTREMA[target.__name__])
        if target is torch.arange:
            return _read_arange(node)
        if target is getattr:
            return _read_attribute(node)
        if isinstance(target, torch._ops.OpOverload):
            return _read_operator(node, target)
        try:
            spelling = _FUNCTIONS.get(target)
        except TypeError:  # a callable that cannot be hashed
            return None
    if spelling is None:
        return None
    arguments = _bind(spelling, node.args, node.kwargs)
    return None if arguments is None else _to_schema(spelling, arguments)


def op_name(node: Node) -> str:
    """What a report calls a node: its operation in the table, otherwise the name of what is called."""
    call = call_of(node)
    if call is not None:
        return call.op
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def does_nothing(dropout: Call) -> bool:
    """Whether a dropout returns its operand: it is not training, or its probability is zero."""
    return dropout["training"] is False or (type(dropout["p"]) in (int, float) and dropout["p"] == 0)


def normalize_dim(dim: Any, rank: int) -> Any:
    """Count a dimension (or a tuple of them) from zero; anything else is returned as it is."""
    if isinstance(dim, (tuple, list)):
        return tuple(normalize_dim(each, rank) for each in dim)
    return dim + rank if type(dim) is int and dim < 0 else dim


def _bind(spelling: _Spelling, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by name, as Python would bind them; None when they do not fit."""
    bound: dict[str, Any] = {}
    parameters = spelling.parameters
    for position, value in enumerate(args):
        if position == len(parameters):
            return None
        name = parameters[position][0]
        if name == spelling.variadic:
            rest = args[position:]
            # x.view(2, 3) and x.view((2, 3))
            bound[name] = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else tuple(rest)
            break
        bound[name] = value
    for name, value in kwargs.items():
        name = name if name in spelling.names else _SYNONYMS.get(name, name)
        if name not in spelling.names or name in bound:
            return None
        bound[name] = tuple(value) if isinstance(value, list) else value
    for name, default in parameters:
        if name not in bound:
            if default is REQUIRED:
                return None
            bound[name] = default
    return bound


def _to_schema(spelling: _Spelling, bound: dict[str, Any]) -> Call | None:
    """Bring arguments to the operation's schema; unify what depends on dtype or rank."""
    op = spelling.op
    inplace = spelling.inplace or bound.get("inplace") is True
    arguments: dict[str, Any] = {name: bound.get(name, default) for name, default in SCHEMAS[op]}
    if any(value is REQUIRED for value in arguments.values()):
        return None
    # The same name for something else: x.view(dtype) reinterprets bits, torch.where(condition) is nonzero().
    if op == "view" and any(isinstance(size, torch.dtype) for size in arguments["size"]):
        return None
    if op == "where" and arguments["input"] is None:
        return None

    operand = value_of(arguments.get("input"))
    if isinstance(operand, Tensor):
        rank = operand.dim()
        if op == "t" and rank == 2:
            op, arguments = "transpose", {"input": arguments["input"], "dim0": 0, "dim1": 1}
        for name in DIM_NAMES & arguments.keys():
            arguments[name] = normalize_dim(arguments[name], rank + (op == "unsqueeze"))
    if op == "transpose" and type(arguments["dim0"]) is int and type(arguments["dim1"]) is int:
        arguments["dim0"], arguments["dim1"] = sorted((arguments["dim0"], arguments["dim1"]))
    if op.startswith("logical_") and all(_is_bool(value) for value in arguments.values()):
        op = "invert" if op == "logical_not" else op.removeprefix("logical_")  # on bools they are the bitwise ones
    call = Call(op, arguments)
    if inplace and not (op in DROPOUTS and does_nothing(call)):  # that one writes nothing
        return Call(f"{op}_", arguments)
    return call


def _is_bool(argument: Any) -> bool:
    value = value_of(argument)
    return value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)


def _cast(input: Any, dtype: Any = None, device: Any = None, copy: Any = False, memory_format: Any = None) -> Call:
    arguments = {"input": input, "dtype": dtype, "device": device, "copy": copy, "memory_format": memory_format}
    return Call("to", arguments)


def _read_to(node: Node) -> Call | None:
    """`to(dtype)`, `to(device)`, `to(device, dtype)` and `to(other)`, each with `non_blocking`, `copy`, ..."""
    if not node.args:
        return None
    dtype: Any = None
    device: Any = None
    other: Any = None
    rest = list(node.args[1:])
    if rest:
        first = rest.pop(0)
        if isinstance(first, torch.dtype):
            dtype = first
        elif isinstance(first, Node):
            other = value_of(first)
        elif isinstance(first, (torch.device, str, int)):
            device = first
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                dtype = rest.pop(0)
        else:
            return None
    options = dict(zip(("non_blocking", "copy"), rest)) | dict(node.kwargs)
    other = value_of(options.pop("other", other))
    if other is not None:
        if not isinstance(other, Tensor):
            return None
        dtype, device = other.dtype, other.device
    dtype, device = options.pop("dtype", dtype), options.pop("device", device)
    if device is not None:
        device = torch.device(device)
    options.pop("non_blocking", None)
    copy, memory_format = options.pop("copy", False), options.pop("memory_format", None)
    if options or len(rest) > 2:
        return None
    return _cast(node.args[0], dtype, device, copy, memory_format)


def _read_cast(node: Node, name: str) -> Call | None:
    """`x.float()` and its like, `x.type(dtype)`, `x.type_as(other)`."""
    if name in _CASTS:
        if len(node.args) != 1 or node.kwargs.keys() - {"memory_format"}:
            return None
        return _cast(node.args[0], _CASTS[name], memory_format=node.kwargs.get("memory_format"))
    if len(node.args) != 2 or node.kwargs:
        return None
    like = value_of(node.args[1])
    if isinstance(like, Tensor):
        return _cast(node.args[0], like.dtype, like.device)
    return _cast(node.args[0], like) if isinstance(like, torch.dtype) else None


def _read_extremum(node: Node, op: str) -> Call | None:
    """`min` and `max` of two tensors; those of one tensor and a dimension are reductions."""
    operands = [*node.args, *([node.kwargs["other"]] if "other" in node.kwargs else [])]
    if len(operands) != 2 or not all(isinstance(value_of(each), Tensor) for each in operands):
        return None
    return Call(op, dict(zip(("input", "other"), operands)))


def _read_arange(node: Node) -> Call | None:
    """`arange(end)`, `arange(start, end)`, `arange(start, end, step)`."""
    if len(node.args) > 3:
        return None
    arguments = dict(SCHEMAS["arange"])
    names = ("end",) if len(node.args) == 1 and "end" not in node.kwargs else ("start", "end", "step")
    arguments.update(zip(names, node.args))
    for name, value in node.kwargs.items():
        if name in arguments:
            arguments[name] = value
        elif name not in ("layout", "pin_memory", "requires_grad") or value not in (None, False, torch.strided):
            return None
    return None if arguments["end"] is REQUIRED else Call("arange", arguments)


def _read_attribute(node: Node) -> Call | None:
    """`x.mT`, and the `x.T` of a matrix, are transposes."""
    if len(node.args) != 2:
        return None
    operand, name = node.args
    value = value_of(operand)
    rank = value.dim() if isinstance(value, Tensor) else 0
    if (name == "mT" and rank >= 2) or (name == "T" and rank == 2):
        return Call("transpose", {"input": operand, "dim0": rank - 2, "dim1": rank - 1})
    return None


def _read_operator(node: Node, target: torch._ops.OpOverload) -> Call | None:
    arguments: dict[str, Any] = {}
    for position, parameter in enumerate(target._schema.arguments):
        if position < len(node.args) and not parameter.kwarg_only:
            arguments[parameter.name] = node.args[position]
        elif parameter.name in node.kwargs:
            arguments[parameter.name] = node.kwargs[parameter.name]
        elif parameter.has_default_value():
            arguments[parameter.name] = parameter.default_value
        else:
            return None
    return Call(target._schema.name, arguments)
