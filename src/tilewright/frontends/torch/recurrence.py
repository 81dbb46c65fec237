"""Operators for recurrent layers: `tilewright::recurrent_layer` is torch's own, and `tilewright::recurrence` one direction of
an LSTM, a GRU or an RNN behind its input's products, as ONNX means them.

Torch's layers have fixed activations, no peepholes, and lengths in another form; on operands that do not fit they end the
process, so that these are looked at first. The other operator is a loop in Python around torch's operators: a step takes a
product of [B, H] by [H, gates] and about ten elementwise ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import leaky_relu, softplus

from tilewright.errors import InputError

Function = Callable[[torch.Tensor, float, float], torch.Tensor]

# ONNX's activations of a recurrence, of x, alpha and beta.
ACTIVATIONS: Mapping[str, Function] = {
    "affine": lambda x, a, b: a * x + b,
    "elu": lambda x, a, _: torch.where(x > 0, x, a * torch.expm1(x)),
    "hardsigmoid": lambda x, a, b: (a * x + b).clamp(0, 1),
    "leakyrelu": lambda x, a, _: leaky_relu(x, a),
    "relu": lambda x, *_: torch.relu(x),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "sigmoid": lambda x, *_: torch.sigmoid(x),
    "softplus": lambda x, *_: softplus(x),
    "softsign": lambda x, *_: x / (1 + x.abs()),
    "tanh": lambda x, *_: torch.tanh(x),
    "thresholdedrelu": lambda x, a, _: torch.where(x > a, x, 0.0),
}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LAYERS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}

Activations = Sequence[Callable[[torch.Tensor], torch.Tensor]]


def _recurrence(
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor | None,
    peepholes: torch.Tensor | None,
    lengths: torch.Tensor | None,
    kind: str,
    functions: Sequence[str],
    parameters: Sequence[float],
    clip: float,
    variant: bool,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [T, B, H] after each step, 0 behind a sequence's end, and the last h and c [B, H] of each sequence, 0 of an
    empty one.

    Args:
        gates: [T, B, gates * H], products of the input by its weights, with their biases: i, o, f, c of an LSTM; z, r, h of a
            GRU.
        weight, bias: [gates * H, H] and [gates * H] of the state.
        h, c: [B, H] before the first step, c of an LSTM alone.
        peepholes: [3 * H] of i, o, f, of an LSTM.
        lengths: [B] whole numbers, the steps of each sequence; None: T.
        kind: LSTM, GRU or RNN.
        functions, parameters: names in `ACTIVATIONS`, and alpha and beta of each.
        clip: what activations take at most, with either sign; 0: anything.
        variant: `input_forget` of an LSTM, `linear_before_reset` of a GRU.
        backwards: from each sequence's last step to its first.

    Raises:
        InputError: these do not fit together, or a sequence has more steps than there are, or less than none.
    """
    result, *_ = _shapes(gates, weight, bias, h, c, peepholes, lengths, kind, functions, parameters)
    if lengths is not None and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= len(gates):
        raise InputError(f"lengths of {lengths.tolist()} for {len(gates)} steps", where=NAME, hint=f"0 to {len(gates)}")
    clips = [clip, clip, 0.0]  # onnxruntime leaves an LSTM's cell as it is
    act = [_bounded(ACTIVATIONS[n], parameters[2 * i], parameters[2 * i + 1], clips[i]) for i, n in enumerate(functions)]
    y, right, cell = torch.empty_like(result), weight.t(), torch.zeros_like(h) if c is None else c
    size = h.shape[1]
    for t in reversed(range(len(gates))) if backwards else range(len(gates)):
        if kind == "LSTM":
            new, next_cell = _lstm(torch.addmm(bias, h, right) + gates[t], cell, peepholes, act, variant)
        elif kind == "GRU":
            new, next_cell = _gru(gates[t], h, right, bias, act, variant), cell
        else:
            new, next_cell = act[0](torch.addmm(bias, h, right) + gates[t]), cell
        if lengths is None:
            y[t], h, cell = new, new, next_cell
        else:
            inside = (lengths > t)[:, None].expand(-1, size)
            y[t] = torch.where(inside, new, 0.0)
            h, cell = torch.where(inside, new, h), torch.where(inside, next_cell, cell)
    if lengths is not None:  # of a sequence without steps onnxruntime gives 0
        some = (lengths > 0)[:, None]
        h, cell = torch.where(some, h, 0.0), torch.where(some, cell, 0.0)
    return y, h.clone(), cell.clone()


