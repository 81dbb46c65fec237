"""A Llama of transformers through torch.compile by eager, Inductor and Tilewright: decoding, generating, prompts of any length.

    python benchmarks/torch_compile.py [--layers 2] [--width 256] [--vocabulary 1000] [--batch 1 --batch 16] [--context 1024]
                                       [--scheme none --scheme w4g64] [--by eager --by inductor --by tilewright]
                                       [--device cpu] [--threads 1] [--rounds 30] [--generate 0] [--lengths 0] [--prompt 0]
                                       [--budget 20] [--json FILE]

Random weights, a static cache that is full up to `--context`, one new token a sequence. A step is a call of the model as
`generate` makes it: Python of the model's own forward, guards and copies included; on a GPU steps follow each other without
waiting, and their time is that of many divided by their number. Contenders are called in turns; a time is the median of rounds.
Results are compared with eager's first. Inductor runs with mode="reduce-overhead".

`--generate N` also times `generate` of N tokens, end to end, Python of `generate` included, and that by `decode` of
tilewright.integrations.transformers. Where a contender's tokens are not
eager's, `gap` says by how much eager preferred its own at the first difference, over the largest logit: less than the error
means that rounding decided. `--prompt N` takes a prompt of N tokens without a cache in place of the decoding step. `--lengths
N` calls the model on a sequence of each of N lengths below `--context`, drawn by their logarithms, with `dynamic=True`: the
seconds of the first two passes over all of them, compiling included, and the mean time of a call in later passes.

Eight layers of Llama 3 8B's width on a GPU: --layers 8 --width 4096 --vocabulary 32000 --device cuda --dtype bf16.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import tilewright
import tilewright.dynamo
from tilewright.integrations.transformers import decode

COUNT, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
BY = ("eager", "inductor", "tilewright")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LIMITS = {"f32": 1e-4, "bf16": 5e-2}  # of the largest logit
AT_ONCE = 20  # steps between two looks at the clock


def model_of(layers: int, width: int, vocabulary: int, context: int, dtype: torch.dtype, device: str) -> Any:
    """A Llama of Llama 3 8B's proportions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(4, width // 128)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=2 * context,
        rope_theta=500_000.0,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def stepping(model: Any, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """A function that makes one decoding step behind `context` - 1 tokens: logits [batch, 1, vocabulary]."""
    from transformers import StaticCache

    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=context)
    draw = torch.Generator(device).manual_seed(0)
    before = torch.randint(3, model.config.vocab_size, (batch, context - 1), generator=draw, device=device)
    with torch.no_grad():
        model(before, past_key_values=cache, use_cache=True)
    token = before[:, -1:].clone()
    counters = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]
    at = torch.full((batch, 1), context - 1, device=device)

    def step(by: Any = model) -> torch.Tensor:
        for counter in counters:  # always the last position
            counter.fill_(context - 1)
        return by(token, position_ids=at, past_key_values=cache, use_cache=True).logits

    return step


