"""The example models: written, reused, checked against torch and onnxruntime, and against onnxruntime's own quantiser."""

import collections
import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import model_files
import models
import quantized_models
import tilewright
from tilewright.errors import InputError, MissingDependencyError

NAMES = list(models.ARCHITECTURES)
QUANTIZED = list(quantized_models.SCHEMES)
CONFIG = {
    "bert": {"vocab_size": 503, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "distilgpt2": {"vocab_size": 503, "n_embd": 64, "n_head": 4},
}
HIDDEN = {"bert": 64, "distilgpt2": 503}
# Twice what was measured; random weights do not damp the noise of each rounding as trained ones do.
BOUND = {"int8": 0.10, "int8-asymmetric": 0.08, "uint8": 0.08, "fp8": 0.22, "fp8-fnuz": 0.22}


def write(name, variant, out, **changes):
    sizes = {"batch": 2, "sequence": 16, "layers": 2, "config": CONFIG[name]}
    return models.write_model(name, variant, out, **(sizes | changes))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def tensors(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def op_counts(model):
    return collections.Counter(node.op_type for node in model.graph.node)


def bits(array):
    """An array in a form that compares equal exactly where every bit does."""
    return array.dtype.name, array.shape, array.tobytes()


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.thin(2)
@pytest.mark.parametrize("opset", models.OPSETS)
@pytest.mark.parametrize("name", NAMES)
def test_the_float_model_is_the_torch_module(name, opset, out):
    path = write(name, "f32", out, opset=opset)
    onnx.checker.check_model(str(path), full_check=True)
    assert models.torch_difference(path) < 1e-5
    model = onnx.load(path)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*model.graph.input, *model.graph.output)}
    assert shapes == {"input_ids": [2, 16], "attention_mask": [2, 16], models.ARCHITECTURES[name].output: [2, 16, HIDDEN[name]]}
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    counts = op_counts(model)
    assert counts["Attention"] == (2 if opset == 23 else 0) and counts["Softmax"] == (0 if opset == 23 else 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_matters_and_no_parameter_was_dropped(name, out):
    path = write(name, "f32", out)
    feeds = models.random_inputs(path, seed=3)
    assert not feeds["attention_mask"].all() and feeds["attention_mask"][0].all()
    unmasked = dict(feeds, attention_mask=np.ones_like(feeds["attention_mask"]))
    masked, whole = model_files.run_model(path, feeds), model_files.run_model(path, unmasked)
    hidden = feeds["attention_mask"][1] == 0
    assert np.array_equal(masked[0], whole[0]) and not np.allclose(masked[1, hidden], whole[1, hidden], atol=1e-4)
    module = models._build_module(name, CONFIG[name] | {models.ARCHITECTURES[name].layers_key: 2}, 0, 16)
    kept = sum(t.size for t in tensors(onnx.load(path)).values() if t.dtype == np.float32)
    # Position and token-type embeddings may be folded into what the sequence uses of them; nothing else may shrink.
    unused = sum(p.numel() for n, p in module.named_parameters() if "position_embeddings" in n or "token_type" in n)
    assert kept >= sum(p.numel() for p in module.parameters()) - unused


def test_the_exported_file_holds_nothing_of_this_machine(out):
    text = write("distilgpt2", "f32", out).read_bytes()
    assert b"site-packages" not in text and b"stack_trace" not in text and b"GPT2Attention" in text


@pytest.mark.parametrize("opset", models.OPSETS)
@pytest.mark.parametrize("variant", QUANTIZED)
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_model_is_sound_and_near_its_float_model(name, variant, opset, out):
    path, source = write(name, variant, out, opset=opset), write(name, "f32", out, opset=opset)
    onnx.checker.check_model(str(path), full_check=True)
    error = models.relative_error(path, source)
    assert 1e-3 < error < BOUND[variant], error


@pytest.mark.parametrize("variant", QUANTIZED)
@pytest.mark.parametrize("name", NAMES)
def test_every_matmul_stands_between_pairs_of_the_right_type(name, variant, out):
    model, source = onnx.load(write(name, variant, out)), onnx.load(write(name, "f32", out))
    scheme = quantized_models.SCHEMES[variant]
    constants, matmuls = tensors(model), [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm")]
    producers = {o: n for n in model.graph.node for o in n.output}
    readers = collections.defaultdict(list)
    for node in model.graph.node:
        for tensor in node.input:
            readers[tensor].append(node.op_type)
    weights = activations = 0
    for node in matmuls:
        for operand in node.input[:2]:
            dequantize = producers[operand]
            codes, scale, zero_point = dequantize.input
            assert dequantize.op_type == "DequantizeLinear"
            if codes in constants:
                weights += 1
                assert constants[codes].dtype == constants[zero_point].dtype == scheme.weight
                assert constants[scale].ndim == (1 if scheme.per_channel else 0)
            else:
                activations += 1
                assert producers[codes].op_type == "QuantizeLinear" and list(producers[codes].input[1:]) == [scale, zero_point]
                assert constants[zero_point].dtype == scheme.activation
                assert (constants[zero_point] == 0) or not scheme.symmetric
        assert readers[node.output[0]] == ["QuantizeLinear"]
    # BERT, a layer: Q, K, V, two products of attention, output, two of the feed-forward; Q, K and V read one pair.
    # GPT-2, a layer: Q, K and V as one Gemm with bias, then the same; after the last, the vocabulary's matmul.
    assert (weights, activations) == {"bert": (2 * 6, 2 * 10), "distilgpt2": (2 * 4 + 1, 2 * 8 + 1)}[name]
    pairs = {"bert": 2 * (8 + 8), "distilgpt2": 2 * (8 + 6) + 2}[name]
    biases = 2 * 4 if name == "distilgpt2" and scheme.weight.kind == "i" else 0
    folded = {"Transpose": 1} if name == "distilgpt2" else {}
    added = {"QuantizeLinear": pairs, "DequantizeLinear": pairs + weights + biases}
    assert op_counts(model) == op_counts(source) - collections.Counter(folded) + collections.Counter(added)


class Feeds(CalibrationDataReader):
    def __init__(self, path):
        self.left = iter([models.random_inputs(path, seed) for seed in range(models.CALIBRATION_BATCHES)])

    def get_next(self):
        return next(self.left, None)


@pytest.mark.parametrize("variant", [v for v in QUANTIZED if quantized_models.SCHEMES[v].weight.kind == "i"])
@pytest.mark.parametrize("name", NAMES)
def test_integer_models_are_those_of_onnxruntimes_own_tool(name, variant, out, tmp_path):
    source = write(name, "f32", out)
    ours, theirs = onnx.load(write(name, variant, out)), onnx.load(source)
    # onnxruntime takes a transposed weight for an activation: give it the weight as it is.
    constants = tensors(theirs)
    for node in [n for n in theirs.graph.node if n.op_type == "Transpose" and n.input[0] in constants]:
        values = np.ascontiguousarray(constants[node.input[0]].T)
        theirs.graph.initializer.append(onnx.numpy_helper.from_array(values, node.output[0]))
        theirs.graph.node.remove(node)
    scheme = quantized_models.SCHEMES[variant]
    quantize_static(
        theirs,
        tmp_path / "theirs.onnx",
        Feeds(source),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        activation_type=QuantType.QUInt8 if scheme.activation == np.uint8 else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": scheme.symmetric},
    )
    theirs = onnx.load(tmp_path / "theirs.onnx")
    assert op_counts(ours) == op_counts(theirs)
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys()
    differ = [name for name, values in mine.items() if bits(values) != bits(other[name])]
    assert not differ
    feeds = models.random_inputs(source, seed=5)
    results = [model_files.run_model(p, feeds) for p in (write(name, variant, out), tmp_path / "theirs.onnx")]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", NAMES)
def test_fp8_scales_map_the_largest_magnitude_to_the_types_own(name, out):
    ocp, fnuz, source = (onnx.load(write(name, variant, out)) for variant in ("fp8", "fp8-fnuz", "f32"))
    a, b, floats = tensors(ocp), tensors(fnuz), tensors(source)
    assert a.keys() == b.keys()
    scales = [n.input[1] for n in ocp.graph.node if n.op_type == "DequantizeLinear"]
    for scale in scales:
        np.testing.assert_allclose(b[scale], a[scale] * np.float32(448 / 240), rtol=1e-6)
    checked, tied = 0, next((n.input[0] for n in source.graph.node if n.op_type == "Transpose" and n.input[0] in floats), "")
    for key in (k.removesuffix("_quantized") for k in a if k.endswith("_quantized")):
        weight = floats[key] if key in floats else floats[tied].T
        for constants, tiny in ((a, 2.0**-9), (b, 2.0**-10)):
            codes, scale = constants[f"{key}_quantized"], constants[f"{key}_scale"]
            decoded = codes.astype(np.float32) * scale
            # Three mantissa bits: half a unit in the last place is 1/16 of the value, or half the least subnormal.
            bound = np.maximum(np.abs(weight) / 16, tiny / 2 * scale) * (1 + 1e-5)
            assert (np.abs(decoded - weight) <= bound).all()
            assert np.abs(codes.astype(np.float32)).max() == float(ml_dtypes.finfo(codes.dtype).max)
            checked += 1
    assert checked == 2 * {"bert": 12, "distilgpt2": 9}[name]


TYPES = ["int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"]
FLOATS = st.floats(-1e6, 1e6, width=32)


@given(st.tuples(FLOATS, FLOATS).map(sorted), st.sampled_from(TYPES), st.booleans())
def test_a_scale_holds_the_range_and_zero_exactly(bounds, dtype, symmetric):
    low, high = bounds
    dtype = np.dtype(getattr(ml_dtypes, dtype) if "float8" in dtype else dtype)
    if dtype != np.int8:  # the others come in one form: unsigned codes need a zero point, fp8 codes cannot have one
        symmetric = dtype != np.uint8
    scale, zero_point = quantized_models.quantization_parameters(np.float32(low), np.float32(high), dtype, symmetric=symmetric)
    assert scale > 0 and np.isfinite(scale) and zero_point.dtype == dtype
    q_low, q_high = quantized_models.type_range(dtype)
    zero = float(zero_point)
    assert q_low <= zero <= q_high and (zero == 0 or not symmetric)
    reach, flat = max(-low, high), scale == 1 and zero == 0  # flat: a range too small for its step to be a normal f32
    assert flat or reach >= 1e-38
    if not flat or reach > 1e-30:
        # The ends of the range are within half a step of a code; so is nothing lost but by rounding.
        assert (q_low - zero) * scale <= low + 0.501 * scale and (q_high - zero) * scale >= high - 0.501 * scale


@pytest.mark.parametrize("dtype", TYPES)
def test_codes_are_those_of_quantize_linear(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype) if "float8" in dtype else dtype)
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 3
    values[:8] = [0, -0.0, 1e9, -1e9, 0.25, 0.75, -0.25, 1e-9]  # ties, saturation, underflow
    scale = np.float32(0.5 if dtype.kind in "iu" else 0.01)
    node = onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    info, kind = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype(dtype)
    inputs = [info("x", 1, [10_000]), info("s", 1, [])]
    zero = onnx.numpy_helper.from_array(np.zeros((), dtype), "z")
    graph = onnx.helper.make_graph([node], "q", inputs, [info("y", kind, [10_000])], [zero])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    (want,) = ReferenceEvaluator(model).run(None, {"x": values, "s": scale})
    got = quantized_models.encode(values, scale, dtype)
    # By value: -0 is a code of e4m3fn alone.
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_an_activation_that_is_not_finite_is_named(tmp_path):
    info = onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("Log", ["x"], ["l"]), onnx.helper.make_node("MatMul", ["l", "w"], ["y"])]
    weight = onnx.numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "g", [info("x", 1, [2, 2])], [info("y", 1, [2, 2])], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "log.onnx")
    feeds = [{"x": np.array([[1, 2], [3, 0]], np.float32)}]
    with pytest.raises(InputError, match=r"2 activations are not finite, so they cannot be quantised \(log.onnx: l\)"):
        quantized_models.quantize(tmp_path / "log.onnx", quantized_models.SCHEMES["int8"], feeds)


