"""Programs on ranks of their own, over gloo: the same results as the unsharded program, the same kernels everywhere, and faults
that are planted in collective operations."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from local_programs import PROGRAMS, case
from paths import EXAMPLES
from ranks import job

from tilewright.errors import InputError, PeerError, UnsupportedError
from tilewright.ir.evaluate import evaluate
from tilewright.ir.mesh import Mesh, Placement, split_feeds

EXAMPLE = EXAMPLES / "tensor_parallel.tw"
MESHES = {2: "tp=2", 4: "dp=2,tp=2"}


def compiled(name: str, mesh: str, **options: Any) -> tuple[Any, Any]:
    """A program of `PROGRAMS` on this process's ranks, and its case."""
    import tilewright

    found = case(name, Mesh.parse(mesh))
    return tilewright.compile(found.local, mesh=mesh, **{"budget_s": 0, **options}), found


def off(program: Any, found: Any, rank: int) -> float:
    """The largest distance of a rank's results from its part of the unsharded ones, on two sets of data."""
    worst = 0.0
    for seed in (1, 2):
        feeds = found.feeds(seed)
        wanted = evaluate(found.whole, feeds, float64=True)
        results = program(**split_feeds(feeds, found.placements, found.mesh)[rank])
        results = results if isinstance(results, tuple) else (results,)
        for name, got, w in zip(found.whole.output_names, results, wanted, strict=True):
            placement = found.placements.get(name, Placement.whole(w.dim()))
            part = placement.split(w, found.mesh)[rank]
            assert got.shape == part.shape and got.dtype == part.dtype
            worst = max(worst, float((got.double() - part.double()).abs().max()) if part.numel() else 0.0)
    return worst


def chosen(program: Any) -> list[object]:
    return [(s.decision.kernel.candidate, str(s.decision.kernel.schedule)) for s in program.steps if s.decision is not None]


def all_programs(rank: int, mesh: str) -> object:
    said = {}
    for name in PROGRAMS:
        program, found = compiled(name, mesh)
        said[name] = [off(program, found, rank), chosen(program), [s.part.kind for s in program.steps]]
    return said


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.conformance)])
def test_ranks_together_compute_what_one_program_does(count):
    first, *others = cast("list[dict[str, Any]]", job(all_programs, count, MESHES[count]).answers())
    for name in PROGRAMS:
        error, kernels, kinds = first[name]
        assert error <= case(name, Mesh.parse(MESHES[count])).within, name
        assert all(o[name][0] <= case(name, Mesh.parse(MESHES[count])).within for o in others), name
        assert all(o[name][1:] == [kernels, kinds] for o in others), name
        assert any(kernel == "sequential" for kernel, _ in kernels), name


def searched(rank: int) -> object:
    """A search with a budget: dealt out, agreed, kept by rank 0, read back by a second compile."""
    from tilewright import on_mesh
    from tilewright.hardware.ceilings import cache_folder
    from tilewright.schedule.cache import Cache
    from tilewright.schedule.tuning_database import TuningDatabase

    os.environ["TILEWRIGHT_WORKER"] = "0"
    on_mesh.faster_form = lambda local, *_: local  # whatever this machine's links are worth now
    TuningDatabase._quiet = lambda self: False  # type: ignore[method-assign]  # what was chosen in noise is kept
    first, found = compiled("megatron", "tp=2", budget_s=3)
    again, _ = compiled("megatron", "tp=2", budget_s=3)
    how = [[(s.decision.measured, s.decision.recalled) for s in p.steps] for p in (first, again)]
    perf = first.perf(iterations=4).facts
    sent = [(s.kind, s.sent_bytes, s.between_us is not None and 0 < s.between_us <= s.time_us) for s in perf.steps]
    explained = first.explain().facts
    words = str(first.perf(iterations=3)), str(first.explain())
    told = [(t.operation, t.sent_bytes, t.why) for t in explained.traffic]
    records = len(list(Cache(cache_folder()).records()))
    outside, _ = compiled("integers", "tp=2")
    apart = [(t.operation, t.sent_bytes, t.why) for t in outside.explain().facts.traffic]
    return [off(first, found, rank), chosen(first), chosen(again), how, sent, told, words, records, apart]


