"""Tiny transformers as onnxruntime's tools write them: exported by torch.onnx, then quantised, halved, fused or saved again."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 64, 2, 4, 100, 16
OPSET = 20
Feeds = dict[str, np.ndarray]
Writer = Callable[[Path, Path], None]


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            vocab_size=VOCABULARY,
        )
    )


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY, n_positions=2 * LENGTH, use_cache=False)
    )


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            intermediate_size=2 * HIDDEN,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


def _vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            image_size=32,
            patch_size=8,
        ),
        add_pooling_layer=False,
    )


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=2 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


_MODELS: dict[str, Callable[[], Any]] = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "vit": _vit, "t5": _t5}
MODELS = tuple(_MODELS)


def feeds(model: str, seed: int = 0) -> Feeds:
    """Inputs of a model by name: token ids and a mask that hides the end of the last line, or an image."""
    rng = np.random.default_rng(seed)
    if model == "vit":
        return {"pixel_values": rng.standard_normal((2, 3, 32, 32)).astype(np.float32)}
    mask = np.ones((2, LENGTH), np.int64)
    mask[1, LENGTH - LENGTH // 3 :] = 0
    found = {"input_ids": rng.integers(0, VOCABULARY, (2, LENGTH)), "attention_mask": mask}
    if model == "t5":
        found["decoder_input_ids"] = rng.integers(0, VOCABULARY, (2, 7))
    return found


def _export(model: str, path: Path) -> None:
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _MODELS[model]().eval()

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return self.inner(**dict(zip(names, args, strict=True)))[0]

    names = list(feeds(model))
    torch.manual_seed(0)
    torch.onnx.export(
        First(),
        tuple(torch.from_numpy(v) for v in feeds(model).values()),
        str(path),
        dynamo=model != "t5",  # which that exporter cannot take apart
        opset_version=OPSET,
        input_names=names,
        output_names=["out"],
        external_data=False,
        verbose=False,
    )


def _dynamic(**options: Any) -> Writer:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        kind = QuantType[options.get("weights", "QInt8")]
        quantize_dynamic(source, target, weight_type=kind, per_channel=options.get("per_channel", False))

    return write


def _static(model: str, activations: str, weights: str, **options: Any) -> Writer:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

        class Batches(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [feeds(model, seed) for seed in range(1, 4)]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        kinds = {"activation_type": QuantType[activations], "weight_type": QuantType[weights]}
        quantize_static(str(source), str(target), Batches(), **kinds, **options)

    return write


def _qoperator(model: str, activations: str, weights: str, **options: Any) -> Writer:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import QuantFormat

        _static(model, activations, weights, quant_format=QuantFormat.QOperator, **options)(source, target)

    return write


def _blocks(bits: int, *, gathers: bool = False, qdq: bool = False, **options: Any) -> Writer:
    def write(source: Path, target: Path) -> None:
        import onnx
        from onnxruntime.quantization import QuantFormat
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        kinds = ("MatMul", "Gather") if gathers else ("MatMul",)
        configuration = DefaultWeightOnlyQuantConfig(
            bits=bits,
            block_size=32,
            quant_format=QuantFormat.QDQ if qdq else QuantFormat.QOperator,
            op_types_to_quantize=kinds,
            **options,
        )
        made = MatMulNBitsQuantizer(onnx.load(str(source)), algo_config=configuration)
        made.process()
        made.model.save_model_to_file(str(target))

    return write


def _half(keep: bool) -> Writer:
    def write(source: Path, target: Path) -> None:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(str(source)), keep_io_types=keep), str(target))

    return write


def _optimised(kind: str, **options: Any) -> Writer:
    def write(source: Path, target: Path) -> None:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        fusions = FusionOptions(kind)
        for name, value in options.items():
            setattr(fusions, name, value)
        made = optimize_model(str(source), model_type=kind, num_heads=HEADS, hidden_size=HIDDEN, optimization_options=fusions)
        made.save_model_to_file(str(target))

    return write


def _saved(level: str) -> Writer:
    def write(source: Path, target: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(target)
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return write


def _writers(model: str) -> dict[str, tuple[str, Writer]]:
    """Give each variant the one it is made from, and the function that makes it."""
    only = {"op_types_to_quantize": ["MatMul", "Gemm"]}
    kind = {"llama": "gpt2"}.get(model, model)
    found: dict[str, tuple[str, Writer]] = {
        "f16": ("f32", _half(False)),
        "f16-io32": ("f32", _half(True)),
        "dynamic-s8": ("f32", _dynamic()),
        "dynamic-u8": ("f32", _dynamic(weights="QUInt8")),
        "dynamic-channels": ("f32", _dynamic(per_channel=True)),
        "qdq-u8s8": ("f32", _static(model, "QUInt8", "QInt8")),
        "qdq-u8s8-channels": ("f32", _static(model, "QUInt8", "QInt8", per_channel=True)),
        "qdq-u8u8": ("f32", _static(model, "QUInt8", "QUInt8")),
        "qdq-matmul-u8s8": ("f32", _static(model, "QUInt8", "QInt8", per_channel=True, **only)),
        "qdq-matmul-s8s8": ("f32", _static(model, "QInt8", "QInt8", **only)),
        "qoperator-u8s8": ("f32", _qoperator(model, "QUInt8", "QInt8")),
        "qoperator-u8u8": ("f32", _qoperator(model, "QUInt8", "QUInt8", per_channel=True)),
        "qoperator-matmul": ("f32", _qoperator(model, "QUInt8", "QInt8", **only)),
        "w4": ("f32", _blocks(4, is_symmetric=True)),
        "w4-asymmetric": ("f32", _blocks(4, is_symmetric=False)),
        "w4-level4": ("f32", _blocks(4, is_symmetric=True, accuracy_level=4)),
        "w4-qdq": ("f32", _blocks(4, is_symmetric=True, qdq=True)),
        "w4-gather": ("f32", _blocks(4, is_symmetric=False, gathers=True)),
        "w2": ("f32", _blocks(2, is_symmetric=False)),
        "w8": ("f32", _blocks(8, is_symmetric=True)),
        "w8-asymmetric": ("f32", _blocks(8, is_symmetric=False)),
        "fused": ("f32", _optimised(kind)),
        "fused-heads": ("f32", _optimised(kind, use_multi_head_attention=True)),
        "fused-dynamic": ("fused", _dynamic()),
        "fused-f16": ("fused", _half(True)),
    }
    for level in ("BASIC", "EXTENDED", "ALL"):
        for source in ("f32", "f16", "dynamic-s8", "qdq-u8s8", "qoperator-u8s8", "w4", "fused"):
            found[f"{source}-{level.lower()}"] = (source, _saved(f"ORT_ENABLE_{level}"))
    return found


VARIANTS = ("f32", *_writers("bert"))


def write(model: str, variant: str, folder: Path) -> Path:
    """The file of `model` (one of MODELS) as `variant` (one of VARIANTS) says, written unless `folder` holds it.

    Raises:
        Exception: whatever onnxruntime's tools raise where they cannot.
    """
    path = folder / f"{model}-{variant}.onnx"
    if path.exists():
        return path
    with _quiet():
        if variant == "f32":
            _export(model, path)
        else:
            source, writer = _writers(model)[variant]
            writer(write(model, source, folder), path)
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters and quantisers, which talk a lot."""
    logging.disable(logging.ERROR)
    with warnings.catch_warnings(), open(os.devnull, "w") as sink:  # noqa: PTH123
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    logging.disable(logging.NOTSET)
