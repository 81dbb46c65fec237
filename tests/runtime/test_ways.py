"""The order in which ways between ranks are tried, and how a search goes on where one before it stopped: the same on all ranks,
whatever their clocks say and whoever makes the machine code."""

from __future__ import annotations

import time as real
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ranks import job

from tests.runtime.test_agreement import chosen, compiled, off
from tilewright.dtype import BF16, F32
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.links import links_for
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, AllReduce, Gemm, Param
from tilewright.ir.types import TensorType
from tilewright.runtime.ways import ALL, HEADS, NEAREST, Point, Ways, expected_us
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Refusal, Schedule
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.record import Choice, RejectedRecord
from tilewright.schedule.search import Decision, search

LIBRARY, RANKS = "sequential reduce=library", "sequential reduce=ranks"
TWO, FOUR = "chunked via=library chunks=2", "chunked via=library chunks=4"
TIMES = {LIBRARY: 100.0, RANKS: 95.0, TWO: 90.0, FOUR: 85.0}
H200 = Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))


def product(rows: int = 512) -> Problem:
    lhs, rhs = TensorType(BF16, (rows, 4096)), TensorType(BF16, (8192, 4096))
    op = Gemm(
        F32,
        Node(Param(0, lhs)),
        swap_last(Node(Param(1, rhs))),
        (Node(AllReduce(("tp",), (2,)), convert(Node(Acc(TensorType(F32, (rows, 8192)))), BF16)),),
    )
    return Problem(op, (lhs, rhs), (False, True))


class Fake:
    """A plan of some points, of which each but the first needs a piece of its own."""

    def __init__(self, count: int, pieces: tuple[AnyProblem, ...] = (), parts: int = 1) -> None:
        self.count, self._pieces, self._parts = count, pieces, parts

    def schedules(self) -> list[Schedule]:
        return [Schedule.of(at=i) for i in range(self.count)]

    def pieces_with(self, weights: Any) -> list[tuple[AnyProblem, Any]]:
        return [(p, {}) for p in self._pieces]

    def pieces_of(self, schedule: Schedule) -> list[AnyProblem]:
        at = cast("int", schedule["at"])
        return [self._pieces[at]] if at < len(self._pieces) else []

    def overlapped(self, schedule: Schedule) -> int:
        return self._parts

    def of_pieces(self, schedule: Schedule, chosen: Any) -> Schedule:
        return Schedule((*schedule.knobs, *((f"by{i}", name) for i, (name, _) in enumerate(chosen))))

    def build(self, schedule: Schedule) -> Kernel:
        raise NotImplementedError


def ways(plans: dict[str, Fake], measures: bool = True) -> Ways:
    made = {Candidate(n, GEMM, GPU, 50, lambda *_: Refusal(""), ranks="several"): p for n, p in plans.items()}
    return Ways(product(), cast("Any", made), measures)


def names(points: list[Point]) -> list[str]:
    return [f"{p.candidate.name} {p.schedule['at']}" for p in points]


def passes(w: Ways, point: Point, us: float) -> None:
    schedule = point.with_pieces({})
    kernel = Kernel(point.candidate.name, schedule, lambda _: lambda _: [])
    w.took(point, Decision(w.problem, kernel, us, (), True, True))


def take(w: Ways, name: str, us: float) -> None:
    passes(w, next(p for p in w.left if f"{p.candidate.name} {p.schedule['at']}" == name), us)


def test_the_plain_way_is_tried_first_and_then_what_is_expected_to_be_fast():
    w = ways({"tiles": Fake(2, parts=8), "late": Fake(1), "sequential": Fake(2), "pieces": Fake(1, parts=2)})
    links = links_for(H200)
    w.set_order(w.in_order(lambda p: expected_us(p, w.problem, 60.0, links)))
    assert names(w.ranked(w.wave(HEADS))) == ["sequential 0", "tiles 0", "pieces 0", "late 0"]
    by_parts = [expected_us(p, w.problem, 60.0, links) for p in w.left if p.at == 0]
    assert by_parts[0] < by_parts[3] < by_parts[1] == by_parts[2]
    longer = 60.0 + 20 + 2 * 512 * 8192 / (0.8 * 450 * 1e3)  # an all-reduce's latency and the bytes a rank sends
    assert by_parts[1] == pytest.approx(longer)