def test_kernels_are_searched_by_all_and_kept_by_the_first():
    first, second = cast("list[Any]", job(searched, 2).answers())
    assert first[1] == second[1] and first[2] == second[2]
    recalled = [was for _, was in first[3][1]]  # not where the first search was cut short on a busy machine: it goes on
    assert any(recalled) and all(a == b for a, b, was in zip(first[1], first[2], recalled, strict=True) if was)
    assert all(measured for measured, _ in first[3][0])
    error, sent, told, (perf, explain) = first[0], first[4], first[5], first[6]
    assert error < 1e-4
    assert sent == [["gemm", 0, False], ["gemm", 64 * 96 * 4, True]]
    assert told == [["all_reduce of f32[64,96] over tp=2", 24576, ""]]
    assert "Between ranks: 1 step, in which a rank sends 24.0 KiB" in perf
    words = r"all_reduce of f32\[64,96\] over tp=2: a rank sends 24.0 KiB, [\d.,]+ µs by the links; part of gemm"
    assert re.search(words, " ".join(explain.split()))
    turned = next(t for t in first[8] if t[0].startswith("all_to_all"))
    assert turned == ["all_to_all of s32[8,24] over tp=2", 384, "no operand or store is read through an exchange of parts"]
    assert first[7] >= 2 and second[7] == first[7]  # they share a folder


def narrowed(rank: int) -> object:
    """A module quantised and in 16 bits on the way, on ranks and on one device: how far both are from the module, and from each
    other, what is multiplied, and what travels; and what is said of a program of one rank."""
    import tilewright

    torch.manual_seed(0)
    layers = torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128), torch.nn.LayerNorm(128)
    module, x, said = torch.nn.Sequential(*layers).eval().requires_grad_(False), torch.randn(16, 128), []
    for scheme, half in (("int8", None), ("w4", "f16"), ("fp8", "bf16"), (None, "bf16")):
        how: dict[str, Any] = {"example_inputs": (x,), "budget_s": 0, "half": half}
        if scheme is not None:
            how["quantize"] = tilewright.Quantization(tilewright.scheme(scheme), [{"input": x}])
        alone: Any = tilewright.compile(module, **how)
        program: Any = tilewright.compile(module, mesh="tp=2", plan={"0": "colwise", "2": "rowwise"}, **how)
        y, one, wanted = program(x), alone(x), module(x)
        products = [str(s.decision.problem) for s in program.steps if s.part.kind == "gemm"]
        travels = [t.operation for t in program.explain().facts.traffic]
        off = [float((a - b).norm() / wanted.norm()) for a, b in ((y, wanted), (one, wanted), (y, one))]
        said.append([scheme, half, off, products, travels, len(program.layers)])
    batches = [found.feeds(1)] if (found := case("megatron", Mesh.parse("tp=2"))) else []
    for options in ({"half": "bf16"}, {"quantize": tilewright.Quantization(tilewright.scheme("int8"), batches)}):
        with pytest.raises((UnsupportedError, PeerError)) as told:
            tilewright.compile(found.local, mesh="tp=2", budget_s=0, **cast("Any", options))
        said.append(str(told.value))
    return said


def test_programs_are_quantised_and_narrowed_before_they_are_placed():
    for said in cast("list[Any]", job(narrowed, 2).answers()):
        *made, half, quantised = said
        for scheme, narrow, (ours, alone, both), products, travels, layers in made:
            assert 0 < ours < 1.01 * alone < 0.11, (scheme, narrow)
            assert both < 1e-4 + 1e-3 * alone, (scheme, narrow)
            assert travels == ["all_reduce of f32[16,128] over tp=2"]
            assert layers == (0 if scheme is None else 2)
            codes = {
                "int8": "s8[16,128] @ s8[128,128]",
                "w4": "f16[16,128] @ s4[128,128] group=64",
                None: "bf16[16,128] @ bf16",
            }
            assert len(products) == 2 and (scheme == "fp8" or codes[scheme] in products[1]), products
        assert "half= of a program of one rank" in half and "a program over whole tensors with places, or a plan" in half
        assert "quantize= of a program of one rank" in quantised


