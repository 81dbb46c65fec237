"""Random calls of torch's operators as a file may write them, on operands with guard pages at both ends."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import random
from collections.abc import Callable

import torch

from tilewright.dtype import BY_NAME, OPAQUE, DType
from tilewright.errors import TilewrightError
from tilewright.frontends.tilewright_text import check_calls
from tilewright.frontends.torch import call as _torch_call
from tilewright.frontends.torch import file_call as _torch_file_call
from tilewright.frontends.torch.file_call import shapes_of_results
from tilewright.ir.build import input_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call
from tilewright.ir.types import TensorType

TRIES = 15
_torch_file_call.MOST_BYTES = 1 << 26  # larger ones take time, and show no more
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
INTEGERS = (-(2**63), -(2**31), -1000, -3, -2, -1, 0, 1, 2, 3, 5, 7, 64, 1000, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)
DTYPES = [BY_NAME[n] for n in ("f32", "f64", "f16", "bf16", "s8", "u8", "s16", "s32", "s64", "pred", "f8e4m3fn")]


def at_a_page(t: torch.Tensor, *, end: bool) -> torch.Tensor:
    """A dense copy whose memory ends (or begins) at a page that nobody may touch."""
    size = t.numel() * t.element_size()
    pages = max(1, -(-size // _PAGE))
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = _PAGE + (pages * _PAGE - size if end else 0)
    made = t.clone() if not size else torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size).view(t.dtype)
    made = made.view(t.shape).copy_(t)
    for guard in (base, base + (pages + 1) * _PAGE):
        _libc.mprotect(guard, _PAGE, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0)
    return made


def _integer(rng: random.Random) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.3 else rng.randint(-3, 6)


def _operand(rng: random.Random, like: torch.Tensor | None, name: str, sizes: list[int]) -> torch.Tensor:
    picks = name in ("index", "indices", "target", "offsets", "batch1_index") and rng.random() < 0.8
    if like is not None and rng.random() < 0.5:
        shape = list(like.shape)
        if shape and rng.random() < 0.3:
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 5])
    else:
        shape = [rng.choice(sizes) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5]))]
    dtype = (
        torch.int64
        if picks
        else like.dtype
        if like is not None and rng.random() < 0.8
        else rng.choice([*DTYPES[:1] * 6, *DTYPES]).to_torch()
    )
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        kind = rng.random()
        if kind < 0.5:
            return torch.randint(0, 3, shape, generator=generator).to(dtype)
        if kind < 0.8:
            return torch.randint(-100, 100, shape, generator=generator).to(dtype)
        return torch.randint(-(2**62), 2**62, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator)
    if rng.random() < 0.3 and x.numel():
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0])
    return x.to(dtype)


class _Arguments:
    """Random arguments for a schema."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = rng.choice([[1, 2, 3], [2], [3, 6], [4, 8], [1, 16], [0, 1, 2, 5], [1, 1, 7, 17]])
        self.tensors: list[torch.Tensor] = []

    def tensor(self, name: str) -> object:
        if self.tensors and self.rng.random() < 0.15:
            return {"tensor": self.rng.randrange(len(self.tensors))}
        self.tensors.append(_operand(self.rng, self.rng.choice(self.tensors) if self.tensors else None, name, self.sizes))
        return {"tensor": len(self.tensors) - 1}

    def number(self) -> object:
        if self.rng.random() < 0.5:
            return _integer(self.rng)
        x = self.rng.choice([0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, math.inf, math.nan, self.rng.gauss(0, 3)])
        return x if math.isfinite(x) else {"float": str(x)}

    def of(self, kind: str, name: str) -> object:
        rng = self.rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.5 else self.of(kind[9:-1], name)
        if kind.startswith("List["):
            count = rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 5])
            return [self.of(kind[5:-1], name) for _ in range(count)]
        if kind == "Tensor":
            return self.tensor(name)
        if kind == "number":
            return self.number()
        if kind == "float":
            x = self.number()
            return float(x) if isinstance(x, int) else x
        if kind == "bool":
            return rng.random() < 0.5
        if kind == "str":
            return rng.choice(
                ["none", "floor", "trunc", "tanh", "sum", "mean", "prod", "amax", "amin", "reflect", "L", "bogus"]
            )
        if name == "dtype":
            return {
                "torch": rng.choice(["float32", "float64", "bfloat16", "int8", "int32", "int64", "bool", "complex64", "uint8"])
            }
        if name == "layout":
            return {"torch": "strided"}
        if name == "memory_format":
            return {"torch": rng.choice(["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"])}
        if name == "device":
            return {"device": "cpu"}
        return _integer(rng)


def _drawn(target: str, rng: random.Random) -> tuple[Graph, list[torch.Tensor]]:
    """A graph of one call, and values for its operands.

    Raises:
        TilewrightError: what was drawn does not pass the check.
    """
    schema = _torch_call.schema_of(_torch_call.find_operator(target, target))
    arguments = _Arguments(rng)
    kwargs: dict[str, object] = {}
    args: list[object] = []
    for a in schema.arguments:
        if a.has_default_value() and rng.random() < 0.6:
            continue
        given = arguments.of(str(a.type), a.name)
        if a.kwarg_only or len(args) + len(kwargs) > len(args) or schema.arguments[len(args)].name != a.name:
            kwargs[a.name] = given
        else:
            args.append(given)
    payload = json.dumps({"args": args, "kwargs": kwargs})
    sources = [t.contiguous() for t in arguments.tensors]
    metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in sources]
    opaque = TensorType(OPAQUE, ())
    results: list[torch.Tensor] = []
    for guess in (len(schema.returns), *range(1, 9)):
        try:
            results = shapes_of_results(Call("torch", target, payload, (opaque,) * guess), metas)
            break
        except TilewrightError as error:
            if "is declared" not in str(error):
                raise
    inputs = tuple(input_(f"x{i}", _graph_type(t), tuple(t.shape)) for i, t in enumerate(sources))
    node = Node(Call("torch", target, payload, tuple(map(_type, results)) or (opaque,)), *inputs)
    return Graph("call", inputs, (node,), ("y",)), sources


def case(target: str, seed: int) -> Callable[[], object]:
    """One call, checked as a file's is and then evaluated; what it declares is what its kernel for shapes gives."""

    def run() -> None:
        rng = random.Random(f"{target} {seed}")
        for _ in range(TRIES - 1):
            try:
                graph, sources = _drawn(target, rng)
                break
            except TilewrightError:
                continue
        else:
            graph, sources = _drawn(target, rng)
        check_calls(graph)
        values = [at_a_page(t, end=rng.random() < 0.8) for t in sources]
        (node,) = graph.outputs
        assert node.op.evaluate(node, values) is not None

    return run


def _graph_type(t: torch.Tensor) -> DType:
    return next(d for d in DTYPES if d.to_torch() == t.dtype)


def _type(t: torch.Tensor) -> TensorType:
    found = _torch_call.dtype_of(t.dtype)
    return TensorType(found, () if found is OPAQUE else tuple(t.shape))