def test_points_of_what_is_near_the_fastest_come_first_and_others_have_their_turn():
    w = ways({"sequential": Fake(3), "tiles": Fake(9), "slow": Fake(3)})
    take(w, "sequential 0", 100.0)
    take(w, "tiles 0", 70.0)
    take(w, "slow 0", 200.0)
    assert {p.candidate.name for p in w.wave(NEAREST)} == {"tiles"}
    order, said = [], {"sequential": 100.0, "tiles": 75.0, "slow": 200.0}
    while left := w.ranked(w.wave(ALL)):
        order += names(left[:1])
        take(w, order[-1], said[left[0].candidate.name])
    assert order[:4] == ["tiles 1", "tiles 2", "tiles 3", "tiles 4"] and order[-2:] == ["slow 1", "slow 2"]
    assert order.index("sequential 1") < order.index("tiles 8")


def test_without_a_clock_candidates_are_tried_in_turn():
    w = ways({"first": Fake(2), "second": Fake(1)}, measures=False)
    assert w.waves == 2 and names(w.ranked(w.wave(0))) == ["first 0", "first 1"]
    assert names(w.ranked(w.wave(1))) == ["first 0", "first 1", "second 0"]


def test_a_point_needs_its_own_pieces_alone():
    a, b = product(128), product(256)
    w = ways({"sequential": Fake(1, (a,)), "pieces": Fake(2, (a, b))})
    assert w.plain == (a,)
    assert [p.needs for p in w.left] == [(a,), (a,), (b,)]
    kernel = SimpleNamespace(kernel=Kernel("hopper", Schedule(), lambda _: lambda _: []))
    assert str(w.left[1].with_pieces(cast("Any", {a: kernel}))) == "at=0 by0=hopper by1="


def test_a_search_goes_on_where_the_last_one_stopped():
    w = ways({"sequential": Fake(2), "tiles": Fake(4)})
    slower, wrong, close = (((("at", i)),) for i in (1, 2, 3))
    rejected = [
        RejectedRecord("tiles", "slower: …", 130.0, slower, "slower"),
        RejectedRecord("tiles", "rank 1: wrong", None, wrong, "wrong"),
        RejectedRecord("tiles", "slower: …", 95.0, close, "slower"),
        RejectedRecord("sequential", "not tried: the time was over", None, (("at", 1),), "untried"),
        RejectedRecord("sequential", "slower: …", 110.0, (("at", 0),), "slower"),
    ]
    w.go_on_from(Choice("tiles", (("at", 0),), 90.0, tuple(rejected)))
    first = w.ranked(w.wave(HEADS))[0]
    assert (first.candidate.name, first.whole) == ("tiles", True)
    assert not w.known(first, first.schedule)  # nothing passed yet
    passes(w, first, 100.0)  # slower now than what came second then
    tried = []
    for p in w.ranked(w.wave(ALL)):
        if not w.known(p, p.schedule):
            tried += names([p])
            take(w, tried[-1], 105.0)
    assert sorted(tried) == ["sequential 1", "tiles 3"]
    found = w.decision({})
    assert found is not None and found.time_us == 100.0
    said = {(r.candidate, r.schedule["at"]): (r.kind, r.why) for r in found.rejected}
    assert said["tiles", 1] == ("slower", "slower: 130.0 µs on the slowest rank, 1.30 times the winner")
    assert said["tiles", 2] == ("wrong", "rank 1: wrong") and said["sequential", 0][0] == "slower"
    assert len(found.rejected) == 5


