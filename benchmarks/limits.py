"""Measure this processor's limits at a number of threads: each dot instruction on registers alone, and reading memory."""

from __future__ import annotations

import click
import torch

from tilewright.candidates.llvm import limits
from tilewright.candidates.llvm.gemm.dots import Dot
from tilewright.candidates.llvm.limits import peak_gops, read_gbps
from tilewright.hardware.detect import detect

READ_BYTES = 1 << 29


def dots() -> dict[str, Dot]:
    """The instructions of the chip at hand, by the type they multiply."""
    return limits.dots(detect("cpu").chip)


@click.command()
@click.option("--threads", default=2, show_default=True)
def main(threads: int) -> None:
    """Print the limits at one thread and at THREADS."""
    for count in sorted({1, threads}):
        for name, dot in dots().items():
            click.echo(f"{count} threads, {dot.instruction:16s} {name:5s} {peak_gops(dot, count):8.1f} Gop/s")
        rate = read_gbps(torch.ones(READ_BYTES, dtype=torch.uint8), count)
        click.echo(f"{count} threads, reading memory        {rate:8.1f} GB/s")


if __name__ == "__main__":
    main()
