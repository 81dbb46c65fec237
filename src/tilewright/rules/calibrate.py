"""Quantising a float model: the types, the ranges behind them, and each layer's loss.

Not rewrite rules but the choice that feeds them: `quantize` writes quantise-dequantise pairs around each product with a
constant weight, exactly as a model file with such pairs would, and the rules fold them. It stands beside them since it, too,
makes one graph of another, of what they recognise as products.

Symmetric throughout: scale = largest magnitude / largest code. Weights per column (or per group of K), activations per tensor
(from calibration data) or per row (computed as the model runs). Source: Nagel et al. 2021, arXiv 2106.08295, sections 2 and 4.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S4, S8, DType, from_torch
from tilewright.errors import InputError, TypeMismatchError, check_type, say
from tilewright.hardware.load import uncrowded
from tilewright.ir.build import const, input_, map_, reduce_
from tilewright.ir.evaluate import evaluate, evaluate_nodes
from tilewright.ir.few_bits import held_finite
from tilewright.ir.graph import Graph, Node, label_of, toposort
from tilewright.ir.literal import Literal as Data
from tilewright.ir.ops import Attention, Const, Convert, Dequantize, Gemm, Param, Place, Quantize, Transpose
from tilewright.ir.types import Shape, TensorType

SAMPLE_ROWS, FEW_ROWS = 256, 16  # the second where the time is over
MOST_NAMED = 6  # of what stays in float
SMALLEST_SCALE = 2.0**-126  # a column of zeros gets a scale that divides: the smallest normal f32, whose reciprocal is finite


@dataclass(frozen=True)
class Scheme:
    """The types and the granularity to quantise to.

    Attributes:
        weight: type of the weights' codes.
        activation: type of the activations' codes; None leaves activations as they are.
        group: elements along K that share a weight's scale; 0 for one scale a column.
        rows: activations are scaled per row, computed at run time, instead of per tensor from calibration.
        attention: type of the codes of what attention multiplies, per tensor from calibration; None leaves that as it is.
    """

    weight: DType
    activation: DType | None
    group: int = 0
    rows: Literal["tensor", "row"] = "tensor"
    attention: DType | None = None

    def __str__(self) -> str:
        weight = f"{self.weight} weights per {f'group of {self.group}' if self.group else 'column'}"
        inner = f", {self.attention} attention" if self.attention else ""
        return f"{weight}, {self.activation or 'float'} activations" + (f" per {self.rows}" if self.activation else "") + inner

    @property
    def said(self) -> tuple[str, str, int, str, str]:
        """All of it, in words and numbers."""
        return str(self.weight), str(self.activation), self.group, self.rows, str(self.attention)


SCHEMES: dict[str, Callable[[int, Literal["tensor", "row"]], Scheme]] = {
    "int8": lambda group, rows: Scheme(S8, S8, 0, rows),
    "fp8": lambda group, rows: Scheme(F8E4M3FN, F8E4M3FN, 0, rows, F8E4M3FN if rows == "tensor" else None),
    "w4": lambda group, rows: Scheme(S4, None, group),
    "w8": lambda group, rows: Scheme(S8, None, 0),
}


def scheme(name: str, *, group: int = 64, rows: Literal["tensor", "row"] = "tensor", attention: bool = False) -> Scheme:
    """The scheme called `name`: int8, fp8, w4 (a scale for `group` elements of K) or w8. With `attention`, fp8 with activations
    per tensor has codes for what attention multiplies, too.

    Names of `quantize_` are others, and write the group: its "w4g64" is this "w4", its "w4" has one scale a row.

    Raises:
        InputError: no such scheme, a group below 1, or `rows` is another word.
    """
    check_type(group, int, "group", "32, 64 or 128")
    if rows not in ("tensor", "row"):
        raise InputError(f"no activations per {rows}", hint="'tensor' or 'row'")
    if name not in SCHEMES:
        raise InputError(f"no quantisation called {name!r}", hint=", ".join(SCHEMES))
    if group < 1:
        raise InputError(f"a group of {group} elements", hint="32, 64 or 128")
    found = SCHEMES[name](group, rows)
    return found if attention else replace(found, attention=None)


@dataclass
class Seen:
    """Statistics of one product's left operand in calibration: its largest magnitude (NaN if it holds one) and some of its
    rows; of a product with one matrix for each batch, some rows of each batch."""

    largest: float = 0.0
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """The outcome of quantising one product.

    Attributes:
        where: its name in the source.
        error: relative error of its result on calibration rows, in norm.
        largest: magnitude that scales its activations per tensor.
        skip_reason: a sentence why it stayed in float, None if it was quantised.
        scale: of its activations; None if they are not quantised, or scaled per row as the model runs.
        weight_scales: the smallest and the largest scale of its weight.
        before: the product in the float model.
        after: what stands for it in the model that `quantize` returns.
    """

    where: str
    error: float
    largest: float
    skip_reason: str | None
    scale: float | None
    weight_scales: tuple[float, float]
    before: Node
    after: Node


@dataclass
class Calibration:
    """Ranges by product, and by what an attention multiplies; `batches` of data were seen."""

    batches: int = 0
    seen: dict[Node, Seen] = field(default_factory=dict[Node, Seen])
    operands: dict[Node, Seen] = field(default_factory=dict[Node, Seen])


def quantizable(node: Node) -> bool:
    """Tell whether a node is a float product of something computed with a constant matrix, or with one for each batch
    (experts)."""
    op = node.op
    if not isinstance(op, Gemm) or not isinstance(op.lhs.op, Param) or not isinstance(op.rhs.op, Param):
        return False
    left, right = node.src[op.lhs.op.index], node.src[op.rhs.op.index]
    return left.dtype.is_float and right.dtype.is_float and right.constant and not left.constant


def calibrate(
    graph: Graph, batches: Sequence[Mapping[str, torch.Tensor]], device: str = "cpu", *, until: float = math.inf
) -> Calibration:
    """Run the float model on each batch, operation by operation on a device, and record what its products read. Batches after
    the first that would begin past `until`, by `time.monotonic`, are left out, with a warning.

    Raises:
        InputError: no batch, or an input is missing or of another type.
    """
    if not batches:
        raise InputError("no calibration data", where=graph.name, hint="one batch of inputs at least")
    found = Calibration()
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes():
        if quantizable(node):
            found.seen[node] = Seen()
            readers.setdefault(_left(node), []).append(node)
        found.operands |= {s: Seen() for s in _multiplied(node)}

    def visit(node: Node, value: object) -> None:
        if node in found.operands:
            _see(found.operands[node], cast("torch.Tensor", value), batched=False)
        for reader in readers.get(node, ()):
            _see(found.seen[reader], cast("torch.Tensor", value), batched=len(_right(reader).shape) > 2)

    for i, batch in enumerate(batches):
        check_type(batch, Mapping, "batches", "tensors by the names of the inputs, a mapping for each batch")
        if i and time.monotonic() > until:
            say(f"calibrated with {i} of {len(batches)} batches, as the time was over: more of it (budget_s) takes them all")
            break
        with uncrowded():
            _evaluate(graph, batch, visit, device)
        found.batches += 1
        for node in graph.inputs:
            visit(node, batch.get(label_of(node)))
    return found


def _evaluate(graph: Graph, batch: Mapping[str, torch.Tensor], visit: Callable[[Node, object], None], device: str) -> None:
    try:
        evaluate(graph, batch, visit=visit, device=device)
    except (RuntimeError, TypeMismatchError):  # out of memory, or no such operation there
        if device == "cpu":
            raise
        evaluate(graph, batch, visit=visit)


def _see(seen: Seen, value: torch.Tensor, *, batched: bool) -> None:
    rows = value.detach()
    if not rows.numel():
        return
    low, high = (float(t) for t in torch.aminmax(rows.to(torch.float32)))
    largest = max(abs(low), abs(high))
    seen.largest = seen.largest if math.isnan(seen.largest) or seen.largest >= largest else largest
    if seen.rows is None:
        rows = rows if batched else rows.reshape(-1, rows.shape[-1])
        wanted = max(SAMPLE_ROWS // math.prod(rows.shape[:-2]), 1)
        seen.rows = rows[..., :: max(rows.shape[-2] // wanted, 1), :][..., :wanted, :].to("cpu", torch.float32, copy=True)


def _few(seen: Seen) -> Seen:
    """The statistics with no more than a few of the rows."""
    rows = seen.rows
    return seen if rows is None else replace(seen, rows=rows[..., :: max(rows.shape[-2] // FEW_ROWS, 1), :][..., :FEW_ROWS, :])


def _multiplied(node: Node) -> tuple[Node, ...]:
    """The operands that an attention multiplies: queries, keys and values; nothing of other nodes."""
    return node.src[:3] if isinstance(node.op, Attention) and not node.op.regions() else ()


def _left(node: Node) -> Node:
    assert isinstance(node.op, Gemm) and isinstance(node.op.lhs.op, Param)
    return node.src[node.op.lhs.op.index]


def _right(node: Node) -> Node:
    assert isinstance(node.op, Gemm) and isinstance(node.op.rhs.op, Param)
    return node.src[node.op.rhs.op.index]


def quantize(
    graph: Graph,
    to: Scheme,
    calibration: Calibration,
    *,
    rtol: float | None = None,
    device: str = "cpu",
    until: float = math.inf,
) -> tuple[Graph, list[Layer]]:
    """The model with every product that has a constant weight quantised, and what each lost, which is computed on a device, and
    past `until`, by `time.monotonic`, from `FEW_ROWS` of its calibration rows.

    A product whose result on its calibration rows is off by more than `rtol` (relative, in norm) stays in float; so does an
    attention of which an operand is.
    """
    replacement = _quantized_attentions(graph, to, calibration, rtol)
    made: dict[Node, tuple[_Made, str | None]] = {}
    silent: list[str] = []
    for node in graph.nodes():
        if node not in calibration.seen:
            continue
        seen = calibration.seen[node]
        shown = seen if time.monotonic() <= until else _few(seen)
        quantized = _quantized(node, to, shown, device)
        skip_reason = None
        if not seen.largest < float("inf"):
            skip_reason = "its activations are not finite"
        elif to.activation is not None and to.rows == "tensor" and seen.largest == 0:
            skip_reason = "its activations are 0 in all calibration data, which tells no scale"
            silent.append(graph.origin(node))
        elif not quantized.weight_scales[1] < float("inf"):
            skip_reason = "its weight is not finite"
        elif rtol is not None and not quantized.error <= rtol:
            skip_reason = f"its error {quantized.error:.3g} exceeds {rtol:g}"
        else:
            replacement[node] = quantized.node
        made[node] = quantized, skip_reason
    if silent:
        named = "every product" if len(silent) == len(made) else ", ".join(silent[:MOST_NAMED])
        say(f"calibration data are 0 at {named}, which stays in float: give batches as the model meets them")
    whole = graph.with_outputs([*graph.outputs, *made]).replace(replacement)
    results, after = whole.outputs[: len(graph.outputs)], whole.outputs[len(graph.outputs) :]
    layers = [
        Layer(graph.origin(n), m.error, calibration.seen[n].largest, skip_reason, m.scale, m.weight_scales, n, now)
        for (n, (m, skip_reason)), now in zip(made.items(), after, strict=True)
    ]
    quantized = whole.with_outputs(results, _named(whole.origins, layers))
    return replace(quantized, notes=(*quantized.notes, *_note(quantized))), layers


def left_in_float(graph: Graph) -> dict[str, int]:
    """Constants of two axes or more, of floats of 16 bits or more, that a graph reads: embeddings, experts, weights not
    quantised. Each name has its bytes; scales of codes are left out."""
    nodes = graph.nodes()
    scales = {s for n in nodes if isinstance(n.op, (Dequantize, Quantize)) for s in n.src[1:]}
    found: dict[str, int] = {}
    for node in nodes:
        if isinstance(node.op, Const) and _is_wide(node) and len(node.shape) > 1 and node not in scales:
            name = node.op.data.label or graph.origin(node)
            found[name] = found.get(name, 0) + _bytes(node)
    return found


def shares(left: Mapping[str, int], whole: int) -> list[str]:
    """A line for each name with its share of `whole` bytes, the largest first; names that differ in a number are one."""
    alike: dict[str, list[int]] = {}
    for name, size in left.items():
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(size)
    return [
        f"{name}{f' x{len(sizes)}' if len(sizes) > 1 else ''}: {sum(sizes) / 1e6:.1f} MB, {sum(sizes) / whole:.0%}"
        for name, sizes in sorted(alike.items(), key=lambda item: -sum(item[1]))
    ]


def _note(graph: Graph) -> list[str]:
    """A sentence on what quantising left in float, if there is any."""
    left = left_in_float(graph)
    codes = sum(_bytes(n) for n in graph.nodes() if isinstance(n.op, Const) and len(n.shape) > 1 and not _is_wide(n))
    whole = sum(left.values()) + codes
    if not sum(left.values()):
        return []
    lines = shares(left, whole)
    named = [*lines[:MOST_NAMED], *([f"{len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else [])]
    return [f"quantising left {sum(left.values()) / whole:.0%} of the bytes of all matrices in float: {'; '.join(named)}"]


def _is_wide(node: Node) -> bool:
    return node.dtype.is_float and node.dtype.bits > 8


def _bytes(node: Node) -> int:
    return math.prod(node.shape) * node.dtype.bits // 8


def _quantized_attentions(graph: Graph, to: Scheme, calibration: Calibration, rtol: float | None) -> dict[Node, Node]:
    """Replacements of each attention whose operands may all be quantised; sums, scores and weights stay as they are."""
    if to.attention is None:
        return {}
    quantised: dict[Node, Node] = {}
    for node, seen in calibration.operands.items():
        if seen.rows is None or not seen.largest < float("inf"):
            continue
        exact = seen.rows.double()
        error = float((_rounded(seen.rows, to.attention, "tensor", seen.largest).double() - exact).norm() / exact.norm())
        if rtol is None or error <= rtol:
            quantised[node] = _quantized_activation(node, to.attention, "tensor", seen.largest)
    attentions = [n for n in graph.nodes() if _multiplied(n) and all(s in quantised for s in _multiplied(n))]
    return {n: Node(n.op, *(quantised[s] for s in _multiplied(n)), *n.src[3:]) for n in attentions}


def _named(origins: Mapping[Node, str], layers: Sequence[Layer]) -> dict[Node, str]:
    """The origins, with codes of an activation called what the activation is: reports name a step by what it gives."""
    named = dict(origins)
    for layer in layers:
        codes = _left(layer.after).src[0] if layer.skip_reason is None and _left(layer.after).src else None
        if codes is not None and isinstance(codes.op, Quantize) and codes.src[0] in origins:
            named.setdefault(codes, origins[codes.src[0]])
    return named


@dataclass(frozen=True)
class _Made:
    """A quantised product, and what `Layer` says of it."""

    node: Node
    error: float
    scale: float | None
    weight_scales: tuple[float, float]


def _quantized(node: Node, to: Scheme, seen: Seen, device: str) -> _Made:
    """The product quantised, computed on a device; on the CPU where there is no memory for it."""
    with uncrowded():
        try:
            return _quantized_on(device, node, to, seen)
        except torch.OutOfMemoryError:
            return _quantized_on("cpu", node, to, seen)


def _quantized_on(device: str, node: Node, to: Scheme, seen: Seen) -> _Made:
    op = node.op
    assert isinstance(op, Gemm) and isinstance(op.lhs.op, Param) and isinstance(op.rhs.op, Param)
    left, right = _left(node), _right(node)
    weight = cast("torch.Tensor", evaluate_nodes((right,), {})[0]).to(device, torch.float32)
    own = right.dtype in (F16, BF16) and to.activation is None  # as other tools store them: each scale is rounded once
    group = min(to.group, max(weight.shape[-2], 1))
    codes, scale = _encode(weight, to.weight, group, right.dtype if own else F32, right.dtype)
    label = right.op.data.label if isinstance(right.op, Const) else ""
    data = Data(TensorType(to.weight, tuple(weight.shape)), codes.cpu(), label and f"{label}.{to.weight}")
    coded, lies = Node(Const(data)), _placed(right)
    coded = coded if lies is None else Node(Place(lies), coded)
    back = Node(Dequantize(right.dtype, _block(weight, group)), coded, const(scale.cpu()))
    rows = None if seen.rows is None else seen.rows.to(device)
    if to.activation is not None:
        left = _quantized_activation(left, to.activation, to.rows, seen.largest)
        if rows is not None:
            rows = _rounded(rows, to.activation, to.rows, seen.largest)
    src = list(node.src)
    src[op.lhs.op.index], src[op.rhs.op.index] = left, back
    error = 0.0
    if rows is not None and seen.rows is not None:
        decoded = evaluate_nodes((back,), dict(zip(back.src, (codes, scale), strict=True)))[0]
        exact = seen.rows.to(device).double() @ weight.double()
        off = rows.double() @ cast("torch.Tensor", decoded).double() - exact
        error = float(off.norm() / exact.norm().clamp_min(1e-300))
    activation = _scale_of(seen.largest, to.activation) if to.activation is not None and to.rows == "tensor" else None
    weights = (float(scale.min()), float(scale.max())) if scale.numel() else (SMALLEST_SCALE, SMALLEST_SCALE)
    return _Made(Node(op, *src), error, activation, weights)


def _placed(weight: Node) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes that split each axis of a weight by a place that it is read through; None where nothing says so."""
    if isinstance(weight.op, Place) and not weight.op.partial:
        return weight.op.splits
    if isinstance(weight.op, (Convert, Transpose)):
        lies = _placed(weight.src[0])
        return lies if lies is None or isinstance(weight.op, Convert) else tuple(lies[i] for i in weight.op.perm)
    return None


