"""Rules and candidates that never come back: a compile ends and says so."""

import re
import threading
import time
from contextvars import copy_context
from itertools import count

import pytest
import torch
from fake_candidate import Fake

import tilewright
from tilewright import compiler, deadline
from tilewright.dtype import F32
from tilewright.errors import TilewrightError
from tilewright.hardware.detect import detect
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph, toposort
from tilewright.ir.notation import parse
from tilewright.ir.ops import Map
from tilewright.ir.pattern import Pat, Rule, Trace, rewrite
from tilewright.ir.verify import verify
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search

PROBLEM = problem_of(parse("f32[8,16] @ f32[16,12]").outputs[0])
GRAPH = Graph("g", (X := input_("x", F32, (3, 4)),), (map_("tanh", map_("negate", X)),), ("y",))
LONG_S = 30.0  # after which a planted loop gives in, and its test fails


def endless(*_):
    """Stands for a rule or a plan that never settles: it looks at its graph again and again."""
    began = time.monotonic()
    while time.monotonic() < began + LONG_S:
        toposort(GRAPH.outputs)


def test_work_without_an_end_is_not_asked():
    deadline.check()
    with deadline.until(time.monotonic() + 100):
        deadline.check()
        with pytest.raises(deadline.OverrunError, match="its time is over"), deadline.until(time.monotonic() - 1):
            deadline.check()
        deadline.check()
    with deadline.until(time.monotonic() - 1), pytest.raises(deadline.OverrunError), deadline.until(time.monotonic() + 100):
        deadline.check()  # that around it is over


def test_an_end_in_a_threads_own_time_waits_while_others_have_the_processor():
    with deadline.until(deadline.End.after(0.05)):
        time.sleep(0.1)
        deadline.check()
        assert 0 < deadline.left_s() <= 0.05
        with pytest.raises(deadline.OverrunError):
            endless_s(0.06)
    with pytest.raises(deadline.OverrunError), deadline.until(deadline.End.after(0.002)):
        time.sleep(deadline.STARVED * 0.002)  # of what sleeps for ever, the clock is the end
        deadline.check()


def endless_s(seconds):
    began = time.thread_time()
    while time.thread_time() < began + seconds:
        pass
    deadline.check()


def test_an_end_counts_the_time_of_the_thread_that_asks():
    began = time.thread_time()
    while time.thread_time() < began + 0.5:  # which is no time of the other thread's
        pass
    took = []

    def work():
        before = time.thread_time()
        while not deadline.over():
            pass
        took.append(time.thread_time() - before)

    with deadline.until(deadline.End.after(0.05)):
        thread = threading.Thread(target=copy_context().run, args=(work,))
        thread.start()
        thread.join()
        deadline.check()  # this one waited
    assert 0.04 < took[0] < 0.4


def test_candidates_that_wait_end_with_the_budget_by_the_clock(monkeypatch):
    monkeypatch.setattr(deadline, "LEAST_S", 0.001)
    began, limit_s = time.monotonic(), 3.0
    with (
        deadline.allowing(0.2),
        pytest.raises(deadline.OverrunError, match=r"still considering the problem after \d s"),
        deadline.considering(),
    ):
        while time.monotonic() < began + limit_s:
            time.sleep(0.01)
            deadline.check()
    assert time.monotonic() < began + limit_s


def test_an_endless_rule_ends_and_the_graph_is_as_it_was():
    trace = Trace()
    rules = [Rule("looks_for_ever", "s", Pat(Map), endless, "")]
    after = rewrite(GRAPH, rules, trace, until=deadline.End.after(0.2))
    verify(after)
    assert after.outputs == GRAPH.outputs
    assert trace.notes == ["the time for rules was over at looks for ever: what follows is compiled as it stood"]


def test_rules_that_grow_the_graph_end():
    trace = Trace()

    def deeper(m):
        return map_("abs", m.node) if not isinstance(m.node.src[0].op, Map) else map_("negate", map_("negate", m.node))

    try:
        after = rewrite(GRAPH, [Rule("deeper", "s", Pat(Map), deeper, "")], trace, until=deadline.End.after(0.05))
    except TilewrightError as error:
        assert "do not converge" in str(error)  # sooner than the clock
    else:
        verify(after)
        assert trace.notes


def test_a_compile_with_an_endless_rule_or_pass_ends_and_says_so(monkeypatch):
    monkeypatch.setattr(compiler, "ENOUGH_S", 0.3)
    real = compiler.discover
    for kind, planted in (
        (Rule, Rule("looks_for_ever", "recognise", Pat(Map), endless, "")),
        (compiler.Pass, compiler.Pass("walks_for_ever", "recognise", endless, "")),
    ):
        monkeypatch.setattr(compiler, "discover", lambda p, k, kind=kind, r=planted: [*real(p, k), *([r] if k is kind else [])])
        program = tilewright.compile(GRAPH, budget_s=0, cache=False)
        assert any(planted.name.replace("_", " ") in note for note in program.source.notes)
        x = torch.randn(3, 4)
        assert torch.allclose(program(x), torch.tanh(-x))


def test_an_endless_candidate_is_left_out_with_a_sentence(monkeypatch):
    monkeypatch.setattr(deadline, "REFUSE_S", 0.2)
    monkeypatch.setattr(deadline, "LEAST_S", 0.2)
    right = Fake("right", lambda s: [s[0] @ s[1]], preference=50)

    class Refuses(Fake):
        def plan(self, problem, target):
            return endless()

    class Lists(Fake):
        def schedules(self):
            for i in count():
                endless()
                yield i

    both = [c("endless", lambda s: [s[0] @ s[1]], preference=1) for c in (Refuses, Lists)]
    for planted in both:
        decision = search(PROBLEM, detect("cpu"), budget_s=0, candidates=[planted, right])
        assert decision.kernel.candidate == "right"
        why = {r.candidate: r.why for r in decision.rejected}["endless"]
        assert re.search(r"it was still considering the problem after \d+ s", why)


def test_what_a_program_allows_its_candidates_is_used_up(monkeypatch):
    monkeypatch.setattr(deadline, "LEAST_S", 0.0)
    with deadline.allowing(0.1):
        for first in (True, False):
            with pytest.raises(deadline.OverrunError, match="still considering"), deadline.considering():
                if first:
                    endless()
                deadline.check()  # nothing is left for the second one
