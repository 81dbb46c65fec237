"""One budget of time for all problems of a program: each one's share, which ones are alike, and the decisions known already."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tilewright.deadline import Budget
from tilewright.hardware.target import Target
from tilewright.ir.ops import Const
from tilewright.progress import Progress
from tilewright.schedule.ahead import LIMIT_S, LOOK_S, MOST_PROCESSES, Ahead
from tilewright.schedule.candidate import Kernel, discover, refusing
from tilewright.schedule.cost import least_us
from tilewright.schedule.key import numbers_of, text_of
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision, Interruption, search
from tilewright.schedule.tuning_database import WAIT_S, TuningDatabase, rebuilt, repeat
from tilewright.schedule.worker import ready, warm

LONGEST_S, LONGEST = 2.0, 0.1  # for one problem: seconds, or of a long budget the part
EVENLY = 0.25  # of the time: shared out evenly, as what is expected of a problem may be wrong; the rest by what it can gain
FEW, LIGHTEST = 3, 0.25  # problems known, and the least part of what they took to be checked that any may take
FIRST_CHECKS = 0.5  # of the time left, kept back for checks at most while few problems are known
CHECKED = 2  # of problems that differ in ordinary numbers alone, where their code is not the same
AHEAD = "compiling what will be tried first"
LATER = "not tried: the machine code of its pieces was still being made, and there was little time"
LEAST, MOST = 2.0**-24, 2.0**24  # of an ordinary number


class BudgetedChooser:
    """Chooses once for each distinct problem, within a budget of time by the clock for all of them.

    A problem's share is by the time that a call of the program is expected to spend on it, since that is what a better kernel
    can gain; so ask for the heaviest first (`weight`). What it takes to check the others is kept back. Once the time is over,
    problems left take the first kernel that passes its check, as without a budget: no budget gives a worse program than none.

    Problems that differ in numbers written into their expressions alone (the scales of two layers) are searched once: the
    others take the same candidate and schedule, built for their own numbers. A kernel that is generated as the same text is not
    checked again. Of those of other texts, and of library calls, two are checked, and all whose numbers code may be written for
    (`ordinary`).

    Attributes:
        late: how many problems were not searched since the time was over; a compile with time chooses for them anew.
        first: how many of these took the first kernel; for the others an earlier choice was read back.
    """

    late: int
    first: int

    def __init__(
        self,
        problems: Mapping[AnyProblem, int],
        target: Target,
        budget: float | Budget,
        *,
        cold: bool,
        progress: Progress | None = None,
        database: TuningDatabase | None = None,
        most: int = MOST_PROCESSES,
        accepted_s: float | None = None,
    ) -> None:
        """A budget for a program's problems, from now on.

        Args:
            problems: all that will be asked for, and how many steps of the program pose each.
            target: the machine.
            budget: seconds by the clock; 0 measures none. Or a budget that has begun.
            cold: weights come from memory, as those of a program that no cache holds.
            progress: called before each choice with how many are done, how many there are, and the problem.
            database: what is known of problems, and where decisions are kept.
            most: processes that make machine code at once.
            accepted_s: seconds for a problem whose earlier decision will do; None for an even share.
        """
        self._most = most
        self._target, self._database, self._progress = target, database, progress
        self._budget = budget if isinstance(budget, Budget) else Budget(budget)
        self._cold, self._ends, budget_s = cold, self._budget.ends, self._budget.left_s()
        self.late = self.first = 0
        if database is not None:
            database.of_program(cold=cold)
        self._total = len(problems)
        self._known: dict[AnyProblem, Decision] = {}
        self._alike: dict[str, Decision] = {}
        self._sampled = set[str]()  # texts of which a second problem agreed with the reference, for numbers of its own
        self._texts = {p: text_of(p) for p in problems}
        self._ordinary = {p for p in problems if ordinary(p)}
        self._longest_s = max(LONGEST_S, LONGEST * budget_s)
        self._weights, self._least = dict[str, float](), dict[str, float]()
        for p, count in problems.items():
            text = self._texts[p]
            self._least[text] = least_us(p, target)
            self._weights[text] = self._weights.get(text, 0.0) + count * self._least[text]
        different = {text: p for p, text in self._texts.items()}
        self._even_s = min(budget_s / max(len(different), 1), self._longest_s)
        self._accepted_s = self._even_s if accepted_s is None else accepted_s
        unknown = {t: p for t, p in different.items() if database is None or not database.known(p, self._accepted_s)}
        self._waiting = {text: self._weights[text] for text in unknown}
        chosen = [] if database is None or target.kind == "cpu" else database.to_build(different.values())
        self._different, self._ahead, self._hurried = different, None, False
        if target.kind != "cpu" and (chosen or (budget_s > 0 and unknown)):
            first = sorted(unknown.values() if budget_s > 0 else (), key=self.weight, reverse=True)
            if first:
                warm(first[0], target)  # while code is made
            self._ahead = Ahead(first, target, within_s=budget_s if budget_s > 0 else None, chosen=chosen, most=most)

    def weight(self, problem: AnyProblem) -> float:
        """The time in µs that a call of the program is expected to spend on a problem and those like it, at the least."""
        return self._weights[self._texts[problem]]

    def turn(self, problems: Sequence[AnyProblem]) -> int:
        """The place of the problem that is best chosen next: the first for which nobody is still making machine code, nor for
        its pieces if there is such a one. Waits until there is one, for half of the time left at most."""
        until = time.monotonic() + self._budget.left_s() / 2
        while self._ahead is not None:
            alike = [self._different[self._texts[problem]] for problem in problems]
            there = [at for at, problem in enumerate(alike) if not self._ahead.waits(problem)]
            if there:
                return next((at for at in there if not self._ahead.unready(alike[at])), there[0])
            if time.monotonic() >= until:
                break
            if self._progress is not None:
                self._progress(len(self._known), self._total, AHEAD)
            warm(problems[0], self._target)  # the fork server may not have been up before
            self._ahead.wait_for_any(LOOK_S)
        return 0

    def _least_us(self, problem: AnyProblem) -> float:
        return self._least[self._texts[problem]]

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        if problem not in self._known:
            if self._progress is not None:
                self._progress(len(self._known), self._total, str(problem))
            self._known[problem] = self._chosen(problem, weights)
            if self._ahead is not None and len(self._known) == self._total:
                self._ahead.stop()
        return self._known[problem]

    def _chosen(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        text = self._texts[problem]
        model = self._alike.get(text)
        if model is not None:
            same = self._repeated(problem, model, weights)
            if same is not None:  # else the winner is not right for these numbers
                return replace(
                    same,
                    time_us=model.time_us,
                    rejected=model.rejected,
                    measured=model.measured,
                    recalled=model.recalled,
                    provisional=model.provisional,
                )
        return self._alike.setdefault(text, self._searched(problem, weights))

    def _repeated(self, problem: AnyProblem, model: Decision, weights: Mapping[int, torch.Tensor]) -> Decision | None:
        """The model's candidate and schedule for other numbers; None if they do not do. Unless they are the model's very text,
        they are checked for the first of those that are alike; for further ones only if their numbers are some that code may be
        written for."""
        text, point = self._texts[problem], (model.kernel.candidate, model.kernel.schedule)
        same = rebuilt(problem, self._target, *point)
        if same is not None and generated(model.kernel) and same.kernel.text == model.kernel.text:
            return same
        if text in self._sampled and {problem, model.problem} <= self._ordinary:
            return same
        if self._database is None:
            same = repeat(problem, self._target, *point, weights)
        else:
            same = self._database.again(problem, *point, weights)
        if same is not None:
            self._sampled.add(text)
        return same

    def _searched(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        database = self._database
        self._await_code(problem)
        found = None if database is None else database.find(problem, weights, self._accepted_s)
        if found is not None:
            self._waiting.pop(self._texts[problem], None)
            return found
        share = self._share(problem)
        if share > 0 and not ready(self._within(share)):
            share = 0.0
        candidates = None if database is None else database.candidates(problem)
        if share <= 0:
            late = self._budget.over()
            self.late += late
            how = partial(search, problem, self._target, budget_s=0, candidates=candidates, weights=weights)
            if database is None:
                decision = how()
            else:
                asked_s, within_s = 0.0 if late else self._accepted_s, self._waits_s()
                decision = database.settle(problem, weights, how, asked_s=asked_s, within_s=within_s)
            self.first += late and not decision.measured
            return decision
        how = partial(search, problem, self._target, budget_s=share, weights=weights, cold=self._cold)
        if self._ahead is not None and self._even_s < LONGEST_S:  # to make it in the search would take all of its time
            hurried = self._ahead.unready(self._different[self._texts[problem]])
            if hurried:
                candidates = [refusing(c, LATER) if c.name in hurried else c for c in candidates or discover()]
        if database is None:
            return how(candidates=candidates, within_s=self._within(share), over=self._budget.over)
        with database.alone(problem, self._accepted_s, self._waits_s()):
            found = database.find(problem, weights, self._accepted_s)  # another process may have come to it meanwhile
            if found is not None:
                return found
            began = time.monotonic()
            try:
                lost, over = partial(database.lost, problem), self._budget.over
                decision = how(candidates=candidates, within_s=self._within(share), lost=lost, over=over)
            except Interruption as stop:
                database.keep(stop.decision, min(share, time.monotonic() - began))
                raise
            database.keep(decision, self._accepted_s)  # that of a like budget is not searched again, whatever its share was
        return decision

    def _waits_s(self) -> float:
        """Seconds to wait for another process that works on a problem."""
        return self._budget.left_s() if self._budget.seconds > 0 else WAIT_S

    def _await_code(self, problem: AnyProblem) -> None:
        """Wait until a GPU's machine code is there for what competes from the start, for half of the time left at most; once
        that is over, for what is tried first."""
        alike, over = self._different[self._texts[problem]], self._budget.over()
        if over and self._target.kind != "cpu" and not self._hurried:
            self._hurried = True
            if self._ahead is not None:
                self._ahead.stop()
            left = {self._different[self._texts[p]] for p in self._texts if p not in self._known}
            self._ahead = Ahead(sorted(left, key=self.weight, reverse=True), self._target, first=True, most=self._most)
        if self._ahead is not None and self._ahead.waits(alike):
            if self._progress is not None:
                self._progress(len(self._known), self._total, AHEAD)
            self._ahead.wait(alike, self._budget.left_s() / 2 if self._budget.seconds > 0 and not over else LIMIT_S)

    def _share(self, problem: AnyProblem) -> float:
        """Seconds for a problem that is searched now. Time to check those that follow is kept back."""
        left_s, checks_s = self._ends - time.monotonic(), self._checks_s()
        if len(self._known) < FEW:  # the first one's time is also that of a process's first calls, and tells little
            checks_s = min(checks_s, FIRST_CHECKS * left_s)
        free_s = left_s - checks_s
        text = self._texts[problem]
        self._waiting.setdefault(text, self._weights[text])  # where what was known of it does not hold
        left, whole = len(self._waiting), sum(self._waiting.values())
        own = self._waiting.pop(text)
        part = EVENLY / left + (1 - EVENLY) * (own / whole if whole > 0 else 1 / left)
        return max(0.0, min(free_s * part, self._longest_s))

    def _checks_s(self) -> float:
        """Seconds that checking the problems left may take: what one like it took, else the median, once there is one. While
        those known are few, lighter ones count as lighter, and heavier ones as heavier."""
        known = {p: d.checked_s for p, d in self._known.items()}
        usual = statistics.median(known.values()) if known else 0.0
        heavy = statistics.median(map(self._least_us, known)) if 0 < len(known) < FEW else 0.0
        total, checked = 0.0, Counter(dict.fromkeys(self._alike, 1)) + Counter(self._sampled)
        for problem, text in self._texts.items():
            if text in self._alike and generated(self._alike[text].kernel) and problem in self._ordinary:
                continue
            if problem not in self._known and (checked[text] < CHECKED or problem not in self._ordinary):
                part = min(1 / LIGHTEST, max(LIGHTEST, self._least_us(problem) / heavy)) if heavy else 1.0
                total += self._alike[text].checked_s if text in self._alike else part * usual
                checked[text] += 1
        return total

    def _within(self, share_s: float) -> float:
        """Seconds by the clock for a problem of such a share: while others wait, it leaves them half of the time."""
        left_s = self._ends - time.monotonic()
        return left_s if len(self._known) + 1 >= self._total else max(share_s, left_s / 2)


def generated(kernel: Kernel) -> bool:
    """Tell whether the text that a kernel is generated as is all of its code."""
    return bool(kernel.text) and not kernel.parts


def ordinary(problem: AnyProblem) -> bool:
    """Tell whether all numbers in a problem's expressions are positive f32 of moderate size, and none is 1: code for such a
    problem differs in the numbers alone from code for others like it."""
    values = [n.op.data.tensor() for n in numbers_of(problem) if isinstance(n.op, Const)]
    return all(t.dtype is torch.float32 and LEAST <= float(t) <= MOST and float(t) != 1 for t in values)
