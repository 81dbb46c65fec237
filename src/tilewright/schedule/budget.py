"""One budget of time for all problems of a program: each one's share, which ones are alike, and the decisions known already."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch

from tilewright.hardware.target import Target
from tilewright.schedule.ahead import compile_ahead
from tilewright.schedule.key import text_of
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision, Interruption, Progress, search
from tilewright.schedule.tuning_database import TuningDatabase, repeat

LONGEST_S = 2.0  # for one problem


class SharedBudget:
    """Chooses once for each distinct problem, sharing the budget evenly over those that nobody has chosen for yet.

    Problems that differ in numbers written into their expressions alone (the scales of two layers) are timed once: the others
    take the same candidate and schedule, built and checked for their own numbers.
    """

    def __init__(
        self,
        problems: Collection[AnyProblem],
        target: Target,
        budget_s: float,
        *,
        cold: bool,
        progress: Progress | None = None,
        database: TuningDatabase | None = None,
        ends: float | None = None,
    ) -> None:
        """A budget for a program's problems, each once.

        Args:
            problems: all that will be asked for.
            target: the machine.
            budget_s: seconds that measuring may take in all.
            cold: weights come from memory, as those of a program that no cache holds.
            progress: called before each choice with how many are done, how many there are, and the problem.
            database: what is known of problems, and where decisions are kept.
            ends: when all must be chosen, by `time.monotonic`.
        """
        self._cold = cold
        self._target = target
        self._database = database
        self.resume()
        self._progress = progress
        self._total = len(problems)
        self._known: dict[AnyProblem, Decision] = {}
        self._alike: dict[str, Decision] = {}
        self._texts = {p: text_of(p) for p in problems}
        self._longest_s, self._ends = LONGEST_S, ends
        if ends is not None:
            self._longest_s = max(LONGEST_S, (ends - time.monotonic()) / 10)
        different = {text: p for p, text in self._texts.items()}
        self._accepted_s = min(budget_s / max(len(different), 1), self._longest_s)
        unknown = [p for p in different.values() if database is None or not database.known(p, self._accepted_s)]
        self._left = max(len(unknown), 1)
        self._share_s = min(budget_s / self._left, self._longest_s)
        if budget_s > 0 and target.kind != "cpu" and unknown:
            if progress is not None:
                progress(0, self._total, "compiling what will be tried first")
            compile_ahead(unknown, target, within_s=None if ends is None else (ends - time.monotonic()) / 2)

    def resume(self) -> None:
        """See that what is remembered is looked up for this program again, after another."""
        if self._database is not None:
            self._database.of_program(cold=self._cold)

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        if problem not in self._known:
            if self._progress is not None:
                self._progress(len(self._known), self._total, str(problem))
            self._known[problem] = self._chosen(problem, weights)
        return self._known[problem]

    def _chosen(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        text = self._texts[problem]
        model = self._alike.get(text)
        if model is not None:
            same = self._again(problem, model, weights)
            if same is not None:  # else the winner is not right for these numbers
                return replace(
                    same,
                    time_us=model.time_us,
                    rejected=model.rejected,
                    measured=model.measured,
                    recalled=model.recalled,
                    provisional=model.provisional,
                )
        decision = self._searched(problem, weights)
        self._alike.setdefault(text, decision)
        return decision

    def _again(self, problem: AnyProblem, model: Decision, weights: Mapping[int, torch.Tensor]) -> Decision | None:
        """The same candidate and schedule for a problem like another; None if they do not do."""
        point = model.kernel.candidate, model.kernel.schedule
        if self._database is None:
            return repeat(problem, self._target, *point, weights)
        return self._database.again(problem, *point, weights)

    def _searched(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        database = self._database
        if database is None:
            share = self._share()
            return search(problem, self._target, budget_s=share, weights=weights, cold=self._cold, within_s=self._within(share))
        found = database.find(problem, weights, self._accepted_s)
        if found is not None:
            return found
        share = self._share()
        if share <= 0:
            among = database.candidates(problem)
            return database.settle(
                problem, weights, lambda: search(problem, self._target, budget_s=0, candidates=among, weights=weights)
            )
        with database.alone(problem, share) as first:
            found = None if first else database.find(problem, weights, self._accepted_s)
            if found is not None:
                return found
            began = time.monotonic()
            try:
                decision = search(
                    problem,
                    self._target,
                    budget_s=share,
                    candidates=database.candidates(problem),
                    weights=weights,
                    cold=self._cold,
                    within_s=self._within(share),
                    lost=partial(database.lost, problem),
                )
            except Interruption as stop:
                database.keep(stop.decision, min(share, time.monotonic() - began))
                raise
            database.keep(decision, share)
        return decision

    def _share(self) -> float:
        """Seconds for the next problem. Time to check those that follow is kept back."""
        if self._ends is None:
            return self._share_s
        left, self._left = self._left, max(self._left - 1, 1)
        free_s = self._ends - time.monotonic() - self._checks_s()
        return max(0.0, min(free_s / left, self._longest_s))

    def _checks_s(self) -> float:
        """Seconds that checking the problems left may take: what one like it took, else the median, once there is one."""
        known = [d.checked_s for d in self._known.values()]
        usual = statistics.median(known) if len(known) > 2 else 0.0
        texts = [text for p, text in self._texts.items() if p not in self._known]
        return sum(self._alike[t].checked_s if t in self._alike else usual for t in texts)

    def _within(self, share_s: float) -> float | None:
        """Seconds by the clock for a problem of such a share: while others wait, it leaves them half of the time."""
        if self._ends is None:
            return None
        left_s = self._ends - time.monotonic()
        return left_s if len(self._known) + 1 >= self._total else max(share_s, left_s / 2)
