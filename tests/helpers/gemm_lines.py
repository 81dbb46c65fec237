"""Random lines of the gemm notation, each with what it means worked out in NumPy, in float64 and int64, from the line alone."""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

INTEGERS = {"s4": (-8, 7), "u4": (0, 15), "s8": (-128, 127), "u8": (0, 255), "s16": (-(2**15), 2**15 - 1)}
EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "f8e4m3fn": 2.0**-3, "f8e5m2": 2.0**-2}
NUMPY = {
    "s4": ml_dtypes.int4,
    "u4": ml_dtypes.uint4,
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "s32": np.int32,
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
}
STORAGE = {
    "s4": torch.int8,
    "u4": torch.uint8,
    "s8": torch.int8,
    "u8": torch.uint8,
    "s16": torch.int16,
    "s32": torch.int32,
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
UNARY = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "negate": np.negative,
    "abs": np.abs,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sqrt": np.sqrt,
}
BINARY = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "maximum": np.maximum, "minimum": np.minimum}


@dataclass
class Operand:
    """One operand of a line."""

    dtype: str
    shape: tuple[int, ...]
    transposed: bool
    attribute: str = ""
    zero_point: bool = False

    @property
    def is_integer(self):
        return self.dtype in INTEGERS

    def __str__(self):
        shown = f"{self.dtype}[{','.join(map(str, self.shape))}]{'^T' if self.transposed else ''}"
        return " ".join([shown, *([self.attribute] if self.attribute else []), *(["zero_point"] if self.zero_point else [])])

    def block(self, k_axis):
        """Extents of the blocks that share a scale, or None."""
        kind, _, value = self.attribute.partition("=")
        extents = [1] * len(self.shape)
        if kind == "group":
            extents[k_axis] = int(value)
        elif kind == "block":
            extents[-2:] = map(int, value.split("x"))
        else:
            return None
        return extents

    def scale_shape(self, k_axis):
        """Shape of the scale, None if the line asks for none."""
        if self.attribute == "scale=tensor":
            return ()
        if self.attribute == "scale=channel":
            kept = -1 if k_axis == -2 else -2
            return tuple(d if i == len(self.shape) + kept else 1 for i, d in enumerate(self.shape))
        block = self.block(k_axis)
        return None if block is None else tuple(-(-d // b) for d, b in zip(self.shape, block, strict=True))


@dataclass
class Line:
    """A line of the notation and its meaning."""

    a: Operand
    b: Operand
    steps: list[tuple[str, str]]  # (function or sign, side: a word, a number or "")
    result: str = ""  # dtype or ""
    modes: list[str] = field(default_factory=list)  # saturate, scale=…, zero_point
    batch: tuple[int, ...] = ()
    extents: tuple[int, int, int] = (1, 1, 1)

    def __str__(self):
        text = f"{self.a} @ {self.b}"
        for fn, side in self.steps:
            if fn in "+-*/":
                text += f" {fn} {side}"
            else:
                text += f", {fn}({side})" if side else f", {fn}"
        return f"{text} -> {' '.join([self.result, *self.modes])}" if self.result else text

    @property
    def codes(self):
        """Tell whether codes are multiplied by codes."""
        a, b = self.a, self.b
        blocked = a.attribute[:5] in ("group", "block") or b.attribute[:5] in ("group", "block")
        return a.is_integer and b.is_integer and not blocked

    @property
    def compute(self):
        """The type operands are dequantised to."""
        wide = [t for t in ("f64", "f32") if t in (self.a.dtype, self.b.dtype)]
        narrow = [t for t in (self.a.dtype, self.b.dtype) if t in ("f16", "bf16")]
        return (wide or narrow or ["f32"])[0]

    @property
    def result_shape(self):
        return (*self.batch, self.extents[0], self.extents[1])

    def side_type(self, word):
        """Type and shape of a side input."""
        name, _, said = word.partition(":")
        shape = self.result_shape
        shapes = {"number": (), "column": shape[-1:], "row": (*shape[:-1], 1), "result": shape}
        natural = (
            self.result if self.result in EPSILON and name in ("offset", "bias", "row_bias", "residual", "factor") else "f32"
        )
        return said or natural, shapes[WORDS[name]]

    def input_types(self):
        """(name, type, shape) of every input, in the order of the line."""
        found = [("a", self.a.dtype, self.a.shape), ("b", self.b.dtype, self.b.shape)]
        for name, operand, other, k_axis in self._sides():
            shape = operand.scale_shape(k_axis)
            if shape is not None:
                wide = other.dtype in ("f64", "f32", "f16", "bf16")
                found.append((f"{name}_scale", other.dtype if wide else "f32", shape))
            if operand.zero_point:
                found.append((f"{name}_zero_point", operand.dtype, () if shape is None else shape))
        for _, side in self.steps:
            if side.partition(":")[0] in WORDS:
                found.append((side.partition(":")[0], *self.side_type(side)))
        for mode in self.modes:
            if mode.startswith("scale="):
                shape = {"tensor": (), "row": (*self.result_shape[:-1], 1), "column": self.result_shape[-1:]}[mode[6:]]
                found.append(("out_scale", "f32", shape))
            elif mode == "zero_point":
                found.append(("out_zero_point", self.result, ()))
        return found

    def _sides(self):
        yield "a", self.a, self.b, -2 if self.a.transposed else -1
        yield "b", self.b, self.a, -1 if self.b.transposed else -2

    def arrays(self, seed):
        """Random inputs as NumPy arrays; scales are positive, and small where codes are wide."""
        rng = np.random.default_rng(seed)
        found = []
        for name, dtype, shape in self.input_types():
            if dtype in INTEGERS or dtype == "s32":
                low, high = INTEGERS.get(dtype, (-1000, 1000))
                value = rng.integers(low, high, shape, endpoint=True)
                value = np.asarray(value)
                if value.size > 2 and name in "ab":
                    value.reshape(-1)[:2] = low, high
            elif "scale" in name:
                value = np.asarray(rng.uniform(0.5, 1.5, shape)) / (8 if name in ("a_scale", "b_scale") else 1)
            else:
                value = np.asarray(rng.standard_normal(shape))
            found.append(np.asarray(value).astype(NUMPY[dtype]))
        return found

    def meaning(self, arrays):
        """The result in float64 (int64 if integers stay integers), and how far from it a right result may be."""
        with np.errstate(all="ignore"):
            return self._meaning(arrays)

    def _meaning(self, arrays):
        named = {}
        for (name, dtype, _), array in zip(self.input_types(), arrays, strict=True):
            wide = np.asarray(array.astype(np.int64 if dtype in INTEGERS or dtype == "s32" else np.float64))
            named.setdefault(name, []).append(wide)
        value, slack = self._product(named)
        for fn, side in self.steps:
            value, slack = self._stepped(fn, side, value, slack, named)
        return self._stored(value, slack, named)

    def _product(self, named):
        operands, rounding = [], 0.0
        scales = []
        for name, operand, _, k_axis in self._sides():
            x = named[name][0]
            block = operand.block(k_axis)

            def spread(t, block=block, shape=operand.shape):
                if block is None:
                    return t
                for axis, size in enumerate(block):
                    t = np.repeat(t, size, axis).take(np.arange(shape[axis]), axis)
                return t

            if operand.zero_point:
                x = x - spread(named[f"{name}_zero_point"][0])
            scale = spread(named[f"{name}_scale"][0]) if f"{name}_scale" in named else None
            if scale is not None and not self.codes:
                x = x * scale
                rounding = EPSILON[self.compute]
            if scale is not None and self.codes:
                scale = np.broadcast_to(scale, (*scale.shape[:0], *np.broadcast_shapes(scale.shape, (1,) * x.ndim)))
                scales.append(scale.swapaxes(-1, -2) if operand.transposed else scale)
            operands.append(x.swapaxes(-1, -2) if operand.transposed else x)
        a, b = operands
        if self.codes:
            value = wrapped(a @ b, 32)
            slack = np.zeros(value.shape)
            for scale in scales:
                value = value * scale
                slack = np.abs(value) * 2.0**-22
            return value, slack
        a, b = a.astype(np.float64), b.astype(np.float64)
        acc = 2.0**-52 if "f64" in (self.a.dtype, self.b.dtype) else 2.0**-23
        return a @ b, (np.abs(a) @ np.abs(b)) * ((a.shape[-1] + 2) * acc + 2 * rounding)

    def _stepped(self, fn, side, value, slack, named):
        if not side:
            if value.dtype.kind == "i" and fn in ("relu", "negate", "abs"):
                return wrapped(UNARY[fn](value), 32), slack
            if value.dtype.kind == "i":
                slack = np.abs(value) * 2.0**-23
            moved = [UNARY[fn](value + s * slack) for s in (-1, 0, 1)]
        else:
            word = side.partition(":")[0]
            if word in WORDS:
                other = named[word].pop(0)
            else:
                other = np.asarray(int(word) if side.endswith(":s32") else float(word))
            if value.dtype.kind == "i" and other.dtype.kind == "i":
                return wrapped(BINARY[fn](value, other), 32), slack
            slack = slack + np.abs(value) * 2.0**-23
            moved = [BINARY[fn](value.astype(np.float64) + s * slack, other) for s in (-1, 0, 1)]
            slack = np.abs(other) * 2.0**-22 * (fn in "+-")
        spread = np.maximum(np.abs(moved[0] - moved[1]), np.abs(moved[2] - moved[1]))
        if moved[1].dtype.kind == "i":
            return moved[1], np.zeros(moved[1].shape)
        return moved[1], spread + (slack if side else 0) + np.abs(moved[1]) * 2.0**-21

    def _stored(self, value, slack, named):
        if not self.result:
            return value, slack
        low, high = INTEGERS.get(self.result, (None, None))
        if "out_scale" in named:
            value, slack = value / named["out_scale"][0], slack / named["out_scale"][0]
            slack = slack + np.abs(value) * 2.0**-22
            if low is None:
                return self._narrowed(value, slack)
            zero = named["out_zero_point"][0] if "out_zero_point" in named else 0
            ends = [np.clip(np.round(value + s * slack) + zero, low, high) for s in (-1, 0, 1)]
            return ends[1], ends[2] - ends[0]
        if low is None:
            return self._narrowed(value.astype(np.float64), slack)
        if value.dtype.kind == "i":
            bits = {"s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16}[self.result]
            if "saturate" in self.modes:
                return np.clip(value, low, high), slack
            return wrapped(value, bits, signed=self.result[0] == "s"), slack
        ends = [np.clip(np.trunc(value + s * slack), low, high) for s in (-1, 0, 1)]
        return ends[1], ends[2] - ends[0]

    def _narrowed(self, value, slack):
        return value, slack + np.abs(value) * EPSILON[self.result] + {"f8e4m3fn": 2.0**-9, "f8e5m2": 2.0**-16}.get(
            self.result, 1e-7
        )


def wrapped(value, bits, signed=True):
    """Integers modulo 2**bits."""
    low = value & ((1 << bits) - 1)
    return np.where(low >= 1 << (bits - 1), low - (1 << bits), low) if signed else low


def tensors(line, arrays):
    """The inputs as the oracle takes them: torch tensors, 4-bit codes one to a byte."""
    found = []
    for (_, dtype, _), array in zip(line.input_types(), arrays, strict=True):
        wide = torch.tensor(np.asarray(array).astype(np.int64 if dtype in INTEGERS or dtype == "s32" else np.float64))
        found.append(wide.to(STORAGE[dtype]))
    return found


def assert_means(line, arrays, got):
    """The result is what the line means."""
    wanted, slack = line.meaning(arrays)
    got = got.to(torch.float64).numpy() if got.dtype.is_floating_point else got.to(torch.int64).numpy()
    assert got.shape == line.result_shape
    if wanted.dtype.kind == "i":
        assert got.dtype.kind == "i" or line.result in EPSILON
        np.testing.assert_array_less(np.abs(got - wanted), slack + 0.5)
        return
    largest = {"f16": 65504.0, "f8e4m3fn": 448.0, "f8e5m2": 57344.0}.get(line.result, np.inf)
    with np.errstate(all="ignore"):
        near = np.abs(got - wanted) <= slack + 1e-30
        both = (np.isnan(got) & np.isnan(wanted)) | (got == wanted)
        beyond = (np.abs(wanted) + slack > largest * (1 - EPSILON.get(line.result, 0))) & (
            ~np.isfinite(got) | (np.abs(got) == largest)
        )
        edge = np.isnan(slack)  # a square root or a pole within the rounding
    assert (near | both | beyond | edge).all(), (str(line), got, wanted, slack)


WORDS = {
    "offset": "number",
    "scale": "number",
    "bias": "column",
    "column_scale": "column",
    "residual": "result",
    "factor": "result",
}
WORDS |= {"row_bias": "row", "row_scale": "row", "row": "row"}
EXTENT = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13])
FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2")


@st.composite
def lines(draw, plain=False, largest=EXTENT):
    """Lines of every production; `plain` ones have no attributes, steps or result."""
    m, n, k = draw(largest), draw(largest), draw(largest)
    batches = draw(st.sampled_from([((), ()), ((2,), (2,)), ((3,), ()), ((), (2,)), ((1,), (3,)), ((2, 1), (3,))]))
    a_type, b_type = draw(
        st.one_of(
            st.tuples(st.sampled_from(sorted(INTEGERS)), st.sampled_from(sorted(INTEGERS))),
            st.sampled_from([(f, f) for f in FLOATS]),
            st.sampled_from(
                [("f32", "s8"), ("f16", "s4"), ("bf16", "u8"), ("s8", "f32"), ("bf16", "f8e4m3fn"), ("f64", "s16")]
            ),
            st.sampled_from([("f8e4m3fn", "f8e5m2"), ("f32", "bf16"), ("u4", "f16")]),
        )
    )

    def operand(dtype, batch, rows, columns):
        transposed = draw(st.booleans())
        shape = (*batch, *((columns, rows) if transposed else (rows, columns)))
        if plain:
            return Operand(dtype, shape, transposed)
        integer = dtype in INTEGERS
        choices = ["", "", "scale=tensor", "scale=channel", "group=2", "group=4", "block=2x3"]
        attribute = draw(st.sampled_from(choices if integer or dtype[:2] == "f8" else ["", "", "scale=tensor"]))
        return Operand(dtype, shape, transposed, attribute, integer and draw(st.booleans()))

    line = Line(operand(a_type, batches[0], m, k), operand(b_type, batches[1], k, n), [], "", [])
    line.batch, line.extents = np.broadcast_shapes(*batches), (m, n, k)
    if plain:
        return line
    sides = st.sampled_from([*WORDS, "bias:f32", "0.5", "-2", "row:f16", "bias:s32", "3:s32"])
    step = st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.just("")),
        st.tuples(st.sampled_from(["+", "-", "*", "maximum", "minimum"]), sides),
        st.tuples(st.just("/"), st.sampled_from(["scale", "0.5"])),
    )
    line.steps = draw(st.lists(step, max_size=3))
    line.result = draw(st.sampled_from(["", "", "f32", "bf16", "f16", "s8", "u8", "s16", "f8e4m3fn", "s4"]))
    if line.result in INTEGERS or line.result == "f8e4m3fn":
        line.modes = draw(
            st.sampled_from(
                [[], ["saturate"], ["scale=tensor"], ["scale=row"], ["scale=column"], ["scale=tensor", "zero_point"]]
            )
        )
        if line.result == "f8e4m3fn" and "zero_point" in line.modes:
            line.modes = ["scale=tensor"]
    return line
