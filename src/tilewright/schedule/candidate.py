"""Candidates: one notion for a generated kernel, a library call and the reference.

A candidate is one module under `candidates/` with a module-level `CANDIDATE`, found by file name, or a plug-in: an object that
another package names as an entry point (`plug_ins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch

from tilewright import plug_ins
from tilewright.deadline import OverrunError, considering
from tilewright.discovery import modules
from tilewright.errors import UnsupportedError, say
from tilewright.hardware.target import DeviceKind, Target
from tilewright.schedule.problem import AnyProblem, ProblemKind, collectives_of

if TYPE_CHECKING:
    from tilewright.schedule.cost import Work

CPU, GPU = frozenset[DeviceKind]({"cpu"}), frozenset[DeviceKind]({"cuda"})
GEMM, ATTENTION, FUSION = (frozenset[ProblemKind]({kind}) for kind in ("gemm", "attention", "fusion"))
LAST_RESORT = 90
MATRIX_LIBRARIES = range(10, 40)  # preferences of the libraries that multiply with a unit of the operands' own type

PLANS = 4096  # that are kept

Runner = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Knob = int | str | bool
T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """Settings of one kernel, e.g. `tile_m=128 tile_n=256 num_stages=4`. Names are those of docs/glossary.md."""

    knobs: tuple[tuple[str, Knob], ...] = ()

    @classmethod
    def of(cls, **knobs: Knob) -> Schedule:
        """A schedule from knobs by name, in the order given."""
        return cls(tuple(knobs.items()))

    @classmethod
    def of_point(cls, point: Any, **more: Knob) -> Schedule:
        """A schedule from a dataclass whose fields are the knobs, in their order, and from `more`. A field that is None is no
        knob."""
        own = ((f.name, getattr(point, f.name)) for f in fields(point))
        return cls((*((name, value) for name, value in own if value is not None), *more.items()))

    def point(self, kind: type[T]) -> T:
        """The dataclass of this kind whose fields the knobs give; other knobs are not looked at."""
        names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
        return kind(**{name: value for name, value in self.knobs if name in names})

    def __getitem__(self, name: str) -> Knob:
        return dict(self.knobs)[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.knobs) or "default"


def labelled(candidate: str, schedule: Schedule | str) -> str:
    """A candidate's name and its settings, e.g. `llvm (mr=6 nr=32)`; the bare name where it has none."""
    settings = str(schedule)
    return candidate if settings in ("", "default") else f"{candidate} ({settings})"


@dataclass(frozen=True)
class Kernel:
    """A built candidate.

    Attributes:
        candidate: name of the candidate.
        schedule: the point it was built for.
        prepare: given the weights by source index, packs them and returns what runs: all the problem's sources in, one tensor
            a result out. Sources may have any strides; the runner must not write them nor return memory it will write again.
        place: the same, for a program that has results of a fusion in larger arrays (`FusionProblem.destinations`), given by
            result number: they are written there, and the arrays returned. None if they are to be copied.
        workspace_bytes: scratch memory a call needs.
        packed_bytes: bytes that packing adds to the memory of the weights.
        releasable: weights, by source index, that the runner has no use for once it is prepared: it may be given None for them.
        roundoff: that of the sums, where the hardware keeps fewer bits of them than the accumulator has; verified with slack
            for that, and its schedule says so, since precision never drops without a word.
        parts: the kind of problem and the candidate of each kernel that this one is made of, if it is.
        registers, spills, shared_bytes: resources of the machine code, where there is any of our own.
        text: digest of the texts that it was generated as (`kernel_of`); "" for one that calls a library alone.
    """

    candidate: str
    schedule: Schedule
    prepare: Callable[[Mapping[int, torch.Tensor]], Runner]
    place: Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], Runner] | None = None
    workspace_bytes: int = 0
    packed_bytes: int = 0
    releasable: frozenset[int] = frozenset()
    roundoff: float = 0.0
    parts: tuple[tuple[ProblemKind, str], ...] = ()
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    text: str = ""

    def __deepcopy__(self, memo: object) -> Kernel:
        """The kernel itself: nothing of it changes, and machine code that is loaded has no copy."""
        return self


# Given a runner's sources and memory for all its results (dense, from a multiple of 16 bytes on), writes them there.
Writer = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]

_writers: WeakKeyDictionary[Runner, Writer] = WeakKeyDictionary()
_texts: ContextVar[list[str] | None] = ContextVar("texts", default=None)


def writing(runner: Runner, writer: Writer) -> Runner:
    """The runner, of which `writer_of` gives the writer from now on."""
    _writers[runner] = writer
    return runner


def writer_of(runner: Runner) -> Writer | None:
    """A runner's writer, which runs as it does and writes into memory; None where results are to be copied there."""
    return _writers.get(runner)