def test_calibrating_keeps_no_activation_longer_than_the_model_does(tmp_path):
    """All activations of BERT-base together are more than 20 GB at batch 64 and sequence 384."""
    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    m, k, wide, pairs = 2048, 8, 2048, 24
    weights = {"up": np.full((k, wide), 1e-2, np.float32), "down": np.full((wide, k), 1e-2, np.float32)}
    nodes = []
    for i in range(pairs):
        nodes += [node("MatMul", [f"x{i}", "up"], [f"h{i}"]), node("MatMul", [f"h{i}", "down"], [f"x{i + 1}"])]
    initializers = [onnx.numpy_helper.from_array(v, name) for name, v in weights.items()]
    ends = [info("x0", 1, [m, k])], [info(f"x{pairs}", 1, [m, k])]
    graph = onnx.helper.make_graph(nodes, "chain", *ends, initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "c.onnx")
    code = f"""if True:
        import resource
        from pathlib import Path
        import numpy as np
        import onnxruntime
        import quantized_models
        feeds = [{{"x0": np.ones(({m}, {k}), np.float32)}}]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ranges = quantized_models.calibrate(Path("c.onnx"), [f"h{{i}}" for i in range({pairs})], feeds)
        assert len(ranges) == {pairs} and ranges["h0"][1] > 0
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / ({m} * {wide} * 4))
    """
    surroundings = os.environ | {"PYTHONPATH": str(Path(quantized_models.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=surroundings
    )
    assert float(done.stdout) < pairs / 2, "times the bytes of one activation"


def test_a_matmul_of_inputs_and_a_shared_bias_is_quantised_too(tmp_path):
    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    rng = np.random.default_rng(0)
    constants = {"w1": rng.standard_normal((8, 5)), "w2": rng.standard_normal((5, 5)), "b": rng.standard_normal(5)}
    nodes = [node("Gemm", ["x", "w1", "b"], ["h"]), node("Gemm", ["h", "w2", "b"], ["y"], transB=1)]
    initializers = [onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in constants.items()]
    graph = onnx.helper.make_graph(nodes, "g", [info("x", 1, [3, 8])], [info("y", 1, [3, 5])], initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "f32.onnx")
    feeds = {"x": rng.standard_normal((3, 8)).astype(np.float32)}
    quantised = quantized_models.quantize(tmp_path / "f32.onnx", quantized_models.SCHEMES["uint8"], [feeds])
    onnx.checker.check_model(quantised, full_check=True)
    onnx.save(quantised, tmp_path / "uint8.onnx")
    got, want = (model_files.run_model(tmp_path / f"{kind}.onnx", feeds) for kind in ("uint8", "f32"))
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.03
    per_row = tensors(quantised)["w2_scale"]
    np.testing.assert_allclose(per_row, np.abs(constants["w2"]).max(axis=1) / 127, rtol=1e-6)


@pytest.mark.thin(2)
@pytest.mark.parametrize("variant", ["f32", "int8", "fp8-fnuz"])
def test_the_same_parameters_give_the_same_bytes(variant, out, tmp_path):
    here, there = write("bert", variant, out), write("bert", variant, tmp_path)
    assert digests(here.parent) == digests(there.parent)
    assert len(digests(here.parent)) == 2  # the graph, and the weights beside it
    other = write("bert", variant, tmp_path, seed=1)
    assert digests(other.parent) != digests(there.parent)


def test_a_model_is_written_once_and_mended_when_damaged(out):
    steps = []
    path = write("bert", "int8", out, seed=7, on_step=steps.append)
    assert steps == ["building f32", "exporting f32", "calibrating and quantising", "storing"]
    before = digests(path.parent)
    stamp = path.stat().st_mtime_ns
    steps.clear()
    assert write("bert", "int8", out, seed=7, on_step=steps.append) == path
    assert not steps and path.stat().st_mtime_ns == stamp

    def truncate_weights():
        (data,) = path.parent.glob("*.data")
        data.write_bytes(data.read_bytes()[:-1])

    def truncate_graph():
        path.write_bytes(path.read_bytes()[:-100])

    def remove_weights():
        next(path.parent.glob("*.data")).unlink()

    def come_from_another_writer():
        model = onnx.load(path, load_external_data=False)
        made = json.loads(model.metadata_props[0].value)
        onnx.helper.set_model_props(model, {model_files.PARAMETERS: json.dumps(made | {"source": "older"}, sort_keys=True)})
        path.write_bytes(model.SerializeToString())

    for damage in (truncate_weights, truncate_graph, remove_weights, come_from_another_writer):
        damage()
        assert write("bert", "int8", out, seed=7, on_step=steps.append) == path
        assert steps == ["calibrating and quantising", "storing"], damage.__name__
        assert digests(path.parent) == before, damage.__name__
        steps.clear()
    assert not [folder for folder in out.iterdir() if folder.name.startswith(".")]


def test_a_quantised_model_does_not_need_the_float_one_once_written(tmp_path):
    path = write("bert", "int8", tmp_path)
    float_folder = write("bert", "f32", tmp_path).parent
    for file in float_folder.iterdir():
        file.unlink()
    steps = []
    write("bert", "int8", tmp_path, on_step=steps.append)
    assert not steps and np.isfinite(model_files.run_model(path, models.random_inputs(path, seed=0))).all()


def test_nothing_is_left_of_a_write_that_failed(tmp_path):
    def build(folder):
        (folder / "half.data").write_bytes(b"half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        model_files.reuse_or_write(tmp_path / "label" / "m.onnx", {}, build)
    assert not list(tmp_path.iterdir())


def test_whoever_comes_first_wins_and_the_other_takes_it(tmp_path, monkeypatch):
    path, rename = tmp_path / "label" / "m.onnx", Path.rename

    def build_as(name):
        return lambda _: onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), producer_name=name)

    def another_comes_first(self, target):
        monkeypatch.setattr(Path, "rename", rename)
        model_files.reuse_or_write(path, {"seed": 0}, build_as("first"))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", another_comes_first)
    assert model_files.reuse_or_write(path, {"seed": 0}, build_as("second")) == path
    assert onnx.load(path).producer_name == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["label"]
    assert model_files.read_parameters(path) == {"seed": 0}


def test_a_folder_that_is_in_the_way_is_an_error(tmp_path, monkeypatch):
    path, rename = tmp_path / "label" / "m.onnx", Path.rename

    def something_else_comes_first(self, target):
        (tmp_path / "label").mkdir()
        (tmp_path / "label" / "precious").touch()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", something_else_comes_first)
    with pytest.raises(OSError, match="not empty"):
        model_files.reuse_or_write(path, {}, lambda _: onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])))
    assert [p.name for p in tmp_path.rglob("*")] == ["label", "precious"]


