"""ONNX's LSTM, GRU and RNN: torch's layers where these mean the same; else the products of all steps' inputs by their weights
as one gemm, and a loop behind it (`frontends/torch/recurrence.py`).

onnx's own evaluator leaves out lengths, activations, clipping and `input_forget`. Source: onnx/defs/rnn/defs.cc; where that is
silent, as on a sequence of no steps and on defaults of activations, onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import F32, F64, DType
from tilewright.frontends.onnx.by_torch import by_torch
from tilewright.frontends.onnx.matmul import matmul
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.torch.recurrence import ACTIVATIONS, FUNCTIONS, GATES
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, concat, const, convert, map_, places, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather
from tilewright.ir.types import TensorType

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_USUAL = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # those of ONNX in torch's order
# alpha and beta of those that take them, where no more are given; None: they must be, as onnxruntime's are others than ONNX's
_ALPHA = {"affine": None, "elu": 1.0, "hardsigmoid": 0.2, "leakyrelu": 0.01, "scaledtanh": None, "thresholdedrelu": None}
_BETA = {"affine": None, "hardsigmoid": 0.5, "scaledtanh": None}


@converts("LSTM", 7, 22)
@converts("GRU", 7, 22)
@converts("RNN", 7, 22)
def _recurrent(op: OpNode) -> list[Node | None]:
    """Y [T, D, B, H] (with layout 1 [B, T, D, H]), Y_h and, of an LSTM, Y_c [D, B, H] ([B, D, H])."""
    kind = op.op_type
    x, w, r = op.input(0), op.input(1), op.input(2)
    many, dtype = GATES[kind], x.dtype
    directions = _DIRECTIONS.get(op.text("direction", "forward"))
    batch_first = bool(op.integer("layout", 0))
    if directions is None or not len(x.shape) == len(w.shape) == len(r.shape) == 3 or not dtype.is_float:
        raise op.malformed(f"{kind} of {x.type} by {w.type} and {r.type}, {op.text('direction', 'forward')}")
    d, size = len(directions), r.shape[2]
    b, t = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    bias, lengths, state, cell, peepholes = (op.optional(i) for i in (3, 4, 5, 6, 7))
    states = (b, d, size) if batch_first else (d, b, size)
    shapes = [(w, (d, many * size, x.shape[2])), (r, (d, many * size, size)), (bias, (d, 2 * many * size))]
    shapes += [(state, states), (cell, states), (peepholes, (d, 3 * size))]
    for node, shape in shapes:
        if node is not None and node.tensor != TensorType(dtype, shape):
            raise op.malformed(f"{kind} of {x.type} with {node.type} where {TensorType(dtype, shape)} is wanted")
    if op.integer("hidden_size", size) != size or (lengths is not None and lengths.shape != (b,)):
        raise op.malformed(f"{kind} of {size} states whose hidden_size or sequence_lens are others")
    if 0 in (t, b, size, x.shape[2]):
        raise Unmodelled("nothing in it")
    if lengths is not None and op.known.listed(lengths) == [t] * b:
        lengths = None
    wide = dtype if dtype in (F32, F64) else F32
    x, w, r, bias, state, cell, peepholes = (n and convert(n, wide) for n in (x, w, r, bias, state, cell, peepholes))
    assert x is not None and w is not None and r is not None
    if batch_first:
        x, state, cell = transpose(x, (1, 0, 2)), state and transpose(state, (1, 0, 2)), cell and transpose(cell, (1, 0, 2))
    bias = bias or _zeros(wide, (d, 2 * many * size))
    state, cell = state or _zeros(wide, (d, b, size)), cell or _zeros(wide, (d, b, size))
    functions, parameters = _activations(op, d)
    # A clip of 0 is none; onnxruntime's RNN, and no other of its layers, takes it for a bound.
    clip, variant = op.real("clip", 0.0) if op.has("clip") else 0.0, _variant(op)
    plain = lengths is None and peepholes is None and not clip and variant == (kind == "GRU")
    if plain and functions == _USUAL[kind] * d:
        made = _layer(op, x, [w, r, bias], [state, cell], directions, kind.lower() if kind != "RNN" else "rnn_tanh")
    elif plain and functions == ("relu",) * d:
        made = _layer(op, x, [w, r, bias], [state, cell], directions, "rnn_relu")
    else:
        n, parts = FUNCTIONS[kind], list[list[Node]]()
        for i, backwards in enumerate(directions):
            of_x, of_h = (slice_(_of(bias, i), 0, k * many * size, (k + 1) * many * size) for k in (0, 1))
            gates = map_("add", matmul(x, swap_last(_of(w, i))), broadcast(of_x, (t, b, many * size)))
            of_cell = _of(cell, i) if kind == "LSTM" else None
            more = [peepholes and _of(peepholes, i), lengths, kind, list(functions[n * i : n * i + n])]
            more += [list(parameters[2 * n * i : 2 * n * (i + 1)]), clip, variant, backwards]
            given = [gates, _of(r, i), of_h, _of(state, i), of_cell, *more]
            types = [TensorType(wide, s) for s in ((t, b, size), (b, size), (b, size))]
            y, *last = by_torch(op, "tilewright.recurrence.default", given, types)
            parts.append([reshape(y, (t, 1, b, size)), *(reshape(z, (1, b, size)) for z in last)])
        made = [concat([p[k] for p in parts], 1 if k == 0 else 0) for k in range(3)]
    if batch_first:
        made = [transpose(z, (2, 0, 1, 3) if len(z.shape) == 4 else (1, 0, 2)) for z in made]
    return [convert(z, dtype) for z in made[: 3 if kind == "LSTM" else 2]]


def _layer(
    op: OpNode, x: Node, weights: Sequence[Node], before: Sequence[Node], directions: Sequence[bool], layer: str
) -> list[Node]:
    """The results of torch's layer, whose one direction is forwards."""
    kind, d = op.op_type, len(directions)
    (t, b, _), size = x.shape, weights[1].shape[2]
    half = GATES[kind] * size
    reverse = d == 1 and directions[0]
    if reverse:
        x = Node(Gather(0), x, places(t, t - 1, -1))
    w, r, bias = weights
    held: list[Node] = []
    for i in range(d):
        of_x, of_h = (slice_(_of(bias, i), 0, k * half, (k + 1) * half) for k in (0, 1))
        held += [_in_order(each, _GATES[kind], size) for each in (_of(w, i), _of(r, i), of_x, of_h)]
    states = list(before if kind == "LSTM" else before[:1])
    types = [TensorType(x.dtype, s) for s in ((t, b, d * size), (d, b, size), (d, b, size))]
    y, *last = by_torch(op, "tilewright.recurrent_layer.default", [x, states, held, layer], types)
    if reverse:
        y = Node(Gather(0), y, places(t, t - 1, -1))
    return [transpose(reshape(y, (t, b, d, size)), (0, 2, 1, 3)), *last]