def generated(text: str) -> None:
    """Say that the kernel that is being built is compiled from a text."""
    texts = _texts.get()
    if texts is not None:
        texts.append(text)


def kernel_of(plan: Plan, schedule: Schedule) -> Kernel:
    """The kernel of a plan's point, with the digest of the texts that it was generated as."""
    texts = list[str]()
    token = _texts.set(texts)
    try:
        kernel = plan.build(schedule)
    finally:
        _texts.reset(token)
    return replace(kernel, text=sha256("\0".join(texts).encode()).hexdigest()) if texts else kernel


class Unsupported(Exception):  # noqa: N818
    """The sentence why a problem has no kernel; raised wherever a plan is made, and made a `Refusal` in `planned`. No user sees
    it, unlike `errors.UnsupportedError`: another candidate does the problem."""


class Inapplicable(Unsupported):
    """The same of a candidate that is for problems of another type, so that nobody misses it here."""


@dataclass(frozen=True)
class Refusal:
    """A candidate's answer where it cannot do a problem: `why`, a sentence, which `explain` prints, and its kind."""

    why: str
    kind: Literal["refused", "inapplicable"] = "refused"


@runtime_checkable
class Plan(Protocol):
    """The facts that a candidate has found out about a problem on a target before any size is chosen. The kinds of plan below
    can do more."""

    def schedules(self) -> Iterable[Schedule]:
        """The legal points of its space, best guess first."""
        ...

    def build(self, schedule: Schedule) -> Kernel:
        """A kernel for one point."""
        ...


# One machine code for many extents: the kernel of a problem that it serves, for values of the dims by name. It holds where the
# guards do that the scope of the problem's extents was left with.
Ranged = Callable[[Any, Mapping[str, int]], Kernel]


@dataclass(frozen=True)
class FixedPlan:
    """A plan of a few points, all known when it is made.

    Attributes:
        points: the legal points, best guess first.
        make: builds the kernel of one.
    """

    points: Sequence[Schedule]
    make: Callable[[Schedule], Kernel]

    def schedules(self) -> Sequence[Schedule]:
        return self.points

    def build(self, schedule: Schedule) -> Kernel:
        return self.make(schedule)


@dataclass(frozen=True)
class Candidate:
    """A way to do gemms, attentions or fusions.

    Attributes:
        name: unique.
        kinds: of problem it is ever asked about: a `Problem`, an `AttentionProblem`, a `FusionProblem`.
        devices: kinds of device it is ever asked about: on others nobody hears of it.
        preference: order in which candidates are tried when nothing is measured, and which of two equally fast ones is kept:
            below 10 for kernels generated for the problem, 10 to 89 for libraries, `LAST_RESORT` for the reference.
        plan: a problem's plan on a target, or why it cannot do it; ask by way of `planned`. It may raise `Unsupported`.
        packing_knobs: of one whose packed weights serve any number of rows, names of knobs that a packing depends on: points
            that agree in them, or have none, share one. None for others.
        package: the package that it came with, of a plug-in; "" for ours.
        ranged: of one that can leave extents open, the kernel near a point for a problem with open extents (`Ranged`). It may
            raise anything: then there is none.
        code_of: of one with `ranged` on a GPU, what its code depends on of a point: equal for points that one code serves.
        slow: its kernels take seconds to make, anew for each shape: programs with open extents have none of them.
        ranks: of how many a problem is that it is ever asked about: "one" alone; "several", if it holds operations between
            them; or "any".
    """

    name: str
    kinds: frozenset[ProblemKind]
    devices: frozenset[DeviceKind]
    preference: int
    plan: Callable[[Any, Target], Plan | Refusal]
    packing_knobs: tuple[str, ...] | None = None
    package: str = ""
    ranged: Callable[[Any, Target, Schedule], Ranged] | None = None
    code_of: Callable[[Schedule], Schedule] | None = None
    slow: bool = False
    ranks: Literal["one", "several", "any"] = "one"


@runtime_checkable
class HasCostModel(Plan, Protocol):
    """A plan that can say what a schedule makes the machine do, so that it can be ranked without being built."""

    def work(self, schedule: Schedule) -> Work | None:
        """The work of one point, None if it cannot be told."""
        ...


@runtime_checkable
class MetaPlan(Plan, Protocol):
    """A plan whose kernels are of points that `schedules` does not list, since it searches for kernels itself."""

    def pieces(self) -> Sequence[AnyProblem]:
        """The problems for which it does."""
        ...

    def offers(self, schedule: Schedule) -> bool:
        """Tell whether the point of a kernel is one that it could have come to here."""
        ...


@runtime_checkable
class Leading(Plan, Protocol):
    """A plan that may be the better choice where nothing may be measured, whatever its candidate's preference."""

    def leading(self) -> Schedule | None:
        """The point to take before all other candidates', by its own expectations; None if there is none."""
        ...


