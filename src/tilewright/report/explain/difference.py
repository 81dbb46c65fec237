"""Two reports of `perf --json` or `explain --json` compared: what changed in the graph, in the choices and in the times.

Steps are aligned in their order: those that agree most in problem and name belong together. What has no partner between two
such pairs came or went, or became something else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from tilewright.errors import InputError
from tilewright.files import NotJSONError, decoded
from tilewright.report.schema import (
    Altered,
    AlteredFinding,
    AlteredPeer,
    AlteredStep,
    Difference,
    Explain,
    Finding,
    Peer,
    Perf,
    Setting,
    Side,
    StepGroup,
)
from tilewright.report.words import ranged, titled, us

TIE, NOISY_TIE = 0.05, 0.25  # of a step's time, by which two runs of one kernel may differ, in quiet and in noise
WHOLE_TIE = 0.03  # of a program's: its memory lies elsewhere in each process
PROBLEM, NUMBERS, NAME, GROUP, KIND = 4, 1, 3, 3, 1  # what two steps that are alike in these count in an alignment
MOST_CELLS = 100_000_000  # of an alignment
_KNOB = re.compile(r"([\w.]+)=(.*?)(?= [\w.]+=|$)")  # of a schedule; values may have spaces
FROM = "what `tilewright perf FILE --json` or `tilewright explain FILE --json` printed"

Report = Perf | Explain
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True)
class Row:
    """A step as either report has it.

    Attributes:
        name, group: what the source calls it, and what the model calls the steps that are alike.
        kind, problem, candidate, schedule: as in the report.
        time_us, limit_us: None where nothing is known.
        low_us, high_us: quartiles of its timings; the time itself where they are not known.
        others: sentences why other candidates do not do it, by candidate.
    """

    name: str
    group: str
    kind: str
    problem: str
    candidate: str
    schedule: str
    time_us: float | None
    limit_us: float | None
    others: dict[str, str]
    low_us: float | None = None
    high_us: float | None = None

    @property
    def title(self) -> str:
        """The problem with `c` in place of numbers."""
        return titled(self.problem)


Piece = tuple[list[Row], list[Row]]
"""Steps before and after that belong together."""


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        InputError: there is no such file, it is no JSON, or the JSON is none of `perf` or `explain`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the report cannot be read: {error.strerror or error}", where=str(path), hint=FROM) from None
    try:
        found = decoded(content, object)
    except NotJSONError as error:
        raise InputError(f"it is no JSON: {error}", where=str(path), hint=FROM) from None
    keys = set(cast("dict[str, object]", found)) if isinstance(found, dict) else set[str]()
    if {"total_us", "steps"} <= keys:
        return _converted(found, Perf, path)
    if {"products", "unfused"} <= keys:
        return _converted(found, Explain, path)
    raise InputError("it is JSON, and no report of perf or explain", where=str(path), hint=FROM)


def _converted(found: object, kind: type[R], path: Path) -> R:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"it is no report that this version knows: {error}", where=str(path), hint=FROM) from None


def compare(before: Report, after: Report, names: tuple[str, str]) -> Difference:
    """Find what changed from one report to the other; `names` are the files that they are from.

    Raises:
        InputError: one is of `perf` and the other of `explain`, or they are too long.
    """
    if type(before) is not type(after):
        verbs = ["perf" if isinstance(r, Perf) else "explain" for r in (before, after)]
        what = f"{names[0]} is of {verbs[0]}, and {names[1]} of {verbs[1]}"
        raise InputError(what, hint="compare two reports of one verb")
    rows = rows_of(before), rows_of(after)
    sides = _side(before, names[0], rows[0]), _side(after, names[1], rows[1])
    noisy = bool(before.noise or after.noise)
    altered, same = _altered(*rows, NOISY_TIE if noisy else TIE)
    outside = _outside(*sides, rows)
    return Difference(
        before=sides[0],
        after=sides[1],
        settings=_settings(before, after),
        ratio=_ratio(*sides),
        altered=sorted([*altered, *outside], key=lambda a: -abs(a.effect_us or 0.0)),
        same=same,
        findings=[
            *_findings("fell back", before.fallback, after.fallback),
            *_findings("unfused", before.unfused, after.unfused),
        ],
        against=_peers(before.against, after.against) if isinstance(before, Perf) and isinstance(after, Perf) else [],
        covered=_covered(*sides, noisy),
    )


def beside(report: Report, name: str, file: str) -> Difference:
    """Compare a report with a contender that it was timed against.

    Raises:
        InputError: the report was not timed against it, or it could not run the program.
    """
    peers = {p.name: p for p in report.against} if isinstance(report, Perf) else {}
    peer = peers.get(name)
    if peer is None:
        there = f"; {file} was timed against {', '.join(peers)}" if peers else ""
        raise InputError(f"there is no file {name!r}{there}", hint=FROM)
    if peer.why is not None or peer.time_us is None:
        raise InputError(f"{name} did not run the program: {peer.why}", where=file)
    ours = msgspec.structs.replace(_side(report, file, rows_of(report)), total_us=peer.own_us)
    theirs = Side(file=name, program=report.program, target=report.target, noise="", total_us=peer.time_us)
    return Difference(before=ours, after=theirs, ratio=peer.ratio)


def rows_of(report: Report) -> list[Row]:
    """The steps of a report in their order, without views. Of `explain`, its groups one after the other, each as often as it
    stands for a step."""
    groups = {i: g for g in report.groups for i in g.steps}
    if isinstance(report, Perf):
        return [
            Row(
                s.name,
                groups[i].name if i in groups else "",
                s.kind,
                s.problem,
                s.candidate,
                s.schedule,
                s.time_us,
                s.limit_us or None,
                {r.candidate: r.why for r in reversed(s.rejected)},
                s.low_us,
                s.high_us,
            )
            for i, s in enumerate(report.steps)
            if s.kind != "view"
        ]
    if groups:
        return [_row_of(groups[i], report) for i in sorted(groups)]
    return [
        Row(
            name,
            p.name,
            p.kind,
            p.problem,
            p.chosen.candidate,
            p.chosen.schedule,
            p.chosen.time_us,
            p.limit_us,
            {r.candidate: r.why for r in reversed(p.rejected)},
        )
        for p in report.products
        for name in p.names
    ]


def _row_of(g: StepGroup, report: Explain) -> Row:
    product = report.products[g.product] if g.product is not None and g.product < len(report.products) else None
    others = {} if product is None else {r.candidate: r.why for r in reversed(product.rejected)}
    return Row(g.name, g.name, g.kind, g.problem, g.candidate, g.schedule, g.median_us, g.limit_us, others)


def _side(report: Report, file: str, rows: Sequence[Row]) -> Side:
    times = [r.time_us for r in rows if r.time_us is not None]
    return Side(
        file=file,
        program=report.program,
        target=report.target,
        noise=report.noise,
        total_us=report.total_us if isinstance(report, Perf) else None,
        steps_us=round(sum(times), 3) if times else None,
        steps=len(rows),
        low_us=report.total_low_us if isinstance(report, Perf) else None,
        high_us=report.total_high_us if isinstance(report, Perf) else None,
    )


def _covered(before: Side, after: Side, noisy: bool) -> str:
    """The sentence why both times may be equal; "" where they are not, or nothing is known."""
    (was, low), (now, high) = sorted(
        ((s.total_us or s.steps_us or 0.0, s) for s in (before, after)), key=lambda known: known[0]
    )
    if not was:
        return ""
    if noisy and now - was <= NOISY_TIE * now:
        return f"no difference: on a busy machine two runs of one program may be {NOISY_TIE:.0%} apart"
    if now - was <= WHOLE_TIE * now:
        return f"no difference: two runs of one program may be {WHOLE_TIE:.0%} apart"
    if low.high_us is None or high.low_us is None or low.high_us < high.low_us:
        return ""
    spread = [f"{us(s.low_us or 0.0)} to {us(s.high_us or 0.0)}" for s in (before, after)]
    return f"no difference: half of the calls before took {spread[0]} µs, half of those after {spread[1]}"


def _ratio(before: Side, after: Side) -> float | None:
    """The time after over that before: of the whole program, or of the steps where that was not timed."""
    was, now = (s.steps_us if s.total_us is None else s.total_us for s in (before, after))
    return round(now / was, 4) if was and now is not None else None


def _altered(before: Sequence[Row], after: Sequence[Row], tie: float) -> tuple[list[Altered], int]:
    """Find the changes, steps that changed alike together; and the number of steps that are as they were."""
    alike: dict[tuple[Hashable, ...], list[Piece]] = {}
    for olds, news in _pieces(before, after):
        key = _what(olds, news), *(tuple((r.kind, r.title, r.candidate) for r in rows) for rows in (olds, news))
        alike.setdefault(key, []).append((olds, news))
    whole = [Counter(r.group for r in rows) for rows in (before, after)]
    found = [_folded(str(what), pieces, whole) for (what, *_), pieces in alike.items()]
    same = [a for a in found if a.what == "time" and (a.covered or _tied(a, tie))]
    altered = [msgspec.structs.replace(a, covered=a.covered or _tied(a, tie)) for a in found if a not in same]
    return altered, sum(a.count for a in same)


def _what(olds: Sequence[Row], news: Sequence[Row]) -> str:
    """The kind of a change: of the time alone, if there is another one at all."""
    if len(olds) != 1 or len(news) != 1 or (olds[0].kind, olds[0].title) != (news[0].kind, news[0].title):
        return "graph"
    if olds[0].candidate != news[0].candidate:
        return "kernel"
    return "schedule" if olds[0].schedule != news[0].schedule else "time"


def _tied(a: Altered, tie: float) -> bool:
    """Tell whether the times before and after may be equal."""
    if a.before_us is None or a.after_us is None:
        return a.before_us == a.after_us
    return abs(a.after_us - a.before_us) <= tie * max(a.before_us, a.after_us)


def _folded(what: str, pieces: Sequence[Piece], whole: Sequence[Counter[str]]) -> Altered:
    sides = [_steps([piece[side] for piece in pieces], whole[side]) for side in range(2)]
    times = [_sum(r.time_us for piece in pieces for r in piece[side]) for side in range(2)]
    limits = [_sum(r.limit_us for piece in pieces for r in piece[side]) for side in range(2)]
    ranges = [_range([r for piece in pieces for r in piece[side]]) for side in range(2)]
    effect = None if times[0] is None or times[1] is None else round(times[1] - times[0], 3)
    return Altered(
        what=what,
        count=len(pieces),
        before=sides[0],
        after=sides[1],
        before_us=times[0],
        after_us=times[1],
        before_limit_us=limits[0],
        after_limit_us=limits[1],
        effect_us=effect,
        why=_why(pieces) if what == "kernel" else _knobs(pieces) if what == "schedule" else [],
        covered=_meet(*ranges),
    )


def _range(rows: Sequence[Row]) -> tuple[float, float] | None:
    """The sums of the quartiles of some steps' times; None where one was not timed."""
    low, high = _sum(r.low_us or r.time_us for r in rows), _sum(r.high_us or r.time_us for r in rows)
    return None if not rows or low is None or high is None else (low, high)


