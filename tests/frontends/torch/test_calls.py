"""Operators that are left to torch: what a call keeps, what it gives, and what a hostile one cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from against_torch import Of, agree, read
from torch import nn

import tilewright
from tilewright.dtype import F32, OPAQUE, S32, S64, from_torch
from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError
from tilewright.frontends.torch.call import evaluate_call
from tilewright.ir.build import input_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call
from tilewright.ir.text import parse, print_graph
from tilewright.ir.types import TensorType

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[0, 2, 1, 0, 2, 2, 1, 1]])


@torch.library.custom_op("tilewright_test::twice", mutates_args=())
def twice(x: torch.Tensor, name: str, sizes: list[int], scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A user's own operator."""
    return x * 2, x * (scale if scale is not None else len(name))


@twice.register_fake
def _(x: torch.Tensor, name: str, sizes: list[int], scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


LEFT: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...], set[str]]] = {
    "convolution": (lambda a, w: F.conv2d(a, w, padding=1), (IMAGE, IMAGE[:, :, :3, :3]), {"aten.convolution.default"}),
    "of a view": (lambda a: F.avg_pool2d(a.mT, 3), (IMAGE,), {"aten.avg_pool2d.default"}),
    "numbers JSON lacks": (
        lambda a: torch.histc(a, bins=4, min=-1.0, max=1.0) + torch.isin(a, torch.tensor([float("inf")])).sum(),
        *((X,), {"aten.histc.default"}),
    ),
    "infinity": (lambda a: torch.cdist(a, a, p=float("inf")), (X,), {"aten._cdist_forward.default"}),
    "types": (lambda a: a.cumsum(1, dtype=torch.float64), (X,), {"aten.cumsum.default"}),
    "two results": (lambda a: torch.topk(a, 3), (X,), {"aten.topk.default"}),
    "one of two results": (lambda a: torch.sort(a, 1, descending=True).indices, (X,), {"aten.sort.default"}),
    "where the extreme is": (lambda a: a.max(1), (X,), {"aten.max.dim"}),
    "argmax": (lambda a: a.argmax(-1), (X,), {"aten.argmax.default"}),
    "scatter": (lambda a, i: a.scatter(0, i, 5.0), (X, INDEX), {"aten.scatter.value"}),
    "a list with gaps": (lambda a, i: _put(a, i), (X, INDEX[0]), {"aten.index_put.default"}),
    "a step": (lambda a: torch.slice_scatter(a, a[:, :4], 1, 0, 8, 2), (X,), {"aten.slice_scatter.default"}),
    "bits": (lambda a: a.view(torch.int32), (X,), {"aten.view.dtype"}),
    "strides of axes in another order": (
        lambda a: torch.as_strided(a.mT.sin(), (4, 2, 3), (2, 5, 3), 1),
        *((X,), {"aten.as_strided.default"}),
    ),
    "strides of a slice": (
        lambda a: torch.as_strided(a[1:], (2, 3), (3, 2), 9),
        *((X,), {"aten.as_strided.default"}),
    ),
    "strides": (lambda a: torch.as_strided(a, (2, 3), (3, 2)), (X,), {"aten.as_strided.default"}),
    "written by strides": (
        lambda a: torch.as_strided_scatter(a.sin(), a[:2, :2], (2, 2), (3, 2), 1),
        *((X,), {"aten.as_strided_scatter.default"}),
    ),
    "written by strides of axes in another order": (
        lambda a: torch.as_strided_scatter(a.mT.sin(), a[:2, :2], (2, 2), (1, 2)),
        *((X,), {"aten.as_strided_scatter.default"}),
    ),
    "bags of bf16": (
        lambda a, i: F.embedding_bag(i, a.mT.bfloat16(), torch.tensor([0, 3]), mode="sum"),
        *((X, INDEX[0]), {"aten._embedding_bag_forward_only.default"}),
    ),
    "common multiples": (
        lambda a, b: torch.lcm((a > 0) * 10 + b, b.int() - 4),
        *((X, INDEX), {"aten.lcm.default"}),
    ),
    "another norm": (lambda a: torch.linalg.vector_norm(a, 3, 1), (X,), {"aten.linalg_vector_norm.default"}),
    "one's own": (
        lambda a: torch.ops.tilewright_test.twice(a + 1, 'b"\\', [2, 3], 0.25),
        *((X,), {"tilewright_test.twice.default"}),
    ),
    "packed int8": (
        lambda a, w, s: torch.ops.aten._weight_int8pack_mm(a.bfloat16(), w, s.bfloat16()),
        (torch.randn(4, 128), torch.randint(-128, 128, (64, 128), dtype=torch.int8), torch.rand(64)),
        {"aten._weight_int8pack_mm.default"},
    ),
    "complex in between": (
        lambda a: torch.fft.irfft(torch.fft.rfft(a) * 2),
        *((X,), {"aten._fft_r2c.default", "aten._fft_c2r.default", "aten.mul.Tensor"}),
    ),
}


