"""Whole models beside ONNX Runtime and torch: BERT-base and DistilGPT2 in f32, bf16 and int8, sequence 128.

    python benchmarks/models.py [--out models] [--only bert] [--only int8] [--batch 1] [--rounds 5] [--threads 2] [--json FILE]

f32 and int8 are the ONNX files of `examples/models.py`, the same file for ONNX Runtime; torch runs the module that the f32 file
was exported from. bf16 is that module in bf16, compiled through the torch front end. Each contender runs in a process of its
own and they take turns. Every result is compared with the f32 model's, run operator by operator: in an int8 model a code that
rounds the other way changes all layers after it, so two right programs of one file differ from each other as much as from f32.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from model_contenders import CONTENDERS, SEED, Case, models
from rounds import Process, compete, ratio

# |result - reference| / |reference|. The int8 files run operator by operator are 0.057 off, bf16 in torch 0.011.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "int8": 0.08}


def differences(results: Path, path: Path, names: Iterable[str]) -> dict[str, float]:
    """|result - reference| / |reference| (Frobenius) of what `compete` wrote; `path` is the f32 model, the reference."""
    import numpy as np

    want = models.run_model(path, models.random_inputs(path, SEED))
    found = {n: np.load(results / f"{n}.npy").reshape(want.shape) for n in names}
    return {n: float(np.linalg.norm(got - want) / np.linalg.norm(want)) for n, got in found.items()}


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
                float_path = models.write_model(model, "f32", out, batch=batch, sequence=128)
                path = float_path
                if variant == "int8":
                    path = models.write_model(model, variant, out, batch=batch, sequence=128)
                case = Case(model, variant, batch, str(path.resolve()))
                if str(case) not in held:
                    held[str(case)] = _measure(case, float_path, rounds, threads, without)
                    if file is not None:
                        file.write_text(json.dumps(held))
                print(_line(case, held[str(case)]), flush=True)
                wrong |= any(d > TOLERANCE[variant] for d in held[str(case)]["difference"].values())
    sys.exit(1 if wrong else 0)


def _measure(case: Case, float_path: Path, rounds: int, threads: int, without: tuple[str, ...]) -> dict[str, Any]:
    processes = [Process("model_contenders", n, threads) for n in CONTENDERS if n not in without]
    try:
        with tempfile.TemporaryDirectory() as results:
            times, refused = compete(
                processes, case, rounds=rounds, warm_s=0.2, timed_s=0.5, least=1, results=Path(results), keep=["tilewright"]
            )
            return {"seconds": times, "refused": refused, "difference": differences(Path(results), float_path, times)}
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
