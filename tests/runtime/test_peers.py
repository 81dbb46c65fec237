"""Ranks that fail: the others say which one, and why, within seconds, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from local_programs import case
from meshes import on, placed
from ranks import Job, job

from tilewright.dtype import F32
from tilewright.errors import PeerError, TilewrightError
from tilewright.ir.build import input_
from tilewright.ir.mesh import Mesh, split_feeds
from tilewright.ir.ops import gemm
from tilewright.runtime.team import ProcessTeam, _made, _named

BAD = 1  # the rank that fails, in its sixth call


def calling(rank: int, fault: str, mesh: str) -> object:
    """Calls of a program to which rank 1 does not come: what this rank is told then, and when it calls again."""
    import tilewright
    import tilewright.compiler
    import tilewright.schedule.key
    from tilewright.errors import PeerError

    found = case("megatron", Mesh.parse(mesh))
    mine = split_feeds(found.feeds(1), found.placements, found.mesh)[rank]
    if rank == BAD and fault == "ended":
        time.sleep(2)  # the others wait by now
        os._exit(3)
    if rank == BAD and fault == "compiling":
        tilewright.compiler.load = lambda *_: 1 / 0  # type: ignore[assignment]
    if rank == BAD and fault == "version":
        tilewright.schedule.key.code_version = lambda: "0.0.9 0123456789ab"  # type: ignore[assignment]
    if rank == BAD and fault == "program":
        found = case("constants", Mesh.parse(mesh))
    try:
        program: Any = tilewright.compile(found.local, mesh=mesh, budget_s=0)
        for call in range(20):
            if rank == BAD and call == 5:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "asleep":
                    time.sleep(10)
                if fault == "failing":
                    mine = {**mine, "x": torch.zeros(3)}
                if fault == "leaving":
                    return "left"
            program(**mine)
    except PeerError as error:
        again = ""
        if fault == "asleep" and rank != BAD:
            with pytest.raises(PeerError) as told:
                program(**mine)
            again = str(told.value)
        return [str(error), again]
    return None


FAULTS = {
    "killed": r"rank 1 is gone: nothing was heard of it for \d.\d s; rank 0 waits at step 1 \(gemm\)",
    "stopped": r"rank 1 is gone: nothing was heard of it|rank 1 did not reach step 1",
    "failing": r"rank 1 failed at a call of megatron: InputError: shape \[3\] given",
    "leaving": r"rank 1 has ended|rank 1 did not reach step 1 \(gemm\) in 5 s",
    "ended": r"rank 1 ended before it came to compile",
    "compiling": r"rank 1 failed at the start of a program: ZeroDivisionError: division by zero",
    "version": r"ranks differ in version of tilewright: 0.1.0 \w+ on rank 0, 0.0.9 0123456789ab on rank 1",
    "cache": r"ranks differ in cache: \S+ on rank 0, \S+/elsewhere on rank 1",
    "threads": r"ranks differ in (cores|threads): 1 on rank 0, 2 on rank 1",
    "program": r"ranks differ in the program: \w+ on rank 0, \w+ on rank 1",
    "asleep": r"rank 1 did not reach step 1 \(gemm\) in 5 s",
}
USUAL = ("killed", "ended", "asleep", "failing", "version", "cache")


def started(fault: str, folder: Path) -> Job:
    count, mesh = (4, "dp=2,tp=2") if fault == "threads" else (2, "tp=2")
    other = {"cache": {"TILEWRIGHT_CACHE": str(folder / "elsewhere")}, "threads": {"OMP_NUM_THREADS": "2"}}
    return job(calling, count, fault, mesh, each={BAD: other.get(fault, {})})


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of which a rank sleeps for ten seconds, while other tests run."""
    return started("asleep", tmp_path_factory.mktemp("asleep"))


