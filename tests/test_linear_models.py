"""Models of others, quantised: what is left in float is named, and what reads a layer's weight finds one."""

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import tilewright

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
IDS = torch.arange(6)[None]


def mixtral():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 96}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **heads))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0))


def falcon():
    return FalconForCausalLM(FalconConfig(**SMALL, num_attention_heads=4))


def mamba():
    return MambaForCausalLM(MambaConfig(**SMALL, state_size=8))


def test_every_matrix_that_stays_in_float_is_named_with_its_share():
    model = mixtral()
    floats = {n: p.nbytes for n, p in model.named_parameters() if p.dim() >= 2}
    report = tilewright.quantize_(model, "w4g64")
    assert report.left == {n: floats[n] for n in floats if "experts" in n or "embed" in n or n.endswith("mlp.gate.weight")}
    packed = sum(m.weight.nbytes for m in model.modules() if isinstance(m, tilewright.Linear))
    assert report.total == packed + sum(report.left.values())
    share = sum(report.left.values()) / report.total
    assert f"left in float: {share:.0%} of the bytes of all matrices" in str(report) and share > 0.9
    experts = sum(v for n, v in report.left.items() if n.endswith("gate_up_proj"))
    line = f"model.layers.*.mlp.experts.gate_up_proj x2: {experts / 1e6:.1f} MB, {experts / report.total:.0%}"
    assert line in str(report)


@pytest.mark.parametrize(("make", "classes"), [(gpt2, "Conv1D"), (falcon, "FalconLinear")])
def test_linear_layers_of_other_classes_are_quantised(make, classes):
    torch.manual_seed(0)
    model = make().eval()
    before = model(IDS).logits
    report = tilewright.quantize_(model, "w8")
    assert not report.skipped and len(report.layers) == 9
    assert classes not in {type(m).__name__ for m in model.modules()}
    after = model(IDS).logits
    assert float((after - before).norm() / before.norm()) < 0.03
