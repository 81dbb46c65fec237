"""Tiny models of transformers, quantised as they are loaded: as `quantize_` does it, and the same once saved and read."""

import pytest
import torch
from tests.conformance.transformers_models import inputs_of, leaves, model_of

import tilewright
from tilewright.integrations.transformers import TilewrightConfig

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]

NAMES = (
    "albert",
    "bart",
    "bert",
    "blenderbot",
    "bloom",
    "clip",
    "cohere",
    "deepseek_v2",
    "deepseek_v3",
    "distilbert",
    "dinov2",
    "electra",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_neox",
    "granite",
    "helium",
    "jamba",
    "llama",
    "llava",
    "mamba",
    "marian",
    "mistral",
    "mixtral",
    "mpt",
    "olmo",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "siglip",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
    "vit",
    "whisper",
    "xglm",
)


@torch.no_grad()
def results(model, inputs):
    return [t for t in leaves(model(**inputs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_quantised_as_it_is_loaded(name, tmp_path):
    model = model_of(name).eval()
    inputs = inputs_of(model, 0)
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    wanted = kind.from_pretrained(tmp_path / "float")
    report = tilewright.quantize_(wanted, "w8")
    loaded = kind.from_pretrained(tmp_path / "float", quantization_config=TilewrightConfig("w8"))
    names = {n for n, m in loaded.named_modules() if isinstance(m, tilewright.Linear)}
    assert names == set(report.layers) and names
    loaded.save_pretrained(tmp_path / "saved")
    again, info = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    first, *others = (results(m, inputs) for m in (wanted, loaded, again))
    for other in others:
        assert len(first) == len(other) > 0
        assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(first, other, strict=True))
