"""Bad input: one or two lines on standard error, nothing on standard output, nothing written, exit code 2."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write
from click.testing import Result
from onnx import helper
from onnx_models import FLOAT, model, value

from tilewright.dtype import F32, OPAQUE
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Input
from tilewright.ir.types import TensorType


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


@pytest.fixture
def program(tmp_path: Path) -> str:
    return write(tmp_path, block())


def refused(result: Result, *said: str) -> None:
    """Exit code 2, a short message that says these things, nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) <= 3
    for words in said:
        assert words in result.stderr, result.stderr


VERBS = ["read", "run", "verify", "perf", "explain"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_is_not_there(verb: str, tmp_path: Path) -> None:
    refused(invoke(verb, tmp_path / "none.onnx"), "no such file", "none.onnx", "try:")
    refused(invoke(verb, tmp_path), "is a folder")


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_is_no_program(verb: str, tmp_path: Path) -> None:
    (tmp_path / "x.tw").write_text('graph "g" {\n  %0 = input label="x" type=f32[2] : f32[3]\n}\n')
    refused(invoke(verb, tmp_path / "x.tw"), "input is f32[2], the text says f32[3]", "x.tw, line 2")
    (tmp_path / "x.txt").write_text("hello")
    refused(invoke(verb, tmp_path / "x.txt"), "nothing here reads")


def test_text_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.tw").write_bytes(b'graph "\xff"')
    refused(invoke("read", tmp_path / "x.tw"), "byte 7 is not UTF-8 text", "x.tw")
    (tmp_path / "x.tw").write_bytes(b"")
    refused(invoke("read", tmp_path / "x.tw"), "wanted, 'end of text' found")
    (tmp_path / "x.tw").write_text('graph "g" {\n  %0 = input label="x" type=q7[2] : q7[2]')
    refused(invoke("read", tmp_path / "x.tw"), "wanted, 'q7' found")
    (tmp_path / "x.tw").unlink()
    (tmp_path / "x.tw").mkdir()
    refused(invoke("read", tmp_path / "x.tw"), "is a folder")
    for name in ("x.hlo", "x.mlir", "x.stablehlo"):
        (tmp_path / name).write_text(" \n")
        refused(invoke("read", tmp_path / name), "the file is empty", name, "try:")


def test_a_constant_too_large_for_text(tmp_path: Path) -> None:
    x = input_("x", F32, (64,))
    graph = Graph("large", (x,), (map_("add", x, const(torch.arange(64.0))),), ("y",))
    refused(invoke("run", write(tmp_path, graph)), "no data given for constant 'constant'", "text holds small constants only")


@pytest.mark.parametrize("verb", ["run", "verify", "perf", "explain"])
def test_a_device_that_is_not_there(verb: str, program: str) -> None:
    refused(invoke(verb, program, "--device", "tpu"), "unknown device 'tpu'", "cpu, cuda or cuda:0")
    refused(invoke(verb, program, "--device", "cuda:99"), "no CUDA device 99")


@pytest.mark.parametrize("verb", ["run", "verify", "perf"])
def test_fills_of_what_is_no_input(verb: str, program: str) -> None:
    refused(invoke(verb, program, "--fill0", "nope"), "no input is called 'nope'", "one of ids, mask, table, w, b, x, scale")
    refused(invoke(verb, program, "--fill1", "nope"), "no input is called 'nope'")
    refused(invoke(verb, program, "--fill0", "x", "--fill1", "x"), "input 'x' is to be filled with 0 and with something else")


def test_fills_of_what_is_given(program: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((4, 4), np.float32))
    refused(invoke("run", program, "--inputs", tmp_path / "in.npz", "--fill0", "x"), "filled with 0 and with something else")
    refused(invoke("run", program, "--inputs", tmp_path / "in.npz", "--fill1", "x"), "filled with 1 and with something else")


def test_dims_of_what_is_no_input_or_is_fixed(program: str) -> None:
    refused(invoke("read", program, "--input-dim", "@nope", "2"), "no input is called 'nope'")
    refused(
        invoke("read", program, "--input-dim", "@x", "2", "3"),
        "input 'x' cannot be [2, 3]",
        "fixes it to f32[4,4]",
        "--input-dim",
    )


def test_dims_take_what_follows_them(program: str) -> None:
    for given in (
        ("--input-dim", "@x", "4", "4", program),
        (program, "--input-dim", "@x", "4", "4", "@ids", "2", "5"),
        (program, "--input-dim=@x", "4", "4", "--input-dim", "@ids", "2", "5"),
        (program, "--input-dim", "@x 4 4"),
        ("--input-dim", "@x", "4", "4", "--", program),
    ):
        result = invoke("read", *given)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--input-dim", "@x"], "@x needs its extents"),
        (["--input-dim", "@", "2"], "@ needs its extents"),
        (["--input-dim", "@x", "2", "@y"], "@y needs its extents"),
        (["--input-dim"], "write @NAME and then its extents"),
        (["--input-dim", "@x", "-2"], "'-2' is no extent"),
        (["--input-dim", "@x", "4", "4", "--input-dim", "@x", "4", "4"], "@x is given twice"),
        (["--batch", "0"], "'0' is no whole number from 1 on"),
        (["--nonsense"], "No such option"),
    ],
)
def test_usage_errors_are_clicks_own(given: list[str], said: str, program: str) -> None:
    result = invoke("read", program, *given)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr.replace("\n", " ") and "Usage: tilewright read" in result.stderr


