"""Quantising a float model from the command line: choices, losses, what bad options say, and that nothing is unfused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_programs import FAST, install_ceilings, install_fake_library, install_wrong_kernel, invoke, write
from click.testing import Result

import models
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F32, S8
from tilewright.frontends import load
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm
from tilewright.rules.calibrate import calibrate, quantize, scheme
from tilewright.runtime.partition import partition

CONFIG = {
    "bert": {"vocab_size": 503, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "distilgpt2": {"vocab_size": 503, "n_embd": 64, "n_head": 4},
}
# Beside the layers: the embedding with its norm; and at the end of DistilGPT2 the product with the vocabulary.
STEPS = {"bert": 1 + 2 * 7, "distilgpt2": 1 + 2 * 7 + 1}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    folder = tmp_path_factory.mktemp("models")

    def written(name: str, variant: str = "f32") -> str:
        return str(models.write_model(name, variant, folder, batch=2, sequence=16, layers=2, config=CONFIG[name]))

    return written


def mlp(folder: Path) -> str:
    """Two products with constant weights, one of which no code can hold well: a row of it is far larger than the others."""
    x = input_("x", F32, (8, 4))
    first = torch.linspace(-1, 1, 16).reshape(4, 4)
    second = torch.linspace(1, 2, 8).reshape(4, 2) * torch.tensor([1.0, 1.0, 1.0, 1e4])[:, None]
    hidden = map_("relu", gemm(x, const(first)))
    y = gemm(hidden, const(second))
    return write(folder, Graph("mlp", (x,), (y,), ("y",), {hidden.src[0]: "net/up", y: "net/down"}))


def batch(folder: Path, name: str = "batch.npz", **arrays: np.ndarray) -> Path:
    np.savez(folder / name, **(arrays or {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}))
    return folder / name


def found(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.thin(2)
@pytest.mark.parametrize("flag", ["--int8", "--fp8"])
@pytest.mark.parametrize("name", STEPS)
def test_a_float_model_quantised_has_seven_steps_a_layer_and_nothing_is_unfused(name: str, flag: str, model) -> None:
    report = found(invoke("explain", model(name), flag, "--json", *FAST))
    assert report["unfused"] == [] and [f["op"] for f in report["fallback"]] == ["note"]
    assert "of the bytes of all matrices in float" in report["fallback"][0]["why"]  # of its embeddings
    assert report["steps_per_layer"] == 7 and sum(report["steps"].values()) == STEPS[name]
    joined = [p for p in report["products"] if len(p["stores"]) == 3]
    assert len(joined) == 1 and [name.count(",") for name in joined[0]["names"]] == [2, 2]  # Q, K and V of both layers
    assert "join gemms that share their left operand" in joined[0]["rules"]
    codes = {"--int8": "s8", "--fp8": "f8e4m3fn"}[flag]
    gemms = [p for p in report["products"] if p["kind"] == "gemm"]
    assert all(p["problem"].startswith(f"{codes}[") and f"@ {codes}[" in p["problem"] for p in gemms)
    assert all(layer["skip_reason"] is None for layer in report["quantized"]["layers"])


def test_scaling_by_the_row_is_unfused_behind_a_product_and_is_said_to(model) -> None:
    """A row's scale needs the whole row: no epilogue holds that, and a step that only quantises is none."""
    report = found(invoke("explain", model("bert"), "--int8", "--per-row", "--json", *FAST))
    assert report["steps_per_layer"] == 9 and report["steps"]["quantize"] == 4 == len(report["unfused"])
    assert {f["where"] for f in report["unfused"]} == {
        "node_gelu Gelu",
        "node_gelu_1 Gelu",
        "node_view_4 Reshape",
        "node_view_9 Reshape",
    }
    for finding in report["unfused"]:
        assert finding["why"].startswith("absorb elementwise into store: 2 operations read the ") and finding["cost_us"] > 0


@pytest.mark.parametrize("variant", ["int8", "int8-asymmetric", "uint8", "fp8", "fp8-fnuz"])
@pytest.mark.parametrize("name", STEPS)
def test_a_quantised_file_has_seven_steps_a_layer_and_nothing_is_unfused(name: str, variant: str, model) -> None:
    parts = [p for p in partition(optimise(load(model(name, variant)))) if not p.once]
    assert not any(p.unfused for p in parts)
    assert len(parts) == STEPS[name]
    at = [i for i, p in enumerate(parts) if p.kind == "attention"]
    assert at[1] - at[0] == 7


