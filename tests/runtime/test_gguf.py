"""GGUF files against the format's own description: ggml's C, written here a value at a time, and the `gguf` package where it is
installed."""

import struct

import numpy as np
import pytest
import torch

import tilewright
from tilewright.errors import InputError, UnsupportedError
from tilewright.runtime.gguf import GgufFile

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
BLOCKS = {"Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
SCALES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}  # where a block has its f16


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def fact(name, value):
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(name) + struct.pack("<II", 4, value)


def write(path, tensors, facts=None, version=3, alignment=32):
    """A file of (type, shape, bytes) by name."""
    facts = facts or {"general.architecture": "none"}
    table, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += text(name) + dims + struct.pack("<IQ", TYPES[kind], len(data))
        data += raw + bytes(-len(raw) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(facts)) + b"".join(fact(*f) for f in facts.items()) + table
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def random_blocks(kind, rows, columns, seed=0):
    """Any bytes, but for the scales, which are numbers."""
    values, size = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.standard_normal((rows, columns // values)).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw


def as_c_does(kind, block):
    """A block's values as ggml-quants.c computes them: dequantize_row_q4_0, _q8_0, _q4_K, _q6_K."""
    f32, b = np.float32, [int(v) for v in block]
    half = [f32(block[at : at + 2].view(np.float16)[0]) for at in SCALES[kind]]
    y = np.zeros(BLOCKS[kind][0], f32)
    if kind == "Q8_0":
        return np.array([f32(block[2 + j : 3 + j].view(np.int8)[0]) * half[0] for j in range(32)], f32)
    if kind == "Q4_0":
        for j in range(16):
            y[j], y[j + 16] = f32((b[2 + j] & 15) - 8) * half[0], f32((b[2 + j] >> 4) - 8) * half[0]
    if kind == "Q4_K":
        q = b[4:16]

        def scale_min(j):
            if j < 4:
                return q[j] & 63, q[j + 4] & 63
            return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4

        for j in range(0, 256, 64):
            for side in (0, 1):
                s, m = scale_min(j // 32 + side)
                d1, m1 = half[0] * f32(s), half[1] * f32(m)
                for i in range(32):
                    code = b[16 + j // 2 + i]
                    y[j + 32 * side + i] = d1 * f32(code >> 4 if side else code & 15) - m1
    if kind == "Q6_K":
        sc = block[192:208].view(np.int8)
        for n in (0, 1):
            ql, qh, s = b[64 * n :], b[128 + 32 * n :], sc[8 * n :]
            for i in range(32):
                codes = (ql[i] & 15) | (qh[i] & 3) << 4, (ql[i + 32] & 15) | (qh[i] >> 2 & 3) << 4
                codes += (ql[i] >> 4) | (qh[i] >> 4 & 3) << 4, (ql[i + 32] >> 4) | (qh[i] >> 6 & 3) << 4
                for k, code in enumerate(codes):
                    y[128 * n + 32 * k + i] = half[0] * f32(s[i // 16 + 2 * k]) * f32(code - 32)
    return y


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_are_what_ggml_makes_of_them(kind, tmp_path):
    raw = random_blocks(kind, 3, 512)
    path = write(tmp_path / "a.gguf", {"a.weight": (kind, (3, 512), raw.tobytes())}, version=2)
    wanted = np.stack([np.concatenate([as_c_does(kind, block) for block in row]) for row in raw])
    checkpoint = tilewright.read_checkpoint(path)
    assert checkpoint.layers == {"a": f"gguf {kind}"}
    weight = checkpoint.weight("a")
    assert weight.shape == (3, 512) and np.array_equal(weight.dequantize().numpy(), wanted)
    assert torch.equal(checkpoint.tensor("a.weight"), weight.dequantize())
    layer = tilewright.Linear.from_checkpoint(checkpoint, "a")
    x = torch.randn(5, 512)
    wide = x.double() @ torch.from_numpy(wanted).double().t()
    assert float((layer(x) - wide).norm() / wide.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_are_what_the_package_makes_of_them(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    of = getattr(gguf.GGMLQuantizationType, kind)
    raw = random_blocks(kind, 6, 512, seed=1).reshape(6, -1)
    if kind in ("Q4_0", "Q8_0"):
        raw = gguf.quants.quantize(np.random.default_rng(2).standard_normal((6, 512)).astype(np.float32), of)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "none")
    writer.add_tensor("a.weight", raw, raw_dtype=of)
    writer.add_tensor("norm.weight", np.ones(7, np.float32))
    writer.add_array("names", ["a", "bc"])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = GgufFile(tmp_path / "a.gguf")
    assert np.array_equal(file.weight("a.weight").dequantize().numpy(), gguf.quants.dequantize(raw, of))
    assert torch.equal(file.tensor("norm.weight"), torch.ones(7))


def llama(path, model, architecture):
    """A model written as llama.cpp's convert_hf_to_gguf.py does, its matrices as Q8_0."""
    config = model.config
    facts = {"general.architecture": architecture, f"{architecture}.attention.head_count": config.num_attention_heads}
    facts |= {f"{architecture}.attention.head_count_kv": config.num_key_value_heads, "tokens": ["a", "b"]}
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "q_proj": "attn_q", "k_proj": "attn_k"}
    names |= {"v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
    names |= {"down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    tensors, held = {}, {}
    for name, value in model.state_dict().items():
        *path_, own, last = name.split(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(own)
        layer = f"blk.{path_[2]}." if "layers" in path_ else ""
        if value.dim() == 1:
            tensors[f"{layer}{names[own]}.{last}"] = ("F32", tuple(value.shape), value.numpy().tobytes())
            continue
        groups = value.reshape(value.shape[0], -1, 32)
        d = (groups.abs().amax(2) / 127).half()
        codes = (groups / d[..., None].float()).round().clamp(-127, 127).to(torch.int8)
        held[name] = (codes.float() * d[..., None].float()).reshape(value.shape)
        if heads and architecture == "llama":  # LlamaModel.permute there
            turn = torch.arange(value.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).flatten()
            d, codes = d[turn], codes[turn]
        raw = torch.cat((d[..., None].view(torch.uint8), codes.view(torch.uint8)), dim=-1)
        tensors[f"{layer}{names[own]}.{last}"] = ("Q8_0", tuple(value.shape), raw.numpy().tobytes())
    return write(path, tensors, facts), held


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_model_is_read_by_the_names_of_transformers(architecture, tmp_path):
    """Logits of the dequantised reference; its rows and names were turned as llama.cpp does, by code of this test."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config, kind = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[architecture]
    torch.manual_seed(0)
    model, fresh = (kind(config(**sizes, **heads)).eval() for _ in range(2))
    path, held = llama(tmp_path / "m.gguf", model, architecture)
    model.load_state_dict({**model.state_dict(), **held})
    checkpoint = tilewright.read_checkpoint(path)
    assert "lm_head" in checkpoint.layers and "model.embed_tokens" not in checkpoint.layers
    report = tilewright.quantize_(fresh, checkpoint)
    assert len(report.layers) == 15 and not report.skipped and not report.unused
    fresh.load_state_dict({n: checkpoint.tensor(n) for n in checkpoint.plain}, strict=False)
    ids = torch.tensor([[3, 14, 15, 92, 6]])
    with torch.no_grad():
        torch.testing.assert_close(fresh(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


KIND = text("general.architecture")


def test_broken_files_are_refused(tmp_path):
    raw = random_blocks("Q8_0", 2, 64).tobytes()
    good = write(tmp_path / "good.gguf", {"a.weight": ("Q8_0", (2, 64), raw)}).read_bytes()
    path = tmp_path / "bad.gguf"
    cases = {
        "cannot read": b"",
        "it does not begin with GGUF": b"GGML" + good[4:],
        r"version 9, where \(2, 3\) are known": good[:4] + b"\x09" + good[5:],
        "a table of [0-9]+ entries": good[:8] + b"\xff" * 8 + good[16:],
        "its tables end at byte": good[:60],
        r"'a.weight' ends beyond the file's end": good[:-32],
        "a fact of type 77": good.replace(KIND + struct.pack("<I", 8), KIND + struct.pack("<I", 77)),
        "an array of type 9": good.replace(KIND + struct.pack("<I", 8), KIND + struct.pack("<II", 9, 9)),
    }
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            tilewright.read_checkpoint(path)
    for message, tensors, facts in (
        (r"rows of 33, no multiple of 32", {"a.weight": ("Q8_0", (2, 33), raw)}, None),
        (r"an alignment of 3", {"a.weight": ("Q8_0", (2, 64), raw)}, {"general.alignment": 3}),
        (r"a tensor of shape \[0, 64\]", {"a.weight": ("Q8_0", (0, 64), b"")}, None),
        (r"a tensor of 5 axes", {"a.weight": ("F32", (1, 1, 1, 1, 1), bytes(4))}, None),
        (
            "stands in its table twice",
            {n: ("F32", (32,), bytes(128)) for n in ("output.weight", "lm_head.weight")},
            {"general.architecture": "qwen2"},
        ),
        (
            "'blk.0.attn_q.weight' has 2 rows for 4 heads",
            {"blk.0.attn_q.weight": ("Q8_0", (2, 64), raw)},
            {"general.architecture": "llama", "llama.attention.head_count": 4},
        ),
    ):
        with pytest.raises(InputError, match=message):
            checkpoint = tilewright.read_checkpoint(write(path, tensors, facts))
            checkpoint.weight(next(iter(checkpoint.layers)))


def test_other_types_are_named(tmp_path):
    raw = random_blocks("Q5_0", 2, 64).tobytes()
    path = write(tmp_path / "m.gguf", {"a.weight": ("Q5_0", (2, 64), raw), "b.weight": ("F16", (2, 2), bytes(8))})
    checkpoint = tilewright.read_checkpoint(path)
    with pytest.raises(UnsupportedError, match=r"(?s)'a\.weight' is type 6\[2, 64\].*try: a matrix of Q4_0, Q8_0, Q4_K, Q6_K"):
        checkpoint.weight("a")
    assert checkpoint.plain == ["b.weight"] and checkpoint.tensor("b.weight").dtype is torch.float16
    TYPES["IQ2_S"] = 22
    with pytest.raises(UnsupportedError, match=r"'a\.weight' has GGML's type 22"):
        tilewright.read_checkpoint(write(path, {"a.weight": ("IQ2_S", (2, 256), bytes(164))}))


def test_mutants_of_a_file_give_typed_errors_or_weights(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"a.weight": ("Q4_K", (2, 256), random_blocks("Q4_K", 2, 256).tobytes())}
    good = np.frombuffer(
        write(tmp_path / "m.gguf", tensors, {"general.architecture": "llama", "l": ["x"]}).read_bytes(), np.uint8
    )
    for _ in range(300):
        bad = good.copy()
        bad[rng.integers(0, 160, 2)] = rng.integers(0, 256, 2)
        (tmp_path / "m.gguf").write_bytes(bad.tobytes())
        try:
            checkpoint = tilewright.read_checkpoint(tmp_path / "m.gguf")
            for layer in checkpoint.layers:
                checkpoint.weight(layer)
        except (InputError, UnsupportedError):
            pass
