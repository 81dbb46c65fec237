"""The products a fusing matmul scheduler must take whole: matmul, cast, bias, relu or gelu (NVIDIA/Fuser, issues 1743, 1669).

    python examples/nvfuser_linear.py --dtype bf16
    python examples/nvfuser_linear.py --epilogue bias-gelu --layout NN --batch 4

Each is a PyTorch module in f16 or bf16, as one would write it: the product is rounded to the operands' type, then cast, given
its bias, activated. Compiled, it should be one step: one gemm with everything in its epilogue. What is printed for each is
how many steps it became, who does the gemm, the time beside torch's own, and the largest error against float64 in units of
the result type's rounding step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import click
import torch
from torch.utils.benchmark import Timer

import tilewright
from tilewright.errors import TilewrightError

SIZE = (512, 4096, 1024)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("TN", "NN", "TT", "NT")

Epilogue = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPILOGUES: dict[str, Epilogue] = {
    "alone": lambda y, _: y,
    "cast": lambda y, _: y.float(),
    "bias": lambda y, bias: y + bias,
    "relu": lambda y, _: torch.relu(y),
    "bias-relu": lambda y, bias: torch.relu(y + bias),
    "bias-gelu": lambda y, bias: torch.nn.functional.gelu(y + bias),
}


class Linear(torch.nn.Module):
    """epilogue(x @ weight, bias), with x and weight stored as a layout says.

    The layout's letters are BLAS's for column-major operands, as the threads use them: the first says how x is stored (T:
    [M, K], N: [K, M]), the second how the weight is (N: [N, K], as `torch.nn.Linear` keeps it; T: [K, N]).
    """

    def __init__(self, epilogue: str, dtype: torch.dtype, layout: str, n: int, k: int, batch: int) -> None:
        super().__init__()
        self.layout = layout
        self.epilogue = EPILOGUES[epilogue]
        lead = (batch,) if batch else ()
        shape = (*lead, n, k) if layout[1] == "N" else (*lead, k, n)
        self.weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype) * k**-0.5)
        self.bias = torch.nn.Parameter(torch.randn(n, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [*batch, M, K], or [*batch, K, M] where the layout says so, to [*batch, M, N]."""
        a = x if self.layout[0] == "T" else x.mT
        b = self.weight.mT if self.layout[1] == "N" else self.weight
        return self.epilogue(a @ b, self.bias)


def module(
    epilogue: str = "bias-gelu", dtype: str = "bf16", layout: str = "TN", size: tuple[int, int, int] = SIZE, batch: int = 0
) -> torch.nn.Module:
    """One member of the family, with random weights.

    Args:
        epilogue: a key of `EPILOGUES`.
        dtype: "f16" or "bf16".
        layout: one of `LAYOUTS`.
        size: M, N, K: rows, outputs and inputs of the layer.
        batch: a batched product of that many weights; 0 for a plain one.
    """
    return Linear(epilogue, DTYPES[dtype], layout, *size[1:], batch).eval()


def example_inputs(
    dtype: str = "bf16", layout: str = "TN", size: tuple[int, int, int] = SIZE, batch: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random rows to call `module(…)` of the same arguments with."""
    (m, _, k), lead = size, (batch,) if batch else ()
    return (torch.randn((*lead, m, k) if layout[0] == "T" else (*lead, k, m), dtype=DTYPES[dtype]),)


def steps_of_error(given: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest difference, in rounding steps of `dtype` at the largest value."""
    return ((given.double().cpu() - exact).abs().max() / exact.abs().max() / torch.finfo(dtype).eps).item()


def compare(epilogue: str, dtype: str, layout: str, size: tuple[int, int, int], batch: int, device: str) -> str:
    """Compile one member and say in a line what became of it.

    Raises:
        TilewrightError: it cannot be compiled, or the device is not there.
    """
    program, inputs = module(epilogue, dtype, layout, size, batch), example_inputs(dtype, layout, size, batch)
    compiled = tilewright.compile(program, example_inputs=inputs, device=device)
    exact = module(epilogue, dtype, layout, size, batch).double()
    exact.load_state_dict(program.state_dict())
    eager, there = program.to(device), [x.to(device) for x in inputs]
    with torch.inference_mode():
        given, wanted = compiled(*there), exact(*(x.double() for x in inputs))
        assert isinstance(given, torch.Tensor)
        error = steps_of_error(given, wanted, DTYPES[dtype])
        ours, torchs = (
            Timer("f(*x)", globals={"f": f, "x": there}).blocked_autorange(min_run_time=0.2).median * 1e6
            for f in (compiled, eager)
        )
    kernels = ", ".join(s.decision.kernel.candidate for s in compiled.steps if s.decision is not None)
    return (
        f"{dtype:5} {layout} {epilogue:10} steps {len(compiled.steps)}  by {kernels:18} {ours:9.0f} us"
        f"  torch {torchs:9.0f} us  error {error:.2f} steps"
    )


@click.command(help="Compile matmul + cast + bias + relu or gelu, and compare with torch.")
@click.option("--epilogue", type=click.Choice([*EPILOGUES]), help="One member of the family; all by default.")
@click.option("--dtype", type=click.Choice([*DTYPES]), default="bf16", show_default=True)
@click.option("--layout", type=click.Choice([*LAYOUTS]), default="TN", show_default=True)
@click.option("--size", type=(int, int, int), default=SIZE, show_default=True, metavar="M N K")
@click.option("--batch", type=click.IntRange(0), default=0, help="Batched product of that many weights.")
@click.option("--device", default="cpu", show_default=True)
def main(epilogue: str | None, dtype: str, layout: str, size: tuple[int, int, int], batch: int, device: str) -> None:
    """Print one line for each member."""
    chosen: Iterable[str] = EPILOGUES if epilogue is None else (epilogue,)
    try:
        for name in chosen:
            click.echo(compare(name, dtype, layout, size, batch, device))
    except TilewrightError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