@pytest.mark.parametrize("fault", [f if f in USUAL else pytest.param(f, marks=pytest.mark.conformance) for f in FAULTS])
def test_a_rank_that_fails_is_named_on_all_others(fault, tmp_path, asleep):
    ranks = asleep if fault == "asleep" else started(fault, tmp_path)
    for rank in ranks.ranks:
        if rank is not ranks.ranks[BAD] or fault not in ("killed", "stopped"):
            rank.process.wait(120)
    ranks.wait(0 if fault in ("killed", "stopped") else 60)
    alike = fault in ("version", "cache", "threads", "program")  # all are told, the one that differs, too
    for i, rank in enumerate(ranks.ranks):
        if i == BAD and not alike:
            continue
        assert rank.process.returncode == 0, rank.text
        sentence, again = cast("list[Any]", rank.answer)
        assert re.search(FAULTS[fault], sentence), sentence
        assert not again or again.splitlines()[0] == sentence.splitlines()[0]
    if fault == "asleep":  # it comes ten seconds late, and is told what the others were
        assert "rank 1 did not reach step 1" in cast("list[Any]", ranks.ranks[BAD].answer)[0]
    if fault == "failing":
        assert "InputError: shape [3] given" in ranks.ranks[BAD].text


def refusing(rank: int) -> object:
    """Four calls, the second of which rank 1 alone refuses, and one of the program compiled again: the error of each, or how
    far its results are off."""
    import tilewright

    x = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    options: dict[str, Any] = {"example_inputs": (x[0],), "mesh": "tp=2", "budget_s": 0}
    said: list[object] = []

    def call(program: Any, given: torch.Tensor, wanted: torch.Tensor) -> None:
        try:
            said.append(float((program(given) - wanted).abs().max()))
        except TilewrightError as error:
            said.append(f"{type(error).__name__}: {error}")

    with torch.no_grad():
        program: Any = tilewright.compile(module, plan={"0": "colwise", "2": "rowwise"}, **options)
        for i, t in enumerate(x):
            call(program, t.double() if (rank, i) == (BAD, 1) else t, module(t))
        program = tilewright.compile(module, plan={"0": "colwise", "2": "rowwise"}, **options)
        call(program, x[3], module(x[3]))
    return said


def test_a_rank_that_refused_an_input_refuses_all_calls_until_it_is_compiled_again():
    for rank, said in enumerate(job(refusing, 2).answers()):
        first, refused, *later, last = cast("list[Any]", said)
        assert first < 1e-5 and last < 1e-5
        assert refused.startswith("InputError: f64 given" if rank == BAD else "PeerError: rank 1 failed at a call of ")
        for again in later:
            assert again.startswith("PeerError: rank 1 failed at a call of ") and "InputError: f64 given" in again
        assert rank != BAD or "try: compile the program again on every rank" in later[0]


def crossing(rank: int) -> object:
    """Calls by two threads, in one of which this rank still is when the other begins: the error of each."""
    import tilewright

    found = case("megatron", Mesh.parse("tp=2"))
    mine = split_feeds(found.feeds(1), found.placements, found.mesh)[rank]
    program: Any = tilewright.compile(found.local, mesh="tp=2", budget_s=0)
    program(**mine)
    said: list[str] = []

    def second() -> None:
        try:
            program(**mine)
        except TilewrightError as error:
            said.append(f"{type(error).__name__}: {error}")

    try:
        with program.team.working():
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
    except TilewrightError as error:
        said.append(f"{type(error).__name__}: {error}")
    second()
    return said


def test_calls_by_two_threads_at_once_are_refused_and_end_both():
    for said in job(crossing, 2).answers():
        refused, *others = cast("list[str]", said)
        assert refused.startswith("InputError: two threads call programs on the mesh tp=2 at the same time")
        assert len(others) == 2 and all(o.startswith("PeerError: rank ") and "two threads" in o for o in others)


ORDERS = {
    "sizes": r"rank \d calls program [13] \(\w+\) while rank \d calls program [13] \(\w+\)",
    "weights": r"rank 0 calls program 1 \(Sequential\) while rank 1 calls program 2 \(Sequential\)",
    "inputs": r"ranks \d and \d call program 1 \(\w+\) with other values of an input that is to lie whole on both",
}


