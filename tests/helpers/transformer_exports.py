"""BERT and GPT-2 with random weights, exported by torch.onnx and quantised by onnxruntime, for tests."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from onnx_models import ours, read, theirs

from tilewright.frontends.onnx.tensors import element_code, from_array, to_numpy
from tilewright.ir.evaluate import evaluate_nodes

NAMES = ("input_ids", "attention_mask")
SMALL = {
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32},
}


def feeds(batch: int, length: int, vocabulary: int = 100) -> dict[str, np.ndarray]:
    """Token ids, and a mask that hides the end of the last line."""
    rng = np.random.default_rng(batch * 1000 + length)
    mask = np.ones((batch, length), np.int64)
    mask[-1, length - length // 3 :] = 0
    return {"input_ids": rng.integers(0, vocabulary, (batch, length)), "attention_mask": mask}


class _First(torch.nn.Module):
    """The first result of a transformer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def _module(kind: str, attention: str, config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if kind == "bert":
        return _First(BertModel(BertConfig(**config, attn_implementation=attention)).eval())
    return _First(GPT2LMHeadModel(GPT2Config(**config, attn_implementation=attention, use_cache=False)).eval())


def exported(
    folder: Path,
    name: str,
    *,
    dynamo: bool,
    opset: int,
    attention: str = "sdpa",
    dynamic: bool = False,
    config: Mapping[str, Any] | None = None,
    shape: tuple[int, int] = (2, 7),
    external: bool = False,
) -> str:
    """Path of the model `name` ("bert-…" or "gpt2-…"), exported unless it is there."""
    path = folder / f"{name}.onnx"
    if path.exists():
        return str(path)
    kind = name.split("-", 1)[0]
    example = tuple(torch.from_numpy(v) for v in feeds(*shape).values())
    more: dict[str, Any] = {"external_data": external, "verbose": False} if dynamo else {}
    if dynamic and dynamo:
        more["dynamic_shapes"] = ({0: "batch", 1: "seq"},) * 2
    elif dynamic:
        more["dynamic_axes"] = {n: {0: "batch", 1: "seq"} for n in NAMES}
    with quiet():
        torch.onnx.export(
            _module(kind, attention, SMALL[kind] if config is None else config),
            example,
            str(path),
            dynamo=dynamo,
            opset_version=opset,
            input_names=list(NAMES),
            output_names=["out"],
            **more,
        )
    return str(path)


def quantised(path: str, folder: Path, x: Mapping[str, np.ndarray], **options: Any) -> str:
    """Path of the model with its products quantised to int8 (QDQ), calibrated on `x`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [dict(x)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    out = str(folder / (Path(path).stem + "-int8.onnx"))
    kinds = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True, **options}
    with quiet():
        quantize_static(path, out, Once(), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul", "Gemm"], **kinds)
    return out


def quantised_agreement(path: str, folder: Path, x: Mapping[str, np.ndarray], **options: Any) -> list[tuple[float, int]]:
    """Compare the int8 model's quantised tensors, in order: the share of codes equal to onnxruntime's, the largest difference.

    Each is computed from onnxruntime's own tensors before it, so that a code that rounds the other way does not cascade.
    """
    out = quantised(path, folder, x, **options)
    m = onnx.load(out)
    codes = [n.output[0] for n in m.graph.node if n.op_type == "QuantizeLinear"]
    del m.graph.output[:]
    m.graph.output.extend(helper.make_tensor_value_info(c, TensorProto.INT8, None) for c in codes)
    onnx.save(m, out, save_as_external_data=Path(out).stat().st_size > 1 << 30)
    graph = read(out)
    wanted = theirs(out, x)
    first = ours(graph, x)[0]
    assert first.dtype == wanted[0].dtype
    bound = {n: from_array(x[n.op.label], n.tensor, n.op.label) for n in graph.inputs}
    agreement: list[tuple[float, int]] = []
    for node, reference in zip(graph.outputs, wanted, strict=True):
        got = to_numpy(evaluate_nodes([node], bound)[0], element_code(node.dtype))
        gap = np.abs(got.astype(int) - reference.astype(int))
        agreement.append((float((gap == 0).mean()), int(gap.max())))
        bound[node] = from_array(reference, node.tensor, "code")
    return agreement


@contextlib.contextmanager
def quiet():
    """Exporters and quantisers talk a lot."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):  # noqa: PTH123
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