FAULTS = {
    "no reduction": "elements differ, first at",
    "avg for sum": "elements differ, first at",
    "a stale buffer": "elements differ, first at",
    "a buffer used again": "it writes to a result of an earlier call",
}


def placement_from(placements: Sequence[object], mesh: Mesh, rank: int) -> Placement:
    """The placement of a tensor of so many axes, given DTensor's."""
    from torch.distributed.tensor import Partial, Shard

    splits: list[list[str]] = [[] for _ in range(rank)]
    for (name, _), how in zip(mesh.axes, placements, strict=True):
        if isinstance(how, Shard):
            splits[how.dim].append(name)
    partial = [name for (name, _), how in zip(mesh.axes, placements, strict=True) if isinstance(how, Partial)]
    return Placement(tuple(map(tuple, splits)), tuple(partial))


def dtensors(rank: int) -> object:
    """DTensors in, DTensors out, on a DeviceMesh; what lies otherwise than the program wants is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    import tilewright
    from tilewright.on_mesh import placements_of

    found = case("sequence parallel", Mesh.parse("dp=2,tp=2"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = cast("Any", tilewright.compile(found.local, mesh=mesh, budget_s=0))
    feeds = found.feeds(3)
    lies = {n: placements_of(program.placements[n], found.mesh) for n in feeds}
    assert lies["x"] == (Replicate(), Shard(0))
    assert all(placement_from(lies[n], found.mesh, t.dim()) == program.placements[n] for n, t in feeds.items())
    given = {n: distribute_tensor(t, mesh, lies[n]) for n, t in feeds.items()}
    y = program(**given)
    (wanted,) = evaluate(found.whole, feeds, float64=True)
    assert isinstance(y, DTensor) and y.placements == (Replicate(), Shard(0))
    with pytest.raises(UnsupportedError, match="a program on a mesh is not pickled"):
        pickle.dumps(program)
    said = repr(program)
    with pytest.raises(InputError, match=r"input 'x' is placed as .*Replicate.*the program wants"):
        program(**{**given, "x": distribute_tensor(feeds["x"], mesh, (Replicate(), Replicate()))})
    return [float((y.full_tensor() - wanted).abs().max()), said]


def test_dtensors_come_and_go():
    for rank, (error, said) in enumerate(cast("list[Any]", job(dtensors, 4).answers())):
        assert error < 1e-4
        assert said.endswith(f"as rank {rank} of dp=2,tp=2>")


def saved(rank: int, folder: str) -> object:
    """Say whether programs that were saved and loaded give the same bits, and what is said of wrong files."""
    import tilewright

    mesh, said = f"tp={os.environ['WORLD_SIZE']}", {}
    for name in ("megatron", "sequence parallel", "integers"):
        program, found = compiled(name, mesh)
        program.save(f"{folder}/{name}.twp")
        again = cast("Any", tilewright.load_on_mesh(f"{folder}/{name}.twp", mesh))
        feeds = split_feeds(found.feeds(1), found.placements, found.mesh)[rank]
        results = [r if isinstance(r, tuple) else (r,) for r in (program(**feeds), again(**feeds))]
        alike = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        said[name] = [alike, off(again, found, rank), chosen(again) == chosen(program), again.placements == program.placements]
    own = Path(f"{folder}/megatron.{rank}-of-{os.environ['WORLD_SIZE']}.twp")
    wrong = {"alone": lambda: tilewright.load_program(own), "none": lambda: tilewright.load_on_mesh(f"{folder}/no.twp", mesh)}
    program.save(f"{folder}/other.twp")
    team = program.team
    team.barrier()
    if rank == 0:
        Path(f"{folder}/swapped.0-of-2.twp").write_bytes(Path(f"{folder}/megatron.1-of-2.twp").read_bytes())
        Path(f"{folder}/mixed.0-of-2.twp").write_bytes(Path(f"{folder}/other.0-of-2.twp").read_bytes())
    else:
        Path(f"{folder}/swapped.1-of-2.twp").write_bytes(Path(f"{folder}/megatron.0-of-2.twp").read_bytes())
        Path(f"{folder}/mixed.1-of-2.twp").write_bytes(own.read_bytes())
    for kind in ("swapped", "mixed"):
        wrong[kind] = lambda kind=kind: tilewright.load_on_mesh(f"{folder}/{kind}.twp", mesh)
    for kind, load in wrong.items():
        with pytest.raises((InputError, PeerError)) as told:
            load()
        said[kind] = str(told.value)
    return said


def test_programs_are_saved_by_rank_and_loaded_together(tmp_path):
    for rank, said in enumerate(cast("list[dict[str, Any]]", job(saved, 2, str(tmp_path)).answers())):
        for name in ("megatron", "sequence parallel", "integers"):
            alike, error, kernels, placements = said[name]
            assert alike and kernels and placements and error <= case(name, Mesh.parse("tp=2")).within, name
        assert f"it is the program of rank {rank} of the mesh tp=2" in said["alone"]
        assert 'load_on_mesh("model.twp", "tp=2")' in said["alone"]
        assert "no such file" in said["none"] or "No such file" in said["none"]
        assert re.search(r"it is the program of rank \d of tp=2, and this is rank \d of tp=2", said["swapped"])
        assert "ranks differ in the program's files" in said["mixed"]


def whole(rank: int) -> object:
    """A program over whole tensors, given with places, is made one rank's; a rank of it is in more groups than the other."""
    import torch.distributed as dist

    import tilewright
    from tilewright.frontends import load

    if rank:
        dist.new_group([rank], use_local_synchronization=True)
    graph = load(EXAMPLE)
    program = cast("Any", tilewright.compile(EXAMPLE, mesh="tp=2", budget_s=0))
    feeds = {n.op.label: torch.randn(n.shape, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(graph.inputs)}
    (wanted,) = evaluate(graph, feeds, float64=True)
    got = program(**{n: program.part(n, t) for n, t in feeds.items()})
    with pytest.raises(InputError, match=r"no input 'w'[\s\S]*the inputs are x, w_gate, w_up, w_down"):
        program.part("w", feeds["x"])
    with pytest.raises(InputError, match=r"shape \[768, 128\] given, \[768, 256\] or a part of \[384, 256\] wanted"):
        program.part("w_down", feeds["w_down"][:, :128])
    return [float((got - wanted).abs().max() / wanted.abs().max()), [s.part.kind for s in program.steps]]


def test_a_program_over_whole_tensors_is_placed():
    for error, kinds in cast("list[Any]", job(whole, 2).answers()):
        assert error < 1e-4
        assert kinds == ["gemm"] * 3


def planted(rank: int) -> object:
    """Plant each fault of a library's collective operations; say what was refused, what was chosen, and what comes out."""
    from tilewright.ir.ops import AllReduce, ReduceScatter
    from tilewright.runtime.team import ProcessTeam

    right, said = ProcessTeam.run, {}
    for fault in FAULTS:
        held: dict[Any, torch.Tensor] = {}

        def wrong(team: Any, node: Any, value: torch.Tensor, fault: str = fault, held: Any = held, **how: bool) -> torch.Tensor:
            own, found = value.clone(), right(team, node, value, **how)
            reduces = isinstance(node.op, (AllReduce, ReduceScatter))
            if fault == "no reduction" and reduces:
                axis = getattr(node.op, "axis", 0)
                return own.narrow(axis, rank * node.shape[axis] % own.shape[axis], node.shape[axis])
            if fault == "avg for sum" and reduces:
                return found / node.op.ranks
            if fault == "a stale buffer":
                return held.setdefault(node, found)
            if fault == "a buffer used again":
                return held.setdefault(node, found).copy_(found)
            return found

        ProcessTeam.run = wrong  # type: ignore[method-assign]
        for name in ("row parallel", "sequence parallel"):
            program, found = compiled(name, "tp=2", budget_s=0.5, cache=False)
            between = [s.decision for s in program.steps if s.decision.kernel.candidate in ("sequential", "reference")]
            refused = [[r.kind, r.why] for d in between for r in d.rejected if str(r.schedule).startswith("reduce=library")]
            kernels = [str(d.kernel.schedule) for d in between]
            said[f"{fault}, {name}"] = [off(program, found, rank), refused, kernels]
    ProcessTeam.run = right  # type: ignore[method-assign]
    return said, [short_sums(), short_sums(2.0**-13)]


def short_sums(roundoff: float = 0.0) -> list[list[str]]:
    """Compile a product whose sums are off as those of 13 bits are, by kernels of this roundoff; say what was refused."""
    from tilewright.candidates import sequential
    from tilewright.lowering import pieces
    from tilewright.runtime.team import ProcessTeam

    run, whole = ProcessTeam.run, pieces.whole_of
    ProcessTeam.run = lambda *given, **how: run(*given, **how) * (1 + 2.0**-13)  # type: ignore[method-assign]
    sequential.whole_of = lambda *given: replace(whole(*given), roundoff=roundoff)  # pyright: ignore
    try:
        program, _ = compiled("row parallel", "tp=2", budget_s=0.5, cache=False)
    finally:
        ProcessTeam.run, sequential.whole_of = run, whole  # type: ignore[method-assign]
    rejected = [r for s in program.steps for r in s.decision.rejected]
    return [[r.kind, r.why] for r in rejected if r.candidate == "sequential" and str(r.schedule).startswith("reduce=library")]


def test_faults_planted_in_the_library_are_caught():
    for said, (refused, taken) in cast("list[Any]", job(planted, 2).answers()):
        assert [kind for kind, _ in refused] == ["wrong"] and "elements differ" in refused[0][1]
        assert all(kind != "wrong" for kind, _ in taken), "sums of a kernel that says how few bits they have"
        for case_, (error, refused, kernels) in said.items():
            sentence = FAULTS[case_.partition(",")[0]]
            assert error < 1e-4, case_
            if case_ == "a buffer used again, sequence parallel":  # what the store adds to it is memory of its own
                continue
            assert refused and all(kind == "wrong" and sentence in why for kind, why in refused), (case_, refused)
            assert sum(k.startswith("reduce=library") for k in kernels) == len(kernels) - len(refused), case_


def recalled_on_one(rank: int) -> object:
    """Compile what rank 0 knows, while the other rank has no memory to check it."""
    from tilewright import on_mesh
    from tilewright.runtime.agreement import Agreed

    os.environ["TILEWRIGHT_WORKER"] = "0"
    on_mesh.faster_form = lambda local, *_: local
    first, _ = compiled("megatron", "tp=2", budget_s=2)
    drawn = Agreed._drawn  # pyright: ignore[reportPrivateUsage]
    Agreed._drawn = lambda self, problem: None if rank == 1 else drawn(self, problem)  # type: ignore[method-assign]
    again, found = compiled("megatron", "tp=2", budget_s=2)
    why = [r.why for s in again.steps if s.decision is not None for r in s.decision.rejected]
    return [
        chosen(first),
        chosen(again),
        off(again, found, rank),
        any("rank 1: its results cannot be checked" in w for w in why),
    ]


def test_what_one_rank_cannot_check_is_taken_by_none():
    first, second = cast("list[Any]", job(recalled_on_one, 2).answers())
    assert first[1] == second[1] and first[1] != first[0] == second[0]
    assert first[2] < 1e-4 and first[3] and second[3]


def counted(rank: int) -> object:
    """Call numbers of memory that ranks share, which one rank did not come to as often."""
    from tilewright.ir.mesh import Symmetric
    from tilewright.runtime.team import team_of

    team = team_of("tp=2", "cpu")
    memories = [Symmetric((), rank, torch.zeros(1)) for _ in range(2)]
    known = cast("Any", team)._symmetric
    known.update({(("tp",), size): memory for size, memory in enumerate(memories)})
    for _ in range(3 + 4 * rank):
        next(memories[0].turns)
    with team.working():
        team.count_alike()
    return [next(m.turns) for m in memories]


def test_ranks_count_calls_from_one_number_on_after_one_of_them_failed():
    first, second = cast("list[Any]", job(counted, 2).answers())
    assert first == second and first[0] > 6
