"""A decoding step of a Llama of transformers through torch.compile: eager, Inductor, Tilewright.

    python benchmarks/torch_compile.py [--layers 2] [--width 256] [--vocabulary 1000] [--batch 1 --batch 16] [--context 1024]
                                       [--scheme none --scheme w4g64] [--by eager --by inductor --by tilewright]
                                       [--device cpu] [--rounds 30] [--generate 0] [--budget 20] [--json FILE]

Random weights, a static cache that is full up to `--context`, one new token a sequence. A step is a call of the model as
`generate` makes it: Python of the model's own forward, guards and copies included; on a GPU steps follow each other without
waiting, and their time is that of many divided by their number. `--generate N` also times `generate` of N tokens, end to end,
Python of `generate` included. Results are compared with eager's first. Inductor runs with mode="reduce-overhead". Eight layers
of Llama 3 8B's width on a GPU: --layers 8 --width 4096 --vocabulary 32000 --device cuda --dtype bf16.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import tilewright
import tilewright.dynamo

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


def compiled_by(model: Any, by: str, budget_s: float) -> Any:
    """The model as a contender calls it."""
    if by == "eager":
        return model
    if by == "inductor":
        return torch.compile(model, mode="reduce-overhead", dynamic=False)
    options = {"budget_s": budget_s, "background": False}
    return torch.compile(model, backend="tilewright", dynamic=False, options=options)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed_ms(step: Callable[[], object], device: str, rounds: int) -> float:
    """The median over rounds of a step's time in milliseconds."""
    times: list[float] = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            step()
        synchronize(device)
        times.append((time.perf_counter() - began) / AT_ONCE * 1e3)
    return statistics.median(times)


def generated_ms(model: Any, by: str, batch: int, tokens: int, budget_s: float) -> tuple[float, torch.Tensor]:
    """Milliseconds a token of `generate` behind a prompt of 16 tokens, and the tokens."""
    from transformers import CompileConfig

    draw = torch.Generator(model.device).manual_seed(1)
    prompt = torch.randint(3, model.config.vocab_size, (batch, 16), generator=draw, device=model.device)
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "cache_implementation": "static"}
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
@click.option("--rounds", type=POSITIVE, default=30)
@click.option("--generate", "tokens", type=COUNT, default=0, help="tokens; 0: none")
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
    rounds: int,
    tokens: int,
    budget_s: float,
    path: Path | None,
) -> None:
    tilewright.dynamo.register()
    torch.manual_seed(0)
    made = model_of(layers, width, vocabulary, context, DTYPES[dtype], device)
    out, table = (
        Console(),
        Table("weights", "batch", "by", "first call s", "step ms", "generate ms a token", "of eager's logits"),
    )
    rows: list[dict[str, object]] = []
    for scheme in schemes:
        model = made
        if scheme != "none":
            model = copy.deepcopy(made)
            tilewright.quantize_(model, scheme)
        for batch in batches:
            step = stepping(model, batch, context)
            tokens_of_eager: torch.Tensor | None = None
            with torch.no_grad():
                wanted = step().float()
                for by in contenders:
                    torch._dynamo.reset()
                    contender = compiled_by(model, by, budget_s)
                    began = time.perf_counter()
                    for _ in range(4):  # CUDA graphs are captured at the second call, or the third
                        got = step(contender).float().clone()
                    synchronize(device)
                    first_s = time.perf_counter() - began
                    error = float((got - wanted).abs().max() / wanted.abs().max())
                    ms = timed_ms(lambda step=step, contender=contender: step(contender), device, rounds)
                    per_token, same = None, None
                    if tokens:
                        torch._dynamo.reset()
                        model.__dict__.pop("_compiled_call", None)
                        per_token, found = generated_ms(model, by, batch, tokens, budget_s)
                        tokens_of_eager = found if by == "eager" else tokens_of_eager
                        same = None if tokens_of_eager is None else bool(torch.equal(found, tokens_of_eager))
                    row = {"weights": scheme, "batch": batch, "by": by, "first_s": first_s, "step_ms": ms, "error": error}
                    rows.append({**row, "generate_ms": per_token, "same_tokens": same})
                    shown = "" if per_token is None else f"{per_token:.3f}{'' if same else ' (other tokens)'}"
                    table.add_row(scheme, str(batch), by, f"{first_s:.1f}", f"{ms:.3f}", shown, f"{error:.1e}")
                    print(json.dumps(rows[-1]), flush=True)
                    if error > LIMITS[dtype]:
                        out.print(f"{by} is wrong: {error:.2g} of the largest logit")
                        sys.exit(1)
                    if by == "tilewright":
                        for graph in tilewright.dynamo.graphs():
                            said = [(len(p.steps), p.launched) for p in graph.programs]
                            out.print(f"graph {graph.number}, {graph.name}: {graph.why or said}")
    out.print(table)
    if path is not None:
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
