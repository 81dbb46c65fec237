"""The total order of floats (IEEE 754-2019, 5.10): -NaN < -inf < … < -0 < +0 < … < inf < NaN.

StableHLO's interpreter compares as usual where a total order is asked for, so it is spelt out on the bits: read as a signed
integer, with all but the sign flipped where negative, they are in this order.
"""

from __future__ import annotations

import re

from tilewright.frontends.stablehlo.module import DTYPES

_ASKED = re.compile(
    r'(?P<out>%\w+) = "stablehlo\.compare"\((?P<a>%[\w#]+), (?P<b>%[\w#]+)\) <\{compare_type = '
    r"#stablehlo<comparison_type TOTALORDER>, comparison_direction = #stablehlo<comparison_direction (?P<direction>\w+)>\}>"
    r" : \((?P<type>tensor<[^>]*>),[^\n]*"
)


def spelt_out(text: str) -> str:
    """Generic MLIR text with every comparison by total order replaced by one of integers."""
    return _ASKED.sub(lambda m: total_order(m["out"], m["a"], m["b"], m["direction"], m["type"]), text)


def total_order(out: str, a: str, b: str, direction: str, type: str) -> str:
    """Lines of MLIR that set `out` to whether `a` stands in `direction` to `b`; both have the tensor type `type`."""
    element = re.split(r"[<x>]", type)[-2]
    narrow = DTYPES[element].bits <= 8
    width = 32 if narrow else DTYPES[element].bits
    integer, pred = type.replace(f"{element}>", f"i{width}>"), type.replace(f"{element}>", "i1>")
    prefix = f"%order_{out[1:]}"
    lines = [
        _constant(f"{prefix}_zero", 0, integer),
        _constant(f"{prefix}_flip", (1 << width - 1) - 1, integer),
    ]
    for side, name in ((a, f"{prefix}_a"), (b, f"{prefix}_b")):
        if narrow:
            lines.append(f'{name}_wide = "stablehlo.convert"({side}) : ({type}) -> {type.replace(f"{element}>", "f32>")}')
        source, given = (f"{name}_wide", type.replace(f"{element}>", "f32>")) if narrow else (side, type)
        lines += [
            f'{name}_bits = "stablehlo.bitcast_convert"({source}) : ({given}) -> {integer}',
            _compare(f"{name}_negative", f"{name}_bits", f"{prefix}_zero", "LT", integer, pred),
            f'{name}_flipped = "stablehlo.xor"({name}_bits, {prefix}_flip) : ({integer}, {integer}) -> {integer}',
            f'{name}_key = "stablehlo.select"({name}_negative, {name}_flipped, {name}_bits) : '
            f"({pred}, {integer}, {integer}) -> {integer}",
        ]
    lines.append(_compare(out, f"{prefix}_a_key", f"{prefix}_b_key", direction, integer, pred))
    return "\n".join(lines)


def _constant(name: str, value: int, type: str) -> str:
    return f'{name} = "stablehlo.constant"() <{{value = dense<{value}> : {type}}}> : () -> {type}'


def _compare(out: str, a: str, b: str, direction: str, type: str, pred: str) -> str:
    attributes = (
        f"<{{compare_type = #stablehlo<comparison_type SIGNED>, "
        f"comparison_direction = #stablehlo<comparison_direction {direction}>}}>"
    )
    return f'{out} = "stablehlo.compare"({a}, {b}) {attributes} : ({type}, {type}) -> {pred}'
