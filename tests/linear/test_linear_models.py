"""Models of others, quantised: what is left in float is named, and what reads a layer's weight finds one."""

import operator

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import tilewright
from tilewright.errors import InputError

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


def mamba2():
    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
    return Mamba2ForCausalLM(Mamba2Config(**SMALL, state_size=16, **heads))


def llama(tied=False):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **heads, tie_word_embeddings=tied))


def jamba():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "attn_layer_period": 2}
    experts = {"attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 8}
    return JambaForCausalLM(JambaConfig(**SMALL, **heads, **experts))


def deepseek():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    parts = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    experts |= {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**SMALL, **heads, **parts, **experts))


@pytest.mark.parametrize("make", [mamba, mamba2, jamba, deepseek, llama])
@torch.no_grad()
def test_a_model_that_reads_its_layers_weights_runs(make):
    torch.manual_seed(0)
    model = make().eval()
    before = model(IDS).logits
    tilewright.quantize_(model, "w8")
    after = model(IDS).logits
    assert float((after - before).norm() / before.norm()) < 0.05
    model.tie_weights()
    assert torch.equal(model(IDS).logits, after)
    model.resize_token_embeddings(104, mean_resizing=False)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear) and head.weight.shape == (104, 64)
    again = model(IDS).logits[..., :96]  # of float rows, where they are tied to the embedding's
    assert float((again - after).norm() / after.norm()) < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_a_float_model_refuses_the_state_of_a_quantised_one(tied, tmp_path):
    """Weights that are missing would be drawn at random, with a report that few read."""
    torch.manual_seed(0)
    model = llama(tied).eval()
    tilewright.quantize_(model, "w8")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.self_attn\.q_proj\.weight"):
        llama(tied).load_state_dict(model.state_dict(), strict=False)
    again = llama(tied).eval()
    tilewright.quantize_(again, "w8")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    other = llama(tied)
    tilewright.quantize_(other, "w8g32")
    with pytest.raises(
        InputError, match="the state dict holds s8 codes, f32 scales per 64, this module s8 codes, f32 scales per 32"
    ):
        other.load_state_dict(model.state_dict())


def test_a_quantised_layer_is_not_drawn_at_random():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 8), "s8")
    with pytest.raises(InputError, match="a quantised layer is not drawn at random\n  try: draw the float layer's weights"):
        layer.reset_parameters()


def test_a_quantised_weight_answers_as_a_matrix():
    layer = tilewright.Linear.from_float(torch.nn.Linear(70, 5).half(), "s4", group_size=32)
    weight, dense, x = layer.weight, layer.weight.dequantize(torch.float16), torch.randn(3, 70).half()
    assert weight.dtype is torch.float16 and weight.device == layer.packed.device and weight.code_type.name == "s4"
    assert weight.shape == weight.size() == dense.shape and weight.size(1) == 70 and weight.dim() == weight.ndim == 2
    assert weight.numel() == 350 and not weight.requires_grad and weight.data is weight and len(weight) == 5
    for got, wanted in (
        (weight.T, dense.T),
        (weight @ x.T, dense @ x.T),
        (x @ weight.t(), x @ dense.t()),
        (x.T[:, :3].T @ weight.T, x @ dense.T),
        (torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, dense)),
        (torch.matmul(weight, x.T), dense @ x.T),
        (weight[1:3], dense[1:3]),
        (weight.to(torch.float32), dense.float()),
        (weight.data.to(dtype=torch.float64), dense.double()),
    ):
        assert torch.equal(got, wanted)
    assert isinstance(weight.to("cpu"), type(weight)) and weight.to("cpu").scheme == layer.scheme
    assert torch.equal(tilewright.Linear(weight)(x), tilewright.Linear(weight.plain())(x))
    with pytest.raises(AttributeError, match="a quantised weight has no 'weight_loader'"):
        _ = weight.weight_loader


