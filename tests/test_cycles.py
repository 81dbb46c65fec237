"""Full collections wait for the end of a block, young ones do not, and the thresholds are afterwards what they were."""

import gc
import threading

import pytest

from tilewright.cycles import NEVER, young


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def looks():
    """The generations that Python looked through."""
    found, before = [], gc.get_threshold()
    note = lambda phase, info: found.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_only_young_objects_are_looked_at_within(looks):
    gc.set_threshold(50, 2, 2)
    with young():
        looks.clear()
        kept = [[] for _ in range(20_000)]
        assert gc.get_threshold() == (50, 2, NEVER) and len(kept) == 20_000
    assert len(looks) > 50 and 2 not in looks
    assert gc.get_threshold() == (50, 2, 2)


def test_cycles_made_within_go_within(looks):
    gc.set_threshold(50, 10, 10)
    gone = []
    with young():
        for _ in range(1000):
            made = Cycle()
            made.end = type("End", (), {"__del__": lambda self: gone.append(1)})() if not gone else None
    assert gone


@pytest.mark.parametrize("ours_first", [False, True])
def test_blocks_of_two_threads_overlap(looks, ours_first):
    gc.set_threshold(700, 10, 10)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with young():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with young():
        thread.start()
        entered.wait()
        if not ours_first:
            leave.set()
            thread.join()
            assert gc.get_threshold()[2] == NEVER
    if ours_first:
        assert gc.get_threshold()[2] == NEVER
        leave.set()
        thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_what_the_caller_sets_meanwhile_stays(looks):
    with young():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)
    gc.set_threshold(0)
    with young():
        assert gc.get_threshold()[0] == 0