def crossed(rank: int, kind: str, lines: str) -> object:
    """Two calls in another order on rank 1 than on the others, after some in the same: how far results are off, and what
    this rank is told."""
    import tilewright
    import tilewright.runtime.team as team

    if lines == "apart":  # as between hosts
        team.shared = lambda _: (_ for _ in ()).throw(OSError("there is none"))  # type: ignore[assignment]
    programs: list[Any] = []
    modules: list[torch.nn.Module] = []
    for seed, width in enumerate((32, 32, 64)):
        torch.manual_seed(seed)
        modules.append(torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 8)).eval().requires_grad_(False))
        plan: dict[str, Any] = {"plan": {"0": "colwise", "1": "rowwise"}, "example_inputs": (torch.ones(4, 16),)}
        programs.append(tilewright.compile(modules[-1], mesh=f"tp={os.environ['WORLD_SIZE']}", budget_s=0, **plan))
    x = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    calls = {"sizes": [(0, 0), (2, 0)], "weights": [(0, 0), (1, 0)], "inputs": [(0, 0), (0, 1)]}[kind]
    worst, told = 0.0, ""
    try:
        for turn in range(6):
            for p, i in reversed(calls) if turn == 5 and rank == 1 else calls:
                y = programs[p](x[i])
                worst = max(worst, float((y - modules[p](x[i])).abs().max()))
    except TilewrightError as error:
        told = f"{type(error).__name__}: {error}"
    return [worst, told]


@pytest.mark.parametrize(
    ("kind", "lines", "count"),
    [
        ("sizes", "shared", 2),
        ("weights", "shared", 2),
        ("inputs", "apart", 2),
        *(pytest.param(*c, marks=pytest.mark.conformance) for c in (("inputs", "shared", 4), ("sizes", "apart", 4))),
    ],
)
def test_calls_in_another_order_give_no_numbers(kind, lines, count):
    for worst, told in cast("list[Any]", job(crossed, count, kind, lines).answers()):
        assert worst < 1e-5
        assert re.search(f"PeerError: {ORDERS[kind]}", told), told


def crossed_parts(rank: int, lines: str) -> object:
    """Two calls in another order on rank 1, all of whose inputs are split: how far results are off, and what this rank is
    told. Before, calls of which a rank does not know of what its inputs are parts."""
    import tilewright
    import tilewright.runtime.team as team

    if lines == "apart":
        team.shared = lambda _: (_ for _ in ()).throw(OSError("there is none"))  # type: ignore[assignment]
    x, w = input_("x", F32, (4, 16)), input_("w", F32, (16, 8))
    y = gemm(placed(x, "", "tp"), placed(w, "tp", ""))
    program: Any = tilewright.compile(on("tp=2", y), mesh="tp=2", budget_s=0)
    both = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    weight, worst, told = program.part("w", torch.eye(16)[:, :8]), 0.0, ""
    program(x=both[rank][:, :8].contiguous(), w=weight)
    program(x=program.part("x", both[0]) if rank else both[0][:, :8].contiguous(), w=weight)
    try:
        for turn in range(6):
            for i in (1, 0) if turn == 5 and rank == 1 else (0, 1):
                found = program(x=program.part("x", both[i]), w=weight)
                worst = max(worst, float((found - both[i][:, :8]).abs().max()))
    except TilewrightError as error:
        told = f"{type(error).__name__}: {error}"
    return [worst, told]


@pytest.mark.parametrize("lines", ["shared", pytest.param("apart", marks=pytest.mark.conformance)])
def test_calls_with_parts_of_other_tensors_give_no_numbers(lines):
    for worst, told in cast("list[Any]", job(crossed_parts, 2, lines).answers()):
        assert worst < 1e-5
        assert re.search(r"PeerError: ranks 0 and 1 call program 1 \(\w+\) with parts of other tensors", told), told


def seeing(rank: int) -> object:
    """The error of a rank whose call is another one's, as it looks before a kernel sends values, or waits behind that."""
    from tilewright.runtime.team import team_of

    team, over = team_of("tp=2", None), ("tp",)
    team.programs += ["prefill", "decode"]
    team.barrier()
    with pytest.raises(TilewrightError) as told, team.working():
        team.begin(0, {over: 7})
        team.see([over])
        team.barrier()
        team.begin(rank, {over: 0})
        team.see([over])
        team.barrier()
    return str(told.value)


def test_kernels_that_send_by_themselves_look_before():
    for said in job(seeing, 2).answers():
        assert "rank 0 calls program 1 (prefill) while rank 1 calls program 2 (decode)" in str(said)