def test_quantising_a_model_makes_the_program_that_its_quantised_file_makes(model) -> None:
    def kinds(graph: Graph) -> list[str]:
        return [p.kind for p in partition(optimise(graph)) if not p.once]

    source = load(model("bert"))
    feeds = {k: torch.from_numpy(v) for k, v in models.random_inputs(model("bert"), 0).items()}
    made, layers = quantize(source, scheme("int8"), calibrate(source, [feeds]))
    assert kinds(made) == kinds(load(model("bert", "int8"))) and len(layers) == 12


def test_choices_are_printed_and_layers_that_lose_too_much_stay(tmp_path: Path) -> None:
    path, data = mlp(tmp_path), batch(tmp_path)
    quantized = found(invoke("perf", path, "--int8", "--calibration", data, "--json", "-n", 1, *FAST))["quantized"]
    assert quantized["scheme"] == "s8 weights per column, s8 activations per tensor"
    assert quantized["calibration"] == str(data)
    up, down = quantized["layers"]
    assert (up["name"], up["product"], up["skip_reason"]) == ("net/up", "f32[8,4] @ f32[4,4]", None)
    x = np.load(data)["x"]
    assert up["activation_scale"] == pytest.approx(float(np.abs(x).max()) / 127)
    assert up["weight_scale_max"] == pytest.approx(1 / 127) and up["weight_scale_min"] < up["weight_scale_max"]
    assert 0 < down["error"] != up["error"] > 0
    least, most = sorted([up, down], key=lambda layer: layer["error"])
    bound = (least["error"] + most["error"]) / 2
    result = invoke("run", path, "--int8", "--calibration", data, "--rtol", bound, *FAST, env={"COLUMNS": "200"})
    assert result.exit_code == 0 and result.stderr == ""
    words = " ".join(result.stdout.split())
    assert "1 layer quantised, 1 layer left in float." in words
    assert f"in float: its error {most['error']:.3g} exceeds {bound:g}" in words
    kept = found(invoke("explain", path, "--int8", "--calibration", data, "--rtol", bound, "--json", *FAST))
    stays = [layer["name"] for layer in kept["quantized"]["layers"] if layer["skip_reason"] is not None]
    assert stays == [most["name"]]
    assert len([p for p in kept["products"] if p["problem"].startswith("f32")]) == 1


def test_several_batches_widen_the_ranges(tmp_path: Path) -> None:
    path, one = mlp(tmp_path), batch(tmp_path)
    two = batch(tmp_path, "two.npz", x=np.full((8, 4), 50, np.float32))
    both = found(invoke("run", path, "--int8", "--calibration", one, "--calibration", two, "--json", *FAST))["quantized"]
    assert both["calibration"] == f"{one}, {two}"
    assert both["layers"][0]["activation_scale"] == pytest.approx(50 / 127)


def test_schemes_and_granularity(tmp_path: Path) -> None:
    path, data = mlp(tmp_path), batch(tmp_path)

    def of(*flags: str) -> dict[str, object]:
        return found(invoke("run", *flags, path, "--calibration", data, "--json", *FAST))["quantized"]

    assert of("--w4")["scheme"] == "s4 weights per group of 64, float activations"  # what follows is not its value
    assert of("--w4=2")["scheme"] == "s4 weights per group of 2, float activations"
    assert of("--w4")["layers"][0]["activation_scale"] is None
    rows = of("--fp8", "--per-row")
    assert rows["scheme"] == "f8e4m3fn weights per column, f8e4m3fn activations per row"
    assert rows["layers"][0]["activation_scale"] is None
    inner = [of("--fp8", *more)["scheme"] for more in (["--fp8-attention"], [])]
    assert inner[0] == f"{inner[1]}, f8e4m3fn attention" and inner[1].endswith("f8e4m3fn activations per tensor")
    assert of("--w4=1")["layers"][0]["error"] < of("--w4=4")["layers"][0]["error"]


def test_random_calibration_warns(tmp_path: Path) -> None:
    result = invoke("run", mlp(tmp_path), "--int8", *FAST)
    assert result.exit_code == 0 and result.stderr.startswith("warning: calibrated on random inputs: its ranges and its errors")
    assert "calibrated on random inputs, seed 1001" in " ".join(result.stdout.split())


def test_a_model_with_nothing_to_quantise_says_so(tmp_path: Path) -> None:
    a, b = input_("a", F32, (4, 4)), input_("b", F32, (4, 4))
    result = invoke("run", write(tmp_path, Graph("two", (a, b), (gemm(a, b),), ("y",))), "--int8", *FAST)
    assert result.exit_code == 0
    assert "Nothing: no product of a float with a constant matrix was found." in " ".join(result.stdout.split())


