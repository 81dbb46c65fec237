"""Generated CPU kernels beside every library that does the same product.

    python benchmarks/cpu.py [--shapes] [--quick] [--rounds 15] [--threads 2] [--only f32] [--generated] [--json FILE]
    python benchmarks/cpu.py --product "bf16 1024x1024x1024" --product "s8 16x64x64x64"

Prints, for each product, our time, the fraction of what its instruction reaches on registers alone, the best peer's time and
the ratio. With --shapes, the forty shapes of transformer models and odd sizes instead of the headline products, and the
geometric mean of the ratios.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from contenders import CONTENDERS, Case
from rounds import Process, compete, ratio
from tilewright.candidates.llvm.limits import dots, peak_gops
from tilewright.hardware.detect import detect

HEADLINES = (
    Case("s8", 1024, 1024, 1024, batch=16),
    Case("f32", 1024, 1024, 1024),
    Case("bf16", 1024, 1024, 1024),
    Case("f32", 4096, 3072, 768, epilogue="bias, gelu"),
    Case("bf16", 4096, 3072, 768, epilogue="bias, gelu"),
)
# (M, N, K): decoding and prompts of Llama, BERT and GPT-2 layers, experts of a mixture, odd and small sizes.
SHAPES = (
    (1, 4096, 4096), (1, 11008, 4096), (8, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096),
    (32, 11008, 4096), (32, 4096, 11008), (1, 1024, 4096), (128, 1024, 4096),
    (128, 768, 768), (128, 2304, 768), (128, 3072, 768), (128, 768, 3072), (512, 768, 768), (512, 3072, 768), (1024, 768, 3072),
    (1, 768, 768), (1, 2304, 768), (1, 3072, 768), (1, 50257, 768), (64, 50257, 768),
    (7, 2816, 2048), (19, 1408, 2048), (33, 2048, 1408), (4, 14336, 4096),
    (8, 8, 8), (16, 16, 16), (32, 32, 32), (64, 64, 64), (100, 100, 100), (127, 127, 127), (200, 300, 400), (255, 257, 129),
    (1000, 10, 1000), (10, 1000, 1000), (1000, 1000, 10), (2048, 64, 512), (333, 777, 555), (1536, 1536, 192),
)  # fmt: skip


@click.command()
@click.option("--shapes", is_flag=True, help="The forty shapes instead of the headline products.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--only", default="", help="One type: f32, bf16 or s8.")
@click.option("--product", "products", multiple=True, help="These products: TYPE [BATCHx]MxNxK[ + bias[, gelu]].")
@click.option("--generated", is_flag=True, help="Time the generated kernel even where a compile chooses a library's.")
@click.option("--quick", is_flag=True, help="Three short rounds of every fourth shape: a look, not a verdict.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Written after each product; continued.")
def main(
    shapes: bool,
    rounds: int,
    threads: int,
    only: str,
    products: tuple[str, ...],
    generated: bool,
    quick: bool,
    file: Path | None,
) -> None:
    """Time the generated CPU kernels beside their peers.

    Products that the file of --json holds already are not timed again: a run that was cut short goes on, a whole one prints its
    tables.
    """
    me = "generated" if generated else "tilewright"
    names = [*(n for n in CONTENDERS if n not in ("generated", "tilewright")), me]
    cases: Sequence[Case] = [Case.parse(text) for text in products] or HEADLINES
    if shapes:
        cases = [Case(t, *shape) for t in ("f32", "bf16", "s8") for shape in SHAPES[:: 4 if quick else 1]]
    cases = [c for c in cases if only in ("", c.dtype)]
    held: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    found: dict[str, Any] = held.setdefault("products", {})
    out = Console(width=140) if not sys.stdout.isatty() else Console()
    left = [c for c in cases if str(c) not in found]
    processes = [Process("contenders", name, threads) for name in names] if left else []
    if left:
        known = held.get("ceilings", {})
        units = dots(detect("cpu").chip)
        held["ceilings"] = {name: max(peak_gops(dot, threads), known.get(name, 0.0)) for name, dot in units.items()}
    for i, case in enumerate(left):
        times, refused = compete(
            processes, case, rounds=3 if quick else rounds, warm_s=0.01 if quick else 0.03, timed_s=0.02 if quick else 0.06,
            keep=[me],
        )  # fmt: skip
        found[str(case)] = {"seconds": times, "refused": refused}
        if file is not None:
            file.write_text(json.dumps(held))
        out.print(f"{len(cases) - len(left) + i + 1}/{len(cases)}", " | ".join(_row(case, held, me)), highlight=False)
        if me in refused:
            out.print(f"{me}: {refused[me]}", style="red")
    for process in processes:
        process.stop()
    _report(out, cases, held, me)


def _against(case: Case, held: dict[str, Any], me: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds by contender, and by peer how many times faster we are."""
    times: dict[str, list[float]] = held["products"][str(case)]["seconds"]
    return times, {n: ratio(times[me], t) for n, t in times.items() if n != me} if me in times else {}


def _row(case: Case, held: dict[str, Any], me: str) -> list[str]:
    times, by_peer = _against(case, held, me)
    if not by_peer:
        return [str(case), *["-"] * 6]
    best, mine = min(by_peer, key=by_peer.__getitem__), statistics.median(times[me])
    others = (f"{n} {1e3 * statistics.median(t):.3f}" for n, t in times.items() if n not in (best, me))
    return [
        str(case), f"{1e3 * mine:.3f}", f"{100 * case.ops / mine / 1e9 / held['ceilings'][case.dtype]:.0f}", best,
        f"{1e3 * statistics.median(times[best]):.3f}", f"{by_peer[best]:.2f}", ", ".join(others),
    ]  # fmt: skip


def _report(out: Console, cases: Sequence[Case], held: dict[str, Any], me: str) -> None:
    """The table, and for each type the geometric mean of the ratios to the best peer."""
    made = Table("product", "ms", "% of ceiling", "best peer", "peer ms", "ratio", "others")
    least: dict[str, list[tuple[float, Case]]] = {}
    for case in cases:
        made.add_row(*_row(case, held, me))
        _, by_peer = _against(case, held, me)
        if by_peer:
            least.setdefault(case.dtype, []).append((min(by_peer.values()), case))
    out.print(made)
    for dtype, ratios in least.items():
        mean = math.exp(statistics.fmean(math.log(r) for r, _ in ratios))
        behind = [f"{c.M}x{c.N}x{c.K} {r:.2f}" for r, c in sorted(ratios, key=lambda pair: pair[0]) if r < 0.95]
        out.print(f"{dtype}: geometric mean {mean:.3f} of {len(ratios)}; {len(behind)} below 0.95: {', '.join(behind) or '-'}")


if __name__ == "__main__":
    main()
