"""Contenders of the benchmark of 4-bit weights; `rounds.py` runs each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """out[M, N] = a[M, K] @ w[N, K]^T, w 4-bit codes with a scale for each `group` along K; several weights in turn.

    Attributes:
        dtype: accuracy class: f32 or bf16 activations, scales and result; a8 for f32 that may be quantised to 8 bits by group.
        M, N, K, group: extents.
        copies: weights that a call of the contender multiplies by, one after another, so that none is left in a cache.
    """

    dtype: str
    M: int
    N: int
    K: int
    group: int
    copies: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.M}x{self.N}x{self.K} group {self.group}"

    @property
    def read_bytes(self) -> int:
        """Bytes of one weight: codes, and scales of 4 bytes."""
        return self.N * self.K // 2 + self.N * self.K // self.group * 4


def _data(case: Case) -> tuple[Any, Any, Any]:
    """Activations, codes 0 to 15 (s32[N, K]) off by 8, and scales f32[N, K / group]."""
    import torch

    torch.manual_seed(0)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "a8": torch.float32}[case.dtype]
    codes = torch.randint(0, 16, (case.N, case.K), dtype=torch.int32)
    return torch.randn(case.M, case.K).to(kind), codes, torch.rand(case.N, case.K // case.group) / 50 + 0.001


def _all(runs: list[Run]) -> Run:
    def run() -> Any:
        for each in runs:
            result = each()
        return result

    return run


def tilewright(case: Case) -> Run:
    """The kernel that a compile chooses for constant weights."""
    from tilewright.compiler import compile, optimise
    from tilewright.hardware.detect import detect
    from tilewright.ir.notation import parse
    from tilewright.schedule.problem import Problem, problem_of
    from tilewright.schedule.search import search

    a, codes, scales = _data(case)
    if case.dtype == "a8":  # the file as ONNX Runtime has it, quantising included
        program = compile(_model(case), budget_s=10.0)
        return lambda: program(*[a] * case.copies)[-1]
    line = f"{case.dtype}[{case.M},{case.K}] @ s4[{case.N},{case.K}]^T group={case.group} -> {case.dtype}"
    # In bf16 the weights stay as exact as codes and scales are: more than any peer keeps.
    problem = problem_of(optimise(parse(line), excess_precision=True).outputs[0])
    assert isinstance(problem, Problem)
    problem = Problem(problem.op, problem.types, (False, True, True))
    weights = {1: (codes - 8).to(problem.types[1].dtype.to_torch()), 2: scales.to(a.dtype)}
    decision = search(problem, detect("cpu"), budget_s=0.5, weights=weights)
    runs = [decision.kernel.prepare(weights) for _ in range(case.copies)]
    return _all([lambda run=run: run([a, weights[1], weights[2]])[0] for run in runs])


def torch_int4pack(case: Case) -> Run:
    """torch's packed 4-bit linear."""
    import torch

    if case.dtype == "a8":
        raise NotImplementedError("it multiplies by floats")
    a, codes, scales = _data(case)
    ops = torch.ops.aten
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], -1).to(a.dtype).contiguous()
    packed = [ops._convert_weight_to_int4pack_for_cpu(codes, 1).clone() for _ in range(case.copies)]
    return _all([lambda w=w: ops._weight_int4pack_mm_for_cpu(a, w, case.group, pairs) for w in packed])


def _model(case: Case) -> Any:
    """MatMulNBits, a node for each weight, with activations of its own so that nothing is shared between them."""
    import numpy as np
    import onnx

    _, codes, scales = _data(case)
    nibbles = codes.numpy().astype(np.uint8).reshape(case.N, -1, case.group // 2, 2)
    packed, make = nibbles[..., 0] | nibbles[..., 1] << 4, onnx.helper.make_node
    # Weights that differ: equal ones might be kept once. The last, whose result is compared, is as given.
    constants = [onnx.numpy_helper.from_array(np.roll(packed, i + 1 - case.copies), f"w{i}") for i in range(case.copies)]
    constants.append(onnx.numpy_helper.from_array(scales.numpy().reshape(-1), "s"))
    keys = {"domain": "com.microsoft", "K": case.K, "N": case.N, "bits": 4, "block_size": case.group}
    level = 4 if case.dtype == "a8" else 1
    nodes = [make("MatMulNBits", [f"a{i}", f"w{i}", "s"], [f"y{i}"], accuracy_level=level, **keys) for i in range(case.copies)]
    info, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    given = [info(f"a{i}", kind, (case.M, case.K)) for i in range(case.copies)]
    results = [info(f"y{i}", kind, None) for i in range(case.copies)]
    graph = onnx.helper.make_graph(nodes, "g", given, results, constants)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def onnxruntime(case: Case) -> Run:
    """ONNX Runtime's MatMulNBits with f32 activations, computed in f32 (accuracy_level 1) or in 8 bits (4)."""
    import onnxruntime as ort

    if case.dtype == "bf16":
        raise NotImplementedError("ONNX Runtime computes MatMulNBits in f32 or in 8 bits")
    session = ort.InferenceSession(_model(case).SerializeToString(), providers=["CPUExecutionProvider"])
    a = _data(case)[0].numpy()
    feeds = {f"a{i}": a for i in range(case.copies)}
    return lambda: session.run(None, feeds)[-1]


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "torch int4pack": torch_int4pack,
    "onnxruntime": onnxruntime,
    "tilewright": tilewright,
}
