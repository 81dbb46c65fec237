"""Write BERT-base and DistilGPT2 as ONNX files with random weights, in f32 and quantised.

    python examples/models.py all --variant all --out models --check

The architectures are those of the Hugging Face configurations (`bert-base-cased`: vocabulary 28,996; `distilgpt2`: six
GPT-2 layers); nothing is downloaded. Weights are drawn by transformers' own initialisers from a fixed seed; biases and
normalisation gains, which those leave at 0 and 1, are moved off them, because the exporter drops a zero bias and merges
equal tensors, and the file would have fewer operators than a trained model's.

torch.onnx's dynamo exporter writes f32 with static shapes. `quantized_models.py` makes the quantised variants from it,
after calibrating on random tokens, and says why it does so itself:

    int8              s8 activations without zero point, s8 weights with one scale per output channel
    int8-asymmetric   the same with zero points on activations
    uint8             u8 activations with zero points, s8 weights per output channel
    fp8               e4m3fn, one scale per tensor
    fp8-fnuz          e4m3fnuz, one scale per tensor

Equal parameters give equal bytes; a file that is already there with the same parameters is kept.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from model_files import read_parameters, require, reuse_or_write, run_model, source_digest, store_tensors
from quantized_models import SCHEMES, Array, quantize
from tilewright.errors import InputError, TilewrightError

VARIANTS = ("f32", *SCHEMES)
OPSETS = (20, 23)
CALIBRATION_BATCHES = 2
SOURCES = tuple(Path(__file__).with_name(f"{name}.py") for name in ("models", "quantized_models", "model_files"))


@dataclass(frozen=True)
class Architecture:
    """A transformers model.

    Attributes:
        config_class, model_class: names in the transformers package.
        config: what differs from the config class's defaults.
        options: keyword arguments of the model class.
        layers_key, positions_key: what the config calls the number of layers and the longest sequence.
        output: name of the one output.
    """

    config_class: str
    model_class: str
    config: Mapping[str, object]
    options: Mapping[str, object]
    layers_key: str
    positions_key: str
    output: str


ARCHITECTURES = {
    "bert": Architecture(
        config_class="BertConfig",
        model_class="BertModel",
        config={"vocab_size": 28996},
        options={"add_pooling_layer": False},
        layers_key="num_hidden_layers",
        positions_key="max_position_embeddings",
        output="last_hidden_state",
    ),
    "distilgpt2": Architecture(
        config_class="GPT2Config",
        model_class="GPT2LMHeadModel",
        config={"vocab_size": 50257, "n_layer": 6, "use_cache": False},
        options={},
        layers_key="n_layer",
        positions_key="n_positions",
        output="logits",
    ),
}


def write_model(
    name: str,
    variant: str,
    out_dir: str | Path,
    *,
    batch: int = 1,
    sequence: int = 128,
    opset: int = 20,
    layers: int | None = None,
    seed: int = 0,
    config: Mapping[str, int] | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Path:
    """Write one model unless it is there already, and return its path: `out_dir/<label>/<name>-<variant>.onnx`.

    The model takes `input_ids` and `attention_mask`, s64[batch, sequence], and gives `last_hidden_state`
    f32[batch, sequence, hidden] (bert) or `logits` f32[batch, sequence, vocabulary] (distilgpt2). A quantised variant is
    made from the f32 file, which is written too.

    Args:
        name: a key of `ARCHITECTURES`.
        variant: one of `VARIANTS`.
        out_dir: made if missing; each model gets a folder in it.
        batch, sequence: the static shape.
        opset: 20 spells attention out; 23 keeps it as one `Attention`.
        layers: number of layers; None is the whole model.
        seed: of the weights and of the calibration tokens.
        config: further changes to the transformers config, such as `{"vocab_size": 97}`.
        on_step: told what happens next, in a few words; not called where the file is there already.

    Raises:
        InputError: an unknown name, variant or opset, or a size out of range.
        MissingDependencyError: onnx, onnxruntime, onnxscript or transformers is not installed.
    """
    _check_arguments(name, variant, opset, {"batch": batch, "sequence": sequence, "layers": layers}, seed)
    architecture = ARCHITECTURES[name]
    changes = dict(config or {}) | ({} if layers is None else {architecture.layers_key: layers})
    packages = ("torch", "transformers", "onnxscript", "onnx", *(("onnxruntime",) if variant != "f32" else ()))
    parameters = {
        "model": name,
        "variant": variant,
        "batch": batch,
        "sequence": sequence,
        "opset": opset,
        "config": changes,
        "seed": seed,
        "versions": {package: require(package).__version__ for package in packages},
        "source": source_digest(SOURCES),
    }
    marks = [f"b{batch}", f"s{sequence}", f"opset{opset}", *(f"{k}{v}" for k, v in sorted(changes.items())), f"seed{seed}"]
    path = Path(out_dir) / "-".join([name, variant, *marks]) / f"{name}-{variant}.onnx"
    tell = on_step or (lambda step: None)

    def build_float(folder: Path) -> Any:
        tell("building")
        model = _build_module(name, changes, seed, sequence)
        tell("exporting")
        return _export(model, architecture.output, folder / path.name, batch, sequence, opset)

    def build_quantized(folder: Path) -> Any:
        sizes: dict[str, Any] = {
            "batch": batch,
            "sequence": sequence,
            "opset": opset,
            "layers": layers,
            "seed": seed,
            "config": config,
        }
        source = write_model(name, "f32", out_dir, **sizes, on_step=lambda step: tell(f"{step} f32"))
        tell("calibrating and quantising")
        feeds = [random_inputs(source, seed + i) for i in range(CALIBRATION_BATCHES)]
        model = quantize(source, SCHEMES[variant], feeds)
        tell("storing")
        store_tensors(model, folder, f"{path.name}.data")
        return model

    build = build_float if variant == "f32" else build_quantized
    return reuse_or_write(path, parameters, build)


def random_inputs(path: str | Path, seed: int) -> dict[str, Array]:
    """Inputs for a written model: uniform token ids, and a mask that hides the end of every sequence but the first."""
    made = read_parameters(Path(path))
    batch, sequence = made["batch"], made["sequence"]
    vocabulary = _config(made["model"], made["config"])["vocab_size"]
    generator = np.random.default_rng(seed)
    lengths = np.concatenate([[sequence], generator.integers(sequence // 2 + 1, sequence + 1, batch - 1)])
    return {
        "input_ids": generator.integers(0, vocabulary, (batch, sequence)),
        "attention_mask": (np.arange(sequence) < lengths[:, None]).astype(np.int64),
    }


def relative_error(path: str | Path, reference: str | Path, *, seed: int = 1000) -> float:
    """|model - reference| / |reference| (Frobenius) on tokens that calibration did not see.

    Raises:
        InputError: the model's result is not finite.
    """
    feeds = random_inputs(path, seed)
    got, want = run_model(path, feeds), run_model(reference, feeds)
    if not np.isfinite(got).all():
        raise InputError("the model's result is not finite", where=str(path))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def torch_difference(path: str | Path) -> float:
    """The largest |f32 model - the torch module it was exported from| on random tokens."""
    import torch

    made = read_parameters(Path(path))
    feeds = random_inputs(path, seed=1000)
    module = _build_module(made["model"], made["config"], made["seed"], made["sequence"])
    with torch.no_grad():
        want = module(**{key: torch.from_numpy(value) for key, value in feeds.items()})[0].numpy()
    return float(np.abs(run_model(path, feeds) - want).max())


def _config(name: str, changes: Mapping[str, int]) -> dict[str, Any]:
    return {**ARCHITECTURES[name].config, **changes}


def _check_arguments(name: str, variant: str, opset: int, sizes: Mapping[str, int | None], seed: int) -> None:
    for what, value, known in (("model", name, ARCHITECTURES), ("variant", variant, VARIANTS), ("opset", opset, OPSETS)):
        if value not in known:
            raise InputError(f"unknown {what} {value!r}", hint=f"one of {', '.join(map(str, known))}")
    for what, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"{what} is {size}", hint="a number from 1 up")
    if seed < 0:
        raise InputError(f"seed is {seed}", hint="a number from 0 up")


def _build_module(name: str, changes: Mapping[str, int], seed: int, sequence: int) -> Any:
    """The torch module in evaluation mode, its weights drawn from `seed` without touching torch's own generator."""
    import torch

    transformers, architecture = require("transformers"), ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        config = getattr(transformers, architecture.config_class)(**_config(name, changes))
        longest = getattr(config, architecture.positions_key)
        if sequence > longest:
            raise InputError(f"sequence is {sequence}, and the model has positions for {longest}")
        model = getattr(transformers, architecture.model_class)(config, **architecture.options).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.05 * torch.randn_like(parameter)
    return model


