"""Mutated files of every kind, in children with limits: a typed error or a result, and no file touched that was not named."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import outcomes
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save
from saved_programs import with_own_digest

import tilewright
from tilewright.dtype import F32
from tilewright.frontends import load
from tilewright.ir.build import input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, gemm
from tilewright.ir.safetensors import TensorFile
from tilewright.ir.text import print_graph
from tilewright.ir.types import TensorType
from tilewright.report.measure.inputs import check_memory, make_feeds, read_npz
from tilewright.schedule.record import read_records

# `make conformance` runs so many of each kind; TILEWRIGHT_CASES=3000 is 21,000.
CASES = int(os.environ.get("TILEWRIGHT_CASES", "150"))


def text_program() -> bytes:
    a, b = input_("a", F32, (4, 8)), input_("b", F32, (8, 6))
    y = map_("tanh", gemm(a, b))
    kept = Node(Call("torch", "aten.cumsum.default", '{"args":[{"tensor":0},1],"kwargs":{}}', (TensorType(F32, (4, 6)),)), y)
    view = '{"args":[{"tensor":0},[2,3],[3,2],1],"kwargs":{}}'
    part = Node(Call("torch", "aten.as_strided.default", view, (TensorType(F32, (2, 3)),)), kept)
    return print_graph(Graph("g", (a, b), (kept, part), ("y", "z"))).encode()


def onnx_program() -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), "w")
    k = numpy_helper.from_array(np.array([2], np.int64), "k")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("TopK", ["m", "k"], ["v", "i"]),
        helper.make_node("Softmax", ["v"], ["y"], axis=-1),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w, k]), opset_imports=[helper.make_opsetid("", 21)])
    return model.SerializeToString()


STABLEHLO = b"""func.func @main(%a: tensor<4x8xf32>, %b: tensor<8x6xf32>) -> tensor<4x6xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>
  %1 = stablehlo.tanh %0 : tensor<4x6xf32>
  %2 = "stablehlo.sort"(%1) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %c = stablehlo.compare LT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
  }) {dimension = 1 : i64, is_stable = true} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %2 : tensor<4x6xf32>
}
"""
HLO = b"""HloModule m
ENTRY main {
  a = f32[4,8] parameter(0)
  b = f32[8,6] parameter(1)
  d = f32[4,6] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = f32[4,6] tanh(d)
}
"""


def npz(folder: Path) -> bytes:
    np.savez_compressed(folder / "seed.npz", a=np.ones((4, 8), np.float32), b=np.ones((8, 6), np.float32))
    return (folder / "seed.npz").read_bytes()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, repeated, moved, or numbers in them replaced by others at the edge."""
    out = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, length = rng.randrange(max(len(out), 1)), rng.choice([1, 1, 2, 4, 8, 32])
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[rng.randrange(max(len(out), 1)) :][:length]
        elif kind == 4:
            digits = [i for i, c in enumerate(out) if 48 <= c <= 57]
            if digits:
                i = rng.choice(digits)
                out[i : i + 1] = rng.choice([b"0", b"-1", b"9", b"4294967296", b"9223372036854775807", b"1e99", b"65"])
        else:
            out = out[:at] if rng.random() < 0.3 else out
    return bytes(out)


def run_program(path: Path) -> None:
    graph = load(path)
    check_memory(graph)
    if sum(t.elements for n in graph.nodes() if isinstance(t := n.type, TensorType)) < 1 << 22:
        evaluate(graph, [f.value for f in make_feeds(graph, seed=0)])  # type: ignore[misc]


def read_tensors(path: Path) -> None:
    file = TensorFile(path)
    for name in file.names:
        assert file.tensor(name).numel() >= 0


def read_inputs(path: Path) -> None:
    a, b = input_("a", F32, (4, 8)), input_("b", F32, (8, 6))
    read_npz(path, Graph("g", (a, b), (gemm(a, b),), ("y",)))


def saved_program(folder: Path) -> bytes:
    x = torch.randn(4, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh())
    tilewright.compile(model.eval(), example_inputs=(x,), budget_s=0, cache=False).save(folder / "program")
    return (folder / "program").read_bytes()


KINDS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], object]]] = {
    "tw": (lambda _: text_program(), run_program),
    "onnx": (lambda _: onnx_program(), run_program),
    "mlir": (lambda _: STABLEHLO, run_program),
    "hlo": (lambda _: HLO, run_program),
    "safetensors": (lambda _: save({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.int8)}), read_tensors),
    "twp": (saved_program, run_program),
    "npz": (npz, read_inputs),
    "json": (lambda _: b'{"tilewright_records": 1, "machine": "x", "records": []}', read_records),
}


@pytest.mark.conformance
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_an_error_or_a_program(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make, use = KINDS[kind]
    seed = make(tmp_path)
    original = tmp_path / f"seed.{kind}"
    original.write_bytes(seed)
    use(original)  # and everything imported that children need
    cases: list[Callable[[], object]] = []
    count = max(CASES // 8, 1) if kind == "hlo" else CASES  # each in a process that its parser may end
    for n in range(count):
        path = tmp_path / f"{n}.{kind}"
        content = mutated(seed, random.Random(f"{kind} {n}"))
        path.write_bytes(with_own_digest(content) if kind == "twp" else content)
        cases.append(partial(use, path))
    code = (sys.prefix, sys.base_prefix, str(Path(tilewright.__file__).parent), "/proc/", "/sys/", "/dev/", "/usr/", "/lib")

    def allowed(path: str, writes: bool) -> bool:
        return not writes and (path.startswith((str(tmp_path), *code)) or Path(path).suffix in (".py", ".pyc"))

    found: dict[str, int] = {}
    wrong: list[str] = []
    for n, outcome in enumerate(outcomes(cases, allowed=allowed)):
        found[outcome.kind] = found.get(outcome.kind, 0) + 1
        if outcome.kind not in ("right", "typed"):
            wrong.append(f"{kind} {n}: {outcome.kind}: {outcome.what}")
    assert not wrong, f"{found}\n" + "\n".join(wrong[:20])
    assert found.get("typed", 0) > count // 20
