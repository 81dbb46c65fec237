"""Contenders of the CPU benchmarks: each builds one product and gives a function that does it once.

Every contender runs in a process of its own (`rounds.py`). Data are random; a result is computed into memory the contender
allocates itself, as its users get it. Right operands are constants, packed beforehand where a library can, except in the
batched product, whose both operands change from call to call.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """out[batch, M, N] = a[batch, M, K] @ b, then the epilogue.

    Attributes:
        dtype: f32, bf16 or s8.
        M, N, K: extents.
        batch: 1, or a number of products each with a right operand of its own.
        epilogue: "", "bias" or "bias, gelu" (tanh form for all, which each library has).
    """

    dtype: str
    M: int
    N: int
    K: int
    batch: int = 1
    epilogue: str = ""

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{self.dtype} {batch}{self.M}x{self.N}x{self.K}{' + ' + self.epilogue if self.epilogue else ''}"

    @staticmethod
    def parse(text: str) -> Case:
        """Read a case from the text that `str` prints.

        Raises:
            ValueError: it is something else.
        """
        m = re.fullmatch(r"(f32|bf16|s8) (?:(\d+)x)?(\d+)x(\d+)x(\d+)(?: \+ (bias|bias, gelu))?", text)
        if m is None:
            raise ValueError(f"not a product: {text!r}; like 'bf16 4096x3072x768 + bias, gelu'")
        return Case(m[1], int(m[3]), int(m[4]), int(m[5]), int(m[2] or 1), m[6] or "")

    @property
    def ops(self) -> int:
        return 2 * self.batch * self.M * self.N * self.K


def _torch_data(case: Case) -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    shape_a, shape_b = (case.M, case.K), (case.K, case.N)
    if case.batch > 1:
        shape_a, shape_b = (case.batch, *shape_a), (case.batch, *shape_b)
    if case.dtype == "s8":
        a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in (shape_a, shape_b))
        return a, b, torch.randn(case.N)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    return torch.randn(shape_a).to(kind), (torch.randn(shape_b) / case.K**0.5).to(kind), torch.randn(case.N).to(kind)


def tilewright(case: Case) -> Run:
    """The kernel that a compile chooses, called as a program's step calls it."""
    return _chosen(case, None)


def generated(case: Case) -> Run:
    """The generated kernel, whether or not a compile chooses it."""
    from tilewright.candidates.llvm.gemm import candidate as gemm

    return _chosen(case, [gemm.CANDIDATE])


def _chosen(case: Case, candidates: Any) -> Run:
    from tilewright.compiler import optimise
    from tilewright.hardware.detect import detect
    from tilewright.ir.notation import parse
    from tilewright.schedule.problem import Problem, problem_of
    from tilewright.schedule.search import search

    a, b, bias = _torch_data(case)
    batch = f"{case.batch}," if case.batch > 1 else ""
    out = {"s8": " -> s32", "f32": "", "bf16": " -> bf16"}[case.dtype]
    epilogue = {"": "", "bias": " + bias", "bias, gelu": " + bias, gelu_tanh"}[case.epilogue]
    if epilogue and case.dtype == "bf16":
        epilogue = epilogue.replace("bias", "bias:bf16")
    line = f"{case.dtype}[{batch}{case.M},{case.K}] @ {case.dtype}[{batch}{case.K},{case.N}]{epilogue}{out}"
    graph = optimise(parse(line))
    problem = problem_of(graph.outputs[0])
    assert isinstance(problem, Problem)
    sources = [a, b, bias][: len(problem.types)]
    if case.batch == 1:
        problem = Problem(problem.op, problem.types, tuple(i > 0 for i in range(len(sources))))
    weights = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    decision = search(problem, detect("cpu"), budget_s=0.5, candidates=candidates, weights=weights)
    run = decision.kernel.prepare(weights)
    return lambda: run(sources)


def torch_eager(case: Case) -> Run:
    """torch.mm or addmm, the epilogue as separate operations; torch._int_mm for s8. The weight in whichever order is faster."""
    import torch

    _inference_mode()
    a, b, bias = _torch_data(case)
    if case.batch > 1 and case.dtype == "s8":
        out = torch.empty(case.batch, case.M, case.N, dtype=torch.int32)
        return lambda: [torch.ops.aten._int_mm.out(a[i], b[i], out=out[i]) for i in range(case.batch)]
    gelu = case.epilogue.endswith("gelu")

    def with_weight(w: Any) -> Run:
        if case.dtype == "s8":
            return lambda: torch._int_mm(a, w)
        if not case.epilogue:
            return lambda: torch.matmul(a, w)
        if gelu:
            return lambda: torch.nn.functional.gelu(torch.addmm(bias, a, w), approximate="tanh")
        return lambda: torch.addmm(bias, a, w)

    if case.batch > 1:
        return with_weight(b)
    return _fastest(*(with_weight(w) for w in (b, b.t().contiguous().t())))


@functools.cache
def _inference_mode() -> object:
    """Entered once for the whole process, as around a program: entering it at each call would cost small products dear."""
    import torch

    mode = torch.inference_mode()
    mode.__enter__()
    return mode


def _fastest(*runs: Run) -> Run:
    """The one that takes least, of a library's own ways to do the same."""

    def least(run: Run) -> float:
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 4 or time.perf_counter() - began < 0.03:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    return min(runs, key=least)