def test_what_was_not_come_to_is_not_lost_and_a_winner_that_fails_is_no_witness():
    w = ways({"sequential": Fake(2), "tiles": Fake(2)})
    rejected = (RejectedRecord("tiles", "slower: …", 95.0, (("at", 1),), "slower"),)
    w.go_on_from(Choice("tiles", (("at", 0),), 90.0, rejected))
    passes(w, w.left[0], 91.0)
    found = w.decision({})
    assert found is not None
    kinds = {(r.candidate, r.schedule["at"]): r.kind for r in found.rejected}
    assert kinds == {("tiles", 1): "slower", ("tiles", 0): "untried"} | {("sequential", i): "untried" for i in (0, 1)}
    w = ways({"sequential": Fake(2), "tiles": Fake(2)})
    w.go_on_from(Choice("tiles", (("at", 0),), 90.0, rejected))
    w.failed(w.left[0], w.left[0].schedule, "rank 0: failed to build")
    take(w, "sequential 0", 110.0)
    assert not any(w.known(p, p.schedule) for p in [*w.left])


def tries(rank: int, patch: pytest.MonkeyPatch) -> list[list[str]]:
    """The lists to the last of which a compile adds the points that it tries, in ranks whose clocks differ; what each of them
    takes is as `TIMES` says."""
    from tilewright import on_mesh
    from tilewright.candidates import chunked
    from tilewright.runtime import agreement

    tried, right, plans = list[list[str]](), agreement.Agreed._try, agreement.Agreed._plans
    looks = count()  # from one to the next rank 1's clock goes on by so much that the time is over

    def now() -> float:
        return real.monotonic() + 1e3 * rank * next(looks)

    clock = SimpleNamespace(monotonic=now, perf_counter=real.perf_counter, sleep=real.sleep)

    def several(self: Any, problem: Any) -> Any:
        """Those on a CPU, and products in pieces, which are for GPUs but run here."""
        return {**plans(self, problem), chunked.CANDIDATE: chunked.plan(problem, self._target)}

    def counting(self: Any, ways: Any, point: Any, checked: Any) -> None:
        tried[-1].append(f"{point.candidate.name} {str(point.schedule).split(' by=')[0]}")
        right(self, ways, point, checked)

    class First:
        """Takes the first kernel of each problem of one rank alone."""

        def __init__(self, problems: Any, target: Any, *_: Any, **__: Any) -> None:
            self.target = target

        def weight(self, problem: Any) -> float:
            return 1.0

        def turn(self, problems: Any) -> int:
            return 0

        def __call__(self, problem: Any, weights: Any) -> Decision:
            return search(problem, self.target, budget_s=0, weights=weights)

    patch.setattr(agreement, "BudgetedChooser", First)
    patch.setattr(on_mesh, "faster_form", lambda local, *_: local)
    patch.setattr(agreement, "time", clock)
    patch.setattr(agreement, "kept_links", lambda *_: [] if rank == 0 else 1 / 0)
    patch.setattr(agreement.Agreed, "_plans", several)
    patch.setattr(agreement.Agreed, "_try", counting)
    patch.setattr(agreement.Agreed, "_timed", lambda *_: TIMES[tried[-1][-1]])
    return tried


def taken_up(rank: int, patch: pytest.MonkeyPatch) -> object:
    """Compile three times: the first time is over once two points were tried."""
    from tilewright.runtime.agreement import Agreed

    tried, found = tries(rank, patch), []
    right, most = Agreed._next, [2, 9, 9]

    def cut_short(self: Any, problem: Any, points: Any, until: float) -> tuple[bool, int | None]:
        over, at = right(self, problem, points, until)
        return over or len(tried[-1]) >= most[len(tried) - 1], at

    patch.setattr(Agreed, "_next", cut_short)
    for _ in most:
        tried.append([])
        program, case = compiled("row parallel", "tp=2", budget_s=60)
        (d,) = (s.decision for s in program.steps if s.decision is not None)
        kinds = sorted(r.kind for r in d.rejected)
        found.append([off(program, case, rank) < 1e-4, d.recalled, kinds, d.time_us, chosen(program)])
    return tried, found


