"""Programs that are kept: what a second process gets is what compiling would give, and whatever decides it makes a miss."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import onnx
import pytest
import torch
from cli_programs import install_ceilings, invoke
from in_threads import in_threads
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright import digests
from tilewright.candidates.llvm.runtime import engine
from tilewright.digests import Sighting
from tilewright.errors import InputError
from tilewright.frontends import LoadOptions
from tilewright.hardware.detect import detect
from tilewright.ir import evaluate
from tilewright.ir.artefact import Container
from tilewright.program import Program
from tilewright.rules import calibrate
from tilewright.runtime import programs
from tilewright.runtime.artefact import write
from tilewright.schedule import cache as schedule_cache
from tilewright.schedule import key

pytestmark = [
    pytest.mark.skipif(engine.available() is not None, reason="no kernels for this processor"),
    pytest.mark.skipif(sys.platform != "linux", reason="objects of Linux"),
]
M, K = 4, 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, in which small programs are kept, too."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder))
    monkeypatch.delenv("TILEWRIGHT_RECHECK", raising=False)
    for name in ("compiler", "runtime.programs", "runtime.artefact.read"):
        monkeypatch.setattr(f"tilewright.{name}.user_cache", schedule_cache.user_cache)
    monkeypatch.setattr(programs, "LEAST_BYTES", 0)
    install_ceilings(monkeypatch)
    return folder / "programs"


def model(path: Path, *, seed: int = 0, external: bool = True, nodes: str = "Relu") -> Path:
    """x f32[m,32] @ w f32[32,32], an activation, @ v; the weights in a file of their own."""
    rng = np.random.default_rng(seed)
    weights = [numpy_helper.from_array(rng.standard_normal((K, K)).astype(np.float32), n) for n in "wv"]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["m", K]), ("y", ["m", K])))
    steps = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node(nodes, ["h"], ["r"], name="between"),
        helper.make_node("MatMul", ["r", "v"], ["y"], name="second"),
    ]
    graph = helper.make_graph(steps, "g", [x], [y], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.parent.mkdir(exist_ok=True)
    onnx.save(made, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)
    return path


X = torch.randn(M, K, generator=torch.Generator().manual_seed(1))


def compiled(path: Path, **options: object):
    return tilewright.compile(path, batch=M, **{"budget_s": 0, **options})


@pytest.fixture
def reads(monkeypatch):
    """The number of times that a model was read."""
    found: list[object] = []
    for module in ("tilewright.compiler", "tilewright.runtime.programs"):
        inner = sys.modules[module].load

        def load(program, options, inner=inner):
            found.append(program)
            return inner(program, options)

        monkeypatch.setattr(f"{module}.load", load)
    return found


def test_a_second_compile_reads_the_program_back(tmp_path, cache, reads):
    path = model(tmp_path / "m" / "m.onnx")
    first = compiled(path)
    assert len(reads) == 1 and len([*cache.glob("*.twp")]) == 1
    again = compiled(path)
    assert len(reads) == 1
    assert torch.equal(first(X), again(X))
    assert [repr(s) for s in again.steps] == [repr(s) for s in first.steps]
    assert again.source.name == "m" and str(again.explain()) == str(first.explain())
    # What the model itself holds is read from it once it is asked for.
    (want,) = evaluate.evaluate(again.source, [X])
    assert len(reads) == 2
    torch.testing.assert_close(again(X), want)
    again.save(tmp_path / "m.twp")
    assert torch.equal(tilewright.load_program(tmp_path / "m.twp")(X), first(X))


@pytest.mark.parametrize("half", [None, "bf16"])
def test_the_command_line_and_python_take_each_others_programs(tmp_path, reads, half):
    one, other = model(tmp_path / "a" / "m.onnx"), model(tmp_path / "b" / "n.onnx", seed=1)
    options = ("--batch", M, "--budget", "0", *(["--" + half] if half else []))
    assert invoke("explain", one, *options).exit_code == 0
    compiled(other, half=half)
    assert len(reads) == 2
    compiled(one, half=half)
    assert invoke("explain", other, *options).exit_code == 0
    assert len(reads) == 2


def test_what_is_kept_has_no_weights_twice(tmp_path, cache):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    (kept,) = cache.glob("*.twp")
    with pytest.raises(InputError, match="a kept program, which lacks its model's weights"):
        Container(kept)
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("verb", ["perf", "explain", "verify", "run"])
def test_every_verb_says_the_same_of_a_kept_program(tmp_path, cache, verb, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    options = ("--batch", M, "--budget", "0", "--json", *(("-n", "1") if verb == "perf" else ()))
    kept_from = [invoke(verb, path, *options) for _ in range(2)]
    assert len([*cache.glob("*.twp")]) == 1, kept_from[0].output
    monkeypatch.setenv(programs.LIMIT, "0")
    fresh = invoke(verb, path, *options)
    assert [r.exit_code for r in (*kept_from, fresh)] == [0, 0, 0], fresh.output
    assert alike(kept_from[1].stdout) == alike(fresh.stdout) == alike(kept_from[0].stdout)


@pytest.mark.parametrize("options", [("--int8",), ("--fp8", "--bf16"), ("--w4=16", "--fp16")])
def test_a_quantised_program_is_kept_with_what_it_lost(tmp_path, cache, options, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    asked = ("verify", path, "--batch", M, "--budget", "0", "--json", "--quantized", *options)
    kept_from = [invoke(*asked) for _ in range(2)]
    assert len([*cache.glob("*.twp")]) == 1
    monkeypatch.setenv(programs.LIMIT, "0")
    fresh = invoke(*asked)
    assert [r.exit_code for r in (*kept_from, fresh)] == [0, 0, 0], fresh.output
    assert json.loads(fresh.stdout)["quantized"]["layers"] and json.loads(fresh.stdout)["accuracy"]["layers"]
    assert alike(kept_from[1].stdout) == alike(fresh.stdout)
    assert "random inputs" in kept_from[1].stderr  # the warning, too
    monkeypatch.delenv(programs.LIMIT)
    explained = "explain", path, "--batch", M, "--budget", "0", "--json", *options
    from_kept = invoke(*explained).stdout
    monkeypatch.setenv(programs.LIMIT, "0")
    assert alike(from_kept) == alike(invoke(*explained).stdout) and json.loads(from_kept)["products"]


def alike(text: str) -> object:
    """A report without times."""
    times = {"time_us", "total_us", "least_us", "median_us", "most_us", "share", "peak_fraction", "noise", "when", "rest"}
    times |= {"low_us", "high_us", "total_low_us", "total_high_us", "steps_us", "in_place_us", "limits_noise"}

    def without(x: object) -> object:
        if isinstance(x, dict):
            return {k: without(v) for k, v in x.items() if k not in times}
        return [without(v) for v in x] if isinstance(x, list) else x

    return without(json.loads(text))


def change_environment(path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_ANYTHING", "1")


def change_code(path, monkeypatch):
    monkeypatch.setattr(programs, "code", lambda: "another")


def change_readers(path, monkeypatch):
    monkeypatch.setattr(programs, "readers", lambda: [("onnx", "another")])


def change_libraries(path, monkeypatch):
    monkeypatch.setattr(key, "_libraries", lambda: "another torch")


def change_driver(path, monkeypatch):
    inner = key.circumstances
    another = lambda *a, **k: msgspec.structs.replace(inner(*a, **k), driver="another")  # noqa: E731
    monkeypatch.setattr(programs, "circumstances", another)


def change_chip(path, monkeypatch):
    inner = key.circumstances
    another = lambda *a, **k: msgspec.structs.replace(inner(*a, **k), processor="another")  # noqa: E731
    monkeypatch.setattr(programs, "circumstances", another)


def change_numerics(path, monkeypatch):
    monkeypatch.setattr(key, "_numerics", lambda: "others")


def change_model(path, monkeypatch):
    model(path, nodes="Tanh")


def change_weights(path, monkeypatch):
    """Change weights in place, and give the file the times that it had."""
    data = path.with_name(f"{path.name}.data")
    status, content = data.stat(), bytearray(data.read_bytes())
    content[3] ^= 64
    with data.open("r+b") as file:
        file.write(content)
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_where_links_lead(path, monkeypatch):
    data = path.with_name(f"{path.name}.data")
    data.rename(path.with_name("moved"))
    data.symlink_to("moved")


def change_knowledge(path, monkeypatch):
    """Another choice for a problem, as `tune` may leave it."""
    kept = schedule_cache.user_cache()
    first = kept.records()[0]
    assert kept.put(msgspec.structs.replace(first, key=msgspec.structs.replace(first.key, budget="long"), time_us=1.0))


def forget(path, monkeypatch):
    schedule_cache.user_cache().clear()


@pytest.mark.parametrize("change", [v for k, v in sorted(globals().items()) if k.startswith("change_") or k == "forget"])
def test_whatever_decides_the_result_makes_a_miss(tmp_path, reads, change, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    change(path, monkeypatch)
    compiled(path)
    assert len(reads) == 2
    compiled(path)
    assert len(reads) == 2 or change in (change_driver, change_chip)  # whose choices are kept under what was there before


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 5},
        {"input_dims": {"x": (M, K)}},
        {"half": "bf16"},
        {"excess_precision": True},
        {"threads": 1},
        {"allow_calls": True},
        {"follow_links": True},
        {"quantize": tilewright.Quantization(tilewright.scheme("int8"), [{"x": X}])},
        {"quantize": tilewright.Quantization(tilewright.scheme("int8"), [{"x": 2 * X}])},
        {"quantize": tilewright.Quantization(tilewright.scheme("int8"), [{"x": X}], rtol=0.5)},
        {"quantize": tilewright.Quantization(tilewright.scheme("w4", group=16), [{"x": X}])},
        {"quantize": tilewright.Quantization(tilewright.scheme("w4", group=32), [{"x": X}])},
    ],
    ids=lambda options: f"{next(iter(options))}",
)
def test_every_option_has_a_program_of_its_own(tmp_path, cache, reads, options):
    path, given = model(tmp_path / "m" / "m.onnx"), {"batch": M, "budget_s": 0, **options}
    torch.set_num_threads(2)
    tilewright.compile(path, batch=M, budget_s=0)
    first = tilewright.compile(path, **given)
    assert len(reads) == 2 and len([*cache.glob("*.twp")]) == 2
    again = tilewright.compile(path, **given)
    assert len(reads) == 2 and again.threads == options.get("threads")
    x = X if given["batch"] == M else torch.randn(5, K)
    assert torch.equal(first(x), again(x))
    assert [(s.where, s.error, s.skip_reason, str(s.after.type)) for s in again.layers] == [
        (s.where, s.error, s.skip_reason, str(s.after.type)) for s in first.layers
    ]


def test_every_option_of_a_front_end_is_asked_for(tmp_path):
    place = programs.place_of(
        model(tmp_path / "m" / "m.onnx"), LoadOptions(), detect("cpu"), Program, excess_precision=False, how={}
    )
    assert {*json.loads(place.request)["read"], *programs.NOT_READ} == {f.name for f in fields(LoadOptions)}
    for given in ({"untrusted": True}, {"example_inputs": ()}, {"dims": True}, {"dims": {"m": (1, 4)}}):
        options = LoadOptions(**given)
        assert (
            programs.place_of(tmp_path / "m" / "m.onnx", options, detect("cpu"), Program, excess_precision=False, how={})
            is None
        )


HLO = """
HloModule m
ENTRY main {
  a = f32[4,32]{1,0} parameter(0)
  b = f32[32,32]{1,0} parameter(1)
  ROOT dot = f32[4,32]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize("as_file", [True, False])
def test_hlo_is_kept_by_its_text(tmp_path, reads, as_file):
    def given(text):
        (tmp_path / "m.hlo").write_text(text)
        return tmp_path / "m.hlo" if as_file else text

    x, w = X, torch.randn(K, K)
    first, again = (tilewright.compile(given(HLO), budget_s=0) for _ in range(2))
    assert len(reads) == 1 and torch.equal(first(x, w), again(x, w))
    other = tilewright.compile(given(HLO.replace("rhs_contracting_dims={0}", "rhs_contracting_dims={1}")), budget_s=0)
    assert len(reads) == 2
    torch.testing.assert_close(other(x, w), x @ w.T)


def test_what_was_cut_short_is_not_kept(tmp_path, cache, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    inner = calibrate.calibrate

    def one_batch(graph, batches, *given, **named):
        return replace(inner(graph, batches[:1], *given, **named), batches=1)

    monkeypatch.setattr("tilewright.compiler.calibrate", one_batch)
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, x=X.numpy())
    asked = ("run", path, "--batch", M, "--budget", "0", "--int8", "--calibration", tmp_path / "a.npz")
    assert invoke(*asked, "--calibration", tmp_path / "b.npz").exit_code == 0
    assert not cache.exists() or not [*cache.glob("*.twp")]
    assert invoke(*asked).exit_code == 0 and len([*cache.glob("*.twp")]) == 1
    assert invoke("compile", *asked[1:], "-o", tmp_path / "m.twp").exit_code == 0
    assert torch.equal(tilewright.load_program(tmp_path / "m.twp")(X), compiled_from_command(tmp_path, asked))


def compiled_from_command(tmp_path, asked):
    np.savez(tmp_path / "in.npz", x=X.numpy())
    assert invoke(*asked, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz").exit_code == 0
    return torch.from_numpy(np.load(tmp_path / "out.npz")["y"])


def test_a_model_elsewhere_is_another(tmp_path, reads):
    compiled(model(tmp_path / "m" / "m.onnx"))
    compiled(model(tmp_path / "n" / "m.onnx"))
    assert len(reads) == 2


def test_a_larger_budget_goes_on_and_a_smaller_one_does_not(tmp_path, cache, reads):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    first = compiled(path, budget_s=1)
    assert len(reads) == 2 and any(s.decision.measured for s in first.steps)
    for budget_s in (1, 0.5, 0):
        assert all(s.decision.recalled for s in compiled(path, budget_s=budget_s).steps)
    assert len(reads) == 2
    compiled(path, budget_s=1.5)
    assert len(reads) == 3 and len([*cache.glob("*.twp")]) == 1


def test_what_was_chosen_in_noise_is_kept_until_the_machine_is_quiet(tmp_path, reads, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path, budget_s=1)
    kept = schedule_cache.user_cache()
    for record in kept.records():
        kept.put(msgspec.structs.replace(record, provisional="14 runnable tasks"))
    assert compiled(path, budget_s=1).steps[0].decision.provisional  # compiled from what is known now, and kept
    assert compiled(path, budget_s=1).steps[0].decision.provisional and len(reads) == 2
    monkeypatch.setattr("tilewright.schedule.tuning_database.TuningDatabase._quiet", lambda self: True)
    assert compiled(path, budget_s=0).steps[0].decision.provisional and len(reads) == 2
    assert not compiled(path, budget_s=10).steps[0].decision.provisional and len(reads) == 3  # time to spare on a busy machine
    compiled(path, budget_s=10)
    assert len(reads) == 3


@pytest.mark.parametrize("place", [0.02, 0.2, 0.5, 0.8, 0.999])
def test_a_damaged_file_is_compiled_anew(tmp_path, cache, reads, caplog, place):
    path = model(tmp_path / "m" / "m.onnx")
    wanted = compiled(path)(X)
    (kept,) = cache.glob("*.twp")
    content = bytearray(kept.read_bytes())
    content[int(place * len(content))] ^= 1
    kept.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert torch.equal(compiled(path)(X), wanted)
    if len(reads) == 2:  # else the byte was padding
        assert "is not used, and the model compiled" in caplog.text
    assert torch.equal(compiled(path)(X), wanted)


def test_what_another_key_signed_is_not_run(tmp_path, cache, reads, caplog):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    (cache.parent / "key").write_bytes(bytes(32))
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        compiled(path)
    assert len(reads) == 2 and "it is not signed by this user's key" in caplog.text


def test_what_somebody_else_could_have_written_is_not_read(tmp_path, cache, reads):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    (kept,) = cache.glob("*.twp")
    kept.chmod(0o666)
    compiled(path)
    compiled(path)
    assert len(reads) == 2 and kept.stat().st_mode & 0o777 == 0o600
    kept.rename(tmp_path / "m.twp")
    kept.symlink_to(tmp_path / "m.twp")
    compiled(path)
    compiled(path)
    assert len(reads) == 3 and not kept.is_symlink()
    cache.chmod(0o777)
    compiled(path)
    assert len(reads) == 4


def test_what_cannot_be_signed_is_not_kept(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(write, "user_key", lambda: None)
    compiled(model(tmp_path / "m" / "m.onnx"))
    assert not [*cache.glob("*.twp")]


def test_a_model_is_found_from_another_folder(tmp_path, reads, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    monkeypatch.chdir(tmp_path)
    wanted = compiled(path.relative_to(tmp_path))(X)
    monkeypatch.chdir(path.parent)
    assert torch.equal(compiled("m.onnx")(X), wanted) and len(reads) == 1


def test_a_model_that_changes_while_its_program_runs_is_not_taken_for_it(tmp_path, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path)
    again = compiled(path)
    change_model(path, monkeypatch)
    with pytest.raises(InputError, match="the model was changed since it was compiled"):
        evaluate.evaluate(again.source, [X])


def test_a_model_that_changes_while_it_is_compiled_is_not_kept(tmp_path, cache, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    inner = programs.Place.keep

    def keep(self, *given):
        change_weights(path, monkeypatch)
        inner(self, *given)

    monkeypatch.setattr(programs.Place, "keep", keep)
    compiled(path)
    assert not [*cache.glob("*.twp")]


def test_processes_that_start_at_once_write_one_program_once(tmp_path, cache, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path, cache=False)  # what is imported and built
    written, together = [], threading.Barrier(3)
    inner, keep = programs.Place.keep, write.keep
    monkeypatch.setattr(programs, "keep", lambda *given: (written.append(given), keep(*given)))

    def at_once(self, *given):
        together.wait(60)
        inner(self, *given)

    monkeypatch.setattr(programs.Place, "keep", at_once)
    in_threads(3, lambda _: compiled(path))
    assert len(written) == 1 and len([*cache.glob("*.twp")]) == 1 and not [*cache.glob(".*.tmp")]


def test_another_process_reads_what_this_one_kept(tmp_path, cache):
    path = model(tmp_path / "m" / "m.onnx")
    wanted = compiled(path)(X)
    code = (
        "import sys, torch, tilewright; from tilewright.runtime import programs; programs.LEAST_BYTES = 0\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"p = tilewright.compile({str(path)!r}, batch={M}, budget_s=0)\n"
        "assert not {'onnx', 'llvmlite', 'triton'} & set(sys.modules), 'it was compiled'\n"
        f"torch.save(p(torch.load({str(tmp_path / 'x')!r})), {str(tmp_path / 'y')!r})"
    )
    torch.save(X, tmp_path / "x")
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    assert torch.equal(torch.load(tmp_path / "y"), wanted)


def test_the_programs_used_longest_ago_make_room(tmp_path, cache, monkeypatch):
    paths = [model(tmp_path / name / "m.onnx") for name in "abc"]
    for at, path in enumerate(paths[:2]):
        compiled(path)
        for kept in cache.glob("*.twp"):
            os.utime(kept, (at + 1, at + 1)) if kept.stat().st_mtime > 1e6 else None
    before = dict(programs.kept_programs())
    compiled(paths[0])  # used
    monkeypatch.setenv(programs.LIMIT, str(2.5 * max(before.values()) / 2**30))
    (cache / ".half-written.1.tmp").touch()
    os.utime(cache / ".half-written.1.tmp", (0, 0))
    compiled(paths[2])
    left = {p for p, _ in programs.kept_programs()}
    assert len(left) == 2 and len(left & set(before)) == 1 and not (cache / ".half-written.1.tmp").exists()
    assert next(iter(left & set(before))) == next(iter(before))  # which was first made, and then used
    told = json.loads(invoke("cache", "info", "--json").stdout)
    assert (told["programs"], told["programs_bytes"]) == (2, sum(size for _, size in programs.kept_programs()))
    assert "Programs 2 in 0 MiB" in " ".join(invoke("cache", "info").stdout.split())
    assert "and 2 programs" in invoke("cache", "clear", "--yes").stdout and not programs.kept_programs()


def test_nothing_is_kept_where_that_is_turned_off(tmp_path, cache, monkeypatch, caplog):
    path = model(tmp_path / "m" / "m.onnx")
    compiled(path, cache=False)
    monkeypatch.setenv(programs.LIMIT, "0")
    compiled(path)
    assert not cache.exists() or not [*cache.glob("*.twp")]
    monkeypatch.setenv(programs.LIMIT, "much")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert programs.limit_bytes() == int(digests.LIMIT_GIB * 2**30)
    assert "TILEWRIGHT_PROGRAMS_GIB is no number of GiB: 8 are taken" in caplog.text


def test_a_command_that_shows_stages_or_keeps_nothing_compiles(tmp_path, cache, reads):
    path = model(tmp_path / "m" / "m.onnx")
    asked = ("explain", path, "--batch", M, "--budget", "0")
    for more in (("--no-cache",), ("--dump", tmp_path / "dump")):
        assert invoke(*asked, *more).exit_code == 0
    assert not cache.exists() or not [*cache.glob("*.twp")]
    assert invoke(*asked).exit_code == 0 and len([*cache.glob("*.twp")]) == 1
    assert invoke(*asked, "--dump", tmp_path / "again").exit_code == 0
    assert {p.name for p in (tmp_path / "again").iterdir()} == {p.name for p in (tmp_path / "dump").iterdir()} != set()


def test_a_model_with_no_room_is_not_even_digested(tmp_path, cache, monkeypatch):
    path = model(tmp_path / "m" / "m.onnx")
    with monkeypatch.context() as patch:
        patch.setenv(programs.LIMIT, str((path.stat().st_size - 1) / 2**30))
        patch.setattr(digests, "_digest", lambda *given: pytest.fail("it was"))
        compiled(path)
    monkeypatch.setenv(programs.LIMIT, str(8000 / 2**30))  # but none for its weights of 8192 bytes
    compiled(path)
    assert not cache.exists() or not [*cache.glob("*.twp")]
    monkeypatch.setenv(programs.LIMIT, "1")
    compiled(path)
    assert len([*cache.glob("*.twp")]) == 1


def test_a_small_program_is_compiled_each_time(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(programs, "LEAST_BYTES", 1 << 20)
    compiled(model(tmp_path / "m" / "m.onnx"))
    assert not [*cache.glob("*.twp")]


def test_a_disk_that_has_no_room_keeps_nothing(tmp_path, cache, monkeypatch, caplog):
    def full(*given):
        raise InputError("cannot be written: No space left on device", where="there")

    monkeypatch.setattr(programs, "keep", full)
    with caplog.at_level(logging.INFO, logger="tilewright"):
        compiled(model(tmp_path / "m" / "m.onnx"))
    assert "a program is not kept: cannot be written: No space left on device" in caplog.text


def test_a_disk_that_is_nearly_full_is_left_and_that_is_said(tmp_path, cache, monkeypatch, caplog):
    monkeypatch.setattr(programs.shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 2 * 4 * K * K))
    with caplog.at_level(logging.INFO, logger="tilewright"):
        compiled(model(tmp_path / "m" / "m.onnx"))
    assert "a program is not kept: its disk has 0.0 MiB free, and 0.0 are wanted" in caplog.text
    assert not [*cache.glob("*.twp")]


def test_a_digest_is_of_all_bytes_and_a_stamp_alone_is_never_believed(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(os.urandom((1 << 23) + 5))
    first = Sighting(path)
    assert Sighting(path).digest() == first.digest() and first.unchanged()
    content = bytearray(path.read_bytes())
    for at in (0, 1 << 23, len(content) - 1):
        content[at] ^= 1
        path.write_bytes(content)
        assert Sighting(path).digest() != first.digest() and not first.unchanged()
        content[at] ^= 1
    path.write_bytes(content[:-1])
    assert Sighting(path).digest() != first.digest()
    path.write_bytes(b"")
    assert Sighting(path).digest() != first.digest() and Sighting(path).unchanged()
    path.unlink()
    assert not first.unchanged()