def onednn(case: Case) -> Run:
    """oneDNN with the weight reordered once and the epilogue fused, through torch's operators.

    8-bit activations are unsigned, its fast path, and the result is f32, which takes the bytes of s32.
    """
    import torch

    if case.batch > 1:
        raise NotImplementedError("torch's prepacked linear multiplies two matrices")
    _inference_mode()
    a, b, bias = _torch_data(case)
    if case.dtype == "s8":
        codes, ones, zeros = (a.int() + 128).to(torch.uint8), torch.ones(case.N), torch.zeros(case.N, dtype=torch.int32)
        weight = torch.ops.onednn.qlinear_prepack(b.t().contiguous(), [case.M, case.K])
        linear = torch.ops.onednn.qlinear_pointwise.default
        return lambda: linear(codes, 1.0, 128, weight, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    packed = torch.ops.mkldnn._reorder_linear_weight(b.t().contiguous(), case.M)
    attr, algorithm = ("gelu", "tanh") if case.epilogue.endswith("gelu") else ("none", "")
    given = bias if case.epilogue else None
    return lambda: torch.ops.mkldnn._linear_pointwise(a, packed, given, attr, [], algorithm)


def onnxruntime(case: Case) -> Run:
    """ONNX Runtime: MatMul (+ Add, Gelu) with a constant right operand, or MatMulInteger with u8 activations."""
    import numpy as np
    from onnx import TensorProto, helper

    if case.dtype == "bf16":
        raise NotImplementedError("ONNX Runtime has no bf16 product on CPUs")
    a, b, bias = (t.numpy() for t in _torch_data(case))
    if case.dtype == "s8":
        a = (a.astype(np.int16) + 128).astype(np.uint8)  # its fast path: a signed left operand is 11 times slower
        return _session([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], a, b, {}, TensorProto.INT32, case.batch > 1)
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m" if case.epilogue else "y"])]
    if case.epilogue:
        last = case.epilogue == "bias"
        nodes.append(helper.make_node("Add", ["m", "c"], ["y" if last else "s"]))
        if not last:
            nodes.append(helper.make_node("Gelu", ["s"], ["y"], approximate="tanh"))
    return _session(nodes, a, b, {"c": bias} if case.epilogue else {}, TensorProto.FLOAT, case.batch > 1)


def onnxruntime_qdq(case: Case) -> Run:
    """ONNX Runtime on a product between quantise and dequantise nodes, u8 in and out: a quarter of the others' result."""
    import numpy as np
    from onnx import TensorProto, helper

    if case.dtype != "s8" or case.batch > 1 or case.epilogue:
        raise NotImplementedError("a quantised product of two matrices")
    a, b, _ = (t.numpy() for t in _torch_data(case))
    constants = {
        "as": np.array(1, np.float32), "az": np.array(128, np.uint8), "bs": np.ones(case.N, np.float32),
        "bz": np.zeros(case.N, np.int8), "ys": np.array(300.0 * case.K**0.5, np.float32), "yz": np.array(128, np.uint8),
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "as", "az"], ["x"]),
        helper.make_node("DequantizeLinear", ["b", "bs", "bz"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "ys", "yz"], ["y"]),
    ]
    return _session(nodes, (a.astype(np.int16) + 128).astype(np.uint8), b, constants, TensorProto.UINT8, False)


def _session(nodes: Any, a: Any, b: Any, constants: dict[str, Any], out: int, b_given: bool) -> Run:
    """A session that computes y from the input a and b, given at each call or a constant packed beforehand."""
    import onnx
    import onnxruntime as ort

    def info(name: str, array: Any) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    feeds = {"a": a, "b": b} if b_given else {"a": a}
    held = constants if b_given else {**constants, "b": b}
    graph = onnx.helper.make_graph(
        nodes, "g", [info(n, v) for n, v in feeds.items()], [onnx.helper.make_tensor_value_info("y", out, None)],
        [onnx.numpy_helper.from_array(v, n) for n, v in held.items()],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def xla(case: Case) -> Run:
    """jax.jit on the CPU, both operands arguments; it runs on as many cores as the others have threads, since XLA takes no
    number of threads."""
    if hasattr(os, "sched_setaffinity") and "OMP_NUM_THREADS" in os.environ:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])
    import jax
    import jax.numpy as jnp

    a, b, bias = (t.float().numpy() for t in _torch_data(case))
    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16, "s8": jnp.int8}[case.dtype]
    x, w, c = jnp.asarray(a, kind), jnp.asarray(b, kind), jnp.asarray(bias, jnp.float32 if case.dtype != "bf16" else kind)

    @jax.jit
    def f(x, w, c):
        y = jnp.matmul(x, w, preferred_element_type=jnp.int32 if case.dtype == "s8" else None)
        if case.epilogue:
            y = y + c
        return jax.nn.gelu(y, approximate=True) if case.epilogue.endswith("gelu") else y

    return lambda: f(x, w, c).block_until_ready()


def openblas(case: Case) -> Run:
    """NumPy's matmul, the weight in whichever order is faster."""
    import numpy as np

    if case.dtype != "f32" or case.epilogue:
        raise NotImplementedError("BLAS multiplies f32")
    a, b, _ = (t.numpy() for t in _torch_data(case))
    if case.batch > 1:
        return lambda: np.matmul(a, b)
    turned = np.ascontiguousarray(b.T).T
    return _fastest(lambda: np.matmul(a, b), lambda: np.matmul(a, turned))


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "tilewright": tilewright,
    "generated": generated,
    "torch": torch_eager,
    "onednn": onednn,
    "onnxruntime": onnxruntime,
    "onnxruntime qdq": onnxruntime_qdq,
    "xla": xla,
    "openblas": openblas,
}
