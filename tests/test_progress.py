"""A line every few seconds while something long runs."""

import logging

import pytest

from tilewright import compiler, progress
from tilewright.errors import LOGGER
from tilewright.ir.notation import parse
from tilewright.progress import Said, said


class Over:
    """An event that comes after so many waits."""

    def __init__(self, waits):
        self.left, self.waited = waits, []

    def wait(self, seconds):
        self.waited.append(seconds)
        self.left -= 1
        return self.left < 0

    def set(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_it_says_how_far_it_is_and_what_is_left(clock, caplog):
    caplog.set_level(logging.INFO, "tilewright")
    known = Said("compiling", ends=120.0)
    clock[0] += 6
    known.say()
    known(3, 9, "a product " * 20 + "\x1b")
    clock[0] += 15
    known.say()
    first, second = caplog.messages
    assert first == "compiling for 6 s, 14 s left"
    assert second.startswith("compiling for 21 s, 0 s left: 3 of 9, a product") and second.endswith(" …")
    assert len(second) < 140 and "\x1b" not in second


def test_it_is_said_every_few_seconds_and_no_more_once_it_is_over(caplog):
    caplog.set_level(logging.INFO, "tilewright")
    over = Over(2)
    with said("reading", over=over):
        pass
    assert over.waited == [progress.EVERY_S] * 3 and caplog.messages == ["reading for 0 s"] * 2
    with pytest.raises(ValueError, match="of the work"), said("reading", over=Over(0)):
        raise ValueError("of the work")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(("handlers", "level"), [([], "WARNING"), ([logging.NullHandler()], "INFO")])
def test_python_shows_it_where_nobody_set_up_logging(monkeypatch, handlers, level):
    records = []
    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: bool(handlers))
    monkeypatch.setattr(LOGGER, "log", lambda number, *_: records.append(logging.getLevelName(number)))
    Said("compiling").say()
    assert records == [level]


def test_a_library_call_says_so_itself_unless_it_is_given_somebody_to_tell(monkeypatch):
    graph, asked, told = parse("f32[4,8] @ f32[8,4]"), [], []
    real = said
    monkeypatch.setattr(compiler, "said", lambda *given: asked.append(given) or real(*given))
    compiler.compile(graph, budget_s=0, cache=False)
    compiler.compile(graph, budget_s=0, cache=False, progress=lambda *now: told.append(now))
    assert asked == [("compiling", None)] and told == [(0, 1, "f32[4,8] @ f32[8,4]")]
