"""Compile a tiny model of each architecture that transformers has, and compare it with eager torch on two inputs.

    python tests/conformance/transformers_models.py --out FOLDER [--slice I/N] [NAME …]

Every model runs in a process of its own with a time limit. A line a model is printed and a JSON file a model written: what came
of it, the message of a refusal, how many steps torch runs and why. Architectures whose defaults make no tiny model that runs
eagerly on these inputs are told apart ("eager").
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

LIMIT_S = 300
LARGEST = 300_000_000  # weights
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_embed_dim", "hidden_dim", "model_dim", "emb_dim"], 64
    ),
    **dict.fromkeys(
        [
            "embedding_size",
            "word_embed_proj_dim",
            "decoder_hidden_size",
            "attention_hidden_size",
            "lru_width",
            "out_hidden_size",
        ],
        64,
    ),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"], 2
    ),
    **dict.fromkeys(
        ["num_encoder_layers", "decoder_num_hidden_layers", "encoder_num_layers", "depth", "num_blocks_per_stage"], 2
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"], 4
    ),
    **dict.fromkeys(
        ["encoder_num_attention_heads", "decoder_num_attention_heads", "linear_num_value_heads", "mamba_n_heads"], 4
    ),
    **dict.fromkeys(
        ["num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads", "linear_num_key_heads"], 2
    ),
    **dict.fromkeys(
        ["head_dim", "d_kv", "attention_head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "linear_key_head_dim"], 16
    ),
    **dict.fromkeys(["linear_value_head_dim", "mamba_d_head", "global_head_dim"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_head_dim", "q_lora_rank", "index_head_dim"], 32),
    **dict.fromkeys(
        ["intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size"], 128
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "mlp_dim",
            "inner_dim",
            "mamba_d_ssm",
            "expert_ffn_hidden_size",
        ],
        128,
    ),
    **dict.fromkeys(["vocab_size", "text_vocab_size", "vocab_size_per_layer_input"], 128),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_source_positions", "seq_length"], 128
    ),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["n_group", "topk_group"], 1),
    **dict.fromkeys(["projection_dim", "cross_attention_hidden_size"], 64),
    "image_size": 32,
    "patch_size": 8,
    "type_vocab_size": 2,
    "state_size": 16,
    "hidden_size_per_layer_input": 16,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "use_cache": False,
    "use_pretrained_backbone": False,
    "use_timm_backbone": False,
}


def config_of(cls: type, inside: bool = False) -> Any:
    """A small configuration of a class: what the table names is small, what it does not is the default."""
    made = cls()
    chosen = {
        k: v for k, v in SIZES.items() if k in made.to_dict() or (hasattr(made, k) and k in inspect.signature(cls).parameters)
    }
    for k, small in list(chosen.items()):
        held = getattr(made, k, None)
        if isinstance(held, (list, tuple)) and k == "moe_intermediate_size":  # of each kind of experts
            chosen[k] = [small] * len(held)
        elif isinstance(held, int) and isinstance(small, tuple):  # another thing of that name: mamba's conv_kernel
            del chosen[k]
        elif held == 0 and k in ("qk_rope_head_dim", "head_dim"):  # without rotation
            chosen[k] = 0
    if hasattr(made, "kv_lora_rank") and "num_attention_heads" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]  # all heads have their own keys
    if chosen.get("qk_rope_head_dim") == 0 and "qk_head_dim" in chosen:
        chosen["qk_head_dim"] = chosen["qk_nope_head_dim"]
    if isinstance(getattr(made, "patch_size", None), (list, tuple)):
        chosen.pop("patch_size", None)
    if isinstance(getattr(made, "hidden_size", None), (list, tuple)):
        chosen.pop("hidden_size", None)
    for k in (
        "num_heads",
        "num_attention_heads",
        "num_layers",
        "intermediate_size",
        "depth",
        "mlp_dim",
        "embed_dim",
        "image_size",
    ):
        if isinstance(getattr(made, k, None), (list, tuple)):
            chosen.pop(k, None)
    for k in (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "image_token_id",
        "forced_eos_token_id",
    ):
        value = getattr(made, k, None)
        if isinstance(value, int) and value >= 128:
            chosen[k] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(k, 3)
    subs = getattr(made, "sub_configs", None) or {}
    for name in subs:
        held = getattr(made, name, None)
        if held is not None and hasattr(held, "to_dict"):
            try:
                chosen[name] = config_of(type(held), inside=True).to_dict()
                chosen[name]["model_type"] = held.model_type
            except Exception:  # its own default then
                continue
    chosen["return_dict"] = True
    try:
        return cls(**chosen)
    except Exception:
        chosen = {k: v for k, v in chosen.items() if k not in ("head_dim", "return_dict")}
        return cls(**chosen)


def model_of(name: str) -> Any:
    """A tiny model of an architecture: with its language head, if it has one."""
    import torch
    from transformers.models.auto import configuration_auto as configurations
    from transformers.models.auto import modeling_auto as auto

    cls = configurations.CONFIG_MAPPING[name]
    config = config_of(cls)
    for mapping in (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING):
        if cls in mapping:
            chosen = mapping[cls]
            chosen = chosen[0] if isinstance(chosen, (list, tuple)) else chosen
            count = 0
            # The default sizes of what the table does not know may be those of a full model; some cannot be made without data.
            with contextlib.suppress(Exception), torch.device("meta"):
                count = sum(p.numel() for p in chosen(copy.deepcopy(config)).parameters())
            if count > LARGEST:
                raise LookupError(f"no tiny model: {count:,} weights")
            torch.manual_seed(0)
            return chosen(config).eval()
    raise LookupError("no model class")


def inputs_of(model: Any, seed: int) -> dict[str, Any]:
    """Inputs by name, as the model's signature and configuration ask for them."""
    import torch

    g = torch.Generator().manual_seed(seed)
    takes, config = inspect.signature(model.forward).parameters, model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    made: dict[str, Any] = {}
    main = model.main_input_name
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    if main == "input_ids" or ("input_ids" in takes and "decoder_input_ids" not in takes):
        made["input_ids"] = torch.randint(4, min(getattr(text, "vocab_size", 128), 128), (2, 11), generator=g)
        if "attention_mask" in takes:
            mask = torch.ones(2, 11, dtype=torch.long)
            mask[1, 11 - 3 * (seed % 2) :] = 0
            made["attention_mask"] = mask
    if main == "pixel_values":
        made["pixel_values"] = torch.randn(2, channels, *size, generator=g)
    if main == "pixel_values_videos" or main == "pixel_values_video":
        made[main] = torch.randn(1, getattr(config, "num_frames", 4), channels, *size, generator=g)
    if main == "input_values":
        made["input_values"] = torch.randn(2, 1600, generator=g)
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 80))
        long = 2 * getattr(config, "max_source_positions", 100)
        made["input_features"] = torch.randn(2, bins, long, generator=g)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = torch.randint(4, 100, (2, 7), generator=g)
    if "pixel_values" in takes and main == "input_ids" and name_of(model) in ("vilt", "clip", "siglip", "flava", "bridgetower"):
        made["pixel_values"] = torch.randn(2, 3, 32, 32, generator=g)
    if "use_cache" in takes:
        made["use_cache"] = False
    return made


