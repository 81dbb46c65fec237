"""The entries that were used last."""

import random
import sys

import pytest
from in_threads import in_threads

from tilewright.recent import Recent


def test_what_was_used_longest_ago_goes_first_and_is_told():
    gone = []
    recent = Recent[str, int](2, lambda key, value: gone.append((key, value)))
    recent["a"], recent["b"] = 1, 2
    assert recent.find("a") == 1
    recent["c"] = 3
    assert gone == [("b", 2)]
    assert recent.find("b") is None
    recent["a"] = 4
    recent["d"] = 5
    assert [*recent.items()] == [("a", 4), ("d", 5)]
    assert gone == [("b", 2), ("c", 3)]


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
def test_threads_set_and_ask_at_once():
    gone = []
    recent = Recent[int, int](8, lambda key, value: gone.append(key))

    def work(thread):
        drawn = random.Random(thread)
        for _ in range(20_000):
            key = drawn.randrange(10)
            if recent.find(key) is None:
                recent[key] = key

    in_threads(4, work)
    assert len(recent) == 8 and all(key == value for key, value in recent.items())
    assert gone


def test_an_entry_may_be_deleted_by_what_is_told_of_others():
    recent = Recent[str, int](1, lambda key, value: recent.pop("b", None))
    recent["a"] = 1
    recent["b"] = 2
    assert not recent