def _meet(before: tuple[float, float] | None, after: tuple[float, float] | None) -> bool:
    """Tell whether two ranges overlap."""
    return before is not None and after is not None and before[0] <= after[1] and after[0] <= before[1]


def _sum(times: Any) -> float | None:
    known = list(times)
    return None if any(t is None for t in known) else round(sum(known), 3)


def _steps(pieces: Sequence[Sequence[Row]], whole: Counter[str]) -> list[AlteredStep]:
    """The steps on one side of a change that occurs in several pieces, those that are alike within a piece together."""
    alike: dict[Hashable, list[int]] = {}
    for i, r in enumerate(pieces[0]):
        alike.setdefault((r.kind, r.title, r.candidate), []).append(i)
    return [_step([piece[i] for piece in pieces for i in places], len(places), whole) for places in alike.values()]


def _step(rows: Sequence[Row], count: int, whole: Counter[str]) -> AlteredStep:
    groups = Counter(r.group for r in rows)
    complete = all(name and count == whole[name] for name, count in groups.items())
    name = ", ".join(groups) if complete else ranged(r.name for r in rows)
    schedules = ", ".join(dict.fromkeys(r.schedule for r in rows))
    return AlteredStep(name, rows[0].kind, rows[0].title, rows[0].candidate, schedules, count)


