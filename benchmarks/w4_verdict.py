"""Measurements by `w4_gpu.py` of a case, and the lines by which all of it is judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TIE = 1.03
EIGHT = ("fp8", "int8")  # peers that round activations to 8 bits


@dataclass
class Row:
    """The times of one case, in microseconds."""

    kind: str
    rows: int
    outs: int
    k: int
    group: int
    ours: dict[str, float] = field(default_factory=dict[str, float])  # by kernel, the first one that a layer takes unmeasured
    theirs: dict[str, float] = field(default_factory=dict[str, float])
    alone: float = math.nan
    whole: float = math.nan  # the quantising of x, too
    error: float = 0.0

    @property
    def us(self) -> float:
        return min(self.ours.values())

    @property
    def paid(self) -> float:
        """The time for someone who has x in f16."""
        return self.us if self.kind == "f16" else self.whole

    def ratio(self, *, eight: bool) -> float:
        """The best peer's time by ours; with or without those that round activations to 8 bits."""
        return min(t for n, t in self.theirs.items() if not n.endswith("bare") and (eight or n not in EIGHT)) / self.paid

    @property
    def bare(self) -> float:
        """The same of products alone."""
        return min((t for n, t in self.theirs.items() if n.endswith("bare")), default=math.nan) / self.us

    @property
    def read_bytes(self) -> float:
        x_bytes = 2.0 if self.kind == "f16" else 1.0
        return self.outs * self.k * (0.5 + 2 / self.group) + self.rows * (x_bytes * self.k + 2.0 * self.outs)

    def __str__(self) -> str:
        best = min(self.ours, key=lambda n: self.ours[n])
        flops = 2.0 * self.rows * self.outs * self.k
        coded = self.kind != "f16"
        parts = [
            f"{self.kind:4s} {self.rows:5d} {self.outs:6d}x{self.k:<6d} ours {self.us:8.2f} alone {self.alone:7.2f}",
            *([f"whole {self.whole:8.2f}"] if coded else []),
            f"first {next(iter(self.ours.values())):8.2f} {self.read_bytes / self.us / 1e6:5.2f} TB/s",
            f"{flops / self.us / 1e6:5.0f} T/s e{self.error:.1e} |",
            *(f"{n} {t:.2f}" for n, t in self.theirs.items()),
            f"| x16 {self.ratio(eight=False):.2f} x8 {self.ratio(eight=True):.2f}",
            *([f"bare {self.bare:.2f}"] if coded else []),
            f"| {best}",
        ]
        return " ".join(parts)


def judged(found: Sequence[Row], read_tbps: float) -> None:
    """The lines by which all of it is judged."""
    for rows in sorted({r.rows for r in found}):
        of = [r for r in found if r.rows == rows]
        compare(f"{rows:5d} rows, best peer with x in 16 bits", of, lambda r: r.ratio(eight=False))
        compare(f"{rows:5d} rows, best peer, 8 bits among them", of, lambda r: r.ratio(eight=True))
        bare = [r for r in of if r.kind != "f16" and not math.isnan(r.bare)]
        compare(f"{rows:5d} rows, products alone, 8-bit x given", bare, lambda r: r.bare)
        first = max(next(iter(r.ours.values())) / r.us for r in of)
        print(f"{'':5s} the kernel that a layer takes unmeasured: at most {first:.2f} times the fastest one's time")
        large = [r for r in of if r.outs * r.k > 100e6]
        if rows <= 16 and large:
            shares = ", ".join(f"{r.outs}x{r.k} {r.read_bytes / r.us / 1e6 / read_tbps:.0%}" for r in large)
            print(f"{'':5s} of the rate of reading ({read_tbps:.2f} TB/s), weights over 50 MB: {shares}")
        if rows >= 1024:
            share = min(r.theirs["cuBLAS"] / r.us for r in of)
            packed = min(
                r.theirs["cuBLAS"] / min((t for n, t in r.ours.items() if n.startswith("hopper")), default=math.inf) for r in of
            )
            print(f"{'':5s} of cuBLAS f16: at least {share:.0%}; without a copy of the weight {packed:.0%}")


def compare(what: str, of: Sequence[Row], ratio: Callable[[Row], float]) -> None:
    """Ratios to a peer in one line: their mean, the worst, and where ours is slower."""
    if not of:
        return
    worst = min(of, key=ratio)
    slower = [f"{r.outs}x{r.k} {ratio(r):.2f}" for r in of if ratio(r) * TIE < 1]
    mean = math.exp(statistics.fmean(math.log(ratio(r)) for r in of))
    print(
        f"{what}: mean {mean:.2f}x, worst {ratio(worst):.2f}x ({worst.outs}x{worst.k});",
        f"slower at {', '.join(slower) or 'none'}, of {len(of)}",
    )
