"""A candidate made of a function, which counts what is asked of it."""

from tilewright.schedule.candidate import (
    Kernel,
    Refusal,
    Schedule,
)

DEFAULT = (Schedule(),)


class Fake:
    """A candidate made of a function from sources to results."""

    kinds = frozenset({"gemm"})
    devices = frozenset({"cpu"})
    ranks = "one"
    package = ""

    def __init__(self, name, run=None, preference=30, refuse=None, schedules=DEFAULT, build=None, prepare=None):
        self.name, self.preference = name, preference
        self._run, self._refuse, self._schedules, self._build, self._prepare = run, refuse, schedules, build, prepare
        self.calls = self.builds = 0

    def plan(self, problem, target):
        if isinstance(self._refuse, Exception):
            raise self._refuse
        return self if self._refuse is None else Refusal(self._refuse)

    def schedules(self):
        if isinstance(self._schedules, Exception):
            raise self._schedules
        return self._schedules

    def build(self, schedule):
        self.builds += 1
        if isinstance(self._build, BaseException):
            raise self._build

        def run(sources):
            self.calls += 1
            if isinstance(self._run, BaseException):
                raise self._run
            return [sources[0] @ sources[1]] if self._run is None else self._run(sources)

        def prepare(weights):
            if self._prepare is not None:
                raise self._prepare
            return run

        return Kernel(self.name, schedule, prepare)