def test_verify_holds_the_program_against_the_quantised_model_and_states_the_loss(tmp_path: Path, model) -> None:
    path, data = mlp(tmp_path), batch(tmp_path)
    report = found(invoke("verify", path, "--int8", "--calibration", data, "--inputs", data, "--quantized", "--json", *FAST))
    assert report["verified"]
    # The float model in NumPy, and the codes by hand: nothing of the compiler in it.
    x, scale = np.load(data)["x"].astype(np.float64), report["quantized"]["layers"][0]["activation_scale"]
    w = np.linspace(-1, 1, 16).reshape(4, 4)
    unit = np.abs(w).max(0) / 127
    exact, coded = x @ w, (np.rint(x / scale).clip(-127, 127) * scale) @ (np.rint(w / unit) * unit)
    loss = {layer["name"]: layer["error"] for layer in report["accuracy"]["layers"]}
    assert loss["net/up"] == pytest.approx(np.linalg.norm(coded - exact) / np.linalg.norm(exact), rel=1e-3)
    assert list(loss) == ["net/up", "net/down"] and [o["name"] for o in report["accuracy"]["outputs"]] == ["y"]
    assert 1e-4 < report["accuracy"]["outputs"][0]["error"] < 0.1
    words = " ".join(invoke("verify", model("bert"), "--fp8", "--quantized", *FAST).stdout.split())
    assert "agree with the oracle for the quantised model." in words
    assert "Accuracy: relative error in norm against the float model" in words and "output last_hidden_state" in words


def test_a_finer_code_loses_less_and_no_code_loses_nothing(tmp_path: Path) -> None:
    path, data = mlp(tmp_path), batch(tmp_path)

    def loss(*flags: object) -> float:
        given = ("--calibration", data, "--inputs", data, "--quantized", "--json")
        return found(invoke("verify", path, *flags, *given, *FAST))["accuracy"]["outputs"][0]["error"]

    assert loss("--int8", "--rtol", 0) == pytest.approx(0, abs=1e-6)
    assert loss("--int8") < loss("--fp8") and loss("--int8") < loss("--w4=4")


def test_verify_of_a_quantised_program_still_catches_a_wrong_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wrong_kernel(monkeypatch)
    result = invoke("verify", mlp(tmp_path), "--int8", "--quantized", *FAST)
    assert result.exit_code == 1 and "The first step that differs" in result.stdout


def refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) <= 3
    for words in said:
        assert words in result.stderr, result.stderr


@pytest.mark.parametrize("verb", ["run", "verify", "perf", "explain"])
def test_options_that_exclude_each_other_or_do_nothing(verb: str, tmp_path: Path) -> None:
    path = mlp(tmp_path)
    refused(invoke(verb, path, "--int8", "--fp8"), "--int8 and --fp8 exclude each other", "try: give one of them")
    refused(invoke(verb, path, "--fp8", "--w4=32"), "--fp8 and --w4 exclude each other")
    refused(invoke(verb, path, "--calibration", "x.npz"), "--calibration is for quantising", "add --int8, --fp8 or --w4")
    refused(invoke(verb, path, "--per-row"), "--per-row is for quantising")
    refused(invoke(verb, path, "--w4", "--per-row"), "--per-row scales activations, and --w4 leaves them in float")
    refused(invoke(verb, path, "--fp8-attention"), "--fp8-attention is for quantising")
    for more in (["--int8"], ["--fp8", "--per-row"]):
        refused(invoke(verb, path, *more, "--fp8-attention"), "--fp8-attention is for --fp8 without --per-row")
    usage = invoke(verb, path, "--w4=0")
    assert usage.exit_code == 2 and "Invalid value for '--w4'" in usage.stderr
    usage = invoke(verb, path, "--w4", "32")
    assert usage.exit_code == 2 and "the group of --w4 stands behind an equals sign: --w4=32" in usage.stderr
    if verb == "verify":
        refused(invoke(verb, path, "--quantized"), "--quantized compares a quantised program with its float model")
    else:
        refused(invoke(verb, path, "--rtol", 0.1), "--rtol is for quantising")