def test_parameters_are_read_only_from_models_written_here(tmp_path):
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), tmp_path / "other.onnx")
    with pytest.raises(InputError, match=r"not a model that these examples wrote \(.*other.onnx\)"):
        model_files.read_parameters(tmp_path / "other.onnx")


def test_exporting_says_nothing_and_leaves_logging_and_randomness_alone(tmp_path, capfd):
    import torch

    before, state = logging.root.manager.disable, torch.random.get_rng_state()
    write("distilgpt2", "int8", tmp_path)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
    assert logging.root.manager.disable == before and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt5", "f32"), r"unknown model 'gpt5'\n  try: one of bert, distilgpt2"),
        (("bert", "int3"), r"unknown variant 'int3'\n  try: one of f32, int8, int8-asymmetric, uint8, fp8, fp8-fnuz"),
        (("bert", "f32", {"opset": 9}), r"unknown opset 9\n  try: one of 20, 23"),
        (("bert", "f32", {"batch": 0}), r"batch is 0\n  try: a number from 1 up"),
        (("bert", "f32", {"layers": -1}), r"layers is -1\n  try: a number from 1 up"),
        (("bert", "f32", {"seed": -1}), r"seed is -1\n  try: a number from 0 up"),
        (("bert", "int8", {"sequence": 513, "layers": 1}), r"sequence is 513, and the model has positions for 512"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(arguments, message, tmp_path):
    name, variant, *changes = arguments
    with pytest.raises(InputError, match=message):
        models.write_model(name, variant, tmp_path, **{"config": CONFIG.get(name), **(changes[0] if changes else {})})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime", "transformers"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    hint = r"try: pip install 'tilewright\[examples\]'"
    with pytest.raises(MissingDependencyError, match=rf"need {package}, which is not installed\n  {hint}"):
        write("bert", "int8", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_line_writes_checks_and_reuses(tmp_path):
    run = click.testing.CliRunner()
    arguments = ["bert", "--variant", "int8", "--variant", "f32", "--layers", "1", "--sequence", "8", "--out", str(tmp_path)]
    first = run.invoke(models.main, [*arguments, "--check"])
    assert first.exit_code == 0, first.output
    int8, f32 = first.stdout.splitlines()
    assert "bert-int8.onnx" in int8 and "written in" in int8 and "relative error" in int8 and int8.endswith("%")
    assert "bert-f32.onnx" in f32 and "already there" in f32 and "largest difference from torch" in f32
    second = run.invoke(models.main, arguments)
    assert second.stdout.count("already there") == 2 and second.exit_code == 0


def test_the_command_line_explains_an_error_in_words(tmp_path):
    run = click.testing.CliRunner()
    result = run.invoke(models.main, ["bert", "--sequence", "1000", "--layers", "1", "--out", str(tmp_path)])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == "error: sequence is 1000, and the model has positions for 512\n"
    (tmp_path / "file").write_text("")
    result = run.invoke(models.main, ["bert", "--layers", "1", "--out", str(tmp_path / "file" / "below")])
    assert result.exit_code == 2 and "Not a directory" in result.stderr


@pytest.mark.parametrize("script", ["models.py", "mixed_input.py"])
def test_the_scripts_run_by_path(script):
    file = Path(models.__file__).with_name(script)
    result = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, check=True, cwd=file.anchor)
    assert "--check" in result.stdout


def test_what_explain_says_of_them(out, monkeypatch):
    """An int8 BERT takes at most 60 lines, and shows the mistake of its quantisation; of a causal model it is asked whether all
    logits are read, and BERT in float shows nothing."""
    monkeypatch.setenv("COLUMNS", "160")
    found = {}
    for name, variant in (("bert", "int8"), ("bert", "f32"), ("distilgpt2", "f32")):
        found[name, variant] = tilewright.compile(str(write(name, variant, out)), budget_s=0).explain()
    said = found["bert", "int8"]
    assert len(str(said).splitlines()) <= 60 and "layers 0 to 1, 7 steps in each" in str(said)
    (pair,) = said.facts.advice
    assert pair.kind == "qdq-in-epilogue" and "no attention kernel multiplies integers" in " ".join(str(said).split())
    assert pair.title == "a QDQ pair between MatMul and its bias" and pair.saves_us > 0 and len(pair.steps) == 8
    names = [g.name for g in said.facts.groups]
    for layer in ("attention.self.{query,key,value}", "attention.self", "attention.output.dense", "output.dense"):
        assert f"encoder.layer.0-1.{layer}" in names
    assert found["bert", "f32"].facts.advice == []
    assert [(a.kind, a.where) for a in found["distilgpt2", "f32"].facts.advice] == [("logits-of-all-positions", ["lm_head"])]
    (attention,) = (p for p in found["distilgpt2", "f32"].facts.products if p.kind == "attention")
    assert "causal (upper)" in attention.accumulates, "its mask of the least number of f32 is recognised"
