"""Whole models beside ONNX Runtime and torch: BERT-base and DistilGPT2 in f32, bf16 and int8, sequence 128.

    python benchmarks/models.py [--out models] [--only bert] [--only int8] [--batch 1] [--rounds 5] [--threads 2] [--json FILE]

f32 and int8 are the ONNX files of `examples/models.py`, the same file for ONNX Runtime; torch runs the module that the f32 file
was exported from. bf16 is that module in bf16, compiled through the torch front end. Each contender runs in a process of its
own and they take turns; each one's result is compared with the first's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from model_contenders import CONTENDERS, Case, models
from rounds import Process, compete, ratio

# |result - reference| / |reference|, over all of it: rounding moves codes of int8 by one, and bf16 keeps 8 bits.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "int8": 5e-2}


def differences(results: Path, reference: str, names: list[str]) -> dict[str, float]:
    """|result - reference| / |reference| (Frobenius) by contender, of the files that `compete` wrote."""
    import numpy as np

    want = np.load(results / f"{reference}.npy")
    return {
        n: float(np.linalg.norm(np.load(results / f"{n}.npy").reshape(want.shape) - want) / np.linalg.norm(want)) for n in names
    }


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("models"), help="Where models are kept.")
@click.option("--only", multiple=True, help="A model, a variant, or both: 'bert', 'int8', 'bert int8'; may be repeated.")
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--without", multiple=True, help="A contender that is left out; may be repeated.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Written after each model; continued.")
def main(
    out: Path,
    only: tuple[str, ...],
    batches: tuple[int, ...],
    rounds: int,
    threads: int,
    without: tuple[str, ...],
    file: Path | None,
) -> None:
    """Time whole models beside their peers; exit 1 where results differ by more than their tolerance.

    Models that the file of --json holds already are not timed again.
    """
    held: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    wrong = False
    for model in ("bert", "distilgpt2"):
        for variant in ("f32", "bf16", "int8"):
            if only and not {model, variant, f"{model} {variant}"} & set(only):
                continue
            for batch in batches:
                path = models.write_model(model, "f32" if variant == "bf16" else variant, out, batch=batch, sequence=128)
                case = Case(model, variant, batch, str(path.resolve()))
                if str(case) not in held:
                    held[str(case)] = _measure(case, rounds, threads, without)
                    if file is not None:
                        file.write_text(json.dumps(held))
                print(_line(case, held[str(case)]), flush=True)
                wrong |= any(d > TOLERANCE[variant] for d in held[str(case)]["difference"].values())
    sys.exit(1 if wrong else 0)


def _measure(case: Case, rounds: int, threads: int, without: tuple[str, ...]) -> dict[str, Any]:
    processes = [Process("model_contenders", n, threads) for n in CONTENDERS if n not in without]
    try:
        with tempfile.TemporaryDirectory() as results:
            times, refused = compete(
                processes, case, rounds=rounds, warm_s=0.2, timed_s=0.5, least=1, results=Path(results), keep=["tilewright"]
            )
            names = list(times)
            return {"seconds": times, "refused": refused, "difference": differences(Path(results), names[0], names)}
    finally:
        for process in processes:
            process.stop()


def _line(case: Case, found: dict[str, Any]) -> str:
    times, off = found["seconds"], found["difference"]
    ours = times.get("tilewright")
    parts = [f"{case!s:22s}"]
    for name, seconds in times.items():
        beside = f" ({ratio(ours, seconds):.2f}x)" if ours and name != "tilewright" else ""
        far = " WRONG" if off[name] > TOLERANCE[case.variant] else ""
        parts.append(f"{name} {1e3 * statistics.median(seconds):.1f} ms{beside} off {off[name]:.1e}{far}")
    parts += [f"{name}: {why}" for name, why in found["refused"].items()]
    return " | ".join(parts)


if __name__ == "__main__":
    main()
