"""Generated gemms with several stores and generated attentions on random problems, between guard pages; see `random_anchors`.

Results lie within the reference's bounds and are the same on any number of threads and for sources in other strides. NaN and
infinities in a source are not felt where the reference does not feel them.
"""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import warm
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from paths import SEARCHED
from random_anchors import attentions, gemms

from tests.candidates.llvm.test_random import CPU, KEPT, OLDER, RUNNABLE, fence, guarded
from tilewright.candidates.llvm.attention import candidate as attention
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime.engine import host
from tilewright.hardware.detect import chips
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Item
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

KINDS = {"gemm": (gemms, gemm), "gated": (partial(gemms, paired=True), gemm), "attention": (attentions, attention)}
WILD = (float("nan"), float("inf"), float("-inf"))


def turned(t):
    """The same values, the first axis the one of neighbours."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0)


def bits(t):
    return t.contiguous().view(
        torch.uint8 if t.dtype is torch.bool else {1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]
    )


def reference(node, sources):
    outputs = (node,) if len(node.op.stores) == 1 else tuple(Node(Item(i), node) for i in range(len(node.op.stores)))
    return evaluate_nodes(outputs, dict(zip(node.src, sources, strict=True)))


def one(node, data_seed, constant, at_end, threads, wild, module, target):
    problem = problem_of(node)
    if module is gemm:
        weights = tuple(constant and i == 1 for i in range(len(node.src)))
        problem = Problem(problem.op, problem.types, weights)
    if refusal(module.CANDIDATE, problem, target) is not None:
        return False
    sys.stdout.write(f"{problem} {node.op}\n")
    sys.stdout.flush()
    plain = random_sources(problem, data_seed)
    sources = [guarded(t, at_end) for t in plain]
    schedule = next(iter(plan_for(module.CANDIDATE, problem, target).schedules()))
    held = {i: t for i, t in enumerate(sources) if module is gemm and problem.weights[i]}
    run = plan_for(module.CANDIDATE, problem, target).build(schedule).prepare(held)

    def results(given):
        return [r.clone() for r in run(given)]

    torch.set_num_threads(threads[0])
    first = results(sources)
    why = check(problem, expect(problem, plain), first)
    assert why is None, f"{node.op}: {why}"
    for count in threads[1:]:
        torch.set_num_threads(count)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, results(sources), strict=True)), (
            "threads change results"
        )
    again = results([turned(t) if t.dim() > 1 else t for t in sources])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True)), "strides change results"
    touched = data_seed % len(plain)
    if wild and plain[touched].is_floating_point() and plain[touched].numel() and touched not in held:
        poisoned = [t.clone() for t in plain]
        poisoned[touched].view(-1)[data_seed % plain[touched].numel()] = WILD[data_seed % 3]
        unfelt = [bits(a) == bits(b) for a, b in zip(reference(node, plain), reference(node, poisoned), strict=True)]
        got = results([guarded(t, at_end) for t in poisoned])
        for a, b, same in zip(first, got, unfelt, strict=True):
            assert torch.equal(bits(a)[same], bits(b)[same]), f"{WILD[data_seed % 3]} in source {touched} is felt elsewhere"
    return True


def child(kind, start, count, chip, threads):
    done, target = 0, CPU
    drawn, module = KINDS[kind]
    if chip:
        target = replace(CPU, chip=next(c for c in chips() if c.name == chip))
        writer = GemmWriter if module is gemm else attention.AttentionWriter
        processor = (OLDER[chip], "") if chip in OLDER else host()
        module.source_of = lambda nest: writer(nest).write().source(*processor)

    @seed(start)
    @settings(
        max_examples=count, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None, database=None
    )
    @given(
        drawn(),
        st.integers(0, 1000),
        st.booleans(),
        st.booleans(),
        st.sampled_from(threads),
        st.sampled_from([False, False, True]),
    )
    def attempt(node, data_seed, constant, at_end, counts, wild):
        nonlocal done
        fence(module, at_end)
        done += one(node, data_seed, constant, at_end, counts, wild, module, target)
        assert all(g.intact() for g in KEPT), "wrote beside a buffer"
        KEPT.clear()

    attempt()
    return done


def run_child(kind, start, count, chip="", threads=((1, 2), (1, 3), (1, 8), (1, 5))):
    call = f"t.child({kind!r}, {start}, {count}, {chip!r}, {list(threads)})"
    begin = f"import faulthandler, sys; faulthandler.enable(); sys.path[:0] = {SEARCHED}"
    begin += "; from tests.candidates.llvm import test_random_nodes as t"
    code = f"{begin}; sys.stdout.write('DONE ' + str({call}))"
    ran = warm.run(["-c", code], timeout=1800)
    last = ran.stdout.strip().splitlines()[-1:] or [""]
    assert ran.returncode == 0, f"at {last[0]}: exit {ran.returncode}\n{ran.stderr[-3000:]}"
    return int(last[0].split()[1])


@pytest.mark.parametrize("kind", list(KINDS))
def test_random_nodes_between_guard_pages(kind):
    assert run_child(kind, 0, 14) > 5


@pytest.mark.conformance
@pytest.mark.parametrize("start", range(4))
def test_a_thousand_gemms_with_several_stores_on_one_to_eight_threads(start):
    assert run_child("gemm", 100 + start, 250, threads=(tuple(range(1, 9)),)) > 150


@pytest.mark.conformance
@pytest.mark.parametrize("start", range(2))
def test_four_hundred_attentions_on_one_to_eight_threads(start):
    assert run_child("attention", 100 + start, 200, threads=(tuple(range(1, 9)),)) > 150


@pytest.mark.conformance
@pytest.mark.parametrize("chip", RUNNABLE)
@pytest.mark.parametrize("kind", list(KINDS))
def test_random_nodes_for_older_processors(kind, chip):
    assert run_child(kind, 300, 100, chip) > 50
