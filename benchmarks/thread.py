"""The program of openxla/xla #7117 in both its spellings, through the command line, beside the libraries and XLA itself.

    python benchmarks/thread.py [--rounds 7] [--threads 2]

16 x 1024^3, s8 x s8 -> s8 wrapping, K innermost on both sides, nothing packed beforehand. `tilewright perf FILE` gives a first
figure; then contenders take turns, each in a process of its own, and their results must be equal bit for bit. XLA on the
CPU is among them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rounds import Process, compete, ratio

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = {"s8": "xla_7117_s8.hlo", "s32": "xla_7117_s32_convert.hlo"}
SHAPE = (16, 1024, 1024)


@dataclass(frozen=True)
class Case:
    """The program.

    Attributes:
        spelling: "s8", or "s32" for a dot to s32 and a convert.
    """

    spelling: str


def _data() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    a, b = (torch.randint(-128, 128, SHAPE, dtype=torch.int8) for _ in range(2))
    return a, b


def tilewright(case: Case) -> Callable[[], Any]:
    """The file, compiled and called."""
    from tilewright import compile

    program, (a, b) = compile(EXAMPLES / FILES[case.spelling], budget_s=10.0), _data()
    return lambda: program(a, b)


def torch_int_mm(case: Case) -> Callable[[], Any]:
    """oneDNN through torch: sixteen products to s32, each narrowed."""
    import torch

    a, b = _data()

    def run() -> Any:
        with torch.inference_mode():
            out = torch.empty(SHAPE, dtype=torch.int8)
            for i in range(SHAPE[0]):
                out[i].copy_(torch._int_mm(a[i], b[i].t()))
            return out

    return run


def xla(case: Case) -> Callable[[], Any]:
    """Build the function of JAX that the file was dumped from."""
    import jax
    import jax.numpy as jnp

    a, b = (jnp.asarray(t.numpy()) for t in _data())
    kind = jnp.int8 if case.spelling == "s8" else jnp.int32
    product = jax.jit(lambda x, y: jnp.einsum("bij,bkj->bik", x, y, preferred_element_type=kind).astype(jnp.int8))
    return lambda: product(a, b).block_until_ready()


CONTENDERS = {"torch": torch_int_mm, "xla": xla, "tilewright": tilewright}


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(rounds: int, threads: int) -> None:
    """Time the thread's program; exit 1 if results differ."""
    import numpy as np

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    equal = True
    for spelling, file in FILES.items():
        command = [str(Path(sys.executable).with_name("tilewright")), "perf", str(EXAMPLES / file), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        print(f"{file}: tilewright perf {json.loads(done.stdout)['total_us'] / 1e3:.2f} ms", flush=True)
        processes = [Process("thread", name, threads) for name in CONTENDERS]
        try:
            with tempfile.TemporaryDirectory() as folder:
                results = Path(folder)
                times, refused = compete(
                    processes, Case(spelling), rounds=rounds, warm_s=0.1, timed_s=0.4, results=results, keep=["tilewright"]
                )
                arrays = {n: np.load(results / f"{n}.npy") for n in times}
        finally:
            for process in processes:
                process.stop()
        for name, seconds in times.items():
            same = np.array_equal(arrays[name], arrays["tilewright"])
            equal &= same
            beside = f"{ratio(times['tilewright'], seconds):8.2f}x" if name != "tilewright" else " " * 9
            print(
                f"  {name:12s} {1e3 * statistics.median(seconds):10.2f} ms {beside} {'equal' if same else 'DIFFERENT'}",
                flush=True,
            )
        for name, why in refused.items():
            print(f"  {name}: {why}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