@runtime_checkable
class Precompiled(Plan, Protocol):
    """A plan of whose kernels any process, with no device at hand, can make the machine code beforehand."""

    def compile(self, schedule: Schedule) -> None:
        """Leave it where `build` finds it, in whatever process."""
        ...


@runtime_checkable
class RankedByCode(Plan, Protocol):
    """A plan that looks at the machine code of points before it offers them."""

    def unbuilt(self) -> Iterable[Schedule]:
        """The points as they are ranked without that."""
        ...


def unbuilt(plan: Plan) -> Iterable[Schedule]:
    """The points of a plan, best guess first, for which nothing is compiled."""
    return plan.unbuilt() if isinstance(plan, RankedByCode) else plan.schedules()


_planning: ContextVar[bool] = ContextVar("planning", default=False)


def planned(candidate: Candidate, problem: AnyProblem, target: Target) -> Plan | Refusal:
    """A candidate's plan for a problem, made once for all who ask; or why it has none, be it that it took too long to say.

    Raises:
        OverrunError: it took too long while another candidate, whose plan depends on it, made one; that plan is not kept.
    """
    make = _planned.__wrapped__ if isinstance(candidate, _Derived) else _planned
    nested, token = _planning.get(), _planning.set(True)
    try:
        with considering():
            return make(candidate, problem, target, f32_precision())
    except OverrunError as overrun:
        if nested:
            raise
        return Refusal(overrun.what)
    finally:
        _planning.reset(token)


def f32_precision() -> str:
    """The precision that torch allows products of f32; "highest" where it was set for a backend alone, which torch then refuses
    to put in this word."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


@lru_cache(PLANS)
def _planned(candidate: Candidate, problem: AnyProblem, target: Target, _precision: str) -> Plan | Refusal:
    """Make the plan. It depends on the arguments and the precision that torch allows products of f32, and on nothing else that
    changes while a process lives."""
    try:
        return candidate.plan(problem, target)
    except Unsupported as why:
        return Refusal(str(why), "inapplicable" if isinstance(why, Inapplicable) else "refused")


def plan_for(candidate: Candidate, problem: AnyProblem, target: Target) -> Plan:
    """The plan of a candidate that is known to have one.

    Raises:
        UnsupportedError: it refuses.
    """
    found = planned(candidate, problem, target)
    if isinstance(found, Refusal):
        raise UnsupportedError(f"{candidate.name}: {found.why}", where=str(problem))
    return found


def refusal(candidate: Candidate, problem: AnyProblem, target: Target) -> str | None:
    """A candidate's sentence why it cannot do a problem; None if it can."""
    found = planned(candidate, problem, target)
    return found.why if isinstance(found, Refusal) else None


class _Derived(Candidate):
    """A candidate made of another for one search. Its plans are not kept: nobody asks for them again."""


def refusing(candidate: Candidate, why: str) -> Candidate:
    """A candidate of that name that refuses every problem."""
    return _derived(candidate, lambda *_: Refusal(why))


def narrowed(candidate: Candidate, pick: Callable[[Plan], Iterable[Schedule]]) -> Candidate:
    """A candidate with those points alone that `pick` gives of its plan's, in that order."""

    def plan(problem: AnyProblem, target: Target) -> Plan | Refusal:
        found = planned(candidate, problem, target)
        return found if isinstance(found, Refusal) else _Narrowed(found, pick)

    return _derived(candidate, plan)


def _derived(candidate: Candidate, plan: Callable[[Any, Target], Plan | Refusal]) -> Candidate:
    c = candidate
    return _Derived(c.name, c.kinds, c.devices, c.preference, plan, package=c.package)


@dataclass(frozen=True)
class _Narrowed:
    whole: Plan
    pick: Callable[[Plan], Iterable[Schedule]]

    def schedules(self) -> Iterable[Schedule]:
        return self.pick(self.whole)

    def unbuilt(self) -> Iterable[Schedule]:
        return self.pick(FixedPlan([*unbuilt(self.whole)], self.whole.build))

    def build(self, schedule: Schedule) -> Kernel:
        return self.whole.build(schedule)


def concerns(candidate: Candidate, problem: AnyProblem, target: Target) -> bool:
    """Tell whether a candidate is asked about a problem on a device at all."""
    if problem.kind not in candidate.kinds or target.kind not in candidate.devices:
        return False
    return candidate.ranks == "any" or candidate.ranks == ("several" if collectives_of(problem) else "one")


def discover(extra: Iterable[Path] = (), kind: str | None = None) -> list[Candidate]:
    """Every candidate, by preference; with a kind of device those alone that are for it, and no other generator is imported."""
    return list(_discover(tuple(extra), kind))


