"""Contenders of the benchmarks of whole models; `rounds.py` runs each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import models  # the examples', not the benchmark of that name

Run = Callable[[], Any]
SEED = 1000
BUDGET_S = 15.0


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        model: a key of `examples/models.py`'s ARCHITECTURES.
        variant: f32, bf16 or int8.
        batch, sequence: its static shape.
        path: the ONNX file; for bf16 the f32 one, whose module and weights are taken.
    """

    model: str
    variant: str
    batch: int
    path: str
    sequence: int = 128

    def __str__(self) -> str:
        return f"{self.model} {self.variant} {self.batch}x{self.sequence}"


def _feeds(case: Case) -> dict[str, Any]:
    return models.random_inputs(case.path, SEED)


def _module(case: Case) -> tuple[Any, tuple[Any, Any]]:
    """The torch module in the case's type, and its inputs."""
    import torch

    made = models.read_parameters(Path(case.path))
    module = models._build_module(made["model"], made["config"], made["seed"], made["sequence"])
    inputs = tuple(torch.from_numpy(v) for v in _feeds(case).values())
    return _First(module.to(torch.bfloat16) if case.variant == "bf16" else module).eval(), inputs


def _First(module: Any) -> Any:  # noqa: N802 - makes a module
    """The module with a tensor for a result, and its inputs in order."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)[0]

    return First()


def tilewright(case: Case) -> Run:
    """The program as compiled, called with torch tensors."""
    import torch

    from tilewright import compile

    if case.variant == "bf16":
        module, inputs = _module(case)
        program = compile(module, example_inputs=inputs, budget_s=BUDGET_S)
    else:
        program = compile(Path(case.path), budget_s=BUDGET_S)
        inputs = tuple(torch.from_numpy(v) for v in _feeds(case).values())
    return lambda: program(*inputs)


def onnxruntime(case: Case) -> Run:
    """ONNX Runtime with all its optimisations on the same file."""
    import onnxruntime as ort

    if case.variant == "bf16":
        raise NotImplementedError("ONNX Runtime has no bf16 products on CPUs")
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = ort.InferenceSession(case.path, options, providers=["CPUExecutionProvider"])
    feeds = _feeds(case)
    return lambda: session.run(None, feeds)


def torch_eager(case: Case) -> Run:
    """The module itself, in inference mode."""
    import torch

    if case.variant == "int8":
        raise NotImplementedError("torch reads no ONNX file")
    module, inputs = _module(case)
    return torch.inference_mode()(lambda: module(*inputs))


def torch_compile(case: Case) -> Run:
    """torch.compile with weights frozen, so that Inductor packs them and fuses into oneDNN; it needs a C++ compiler."""
    import torch
    import torch._inductor.config

    if case.variant == "int8":
        raise NotImplementedError("torch reads no ONNX file")
    torch._dynamo.reset()
    torch._inductor.config.freezing = True
    module, inputs = _module(case)
    made = torch.compile(module, dynamic=False)

    def run() -> object:
        with torch.no_grad():  # freezing looks for no_grad or inference_mode around the first call
            return made(*inputs)

    return run


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "onnxruntime": onnxruntime,
    "torch": torch_eager,
    "torch.compile": torch_compile,
    "tilewright": tilewright,
}