def _why(pieces: Sequence[Piece]) -> list[str]:
    """The sentences of both reports why the other one's kernel was not taken there."""
    said: dict[str, None] = {}
    for (old,), (new,) in pieces:
        if new.candidate in old.others:
            said[f"before, {new.candidate}: {old.others[new.candidate]}"] = None
        if old.candidate in new.others:
            said[f"after, {old.candidate}: {new.others[old.candidate]}"] = None
    return [ranged(said)] if said else []


def _knobs(pieces: Sequence[Piece]) -> list[str]:
    """The settings that differ."""
    said: dict[str, None] = {}
    for (old,), (new,) in pieces:
        was, now = dict(_KNOB.findall(old.schedule)), dict(_KNOB.findall(new.schedule))
        differing = [f"{k} {was.get(k, 'none')} -> {now.get(k, 'none')}" for k in {**was, **now} if was.get(k) != now.get(k)]
        said[", ".join(differing) or f"{old.schedule} -> {new.schedule}"] = None
    return list(said)


def _pieces(before: Sequence[Row], after: Sequence[Row]) -> list[Piece]:
    """The steps of both sides, each in one piece: pairs that belong together, and what stands between two of them."""
    scores = _scores(before, after)
    pairs = [*_aligned(scores), (len(before), len(after))]
    found: list[Piece] = []
    waiting: list[Piece] = []  # pairs and single steps since the last pair of equal problems
    i = j = 0
    for x, y in pairs:
        olds, news = list(before[i:x]), list(after[j:y])
        i, j = x + 1, y + 1
        if olds or news:
            waiting.append((olds, news))
        end = x == len(before) and y == len(after)
        if not end and before[x].title != after[y].title:
            waiting.append(([before[x]], [after[y]]))
            continue
        found += _settled(waiting)
        waiting = []
        if not end:
            found.append(([before[x]], [after[y]]))
    return found


