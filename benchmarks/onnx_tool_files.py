"""Small transformers as ONNX Runtime's tools write them: exported by torch.onnx, then quantised, halved or optimised.

`write(model, variant, folder)` gives the file. Weights are random; hidden size 256, 2 layers, 64 tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 256, 2, 4, 1000, 64
CALIBRATION_BATCHES = 4
OPSET = 20


def _configurations() -> dict[str, Callable[[], Any]]:
    import transformers as t

    return {
        "bert": lambda: t.BertModel(
            t.BertConfig(
                hidden_size=HIDDEN,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                intermediate_size=4 * HIDDEN,
                vocab_size=VOCABULARY,
            )
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY, n_positions=2 * LENGTH, use_cache=False
            )
        ),
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                hidden_size=HIDDEN,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS // 2,
                intermediate_size=HIDDEN * 11 // 4,
                vocab_size=VOCABULARY,
                use_cache=False,
            )
        ),
    }


def module(model: str) -> Any:
    """A model (one of MODELS) in torch, of random weights, for inference."""
    return _configurations()[model]().eval()


MODELS = ("bert", "gpt2", "llama")


def feeds(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Token ids below VOCABULARY and a mask that hides the last sixth, both s64[1, LENGTH]."""
    mask = np.ones((1, LENGTH), np.int64)
    mask[:, LENGTH - LENGTH // 6 :] = 0
    return {"input_ids": np.random.default_rng(seed).integers(0, VOCABULARY, (1, LENGTH)), "attention_mask": mask}


def _export(model: str, path: Path) -> None:
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module(model)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)[0]

    torch.manual_seed(0)
    example = tuple(torch.from_numpy(v) for v in feeds().values())
    torch.onnx.export(
        First(),
        example,
        str(path),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(feeds()),
        output_names=["out"],
        external_data=False,
        verbose=False,
    )


def _dynamic(source: Path, target: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target)


def _static(**options: Any) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

        class Batches(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [feeds(seed) for seed in range(1, 1 + CALIBRATION_BATCHES)]

            def get_next(self) -> dict[str, Any]:
                return self.left.pop() if self.left else {}

        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
        quantize_static(str(source), str(target), Batches(), **{**kinds, **options})

    return write


def _qoperator(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantFormat

    _static(quant_format=QuantFormat.QOperator)(source, target)


def _blocks(bits: int, symmetric: bool, level: int | None = None) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        made = MatMulNBitsQuantizer(
            onnx.load(str(source)), bits=bits, block_size=32, is_symmetric=symmetric, accuracy_level=level
        )
        made.process()
        made.model.save_model_to_file(str(target))

    return write


def _half(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(source)), keep_io_types=True), str(target))


def _optimized(model: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        kind = "gpt2" if model == "llama" else model
        optimize_model(str(source), model_type=kind, num_heads=HEADS, hidden_size=HIDDEN).save_model_to_file(str(target))

    return write


def _session(source: Path, target: Path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


VARIANTS = (
    "f32",
    "f16",
    "dynamic",
    "qdq-matmul",
    "qdq",
    "qoperator",
    "w4",
    "w4-asymmetric",
    "w4-level4",
    "w8",
    "optimized",
    "session",
)
UNWRITABLE = {("gpt2", "optimized")}  # onnxruntime 1.31's optimiser ends in an IndexError on this export


def write(model: str, variant: str, folder: Path) -> Path:
    """Give the file of `model` (one of MODELS) as `variant` (one of VARIANTS) says, written unless `folder` holds it."""
    path = folder / f"{model}-{variant}.onnx"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet():
        if variant == "f32":
            _export(model, path)
            return path
        writers: dict[str, Callable[[Path, Path], None]] = {
            "f16": _half,
            "dynamic": _dynamic,
            "qdq-matmul": _static(op_types_to_quantize=["MatMul", "Gemm"]),
            "qdq": _static(),
            "qoperator": _qoperator,
            "w4": _blocks(4, True),
            "w4-asymmetric": _blocks(4, False),
            "w4-level4": _blocks(4, True, 4),
            "w8": _blocks(8, True),
            "optimized": _optimized(model),
            "session": _session,
        }
        writers[variant](write(model, "f32", folder), path)
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters and quantisers, which talk a lot."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):  # noqa: PTH123
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
