"""Numbers and lists of names as reports write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.report.schema import Traffic

SHOWN = 3  # names of one step, and of steps that are alike
EVERY_OUTPUT = "every output"  # what is compared with what a library of the source's own made of the program
DIGITS = re.compile(r"(\d+)")
# A number that scales, shifts or bounds, and any with a point or an exponent; extents and ranges are neither.
_LITERAL = re.compile(
    r"(?<=[-+*/] )-?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan)(?::\w+)?(?=[ ,;)}]|$)"
    r"|-?\b(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)(?::\w+)?"
)


def us(value: float) -> str:
    """Microseconds: one decimal, thousands separated."""
    return f"{value:,.1f}"


def percent(fraction: float) -> str:
    """A share; two digits that mean something, however small."""
    value = 100 * fraction
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def small(value: float) -> str:
    """An error or bound: three digits, and a bare 0."""
    return "0" if value == 0 else f"{value:.2e}"


def cut(text: str, most: int) -> str:
    """A text's first characters, and a sign where there are more."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def count(n: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listing(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def size_words(size: int) -> str:
    """Bytes in words."""
    for unit, each in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= each:
            return f"{size / each:,.1f} {unit}"
    return count(size, "byte")


def above_words(by_memory: Iterable[bool], limits_noise: str) -> str:
    """The words why steps took less time than their limits; by memory or by arithmetic is what sets each of those.
    `limits_noise` says why limits are not reliable, "" if they are."""
    if limits_noise:
        return "this was measured too low on a busy machine"
    said = {True: "the data stayed in a cache", False: "the kernel beats the library that set the peak"}
    return ", or ".join(said[memory] for memory in sorted(set(by_memory), reverse=True))


def titled(problem: str) -> str:
    """A problem in words, with `c` in place of every number that is no extent."""
    return _LITERAL.sub("c", problem)


def ranged(names: Iterable[str], most: int = SHOWN) -> str:
    """Names that differ in numbers as one with their range: `encoder.layer.0-11.output.dense`; at most so many that differ
    otherwise, of 1 the one that stands for most."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name in dict.fromkeys(names):
        parts = DIGITS.split(name)
        alike.setdefault(tuple(parts[::2]), []).append(parts[1::2])
    found: list[str] = []
    if most == 1:
        text = max(alike, key=lambda t: len(alike[t]))
        alike = {text: alike[text]}
    for text, numbers in alike.items():
        columns = [_range([n[i] for n in numbers]) for i in range(len(text) - 1)]
        found.append("".join(t + c for t, c in zip(text, [*columns, ""], strict=True)))
    return listing(found, SHOWN)


def _range(written: Sequence[str]) -> str:
    if len(set(written)) == 1:
        return written[0]
    distinct = {int(n) for n in written}
    low, high = min(distinct), max(distinct)
    return f"{low}-{high}" if len(distinct) == high - low + 1 else "*"


def travel_words(t: Traffic) -> str:
    """An operation between ranks in a sentence: what it sends, how long that takes, whose part it is."""
    said = [f"{t.operation}: a rank sends {size_words(t.sent_bytes)}"]
    if t.link_us is not None:
        said.append(f"{us(t.link_us)} µs by the links")
    if t.exposed_us is not None and t.hidden_us is not None:
        said.append(f"{us(t.exposed_us)} µs exposed and {us(t.hidden_us)} hidden")
    return f"{', '.join(said)}; {f'a step of its own: {t.why}' if t.why else f'part of {t.step}'}"
