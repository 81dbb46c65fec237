"""Products in pieces that overlap with copies between ranks: ranks in one address space, launches and copies in turns."""

from functools import partial

import pytest
import torch
from fusions import by_row, norm
from ptx import H200, Fault, emulating, together
from ptx.machine import How
from ptx.streams import Lane
from w4_problems import posed

from tilewright.dtype import F8E4M3FN, F32
from tilewright.ir.build import convert, map_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, substitute
from tilewright.ir.mesh import Mesh, in_team, simulate
from tilewright.ir.ops import AllGather, AllReduce, Param, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Schedule, concerns, discover, plan_for, refusal
from tilewright.schedule.expected import check, expect_on_mesh
from tilewright.schedule.problem import Problem
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates import chunked
from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.candidates.triton.runtime import copies

PREFERRED = ("hopper", "triton", "triton_norm")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of few rows, too."""
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 1)
    monkeypatch.setattr(chunked, "FEWEST_OF_PIECE", 1)


def between(line, ranks, op, then=""):
    """A line's product with rows gathered before it, or sums reduced behind it and, if said, a residual and a norm."""
    local = posed(line, True)
    types, (lhs, stores) = list(local.types), (local.op.lhs, list(local.op.stores))
    over = {"over": ("tp",), "sizes": (ranks,)}
    if op == "gather":
        rows = local.M
        for i, t in enumerate(types):
            if t.shape and t.shape[0] == rows and not local.weights[i]:
                types[i] = t.with_shape((rows // ranks, *t.shape[1:]))
                whole = Node(AllGather(**over, axis=0), Node(Param(i, types[i])))
                lhs, *stores = substitute((lhs, *stores), {Node(Param(i, t)): whole})
    else:
        (store,) = stores
        total = Node(ReduceScatter(**over, axis=0) if op == "scatter" else AllReduce(**over), store)
        stores = [total]
        if then:
            types += [total.tensor, TensorType(F32, total.shape[-1:])]
            stores = [map_("add", total, Node(Param(len(types) - 2, types[-2])))]
        if then == "norm":
            y = norm(convert(stores[0], F32), Node(Param(len(types) - 1, types[-1])), center=False)
            stores += by_row(y, F8E4M3FN)
    sources = [Node(Param(i, t)) for i, t in enumerate(types)]
    made = make_gemm(local.op.acc_dtype, lhs, local.op.rhs, stores, sources)
    weights = [*local.weights, False, True][: len(types)]
    order = [sources.index(s) for s in made.src]
    return Problem(made.op, tuple(types[i] for i in order), tuple(weights[i] for i in order))


def first(plan, point):
    """A point with the first point of each piece's first candidate that is generated."""
    chosen = []
    for piece in plan.pieces():
        able = {c.name: c for c in discover(kind="cuda") if concerns(c, piece, H200) and not refusal(c, piece, H200)}
        name = next(n for n in PREFERRED if n in able)
        chosen.append((name, next(iter(plan_for(able[name], piece, H200).schedules()))))
    return plan.of_pieces(point, chosen)


late = []


def results(problem, ranks, point, calls=1, seed=0, limit_s=5.0, **how):
    """Each rank's results of each call, with its sources, run together: in turns drawn by lot."""
    mesh = Mesh.parse(f"tp={ranks}")
    space = VirtualRanks(mesh, "cpu", limit_s)
    given = simulate(mesh, lambda r: random_sources(problem, seed=17 + r))
    plan = chunked.plan(problem, H200)
    schedule = first(plan, Schedule.of(**point))
    streams, found, kept = [], [[] for _ in range(ranks)], []
    with emulating(How(seed=seed, **how)) as driver, pytest.MonkeyPatch.context() as m:
        empty = torch.empty

        def holding(*args, **kwargs):  # what a call allocates lives until its launches have run
            kept.append(empty(*args, **kwargs))
            return kept[-1]

        def lane(device):
            made = Lane(driver)
            streams.append(made.queue)
            return made

        m.setattr(torch, "empty", holding)
        m.setattr(copies, "lane", lane)
        for r in range(ranks):
            driver.queue = []
            with in_team(space.member(r)):
                run = plan.build(schedule).prepare({i: given[r][i] for i, w in enumerate(problem.weights) if w})
                for call in range(calls):
                    turned = zip(given[r], problem.weights, strict=True)
                    sources = [t if w else t.roll(call, 0).roll(call, -1) for t, w in turned]
                    kept.append(sources)
                    found[r].append((sources, list(run(sources))))
            streams.append(driver.queue)
        m.setattr(torch, "empty", empty)
        together(streams, seed)
    late.append(space.late())
    return found


def right(problem, ranks, point, calls=1, seed=0, **how):
    """All results are right."""
    found, mesh = results(problem, ranks, point, calls, seed, **how), Mesh.parse(f"tp={ranks}")
    assert late[-1] == [0] * ranks
    whys = []
    for call in range(calls):
        for r in range(ranks):
            _, expected = expect_on_mesh(problem, lambda rank, call=call: found[rank][call][0], mesh, r)
            why = check(problem, expected, found[r][call][1])
            whys += [f"call {call}, rank {r}: {why}"] if why else []
    assert not whys, whys[0]
    return found


PLAIN = "bf16[16,64] @ bf16[32,64]^T -> bf16"
FP8 = "f8e4m3fn[16,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16"
push = partial(dict, via="push")


@pytest.mark.parametrize(
    ("line", "ranks", "op", "then", "chunks"),
    [
        (PLAIN, 2, "gather", "", 1),
        (PLAIN, 4, "gather", "", 2),
        (FP8, 2, "gather", "", 2),
        (PLAIN, 2, "scatter", "", 1),
        ("bf16[32,64] @ bf16[32,64]^T -> bf16", 4, "scatter", "norm", 2),
        (PLAIN, 2, "reduce", "", 2),
        ("bf16[32,64] @ bf16[32,64]^T -> bf16", 2, "reduce", "norm", 4),
        (FP8, 4, "reduce", "add", 2),
    ],
)
def test_pieces_together_are_the_whole(line, ranks, op, then, chunks):
    """Rows of one rank after another, several calls, launches and copies in turns drawn by lot."""
    right(between(line, ranks, op, then), ranks, push(chunks=chunks), calls=3, seed=len(then))


def found_wrong(problem, ranks, point, calls, most=8):
    """Tell whether some order shows that results are wrong, or that a kernel or a stream waits for ever."""
    for seed in range(most):
        try:
            right(problem, ranks, point, calls, seed=seed, most_steps=40_000)
        except (AssertionError, Fault):
            return True
    return False


def planted(monkeypatch, name, old, new):
    text = getattr(copies, name)
    assert old in text
    monkeypatch.setattr(copies, name, text.replace(old, new))


CASES = [("gather", 2, 2), ("scatter", 2, 1), ("reduce", 2, 2)]
cases = pytest.mark.parametrize(("op", "ranks", "chunks"), CASES)


@cases
def test_what_does_not_wait_is_found(op, ranks, chunks, monkeypatch):
    planted(monkeypatch, "WAIT", "@q ld.acquire.sys.global.b32 f, [a];", "")
    assert found_wrong(between(PLAIN, ranks, op), ranks, push(chunks=chunks), calls=2)


@cases
def test_a_flag_before_its_data_is_found(op, ranks, chunks, monkeypatch):
    send, tell, held = copies.Copies.send, copies.Copies.tell, []
    monkeypatch.setattr(copies.Copies, "send", lambda *given: held.append(given))

    def early(self, rank, flag):
        tell(self, rank, flag)
        while held:
            send(*held.pop())

    monkeypatch.setattr(copies.Copies, "tell", early)
    assert found_wrong(between(PLAIN, ranks, op), ranks, push(chunks=chunks), calls=2)


def test_flags_on_another_stream_than_their_data_are_found(monkeypatch):
    tell = copies.Copies.tell

    def elsewhere(self, rank, flag):
        lane, self.lane = self.lane, copies.lane("cpu")
        self.lane.follow()
        tell(self, rank, flag)
        self.lane = lane

    monkeypatch.setattr(copies.Copies, "tell", elsewhere)
    assert found_wrong(between(PLAIN, 2, "gather"), 2, push(chunks=2), calls=2)


def test_memory_that_is_written_while_another_rank_reads_it_is_found(monkeypatch):
    """As in a graph that is replayed, whose calls have one channel: then the free flags alone keep a rank from it."""
    monkeypatch.setattr(copies, "CHANNELS", 1)
    given = between(PLAIN, 2, "scatter"), 2, push(chunks=1)
    right(*given, calls=4, seed=3)
    waits = copies.Copies._waits
    never = lambda self, place, count, stride, more, *rest: waits(self, place, count, stride, more or -9, *rest)  # noqa: E731
    monkeypatch.setattr(copies.Copies, "_waits", never)
    assert found_wrong(*given, calls=4, most=40)


def test_a_call_that_is_not_counted_is_found(monkeypatch):
    end = copies._end
    monkeypatch.setattr(copies, "_end", lambda ranks: end(ranks).replace(f"@q st.global.b32 [$1+{copies.EPOCH}], v;", ""))
    assert found_wrong(between(PLAIN, 2, "gather"), 2, push(chunks=1), calls=5)


def test_a_rank_that_does_not_come_is_named_to_the_host(monkeypatch):
    tell = copies.Copies.tell
    monkeypatch.setattr(copies.Copies, "tell", lambda self, *given: tell(self, *given) if self.own == 0 else None)
    results(between(PLAIN, 2, "gather"), 2, push(chunks=1), seed=1, limit_s=50e-6)
    assert late[-1] == [2, 0]  # the first rank waited for the second one, and not the other way round


@pytest.mark.parametrize(
    ("line", "ranks", "op", "why"),
    [
        (PLAIN, 17, "reduce", "17 ranks: up to 16"),
        ("bf16[6,64] @ bf16[32,64]^T -> bf16", 4, "reduce", "6 rows are not divided among 4 ranks"),
        ("s8[16,64] @ s8[32,64]^T -> s32", 2, "reduce", "add of s32: sums of f32, bf16 or f16"),
    ],
)
def test_what_is_not_cut_is_refused_with_a_sentence(line, ranks, op, why):
    assert why in refusal(chunked.CANDIDATE, between(line, ranks, op), H200)


def test_few_rows_are_left_to_others(monkeypatch):
    monkeypatch.undo()
    assert "16 rows: of fewer than 256" in refusal(chunked.CANDIDATE, between(PLAIN, 2, "gather"), H200)


def test_machine_code_waits_for_the_system_and_has_no_multicast():
    wait, end = (built.kernel.asm["ptx"] for built in copies.Sizes(4, 1 << 20).machine_code(H200))
    assert "ld.acquire.sys.global" in wait and end.count("st.release.sys.global") == 4
    assert "multimem" not in wait + end
