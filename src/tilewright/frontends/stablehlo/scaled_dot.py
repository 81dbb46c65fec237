"""XLA's scaled-dot: a product of operands that carry scales by blocks (OCP Microscaling Formats 1.0: blocks of 32 along K).

StableHLO has no such operation, so HLO text is given to XLA's converter with a custom call in its place. The arithmetic follows
XLA's own decomposition (`ScaledDotRewriter`): each operand is multiplied by its scales in 16 bits, or wider where either is
wider. A scalar scale says that there is none. Scales of type f8e8m0fnu, 2^(e - 127) or NaN, are carried as their bits, in u8.
"""

from __future__ import annotations

import contextlib
import math
import re

import torch

from tilewright.dtype import BF16, F32, S32, U8, DType
from tilewright.frontends.stablehlo.dot import product
from tilewright.frontends.stablehlo.elementwise import overflow_to
from tilewright.frontends.stablehlo.module import is_e8m0
from tilewright.frontends.stablehlo.registry import Lowering, Site, Value
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Gather

TARGET = "tilewright.scaled_dot"
"""Custom call that stands for a scaled-dot; the axes of its operands follow, in the order of `_AXES`."""

_AXES = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
_SCALED_DOT = re.compile(r"^(?P<head>\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*[^=\"\n]*?)\bscaled-dot\(", re.MULTILINE)
_ATTRIBUTE = re.compile(rf"\s*,\s*(?P<name>{'|'.join(_AXES)}|operand_precision|algorithm)=(?P<value>\{{[^}}]*\}}|\w+)")
# What only moves values, or says where they are: their bits go along.
_MOVING = frozenset(
    {
        *("broadcast", "broadcast_in_dim", "call", "composite", "concatenate", "copy", "domain", "fusion", "get_tuple_element"),
        *("optimization_barrier", "reshape", "reverse", "select", "slice", "transpose", "tuple"),
    }
)


def as_custom_calls(text: str) -> str:
    """HLO text with every scaled-dot as a custom call, on the lines it had."""
    made: list[str] = []
    done = 0
    for found in _SCALED_DOT.finditer(text):
        if found.start() < done:
            continue
        close = _closing(text, found.end())
        given: dict[str, str] = {}
        end = close
        while said := _ATTRIBUTE.match(text, end):
            given[said["name"]] = said["value"]
            end = said.end()
        axes = ";".join(",".join(re.findall(r"\d+", given.get(name, ""))) for name in _AXES)
        lines = "\n" * text.count("\n", close, end)
        call = f'custom-call({text[found.end() : close]}, custom_call_target="{TARGET};{axes}"{lines}'
        made += [text[done : found.start()], found["head"], call]
        done = end
    return "".join([*made, text[done:]])


def _closing(text: str, at: int) -> int:
    """Index behind the parenthesis that closes the one before `at`."""
    depth = 1
    while depth and at < len(text):
        depth += (text[at] == "(") - (text[at] == ")")
        at += 1
    return at


def scaled_dot(site: Site) -> Value:
    """scaled_dot a, b, scale_a, scale_b -> gemm(dequantize(a, scale_a), dequantize(b, scale_b)).

    Raises:
        UnsupportedError: it has more or fewer operands than two and their scales, or scales that do not divide them.
    """
    lb, rb, lc, rc = ([int(d) for d in part.split(",") if d] for part in site.op.string("call_target_name").split(";")[1:])
    if len(site.nodes) != 4:
        raise site.refuse(f"a scaled-dot takes two operands and their scales, not {len(site.nodes)} values")
    return product(_scaled(site, 0), _scaled(site, 1), (lb, rb), (lc, rc), site.out.dtype, None)


def _scaled(site: Site, index: int) -> Node:
    """An operand times its scales, one for each block of extents that divide its own."""
    x, scale = site.nodes[index], site.nodes[index + 2]
    powers = is_e8m0(site.op.operands[index + 2].type)
    if is_e8m0(site.op.operands[index].type):
        x = convert(powers_of_two(x), BF16)
    if not scale.shape:
        return x
    if len(scale.shape) != len(x.shape) or any(not s or d % s for d, s in zip(x.shape, scale.shape, strict=True)):
        raise site.refuse(f"scales {scale.type} do not divide {x.type} into blocks")
    block = tuple(d // s for d, s in zip(x.shape, scale.shape, strict=True))
    if powers:
        return Node(Dequantize(_wide(x.dtype, BF16), block), x, powers_of_two(scale))
    return Node(Dequantize(_wide(x.dtype, scale.dtype), block), x, scale)


def _wide(a: DType, b: DType) -> DType:
    """The type an operand is scaled in: bf16 of two below 16 bits, else the wider, and f32 of two that differ."""
    if max(a.bits, b.bits) < 16:
        return BF16
    return a if a is b or a.bits > b.bits else b if b.bits > a.bits else F32


def powers_of_two(bits: Node) -> Node:
    """The numbers that u8 bits of f8e8m0fnu stand for, exact in f32: 2^-127, which is subnormal there, to 2^127, and NaN."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(-127, 129)).to(torch.float32)
    values[255] = torch.nan
    return Node(Gather(0), const(values, F32), convert(bits, S32))


def concerns_e8m0(site: Site) -> bool:
    """Tell whether an operation reads or makes f8e8m0fnu."""
    return any(is_e8m0(v.type) for v in (*site.op.operands, *site.op.results))


def lower_e8m0(site: Site, lower: Lowering | None) -> Value:
    """An operation on f8e8m0fnu: moved, converted from, or read by a scaled-dot.

    Raises:
        UnsupportedError: it computes with them, or makes them of other numbers.
    """
    name = site.op.name.partition(".")[2]
    made = is_e8m0(site.op.results[0].type)
    if name == "constant":
        return _constant(site)
    if name == "convert" and not made:
        return convert(powers_of_two(site.nodes[0]), site.out.dtype, overflow_to(site.out.dtype))
    if name == "bitcast_convert" and site.nodes[0].dtype is U8 and site.out.dtype is U8:
        return site.nodes[0]
    own = name == "custom_call" and site.op.string("call_target_name").startswith("tilewright.")
    with contextlib.suppress(Unmodelled):
        if lower is not None and (name in _MOVING or own):
            return lower(site)
    raise site.refuse("f8e8m0fnu is read as the scales of a product alone", hint="convert it to f32 first")


def _constant(site: Site) -> Value:
    """An attribute whose memory jaxlib does not lend, out of what it prints: numbers, NaN as its bits, or bytes of all."""
    printed = str(site.op.attribute("value"))
    body = printed[len("dense<") : printed.rindex(">", 0, printed.rindex(" : "))]
    if body.startswith('"0x'):
        bits = list(bytes.fromhex(body[3:-1]))
    else:
        bits = [int(x, 16) if x.startswith("0x") else round(math.log2(float(x))) + 127 for x in re.findall(r"[-+.\w]+", body)]
    value = torch.tensor(bits, dtype=torch.uint8)
    shape = site.out.shape
    return broadcast(const(value.reshape(()), U8), shape) if len(bits) == 1 else const(value.reshape(shape), U8)
