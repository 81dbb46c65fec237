"""The form of a program of one rank: sums whole on every rank, or rows shared out between products, as links make it faster."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from meshes import collectives, on, placed, run
from ranks import job

from tilewright.compiler import optimise
from tilewright.dtype import F32
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.link import Link
from tilewright.hardware.links import Links, links_for
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.ops import LayerNorm, gemm
from tilewright.rules.shard import localise
from tilewright.runtime import forms
from tilewright.runtime.forms import SHARED, faster_form, program_us

H200 = Target("NVIDIA H200", CHIP, "cuda", 132)


def layers(rows: int, width: int = 32, count: int = 2, ranks: int = 4) -> Graph:
    """Row-parallel products with a norm and a residual between them, over whole tensors."""
    x = input_("x", F32, (rows, width))
    for i in range(count):
        n = map_("tanh", Node(LayerNorm(1, 1e-5, center=False), x))
        up, down = input_(f"up{i}", F32, (width, 2 * width)), input_(f"down{i}", F32, (2 * width, width))
        x = map_("add", gemm(gemm(n, placed(up, "", "tp")), placed(down, "tp", "")), x)
    return on(f"tp={ranks}", convert(x, F32))


def links(latency_us: float, gbps: float) -> Links:
    return Links("cuda", (), latency_us, gbps)


@pytest.mark.parametrize(
    ("found", "shared"),
    [
        (links(0.0, 1e9), True),  # nothing but work counts, of which there is less
        (links(1e6, 1e9), False),  # twice as many operations
        (links_for(H200, [Link("all_reduce", "tp", 4, 5.0, 1e3), Link("all_gather", "tp", 4, 5.0, 1e3)]), False),
    ],
    ids=["free", "late", "measured"],
)
def test_rows_are_shared_out_where_that_is_expected_to_be_faster(found, shared):
    graph = layers(16)
    local = localise(graph)
    made = faster_form(local, optimise, H200, found)
    names = {"reduce_scatter", "all_gather"} if shared else {"all_reduce"}
    assert {*collectives(made)} == names and any(SHARED in n for n in made.notes) == shared
    assert (program_us(optimise(made), H200, found) < program_us(optimise(local), H200, found)) == shared
    generator = torch.Generator().manual_seed(0)
    feeds = {label_of(n): torch.randn(n.shape, generator=generator) / 8 for n in graph.inputs}
    torch.testing.assert_close(run(optimise(made), feeds)[0], evaluate(graph, feeds)[0], rtol=1e-5, atol=1e-5)


def test_rows_of_few_tokens_stay_whole_and_of_many_are_shared_out():
    """H200s by NVLink, as the chip's file has it: 16 rows of a wide layer wait for twice as many operations."""
    found = links_for(H200)
    few, many = (faster_form(localise(layers(rows, 8192, 1)), optimise, H200, found) for rows in (16, 8192))
    assert {*collectives(few)} == {"all_reduce"} and {*collectives(many)} == {"reduce_scatter", "all_gather"}


def test_rows_that_ranks_do_not_divide_stay_as_they_are():
    local = localise(layers(6))
    assert faster_form(local, optimise, H200, links(0.0, 1e9)) is local


def as_measured(rank: int, sums_us: float, parts_us: float) -> object:
    """Compile where such links are kept: what travels, how far off the result is, the kernels, and the program's notes."""
    import tilewright
    from tilewright.hardware.detect import detect
    from tilewright.hardware.links import keep_links, key_of
    from tilewright.runtime.team import team_of

    team, target = team_of("tp=2", "cpu"), detect("cpu")
    if rank == 1:  # another machine, which would choose the other form
        forms.program_us = lambda *args: -program_us(*args)
    if rank == 0:
        took_us = {"all_reduce": sums_us, "all_gather": parts_us, "reduce_scatter": parts_us}
        found = [Link(operation, "tp", 2, us, None) for operation, us in took_us.items()]
        keep_links(key_of(target, str(team.mesh), team.links), "cpu", found)
    graph = layers(16, ranks=2)
    program = cast("Any", tilewright.compile(graph, mesh="tp=2", budget_s=0))
    generator = torch.Generator().manual_seed(0)
    feeds = {label_of(n): torch.randn(n.shape, generator=generator) / 8 for n in graph.inputs}
    result = program(**{name: program.part(name, t) for name, t in feeds.items()})
    error = float((result - evaluate(graph, feeds, float64=True)[0]).abs().max())
    chosen = [(s.decision.kernel.candidate, str(s.decision.kernel.schedule)) for s in program.steps if s.decision is not None]
    return [sorted({*collectives(program.source)}), error, chosen, list(program.source.notes)]


def test_ranks_take_one_form_by_the_links_that_the_first_has_kept():
    slow, fast = (job(as_measured, 2, *us) for us in ((1e5, 0.0), (0.0, 1e5)))
    (shared, other), (whole, same) = cast("Any", slow.answers()), cast("Any", fast.answers())
    assert shared == other and shared[0] == ["all_gather", "reduce_scatter"] and shared[1] < 1e-4
    assert shared[3][0].startswith("rows are shared out between products, in place of 2 all_reduces: ")
    assert whole == same and whole[0] == ["all_reduce"] and whole[1] < 1e-4 and not whole[3]