def test_calibration_data_that_is_no_good(tmp_path: Path) -> None:
    path = mlp(tmp_path)

    def run(data: Path) -> Result:
        return invoke("run", path, "--int8", "--calibration", data, *FAST)

    refused(run(tmp_path / "none.npz"), "no such file", "none.npz", "(--calibration)")
    (tmp_path / "text.npz").write_text("no zip")
    refused(run(tmp_path / "text.npz"), "not an .npz of arrays", "text.npz")
    refused(run(tmp_path), "cannot be read: Is a directory")
    x = np.zeros((8, 4), np.float32)
    refused(run(batch(tmp_path, x=x, z=x)), "no input is called 'z'", "batch.npz", "one of x")
    refused(run(batch(tmp_path, z=x)), "no input is called 'z'")
    np.savez(tmp_path / "empty.npz")
    refused(run(tmp_path / "empty.npz"), "no value for input 'x'", "calibration needs every input")
    refused(run(batch(tmp_path, x=x[:3])), "shape [3, 4] given, f32[8,4] wanted", "batch.npz")
    refused(run(batch(tmp_path, x=x.astype(np.float64))), "f64 given, f32[8,4] wanted", "batch.npz")
    np.savez(tmp_path / "object.npz", x=np.array([{}], object))
    refused(run(tmp_path / "object.npz"), "not an .npz of arrays")
    np.savez_compressed(tmp_path / "damaged.npz", x=np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    whole = (tmp_path / "damaged.npz").read_bytes()
    for damage in (b"\xff" * 16, b"\x00" * 16):  # codes that no deflated stream holds; or a checksum that fails
        (tmp_path / "damaged.npz").write_bytes(whole[:100] + damage + whole[116:])
        refused(run(tmp_path / "damaged.npz"), "not an .npz of arrays", "damaged.npz")
    flags = whole.index(b"PK\x01\x02") + 8
    (tmp_path / "damaged.npz").write_bytes(whole[:flags] + b"\x01" + whole[flags + 1 :])  # said to be encrypted
    refused(run(tmp_path / "damaged.npz"), "not an .npz of arrays", "damaged.npz")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("x", "no array")
    refused(run(tmp_path / "text.npz"), "not an .npz of arrays: the magic string", "text.npz")


def test_calibration_data_that_is_not_finite_leaves_layers_in_float(tmp_path: Path) -> None:
    data = batch(tmp_path, x=np.full((8, 4), np.inf, np.float32))
    layers = found(invoke("run", mlp(tmp_path), "--int8", "--calibration", data, "--json", *FAST))["quantized"]["layers"]
    assert layers[0]["skip_reason"] == "its activations are not finite"


def test_dump_writes_every_stage(tmp_path: Path) -> None:
    path = mlp(tmp_path)
    result = invoke("explain", path, "--int8", "--dump", tmp_path / "a" / "b", *FAST)
    assert result.exit_code == 0, result.output
    names = sorted(p.name for p in (tmp_path / "a" / "b").iterdir())
    assert names[:3] == ["00-source.svg", "00-source.tw", "01-accumulator.svg"]
    assert [n[:2] for n in names] == [f"{i // 2:02}" for i in range(len(names))] and len(names) > 16  # two of each stage
    assert "quantize" in (tmp_path / "a" / "b" / "00-source.tw").read_text()
    again = invoke("read", *(tmp_path / "a" / "b").glob("*-tails.tw"))
    assert again.exit_code == 0, again.output
    refused(invoke("perf", path, "--dump", path, *FAST), "cannot be made a folder", "mlp.tw")


def test_excess_precision_is_opted_into_and_verifies(tmp_path: Path) -> None:
    x, w = input_("x", BF16, (16, 64)), input_("w", BF16, (64, 16))
    bias = input_("bias", F32, (16,))
    y = convert(map_("add", convert(convert(gemm(x, w), BF16), F32), bias), BF16)
    path = write(tmp_path, Graph("rounded", (x, w, bias), (y,), ("y",)))

    def steps(*flags: str) -> list[str]:
        (product,) = found(invoke("explain", path, "--json", *flags, *FAST))["products"]
        return product["stores"][0]["steps"]

    plain, more = steps(), steps("--excess-precision")
    assert plain.count("convert to bf16") == 2 and more.count("convert to bf16") == 1
    for flags in ((), ("--excess-precision",)):
        report = found(invoke("verify", path, "--json", *flags, *FAST))
        assert report["verified"] and report["end_to_end"][0]["error"] <= report["end_to_end"][0]["bound"]
    codes = write(tmp_path, Graph("codes", (x, w), (convert(convert(gemm(x, w), S8), F32),), ("y",)))
    (product,) = found(invoke("explain", codes, "--json", "--excess-precision", *FAST))["products"]
    assert any("s8" in step for step in product["stores"][0]["steps"])  # a rounding to 8 bits is meant
