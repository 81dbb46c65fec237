"""Who takes part in the benchmark of 4-bit weights; `rounds.py` runs each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """out[M, N] = a[M, K] @ w[N, K]^T, w 4-bit codes with a scale for each `group` along K; several weights in turn.

    Attributes:
        dtype: of activations, scales and result, f32 or bf16.
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
        """Of one weight: codes, and scales of 4 bytes."""
        return self.N * self.K // 2 + self.N * self.K // self.group * 4


def _data(case: Case) -> tuple[Any, Any, Any]:
    """Activations, codes 0 to 15 (s32[N, K]) off by 8, and scales f32[N, K / group]."""
    import torch

    torch.manual_seed(0)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
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
    from tilewright.compiler import optimise
    from tilewright.hardware.detect import detect
    from tilewright.ir.notation import parse
    from tilewright.schedule.problem import Problem, problem_of
    from tilewright.schedule.search import search

    a, codes, scales = _data(case)
    line = f"{case.dtype}[{case.M},{case.K}] @ s4[{case.N},{case.K}]^T group={case.group} -> {case.dtype}"
    problem = problem_of(optimise(parse(line)).outputs[0])
    assert isinstance(problem, Problem)
    problem = Problem(problem.op, problem.types, (False, True, True))
    weights = {1: (codes - 8).to(problem.types[1].dtype.to_torch()), 2: scales.to(a.dtype)}
    decision = search(problem, detect("cpu"), budget_s=0.5, weights=weights)
    runs = [decision.kernel.prepare(weights) for _ in range(case.copies)]
    return _all([lambda run=run: run([a, weights[1], weights[2]])[0] for run in runs])


def torch_int4pack(case: Case) -> Run:
    """torch's packed 4-bit linear."""
    import torch

    a, codes, scales = _data(case)
    ops = torch.ops.aten
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], -1).to(a.dtype).contiguous()
    packed = [ops._convert_weight_to_int4pack_for_cpu(codes, 1).clone() for _ in range(case.copies)]
    return _all([lambda w=w: ops._weight_int4pack_mm_for_cpu(a, w, case.group, pairs) for w in packed])


def onnxruntime(case: Case) -> Run:
    """ONNX Runtime's MatMulNBits with f32 activations, computed in f32 (accuracy_level 1); a node for each weight."""
    import numpy as np
    import onnx
    import onnxruntime as ort

    if case.dtype != "f32":
        raise NotImplementedError("ONNX Runtime computes MatMulNBits in f32 or in 8 bits")
    a, codes, scales = _data(case)
    nibbles = codes.numpy().astype(np.uint8).reshape(case.N, -1, case.group // 2, 2)
    packed, make = nibbles[..., 0] | nibbles[..., 1] << 4, onnx.helper.make_node
    constants = [onnx.numpy_helper.from_array(packed, f"w{i}") for i in range(case.copies)]
    constants.append(onnx.numpy_helper.from_array(scales.numpy().reshape(-1), "s"))
    keys = {"domain": "com.microsoft", "K": case.K, "N": case.N, "bits": 4, "block_size": case.group, "accuracy_level": 1}
    nodes = [make("MatMulNBits", ["a", f"w{i}", "s"], [f"y{i}"], **keys) for i in range(case.copies)]
    info, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    results = [info(f"y{i}", kind, None) for i in range(case.copies)]
    graph = onnx.helper.make_graph(nodes, "g", [info("a", kind, tuple(a.shape))], results, constants)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"a": a.numpy()}
    return lambda: session.run(None, feeds)


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "torch int4pack": torch_int4pack,
    "onnxruntime": onnxruntime,
    "tilewright": tilewright,
}
