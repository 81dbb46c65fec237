"""Roundings inside a kernel that nothing outside can see are left out."""

from __future__ import annotations

from dataclasses import replace

from tilewright.dtype import BF16, F16, F32
from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Convert, Dequantize, Gemm
from tilewright.ir.pattern import Match, Pat, rule


@rule(Pat(ANCHORS), stage="precision")
def drop_rounding_between_steps(m: Match) -> Node | None:
    """gemm {store = f(convert(convert(x, f16), f32))} -> gemm {store = f(x)}, x an f32 that acc is part of; gemm or attention.

    Where: to f16 or bf16 and back to x's own type, without saturation, between acc and what is stored; what is stored keeps its
    type. Exact: no: it only adds precision (and range: a value past the largest f16 is infinite no longer). XLA does the same
    under its option allow-excess-precision, and Inductor inside its kernels. A rounding to 8 bits is meant and stays.
    Only `compile(…, excess_precision=True)` runs this.
    """
    node = m.node
    stores = stores_of(node)
    dependent = depends_on_acc(stores)
    dropped = {n: n.src[0].src[0] for n in toposort(stores) if n in dependent and _is_round_trip(n)}
    if not dropped:
        return None
    return rebuilt(node, operands_of(node), substitute(stores, dropped), node.src)


@rule(Pat(Gemm), stage="precision")
def keep_weights_unrounded_once_scaled(m: Match) -> Node | None:
    """gemm(x, dequantize[bf16](codes, scales)) -> gemm(x, dequantize[f32](codes, scales)), f16 alike, on either side.

    Where: codes are integers of 4 bits with a scale for each group along K, and x is f16 or bf16. Exact: no: it only adds
    precision. What is gained is time: a group's sum of whole codes is scaled once, instead of each weight being scaled and
    rounded. Only `compile(…, excess_precision=True)` runs this.
    """
    node = m.node
    operands = operands_of(node)
    dropped = {n: Node(replace(n.op, dtype=F32), *n.src) for n in toposort(operands) if _is_grouped_weight(n)}
    if not dropped or not any(o.dtype in (F16, BF16) and not dropped.keys() & {*toposort((o,))} for o in operands):
        return None
    return rebuilt(node, substitute(operands, dropped), stores_of(node), node.src)


def _is_grouped_weight(n: Node) -> bool:
    op = n.op
    if not isinstance(op, Dequantize) or op.block is None or op.dtype not in (F16, BF16):
        return False
    return n.src[0].dtype.is_integer and n.src[0].dtype.bits == 4


def _is_round_trip(n: Node) -> bool:
    if not isinstance(n.op, Convert) or not isinstance(n.src[0].op, Convert):
        return False
    inner = n.src[0]
    plain = inner.op.overflow != "saturate" and inner.dtype in (F16, BF16)  # type: ignore[attr-defined]
    return plain and inner.src[0].dtype is n.dtype and n.dtype.bits > inner.dtype.bits