def _encode(weight: torch.Tensor, to: DType, group: int, scales: DType, back: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a weight [..., K, N] and its scales of a type: [..., 1, N], or [..., ceil(K / group), N]. Decoded to type `back`
    they are finite. The same bits on every device."""
    *batch, k, n = weight.shape
    most = torch.tensor(float(to.max), device=weight.device)  # on a GPU torch multiplies by the inverse of a Python number
    if group:
        blocks = -(-k // group)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, blocks * group - k))
        largest = padded.reshape(*batch, blocks, group, n).abs().amax(-2)
    else:
        largest = weight.abs().amax(-2, keepdim=True) if k else weight.new_zeros(*batch, 1, n)
    kind = scales.to_torch()
    peaks = largest / most if k == 0 else (largest / most).amax(-2)
    if ((peaks > 0) & (peaks < torch.finfo(kind).smallest_normal)).any():  # held to that, a column of f16 would lose its codes
        kind = torch.float32
    scale = (largest / most).to(kind).clamp_min(max(SMALLEST_SCALE, torch.finfo(kind).smallest_normal))
    scale = held_finite(scale, int(to.max), back.to_torch())
    given = [input_(name, from_torch(t.dtype), t.shape) for name, t in (("weight", weight), ("scale", scale))]
    coded = Node(Quantize(to, _block(weight, group)), *given)
    codes = cast("torch.Tensor", evaluate_nodes((coded,), dict(zip(given, (weight, scale), strict=True)))[0])
    return codes if to.is_float else codes.clamp_(min=-int(to.max)), scale  # the code below would decode to infinity, too


def _block(weight: torch.Tensor, group: int) -> Shape | None:
    """The block of a weight that shares a scale; None if that is a column."""
    return (*(1 for _ in weight.shape[:-2]), group, 1) if group else None


def _scale_of(largest: float, to: DType) -> float:
    """The scale of a tensor whose largest magnitude is given."""
    return max(largest / to.max, SMALLEST_SCALE)


def _quantized_activation(x: Node, to: DType, rows: str, largest: float) -> Node:
    if rows == "tensor":
        scale = const(_scale_of(largest, to), F32)
    else:
        wide = x if x.dtype is F32 else Node(Convert(F32), x)
        peak = reduce_("maximum", map_("abs", wide), [-1], keepdims=True)
        scale = map_("maximum", map_("multiply", peak, const(1 / to.max, F32)), const(SMALLEST_SCALE, F32))
    return Node(Dequantize(x.dtype), Node(Quantize(to), x, scale), scale)


def _rounded(rows: torch.Tensor, to: DType, by: str, largest: float) -> torch.Tensor:
    """Rows as they are once rounded to a type and back, computed where they lie."""
    given = input_("rows", from_torch(rows.dtype), rows.shape)
    node = _quantized_activation(given, to, by, largest)
    leaves = [n for n in toposort((node,)) if not n.src and n is not given]
    known = zip(leaves, evaluate_nodes(leaves, {}), strict=True)
    there = {n: cast("torch.Tensor", v).to(rows.device) for n, v in known}
    with rows.device:
        return cast("torch.Tensor", evaluate_nodes((node,), {given: rows, **there})[0])