def name_of(model: Any) -> str:
    return str(model.config.model_type)


def leaves(value: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def difference(given: list[Any], wanted: list[Any]) -> float:
    """The largest difference relative to the largest number of the same result; infinite where a shape or a NaN differs."""
    import torch

    worst = 0.0
    if len(given) != len(wanted):
        return float("inf")
    for a, b in zip(given, wanted, strict=True):
        a, b = a.detach().to(torch.float64), b.detach().to(torch.float64)
        if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[b.isinf()], b[b.isinf()]):
            return float("inf")
        finite = b.isfinite()
        if finite.any():
            worst = max(worst, float((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-6)))
    return worst


def reasons(program: Any) -> dict[str, int]:
    """Steps that torch runs, by why."""
    from tilewright.ir.ops import Call

    found: Counter[str] = Counter()
    for step in program.steps:
        calls = [n.op.target for n in step.part.nodes if isinstance(n.op, Call)]
        if calls:
            found[f"call {calls[0]}"] += 1
        elif step.decision is not None and step.decision.kernel.candidate == "reference":
            refused = [r for r in step.decision.rejected if r.candidate.startswith("llvm")]
            if getattr(step.decision.problem, "only_views", False):
                continue
            found[f"fusion: {refused[0].why if refused else 'no candidate'}"[:110]] += 1
    return dict(found)