def test_operators_work_on_the_matrix():
    layer = tilewright.Linear.from_float(torch.nn.Linear(70, 5), "s4", group_size=32)
    weight, dense = layer.weight, layer.weight.dequantize()
    other = torch.rand(5, 70) + 1
    for f in (
        lambda w: w * 2,
        lambda w: 2 - w,
        lambda w: w / other,
        lambda w: other / (w + 9),
        lambda w: w**2,
        lambda w: 2**w,
        lambda w: w // 2,
        lambda w: w % 2,
        lambda w: -w,
        lambda w: abs(w),
        lambda w: w == 0,
        lambda w: w != other,
        lambda w: w > 0,
        lambda w: w <= other,
        lambda w: w + layer.weight,
        lambda w: other.clone().copy_(w),
        lambda w: torch.from_numpy(np.asarray(w)),
        lambda w: torch.stack([*w]),
        lambda w: torch.zeros(5, 70).add_(w),
    ):
        assert torch.equal(f(weight), f(dense))
    assert len({weight, layer.weight}) == 2 and weight.requires_grad_(False) is weight


@pytest.mark.parametrize(
    ("write", "how"),
    [
        (lambda w: w.mul_(0), "mul_"),
        (lambda w: w.data.zero_(), "zero_"),
        (lambda w: w.copy_(torch.zeros(5, 70)), "copy_"),
        (lambda w: torch.nn.init.zeros_(w), "zero_"),
        (lambda w: torch.nn.init.normal_(w), "normal_"),
        (lambda w: torch.nn.init.xavier_uniform_(w), "uniform_"),
        (lambda w: torch.relu_(w), "relu_"),
        (lambda w: torch.add(w, 1, out=w), "add"),
        (lambda w: w.__setitem__(0, 1.0), "an assignment to a part"),
        (lambda w: operator.imul(w, 2), "__imul__"),
        (lambda w: operator.isub(w, 2), "__isub__"),
        (lambda w: setattr(w, "data", torch.zeros(5, 70)), "data"),
    ],
)
def test_what_is_written_to_a_quantised_weight_is_refused(write, how):
    layer = tilewright.Linear.from_float(torch.nn.Linear(70, 5), "s4", group_size=32)
    x = torch.randn(2, 70)
    before = layer(x)
    said = (
        rf"a quantised layer's weight cannot be written to: {how}\n  try: write to the float weight, then tilewright.quantize_"
    )
    with torch.no_grad(), pytest.raises(InputError, match=said):
        write(layer.weight)
    assert torch.equal(layer(x), before)


def test_a_quantised_weight_takes_no_gradient():
    weight = tilewright.Linear.from_float(torch.nn.Linear(70, 5)).weight
    for ask in (lambda: weight.requires_grad_(), lambda: setattr(weight, "requires_grad", True)):
        with pytest.raises(InputError, match="a quantised layer's weight has no gradient\n  try: train the float layer"):
            ask()
    weight.requires_grad = False


@pytest.mark.parametrize("code", ["s4", "u4", "s8", "f8e4m3fn", "f8e5m2", "f4e2m1fn"])
def test_another_weight_for_a_quantised_layer_is_refused(code):
    """One large weight makes the step of its group large, and of no other; what a small change loses is lost nowhere else."""
    for weight in (
        torch.randn(4, 64),
        torch.randn(4, 64).bfloat16(),
        torch.randn(4, 64) * 10.0 ** torch.arange(-3, 1)[:, None],
    ):
        weight[0, 0] = 50.0
        layer = tilewright.Linear(tilewright.pack(weight, code, group_size=32, zero_point=code == "u4"))
        for same in (weight, layer.weight.dequantize(), layer.weight.dequantize(torch.bfloat16)):
            layer.weight = torch.nn.Parameter(same)
        rest, added = torch.cat([weight[:1], weight[1:] * 0]), torch.cat([weight[:1], weight[1:] * 1.7])
        for other in (rest, added, torch.cat([weight[:1], -weight[1:]])):
            with pytest.raises(InputError, match="another weight for a quantised layer"):
                layer.weight = torch.nn.Parameter(other)
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 4))
    for other in (torch.nn.Parameter(torch.ones(4, 64)), torch.ones(4, 63), torch.ones(4, 64, device="meta"), None):
        with pytest.raises(InputError, match=r"another weight for a quantised layer\n  try: load or tie weights before"):
            layer.weight = other
