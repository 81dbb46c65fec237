"""Generated CPU kernels beside every library that does the same product.

    python benchmarks/cpu.py [--shapes] [--rounds 15] [--threads 2] [--only f32] [--generated]
    python benchmarks/cpu.py --product "bf16 1024x1024x1024" --product "s8 16x64x64x64"

Prints, for each product, our time, the fraction of what its instruction reaches on registers alone, the best peer's time and
the ratio. With --shapes, the forty shapes of transformer models and odd sizes instead of the headline products, and the
geometric mean of the ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from contenders import CONTENDERS, Case
from limits import dots, peak_gops
from rounds import compete, ratio

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
def main(shapes: bool, rounds: int, threads: int, only: str, products: tuple[str, ...], generated: bool) -> None:
    """Time the generated CPU kernels beside their peers."""
    me = "generated" if generated else "tilewright"
    names = [me, *(n for n in CONTENDERS if n not in ("generated", "tilewright"))]
    cases: Sequence[Case] = [Case.parse(text) for text in products] or HEADLINES
    if shapes:
        cases = [Case(t, *shape) for t in ("f32", "bf16", "s8") for shape in SHAPES]
    peak = {name: peak_gops(dot, threads) for name, dot in dots().items()}
    out = Console()
    made = Table("product", "ms", "% of ceiling", "best peer", "peer ms", "ratio", "others")
    ratios: dict[str, list[float]] = {}
    for case in cases:
        if only and case.dtype != only:
            continue
        times, _ = compete(names, case, rounds=rounds, threads=threads)
        ours = times.pop(me)
        by_peer = {name: ratio(ours, theirs) for name, theirs in times.items()}
        best = min(by_peer, key=by_peer.__getitem__)
        ratios.setdefault(case.dtype, []).append(by_peer[best])
        mine = statistics.median(ours)
        row = (
            str(case), f"{1e3 * mine:.3f}", f"{100 * case.ops / mine / 1e9 / peak[case.dtype]:.0f}", best,
            f"{1e3 * statistics.median(times[best]):.3f}", f"{by_peer[best]:.2f}",
            ", ".join(f"{n} {1e3 * statistics.median(t):.3f}" for n, t in times.items() if n != best),
        )  # fmt: skip
        made.add_row(*row)
        out.print(" | ".join(row))
    out.print(made)
    for dtype, found in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        out.print(f"{dtype}: geometric mean {mean:.3f}, least {min(found):.3f}, {sum(r < 0.95 for r in found)} below 0.95")


if __name__ == "__main__":
    main()