def seeded(rank: int) -> object:
    """The error of a module over whole tensors whose weights differ by rank."""
    import tilewright

    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)).eval()
    options: dict[str, Any] = {"example_inputs": (torch.ones(4, 16),), "plan": {"0": "colwise", "1": "rowwise"}}
    try:
        tilewright.compile(module, mesh="tp=2", budget_s=0, **options)
    except TilewrightError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("error", "gone", "told"),
    [
        (RuntimeError("[pair.cc] gloo/transport/tcp: Connection closed by peer"), "rank 1 is gone", "rank 1 is gone"),
        (RuntimeError("Application timeout caused pair closure"), "", "the connection to another rank broke: Application"),
        (dist.DistBackendError("NCCL error: remote process exited"), "rank 1 is gone", "rank 1 is gone"),
        (RuntimeError("some words of another version"), "rank 1 is gone", "rank 1 is gone"),
        (RuntimeError("Invalid scalar type"), "", None),
        (torch.OutOfMemoryError("CUDA out of memory"), "rank 1 is gone", None),
    ],
)
def test_an_error_that_is_of_no_connection_is_not_taken_for_one(error, gone, told):
    """It is raised as it is: no other rank is blamed for what this one cannot do."""
    team: Any = object.__new__(ProcessTeam)
    team.peers, team._error = SimpleNamespace(after_break=lambda: gone), None
    with pytest.raises(PeerError if told else type(error)) as found, team._ending():
        raise error
    assert (str(found.value).startswith(told) and team._error is found.value) if told else found.value is error


@pytest.mark.parametrize("error", [dist.DistStoreError("wait timeout after 30000ms"), RuntimeError("Connection refused")])
def test_ranks_that_do_not_make_the_same_group_are_named(error, monkeypatch):
    """One compiles for another mesh, say; torch's own words name keys of its store."""

    def new_group(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(PeerError, match=r"ranks 1, 3 did not meet in 30 s: (wait|Connection)[\s\S]*for the same meshes"):
        _made((3, 1), "gloo", timedelta(seconds=30))


def test_an_error_of_this_rank_alone_makes_no_group_and_is_as_it_was(monkeypatch):
    def new_group(*_: object, **__: object) -> object:
        raise RuntimeError("Invalid backend")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="Invalid backend"):
        _made((3, 1), "gloo", timedelta(seconds=30))


def test_weights_that_differ_by_rank_are_refused_where_they_are_whole():
    for said in job(seeded, 2).answers():
        assert re.search(r"ranks differ in the weights: \w{16} on rank 0, \w{16} on rank 1", str(said)), said


def test_a_program_for_ranks_alone_is_refused():
    import tilewright
    from tilewright.errors import InputError, UnsupportedError

    local = case("megatron", Mesh.parse("tp=2")).local
    with pytest.raises(InputError, match="a mesh needs a process for each rank, and there is one alone"):
        tilewright.compile(local, mesh="tp=2", budget_s=0)
    with pytest.raises(InputError, match=r"a mesh of type int \(mesh\)\s+try: a torch DeviceMesh"):
        tilewright.compile(local, mesh=2, budget_s=0)
    with pytest.raises(UnsupportedError, match="background= on a mesh"):
        tilewright.compile(local, mesh="tp=2", background=True)


def test_names_of_groups_are_this_threads_alone():
    """Two threads make groups at once, and one of them leaves first: torch names all others as ever."""
    torchs = cast("Any", dist.distributed_c10d)
    if not hasattr(torchs, "_hash_ranks_to_str"):
        pytest.skip("this torch names groups otherwise")
    its_own = torchs._hash_ranks_to_str([0, 1])
    inside, leave, found = threading.Event(), threading.Event(), dict[str, str]()

    def other() -> None:
        with _named("other"):
            inside.set()
            assert leave.wait(20)
            found["other"] = torchs._hash_ranks_to_str([0, 1])

    thread = threading.Thread(target=other)
    with _named("first"):
        thread.start()
        assert inside.wait(20)
        found["first"] = torchs._hash_ranks_to_str([0, 1])
    found["between"] = torchs._hash_ranks_to_str([0, 1])
    leave.set()
    thread.join(20)
    assert found == {"first": "first", "other": "other", "between": its_own}
    assert torchs._hash_ranks_to_str([0, 1]) == its_own
