"""Programs to save, one for each way in which a step runs, and files of them that were changed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def with_own_digest(content: bytes) -> bytes:
    """The bytes of a file with the digest that its manifest has, whatever became of that."""
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        begin, end = header["manifest"]["data_offsets"]
        digest = hashlib.sha256(content[start + begin : start + end]).hexdigest()
        return content.replace(header["__metadata__"]["manifest"].encode(), digest.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return content


def manifest_of(content: bytes) -> Any:
    """The manifest of a file."""
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])["manifest"]["data_offsets"]
    return json.loads(content[start + begin : start + end])


def rewritten(content: bytes, manifest: object) -> bytes:
    """The bytes of a file with another manifest and its digest, as anybody can write them who has not the key."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    begin, end = header["manifest"]["data_offsets"]
    text = json.dumps(manifest).encode()
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at + len(text) - (end - begin) for at in entry["data_offsets"]]
    header["manifest"] |= {"data_offsets": [begin, begin + len(text)], "shape": [len(text)]}
    header["__metadata__"]["manifest"] = hashlib.sha256(text).hexdigest()
    table = json.dumps(header).encode()
    return len(table).to_bytes(8, "little") + table + content[start : start + begin] + text + content[start + end :]


EDGES = (
    None, -1, 0, 1, 2**63, "", [], {}, "opaque", "s4", "f64", "u64", [3, 4], [-1], [2**62, 4], 1e300, True, "constant/x", [0],
)  # fmt: skip


def with_an_edge(manifest: Any, seed: int) -> Any:
    """A manifest in which one value is gone, or another one at the edge."""
    rng, made = random.Random(seed), copy.deepcopy(manifest)

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield value, key
            yield from places(value[key])

    inside, key = rng.choice(list(places(made)))
    if isinstance(inside, dict) and rng.random() < 0.2:
        del inside[key]
    else:
        inside[key] = rng.choice(EDGES)
    return made


def reseal(path: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Change an array of a saved program, and every digest with it."""
    content = path.read_bytes()
    manifest = manifest_of(content)
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[manifest["arrays"][name]["entry"]]["data_offsets"]
    part = bytearray(content[start + begin : start + end])
    change(part)
    manifest["arrays"][name]["sha256"] = hashlib.sha256(part).hexdigest()
    path.write_bytes(rewritten(content[: start + begin] + part + content[start + end :], manifest))
