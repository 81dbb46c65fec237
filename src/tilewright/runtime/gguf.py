"""GGUF files (llama.cpp), read in place: a table of facts, a table of tensors, and their bytes. No code, so nothing can run.

Source of the format: ggml's docs/gguf.md, versions 2 and 3; of the blocks: ggml-common.h and ggml-quants.c. Matrices of the
architectures in `ARCHITECTURES` have the names and the order of rows that transformers gives them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from tilewright.dtype import S4, S8, U4
from tilewright.errors import InputError, UnsupportedError
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.sizes import round_up

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_DIMS, LONGEST, MOST_ENTRIES, ALIGNMENT = 4, 1 << 24, 1 << 20, 32
STRING, ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of a fact, by its type
_PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
_QUANTISED = {2: "Q4_0", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K"}
# Values and bytes of a block, of those that are not read, too, as their places are in the table.
_BLOCKS = {
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
}

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TURNED = {"llama": {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}}  # whose rows llama.cpp reorders


class GgufFile:
    """The tensors of one file by name; each is read when asked for.

    Attributes:
        facts: what the file says of its model, such as "general.architecture"; arrays are left out.

    Raises:
        InputError: there is no such file, or it is none of this format.
    """

    facts: dict[str, object]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, np.uint8, "c")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {error}", hint="a .gguf file on this machine") from error
        self._at = 0
        if self._take(4) != MAGIC:
            raise self._broken("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._broken(f"version {version}, where {VERSIONS} are known")
        tensors, facts = self._count(), self._count()
        self.facts = {}
        for _ in range(facts):
            name = self._string()
            value = self._value(self._number("I"))
            if value is not None:
                self.facts[name] = value
        self._entries: dict[str, tuple[str, int, tuple[int, ...], int]] = {}
        listed = [(self._string(), self._shape(), self._number("I"), self._number("Q")) for _ in range(tensors)]
        alignment = self.facts.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            raise self._broken(f"an alignment of {alignment}")
        start = round_up(self._at, alignment)
        for own, shape, kind, offset in listed:
            values, size = self._sizes(own, kind)
            if shape[-1] % values:
                raise self._broken(f"{own!r} has rows of {shape[-1]}, no multiple of {values}")
            if start + offset + math.prod(shape) // values * size > len(self._bytes):
                raise self._broken(f"{own!r} ends beyond the file's end")
            name = self._renamed(own)
            if name in self._entries:
                raise self._broken(f"{own!r} stands in its table twice")
            self._entries[name] = own, kind, shape, start + offset

    def _broken(self, why: str) -> InputError:
        return InputError(f"no GGUF file: {why}", where=str(self.path), hint="fetch it again")

    def _take(self, count: int) -> bytes:
        if count > LONGEST or self._at + count > len(self._bytes):
            raise self._broken(f"its tables end at byte {self._at}")
        self._at += count
        return self._bytes[self._at - count : self._at].tobytes()

    def _number(self, kind: str) -> int:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _count(self) -> int:
        count = self._number("Q")
        if count > MOST_ENTRIES:
            raise self._broken(f"a table of {count} entries")
        return count

    def _string(self) -> str:
        return self._take(self._number("Q")).decode(errors="replace")

    def _value(self, kind: int) -> object:
        """A fact's value; None for an array, which is passed over."""
        if kind == STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != ARRAY:
            raise self._broken(f"a fact of type {kind}")
        of, count = self._number("I"), self._count()
        if of in _NUMBERS:
            self._take(count * struct.calcsize(f"<{_NUMBERS[of]}"))
        elif of == STRING:
            for _ in range(count):
                self._string()
        else:
            raise self._broken(f"an array of type {of}")
        return None

    def _shape(self) -> tuple[int, ...]:
        dims = self._number("I")
        if not 1 <= dims <= MOST_DIMS:
            raise self._broken(f"a tensor of {dims} axes")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]  # the innermost is listed first
        if not all(0 < n < 1 << 40 for n in shape):
            raise self._broken(f"a tensor of shape {list(shape)}")
        return shape

    def _sizes(self, name: str, kind: int) -> tuple[int, int]:
        """Values and bytes of a block.

        Raises:
            UnsupportedError: a type whose blocks are not known, so that nothing tells where the tensor ends.
        """
        if kind in _PLAIN:
            return 1, _PLAIN[kind].itemsize
        if kind not in _BLOCKS:
            raise UnsupportedError(
                f"{name!r} has GGML's type {kind}", where=str(self.path), hint=", ".join(_QUANTISED.values())
            )
        return _BLOCKS[kind]

    def _renamed(self, name: str) -> str:
        """The name in transformers, for known architectures."""
        if self.facts.get("general.architecture") not in ARCHITECTURES:
            return name
        said = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if said is None:
            return name
        layer, own, last = said.groups()
        known = _OUTSIDE.get(own) if layer is None else _LAYER.get(own)
        if known is None:
            return name
        return f"{known}.{last}" if layer is None else f"model.layers.{layer}.{known}.{last}"

    @property
    def names(self) -> list[str]:
        """The names of the file's tensors."""
        return list(self._entries)

    def kind(self, name: str) -> str | None:
        """The name of a quantised tensor's type; None of a plain one."""
        of = self._entries[name][1]
        return None if of in _PLAIN else _QUANTISED.get(of, f"type {of}")

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._entries[name][2]

    def dtype(self, name: str) -> torch.dtype | None:
        """A plain tensor's type, without reading it; None of a quantised one."""
        return _PLAIN.get(self._entries[name][1])

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor as it stands there, a quantised one in f32.

        Raises:
            UnsupportedError: it is quantised in a way that is not read.
        """
        if self.kind(name) is not None:
            return self.weight(name).dequantize()
        own, of, shape, at = self._entries[name]
        raw = self._bytes[at : at + math.prod(shape) * _PLAIN[of].itemsize]
        value = torch.from_numpy(raw.copy()).view(_PLAIN[of]).reshape(shape)
        order = self._rows(own, shape[0])
        return value if order is None else value[order]

    def weight(self, name: str) -> QuantizedWeight:
        """A quantised matrix [out, in], dequantised bit for bit as ggml does it in f32.

        Raises:
            UnsupportedError: it is quantised in a way that is not read, or no matrix.
        """
        own, of, shape, at = self._entries[name]
        if of not in _QUANTISED or len(shape) != 2:
            what = f"{own!r} is {self.kind(name) or self.dtype(name)}{list(shape)}"
            raise UnsupportedError(what, where=str(self.path), hint=f"a matrix of {', '.join(_QUANTISED.values())}")
        values, size = _BLOCKS[of]
        raw = self._bytes[at : at + math.prod(shape) // values * size].copy()
        blocks = torch.from_numpy(raw).reshape(shape[0], -1, size)
        order = self._rows(own, shape[0])
        return _READERS[_QUANTISED[of]](blocks if order is None else blocks[order])

    def _rows(self, own: str, rows: int) -> torch.Tensor | None:
        """The places of rows where llama.cpp put both halves of each head's rotated values side by side; None if it did not."""
        architecture = str(self.facts.get("general.architecture"))
        key = TURNED.get(architecture, {}).get(own.rpartition(".")[0].rpartition(".")[2])
        if key is None:
            return None
        heads = self.facts.get(f"{architecture}.{key}", self.facts.get(f"{architecture}.attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise self._broken(f"{own!r} has {rows} rows for {heads} heads")
        return torch.arange(rows).reshape(heads, -1, 2).transpose(1, 2).flatten()


def _floats(part: torch.Tensor) -> torch.Tensor:
    """f16 values of bytes [..., 2 n]."""
    return part.contiguous().view(torch.float16)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    """32 codes, d * (q - 8): f16 d, then codes 0 to 15 in low halves, 16 to 31 in high ones."""
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1).flatten(1)
    return QuantizedWeight.of(codes.to(torch.int8) - 8, _floats(blocks[..., :2])[..., 0], S4, 32)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    """32 codes, d * q: f16 d, s8 q."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return QuantizedWeight.of(codes, _floats(blocks[..., :2])[..., 0], S8, 32)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    """8 times 32 codes, d * s * q - m * t: f16 d and m, 6 bits s and t each, 4 bits q. Both products are exact in f32."""
    d, m = (_floats(blocks[..., i : i + 2]).to(torch.float32) for i in (0, 2))
    low, high, rest = (blocks[..., i : i + 4] for i in (4, 8, 12))
    s = torch.cat((low & 63, rest & 15 | low >> 2 & 48), dim=-1)
    t = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), dim=-1)
    halves = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(1)
    return QuantizedWeight.of(codes, (d * s).flatten(1), U4, 32, offsets=-(m * t).flatten(1))


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    """16 times 16 codes, d * s * (q - 32): 4 low bits of each q, 2 high ones, s8 s, f16 d. d * s is exact in f32."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    four = torch.stack((low & 15, low >> 4), dim=-2).unflatten(-1, (2, 32))  # [..., 2, halves, 2, 32]
    two = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).unflatten(-2, (2, 2))
    codes = (four | two << 4).to(torch.int8) - 32
    s = blocks[..., 192:208].contiguous().view(torch.int8)
    d = _floats(blocks[..., 208:]).to(torch.float32)
    return QuantizedWeight.of(codes.flatten(1), (d * s).flatten(1), S8, 16)


_READERS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
