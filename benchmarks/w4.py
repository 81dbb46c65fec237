"""4-bit weights with a scale for each group, one token and sixteen, beside the libraries that have a kernel for them.

    python benchmarks/w4.py [--rounds 9] [--threads 2]

Prints for each product the time of one, what of its weight is read a second beside the read loop, its operations beside what
the instruction that multiplies can do, and the best peer's time.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from limits import READ_BYTES, dots, peak_gops, read_gbps
from rounds import Process, compete, ratio
from w4_contenders import CONTENDERS, Case

CASES = tuple(Case(t, m, 3584, 8192, 64, copies) for t in ("f32", "bf16", "a8") for m, copies in ((1, 32), (16, 8)))
# Of the largest result: bf16 results are rounded to 2^-9, and torch adds their products up in its own order. In a8 all quantise
# activations alike, and results differ no more than in f32.
APART = {"f32": 1e-4, "bf16": 2e-2, "a8": 1e-4}


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--only", default="", help="classes, as f32,a8")
def main(rounds: int, threads: int, only: str) -> None:
    """Time products with 4-bit weights beside their peers."""
    made = Table("product", "ms", "GB/s", "of the read loop", "of the peak", "best peer", "peer ms", "ratio", "others")
    loop = read_gbps(torch.ones(READ_BYTES, dtype=torch.uint8), threads)
    peaks = {name: peak_gops(dot, threads) for name, dot in dots().items()}
    processes = [Process("w4_contenders", name, threads) for name in CONTENDERS]
    for case in (c for c in CASES if not only or c.dtype in only.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            times, _ = compete(processes, case, rounds=rounds, keep=["tilewright"], results=Path(folder))
            results = {n: np.load(Path(folder) / f"{n}.npy") for n in times}
        ours, mine = times.pop("tilewright"), results.pop("tilewright")
        for name, theirs in results.items():
            apart = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
            assert apart < APART[case.dtype], f"{case}: {name}'s result is {apart} apart"
        by_peer = {n: ratio(ours, t) for n, t in times.items()}
        best = min(by_peer, key=by_peer.__getitem__)
        ms = {n: 1e3 * statistics.median(t) / case.copies for n, t in {"": ours, **times}.items()}
        rate = case.read_bytes / ms[""] / 1e6
        peak = peaks[{"a8": "s8"}.get(case.dtype, case.dtype)]
        reached = 2 * case.M * case.N * case.K / ms[""] / 1e6 / peak
        others = ", ".join(f"{n} {t:.3f}" for n, t in ms.items() if n not in ("", best))
        made.add_row(
            str(case), f"{ms['']:.3f}", f"{rate:.1f}", f"{100 * rate / loop:.0f} % of {loop:.1f}",
            f"{100 * reached:.0f} % of {peak:.0f}", best, f"{ms[best]:.3f}",
            f"{by_peer[best]:.2f}", others,
        )  # fmt: skip
    for process in processes:
        process.stop()
    Console(width=160).print(made)


if __name__ == "__main__":
    main()