@cache
def _discover(extra: tuple[Path, ...], kind: str | None) -> tuple[Candidate, ...]:
    made = own_candidates(extra, kind)
    made += [c for c in _plugged_in() if c.name not in {own.name for own in made}]
    found = made if kind is None else [c for c in made if kind in c.devices]
    return tuple(sorted(found, key=lambda c: (c.preference, c.name)))


def own_candidates(extra: Iterable[Path] = (), kind: str | None = None) -> list[Candidate]:
    """The candidates that are found by file name."""
    enter = None if kind is None else lambda package: kind in getattr(package, "DEVICES", (kind,))
    return [m.CANDIDATE for m in modules("tilewright.candidates", extra, "CANDIDATE", enter)]


@cache
def _plugged_in() -> tuple[Candidate, ...]:
    """The candidates of other packages, but for those that cannot be used. A name is ours, or the first package's that has
    it."""
    given = plug_ins.loaded(plug_ins.CANDIDATES, (Candidate,), "CANDIDATE")
    taken, found = {c.name: "tilewright" for c in own_candidates()} if given else {}, list[Candidate]()
    for candidate, plug_in in given:
        why = _unusable(candidate) or (f"{taken[n]} has a candidate {n}" if (n := candidate.name) in taken else "")
        if why:
            plug_in.leave_out(why)
        else:
            taken[candidate.name] = plug_in.package
            found.append(_answering(candidate, plug_in))
    return tuple(found)


def _unusable(candidate: Candidate) -> str:
    """The words why nobody could ask a plug-in's candidate; "" if one can."""
    name, preference = candidate.name, candidate.preference
    if type(name) is not str or not name.isidentifier():
        return f"{name!r} is no name for a candidate: letters, digits and underscores"
    if type(preference) is not int or not 0 <= preference < LAST_RESORT:  # the reference alone is not verified
        return f"a preference of {preference!r}, where 0 to {LAST_RESORT - 1} is due"
    if not (candidate.kinds and candidate.kinds <= GEMM | ATTENTION | FUSION and candidate.devices <= CPU | GPU):
        return "its kinds of problem or of device are none of ours"
    return "" if callable(candidate.plan) else f"its plan is a {type(candidate.plan).__name__}, and no function"


def _answering(candidate: Candidate, plug_in: plug_ins.PlugIn) -> Candidate:
    """A plug-in's candidate that refuses a problem, with a warning, where it raises or answers neither with a plan nor with a
    refusal."""

    @wraps(candidate.plan)
    def plan(problem: AnyProblem, target: Target) -> Plan | Refusal:
        try:
            found = cast("object", candidate.plan(problem, target))
            what = "" if isinstance(found, Plan | Refusal) else f"gave a {type(found).__name__}, and no plan or refusal"
        except (Unsupported, OverrunError):
            raise
        except Exception as error:
            found, what = None, f"{type(error).__name__}: {error}"
        if isinstance(found, Plan):
            return _guarded(found, f"plug-in {plug_in}: candidate {candidate.name}")
        if isinstance(found, Refusal):
            return found
        say(f"plug-in {plug_in}: candidate {candidate.name} failed to consider {problem}: {what}")
        return Refusal(f"failed to consider it: {what}")

    return replace(candidate, plan=plan, package=plug_in.package)


class _Guarded:
    """A plug-in's plan whose points end where it raises, and which builds kernels or raises; `_guarded` adds what else it
    does."""

    def __init__(self, plan: Plan, who: str) -> None:
        self.plan, self.who = plan, who

    def schedules(self) -> Iterator[Schedule]:
        try:
            yield from self.plan.schedules()
        except OverrunError:
            raise
        except Exception as error:
            self.warn("schedules", error)

    def build(self, schedule: Schedule) -> Kernel:
        kernel = cast("object", self.plan.build(schedule))
        if not isinstance(kernel, Kernel):
            raise TypeError(f"it built a {type(kernel).__name__}, and no kernel")
        return kernel

    def warn(self, what: str, error: Exception) -> None:
        say(f"{self.who} failed in {what}: {type(error).__name__}: {error}")


# What a plan may do more (the kinds of plan above), and what one that fails there has done.
_MORE: Mapping[str, object] = {"work": None, "leading": None, "compile": None, "pieces": (), "offers": False}


def _guarded(plan: Plan, who: str) -> Plan:
    """A plug-in's plan, none of whose methods but `build` raises."""

    def guarded(name: str, otherwise: object) -> Callable[..., object]:
        def method(self: _Guarded, *given: object) -> object:
            try:
                return getattr(self.plan, name)(*given)
            except OverrunError:
                raise
            except Exception as error:
                self.warn(name, error)
                return otherwise

        return method

    more = {name: guarded(name, otherwise) for name, otherwise in _MORE.items() if hasattr(plan, name)}
    return type("_GuardedPlan", (_Guarded,), more)(plan, who)