def _in_order(weight: Node, order: Sequence[int], size: int) -> Node:
    """The rows of gates in another order."""
    return concat([slice_(weight, 0, i * size, (i + 1) * size) for i in order], 0)


def _of(weight: Node, direction: int) -> Node:
    """The part of a weight that is one direction's."""
    return reshape(slice_(weight, 0, direction, direction + 1), weight.shape[1:])


def _zeros(dtype: DType, shape: Sequence[int]) -> Node:
    return broadcast(reshape(const(0.0, dtype), (1,) * len(shape)), shape)


def _variant(op: OpNode) -> bool:
    name = {"LSTM": "input_forget", "GRU": "linear_before_reset"}.get(op.op_type)
    return name is not None and bool(op.integer(name, 0))


def _activations(op: OpNode, directions: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The activations of all directions, and alpha and beta of each: those that take one take the next that is given."""
    usual = _USUAL[op.op_type] * directions
    names = tuple(s.decode("utf-8", "replace").lower() for s in op.strings("activations")) if op.has("activations") else usual
    if len(names) != len(usual) or not {*names} <= {*ACTIVATIONS}:
        raise op.refuse(f"activations {', '.join(names)}", f"{len(usual)} of {', '.join(sorted(ACTIVATIONS))}")
    found: list[float] = []
    given = {n: iter(op.reals(n) if op.has(n) else ()) for n in ("activation_alpha", "activation_beta")}
    for name in names:
        for (attribute, values), usual in zip(given.items(), (_ALPHA, _BETA), strict=True):
            value = next(values, usual[name]) if name in usual else 0.0
            if value is None:
                raise op.refuse(f"activation {name} without {attribute}", f"give {attribute}, of which runtimes differ")
            found.append(value)
    return names, tuple(found)
