"""The mixed-input problem: both files stand for the same product, and onnxruntime and numpy agree with them."""

import click.testing
import numpy as np
import onnx
import pytest

import mixed_input
import model_files
from tilewright.errors import InputError, MissingDependencyError

SMALL = {"M": 3, "N": 20, "K": 128, "group_size": 32}


@pytest.mark.parametrize(
    "sizes", [SMALL, {"M": 1, "N": 1, "K": 16, "group_size": 16}, {"M": 7, "N": 13, "K": 192, "group_size": 64}]
)
@pytest.mark.parametrize("form", mixed_input.FORMS)
def test_onnxruntime_gives_the_exact_product_rounded(form, sizes, tmp_path):
    path = mixed_input.write_mixed_input(form, tmp_path, **sizes)
    onnx.checker.check_model(str(path))
    assert mixed_input.relative_error(path) < 1e-3
    activations = mixed_input.random_activations(path)
    result = model_files.run_model(path, {"activations": activations})
    assert result.dtype == np.float16 and result.shape == (sizes["M"], sizes["N"])


def test_both_files_hold_the_same_codes_and_scales(tmp_path):
    nbits, blocked = (onnx.load(mixed_input.write_mixed_input(form, tmp_path, **SMALL)) for form in mixed_input.FORMS)
    a, b = ({t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} for model in (nbits, blocked))
    packed = a["weight_codes"]
    assert packed.shape == (20, 4, 16) and packed.dtype == np.uint8
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(20, 128).astype(np.int8) - 8
    np.testing.assert_array_equal(codes, b["weight_codes"].astype(np.int8).T)
    assert set(np.unique(codes)) == set(range(-8, 8))
    np.testing.assert_array_equal(a["weight_scales"].reshape(20, 4), b["weight_scales"].T)
    assert blocked.graph.initializer[0].data_type == onnx.TensorProto.INT4
    assert [(o.domain, o.version) for o in nbits.opset_import] == [("", 21), ("com.microsoft", 1)]
    assert [(o.domain, o.version) for o in blocked.opset_import] == [("", 21)]


def test_the_thread_s_problem_is_the_default(tmp_path):
    path = mixed_input.write_mixed_input("matmulnbits", tmp_path)
    model = onnx.load(path)
    attributes = {a.name: a.i for a in model.graph.node[0].attribute}
    assert attributes == {"K": 8192, "N": 3584, "bits": 4, "block_size": 64}
    (activations,), (result,) = model.graph.input, model.graph.output
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in (activations, result)]
    assert shapes == [[16, 8192], [16, 3584]]
    # Four bits a weight, and a scale of two bytes for 64 of them.
    assert path.stat().st_size == pytest.approx(3584 * 8192 / 2 + 3584 * 8192 / 64 * 2, rel=1e-3)


def test_equal_parameters_give_one_file_and_equal_bytes(tmp_path):
    path = mixed_input.write_mixed_input("dequantizelinear", tmp_path / "a", **SMALL)
    stamp, contents = path.stat().st_mtime_ns, path.read_bytes()
    assert mixed_input.write_mixed_input("dequantizelinear", tmp_path / "a", **SMALL).stat().st_mtime_ns == stamp
    assert mixed_input.write_mixed_input("dequantizelinear", tmp_path / "b", **SMALL).read_bytes() == contents
    assert mixed_input.write_mixed_input("dequantizelinear", tmp_path / "a", **SMALL, seed=1).read_bytes() != contents


@pytest.mark.parametrize(
    ("form", "sizes", "message"),
    [
        ("gguf", {}, r"unknown form 'gguf'\n  try: one of matmulnbits, dequantizelinear"),
        ("matmulnbits", {"M": 0}, r"M, N, K and seed are 0, 3584, 8192 and 0\n  try: extents from 1 up, a seed from 0 up"),
        ("matmulnbits", {"seed": -1}, r"M, N, K and seed are 16, 3584, 8192 and -1"),
        ("matmulnbits", {"group_size": 48}, r"groups of 48 along K = 8192\n  try: a power of two from 16 up that divides K"),
        ("dequantizelinear", {"K": 100, "group_size": 64}, r"groups of 64 along K = 100"),
        ("dequantizelinear", {"group_size": 0}, r"groups of 0 along K = 8192"),
    ],
)
def test_sizes_that_do_not_fit_are_named(form, sizes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        mixed_input.write_mixed_input(form, tmp_path, **sizes)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match="need onnx, which is not installed"):
        mixed_input.write_mixed_input("matmulnbits", tmp_path, **SMALL)


def test_the_command_line_writes_both(tmp_path):
    result = click.testing.CliRunner().invoke(mixed_input.main, ["--out", str(tmp_path), "--check"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 2 and all("15.6 MB  relative error" in line and float(line.split()[-1]) < 1e-3 for line in lines)
