"""Preparing a large model with 4-bit weights, in a first process with an empty cache and in a second one.

    python benchmarks/second_process.py [--layers 32] [--width 4096] [--scheme w4g64] [--device cuda] [--vocabulary 128256]
                                        [--rows 1 --rows 2 …] [--processes 2]

Linear layers of Llama 3 8B's shapes, made on torch's meta device and filled with random numbers: `quantize_`, then
`tilewright.prepare` for all numbers of rows. Each process prints one line of JSON: seconds of each part, how often it verified
kernels, timed them and searched, and how many layers and kernels there are. Caches are in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
POSITIVE = click.IntRange(min=1)


@click.command()
@click.option("--layers", default=32, type=POSITIVE)
@click.option("--width", default=4096, type=POSITIVE)
@click.option("--vocabulary", default=128256, type=click.IntRange(min=0))
@click.option("--scheme", default="w4g64")
@click.option("--device", default="cuda")
@click.option("--rows", default=ROWS, multiple=True, type=POSITIVE)
@click.option("--processes", default=2, type=POSITIVE)
@click.option("--one", is_flag=True, hidden=True)
def main(
    layers: int, width: int, vocabulary: int, scheme: str, device: str, rows: Sequence[int], processes: int, one: bool
) -> None:
    """Print a line of JSON for each process."""
    if one:
        click.echo(json.dumps(measured(layers, width, vocabulary, scheme, device, rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        own = {"TILEWRIGHT_CACHE": str(Path(folder, "tilewright")), "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
        for _ in range(processes):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one"], check=True, env=os.environ | own)


def measured(layers: int, width: int, vocabulary: int, scheme: str, device: str, rows: Sequence[int]) -> dict[str, object]:
    """Seconds and counts of this process."""
    started = time.perf_counter()
    import torch

    import tilewright
    from tilewright.linear.module import Linear
    from tilewright.schedule import bench, search

    done = Counter[str]()

    def count(module: object, name: str) -> None:
        inner = getattr(module, name)

        def counted(*given: object, **named: object) -> object:
            done[name] += 1
            return inner(*given, **named)

        setattr(module, name, counted)

    count(bench, "examine")
    count(bench, "expect")
    count(search._Search, "run")  # pyright: ignore[reportPrivateUsage]

    def synchronize() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    imported = time.perf_counter()
    with torch.device("meta"):
        model = torch.nn.ModuleList(
            torch.nn.Linear(k, n, bias=False)
            for k, n in [
                *[(width, width), (width, width // 4), (width, width // 4), (width, width)] * layers,
                *[(width, width * 7 // 2), (width, width * 7 // 2), (width * 7 // 2, width)] * layers,
                *[(width, vocabulary)] * bool(vocabulary),
            ]
        ).to(torch.bfloat16)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02)
    made = synchronize()
    tilewright.quantize_(model, scheme)
    quantized = synchronize()
    tilewright.prepare(model, rows)
    prepared = synchronize()
    x = torch.randn(rows[0], width, dtype=torch.bfloat16, device=device)
    model[0](x)
    found = [m for m in model.modules() if isinstance(m, Linear)]
    return {
        "import_s": round(imported - started, 2),
        "model_s": round(made - imported, 2),
        "quantize_s": round(quantized - made, 2),
        "prepare_s": round(prepared - quantized, 2),
        "both_s": round(prepared - made, 2),
        "verified": done["examine"],
        "expected": done["expect"],
        "searched": done["run"],
        "layers": len(found),
        "kernels": len(found) * len(rows),
        "candidates": found[0].candidates(),
    }


if __name__ == "__main__":
    main()