def test_a_batch_that_no_input_can_take_is_refused(program: str) -> None:
    refused(
        invoke("read", program, "--batch", "77"),
        "a batch of 77 is for a first axis left open, and no input has one",
        "leave it out",
    )


def test_archives_that_are_none(program: str, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    refused(invoke("run", program, "--inputs", path), "no such file", "in.npz", "try: an .npz file: numpy.savez")
    refused(invoke("run", program, "--inputs", Path(program) / "in.npz"), "no such file")
    path.write_text("hello")
    refused(invoke("run", program, "--inputs", path), "not an .npz of arrays", "in.npz", "numpy.savez")
    path.write_bytes(pickle.dumps({"x": 1}))
    refused(invoke("run", program, "--inputs", path), "not an .npz of arrays")
    refused(invoke("run", program, "--inputs", tmp_path), f"cannot be read: Is a directory ({tmp_path})", "try: an .npz file")
    np.save(tmp_path / "one.npy", np.zeros(3))
    refused(invoke("run", program, "--inputs", tmp_path / "one.npy"), "not an .npz of arrays: it is one array without a name")
    np.savez(path, x=np.array([{}], dtype=object))
    refused(invoke("run", program, "--inputs", path), "not an .npz of arrays: Object arrays cannot be loaded")
    np.savez(path, x=np.zeros((4, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-40])
    refused(invoke("run", program, "--inputs", path), "not an .npz of arrays")


def test_arrays_that_do_not_fit(program: str, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez(path, nope=np.zeros(3))
    refused(invoke("run", program, "--inputs", path), "no input is called 'nope'")
    np.savez(path, x=np.zeros((4, 5), np.float32))
    refused(invoke("run", program, "--inputs", path, *FAST), "shape [4, 5] given, f32[4,4] wanted", "input 'x'")
    np.savez(path, x=np.zeros((4, 4), np.float64))
    refused(invoke("run", program, "--inputs", path, *FAST), "f64 given, f32[4,4] wanted")
    np.savez(path, x=np.zeros((4, 4), "V2"))
    refused(invoke("run", program, "--inputs", path, *FAST), "input 'x'")


@pytest.mark.parametrize(
    ("options", "given", "hint"),
    [
        ((), (5, 4), "an array of [4, 8] in in.npz; for other extents export the model with these open"),
        ((), (5, 9), "an array of [5, 8] in in.npz; for other extents export the model with these open"),
        (("--batch", 2), (5, 8), "--batch 5, or leave it out: open axes are those of the array"),
        (("--batch", 2), (2, 9), "an array of [2, 8] in in.npz; for other extents export the model with these open"),
        (("--input-dim", "@x", 2, 8), (5, 8), "--input-dim @x 5 8, or leave it out: open axes are those of the array"),
    ],
)
def test_a_shape_that_does_not_fit_is_told_before_compiling(
    options: tuple[object, ...], given: tuple[int, ...], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr("tilewright.cli.compile.program_of", never)
    monkeypatch.chdir(tmp_path)
    open_axis = "n" if options or given == (5, 9) else 4
    relu = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", FLOAT, [open_axis, 8])], {"y": FLOAT})
    onnx.save(relu, "m.onnx")
    np.savez("in.npz", x=np.zeros(given, np.float32))
    refused(invoke("run", "m.onnx", "--inputs", "in.npz", *options), f"shape {list(given)} given", "input 'x'", f"try: {hint}")


def test_outputs_that_cannot_be_written(program: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    refused(invoke("run", program, "--output", tmp_path / "none" / "out.npz", *FAST), "cannot be written: No such file")
    (tmp_path / "folder").mkdir()
    refused(invoke("run", program, "--output", tmp_path / "folder", *FAST), "cannot be written: Is a directory", "try:")
    (tmp_path / "folder").rmdir()
    for verb, option in (("run", "--output"), ("perf", "--html"), ("perf", "--trace"), ("tune", "--export")):
        said = "cannot be written: Not a directory", "try: a folder that is there and that you may write to"
        refused(invoke(verb, "not read for that", option, Path(program) / "out"), *said)
        refused(invoke(verb, "not read for that", option, ""), "cannot be written: Is a directory")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("verb", "option", "suffix"),
    [("run", "--output", ".npz"), ("perf", "--html", ".html"), ("perf", "--trace", ".json"), ("tune", "--export", ".json")],
)
def test_a_suffix_of_what_is_not_written_is_refused(program: str, tmp_path: Path, verb: str, option: str, suffix: str) -> None:
    """It is refused before the program is read."""
    said = f"what is written is {suffix}, not .txt ({tmp_path / 'a b.txt'})", f"try: {option} '{tmp_path / 'a b'}{suffix}'"
    refused(invoke(verb, program, option, tmp_path / "a b.txt"), *said)
    refused(invoke(verb, program, option, tmp_path / f"a{suffix}.gz"), f"try: {option} {tmp_path / f'a{suffix}'}\n")
    assert not list(tmp_path.glob("a*"))


def test_one_file_for_two_reports(program: str, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to("report")
    result = invoke("perf", program, "--html", tmp_path / "report", "--trace", tmp_path / "other", *FAST)
    assert result.exit_code == 2 and "--html and --trace name one file" in result.stderr
    assert not (tmp_path / "report").exists()


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    """Linux takes any bytes; what is printed and written is UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("names are text here")
    path = write(folder, block())
    page, trace, out = (folder / name for name in ("page", "trace", "out.npz"))
    reports = invoke("perf", path, "--html", page, "--trace", trace, "--json", "-n", "1", *FAST)
    assert reports.exit_code == 0 and json.loads(reports.stdout)["program"] == path.encode(errors="replace").decode()
    assert json.loads(trace.read_text("utf-8"))["otherData"]["program"].endswith("?/block.tw")
    assert "?/block.tw" in page.read_text("utf-8")
    ran = invoke("run", path, "--output", out, "--json", *FAST)
    assert ran.exit_code == 0 and out.exists() and "?/out.npz" in json.loads(ran.stdout)["written"]
    for verb in ("read", "verify", "explain"):
        assert json.loads(invoke(verb, path, "--json", *([] if verb == "read" else FAST)).stdout)


def test_an_output_that_is_no_array(tmp_path: Path) -> None:
    x = input_("x", F32, (2,))
    opaque = Node(Call("fake_library", "Strings", "{}", (TensorType(OPAQUE, ()),)), x)
    path = write(tmp_path, Graph("strings", (x,), (opaque,), ("y",)))
    out = tmp_path / "out.npz"
    shown = invoke("run", path, *FAST)
    assert shown.exit_code == 0 and "y opaque 0 0" in " ".join(shown.stdout.split())
    refused(invoke("run", path, "--output", out, *FAST), "output 'y' is no array and cannot be written", "out.npz")
    assert not out.exists()


def test_a_failed_run_leaves_the_old_file_as_it_was(program: str, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    out.write_bytes(b"precious")
    np.savez(tmp_path / "in.npz", ids=np.full((2, 5), 99))  # an index past the table's end
    refused(invoke("run", program, "--inputs", tmp_path / "in.npz", "--output", out, *FAST), "gather", "cannot be evaluated")
    assert out.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block.tw", "in.npz", "out.npz"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "the left operand's type"),
        ("s8[4,8] @ s8[9,4]", "K is 8 on the left and 9 on the right"),
        ("q3[4,8] @ s8[8,4]", "unknown dtype 'q3'"),
        ("s8[4,8] @ s8[8,4] -> f99", "unknown dtype 'f99'"),
        ("s8[4,8] @ s8[8,4], frobnicate", "the name of an elementwise function"),
        ("f32[4,8] @ f32[12345678901234567,8]", "no extent has 17 digits (column 16 of"),
        ("f32[4..12345678901234567,8] @ f32[8,4]", "no extent has 17 digits (column 8 of"),
        ("f32[4,8] @ s4[8,4] group=12345678901234567", "no extent has 17 digits"),
        ("f32[4,8] @ s4[8,4] group=00000000000000000", "is no positive whole number"),
        ("f32[10000000,100] @ f32[100,10000000]", "GiB at least and the machine has"),
    ],
)
@pytest.mark.parametrize("perf", [[], ["--perf"]])
def test_lines_that_are_no_gemm(line: str, said: str, perf: list[str]) -> None:
    refused(invoke("gemm", line, *perf), said)


def test_gemm_fills_of_what_is_no_input() -> None:
    refused(invoke("gemm", "s8[4,8] @ s8[8,4]", "--fill0", "x"), "no input is called 'x'", "one of a, b")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def load(*given: object) -> Graph:
        raise error

    monkeypatch.setattr("tilewright.frontends.load", load)


def test_a_bug_is_reported_as_one_and_traced_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by zero\nand more"))
    result = invoke("read", "x.tw")
    assert result.exit_code == 70 and result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: ZeroDivisionError: division by zero",
        "  this is a bug in Tilewright: please report it with what --traceback shows",
    ]
    for given in (["read", "x.tw", "--traceback"], ["--traceback", "read", "x.tw"]):
        result = invoke(*given)
        assert result.exit_code == 70 and "Traceback (most recent call last)" in result.stderr


def test_a_typed_error_is_traced_on_request_too(tmp_path: Path) -> None:
    result = invoke("read", tmp_path / "none.tw", "--traceback")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "error: no such file" in result.stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …")])
def test_memory_that_runs_out_is_no_bug(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, error)
    refused(invoke("read", "x.tw"), "out of memory", "smaller shapes")


def test_an_interrupt_while_torch_is_imported_ends_the_process(tmp_path: Path) -> None:
    """Torch itself goes on without what was being imported: here a stand-in does."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('went on')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "tilewright", "devices"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


@pytest.mark.parametrize("module", ["click", "tilewright.cli.compile"])
def test_an_interrupt_before_a_verb_runs_is_no_traceback(tmp_path: Path, module: str) -> None:
    """A hook interrupts the import of what the command line needs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "tilewright", "devices"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("more", "kept"), [((), "what was measured until then"), (("--no-cache",), "nothing")])
def test_an_interrupt_while_kernels_are_chosen_says_what_is_kept(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], kept: str
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tilewright.compiler.compile", interrupted)
    result = invoke("explain", program, *more)
    said = f"interrupted while choosing kernels: {kept} is kept"
    assert result.exit_code == 130 and result.stderr.strip() == said


KEPT = [((), "the kernels that were chosen are kept"), (("--no-cache",), "nothing is kept")]


@pytest.mark.parametrize(("more", "kept"), KEPT)
def test_an_interrupt_while_steps_are_compared_or_timed_says_how_far_it_came(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], kept: str
) -> None:
    from tilewright.report.measure import timing, verify

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    for verb, module, name, doing in (
        ("verify", verify, "compare_step", "comparing"),
        ("perf", timing, "device_us", "timing steps"),
    ):
        calls: list[object] = []
        function = getattr(module, name)

        def late(*given: object, of: object = function, calls: list[object] = calls, **named: object) -> object:
            calls.append(given)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return of(*given, **named)  # type: ignore[operator]

        monkeypatch.setattr(module, name, late)
        result = invoke(verb, program, *FAST, *more)
        assert result.exit_code == 130 and result.stdout == ""
        assert re.fullmatch(rf"interrupted while {doing}, [12] of \d done: {kept}", result.stderr.strip()), result.stderr


def test_an_interrupt_behind_the_report_says_that_it_is_whole(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*given: object) -> None:
        raise KeyboardInterrupt

    place = SimpleNamespace(find=lambda budget_s: None, reading=nullcontext, keep=late, keeping_s=lambda graph: 0.0)
    monkeypatch.setattr("tilewright.cli.compile._place", lambda given, how: place)
    result = invoke("verify", program, *FAST)
    assert result.exit_code == 130 and "agree" in result.stdout
    assert result.stderr.strip() == "interrupted while keeping the program for its next use: the report is whole"


def test_an_interrupt_between_two_tasks_is_one_word(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.report.text.explain_text.print_explain", late)
    result = invoke("explain", program, *FAST)
    assert result.exit_code == 130 and result.stderr.strip() == "interrupted"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    result = invoke("read", "x.tw")
    assert result.exit_code == 130 and result.output.strip() == "interrupted while reading x.tw"


def test_a_signal_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = (
        "import time, tilewright.frontends\n"
        "def load(*given):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "tilewright.frontends.load = load\n"
        "import sys; sys.argv = ['tilewright', 'read', 'x.tw']\n"
        "from tilewright.cli.verbs import main; main()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().strip() == "interrupted while reading x.tw"


@pytest.mark.thin(2)
@pytest.mark.parametrize("args", [["read"], ["explain", *FAST]])
def test_a_pipe_that_closes_early_is_quiet(args: list[str], tmp_path: Path) -> None:
    value = x = input_("x" * 200, F32, (4,))
    for i in range(300 if args[0] == "read" else 3):
        value = map_("add", value, map_("sine", value)) if i % 2 else map_("cosine", value)
    graph = Graph("long", (x,), (value,), ("y",), {value: "o" * 5000}, ("note " * 20000,))
    command = [sys.executable, "-m", "tilewright", args[0], write(tmp_path, graph), *args[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141
        slow = ("tilewright: choosing kernels for ", "tilewright: measuring the machine for ", "note: the time was over ")
        assert [line for line in process.stderr.read().splitlines() if not line.startswith(slow)] == []


@pytest.mark.parametrize("option", ["--rtol", "--atol", "--rms-tol", "--budget"])
def test_nan_is_no_tolerance(option: str, program: str) -> None:
    result = invoke("verify", program, option, "nan")
    assert result.exit_code == 2 and re.search("'nan' is no number( of seconds)? from 0 on", result.stderr)


@pytest.mark.parametrize("verb", ["run", "verify", "perf"])
def test_inputs_that_are_no_numbers(verb: str, tmp_path: Path) -> None:
    words = Node(Input("words", TensorType(OPAQUE, ())))
    call = Node(Call("fake_library", "Normalize", "{}", (TensorType(F32, (2,)),)), words)
    path = write(tmp_path, Graph("strings", (words,), (call,), ("y",)))
    refused(invoke(verb, path, *FAST), "it holds strings", "input 'words'", "extract_model")


def test_a_file_of_another_kind_is_no_archive_and_is_not_to_be_unpickled(program: str) -> None:
    result = invoke("run", program, "--inputs", program)
    refused(result, "not an .npz of arrays: it is another kind of file")
    assert "unsafe" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.thin(3)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["read", "--help"])
def test_a_full_disk_is_no_bug(verb: str, unbuffered: str, program: str) -> None:
    arguments = [verb] if verb == "--help" else [verb, program, "--allow-calls"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tilewright", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2 and done.stderr.startswith("error: no space left where the output goes")
