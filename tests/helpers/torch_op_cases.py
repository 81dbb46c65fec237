"""Small programs, one for each ATen operator that has a meaning in the graph, with odd shapes, NaN, infinities and extremes."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from against_torch import Case

from tilewright.dtype import from_torch

NAN, INF = float("nan"), float("inf")


def floats(*shape: int, dtype: torch.dtype = torch.float32, special: bool = True, seed: int = 0) -> torch.Tensor:
    """Normal numbers with NaN, infinities and signed zeros among them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    if special:
        for i, v in enumerate((NAN, INF, -INF, 0.0, -0.0, 1.0)):
            if i * 7 < x.numel():
                x.view(-1)[i * 7] = v
    return x.to(dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> torch.Tensor:
    """The whole range, with both ends among them."""
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
    x = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    x.view(-1)[0] = limits.min
    x.view(-1)[-1] = limits.max
    return x.to(dtype)


def bools(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5


def small(*shape: int, dtype: torch.dtype = torch.int64, high: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, Y = floats(3, 5, 7), floats(3, 5, 7, seed=1)
H, B = floats(3, 5, 7, dtype=torch.float16), floats(3, 5, 7, dtype=torch.bfloat16, seed=2)
D = floats(3, 5, 7, dtype=torch.float64, seed=3)
K, J = ints(3, 5, 7), ints(3, 5, 7, seed=1)
S8, U8 = ints(3, 5, 7, dtype=torch.int8), ints(3, 5, 7, dtype=torch.uint8)
P, Q = bools(3, 5, 7), bools(3, 5, 7, seed=1)
POSITIVE = floats(3, 5, 7, special=False).abs() + 0.1
NONZERO = J | 1
LARGE = torch.tensor([3e38, -3e38, 2e38, 1e38, 1e20, 0.0, 1.0]).bfloat16()
FAR = torch.tensor([[3e38, 1e38, -1e38, 3e38, 2e38], [3e38, -3e38, 0.0, 1.0, 1e19], [3e38, 3e38, 3e38, 3e38, 3e38]])
# torch's gelu of an infinity is NaN or not, by the width of the machine's vectors.
FINITE = X.clamp(-30, 30)

UNARY = """abs ceil floor round trunc neg relu exp expm1 log log1p sqrt rsqrt sin cos tan sinh cosh tanh asin acos atan asinh
    acosh atanh erf erfc sigmoid reciprocal exp2 sign isnan isinf isfinite square logical_not positive"""
BINARY = "add sub mul div maximum minimum atan2 fmod remainder eq ne lt le gt ge logical_and logical_or logical_xor"


def elementwise() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in UNARY.split():
        f = getattr(torch, name)
        for kind, x in (("f32", X), ("f16", H), ("bf16", B), ("f64", D)):
            cases[f"{name} {kind}"] = (f, (x,))
    for name in ("abs", "neg", "relu", "sign", "ceil", "exp", "sqrt", "sigmoid", "isnan", "isinf", "isfinite", "bitwise_not"):
        cases[f"{name} s32"] = (getattr(torch, name), (K,))
    cases["bitwise_not pred"] = (torch.bitwise_not, (P,))
    cases["logical_not s8"] = (torch.logical_not, (S8,))
    cases["sign pred"] = (torch.sign, (P,))
    for name in BINARY.split():
        f = getattr(torch, name)
        cases[f"{name} f32"] = (f, (X, Y))
        cases[f"{name} bf16 broadcast"] = (f, (B, B[:1, :, :1]))
    for name in ("add", "sub", "mul", "maximum", "eq", "lt", "bitwise_and", "bitwise_or", "bitwise_xor"):
        cases[f"{name} s32"] = (getattr(torch, name), (K, J))
        cases[f"{name} s8 u8"] = (getattr(torch, name), (S8, U8))
    for name in ("add", "mul", "maximum", "minimum", "eq", "lt", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_xor"):
        cases[f"{name} pred"] = (getattr(torch, name), (P, Q))
    return cases


def promotions() -> dict[str, Case]:
    """Every pair of element types under an addition, a division and a comparison, and weak scalars of rank 0."""
    cases: dict[str, Case] = {}
    tensors = {"pred": P, "u8": U8, "s8": S8, "s32": K, "s64": K.to(torch.int64), "f16": H, "bf16": B, "f32": X, "f64": D}
    for (na, a), (nb, b) in itertools.combinations(tensors.items(), 2):
        cases[f"add {na} {nb}"] = (lambda x, y: (x + y, x < y), (a, b))
    for name, a in tensors.items():
        cases[f"{name} and numbers"] = (lambda x: (x + 1, x * 2.5, x / 3, 2 - x.to(x.dtype) * 3, x > 1), (a,))
        cases[f"{name} and rank 0"] = (lambda x, s: (x + s, x * s, x == s), (a, torch.tensor(2.25, dtype=torch.float64)))
        cases[f"{name} and whole rank 0"] = (lambda x, s: (x + s, x >= s), (a, torch.tensor(3)))
    cases["s8 wraps a number"] = (lambda x: (x + 300, x < 300, x == 257), (S8,))
    cases["u8 wraps a number"] = (lambda x: (x + -1, x * 255), (U8,))
    cases["f16 number too fine"] = (lambda x: (x * 0.1, x / 0.1, x + 0.1, x - 0.1, 0.1 - x, x == 0.1, x < 0.1), (H,))
    cases["bf16 number too fine"] = (lambda x: (x * 0.1, x / 0.1, x + 0.1, x % 0.1), (B,))
    cases["f16 number too large"] = (lambda x: x + 1e9, (H,))
    return cases


def formulas() -> dict[str, Case]:
    away = torch.where(J == 0, torch.ones_like(J), J)
    return {
        "add alpha": (lambda a, b: torch.add(a, b, alpha=0.3), (X, Y)),
        "add alpha f16": (lambda a, b: torch.add(a, b, alpha=0.3), (H, H.flip(0))),
        "sub alpha bf16": (lambda a, b: torch.sub(a, b, alpha=0.3), (B, B.flip(0))),
        "add alpha s32": (lambda a, b: torch.add(a, b, alpha=3), (K, J)),
        "rsub alpha": (lambda a, b: torch.rsub(a, b, alpha=2), (X, Y)),
        "rsub number": (lambda a: torch.rsub(a, 2.5), (X,)),
        "div s32": (torch.div, (K, away)),
        "div by zero": (torch.div, (K, torch.zeros_like(K))),
        "div trunc f32": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), (X, Y)),
        "div trunc s32": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), (K, away)),
        "div floor f32": (lambda a, b: torch.div(a, b, rounding_mode="floor"), (X, Y)),
        "div floor f32 number": (lambda a: torch.div(a, 0.1, rounding_mode="floor"), (X,)),
        "div floor f64": (lambda a, b: torch.div(a, b, rounding_mode="floor"), (D, D.flip(0))),
        "div floor s32": (lambda a, b: torch.div(a, b, rounding_mode="floor"), (K, away)),
        "floor_divide s8": (lambda a: a // 7, (S8,)),
        "floor_divide negative": (lambda a: a // -7, (S8,)),
        "div mode none": (lambda a, b: torch.div(a, b, rounding_mode=None), (X, Y)),
        "remainder s32": (torch.remainder, (K, away)),
        "remainder number first": (lambda a: torch.remainder(7, a), (NONZERO,)),
        "fmod s32": (torch.fmod, (K, away)),
        "fmod number": (lambda a: torch.fmod(a, 0.7), (X,)),
        "pow 2": (lambda a: a**2, (X,)),
        "pow 3 bf16": (lambda a: a**3, (B,)),
        "pow half": (lambda a: a**0.5, (X,)),
        "pow minus half": (lambda a: a**-0.5, (X,)),
        "pow minus one": (lambda a: a**-1, (X,)),
        "pow 2.5": (lambda a: a**2.5, (POSITIVE,)),
        "pow tensor": (torch.pow, (POSITIVE, Y)),
        "pow number base": (lambda a: torch.pow(2.5, a), (X,)),
        "pow s32": (lambda a: a**3, (K,)),
        "pow s32 tensor": (torch.pow, (K, small(3, 5, 7, dtype=torch.int32))),
        "shift left": (torch.bitwise_left_shift, (K, small(3, 5, 7, dtype=torch.int32, high=40))),
        "shift right": (torch.bitwise_right_shift, (K, small(3, 5, 7, dtype=torch.int32, high=40))),
        "shift number": (lambda a: (a << 3, a >> 2), (S8,)),
        "shift number u8": (lambda a: (a << 3, a >> 4, a >> 9, a & 15), (U8,)),
        "shift u8": (torch.bitwise_right_shift, (U8, small(3, 5, 7, dtype=torch.uint8, high=12))),
        "shift a number right": (lambda a: torch.bitwise_right_shift(200, a), (small(3, 5, dtype=torch.uint8, high=12),)),
        "gelu": (F.gelu, (FINITE,)),
        "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), (X,)),
        "gelu bf16": (F.gelu, (FINITE.bfloat16(),)),
        "silu": (F.silu, (X,)),
        "silu f16": (F.silu, (H,)),
        "leaky_relu": (lambda a: F.leaky_relu(a, 0.3), (X,)),
        "leaky_relu f16": (F.leaky_relu, (H,)),
        "elu": (lambda a: F.elu(a, 1.5), (X,)),
        "selu bf16": (F.selu, (B,)),
        "celu": (lambda a: F.celu(a, 0.7), (X,)),
        "hardtanh": (F.hardtanh, (X,)),
        "relu6 f16": (F.relu6, (H,)),
        "hardswish": (F.hardswish, (X,)),
        "hardsigmoid": (F.hardsigmoid, (X,)),
        "softplus": (F.softplus, (X,)),
        "mish": (F.mish, (X,)),
        "glu": (lambda a: F.glu(a, 1), (floats(3, 6, 7),)),
        "threshold": (lambda a: F.threshold(a, 0.1, 20.0), (X,)),
        "clamp": (lambda a: a.clamp(-0.5, 0.7), (X,)),
        "clamp crossed": (lambda a: a.clamp(3, 2), (X,)),
        "clamp low": (lambda a: a.clamp(min=0.5), (X,)),
        "clamp high f16": (lambda a: a.clamp(max=0.5), (H,)),
        "clamp s8 to float": (lambda a: a.clamp(0.5, 2.5), (S8,)),
        "clamp tensors": (lambda a, b, c: torch.clamp(a, b, c), (X, Y, Y.abs())),
        "clamp tensor low": (lambda a, b: torch.clamp(a, min=b), (X, Y[:1])),
        "where": (torch.where, (P, X, Y)),
        "where promotes": (torch.where, (P, H, X)),
        "where numbers": (lambda p: torch.where(p, 1.5, 2.0), (P,)),
        "where number": (lambda p, a: torch.where(p, a, 2.5), (P, H)),
        "masked_fill": (lambda a, p: a.masked_fill(p, -INF), (X, P)),
        "masked_fill broadcast": (lambda a, p: a.masked_fill(p[:1, :, :1], 0.1), (H, P)),
        "masked_fill tensor": (lambda a, p, v: a.masked_fill(p, v), (X, P, torch.tensor(3.0))),
        "masked_fill s8": (lambda a, p: a.masked_fill(p, 1.5), (S8, P)),
        "lerp": (lambda a, b: (torch.lerp(a, b, 0.3), torch.lerp(a, b, 0.8)), (X, Y)),
        "lerp far": (lambda a, b, w: (torch.lerp(a, b, w), torch.lerp(a, b, 0.75)), (LARGE, -LARGE / 2, B[0, 0].nan_to_num())),
        "frac": (torch.frac, (X,)),
        "frac f16": (torch.frac, (H,)),
        "pow half f16": (lambda a: (a**0.5, a**-0.5), (H,)),
        "xlogy": (torch.xlogy, (X, POSITIVE)),
        "xlogy number": (lambda a: (torch.xlogy(a, 2.5), torch.xlogy(0.0, a)), (X,)),
        "xlogy f16 u16": (torch.xlogy, (torch.tensor([-3.0, 0.0, 7.0]).half(), small(3, dtype=torch.uint16))),
        "xlogy of zero and NaN": (torch.xlogy, (torch.tensor([0.0, -0.0, 0.0, 0.0]), torch.tensor([0.0, -1.0, NAN, INF]))),
        "dropout backward": (lambda a, p: torch.ops.aten.native_dropout_backward.default(a, p, 1.25), (X, P)),
        "dropout backward s8": (lambda a, p: torch.ops.aten.native_dropout_backward.default(a, p, 1.25), (S8, P)),
        "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.3), (X, Y, POSITIVE)),
        "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c, value=0.3), (X, Y, POSITIVE)),
        "nan_to_num": (torch.nan_to_num, (X,)),
        "logaddexp": (torch.logaddexp, (X, Y)),
        "isclose": (torch.isclose, (X, X + 1e-6)),
        "logit": (lambda a: torch.logit(a, 0.1), (POSITIVE,)),
        "copy": (lambda a, b: a.clone().copy_(b), (X, H[:1])),
    }


def views() -> dict[str, Case]:
    return {
        "view": (lambda a: a.view(5, 21), (X,)),
        "reshape of a transpose": (lambda a: a.transpose(0, 2).reshape(-1, 3), (X,)),
        "flatten": (lambda a: a.flatten(1), (X,)),
        "unflatten": (lambda a: a.flatten().unflatten(0, (15, 7)), (X,)),
        "permute negative": (lambda a: a.permute(-1, 0, 1), (X,)),
        "transpose negative": (lambda a: a.transpose(-1, 0), (X,)),
        "t": (lambda a: a[0].t(), (X,)),
        "mT": (lambda a: a.mT, (X,)),
        "T of a vector": (lambda a: a[0, 0].t(), (X,)),
        "movedim": (lambda a: a.movedim(0, -1), (X,)),
        "unsqueeze": (lambda a: a.unsqueeze(-2), (X,)),
        "squeeze": (lambda a: (a[:1].squeeze(), a[:1].squeeze(0), a.squeeze(0), a[:1, :1].squeeze((0, 1))), (X,)),
        "expand": (lambda a: a[:1].expand(4, -1, 7), (X,)),
        "broadcast_to": (lambda a: torch.broadcast_to(a[0], (2, 5, 7)), (X,)),
        "select": (lambda a: (a.select(1, -2), a[2], a[:, 3]), (X,)),
        "slice": (lambda a: (a[1:], a[:, -3:], a[:, :, 5:2], a[:, ::2], a[:, 1:5:3], a[:, 4:100:2]), (X,)),
        "split": (lambda a: a.split(2, 1), (X,)),
        "split sizes": (lambda a: a.split([1, 0, 6], -1), (X,)),
        "chunk": (lambda a: a.chunk(3, 2), (X,)),
        "tensor_split": (lambda a: a.tensor_split(3, 1), (X,)),
        "unbind": (lambda a: a.unbind(1), (X,)),
        "some of a split": (lambda a: a.split(2, 1)[1] + 1, (X,)),
        "cat": (lambda a, b: torch.cat([a, b, a[:1]]), (X, Y)),
        "cat promotes": (lambda a, b: torch.cat([a, b], -1), (H, X)),
        "cat with an empty vector": (lambda a: torch.cat([torch.empty(0), a], 1), (X,)),
        "cat of empty vectors": (lambda a: torch.cat([a[0, 0, :0], a[0, 0, :0]]), (X,)),
        "stack": (lambda a, b: torch.stack([a, b], -1), (X, Y)),
        "repeat": (lambda a: a.repeat(2, 1, 3, 2), (X,)),
        "tile": (lambda a: torch.tile(a, (2, 3)), (X,)),
        "repeat_interleave": (lambda a: a.repeat_interleave(3, 1), (X,)),
        "flip": (lambda a: a.flip(0, -1), (X,)),
        "flip of rank 0": (lambda a: a[0, 0, 1].flip(0), (X,)),
        "roll": (lambda a: a.roll(2, 1), (X,)),
        "pad": (lambda a: F.pad(a, (1, 2, 0, 3), value=NAN), (X,)),
        "pad crops": (lambda a: F.pad(a, (-1, 2, -2, -1)), (K,)),
        "reflect": (lambda a: F.pad(a, (2, 1), mode="reflect"), (X,)),
        "tril": (lambda a: (a.tril(), a.tril(-1), a.tril(2)), (X,)),
        "triu": (lambda a: (a.triu(), a.triu(1), a.triu(-2)), (K,)),
        "assign a slice": (lambda a, b: _assigned(a, b), (X, Y)),
        "assign promotes": (lambda a, b: _assigned(a, b), (X, H)),
        "clone detach contiguous": (lambda a: a.transpose(0, 1).contiguous().clone().detach(), (X,)),
        "meshgrid": (lambda a: torch.meshgrid(a[0, 0], a[0, :, 0], indexing="ij"), (X,)),
        "diff": (lambda a: torch.diff(a), (X,)),
    }


def _assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[1] = b[0]
    out[:, -2] = 3
    out[:, :2] = b[:, 3:5]
    return out


def creation() -> dict[str, Case]:
    return {
        "full": (lambda a: torch.full((2, 3), NAN) + a[0, 0, 1], (X,)),
        "full_like": (lambda a: torch.full_like(a, 2), (K,)),
        "zeros ones": (
            lambda a: (torch.zeros_like(a), torch.ones(2, 3, dtype=torch.int8), a.new_ones(4), a.new_zeros(2)),
            (X,),
        ),
        "new_full": (lambda a: a.new_full((3,), 2.5), (H,)),
        "empty filled": (lambda a: a.new_empty((3,)).fill_(2.5), (H,)),
        "nothing in empty": (lambda a: torch.cat([torch.empty(0, 5, 7), a]), (X,)),
        "scalar_tensor": (lambda a: torch.scalar_tensor(0.1, dtype=torch.bfloat16) * a, (B,)),
        "constant tensor": (lambda a: a * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), (X,)),
        "constant scalar": (lambda a: a * torch.tensor(0.1), (H,)),
        "arange": (lambda a: torch.arange(7) + a, (X,)),
        "arange step": (lambda a: torch.arange(20, -1, -3) + a, (X,)),
        "arange float": (lambda a: torch.arange(0.1, 0.8, 0.1) * a, (POSITIVE,)),
        "arange s32": (lambda a: torch.arange(3, 10, dtype=torch.int32) * a, (K,)),
        "arange f32 whole": (lambda a: torch.arange(7, dtype=torch.float32) * a, (POSITIVE,)),
        "eye": (lambda a: torch.eye(5, 7) * a, (POSITIVE,)),
        "linspace": (lambda a: torch.linspace(-1, 1, 7) * a, (POSITIVE,)),
        "one_hot": (lambda i: F.one_hot(i, 6), (small(3, 5),)),
    }


def conversions() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    targets = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
    for (name, x), d in itertools.product({"s32": K, "f32": X, "f16": H, "pred": P, "s8": S8}.items(), targets):
        if d.is_floating_point or d is torch.bool or not x.is_floating_point():
            cases[f"{name} to {from_torch(d)}"] = (lambda a, d=d: a.to(d), (x,))
    inside = floats(3, 5, 7, special=False) * 9
    for d in (torch.int8, torch.int32, torch.int64):
        cases[f"f32 to {from_torch(d)}"] = (lambda a, d=d: a.to(d), (inside,))
    cases["type_as"] = (lambda a, b: a.type_as(b), (K, H))
    cases["float"] = (lambda a: a.float() + a.half(), (K,))
    return cases


def look_ups() -> dict[str, Case]:
    table, ids = floats(11, 6), small(3, 4, high=11)
    return {
        "embedding": (F.embedding, (ids, table)),
        "embedding padding": (lambda i, t: F.embedding(i, t, padding_idx=2), (ids.to(torch.int32), table)),
        "index_select": (lambda a, i: a.index_select(-2, i), (X, small(9))),
        "index_select rank 0 index": (lambda a, i: a.index_select(1, i[0]), (X, small(9))),
        "gather": (lambda a, i: a.gather(1, i), (X, small(2, 9, 7))),
        "take_along_dim": (lambda a, i: torch.take_along_dim(a, i, 2), (X, small(3, 5, 2))),
        "index one": (lambda a, i: a[i], (X, small(4, 2, high=3))),
        "index negative": (lambda a, i: a[:, i - 5], (X, small(4))),
        "index two": (lambda a, i, j: a[i, j], (X, small(4, 1, high=3), small(6))),
        "index two negative": (lambda a, i, j: a[i - 3, j - 5], (X, small(4, 1, high=3), small(6))),
        "index apart": (lambda a, i, j: a[i, :, j], (X, small(4, high=3), small(4))),
        "index middle": (lambda a, i, j: a[:, i, j], (X, small(4), small(4))),
        "index with a column": (lambda a, i: a[torch.arange(3)[:, None], i], (X, small(3, 2))),
        "index s8 table": (lambda a, i: a[i], (S8, small(4, high=3))),
    }


def reductions() -> dict[str, Case]:
    plain = floats(3, 5, 7, special=False)
    return {
        "sum": (lambda a: (a.sum(), a.sum(1), a.sum((0, -1), keepdim=True)), (plain,)),
        "sum NaN": (lambda a: a.sum(2), (X,)),
        "sum f16": (lambda a: (a.sum(-1), a.sum(-1, dtype=torch.float32)), (plain.half(),)),
        "sum s8": (lambda a: (a.sum(), a.sum(1, dtype=torch.int8)), (S8,)),
        "sum pred": (lambda a: a.sum(1), (P,)),
        "sum of nothing": (lambda a: a[:, :0].sum(1), (plain,)),
        "sum rank 0": (lambda a: a[0, 0, 0].sum(0), (plain,)),
        "mean": (lambda a: (a.mean(), a.mean(-1), a.mean((0, 1), keepdim=True)), (plain,)),
        "mean bf16": (lambda a: a.mean(1), (plain.bfloat16(),)),
        "mean of ints": (lambda a: a.mean(1, dtype=torch.float32), (S8,)),
        "amax amin": (lambda a: (a.amax(1), a.amin((0, 2), keepdim=True), a.amax()), (X,)),
        "max min": (lambda a: (a.max(), a.min()), (K,)),
        "max values": (lambda a: (a.max(1).values, a.min(-1, keepdim=True).values), (X,)),
        "prod": (lambda a: (a.prod(), a.prod(1), a.prod(2, keepdim=True)), (plain,)),
        "prod s32": (lambda a: a.prod(1, dtype=torch.int32), (K,)),
        "any all": (lambda a: (a.any(), a.all(), a.any(1), a.all(2, keepdim=True)), (P,)),
        "any float": (lambda a: (a.any(1), a.all()), (X,)),
        "all u8": (lambda a: a.all(1), (U8,)),
        "any of two axes": (lambda a: torch.any(a, (0, 2)), (P,)),
        "var": (lambda a: (a.var(1), a.var(), a.var(0, correction=0), a.var(2, keepdim=True)), (plain,)),
        "var of one": (lambda a: a[:1].var(0), (plain,)),
        "std f16": (lambda a: a.std(-1), (plain.half(),)),
        "std of large numbers": (lambda a: (a.std(1), a.std(0, correction=0), *torch.std_mean(a, 1)), (FAR,)),
        "var of large numbers": (lambda a: (a.var(1), a.var((0, 1), correction=0), *torch.var_mean(a, 1)), (FAR / 2**63,)),
        "std of the smallest numbers": (lambda a: (a.std() * 2.0**100, a.std(0) * 2.0**100), (plain * 2.0**-118,)),
        "var over none": (lambda a: (a.var(1, correction=9), a.std(1, correction=7)), (plain,)),
        "var bf16 of large numbers": (lambda a: (a.var(1), a.std(1)), ((FAR / 2**63).bfloat16(),)),
        "var_mean": (lambda a: torch.var_mean(a, 1), (plain,)),
        "logsumexp": (lambda a: torch.logsumexp(a, 1), (plain,)),
        "norm": (lambda a: (a.norm(dim=1), F.normalize(a, dim=-1), torch.linalg.vector_norm(a)), (plain,)),
        "softmax": (lambda a: (a.softmax(-1), a.softmax(0)), (plain,)),
        "softmax infinities": (lambda a, p: a.masked_fill(p, -INF).softmax(-1), (plain, P)),
        "softmax f16": (lambda a: (a.softmax(1), a.softmax(1, dtype=torch.float32)), (plain.half(),)),
        "softmax rank 0": (lambda a: a[0, 0, 0].softmax(0), (plain,)),
        "log_softmax": (lambda a: a.log_softmax(1), (plain,)),
        "layer_norm": (lambda a, w, b: F.layer_norm(a, (7,), w, b, 1e-3), (plain, Y[0, 0].nan_to_num(), plain[0, 0])),
        "layer_norm bare": (lambda a: F.layer_norm(a, (5, 7)), (plain,)),
        "layer_norm bias alone": (lambda a, b: F.layer_norm(a, (7,), None, b), (plain, plain[0, 0])),
        "layer_norm bf16": (lambda a, w: F.layer_norm(a, (7,), w), (plain.bfloat16(), plain[0, 0].bfloat16())),
        "layer_norm mixed": (lambda a, w: F.layer_norm(a, (7,), w, w), (plain.bfloat16(), plain[0, 0])),
        "native_layer_norm": (lambda a, w: torch.native_layer_norm(a, (7,), w, w, 1e-5), (plain, plain[0, 0])),
        "rms_norm": (lambda a, w: (F.rms_norm(a, (7,), w), F.rms_norm(a, (5, 7), eps=1e-3)), (plain, plain[0, 0])),
        "rms_norm bf16": (lambda a, w: F.rms_norm(a * 1e-3, (7,), w), (plain.bfloat16(), plain[0, 0].bfloat16())),
        "group_norm": (lambda a, w: F.group_norm(a, 2, w, w), (floats(3, 6, 7, special=False), torch.arange(6.0))),
        "batch_norm": (lambda a, m, v: F.batch_norm(a, m, v, v, m), (plain, plain[0, :, 0], POSITIVE[0, :, 0])),
        "instance_norm": (lambda a, w: F.instance_norm(a, weight=w, bias=w), (plain, plain[0, :, 0])),
        "cosine_similarity": (lambda a: F.cosine_similarity(a, a.flip(0), dim=-1), (plain,)),
    }


GROUPS = {
    "elementwise": (elementwise(), 3.0, 0.0),
    "promotions": (promotions(), 1.0, 0.0),
    "formulas": (formulas(), 4.0, 1.0),
    "views": (views(), 0.0, 0.0),
    "creation": (creation(), 1.0, 1.0),
    "conversions": (conversions(), 0.0, 0.0),
    "look-ups": (look_ups(), 0.0, 0.0),
    "reductions": (reductions(), 4.0, 4.0),
}
