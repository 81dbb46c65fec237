"""Threads that compile at once: modules, graphs, ONNX and StableHLO, each with its own right answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tilewright
import tilewright.tracing
from tilewright.dtype import F32
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm
from tilewright.ir.text import print_graph

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Linear(nn.Module):
    """Another module for each number."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3 + n, bias=n % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x)).cumsum(1)


def of_module(n: int) -> None:
    module = Linear(n).eval()
    given = tilewright.compile(module, example_inputs=(X,), budget_s=0)(X)
    torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given[0], module(X).detach())


def of_exported(n: int) -> None:
    module = Linear(n).eval()
    with tilewright.tracing.TRACING:
        program = torch.export.export(module, (X,))
    given = tilewright.compile(program, budget_s=0)(X)
    torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given[0], module(X).detach())


def of_text(n: int) -> None:
    a, w = input_("a", F32, (5, 8)), input_("w", F32, (8, 3 + n))
    text = print_graph(Graph(f"g{n}", (a, w), (map_("relu", gemm(a, w)),), ("y",)))
    weight = torch.randn(8, 3 + n)
    given = tilewright.compile(text, budget_s=0)(X, weight)
    torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given[0], torch.relu(X @ weight))


def of_onnx(n: int) -> None:
    weight = np.random.default_rng(n).standard_normal((8, 3 + n)).astype(np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 3 + n])
    held = helper.make_tensor("w", TensorProto.FLOAT, weight.shape, weight.tobytes(), raw=True)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [held])
    given = tilewright.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), budget_s=0)(X)
    torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given[0], X @ torch.from_numpy(weight))


def of_stablehlo(n: int) -> None:
    a, b, c = "tensor<5x8xf32>", f"tensor<8x{3 + n}xf32>", f"tensor<5x{3 + n}xf32>"
    text = (
        f"func.func @main(%a: {a}, %b: {b}) -> {c} {{\n"
        f"%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : ({a}, {b}) -> {c}\nreturn %0 : {c}\n}}"
    )
    weight = torch.randn(8, 3 + n)
    given = tilewright.compile(text, budget_s=0)(X, weight)
    torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given[0], X @ weight)


KINDS = (of_module, of_exported, of_text, of_onnx, of_stablehlo)


def together(threads: int, rounds: int) -> list[BaseException]:
    """Errors of so many threads that begin at once and each compile so many programs."""
    start = threading.Barrier(threads)
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        start.wait()
        for n in range(rounds):
            try:
                KINDS[(i + n) % len(KINDS)]((i + 3 * n) % 11)
            except BaseException as error:
                wrong.append(error)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return wrong


def test_threads_compile_at_once_and_torch_export_still_works() -> None:
    assert together(16, 2) == []
    of_module(1)


@pytest.mark.conformance
def test_many_threads_compile_many_programs() -> None:
    assert together(16, 40) == []
    of_module(1)


def test_torchs_stand_in_for_a_device_guard_belongs_to_a_thread_that_lives_on(monkeypatch) -> None:
    made_by: list[threading.Thread] = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: made_by.append(threading.current_thread()))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lock = type(tilewright.tracing.TRACING)()
    for _ in range(2):
        with lock, lock:
            torch._C._ensureCUDADeviceGuardSet()  # as torch does in each trace
    assert [t is not threading.current_thread() and t.is_alive() for t in made_by] == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stand_in_that_torch_cannot_make_keeps_nobody_waiting(monkeypatch) -> None:
    def failing() -> None:
        raise SystemExit  # ends a thread without a word

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", failing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lock = type(tilewright.tracing.TRACING)()
    waiting = threading.Thread(target=lock.__enter__, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