def reading(model: Any, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """A function that reads a prompt without a cache: logits [batch, tokens, vocabulary]."""
    draw = torch.Generator(model.device).manual_seed(0)
    prompt = torch.randint(3, model.config.vocab_size, (batch, tokens), generator=draw, device=model.device)

    def step(by: Any = model) -> torch.Tensor:
        return by(prompt, use_cache=False).logits

    return step


def compiled_by(model: Any, by: str, budget_s: float, *, dynamic: bool = False) -> Any:
    """The model as a contender calls it."""
    if by == "eager":
        return model
    if by == "inductor":
        return torch.compile(model, mode=None if dynamic else "reduce-overhead", dynamic=dynamic)
    options = {"budget_s": budget_s, "background": False}
    return torch.compile(model, backend="tilewright", dynamic=dynamic, options=options)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed_ms(steps: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """The median over rounds of each step's time in milliseconds, by contender; they take turns."""
    times: dict[str, list[float]] = {by: [] for by in steps}
    for _ in range(rounds):
        for by, step in steps.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(AT_ONCE):
                step()
            synchronize(device)
            times[by].append((time.perf_counter() - began) / AT_ONCE * 1e3)
    return {by: statistics.median(found) for by, found in times.items()}


def any_length(
    model: Any, contenders: Sequence[str], count: int, context: int, budget_s: float, rounds: int
) -> dict[str, dict[str, float]]:
    """Measure for each contender seconds of the first pass over prompts of `count` lengths, of the second, milliseconds of a
    later call, and the largest error of a logit over the largest."""
    draw, device = random.Random(0), model.device
    lengths = [min(round(2 * (context / 2) ** draw.random()), context - 1) for _ in range(count)]
    prompts = [torch.randint(3, model.config.vocab_size, (1, n), device=device) for n in lengths]
    torch._dynamo.reset()
    found: dict[str, dict[str, float]] = {}
    wanted = [model(p, use_cache=False).logits.float() for p in prompts]
    calls = {by: compiled_by(model, by, budget_s, dynamic=True) for by in contenders}
    for by, call in calls.items():
        passes, error = list[float](), 0.0
        for _ in range(2):
            began = time.perf_counter()
            for p, w in zip(prompts, wanted, strict=True):
                error = max(error, float((call(p, use_cache=False).logits.float() - w).abs().max() / w.abs().max()))
            synchronize(str(device))
            passes.append(time.perf_counter() - began)
        found[by] = {"first_s": passes[0], "second_s": passes[1], "error": error}
    times: dict[str, list[float]] = {by: [] for by in calls}
    for _ in range(rounds):
        for by, call in calls.items():
            began = time.perf_counter()
            for p in prompts:
                call(p, use_cache=False)
            synchronize(str(device))
            times[by].append((time.perf_counter() - began) / count * 1e3)
    for by, measured in times.items():
        found[by]["call_ms"] = statistics.median(measured)
    return found


def generated_ms(
    model: Any, by: str, batch: int, tokens: int, budget_s: float, custom: Callable[..., object] | None = None
) -> tuple[float, torch.Tensor]:
    """Milliseconds a token of `generate` behind a prompt of 16 tokens, and the tokens."""
    from transformers import CompileConfig

    draw = torch.Generator(model.device).manual_seed(1)
    prompt = torch.randint(3, model.config.vocab_size, (batch, 16), generator=draw, device=model.device)
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "cache_implementation": "static"}
    given["custom_generate"] = custom
    if by == "eager":
        given["disable_compile"] = True
    else:
        mode, options = ("reduce-overhead", None) if by == "inductor" else (None, {"budget_s": budget_s, "background": False})
        config = CompileConfig(backend=by, mode=mode, options=options)
        config._compile_all_devices = True  # on a CPU, too
        given["compile_config"] = config
    for _ in range(3):
        synchronize(str(model.device))
        began = time.perf_counter()
        found = model.generate(prompt, **given)
        synchronize(str(model.device))
        took = time.perf_counter() - began
    return took / tokens * 1e3, found


def gap_of(model: Any, tokens: torch.Tensor, of_eager: torch.Tensor) -> float:
    """The largest gap in eager's logits, over the largest logit, between its own token and another's at the first difference of
    each sequence; 0 if there is none."""
    gap = 0.0
    for other, own in zip(tokens, of_eager, strict=True):
        differ = (other != own).nonzero()
        if len(differ):
            at = int(differ[0])
            logits = model(own[None, :at], use_cache=False).logits[0, -1].float()
            gap = max(gap, float((logits[own[at]] - logits[other[at]]) / logits.abs().max()))
    return gap


@click.command()
@click.option("--layers", type=POSITIVE, default=2)
@click.option("--width", type=POSITIVE, default=256, help="a multiple of 16")
@click.option("--vocabulary", type=POSITIVE, default=1000)
@click.option("--batch", "batches", type=POSITIVE, multiple=True, default=(1, 16))
@click.option("--context", type=POSITIVE, default=1024)
@click.option("--scheme", "schemes", multiple=True, default=("none", "w4g64"))
@click.option("--by", "contenders", type=click.Choice(BY), multiple=True, default=BY)
@click.option("--dtype", type=click.Choice([*DTYPES]), default="f32")
@click.option("--device", default="cpu")
@click.option("--threads", type=POSITIVE, default=1)
@click.option("--rounds", type=POSITIVE, default=30)
@click.option("--generate", "tokens", type=COUNT, default=0, help="tokens; 0: none")
@click.option("--lengths", type=COUNT, default=0, help="of prompts; 0: none")
@click.option("--prompt", type=COUNT, default=0, help="tokens; 0: a decoding step instead")
@click.option("--budget", "budget_s", type=float, default=20.0, help="seconds of search for each program")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    layers: int,
    width: int,
    vocabulary: int,
    batches: tuple[int, ...],
    context: int,
    schemes: tuple[str, ...],
    contenders: tuple[str, ...],
    dtype: str,
    device: str,
    threads: int,
    rounds: int,
    tokens: int,
    lengths: int,
    prompt: int,
    budget_s: float,
    path: Path | None,
) -> None:
    """Print and keep the times of each contender."""
    tilewright.dynamo.register()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    made = model_of(layers, width, vocabulary, context, DTYPES[dtype], device)
    rows: list[dict[str, object]] = []
    steps = Table("weights", "batch", "by", "first calls s", "step ms", "generate ms a token", "error / largest logit")
    prompts = Table("weights", "by", "first pass s", "second pass s", "call ms", "error / largest logit")
    for scheme in schemes:
        model = made
        if scheme != "none":
            model = copy.deepcopy(made)
            tilewright.quantize_(model, scheme)
        with torch.no_grad():
            for batch in batches:
                for row in decoding(model, batch, context, contenders, device, rounds, tokens, prompt, budget_s):
                    rows.append({"weights": scheme, **row})
                    told = "" if row["generate_ms"] is None else f"{row['generate_ms']:.3f}"
                    told += f" (other tokens, gap {row['gap']:.0e})" if row["same_tokens"] is False else ""
                    told += "" if row["decode_ms"] is None else f"; {row['decode_ms']:.3f} by decode"
                    numbers = f"{row['first_s']:.1f}", f"{row['step_ms']:.3f}", told, f"{row['error']:.1e}"
                    steps.add_row(scheme, str(batch), str(row["by"]), *numbers)
                    seen(rows[-1], LIMITS[dtype])
            if lengths:
                for by, row in any_length(model, contenders, lengths, context, budget_s, rounds).items():
                    rows.append({"weights": scheme, "by": by, "lengths": lengths, **row})
                    numbers = f"{row['first_s']:.1f}", f"{row['second_s']:.1f}", f"{row['call_ms']:.3f}", f"{row['error']:.1e}"
                    prompts.add_row(scheme, by, *numbers)
                    seen(rows[-1], LIMITS[dtype])
    out = Console(width=120)
    out.print(steps)
    if lengths:
        out.print(prompts)
    for graph in tilewright.dynamo.graphs():
        said = graph.why or f"read {graph.compiled} times, {len(graph.programs)} programs {graph.concrete or ''}"
        out.print(f"graph {graph.number}, {graph.name}: {said}")
    if path is not None:
        path.write_text(json.dumps(rows, indent=1))


