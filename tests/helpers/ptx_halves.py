"""A few PTX instructions on pairs of f16, as NumPy does them: enough for the epilogues that are written in them."""

import re

import numpy as np
import torch

HALF = np.float16


def word_of(bits):
    """The two numbers of a word."""
    return [np.array(bits >> s & 0xFFFF, np.uint16).view(HALF) for s in (0, 16)]


def _fma(a, b, c):
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(HALF)


def _fp8(kind):
    target = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}[kind]

    def convert(x):
        most = torch.finfo(target).max
        return torch.from_numpy(x.astype(np.float32)).clamp(-most, most).to(target).view(torch.uint8).numpy()

    return convert


MEANT = {
    "abs": np.abs,
    "neg": np.negative,
    "mul.rn": lambda a, b: (a.astype(np.float64) * b).astype(HALF),
    "fma.rn": _fma,
    "min": np.fmin,  # a number where one of them is NaN
    "max": np.fmax,
}


def run(text, *given, power=lambda p: np.exp2(p.astype(np.float64)).astype(HALF)):
    """The bytes of $0 after the instructions of `text`, over operands $1, $2, ..., each a pair of arrays of f16 or a word.

    Args:
        power: of ex2.approx, whose result is off by up to 2^-9.9.
    """
    values = {f"${i + 1}": word_of(pair) if isinstance(pair, int) else list(pair) for i, pair in enumerate(given)}
    with np.errstate(all="ignore"):
        for line in filter(None, (part.strip() for part in text.strip(" {}").replace("{", "").replace("}", "").split(";"))):
            name, *operands = re.split(r"[ ,]+", line)
            if name == ".reg":
                continue
            to, *sources = operands
            if name == "mov.b32":
                pairs = [word_of(int(s, 16)) if s.startswith("0x") else values[s] for s in sources]
                values[to] = [v for pair in pairs for v in pair]
            elif name == "prmt.b32":
                assert sources[2] == "0x6420"
                values[to] = [v.view(np.uint16).astype(np.uint8) for s in sources[:2] for v in values[s]]
            elif name.startswith("cvt."):
                values[to] = [_fp8(name.split(".")[3])(v) for v in values[sources[0]]]
            elif name == "ex2.approx.f16x2":
                values[to] = [power(v) for v in values[sources[0]]]
            else:
                op = name.removesuffix(".f16x2")
                values[to] = [MEANT[op](*(np.broadcast_to(values[s][i], given[0][0].shape) for s in sources)) for i in (0, 1)]
    return values["$0"]
