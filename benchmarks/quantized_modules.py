"""Modules of transformers as whole programs, in their own type and quantised to fp8 on the way, in turns.

    python benchmarks/quantized_modules.py prompt [--tokens 2048] [--layers 4] [--width 4096] [--device cuda] [--budget 20]
    python benchmarks/quantized_modules.py gpt2 [--batch 64] [--tokens 384] [--device cuda] [--budget 45]

"prompt" is a Llama of Llama 3 8B's proportions in bf16 that reads a prompt without a cache: as it is, with scales by tensors,
and by rows. "gpt2" is DistilGPT2 without its head, f32 weights, fp8 and f16. Weights and tokens are random. Times are
milliseconds of a call, many behind each other, the median of rounds; "error" is the largest difference to the module's own
result over the largest.
"""

from __future__ import annotations

import statistics
import time

import click
import torch

import tilewright
from torch_compile import AT_ONCE, model_of, synchronize


class Body(torch.nn.Module):
    """A model as a function of tokens alone."""

    def __init__(self, model: torch.nn.Module, result: str) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(tokens, use_cache=False), self.result)


def module_of(which: str, layers: int, width: int, vocabulary: int, tokens: int, device: str) -> Body:
    if which == "prompt":
        return Body(model_of(layers, width, vocabulary, tokens, torch.bfloat16, device), "logits").eval()
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=6, vocab_size=vocabulary, n_positions=max(tokens, 1024), use_cache=False)
    return Body(GPT2Model(config).to(device), "last_hidden_state").eval()


@click.command()
@click.argument("which", type=click.Choice(["prompt", "gpt2"]))
@click.option("--layers", default=4, show_default=True, help="Of the Llama.")
@click.option("--width", default=4096, show_default=True, help="Of the Llama.")
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--budget", default=20.0, show_default=True, help="Seconds of each compile.")
@click.option("--rounds", default=9, show_default=True)
@torch.no_grad()
def main(
    which: str, layers: int, width: int, vocabulary: int, batch: int, tokens: int, device: str, budget: float, rounds: int
) -> None:
    """Print a line for each way; see the head of this file."""
    torch.manual_seed(0)
    module = module_of(which, layers, width, vocabulary, tokens, device)
    ids = torch.randint(3, vocabulary, (batch, tokens), device=device)
    given = {"example_inputs": (ids,), "device": device, "budget_s": budget}
    half = None if which == "prompt" else "f16"
    programs = {"as it is": tilewright.compile(module, half=half, **given)}
    for rows in ("tensor", "row") if which == "prompt" else ("tensor",):
        how = tilewright.Quantization(tilewright.scheme("fp8", rows=rows), [{"tokens": ids}])
        programs[f"fp8 by {rows}"] = tilewright.compile(module, quantize=how, half=half, **given)
    wanted, times = module(ids).float(), {name: list[float]() for name in programs}
    errors = {name: float((p(ids).float() - wanted).abs().max() / wanted.abs().max()) for name, p in programs.items()}
    for _ in range(rounds):
        for name, program in programs.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(AT_ONCE):
                program(ids)
            synchronize(device)
            times[name].append((time.perf_counter() - began) / AT_ONCE * 1e3)
    plain = statistics.median(times["as it is"])
    for name, each in times.items():
        ms = statistics.median(each)
        print(f"{which:8}{name:16}{ms:9.3f} ms  {plain / ms:5.2f}x  error {errors[name]:.2g}")


if __name__ == "__main__":
    main()