def differing_attention(model: Any, inputs: Any, wanted: list[list[Any]]) -> float:
    """The distance between a model's two ways to compute one and the same attention, as eager torch runs both.

    Some models lose the causality of their masks where the mask is full and torch's fused attention is to know it. No result
    is the right one then, so that the plain way is compared, and `wanted` becomes what that gives.
    """
    import torch

    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return 0.0
    told = [m for m in model.modules() if hasattr(m, "set_attn_implementation")]
    for m in told:  # each: a decoder may have a copy of the configuration
        m.set_attn_implementation("eager")
    with torch.no_grad():
        plain = [leaves(model(**one)) for one in inputs]
    apart = max(difference(a, b) for a, b in zip(plain, wanted, strict=True))
    if apart > 0.05:
        wanted[:] = plain
        return apart
    for m in told:
        m.set_attn_implementation("sdpa")
    return 0.0


def outcome(name: str) -> dict[str, Any]:
    """Compile and judge one architecture."""
    import torch

    import tilewright
    from tilewright.errors import TilewrightError

    try:
        model = model_of(name)
        first, second = inputs_of(model, 0), inputs_of(model, 1)
        with torch.no_grad():
            wanted = [leaves(model(**one)) for one in (first, second)]
        if not wanted[0]:
            raise ValueError("no tensors come out")
        changed = differing_attention(model, (first, second), wanted)
    except Exception as error:
        return {"status": "eager", "message": f"{type(error).__name__}: {error}"[:300]}
    began = time.monotonic()
    try:
        program = tilewright.compile(model, example_inputs=first, budget_s=0, cache=False)
        took = time.monotonic() - began
        given = [leaves(program(**{k: v for k, v in one.items() if isinstance(v, torch.Tensor)})) for one in (first, second)]
        torch.manual_seed(0)
    except TilewrightError as error:
        return {"status": "refused", "message": str(error), "s": time.monotonic() - began}
    except Exception:
        return {"status": "crash", "message": traceback.format_exc()[-1500:], "s": time.monotonic() - began}
    worst = max(difference(a, b) for a, b in zip(given, wanted, strict=True))
    return {
        "status": "right" if worst < 1e-4 else "wrong",
        "difference": worst,
        "s": took,
        "attentions_apart": changed,
        "steps": len(program.steps),
        "torch": reasons(program),
        "notes": list(program.source.notes)[:5],
    }


def apart(name: str, out: Path) -> dict[str, Any]:
    """`outcome` in a process of its own, ended after the limit."""
    kept = out / f"{name}.json"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        signal.alarm(LIMIT_S)  # ends it, whatever it is doing
        try:
            found = outcome(name)
        except BaseException:
            found = {"status": "crash", "message": traceback.format_exc()[-1500:]}
        kept.write_text(json.dumps({"name": name, **found}, indent=1))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        ended = "endless" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "dead"
        kept.write_text(json.dumps({"name": name, "status": ended, "message": f"wait status {status}"}))
    return json.loads(kept.read_text())


def main() -> None:
    import torch  # noqa: F401 - before the children, which then have it
    import transformers  # noqa: F401
    from transformers.models.auto import modeling_auto as auto

    import tilewright  # noqa: F401

    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="*")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--slice", default="0/1")
    asked = options.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    index, count = map(int, asked.slice.split("/"))
    names = asked.names or sorted(auto.MODEL_MAPPING_NAMES)[index::count]
    counts: Counter[str] = Counter()
    for name in names:
        found = apart(name, asked.out)
        counts[found["status"]] += 1
        message = str(found.get("message", "")).replace("\n", " ")[:160]
        print(  # noqa: T201
            f"{name:28} {found['status']:8} {found.get('s', 0):6.1f}s {found.get('difference', 0):.1e} {message}", flush=True
        )
    print(dict(counts), file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
