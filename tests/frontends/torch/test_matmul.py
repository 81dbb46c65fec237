"""Products and attention read from PyTorch, against torch: ranks, layouts, types, biases, masks, and the nvFuser family."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from against_torch import Case, Together, agree, close, read

from tilewright.dtype import F32, S8, S32
from tilewright.errors import UnsupportedError
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Attention, Gemm

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8, seed: int = 0) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**40)), min(limits.max, 2**40)
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gemms(graph: Graph) -> list[Gemm]:
    return [n.op for n in graph.nodes() if isinstance(n.op, Gemm)]


RANKS = [
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((5,), (5, 7)),
    ((3, 5), (5, 7)),
    ((2, 3, 5), (5, 7)),
    ((2, 3, 5), (5,)),
    ((3, 5), (2, 5, 7)),
    ((5,), (2, 5, 7)),
    ((2, 3, 5), (2, 5, 7)),
    ((2, 1, 3, 5), (4, 5, 7)),
    ((1, 5), (5, 1)),
    ((0, 5), (5, 7)),
    ((3, 0), (0, 7)),
    ((0, 3, 5), (0, 5, 7)),
]


PRODUCTS: dict[str, Case] = {
    **{f"matmul {a} {b}": (torch.matmul, (normal(*a), normal(*b, seed=1))) for a, b in RANKS},
    "mm of transposes": (lambda a, b: a.t() @ b.t(), (normal(37, 13), normal(11, 37, seed=1))),
    "bmm": (torch.bmm, (normal(3, 13, 37), normal(3, 37, 11, seed=1))),
    "linear": (F.linear, (normal(2, 13, 37), normal(11, 37, seed=1), normal(11, seed=2))),
    "linear bare": (F.linear, (normal(13, 37), normal(11, 37, seed=1))),
    "linear of a vector": (F.linear, (normal(37), normal(11, 37, seed=1), normal(11))),
    "linear to a number": (F.linear, (normal(13, 37), normal(37, seed=1))),
    "addmm": (torch.addmm, (normal(11), normal(13, 37), normal(37, 11, seed=1))),
    "addmm scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.5),
        (normal(13, 11), normal(13, 37), normal(37, 11)),
    ),
    "addmm unread": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (normal(11) * float("nan"), normal(13, 37), normal(37, 11))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=-1), (normal(13, 1), normal(3, 13, 37), normal(3, 37, 11))),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=2, alpha=3), (normal(13), normal(13, 37), normal(37))),
    "mv": (torch.mv, (normal(13, 37), normal(37))),
    "dot": (torch.dot, (normal(37), normal(37, seed=1))),
    "vdot": (torch.vdot, (normal(37), normal(37, seed=1))),
    "outer": (torch.outer, (normal(13), normal(11))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (normal(3, 13, 37), normal(3, 11, 37, seed=1))),
    "einsum of heads": (lambda a, b: torch.einsum("bshd,bthd->bhst", a, b), (normal(2, 5, 3, 7), normal(2, 6, 3, 7))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, ([0, 2], [0, 1])), (normal(3, 4, 5), normal(3, 5, 6))),
    "chain": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (normal(3, 5), normal(5, 7), normal(7, 2))),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), (normal(5, 5),)),
}


@pytest.fixture(scope="module")
def products() -> Together:
    return Together(PRODUCTS)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_every_spelling(products: Together, name: str) -> None:
    products.agree(name, ulps=2, depth=8)
    assert products.calls(name) == []
    assert any(isinstance(n.op, Gemm) for n in products.nodes(name)) or name == "outer"


NARROWED = ("mm of transposes", "bmm", "linear", "addmm scaled", "baddbmm", "mv")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_a_product_of_other_floats_accumulates_wide_and_rounds_once(dtype: str) -> None:
    d = FLOATS[dtype]
    cases = {name: (f, tuple(a.to(d) for a in args)) for name, (f, args) in PRODUCTS.items() if name in NARROWED}
    together = Together(cases)
    assert {n.op.acc_dtype.name for n in together.graph.nodes() if isinstance(n.op, Gemm)} == {
        "f64" if dtype == "f64" else "f32"
    }
    exact = {name: (_exactly(f, d), args) for name, (f, args) in cases.items()}
    for name in cases:
        together.agree(name, ulps=2, depth=8 if dtype == "f64" else 1)
        together.agree(name, ulps=1, depth=8 if dtype == "f64" else 0.01, against=exact[name])


def _exactly(f: Callable[..., object], dtype: torch.dtype) -> Callable[..., object]:
    """f in f64, rounded once."""
    return lambda *args: f(*(a.to(torch.float64) for a in args)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_an_integer_product_wraps_in_its_own_type(dtype: torch.dtype) -> None:
    a, b, c = codes(13, 37, dtype=dtype), codes(37, 11, dtype=dtype, seed=1), codes(13, 11, dtype=dtype)
    agree(torch.mm, a, b)
    agree(lambda c, a, b: torch.addmm(c, a, b, beta=3, alpha=-2), c, a, b)


def test_int_mm_accumulates_in_s32() -> None:
    a, b = codes(17, 40), codes(40, 16, seed=1)
    graph = agree(torch._int_mm, a, b)
    (op,) = gemms(graph)
    assert (op.acc_dtype, op.lhs.dtype, graph.outputs[0].dtype) == (S32, S8, S32)


@pytest.mark.parametrize("scales", ["one", "a row"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_scaled_mm_of_8_bit_floats(scales: str, out: torch.dtype) -> None:
    a = normal(32, 64).to(torch.float8_e4m3fn)
    b = normal(48, 64, seed=1).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = (torch.tensor(0.3), torch.tensor(1.7))
    if scales == "a row":
        scale_a, scale_b = normal(32, 1).abs(), normal(1, 48).abs()
    bias = normal(48).to(torch.bfloat16)

    def f(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, sa, sb, c if out is torch.bfloat16 else None, out_dtype=out)

    graph = read(f, a, b, scale_a, scale_b, bias)
    assert [g.acc_dtype for g in gemms(graph)] == [F32]
    (given,) = evaluate(graph, [a, b, scale_a, scale_b, bias])
    wanted = a.to(torch.float64) @ b.to(torch.float64) * scale_a.to(torch.float64) * scale_b.to(torch.float64)
    wanted = (wanted + bias.to(torch.float64) if out is torch.bfloat16 else wanted).to(out)
    close(given, wanted, ulps=1, depth=1)


def test_an_8_bit_float_product_is_stored_as_torch_stores_it() -> None:
    a, b = normal(13, 64).to(torch.float8_e4m3fn), (normal(64, 11, seed=1) * 20).to(torch.float8_e4m3fn)
    graph = read(torch.mm, a, b)
    (given,) = evaluate(graph, [a, b])
    wanted = (a.to(torch.float32) @ b.to(torch.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))
    assert wanted.float().abs().max() == 448


def test_mm_with_an_output_type_keeps_the_accumulator() -> None:
    a, b = normal(13, 37, dtype=torch.bfloat16), normal(37, 11, dtype=torch.bfloat16, seed=1)
    graph = read(lambda a, b: torch.mm(a, b, out_dtype=torch.float32), a, b)
    (given,) = evaluate(graph, [a, b])
    close(given, (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32), ulps=1, depth=8)


EPILOGUES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "alone": lambda y, _: y,
    "cast": lambda y, _: y.float(),
    "bias": lambda y, bias: y + bias,
    "bias relu": lambda y, bias: torch.relu(y + bias),
    "bias gelu": lambda y, bias: F.gelu(y + bias),
    "relu": lambda y, _: torch.relu(y),
}


def in_every_layout(epilogue: str, dtype: torch.dtype, batch: tuple[int, ...]) -> dict[str, Case]:
    """The epilogue over a product of operands that are or are not transposed, by which are: "NN", "TN" and so on."""
    cases: dict[str, Case] = {}
    for swap_a, swap_b in itertools.product((False, True), repeat=2):
        a = normal(*batch, *((29, 14) if swap_a else (14, 29)), dtype=dtype)
        b = normal(*batch, *((22, 29) if swap_b else (29, 22)), dtype=dtype, seed=1)

        def program(
            a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, swap_a: bool = swap_a, swap_b: bool = swap_b
        ) -> torch.Tensor:
            return EPILOGUES[epilogue](torch.matmul(a.mT if swap_a else a, b.mT if swap_b else b), c)

        cases["NT"[swap_a] + "NT"[swap_b]] = (program, (a, b, normal(22, dtype=dtype, seed=2)))
    return cases


@pytest.mark.thin(3)
@pytest.mark.parametrize(("epilogue", "dtype"), itertools.product(EPILOGUES, ["f16", "bf16"]))
@pytest.mark.parametrize("batch", [(), (3,)], ids=["plain", "batched"])
def test_the_nvfuser_family_in_every_layout(epilogue: str, dtype: str, batch: tuple[int, ...]) -> None:
    cases = in_every_layout(epilogue, FLOATS[dtype], batch)
    together = Together(cases)
    # After the cast to f32 a rounding step is still one of the narrow type.
    step = torch.finfo(FLOATS[dtype]).eps / torch.finfo(torch.float32).eps if epilogue == "cast" else 1
    for name in cases:
        together.agree(name, ulps=3 * step, depth=step)
        assert sum(isinstance(n.op, Gemm) for n in together.nodes(name)) == 1


def sdpa(**options: object) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed)


MASK = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) > 0.4
MASK[2] = False
Q, K, V = heads(2, 4, 5, 8), heads(2, 4, 6, 8, seed=1), heads(2, 4, 6, 7, seed=2)
ATTENTION: dict[str, Case] = {
    "plain": (sdpa(), (Q, K, V)),
    "causal": (sdpa(is_causal=True), (Q, K[:, :, :5], V[:, :, :5])),
    "causal, more keys": (sdpa(is_causal=True), (Q, K, V)),
    "scale": (sdpa(scale=0.3), (Q, K, V)),
    "pred mask with a blind row": (sdpa(), (Q, K, V, MASK)),
    "float mask": (sdpa(), (Q, K, V, normal(2, 1, 5, 6))),
    "float mask with a blind row": (sdpa(), (Q, K, V, torch.zeros(5, 6).masked_fill(~MASK, float("-inf")))),
    "grouped queries": (sdpa(enable_gqa=True), (Q, K[:, :2], V[:, :2])),
    "one key head": (sdpa(), (Q, K[:, :1], V[:, :1])),
    "no heads": (sdpa(), (Q[0, 0], K[0, 0], V[0, 0])),
    "rank 3": (sdpa(), (Q[0], K[0], V[0], MASK)),
    "rank 5": (sdpa(), (Q[None], K[None], V[None], MASK)),
    "shared keys": (sdpa(), (Q, K[:1], V[:1])),
}


@pytest.fixture(scope="module")
def attentions() -> Together:
    return Together(ATTENTION)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(attentions: Together, name: str) -> None:
    attentions.agree(name, ulps=8, depth=4)
    assert sum(isinstance(n.op, Attention) for n in attentions.nodes(name)) == 1


def test_attention_of_narrow_floats() -> None:
    agree(sdpa(), *(t.to(torch.bfloat16) for t in (Q, K, V)), ulps=2, depth=2)


def test_attention_with_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"draws random numbers(.|\n)*model\.eval\(\)"):
        read(sdpa(dropout_p=0.5), Q, K, V)
