"""Memory that ranks reach of each other: who has none says so everywhere, multicast is never used, a late rank is named."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import job

from tilewright.candidates import sequential
from tilewright.candidates.library import fused_between
from tilewright.dtype import BF16, F32
from tilewright.errors import PeerError, TilewrightError
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, AllGather, AllReduce, Gemm, Param, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Schedule, concerns, refusal
from tilewright.schedule.problem import Problem


def said(run: Any) -> str:
    try:
        run()
    except TilewrightError as error:
        return str(error)
    return ""


def refusals(rank: int) -> object:
    """Collect what this rank is told, on a CPU and with a torch whose symmetric memory is another."""
    from torch.distributed import _symmetric_memory as symmetric

    from tilewright.ir.mesh import Symmetric
    from tilewright.runtime.symmetric import WITHOUT_MULTICAST, reached
    from tilewright.runtime.team import team_of

    team = team_of("tp=2", "cpu")
    found = [said(lambda: team.symmetric(("tp",), 4096))]
    links, team.links = team.links, "nccl, 2 hosts"
    found.append(said(lambda: team.symmetric(("tp",), 4096)))
    team.links = links
    team.prepare([("tp",)])
    group = cast("Any", team)._group(("tp",))

    def fake(multicast: int) -> str:
        buffers = [torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)]
        handle = SimpleNamespace(rank=rank, multicast_ptr=multicast, get_buffer=lambda i, size, dtype: buffers[i])
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        symmetric.empty = lambda size, dtype, device: torch.ones(size, dtype=dtype)  # type: ignore[assignment]
        symmetric.rendezvous = lambda t, name: handle  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            got = reached(group.made, group.order, 64, "cuda:0", team.peers)
        assert not warned
        return f"{[len(t) for t in got]} {int(got[rank].sum())} {int(got[1 - rank][0]) == 1 - rank}"

    found.append(fake(0))
    found.append(str([os.environ[name] for name in WITHOUT_MULTICAST]))
    found.append(said(lambda: fake(1 << 20)))
    late = torch.zeros(1, dtype=torch.int32)
    cast("Any", team)._symmetric[("tp",), 64] = Symmetric((), rank, late)
    with team.working():
        late.fill_(2)
    try:
        with team.working():
            pass
    except PeerError as error:
        found.append(str(error))
    again = team_of("tp=2", "cpu")
    again.barrier()
    found.append(f"another team: {again is not team}")
    return found


def test_who_shares_no_memory_says_so_on_every_rank():
    first, second = cast("list[list[str]]", job(refusals, 2).answers())
    assert first == second
    alone, hosts, reached, environment, multicast, late, again = first
    assert "rank 0 shares no memory with others: memory is shared between GPUs alone" in alone
    assert "GPUs share memory within a host, the mesh is on 2 hosts" in hosts
    assert reached == "[64, 64] 0 True"  # this rank's own, zeros, and the other one's
    assert environment == "['1', '0', '1']"
    assert "multicast on, though its environment forbids it" in multicast
    assert "rank 1 did not send its values in time" in late
    assert again == "another team: True"


def one_alone(rank: int) -> object:
    from tilewright.runtime.team import team_of

    return said(lambda: team_of("dp=1,tp=2", "cpu").symmetric(("dp",), 4096))


@pytest.mark.conformance
def test_a_group_of_one_rank_shares_nothing():
    assert all("one rank alone along dp shares no memory" in cast("str", a) for a in job(one_alone, 2).answers())


def problems() -> dict[str, Problem]:
    """A product in bf16 with each operation between two ranks that torch has an own way for."""
    lhs, rhs = TensorType(BF16, (8, 32)), TensorType(BF16, (16, 32))
    a, b = Node(Param(0, lhs)), swap_last(Node(Param(1, rhs)))
    how: Any = {"over": ("tp",), "sizes": (2,)}
    made: dict[str, Problem] = {}
    for name, left, between in (
        ("all_reduce", a, lambda x: Node(AllReduce(**how), x)),
        ("reduce_scatter", a, lambda x: Node(ReduceScatter(**how, axis=0), x)),
        ("all_gather", Node(AllGather(**how, axis=0), a), lambda x: x),
    ):
        acc = Node(Acc(TensorType(F32, (left.shape[0], 16))))
        op = Gemm(F32, left, b, (between(convert(acc, BF16)),))
        made[name] = Problem(op, (lhs, rhs), (False, True))
    return made


def by_torch(rank: int) -> object:
    """The largest distance between torch's own ways, as gloo stands in for them, and the plain one."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    from tilewright.hardware.detect import cpu
    from tilewright.ir.mesh import Symmetric
    from tilewright.runtime.team import team_of

    assert symmetric
    team = team_of("tp=2", "cpu")
    asked: list[int] = []

    def memory(over: Any, size: int) -> Symmetric:
        asked.append(size)
        own = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        return Symmetric(tuple(own), rank, torch.zeros(1, dtype=torch.int32), "a group")

    team.symmetric = memory

    def summed(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        assert (op, group) == ("sum", "a group")
        dist.all_reduce(x)
        return x

    def gathered(a: torch.Tensor, bs: Any, axis: int, group: str, *, return_A: bool = True) -> Any:
        whole = [torch.empty_like(a) for _ in range(2)]
        dist.all_gather(whole, a)
        assert not return_A
        return None, [torch.cat(whole, axis) @ b for b in bs]

    def scattered(a: torch.Tensor, b: torch.Tensor, op: str, axis: int, group: str) -> torch.Tensor:
        return summed(a @ b, op, group).chunk(2, axis)[rank].clone()

    stand_in = torch.library.Library("symm_mem", "IMPL")
    fakes = {
        "one_shot_all_reduce": lambda x, op, group: summed(x.clone(), op, group),
        "two_shot_all_reduce_": summed,
        "fused_all_gather_matmul": gathered,
        "fused_matmul_reduce_scatter": scattered,
    }
    for name, fake in fakes.items():
        stand_in.impl(name, fake, "CPU", allow_override=True)
    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(rank)
    sources = [torch.randn(8, 32, generator=generator).bfloat16(), torch.randn(16, 32, generator=generator).bfloat16()]
    with team.working():
        for name, p in problems().items():
            plain = sequential.plan(p, cpu())
            pieces = [("reference", Schedule()) for _ in plain.pieces()]
            points = [plain.of_pieces(Schedule.of(reduce=how), pieces) for how in ("library", "one_shot", "two_shot")]
            kernels = {str(s["reduce"]): plain.build(s) for s in points}
            if name != "all_reduce":
                kernels["fused"] = fused_between.plan(p, cpu()).build(Schedule())
            for how, kernel in kernels.items():
                run = kernel.prepare({1: sources[1]})
                (first,), (again,) = run(sources), run([-sources[0], sources[1]])
                found[f"{name} {how}"] = float((first + again).float().abs().max())  # two calls, and both results are kept
                kernels[how] = cast("Any", first)
            right = cast("Any", kernels.pop("library"))
            for how, got in kernels.items():
                found[f"{name} {how}"] += float((cast("Any", got) - right).float().abs().max())
    return found, asked


def test_torch_s_own_ways_between_gpus_give_what_the_plain_one_does():
    for found, asked in cast("list[tuple[dict[str, float], list[int]]]", job(by_torch, 2).answers()):
        assert len(found) == 11 and max(found.values()) <= 0.13, found  # sums of bf16 up to 16, rounded in another order
        assert asked == [256, 256, 4096, 4096]


def test_torch_s_own_ways_are_for_gpus():
    gpu, plain = (Target("NVIDIA H200", CHIP, kind, 132, features=frozenset({kind, "sm_90"})) for kind in ("cuda", "cpu"))
    named = problems()["all_reduce"]
    assert [s["reduce"] for s in sequential.plan(named, gpu).schedules()] == ["library", "ranks", "two_shot", "one_shot"]
    assert [s["reduce"] for s in sequential.plan(named, plain).schedules()] == ["library", "ranks"]
    scattered = problems()["reduce_scatter"]
    assert [s["reduce"] for s in sequential.plan(scattered, gpu).schedules()] == ["library", "ranks"]
    assert not concerns(fused_between.CANDIDATE, scattered, plain) and concerns(fused_between.CANDIDATE, scattered, gpu)
    assert refusal(fused_between.CANDIDATE, scattered, gpu) is None
    assert "nothing behind them" in (refusal(fused_between.CANDIDATE, named, gpu) or "")