def made_late(rank: int, patch: pytest.MonkeyPatch) -> object:
    """Compile where the machine code of one point takes long on a rank."""
    from tilewright.candidates import sequential
    from tilewright.runtime import agreement

    tried, looks, shares = tries(rank, patch), [0], list[list[str]]()

    class Ahead:
        def __init__(self, problems: Any, target: Any, *, chosen: Any, most: int) -> None:
            self.jobs = {job for job in chosen if "reduce=library" in str(job[2])}
            shares.append([str(s).split(" by=")[0] for *_, s in chosen])

        def waits(self, job: Any) -> bool:
            looks[0] += job in self.jobs
            return job in self.jobs and looks[0] < 5

        def stop(self) -> None:
            shares.append(["stop"])

    patch.setattr(agreement, "Ahead", Ahead)
    patch.setattr(agreement, "COMPILED", ("cpu",))
    patch.setattr(agreement, "LOOK_S", 0.01)
    patch.setattr(sequential.Plan, "compile", lambda self, schedule: None, raising=False)
    tried.append([])
    program, case = compiled("row parallel", "tp=2", budget_s=60, cache=False)
    return tried, shares, off(program, case, rank) < 1e-4


def too_late(rank: int, patch: pytest.MonkeyPatch) -> object:
    """Compile where the time for problems of one rank alone is over at once."""
    from tilewright.runtime.agreement import Agreed

    tried = tries(rank, patch)
    tried.append([])
    patch.setattr(Agreed, "_local_s", lambda self, points: 0.0)
    program, case = compiled("row parallel", "tp=2", budget_s=60, cache=False)
    (d,) = (s.decision for s in program.steps if s.decision is not None)
    return tried, [[r.candidate, r.kind, r.why] for r in d.rejected], off(program, case, rank) < 1e-4


def all_of(rank: int) -> object:
    said = []
    for one in (taken_up, made_late, too_late):
        with pytest.MonkeyPatch.context() as patch:
            said.append(one(rank, patch))
    return said


@pytest.fixture(scope="module")
def by_rank() -> list[Any]:
    """The answers of two ranks to `taken_up`, `made_late` and `too_late`."""
    return cast("list[Any]", job(all_of, 2).answers())


def test_a_second_compile_tries_what_the_first_did_not_and_a_third_nothing(by_rank):
    (tried, found), other = (said[0] for said in by_rank)
    assert [tried, found] == other
    assert [right for right, *_ in found] == [True] * 3 and [recalled for _, recalled, *_ in found] == [False, False, True]
    assert tried == [[LIBRARY, TWO], [TWO, RANKS, FOUR], []]  # the second: its winner, and what was left
    assert [(kinds, us) for _, _, kinds, us, _ in found] == [
        (["slower", "untried", "untried"], 90.0),
        (["slower"] * 3, 85.0),
        (["slower"] * 3, 85.0),
    ]
    assert found[2][4] == found[1][4] != found[0][4]


def test_points_whose_machine_code_is_made_are_tried_while_that_of_others_is_not(by_rank):
    """Each rank makes that of its share; what one has not made, all put off."""
    (tried, first, right), (others, second, also) = (said[1] for said in by_rank)
    assert tried == others and right and also
    assert tried[0][:2] == [TWO, LIBRARY] and {*tried[0]} == {*TIMES}
    # As the plan guesses them, and with their pieces, once these are chosen.
    assert first == [["reduce=library"]] * 2 + [["stop"]] * 2 and second == [["reduce=ranks"]] * 2 + [["stop"]] * 2


def test_pieces_that_the_plain_way_does_not_need_hold_nothing_up(by_rank):
    (tried, rejected, right), (others, _, also) = (said[2] for said in by_rank)
    assert tried == others and right and also and tried[0] == [LIBRARY, RANKS]
    assert [r for r in rejected if r[0] == "chunked"] == [["chunked", "untried", "not tried: the time was over"]] * 2