def _export(model: Any, output: str, path: Path, batch: int, sequence: int, opset: int) -> Any:
    """Export to `path` with the weights beside it; the graph as a ModelProto that refers to them."""
    import torch

    onnx = require("onnx")
    shape = (batch, sequence)
    feeds = {"input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    with torch.no_grad(), _quiet():
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=feeds,
            dynamo=True,
            opset_version=opset,
            external_data=True,
            input_names=list(feeds),
            output_names=[output],
            verbose=False,
        )
    proto = onnx.load(path, load_external_data=False)
    # The exporter notes stack traces, which hold this machine's paths. Of its notes, the module path alone is kept.
    graph = proto.graph
    for item in (proto, graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
    for node in graph.node:
        namespace = [entry for entry in node.metadata_props if entry.key == "namespace"]
        del node.metadata_props[:]
        node.metadata_props.extend(namespace)
    return proto


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Drop the exporter's warnings, logs and prints; its exceptions still say what went wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@click.command(help="Write BERT-base and DistilGPT2 as ONNX files with random weights.")
@click.argument("name", type=click.Choice([*ARCHITECTURES, "all"]), default="all")
@click.option("--variant", type=click.Choice([*VARIANTS, "all"]), multiple=True, default=["f32"], help="May be repeated.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--sequence", type=click.IntRange(1), default=128, show_default=True)
@click.option("--opset", type=click.Choice([str(opset) for opset in OPSETS]), default="20", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the whole model has.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("models"), show_default=True)
@click.option("--check", is_flag=True, help="Run each file with onnxruntime and print its error against f32.")
def main(
    name: str,
    variant: tuple[str, ...],
    batch: int,
    sequence: int,
    opset: str,
    layers: int | None,
    seed: int,
    out: Path,
    check: bool,
) -> None:
    """Write the models asked for and print one line for each."""
    from rich.console import Console

    console = Console(stderr=True)
    sizes: dict[str, Any] = {"batch": batch, "sequence": sequence, "opset": int(opset), "layers": layers, "seed": seed}
    try:
        for each in ARCHITECTURES if name == "all" else [name]:
            for kind in VARIANTS if "all" in variant else dict.fromkeys(variant):
                with _steps(console, f"{each} {kind}") as (tell, told):
                    start = time.perf_counter()
                    path = write_model(each, kind, out, **sizes, on_step=tell)
                    done = f"written in {time.perf_counter() - start:.1f} s" if told else "already there"
                    size = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
                    line = f"{path}  {size:.0f} MB  {done}"
                    if check:
                        tell("checking")
                        line += f"  {_describe_check(path, each, kind, out, sizes)}"
                click.echo(line)
    except (TilewrightError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


def _describe_check(path: Path, name: str, variant: str, out: Path, sizes: Mapping[str, Any]) -> str:
    require("onnx").checker.check_model(str(path), full_check=True)
    if variant != "f32":
        return f"relative error {relative_error(path, write_model(name, 'f32', out, **sizes)):.2%}"
    return f"largest difference from torch {torch_difference(path):.1e}"


@contextlib.contextmanager
def _steps(console: Any, label: str) -> Generator[tuple[Callable[[str], None], list[str]]]:
    """A spinner on a terminal that says what is being done to `label`; the steps told so far."""
    told: list[str] = []
    with console.status(label) if console.is_terminal else contextlib.nullcontext() as status:

        def tell(step: str) -> None:
            told.append(step)
            if status is not None:
                status.update(f"{label}: {step}")

        yield tell, told


if __name__ == "__main__":
    main()
