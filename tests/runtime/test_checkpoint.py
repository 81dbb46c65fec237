"""Files that hold quantised weights: read in place, recognised by what is in them, and refused with a reason where broken."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_models import one
from safetensors.torch import save_file
from weight_layouts import dense, drawn, words

import tilewright
from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.ir.safetensors import TensorFile

CODES, ZEROS, SCALES = drawn(1, 16, 128, 32, 4)
DENSE = dense(CODES, ZEROS, SCALES, 32)
INTERLEAVED = [8 * i + c for i in range(2) for c in (0, 2, 4, 6, 1, 3, 5, 7)]


def layers():
    """One layer of each format, a bias, and a tensor that is none."""
    return {
        "a.up.qweight": words(CODES, 4).t().contiguous(),
        "a.up.qzeros": words(ZEROS.t() - 1, 4),
        "a.up.scales": SCALES.t().contiguous(),
        "a.up.g_idx": (torch.arange(128) // 32).int(),
        "a.up.bias": torch.arange(16.0),
        "b.up.qweight": words(CODES.t()[:, INTERLEAVED], 4),
        "b.up.qzeros": words(ZEROS.t()[:, INTERLEAVED], 4),
        "b.up.scales": SCALES.t().contiguous(),
        "c.up.weight_packed": words(CODES, 4),
        "c.up.weight_scale": SCALES,
        "c.up.weight_shape": torch.tensor([16, 128]),
        "c.up.weight_zero_point": words(ZEROS.t(), 4).t().contiguous(),
        "norm.weight": torch.randn(7).bfloat16(),
    }


def test_the_formats_are_told_by_what_is_there(tmp_path):
    tensors = layers()
    save_file(tensors, tmp_path / "model.safetensors")
    read = tilewright.read_checkpoint(tmp_path / "model.safetensors")
    assert read.layers == {"a.up": "gptq", "b.up": "awq", "c.up": "compressed-tensors"}
    for name in read.layers:
        assert torch.equal(read.weight(name).dequantize(), DENSE), name
    assert torch.equal(read.bias("a.up"), tensors["a.up.bias"]) and read.bias("b.up") is None
    for name, tensor in tensors.items():
        assert torch.equal(read.tensor(name), tensor), name
    assert set(read.names) == set(tensors)
    assert read.plain == ["norm.weight"]
    layer = tilewright.Linear.from_checkpoint(tmp_path, "a.up")
    assert torch.equal(layer.weight.dequantize(), DENSE) and layer.bias is not None


# The types that the format's documentation lists and torch has (`safetensors.torch.save`), by torch's names.
INTEGERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["bfloat16", "float16", "float32", "float64", "complex64"]
FLOATS_8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", INTEGERS + FLOATS + FLOATS_8)
def test_every_type_that_the_library_writes_is_read(tmp_path, name):
    of = getattr(torch, name, None)
    if of is None:
        pytest.skip(f"this torch has no {name}")
    bits = torch.randint(0, 256, (3, 16), dtype=torch.uint8)
    written = bits > 99 if of is torch.bool else bits.view(of)
    try:
        save_file({"t": written}, tmp_path / "model.safetensors")
    except KeyError:
        pytest.skip(f"this safetensors has no {name}")
    file = TensorFile(tmp_path / "model.safetensors")
    found = file.tensor("t")
    assert found.dtype == of == file.dtype("t") and found.shape == written.shape
    assert torch.equal(found.view(torch.uint8), written.view(torch.uint8))


def test_a_folder_of_shards(tmp_path):
    tensors = layers()
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"{i}.safetensors")
    assert len(tilewright.read_checkpoint(tmp_path).layers) == 3
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[::2], "0.safetensors")}))
    assert set(tilewright.read_checkpoint(tmp_path).names) == set(names[::2])
    assert set(tilewright.read_checkpoint(index).names) == set(names[::2])
    index.write_text(json.dumps({"weight_map": {"x": "../0.safetensors"}}))
    with pytest.raises(InputError, match=r"the index names '../0.safetensors', which is no file beside it"):
        tilewright.read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "0.safetensors", "y": "2.safetensors"}}))
    with pytest.raises(InputError, match=r"the index names '2.safetensors', which is no .*\n  try: fetch the checkpoint whole"):
        tilewright.read_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(InputError, match="an index without a weight_map"):
        tilewright.read_checkpoint(tmp_path)
    index.write_text("[")
    with pytest.raises(InputError, match=r"(?s)no table in JSON.*try: fetch the file again"):
        tilewright.read_checkpoint(tmp_path)


@pytest.mark.parametrize(("label", "version"), [("gptq", 1), ("gptq_v2", 2)])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
def test_the_label_counts_where_the_zero_points_do_not_tell(tmp_path, label, version, file):
    codes = CODES.clamp(min=12)
    save_file(
        {
            "up.qweight": words(codes, 4).t().contiguous(),
            "up.qzeros": words(ZEROS.t() - int(version == 1), 4),
            "up.scales": SCALES.t().contiguous(),
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(InputError, match=r"(?s)steps off their zero points .*\(up\).*try: version=1"):
        tilewright.read_checkpoint(tmp_path).weight("up")
    said = {"checkpoint_format": label}
    (tmp_path / file).write_text(json.dumps({"quantization_config": said} if file == "config.json" else said))
    assert torch.equal(tilewright.read_checkpoint(tmp_path).weight("up").dequantize(), dense(codes, ZEROS, SCALES, 32))


def test_what_a_checkpoint_has_not(tmp_path):
    with pytest.raises(InputError, match=r"no \.safetensors file in"):
        tilewright.read_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"cannot read .*nothing\.safetensors: No such file.*\n  try: a \.safetensors file"):
        tilewright.read_checkpoint(tmp_path / "nothing.safetensors")
    save_file(layers(), tmp_path / "model.safetensors")
    read = tilewright.read_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"no quantised layer .d\.up.\n  try: a\.up, b\.up, c\.up"):
        read.weight("d.up")
    with pytest.raises(InputError, match="the checkpoint has no tensor 'd'"):
        read.tensor("d")
    save_file(
        {"x.qweight": torch.zeros(2, 16).int(), "x.qzeros": torch.zeros(1, 2).int(), "x.scales": torch.ones(3, 16)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(TypeMismatchError, match=r"are no layer of GPTQ \(x\)"):
        tilewright.read_checkpoint(tmp_path).weight("x")
    save_file({"y": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="has no quantised layer 'x'\n  try: it has none"):
        tilewright.read_checkpoint(tmp_path).weight("x")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("a.up.scales", "qweight without scales"),
        ("b.up.qzeros", "qweight without qzeros"),
        ("c.up.weight_scale", "weight_packed without weight_scale"),
    ],
)
def test_a_layer_of_which_a_part_is_missing_is_refused(gone, said, tmp_path):
    save_file({n: t for n, t in layers().items() if n != gone}, tmp_path / "model.safetensors")
    layer = gone.rpartition(".")[0]
    read = tilewright.read_checkpoint(tmp_path)
    assert read.layers[layer] == said and len(read.layers) == 3
    with pytest.raises(InputError, match=said) as caught:
        read.weight(layer)
    assert caught.value.where == layer and caught.value.hint.startswith(gone)


@pytest.mark.parametrize("layer", ["a.up", "c.up"])
def test_scales_that_are_no_numbers_are_refused(layer, tmp_path):
    tensors = layers()
    name = f"{layer}.{'scales' if layer == 'a.up' else 'weight_scale'}"
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"a scale that is not finite \({layer}\)"):
        tilewright.read_checkpoint(tmp_path).weight(layer)


def written(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1, 2", "its header is no table of tensors"),
        (b"[1, 2]", "its header is no table of tensors"),
        (b'{"a": {"dtype": "F32"}}', "its header is no table of tensors"),
        (b'{"a": 3, "b": \xff}', "its header is no table of tensors"),
        (b'{"\x80": 3}', "its header is no table of tensors"),
        (b'{"a": ' + b"[" * 5000 + b"}", "its header is no table of tensors"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, "'a' lies at bytes 0 to 9 of 8"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "'a' lies at bytes 8 to 0 of 8"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "its header is no table of tensors"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, r"'a' is F32\[3\] in 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 8]}}, "in 8 bytes"),
    ],
)
def test_broken_files_are_refused(tmp_path, header, message):
    with pytest.raises(InputError, match=message):
        TensorFile(written(tmp_path / "a.safetensors", header, bytes(8)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 2**16))
def test_mutants_are_read_or_refused(tmp_path, changes, cut):
    """Tensors of a file are read, whatever stands in it, or a typed error says why not."""
    save_file({n: t for n, t in layers().items() if n.startswith(("a.", "c."))}, tmp_path / "m.safetensors")
    content = bytearray((tmp_path / "m.safetensors").read_bytes())
    for at, value in changes:
        content[at % min(len(content), 900)] = value  # the header's 900 bytes, mostly
    (tmp_path / "m.safetensors").write_bytes(content[: len(content) - cut % 50])
    try:
        read = tilewright.read_checkpoint(tmp_path / "m.safetensors")
        for name in read.layers:
            read.weight(name).dequantize()
            read.bias(name)
    except TilewrightError:
        pass


@pytest.mark.parametrize("path", [None, 3, b"model.safetensors"])
def test_what_is_no_path(path):
    with pytest.raises(InputError, match=rf"an argument of type {type(path).__name__} \(path\)\n  try: a folder"):
        tilewright.read_checkpoint(path)


def test_files_of_other_formats_are_called_what_they_are(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "m.pt")
    with pytest.raises(InputError, match=r"no \.safetensors file in .*\n  try: m.pt is of another format: write its tensors"):
        tilewright.read_checkpoint(tmp_path)
    torch.save({"a": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, kind in (("m.pt", "zip archive"), ("old.pt", "pickle")):
        words = rf"(?s)a {kind} is no safetensors file .*try: if torch.save wrote it: safetensors.torch.save_file"
        with pytest.raises(InputError, match=words):
            tilewright.read_checkpoint(tmp_path / name)
    (tmp_path / "gguf.safetensors").write_bytes(b"GGUF" + bytes(99))
    with pytest.raises(InputError, match=r"(?s)a GGUF file is no safetensors file.*try: a name that ends in .gguf"):
        tilewright.read_checkpoint(tmp_path / "gguf.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"try: m\.gguf is of another format: give its path"):
        tilewright.read_checkpoint(tmp_path / "folder")


def test_a_header_that_is_longer_than_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    for content in (b"", b"abc", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 0)):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no safetensors file: a header of"):
            TensorFile(path)


def test_types_and_places_of_tensors(tmp_path):
    table = {
        "__metadata__": {"format": "pt"},
        "empty": {"dtype": "F16", "shape": [0, 3], "data_offsets": [0, 0]},
        "byte": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]},
        "odd": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        "four": {"dtype": "F4", "shape": [6], "data_offsets": [5, 8]},
    }
    data = struct.pack("<bf", -3, 1.5) + b"xyz"
    file = TensorFile(written(tmp_path / "a.safetensors", table, data))
    assert file.metadata == {"format": "pt"} and file.names == ["empty", "byte", "odd", "four"]
    assert file.tensor("empty").shape == (0, 3) and file.tensor("empty").dtype == torch.float16
    assert file.tensor("byte").item() == -3
    assert file.tensor("odd").tolist() == [1.5]
    with pytest.raises(UnsupportedError, match="'four' holds F4"):
        file.tensor("four")
    file.tensor("byte").fill_(5)
    assert file.tensor("byte").item() == -3  # the file is not written


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_products_with_packed_weights(bits, zeros):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (6, 3, 32)).astype(np.uint8)
    constants = {"weight": codes, "s": rng.random((6, 3)).astype(np.float32)}
    zero = np.full((6, 3), 1 << bits - 1)
    if zeros:
        zero = rng.integers(0, 1 << bits, (6, 3)).astype(np.uint8)
        constants["z"] = zero if bits == 8 else np.pad(zero, ((0, 0), (0, 1)))
    if bits == 4:
        constants = {n: v if n == "s" else v[..., ::2] | v[..., 1::2] << 4 for n, v in constants.items()}
    feeds = {"a": rng.standard_normal((2, 80)).astype(np.float32)}
    model = one("MatMulNBits", feeds, constants, domain="com.microsoft", K=80, N=6, bits=bits, block_size=32)
    (found,) = tilewright.weights_of(model).values()
    expected = ((codes - zero[..., None].astype(float)) * constants["s"][..., None]).reshape(6, 96)[:, :80]
    np.testing.assert_allclose(found.dequantize().numpy(), expected, rtol=1e-6)
    assert found.dtype.name == f"{'u' if zeros else 's'}{bits}" and found.group_size == 32
    y = tilewright.Linear(found)(torch.from_numpy(feeds["a"]))
    np.testing.assert_allclose(y.numpy(), feeds["a"] @ expected.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [16, 0])
def test_onnx_weights_that_are_dequantised(block):
    """They have scales by blocks along K [K, N], or by column."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (64, 5)).astype(np.int8)
    scales = rng.random((4, 5) if block else 5).astype(np.float32)
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0 if block else 1, block_size=block)
    graph = helper.make_graph(
        [node, helper.make_node("MatMul", ["x", "d"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5])],
        [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(scales, "s")],
    )
    found = tilewright.weights_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert list(found) == ["w"]
    spread = np.repeat(scales, 16, axis=0) if block else scales
    np.testing.assert_array_equal(found["w"].dequantize().numpy(), (codes * spread).T)


def test_weights_of_a_program_that_leaves_extents_open(tmp_path):
    codes = np.ones((64, 5), np.int8)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1),
            helper.make_node("MatMul", ["x", "d"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 5])],
        [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(np.ones(5, np.float32), "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    with pytest.raises(
        InputError, match=r"axis 0 \('rows'\) has no size.*\n  try: --input-dim @x 1 64 \(or other sizes; input_dims=…\)"
    ):
        tilewright.weights_of(model)
    assert list(tilewright.weights_of(model, LoadOptions(batch=1))) == ["w"]


def test_a_program_without_such_weights():
    from tilewright.ir.notation import parse

    with pytest.raises(
        UnsupportedError, match=r"(?s)it holds no constant weight of 4 or 8 bits with scales.*try: a model with MatMulNBits"
    ):
        tilewright.weights_of(parse("f32[2,64] @ s4[3,64]^T group=32"))