def _settled(waiting: Sequence[Piece]) -> list[Piece]:
    """Pieces between two pairs that are the same: steps that came or went belong to what the step before them became, else to
    the one behind them."""
    found: list[Piece] = []
    for olds, news in waiting:
        paired = len(olds) == len(news) == 1
        if found and (not paired or not all(found[-1])):
            found[-1] = [*found[-1][0], *olds], [*found[-1][1], *news]
        else:
            found.append((olds, news))
    return found


def _scores(before: Sequence[Row], after: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Score what each step before has in common with each one after: 0 for steps of two kinds.

    Raises:
        InputError: there are too many.
    """
    if len(before) * len(after) > MOST_CELLS:
        raise InputError(f"reports of {len(before):,} and {len(after):,} steps are too long to be compared")
    equal: list[tuple[Callable[[Row], str], int]] = [
        (lambda r: r.title, PROBLEM),
        (lambda r: r.problem, NUMBERS),
        (lambda r: r.name, NAME),
        (lambda r: r.group, GROUP),
    ]
    scores = KIND * np.ones((len(before), len(after)), np.int32)
    for of, points in equal:
        left, right = _numbered([of(r) for r in before], [of(r) for r in after])
        scores += points * ((left[:, None] == right[None, :]) & (left[:, None] > 0))
    left, right = _numbered([r.kind for r in before], [r.kind for r in after])
    return scores * (left[:, None] == right[None, :])


def _numbered(before: Sequence[str], after: Sequence[str]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Texts as numbers, equal ones alike; 0 for none."""
    numbers = {"": 0}
    left, right = ([numbers.setdefault(t, len(numbers)) for t in texts] for texts in (before, after))
    return np.array(left, np.int64), np.array(right, np.int64)


def _aligned(scores: np.ndarray[Any, np.dtype[np.int32]]) -> list[tuple[int, int]]:
    """The pairs, ascending on both sides, whose scores add up to most (Needleman and Wunsch 1970, gaps for nothing)."""
    n, m = scores.shape
    most = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n):
        np.maximum.accumulate(np.maximum(most[i, 1:], most[i, :-1] + scores[i]), out=most[i + 1, 1:])
    found: list[tuple[int, int]] = []
    i, j = n, m
    while i and j:
        if most[i, j] == most[i - 1, j]:
            i -= 1
        elif most[i, j] == most[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((i, j))
    return found[::-1]


def _outside(before: Side, after: Side, rows: Sequence[Sequence[Row]]) -> list[Altered]:
    """The time of a call that no step accounts for, if it changed."""
    left = [None if s.total_us is None or s.steps_us is None else round(s.total_us - s.steps_us, 3) for s in (before, after)]
    was, now = left
    if was is None or now is None or was == now:
        return []
    ranges = [_range_outside(side, steps) for side, steps in zip((before, after), rows, strict=True)]
    covered = _meet(*ranges)
    return [Altered(what="outside", count=1, before_us=was, after_us=now, effect_us=round(now - was, 3), covered=covered)]


def _range_outside(side: Side, steps: Sequence[Row]) -> tuple[float, float] | None:
    """The least and the most time of a call that no step accounts for, by quartiles; None where these are not known."""
    each = _range(steps)
    if each is None or side.low_us is None or side.high_us is None:
        return None
    return side.low_us - each[1], side.high_us - each[0]


def _settings(before: Report, after: Report) -> list[Setting]:
    """Find what else differs between both: the program, the machine, versions."""
    was, now = _made_with(before), _made_with(after)
    return [Setting(k, was.get(k, "none"), now.get(k, "none")) for k in {**was, **now} if was.get(k) != now.get(k)]


def _made_with(report: Report) -> dict[str, str]:
    said = {"program": report.program, "machine": report.target}
    if report.quantized is not None:
        said["quantised"] = report.quantized.scheme
    if isinstance(report, Perf):
        said |= {f"input {i.name}": i.type for i in report.inputs}
    made = report.made
    if made is not None:
        said |= {"Tilewright": made.version, "system": made.system, "threads": str(made.threads), **made.packages}
        said["command"] = made.command
    return said


def _findings(what: str, before: Sequence[Finding], after: Sequence[Finding]) -> list[AlteredFinding]:
    """Findings that one report has and the other has not."""
    counts = [Counter((f.op, f.where, f.why) for f in findings) for findings in (before, after)]
    found: list[AlteredFinding] = []
    for came, more in ((True, counts[1] - counts[0]), (False, counts[0] - counts[1])):
        alike: dict[tuple[str, str], list[str]] = {}
        for op, where, why in more.elements():
            alike.setdefault((op, why), []).append(where)
        found += [AlteredFinding(what, came, op, ranged(places), why, len(places)) for (op, why), places in alike.items()]
    return found


def _peers(before: Sequence[Peer], after: Sequence[Peer]) -> list[AlteredPeer]:
    """The contenders that both reports were timed against."""
    later = {p.name: p for p in after}
    return [
        AlteredPeer(p.name, p.time_us, later[p.name].time_us, p.ratio, later[p.name].ratio) for p in before if p.name in later
    ]