def decoding(
    model: Any,
    batch: int,
    context: int,
    contenders: Sequence[str],
    device: str,
    rounds: int,
    tokens: int,
    prompt: int,
    budget_s: float,
) -> list[dict[str, Any]]:
    """A row for each contender: its first calls, a step, `generate`, and its error."""
    torch._dynamo.reset()
    step = reading(model, batch, prompt) if prompt else stepping(model, batch, context)
    wanted = step().float().clone()
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, dict[str, Any]] = {}
    for by in contenders:
        calls[by] = partial(step, compiled_by(model, by, budget_s))
        began, got = time.perf_counter(), wanted
        for _ in range(4):  # CUDA graphs are captured at the second call, or the third
            got = calls[by]().float().clone()
        synchronize(device)
        error = float((got - wanted).abs().max() / wanted.abs().max())
        found[by] = {"batch": batch, "by": by, "first_s": time.perf_counter() - began, "error": error}
    for by, ms in timed_ms(calls, device, rounds).items():
        found[by] |= {"step_ms": ms, "generate_ms": None, "decode_ms": None, "same_tokens": None, "gap": None}
    of_eager: torch.Tensor | None = None
    for by in contenders if tokens else ():
        torch._dynamo.reset()
        model.__dict__.pop("_compiled_call", None)
        found[by]["generate_ms"], generated = generated_ms(model, by, batch, tokens, budget_s)
        of_eager = generated if by == "eager" else of_eager
        if by == "tilewright":
            decoded_ms, decoded = generated_ms(model, by, batch, tokens, budget_s, decode)
            assert torch.equal(decoded, generated)
            found[by]["decode_ms"] = decoded_ms
        if of_eager is not None:
            found[by]["same_tokens"] = bool(torch.equal(generated, of_eager))
            found[by]["gap"] = gap_of(model, generated, of_eager)
    return [*found.values()]


def seen(row: Mapping[str, Any], limit: float) -> None:
    """Print a row; end the program where results are wrong."""
    print(json.dumps(row), flush=True)
    if row["error"] > limit:
        print(f"{row['by']} is wrong: {row['error']:.2g} of the largest logit")
        sys.exit(1)


if __name__ == "__main__":
    main()
