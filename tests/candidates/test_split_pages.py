"""Attention over a paged cache of codes: one step, whose blocks a CPU copies first, as the codes that they are."""

import pytest
import torch
from ptx import H200
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tilewright.candidates import split
from tilewright.compiler import optimise
from tilewright.dtype import F32
from tilewright.frontends import load
from tilewright.hardware.detect import detect
from tilewright.ir.build import input_
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Attention
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

BATCH, HEADS, FEW, BLOCKS, EACH, PICKED, DEPTH = 2, 4, 2, 12, 8, 5, 16


class Paged(torch.nn.Module):
    """One query over blocks of codes, each token of a head with a scale."""

    def operand(self, cache: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        wide = cache[table].float() * scale[table][..., None]
        return wide.reshape(BATCH, PICKED * EACH, FEW, DEPTH).transpose(1, 2).to(torch.bfloat16)

    def forward(self, q, k, v, ks, vs, table):
        return scaled_dot_product_attention(q, self.operand(k, ks, table), self.operand(v, vs, table), enable_gqa=True)


def given():
    torch.manual_seed(0)
    caches = [torch.randint(-127, 128, (BLOCKS, EACH, FEW, DEPTH), dtype=torch.int8) for _ in "kv"]
    scales = [torch.rand(BLOCKS, EACH, FEW) / 40 for _ in "kv"]
    table = torch.randint(-BLOCKS, BLOCKS, (BATCH, PICKED))
    return torch.randn(BATCH, HEADS, 1, DEPTH).bfloat16(), *caches, *scales, table


@pytest.fixture(scope="module")
def problem():
    graph = optimise(load(torch.export.export(Paged().eval(), given())))
    (node,) = (n for n in toposort(graph.outputs) if n.src)
    assert isinstance(node.op, Attention)  # nothing is left before it
    return problem_of(node)


def test_blocks_are_copied_as_codes_where_no_kernel_reads_by_a_table(problem):
    cpu = detect("cpu")
    plan = plan_for(split.CANDIDATE, problem, cpu)
    *copies, rest = split.pieces_of(problem, plan.schedules()[0])
    assert sorted(str(p.problem.outputs[0].dtype) for p in copies) == ["f32", "f32", "s8", "s8"]
    assert rest.problem.kind == "attention" and not split.picked(rest.problem)
    chosen = search(problem, cpu, budget_s=0).kernel
    assert chosen.candidate == "split"
    assert chosen.parts == (*[("fusion", "llvm_norm")] * 4, ("attention", "llvm_attention"))
    sources = random_sources(problem)
    assert check(problem, expect(problem, sources), chosen.prepare({})(sources)) is None


def test_a_gpu_reads_them_where_they_lie(problem):
    assert plan_for(split.CANDIDATE, problem, H200).leading() is None


def test_keys_that_lie_as_they_are_read_are_not_split():
    plain = problem_of(Node(Attention(0.25), *(input_(n, F32, (1, 2, 4, 16)) for n in "qkv")))
    assert refusal(split.CANDIDATE, plain, detect("cpu")) == "keys and values are in no blocks that a table picks"


def test_a_program_over_blocks_is_right_and_is_saved(tmp_path):
    program = tilewright.compile(Paged().eval(), example_inputs=given(), budget_s=0)
    (step,) = (s for s in program.steps if s.decision is not None)
    assert step.decision.kernel.candidate == "split" and "llvm_attention" in str(program.explain())
    torch.testing.assert_close(program(*given()), Paged()(*given()), rtol=1e-2, atol=1e-2)
    program.save(tmp_path / "p.twp")
    assert torch.equal(tilewright.load_program(tmp_path / "p.twp")(*given()), program(*given()))
