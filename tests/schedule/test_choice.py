"""Decisions as data."""

import msgspec

from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.runtime.agreement import Chosen
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.choice import choice_of, rejected_of
from tilewright.schedule.problem import problem_of
from tilewright.schedule.record import LONGEST
from tilewright.schedule.search import Decision, Rejected, by_reference

PROBLEM = problem_of(parse("f32[8,16] @ f32[16,12]").outputs[0])
OTHERS = (
    Rejected("one", "slower", "slower: 9 µs", Schedule.of(tile=3, wide=True, order="nmk"), 9.0),
    Rejected("two", "refused", "it has no form " * LONGEST),
)


def test_a_decision_as_data_is_the_same_decision():
    plain = by_reference(PROBLEM, detect("cpu"))
    noise = "other programs had 40% of the cores"
    found = Decision(PROBLEM, plain.kernel, 2.5, OTHERS, True, True, recalled=True, provisional=noise)
    choice = msgspec.json.decode(msgspec.json.encode(choice_of(found, Chosen, recalled=True)), type=Chosen)
    assert (choice.candidate, choice.knobs) == (plain.kernel.candidate, plain.kernel.schedule.knobs)
    one, two = rejected_of(choice)
    assert one == OTHERS[0] and two.why == OTHERS[1].why[:LONGEST] and two.kind == "refused"
    told = choice.told(plain)
    assert (told.time_us, told.rejected, told.provisional) == (2.5, (one, two), noise)
    assert told.measured and told.recalled and told.verified
