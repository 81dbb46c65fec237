"""Programs to save, one for each way in which a step runs, and files of them that were changed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import tilewright
from tilewright.program import Program


class Embedded(nn.Module):
    """Picks by indices, a norm, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.table(ids)))


class Heads(nn.Module):
    """Attention between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 64))


class Remembering(nn.Module):
    """State: the last tokens of a cache, written at positions known beforehand and at positions that are data."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.register_buffer("cache", torch.randn(2, 6, 32))
        self.register_buffer("seen", torch.zeros(8, 32))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        self.cache[:, -1] = y
        self.seen[at] = y
        return self.cache.sum(1) + self.seen.sum(0)


class Sorted(nn.Module):
    """A call that torch itself runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.cumsum(self.lin(x), 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def compiled(module: nn.Module, *inputs: torch.Tensor, scheme: str | None = None) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """A module compiled without measuring, quantised on the way if a scheme is named; and its inputs."""
    quantize = None
    if scheme is not None:
        quantize = tilewright.Quantization(tilewright.scheme(scheme), [{"input": inputs[0]}])
    return tilewright.compile(module.eval(), example_inputs=inputs, budget_s=0, quantize=quantize, cache=False), inputs


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


PROGRAMS: dict[str, Callable[[], tuple[Program, tuple[torch.Tensor, ...]]]] = {
    "f32": lambda: compiled(mlp(), _drawn(16, 64)),
    "int8": lambda: compiled(mlp(), _drawn(16, 64), scheme="int8"),
    "w4": lambda: compiled(mlp(), _drawn(16, 64), scheme="w4"),
    "attention": lambda: compiled(Heads(), _drawn(2, 16, 64)),
    "embedding": lambda: compiled(Embedded(), torch.randint(0, 50, (2, 7))),
    "state": lambda: compiled(Remembering(), _drawn(2, 32), torch.tensor([3, 5])),
    "call": lambda: compiled(Sorted(), _drawn(4, 16)),
}


def changed(content: bytes, seed: int) -> bytes:
    """The bytes of a file with a few of them changed, taken out, put in or repeated."""
    rng = random.Random(seed)
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, count = rng.randrange(len(data)), rng.choice((1, 1, 4, 64))
        if rng.random() < 0.3:  # in the header and the manifest, which are the smaller part
            at = rng.randrange(min(len(data), 8192))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + count] = rng.randbytes(count)
            case 2:
                del data[at : at + count]
            case 3:
                data[at:at] = rng.randbytes(count)
            case 4:
                other = rng.randrange(len(data))
                data[at : at + count] = data[other : other + count]
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


def resealed(path: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Change an array of a saved program in place, and every digest with it, as one can who has not the key."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = 8 + length

    def place(entry: str) -> slice:
        begin, end = header[entry]["data_offsets"]
        return slice(start + begin, start + end)

    at = place("manifest")
    text = bytes(content[at])
    manifest = json.loads(text)
    if name == "manifest":
        part = bytearray(text)
    else:
        array = manifest["arrays"][name]
        part = content[place(array["entry"])]
    before = hashlib.sha256(part).hexdigest()
    change(part)
    if name == "manifest":
        text = bytes(part)
    else:
        content[place(array["entry"])] = part
        text = text.replace(before.encode(), hashlib.sha256(part).hexdigest().encode())
    content[at] = text
    old = header["__metadata__"]["manifest"].encode()
    content = content.replace(old, hashlib.sha256(text).hexdigest().encode())
    path.write_bytes(content)
