"""Every verb on good input."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from cli_programs import FAST, block, install_ceilings, install_fake_library, install_wrong_kernel, invoke, write
from onnx import helper
from paths import ROOT
from races import StillMeter

from tilewright import __version__
from tilewright.dtype import BF16, F32, S8
from tilewright.hardware.load import Load
from tilewright.ir.build import input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse as parse_gemm
from tilewright.ir.ops import LayerNorm, gemm
from tilewright.ir.text import parse

HEAVY = ("torch", "numpy", "rich", "onnx", "jaxlib", "msgspec", "tilewright.ir", "tilewright.report")
REFUSAL_KEYS = ["candidate", "why", "time_us", "schedule", "predicted_us", "kind", "differs"]
STEP_KEYS = [
    "name",
    "kind",
    "problem",
    "candidate",
    "schedule",
    "time_us",
    "ops",
    "bytes",
    "limit_us",
    "peak_fraction",
    "rejected",
    "chosen",
    "sent_bytes",
    "between_us",
    "low_us",
    "high_us",
]
PERF_KEYS = [
    "noise",
    "limits_noise",
    "program",
    "target",
    "total_us",
    "verified",
    "steps",
    "unfused",
    "fallback",
    "inputs",
    "steps_per_layer",
    "quantized",
    "attribution",
    "summary",
    "against",
    "choices",
    "made",
    "counts",
    "groups",
    "layers",
    "advice",
    "total_low_us",
    "total_high_us",
    "steps_us",
    "in_place_us",
    "rest",
    "traffic",
]
FINDING_KEYS = ["op", "where", "why", "cost_us"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


@pytest.fixture
def program(tmp_path: Path) -> str:
    return write(tmp_path, block())


@pytest.mark.parametrize("args", [["--help"], ["perf", "--help"], ["gemm", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['tilewright', *sys.argv[1:]]\n"
        "from tilewright.cli.verbs import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert left.code == 0\n"
        f"print('IMPORTED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


@pytest.mark.parametrize("args", [["info"], ["info", "--json"], ["clear", "--yes"]])
def test_what_is_kept_is_counted_without_torch(args: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['tilewright', 'cache', *sys.argv[1:]]\n"
        "from tilewright.cli.verbs import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "print('IMPORTED', [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    environment = {**os.environ, "TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


WIDE = {"COLUMNS": "200"}  # no table wraps, however long the names of temporary files are


def test_help_names_the_verbs_in_order_and_the_exit_codes() -> None:
    text = invoke("--help").output
    verbs = ["read", "compile", "run", "verify", "perf", "explain", "diff", "gemm", "devices", "tune", "cache"]
    assert [line.split()[0] for line in text.split("Commands:")[1].strip().splitlines()] == verbs
    assert "70 a bug in Tilewright" in " ".join(text.split())
    assert invoke("--version").output == f"tilewright, version {__version__}\n"


def test_gemm_help_ends_with_the_notation() -> None:
    text = invoke("gemm", "--help").output
    assert 'problem  = operand "@" operand step* ["->" result]' in text
    assert "`bias` and `column_scale` [N]" in " ".join(text.split())


def test_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tilewright", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tilewright, version {__version__}\n"


def test_read_prints_a_text_that_reads_back(program: str) -> None:
    result = invoke("read", program)
    assert result.exit_code == 0
    assert parse(result.stdout) == parse(Path(program).read_text())
    head = [line for line in result.stdout.splitlines() if line.startswith("//")]
    assert head[0].startswith(f"// {program}: ") and head[0].endswith("constants of 0 bytes")
    assert "gemm 1" in head[1] and "map 3" in head[1]
    assert head[2] == "// note: assumed a default"


def test_read_json_counts(program: str) -> None:
    found = json.loads(invoke("read", program, "--json").stdout)
    assert list(found) == ["program", "inputs", "outputs", "nodes", "ops", "constant_bytes", "notes"]
    assert found["inputs"][0] == {"name": "ids", "type": "s64[2,5]"}
    assert found["outputs"][1] == {"name": "codes", "type": "s8[4,4]"}
    assert found["ops"]["input"] == 7 and found["ops"]["gather"] == 1 and found["nodes"] == sum(found["ops"].values())
    assert found["notes"] == ["assumed a default"]


def test_run_prints_inputs_and_outputs(program: str) -> None:
    result = invoke("run", program, *FAST, env=WIDE)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "ids s64[2,5] random indices 0 to 10" in words
    assert "mask s64[2,5] random padding mask of 0 and 1" in words
    assert "scale f32[] random, positive" in words
    assert "y f32[2,5,6]" in words and "codes s8[4,4]" in words


def test_run_json_has_statistics_of_the_results(tmp_path: Path) -> None:
    x = input_("x", F32, (4,))
    path = write(tmp_path, Graph("logs", (x,), (map_("log", x),), ("y",)))
    np.savez(tmp_path / "in.npz", x=np.array([0.0, -1.0, 1.0, np.e**2], np.float32))
    found = json.loads(invoke("run", path, "--inputs", tmp_path / "in.npz", "--json", *FAST).stdout)
    (y,) = found["outputs"]
    assert found["inputs"] == [{"name": "x", "type": "f32[4]", "data": "given", "filled": False}]
    assert (y["nans"], y["infinities"], y["minimum"]) == (1, 1, 0.0)
    assert y["maximum"] == pytest.approx(2.0) and y["mean"] == pytest.approx(1.0) and y["rms"] == pytest.approx(2**0.5)
    assert found["written"] is None


def test_run_takes_and_writes_npz(tmp_path: Path) -> None:
    a, b = input_("a", S8, (3, 5)), input_("b", S8, (5, 2))
    path = write(tmp_path, Graph("product", (a, b), (gemm(a, b),), ("file",)))  # an output may be called anything
    generator = np.random.default_rng(0)
    given = {"a": generator.integers(-128, 128, (3, 5), np.int8), "b": generator.integers(-128, 128, (5, 2), np.int8)}
    np.savez(tmp_path / "in.npz", **given)
    result = invoke("run", path, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz", *FAST)
    assert result.exit_code == 0, result.output
    assert f"Written to {tmp_path / 'out.npz'}." in " ".join(result.stdout.split())
    with np.load(tmp_path / "out.npz", allow_pickle=False) as out:
        wanted = given["a"].astype(np.int32) @ given["b"].astype(np.int32)
        np.testing.assert_array_equal(out["file"], wanted)
        assert out["file"].dtype == np.int32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz", "product.tw"]


def test_types_numpy_lacks_travel_as_raw_bytes(tmp_path: Path) -> None:
    x = input_("x", BF16, (2, 3))
    path = write(tmp_path, Graph("double", (x,), (map_("add", x, x),), ("y",)))
    value = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "in.npz", x=value)
    assert invoke("run", path, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz", *FAST).exit_code == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as out:
        np.testing.assert_array_equal(out["y"].view(ml_dtypes.bfloat16), value + value)


def test_the_same_seed_gives_the_same_data(program: str) -> None:
    first, again, other = (
        json.loads(invoke("run", program, "--json", "--seed", seed, *FAST).stdout)["outputs"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_verify_agrees_and_prints_the_worst_of_each_kind(program: str) -> None:
    result = invoke("verify", program, *FAST)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "gemm 1" in words and "end to end" in words
    assert words.endswith("3 outputs agree with the oracle.")


def test_verify_says_that_no_output_is_compared_whose_shape_depends_on_the_data(tmp_path: Path) -> None:
    x, y = helper.make_tensor_value_info("x", 1, [4, 8]), helper.make_tensor_value_info("y", 7, [2, None])
    graph = helper.make_graph([helper.make_node("NonZero", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    words = " ".join(invoke("verify", tmp_path / "m.onnx", *FAST).stdout.split())
    assert "Verified: 1 step agrees with the oracle. No output is compared: what the source's own library computes" in words


def test_verify_catches_a_wrong_kernel_and_names_the_step(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wrong_kernel(monkeypatch)
    result = invoke("verify", program, *FAST)
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "The first step that differs: net/Relu" in words
    assert "By wrong" in words and "1 of 60 elements differ" in words and "bound" in words
    found = json.loads(invoke("verify", program, "--json", *FAST).stdout)
    first = found["first_difference"]
    assert not found["verified"] and first["name"] == "net/Relu" and first["candidate"] == "wrong" and not first["ok"]
    assert first["error"] == pytest.approx(1.0, rel=1e-4) and 0 < first["bound"] < 1e-3
    assert [c["name"] for c in found["end_to_end"] if not c["ok"]] == ["y"]


def test_verify_catches_a_rule_that_changes_the_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = input_("x", F32, (8, 8))
    path = write(tmp_path, Graph("tanh", (x,), (map_("tanh", x),), ("y",)))

    def wrong(graph: Graph, *rest: object, **options: object) -> Graph:
        return graph.with_outputs([map_("negate", o) for o in graph.outputs])

    monkeypatch.setattr("tilewright.compiler.optimise", wrong)
    result = invoke("verify", path, *FAST)
    assert result.exit_code == 1
    assert "The first output that differs: y" in result.stdout
    assert "root mean square" in " ".join(result.stdout.split())


def test_tolerances_replace_the_derived_bounds_for_floats_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = write(tmp_path, parse_named("floats", "f32[4,8] @ f32[8,4]"))
    install_wrong_kernel(monkeypatch)
    assert invoke("verify", floats, "--atol", "2", *FAST).exit_code == 0
    assert invoke("verify", floats, "--atol", "0.5", *FAST).exit_code == 1
    assert invoke("verify", floats, "--rms-tol", "1", *FAST).exit_code == 0
    assert invoke("verify", floats, "--atol", "2", "--rms-tol", "0.001", *FAST).exit_code == 1
    integers = write(tmp_path, parse_named("integers", "s8[4,8] @ s8[8,4]"))
    assert invoke("verify", integers, "--atol", "2", *FAST).exit_code == 1


def parse_named(name: str, line: str) -> Graph:
    graph = parse_gemm(line)
    return Graph(name, graph.inputs, graph.outputs, graph.output_names)


def test_perf_prints_steps_summary_totals_and_findings(program: str) -> None:
    result = invoke("perf", program, "-n", 2, *FAST, env=WIDE)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for title in ("µs", "share %", "of limit %", "total ms", "steps", "mean µs"):
        assert title in words
    assert "f32[2,5,8] @ f32[8,6] + bias:f32, relu" in words
    assert "median of 2 runs" in words and "Rate" in words
    assert "Verified: every product agrees with the reference on random data." in words
    assert "Fell back" in words and "Frobnicate" in words and "fake_library runs it" in words and "assumed a default" in words
    assert "Unfused" in words and "at net/Quantize" in words and "it reads an input of the program" in words
    assert words.index("What you can change") < words.index("Inputs") and "Frobnicate runs in fake_library" in words
    assert "transpose -> f32[8,11]" not in words, "a view is no step"
    whole = " ".join(invoke("perf", program, "-n", 1, "--all", *FAST, env=WIDE).stdout.split())
    assert "transpose -> f32[8,11]" in whole and "bound by" in whole


def test_perf_json_has_the_stable_schema_and_nothing_else(program: str) -> None:
    result = invoke("perf", program, "--json", "-n", 1, *FAST)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == PERF_KEYS
    assert all(list(step) == STEP_KEYS for step in found["steps"])
    assert all(list(r) == ["candidate", "why", "kind", "schedule"] for step in found["steps"] for r in step["rejected"])
    assert all(list(f) == FINDING_KEYS for f in (*found["unfused"], *found["fallback"]))
    (product,) = (s for s in found["steps"] if s["kind"] == "gemm")
    assert product["ops"] == 2 * 10 * 6 * 8
    assert product["bytes"] == 4 * (2 * 5 * 8 + 8 * 6 + 6 + 2 * 5 * 6)
    assert product["limit_us"] == pytest.approx(max(product["ops"] / 100e3, product["bytes"] / 10e3), abs=1e-3)
    assert product["peak_fraction"] == pytest.approx(product["limit_us"] / product["time_us"], rel=0.05)
    assert product["rejected"] and found["verified"] is True and found["total_us"] > 0
    assert {s["kind"] for s in found["steps"]} >= {"gemm", "norm", "call", "quantize", "view"}
    assert [(f["op"], f["where"]) for f in found["unfused"]] == [("quantize -> s8[4,4]", "net/Quantize")]
    assert found["unfused"][0]["cost_us"] > 0
    assert [f["op"] for f in found["fallback"]] == ["Frobnicate", "note"]
    assert found["fallback"][1]["cost_us"] is None


def test_filled_inputs_are_flagged_in_table_and_json(program: str) -> None:
    fills = ("--fill0", "x", "--fill1", "w", "--fill0", "mask")
    words = " ".join(invoke("perf", program, "-n", 1, *fills, *FAST).stdout.split())
    assert "zeros (filled)" in words and "ones (filled)" in words
    assert "Filled inputs flatter a measurement" in words
    found = json.loads(invoke("perf", program, "-n", 1, "--json", *fills, *FAST).stdout)
    assert [(i["name"], i["data"]) for i in found["inputs"] if i["filled"]] == [
        ("mask", "zeros"),
        ("w", "ones"),
        ("x", "zeros"),
    ]
    assert "Filled" not in invoke("perf", program, "-n", 1, *FAST).stdout


def deep(layers: int) -> Graph:
    """Gemm and norm by turns: neither folds into the other."""
    value = x = input_("x", F32, (4, 4))
    w = input_("w", F32, (4, 4))
    for _ in range(layers):
        value = Node(LayerNorm(1, 1e-5), gemm(value, w))
    return Graph("deep", (x, w), (value,), ("y",))


def test_layers_are_folded_and_all_lists_every_step(tmp_path: Path) -> None:
    path = write(tmp_path, deep(35))
    text = invoke("perf", path, "-n", 1, *FAST, env=WIDE).stdout
    assert "35 layers, 2 steps in each" in text and "70 steps, 2 different" in text
    rows = [line.split() for line in text.splitlines() if " -> f32[4,4] " in line or " @ " in line]
    assert [row[0] for row in rows] == ["1", "2"] and all("35" in row for row in rows)
    whole = invoke("perf", path, "-n", 1, "--all", *FAST, env=WIDE).stdout
    assert [int(line.split()[0]) for line in whole.splitlines() if " gemm " in line[:14] or " norm " in line[:14]] == list(
        range(70)
    )


def test_long_programs_list_the_dearest_steps_and_say_how_many_are_hidden(tmp_path: Path) -> None:
    x = input_("x", F32, (4, 4))
    weights = [input_(f"w{i}", F32, (4, i + 1)) for i in range(45)]
    path = write(tmp_path, Graph("wide", (x, *weights), tuple(gemm(x, w) for w in weights), tuple(f"y{i}" for i in range(45))))
    text = invoke("perf", path, "-n", 1, *FAST, env=WIDE).stdout
    assert "15 more distinct steps, " in text and "% of the time: -v" in text
    rows = [int(line.split()[0]) for line in text.splitlines() if " @ " in line]
    assert len(rows) == 30 and rows == sorted(rows)
    explained = invoke("explain", path, *FAST, env=WIDE).stdout
    assert "33 more distinct products, and all candidates" in explained and explained.count("Done by") == 12
    assert invoke("explain", path, "-v", *FAST, env=WIDE).stdout.count("Done by") == 45


def test_explain_reads_well(program: str) -> None:
    result = invoke("explain", program, *FAST)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for part in (words, " ".join(invoke("explain", program, "-v", *FAST).stdout.split())):
        assert "1 product (a matrix multiplication or an attention)," in part
        assert "before it, multiply" in part
        assert "multiply is no view, dequantisation or widening cast; it is computed once" in part
        assert "Could not" in part and "float_exact is for integer products" not in part, "other problems' candidates"
        assert "nothing was timed" in part and "1 unfused" in part and "net/Quantize" in part
        assert part.index("Done by") < part.index("What you can change") > part.index("Fell back")
    assert "right: f32[8,6] (w)" in words and "Folded + b, relu" in words
    assert "right: f32[8,6] (input w)" in part and "+ f32[6] (input b)" in part and "relu" in part
    assert "Accumulates f32[2,5,6], sums of 8 products" in part and "Who is who" in part


def test_explain_json(program: str) -> None:
    found = json.loads(invoke("explain", program, "--json", "--budget", "4").stdout)
    (product,) = found["products"]
    assert product["names"] == ["net/Relu"] and product["measured"] and product["chosen"]["time_us"] > 0
    assert product["stores"] == [{"steps": ["+ f32[6] (input b)", "relu"], "writes": "f32[2,5,6]"}]
    assert all(list(r) == REFUSAL_KEYS for r in product["rejected"])
    assert [f["op"] for f in found["unfused"]] == ["quantize -> s8[4,4]"]


def test_explain_groups_products_that_are_alike(tmp_path: Path) -> None:
    path = write(tmp_path, deep(3))
    found = json.loads(invoke("explain", path, "--json", *FAST).stdout)
    assert [p["names"] for p in found["products"]] == [["gemm"] * 3]
    words = " ".join(invoke("explain", path, *FAST).stdout.split())
    assert "3 products (matrix multiplications and attentions), 1 different" in words and "gemm x 3" in words
    assert "3 of them, alike but for constants and names: gemm" in " ".join(invoke("explain", path, "-v", *FAST).stdout.split())


@pytest.mark.parametrize(
    "line", ["s8[16,64,64] @ s8[16,64,64]^T -> s8", "f32[8,16] @ f32[16,4] + bias, gelu", "f32[4,0] @ f32[0,5]"]
)
def test_gemm_says_who_does_it_and_that_it_is_right(line: str) -> None:
    result = invoke("gemm", line, "--budget", "4")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert words.startswith(line) and "Done by" in words and "Verified" in words
    assert "Was slower" in words or "Could not" in words or "Was not tried" in words
    found = json.loads(invoke("gemm", line, "--budget", "4", "--json").stdout)
    assert found["verified"] and found["measured"] and found["program"] == line and found["rejected"]
    assert found["error"] <= found["bound"]


def test_gemm_perf_is_the_performance_report() -> None:
    line = "s8[16,64] @ s8[32,64]^T -> s8"
    found = json.loads(invoke("gemm", line, "--perf", "--json", "-n", 1, *FAST).stdout)
    assert list(found) == PERF_KEYS and found["program"] == line
    assert [s["problem"] for s in found["steps"]] == [line]
    assert "Rate" in invoke("gemm", line, "--perf", "-n", 1, *FAST).stdout


@pytest.mark.parametrize("verb", [("perf", "-n", 1), ("explain",), ("gemm",), ("gemm", "--perf", "-n", 1)])
def test_times_that_are_not_reliable_are_said_to_be_first(
    program: str, monkeypatch: pytest.MonkeyPatch, verb: tuple[object, ...]
) -> None:
    busy = StillMeter(Load(of_cores=4, runnable=14.0, others=0.2))
    for module in ("schedule.measure", "schedule.bench", "report.measure.perf"):
        monkeypatch.setattr(f"tilewright.{module}.Meter", busy)
    name, *options = verb
    what = "f32[16,64] @ f32[64,32]" if name == "gemm" else program
    result = invoke(name, what, *options, "--budget", "4")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0 and words.startswith("Times are not reliable: ")
    assert "14 runnable tasks on 4 cores" in words and "wrong by a factor" not in words
    found = json.loads(invoke(name, what, *options, "--budget", "4", "--json").stdout)
    assert next(iter(found)) == "noise" and "14 runnable tasks on 4 cores" in found["noise"]


def test_gemm_with_a_wrong_kernel_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    install_wrong_kernel(monkeypatch)
    result = invoke("gemm", "s8[4,8] @ s8[8,4]", *FAST)
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "NOT verified" in words and "1 of 16 elements differ" in words


def test_gemm_with_weights_packs_them_beforehand() -> None:
    line = "f32[2,64] @ s4[48,64]^T group=32 + bias"
    given, kept = (json.loads(invoke("gemm", line, "--json", *more).stdout) for more in ((), ("--weights",)))
    assert [i["name"] for i in given["inputs"]] == ["a", "b", "b_scale", "bias"]
    assert [i["name"] for i in kept["inputs"]] == ["a"]
    assert kept["verified"]
    why = {r["candidate"]: r["why"] for r in given["rejected"]}
    assert why["llvm_w4"] == "the weights are not constant"
    tried = {kept["chosen"]["candidate"], *(r["candidate"].split()[0] for r in kept["rejected"] if "slower" in r["why"])}
    assert "llvm_w4" in tried


def test_gemm_says_that_weights_are_no_constants_unless_it_is_told_so() -> None:
    line = "f32[4,64] @ s4[48,64]^T group=32"
    note = "note: b is given anew with every call; kernels that pack it beforehand, as a model's weights, are compared with"
    assert note in invoke("gemm", line, *FAST).stderr
    assert "note:" not in invoke("gemm", line, "--weights", *FAST).stderr
    assert "note:" not in invoke("gemm", "s8[4,64] @ s8[64,48] -> s32", *FAST).stderr


def test_gemm_takes_fills() -> None:
    found = json.loads(invoke("gemm", "s8[4,8] @ s8[8,4] * scale", "--fill0", "a", "--json", *FAST).stdout)
    assert [(i["name"], i["filled"]) for i in found["inputs"]] == [("a", True), ("b", False), ("scale", False)]


def test_devices_lists_the_cpu_with_its_ceilings() -> None:
    result = invoke("devices")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert words.startswith("cpu: ") and "10.0 GB/s read, 8.0 GB/s copied (measured)" in words
    assert "100.0" in words and "no unit of its own" in words
    assert "200.0" in " ".join(invoke("devices", "--remeasure").stdout.split())
    (cpu, *_) = json.loads(invoke("devices", "--json").stdout)["devices"]
    assert cpu["device"] == "cpu" and cpu["read_gbps"] == 10.0 and cpu["other_gops"]["odd"] == 1.0
    assert {u["operand"]: u["measured_gops"] for u in cpu["units"]}["f32"] == 100.0


def test_an_unknown_chip_is_said_to_get_the_nearest_family(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from tilewright.hardware.detect import detect

    monkeypatch.setattr("tilewright.report.explain.machine.targets", lambda: [replace(detect("cpu"), exact_match=False)])
    said = " ".join(invoke("devices").stdout.split())
    assert "the nearest family: there is no description of this very chip" in said
    assert "Assumed operations a cycle, as in: " in said and "if ops/cycle are right" in said


@pytest.mark.parametrize("gops", [4096.0, 8400.0])  # of bf16 on 8 cores, 128 a cycle each: 4.0 and 8.2 GHz
def test_a_clock_that_nothing_runs_at_is_not_believed(gops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.hardware.detect import chips
    from tilewright.hardware.target import Target

    chip = next(c for c in chips() if c.name == "x86_64_zen5")
    target = Target("a processor", chip, "cpu", 8, peak_gops={"bf16": gops, "f64": 1.0}, read_gbps=10.0, copy_gbps=8.0)
    monkeypatch.setattr("tilewright.report.explain.machine.targets", lambda: [target])
    monkeypatch.setattr("tilewright.report.explain.machine.with_ceilings", lambda t, remeasure: t)
    (found,) = json.loads(invoke("devices", "--json").stdout)["devices"]
    said = " ".join(invoke("devices").stdout.split())
    if gops == 4096.0:
        assert (found["clock_ghz"], found["doubt"], found["assumed"]) == (4.0, "", [])
        assert "Clock at least 4.0 GHz, by the measured rates Cores" in said and "Assumed" not in said
    else:
        assert found["clock_ghz"] is None and found["doubt"].startswith(
            "at these operations a cycle the measured rates would take"
        )
        assert "would take a clock of 8.2 GHz, which nothing runs at; a core does more in a cycle than x86_64_zen5 says" in said
        assert [x.split(":")[0] for x in found["assumed"]] == [
            "operations a cycle, as in",
            "rates of L1d, L2, L3, as in",
            "sizes of L1d, L2, L3, as in",
        ]
        assert "Assumed operations a cycle, as in: AMD, Software Optimization Guide for the Zen5" in said


@pytest.mark.parametrize("verb", [["perf", "-n", "1"], ["explain"], ["run"], ["verify"]])
@pytest.mark.parametrize("columns", [80, 160])
def test_reports_fit_the_terminal_and_have_no_colour_when_piped(program: str, verb: list[str], columns: int) -> None:
    result = invoke(verb[0], program, *verb[1:], *FAST, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "\x1b" not in result.output
    assert result.stderr == ""


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, parse_named("plain", "s8[4,8] @ s8[8,4] -> s8"))
    command = [sys.executable, "-m", "tilewright", "run", path, "--output", str(tmp_path / "out.npz"), "--json", *FAST]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["outputs"][0]["type"] == "s8[4,4]"
    with np.load(tmp_path / "out.npz") as out:
        assert out["result"].shape == (4, 4)


def test_what_run_writes_is_what_the_oracle_gives(program: str, tmp_path: Path) -> None:
    graph = block()
    generator = np.random.default_rng(3)
    feeds = {
        "ids": generator.integers(0, 11, (2, 5)),
        "mask": generator.integers(0, 2, (2, 5)),
        **{
            n: generator.standard_normal(s).astype(np.float32)
            for n, s in {"table": (11, 8), "w": (8, 6), "b": (6,), "x": (4, 4)}.items()
        },
        "scale": np.float32(0.05),
    }
    np.savez(tmp_path / "in.npz", **feeds)
    assert invoke("run", program, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz", *FAST).exit_code == 0
    wanted = evaluate(graph, {n: torch.from_numpy(np.asarray(v)) for n, v in feeds.items()})
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_allclose(out["y"], wanted[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(out["codes"], wanted[1])


def test_the_docs_describe_the_schema_the_notation_and_every_option() -> None:
    import re

    import click

    import tilewright.ir.notation as notation
    from tilewright.cli.verbs import cli

    text = (ROOT / "docs" / "cli.md").read_text()
    described = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    assert list(described) == PERF_KEYS
    assert list(described["steps"][0]) == STEP_KEYS
    assert list(described["unfused"][0]) == list(described["fallback"][0]) == FINDING_KEYS
    grammar = [row.strip() for row in (notation.__doc__ or "").splitlines() if re.match(r" +\w+ *= ", row)]
    assert len(grammar) == 7 and all(f"\n{row}\n" in text for row in grammar)
    for name, command in cli.commands.items():
        assert f"| `{name}" in text
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(f"`{flag}" in text for flag in parameter.opts), f"{name} {parameter.opts}"


def test_a_terminal_narrower_than_the_tables_loses_no_column(program: str) -> None:
    result = invoke("perf", program, "-n", "1", *FAST, env={"COLUMNS": "30"})
    assert result.exit_code == 0, result.output
    for title in ("step", "µs", "share %", "of limit %", "mean µs"):
        assert title in result.stdout
    assert " by llvm" in result.stdout
    assert max(len(text.rstrip()) for text in result.stdout.splitlines()) <= 32


@pytest.mark.thin(3)
@pytest.mark.parametrize(  # tables and progress; text alone
    ("verb", "closed"), [("run", ">&-"), ("run", "2>&-"), ("run", "<&- >&- 2>&-"), ("read", ">&-"), ("read", "<&- >&- 2>&-")]
)
def test_closed_streams_are_no_error(tmp_path: Path, verb: str, closed: str) -> None:
    program = write(tmp_path, parse_named("plain", "s8[4,8] @ s8[8,4] -> s8"))
    command = f"'{sys.executable}' -m tilewright {verb} '{program}' {'' if verb == 'read' else ' '.join(FAST)} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_an_extent_stays_open_within_bounds(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "open.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    text = invoke("read", path, "--dim", "n=4:64:4").stdout
    assert "dim n low=4 high=64 multiple_of=4" in text
    assert "f32[n,4]" in text
    ran = json.loads(invoke("run", path, "--dim", "n=4:64:4", "--json", *FAST).stdout)
    assert ran["outputs"][0]["type"] == "f32[16,4]", ran  # the middle
    for verb in ("read", "run"):
        unknown = invoke(verb, path, "--dim", "n=4:64:4", "--dim", "m=1:8")
        assert unknown.exit_code == 2
        assert "no open extent of the program is called 'm' (--dim)\n  try: it has n" in unknown.output


def test_bounds_that_a_program_does_not_take_are_named(tmp_path: Path) -> None:
    """A table of 16 positions, of which as many are read as there are rows."""
    path = tmp_path / "open.tw"
    text = """graph "g" {
  dim n low=%d high=1000000 hint=13
  guard 16 >= n
  %%0 = input label="x" type=f32[n] : f32[n]
  %%1 = const data=f32[16]{%s} : f32[16]
  %%2 = slice(%%1) start=[0] stop=[n] step=[1] : f32[n]
  %%3 = map(%%0, %%2) fn="add" : f32[n]
  return "y" %%3
}
"""
    path.write_text(text % (1, ", ".join(["1.0"] * 16)))
    ran = invoke("run", path, "--dim", "n=1:1000000", "--json", *FAST)
    assert json.loads(ran.stdout)["outputs"][0]["type"] == "f32[6]"
    assert "tilewright: --dim: the program holds where 16 >= n, and is run at n=6" in ran.stderr
    path.write_text(
        """graph "g" {
  dim n low=17 high=1000000 hint=18
  guard 16 >= n
  %0 = input label="x" type=f32[n] : f32[n]
  return "y" %0
}
"""
    )
    refused = invoke("run", path, "--dim", "n=17:1000000", *FAST)
    assert refused.exit_code == 2
    assert "does not take n=4123, but only where 16 >= n (--dim)\n  try: other bounds: --dim NAME=LOW:HIGH" in refused.stderr


def test_reports_say_how_they_were_made(program: str, tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    perf = json.loads(invoke("perf", program, "--json", "-n", 1, *FAST).stdout)["made"]
    account = json.loads(invoke("explain", program, "--json", *FAST).stdout)["made"]
    assert perf["command"] == shlex.join(["tilewright", "perf", str(program), "--json", "-n", "1", *FAST])
    assert account["command"] == shlex.join(["tilewright", "explain", str(program), "--json", *FAST])
    for made in (perf, account):
        assert made["version"].split()[0] == __version__
        assert made["packages"]["torch"] == torch.__version__
        assert made["packages"]["python"] == platform.python_version()
        assert made["threads"] == torch.get_num_threads()
        assert before <= datetime.fromisoformat(made["when"]) <= datetime.now(UTC)