def _bounded(f: Function, alpha: float, beta: float, clip: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return (lambda x: f(x.clamp(-clip, clip), alpha, beta)) if clip > 0 else (lambda x: f(x, alpha, beta))


def _lstm(
    gates: torch.Tensor, c: torch.Tensor, peepholes: torch.Tensor | None, act: Activations, joined: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    i, o, f, u = gates.chunk(4, 1)
    of_i, of_o, of_f = (None, None, None) if peepholes is None else peepholes.chunk(3)
    i = act[0](i if of_i is None else i + of_i * c)
    f = 1 - i if joined else act[0](f if of_f is None else f + of_f * c)
    c = f * c + i * act[1](u)
    return act[0](o if of_o is None else o + of_o * c) * act[2](c), c


def _gru(
    gates: torch.Tensor, h: torch.Tensor, right: torch.Tensor, bias: torch.Tensor, act: Activations, linear: bool
) -> torch.Tensor:
    two = 2 * h.shape[1]
    z, r = act[0](gates[:, :two] + torch.addmm(bias[:two], h, right[:, :two])).chunk(2, 1)
    if linear:
        u = r * torch.addmm(bias[two:], h, right[:, two:])
    else:
        u = torch.addmm(bias[two:], r * h, right[:, two:])
    return (1 - z) * act[1](gates[:, two:] + u) + z * h


def _shapes(
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor | None,
    peepholes: torch.Tensor | None,
    lengths: torch.Tensor | None,
    kind: str,
    functions: Sequence[str],
    parameters: Sequence[float],
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results without data, where these operands and arguments fit together."""
    size, many = h.shape[-1] if h.dim() else 0, GATES.get(kind, 0)
    wanted = {"h": (gates.shape[1] if gates.dim() == 3 else -1, size), "weight": (many * size, size), "bias": (many * size,)}
    given = {"h": h, "weight": weight, "bias": bias}
    for name, value, shape in (("c", c, wanted["h"]), ("peepholes", peepholes, (3 * size,))):
        if value is not None:
            wanted[name], given[name] = shape if kind == "LSTM" else (-1,), value
    wrong = [name for name, t in given.items() if tuple(t.shape) != wanted[name] or t.dtype is not gates.dtype]
    if gates.dim() != 3 or not many or gates.shape[2] != many * size or not gates.is_floating_point():
        wrong.append("gates")
    if lengths is not None and (lengths.shape != gates.shape[1:2] or lengths.is_floating_point() or lengths.is_complex()):
        wrong.append("lengths")
    if len(functions) != FUNCTIONS.get(kind) or not {*functions} <= {*ACTIVATIONS} or len(parameters) != 2 * len(functions):
        wrong.append("functions")
    if wrong:
        raise InputError(f"operands of a recurrence {kind!r} that do not fit: {', '.join(wrong)}", where=NAME)
    return gates.new_empty((*gates.shape[:2], size)), torch.empty_like(h), torch.empty_like(h)


def _layer(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [T, B, D * H] of torch's layer after each step, and the last h and c [D, B, H].

    Args:
        x: [T, B, I].
        states: h, and c of an LSTM, [D, B, H] before the first step; two directions are forwards and backwards.
        weights: of each direction those of the input [gates * H, I] and of the state [gates * H, H], and their biases, gates in
            torch's order.
        kind: lstm, gru, rnn_tanh or rnn_relu.

    Raises:
        InputError: these do not fit together.
    """
    _layer_shapes(x, states, weights, kind)
    rest = (tuple(weights), True, 1, 0.0, False, len(states[0]) == 2, False)
    if kind == "lstm":
        return torch.lstm(x, tuple(states), *rest)
    y, h = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}[kind](x, states[0], *rest)
    return y, h, torch.zeros_like(h)


def _layer_shapes(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results without data, where these operands fit together."""
    many = LAYERS.get(kind, 0)
    d, b, size = states[0].shape if states and states[0].dim() == 3 else (0, 0, 0)
    each = [(many * size, x.shape[-1] if x.dim() else 0), (many * size, size), (many * size,), (many * size,)]
    fits = (
        x.dim() == 3
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() > 0 < size
        and b == x.shape[1]
        and d in (1, 2)
        and [tuple(t.shape) for t in weights] == each * d
        and [tuple(t.shape) for t in states] == [(d, b, size)] * (2 if kind == "lstm" else 1)
        and all(t.dtype is x.dtype for t in (*states, *weights))
    )
    if not many or not fits:
        raise InputError(f"operands of a layer {kind!r} that do not fit", where=LAYER)
    return x.new_empty((*x.shape[:2], d * size)), x.new_empty((d, b, size)), x.new_empty((d, b, size))


_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "Sequence[torch.Tensor]": "Tensor[]",
    "str": "str",
    "Sequence[str]": "str[]",
    "Sequence[float]": "float[]",
    "float": "float",
    "bool": "bool",
}
NAME, LAYER = "tilewright::recurrence", "tilewright::recurrent_layer"
_library = torch.library.Library("tilewright", "FRAGMENT")  # defined for as long as it lives
for _name, _run, _without_data in ((NAME, _recurrence, _shapes), (LAYER, _layer, _layer_shapes)):
    _takes = ", ".join(f"{_TYPES[str(p.annotation)]} {name}" for name, p in inspect.signature(_run).parameters.items())
    _library.define(f"{_name.partition('::')[2]}({_takes}) -> (Tensor, Tensor, Tensor)")
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _without_data, "Meta")