def _put(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[:, i] = 0.5
    return out


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_meaning_in_the_graph_is_left_to_torch_and_said(name: str) -> None:
    f, args, left = LEFT[name]
    graph = agree(f, *args, ulps=1, calls=sorted(left))
    calls = [n.op for n in graph.nodes() if isinstance(n.op, Call)]
    assert len(graph.notes) == len(calls)
    assert all(any(f"{c.target} is not modelled and is left to torch" in note for note in graph.notes) for c in calls)


def test_the_note_says_why_it_is_left_to_torch() -> None:
    graph = read(Of(lambda a: torch.linalg.vector_norm(a, 3)), X)
    assert any(n.endswith("left to torch: a norm of order 3") for n in graph.notes), graph.notes


class _Inverse(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(a)


def checked_after_decomposition() -> bool:
    """Tell whether torch keeps the check that a matrix has an inverse: 2.11 leaves it out of what it decomposes."""
    return "check_errors" in str(torch.export.export(_Inverse(), (torch.eye(3),)).run_decompositions().graph)


@pytest.mark.parametrize("left", ["linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "linalg_lu_factor_ex"])
def test_a_factorisation_that_torch_checks_fails_where_torch_does(left: str) -> None:
    kinds = {
        "linalg_inv_ex": torch.linalg.inv,
        "linalg_cholesky_ex": torch.linalg.cholesky,
        "_linalg_solve_ex": lambda a: torch.linalg.solve(a, a[0]),
        "linalg_lu_factor_ex": torch.linalg.lu_factor,
    }
    positive = X @ X.mT + torch.eye(3)
    graph = agree(kinds[left], positive, ulps=16, calls=[f"aten.{left}.default"])
    if left != "linalg_lu_factor_ex" and checked_after_decomposition():  # every matrix has that factorisation
        with pytest.raises(TypeMismatchError, match=r"cannot be evaluated: .*linalg"):
            evaluate(graph, [torch.zeros(3, 3)])


def test_the_lowest_integers_common_multiple_does_not_end_the_process() -> None:
    a, b = torch.tensor([-(2**63), -(2**63), 4, 0, -6]), torch.tensor([5, -1, 6, 0, 4])
    (given,) = evaluate(read(torch.lcm, a, b), [a, b])
    assert given.tolist()[2:] == [12, 0, 12]
    every = torch.arange(-(2**15), 2**15, 7).to(torch.int16)
    agree(torch.lcm, every, every.flip(0), calls=["aten.lcm.default"])
    agree(torch.lcm, every.int() * 3, every.flip(0).int(), calls=["aten.lcm.default"])


def test_a_complex_weight_is_seen_through_its_parts() -> None:
    class Rotates(nn.Module):
        """Rotary positions as complex numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turns", torch.polar(torch.ones(50, 4), torch.rand(50, 4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(x.reshape(-1, 4, 2))
            return torch.view_as_real(pairs * self.turns).flatten(1)

    module = Rotates()
    left = ["aten.mul.Tensor", "aten.view_as_complex.default", "aten.view_as_real.default"]
    graph = agree(module, torch.randn(50, 8), calls=left)
    (held,) = (n.op.data for n in graph.nodes() if n.op.name == "const" and n.op.data.label == "turns")
    assert held.tensor().data_ptr() == module.turns.data_ptr()


def test_a_graph_with_calls_prints_and_parses_back() -> None:
    graph = read(Of(lambda a: torch.cdist(a, a, p=float("inf")).topk(2)), X)
    again = parse(print_graph(graph))
    assert again.outputs == graph.outputs
    for a, b in zip(evaluate(again, [X]), torch.cdist(X, X, p=float("inf")).topk(2), strict=True):
        assert torch.equal(a, b)


def calling(target: str, payload: str, *types: TensorType) -> Graph:
    """A graph of one call over an input f32[3,8], as a file may hold it."""
    x = input_("x", F32, (3, 8))
    made = Node(Call("torch", target, payload, types or (TensorType(F32, (3, 8)),)), x)
    return Graph("hostile", (x,), (made,), ("y",))


ONE = '{"args":[{"tensor":0}],"kwargs":{}}'
HOSTILE: dict[str, tuple[Graph, type[TilewrightError], str]] = {
    "no such operator": (calling("aten.nonsense.default", ONE), UnsupportedError, "torch knows no operator"),
    "no operator at all": (calling("os.system", ONE), UnsupportedError, "torch knows no operator 'os.system'"),
    "an attribute on the way": (calling("aten.__class__.mro", ONE), UnsupportedError, "torch knows no operator"),
    "loading a library": (calling("load_library.__call__.x", ONE), UnsupportedError, "torch knows no operator"),
    "writes to its operand": (calling("aten.relu_.default", ONE), UnsupportedError, "writes to its operand"),
    "reads a file": (
        calling("aten.from_file.default", '{"args":["/etc/passwd"],"kwargs":{"size":1}}'),
        InputError,
        "reads a file, which a program may not",
    ),
    "no JSON": (calling("aten.relu.default", "__import__('os')"), InputError, "the payload of a call is malformed"),
    "no object": (calling("aten.relu.default", "[1]"), InputError, "the payload of a call is malformed"),
    "no arguments": (calling("aten.relu.default", "{}"), InputError, "the payload of a call is malformed"),
    "arguments of a wrong kind": (calling("aten.relu.default", '{"args":3,"kwargs":[]}'), InputError, "malformed"),
    "an operand there is none of": (
        calling("aten.relu.default", '{"args":[{"tensor":1}],"kwargs":{}}'),
        *(InputError, "the payload of a call is malformed"),
    ),
    "not a type": (
        calling("aten._to_copy.default", '{"args":[{"tensor":0}],"kwargs":{"dtype":{"torch":"load"}}}'),
        *(InputError, "the payload of a call is malformed"),
    ),
    "not a device": (
        calling("aten.full.default", '{"args":[[3,8],1],"kwargs":{"device":{"device":"nowhere"}}}'),
        *(TilewrightError, "cannot be evaluated|malformed|gave"),
    ),
    "two things at once": (
        calling("aten.relu.default", '{"args":[{"tensor":0,"float":"inf"}],"kwargs":{}}'),
        *(InputError, "the payload of a call is malformed"),
    ),
    "wrong arguments": (
        calling("aten.relu.default", '{"args":[{"tensor":0},1,2],"kwargs":{}}'),
        *(TypeMismatchError, "cannot be evaluated"),
    ),
    "another type than declared": (
        calling("aten.relu.default", ONE, TensorType(F32, (8, 3))),
        *(TypeMismatchError, r"aten\.relu\.default gave f32\[3,8\] where f32\[8,3\] is declared"),
    ),
    "fewer results than declared": (
        calling("aten.relu.default", ONE, TensorType(F32, (3, 8)), TensorType(F32, (3, 8))),
        *(TypeMismatchError, r"gave f32\[3,8\] where f32\[3,8\], f32\[3,8\] is declared"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_call_is_refused(name: str) -> None:
    graph, kind, what = HOSTILE[name]
    with pytest.raises(kind, match=what):
        evaluate(graph, [X])


def test_an_opaque_result_may_be_anything() -> None:
    x = input_("x", F32, (3, 8))
    transform = '{"args":[{"tensor":0},[1],0,true],"kwargs":{}}'
    bins = Node(Call("torch", "aten._fft_r2c.default", transform, (TensorType(OPAQUE, ()),)), x)
    real = Node(Call("torch", "aten.view_as_real.default", ONE, (TensorType(F32, (3, 5, 2)),)), bins)
    (given,) = evaluate(Graph("fft", (x,), (real,), ("y",)), [X])
    assert torch.equal(given, torch.view_as_real(torch.fft.rfft(X)))


def test_a_payload_holds_data_alone() -> None:
    graph = read(Of(lambda a: a.cumsum(1, dtype=torch.float64)), X)
    (op,) = (n.op for n in graph.nodes() if isinstance(n.op, Call))
    assert json.loads(op.payload) == {"args": [{"tensor": 0}, 1], "kwargs": {"dtype": {"torch": "float64"}}}


def test_integers_without_a_kernel_are_counted_as_floats():
    """A program traced on a GPU has histc of integers, for which torch has no kernel on a CPU."""
    ids = torch.tensor([0, 3, 3, 1, 2, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        torch.histc(ids, 4, 0, 3)
    x = input_("x", S32, (6,))
    payload = json.dumps({"args": [{"tensor": 0}, 4, 0, 3], "kwargs": {}})
    counted = Node(Call("torch", "aten.histc.default", payload, (TensorType(S32, (4,)),)), x)
    (found,) = evaluate(Graph("g", (x,), (counted,), ("y",)), [ids])
    assert found.dtype is torch.int32 and found.tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_a_call_without_a_kernel_here_runs_on_wider_operands(dtype):
    """torch counts integers with histc on GPUs alone: a program that was traced on one is sampled on the CPU."""
    call = Call(
        "torch", "aten.histc.default", '{"args":[{"tensor":0},4,0,3],"kwargs":{}}', (TensorType(from_torch(dtype), (4,)),)
    )
    given = torch.tensor([0, 3, 1, 3, 3], dtype=dtype)
    with pytest.raises(RuntimeError, match="not implemented for"):
        torch.histc(given, 4, 0, 3)
    (counts,) = evaluate_call(call, [given])
    assert counts.dtype is dtype
    assert counts.tolist() == [1, 1, 0, 3]


def test_a_call_that_wider_operands_would_change_stays_an_error():
    call = Call("torch", "aten.histc.default", '{"args":[{"tensor":0},4,0,3],"kwargs":{}}', (TensorType(S64, (4,)),))
    with pytest.raises(RuntimeError, match="not implemented for"):
        evaluate_call(call, [torch.tensor([0, (1 << 53) + 1])])
    with pytest.raises(TypeMismatchError, match="is declared"):  # as the operands' own kernel would have been told
        evaluate_call(Call("torch", "aten.histc.default", call.payload, (TensorType(S64, (5,)),)), [torch.tensor([0, 3])])


@pytest.mark.thin(2)
@pytest.mark.parametrize("wrong", [-1, 5, -6])
def test_an_id_that_torch_refuses_is_an_error_of_the_call(wrong: int) -> None:
    table = torch.nn.Embedding(5, 16)
    for lookup in (
        table,
        Of(lambda ids: torch.index_select(table.weight, 0, ids)),
        Of(lambda ids: table.weight[:, 0].gather(0, ids)),
    ):
        program = tilewright.compile(lookup, example_inputs=(torch.tensor([0, 4, 1]),), budget_s=0, cache=False)
        torch.testing.assert_close(program(torch.tensor([3, 0, 4])), lookup(torch.tensor([3, 0, 4])))
        with pytest.raises(TilewrightError, match="index"):
            program(torch.tensor([3, wrong, 4]))
    wraps = tilewright.compile(Of(lambda i: table.weight[i]), example_inputs=(torch.tensor([0, 1]),), budget_s=0, cache=False)
    torch.testing.assert_close(wraps(torch.tensor([-1, 2])), table.weight[[-1, 2]])
    pairs = tilewright.compile(
        Of(lambda i, j: table.weight[i, j]), example_inputs=(torch.tensor([0, 1]),) * 2, budget_s=0, cache=False
    )
    i, j = torch.tensor([-1, 2]), torch.tensor([15, -16])
    torch.testing.assert_close(pairs(i, j), table.weight[i, j])
    for outside in ((torch.tensor([0, 1]), torch.tensor([3, 16])), (torch.tensor([0, -6]), torch.tensor([3, 4]))):
        with pytest.raises(TilewrightError, match="index"):
            pairs(*outside)
