"""Saved programs: read back bit-equal without what compiled them, and never with code that somebody else wrote or changed."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import pickle
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llvm_map import begin, end
from msgspec.structs import replace
from safetensors import safe_open
from saved_programs import PROGRAMS, Sorted, changed, compiled, manifest_of, reseal, rewritten, with_an_edge

import tilewright
from tilewright.candidates.llvm.runtime import engine, image
from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.hardware.detect import detect
from tilewright.ir.artefact import Container
from tilewright.program import Program
from tilewright.runtime.artefact import read, write
from tilewright.runtime.artefact.format import Whole, machine_of
from tilewright.runtime.executable import Executable
from tilewright.schedule.recipe import Prepared, described

pytestmark = [
    pytest.mark.skipif(engine.available() is not None, reason="no kernels for this processor"),
    pytest.mark.skipif(detect("cpu").chip.kind != "cpu" or sys.platform != "linux", reason="objects of Linux"),
]


KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(0o700)
    (tmp_path / "cache" / "key").write_bytes(KEY)
    (tmp_path / "cache" / "key").chmod(0o600)
    return tmp_path


@functools.cache
def once(name: str) -> tuple[bytes, tuple[torch.Tensor, ...], torch.Tensor]:
    """The bytes of a saved program, signed with the key, its inputs, and what it gives for them as it was saved."""
    program, inputs = PROGRAMS[name]()
    return write.artefact_of(program), inputs, program(*inputs)


def saved(tmp_path: Path, name: str = "f32") -> tuple[Path, tuple[torch.Tensor, ...], torch.Tensor]:
    """The same as a file."""
    content, inputs, wanted = once(name)
    path = tmp_path / f"{name}.twp"
    path.write_bytes(content)
    return path, inputs, wanted


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_back_gives_the_same_bits(tmp_path, name):
    program, inputs = PROGRAMS[name]()
    for step in program.steps:
        if step.decision is not None and step.decision.kernel.candidate.startswith("llvm"):
            assert step.runner is not None and described(step.runner), f"{step!r} has no recipe"
    program.save(tmp_path / "p.twp")
    again = tilewright.load_program(tmp_path / "p.twp")
    assert isinstance(again, Program)
    for _ in range(3):  # state goes on from where it was saved
        assert torch.equal(program(*inputs), again(*inputs))
    assert [s.name for s in again.steps] == [s.name for s in program.steps]
    assert [repr(s) for s in again.steps] == [repr(s) for s in program.steps]
    assert again.source.output_names == program.source.output_names
    assert {n: t.tolist() for n, t in again.state.items()} == {n: t.tolist() for n, t in program.state.items()}


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("llvmlite", "triton", "onnx", "onnxruntime", "jax", "jaxlib")))  # as if not installed
import torch
import tilewright
for path in sys.argv[1:]:
    inputs, wanted = torch.load(path + ".pt")
    assert torch.equal(tilewright.load_program(path)(*inputs), wanted), path
print("equal")
"""


def test_it_runs_where_neither_compilers_nor_front_ends_are(tmp_path):
    files = []
    for name in PROGRAMS:
        if name != "call":  # which aten may answer for
            path, inputs, wanted = saved(tmp_path, name)
            torch.save((inputs, wanted if name != "state" else None), f"{path}.pt")
            if name == "state":
                program = tilewright.load_program(path)
                torch.save((inputs, program(*inputs)), f"{path}.pt")
            files.append(str(path))
    ran = subprocess.run([sys.executable, "-c", WITHOUT, *files], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "equal\n", ran.stderr


def test_what_a_library_does_is_asked_of_the_library_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewright.candidates.llvm.gemm.candidate.choose", lambda *_: None)
    program, inputs = compiled(torch.nn.Linear(37, 23), torch.randn(5, 37))
    (step,) = [s for s in program.steps if s.decision is not None and s.decision.problem.kind == "gemm"]
    assert step.decision is not None and not step.decision.kernel.candidate.startswith("llvm")
    program.save(tmp_path / "p.twp")
    again = tilewright.load_program(tmp_path / "p.twp")
    assert torch.equal(program(*inputs), again(*inputs))
    assert repr(again.steps[0]) == repr(program.steps[0])


def test_a_split_gemm_has_the_kernels_of_its_pieces(tmp_path):
    from tilewright.candidates import split
    from tilewright.compiler import optimise
    from tilewright.ir.pattern import Trace
    from tilewright.runtime.prepare import prepare
    from tilewright.schedule.candidate import plan_for
    from tilewright.schedule.search import Decision, search

    module, x = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.GELU()).eval(), torch.randn(6, 48)
    source, target = load(module, LoadOptions(example_inputs=(x,))), detect("cpu")

    def decide(problem, weights):
        if problem.kind != "gemm":
            return search(problem, target, budget_s=0, weights=weights)
        plan = plan_for(split.CANDIDATE, problem, target)
        kernel = plan.build(next(s for s in plan.schedules() if s["at"] == "epilogue"))
        return Decision(problem, kernel, None, (), False, False)

    program = prepare(source, optimise(source), target, Trace(), decide, made=Program)
    assert [s.decision.kernel.candidate for s in program.steps if s.decision is not None] == ["split"]
    program.save(tmp_path / "p.twp")
    assert torch.equal(program(x), tilewright.load_program(tmp_path / "p.twp")(x))


class Regrouped(torch.nn.Module):
    """A product whose left operand lies in no order that a kernel reads by itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.reshape(6, 4, 5).transpose(1, 2).reshape(12, 10) @ y


def test_an_operand_that_torch_evaluates_first_is_saved_as_text(tmp_path):
    program, inputs = compiled(Regrouped(), torch.randn(6, 20), torch.randn(10, 5))
    program.save(tmp_path / "p.twp")
    (step,) = Container(tmp_path / "p.twp").decoded(Whole).program.steps
    assert step.chosen is not None and isinstance(step.chosen.recipe, Prepared) and "transpose" in step.chosen.recipe.left
    assert torch.equal(program(*inputs), tilewright.load_program(tmp_path / "p.twp")(*inputs))


def test_a_loop_has_the_programs_of_its_regions(tmp_path, monkeypatch):
    from against_jax import text
    from jax import lax
    from jax import numpy as jnp

    def powers(x, a):
        return lax.fori_loop(0, 100, lambda i, y: jnp.tanh(y @ a) + i, x)

    inputs = torch.randn(3, 4), torch.randn(4, 4) / 2
    program = tilewright.compile(text("stablehlo", powers, *(t.numpy() for t in inputs)), budget_s=0, cache=False)
    program.save(tmp_path / "p.twp")
    again = tilewright.load_program(tmp_path / "p.twp")
    assert torch.equal(program(*inputs), again(*inputs))
    assert [len(s.within) for s in again.steps] == [len(s.within) for s in program.steps] and again.steps[-1].within
    monkeypatch.setattr(read, "made_by", lambda: "abc")
    compiled_again = tilewright.load_program(tmp_path / "p.twp", budget_s=0)
    assert [len(s.within) for s in compiled_again.steps] == [len(s.within) for s in program.steps]
    torch.testing.assert_close(compiled_again(*inputs), program(*inputs), rtol=1e-3, atol=1e-3)


def test_an_index_out_of_range_is_the_same_error(tmp_path):
    path, _, _ = saved(tmp_path, "embedding")
    with pytest.raises(TilewrightError, match="out of range"):
        tilewright.load_program(path)(torch.full((2, 7), 50))


def test_a_program_that_was_read_can_be_saved_pickled_and_copied(tmp_path):
    path, inputs, wanted = saved(tmp_path)
    again = tilewright.load_program(path)
    again.save(tmp_path / "again.twp")
    assert (tmp_path / "again.twp").read_bytes() == path.read_bytes()
    for other in (pickle.loads(pickle.dumps(again)), copy.copy(again), copy.deepcopy(again)):
        assert type(other) is Program and torch.equal(other(*inputs), wanted)
    again.drop_weights()
    again.save(tmp_path / "dropped.twp")
    assert torch.equal(tilewright.load_program(tmp_path / "dropped.twp")(*inputs), wanted)


def test_weights_that_are_packed_are_read_from_the_file_when_asked_for(tmp_path):
    from tilewright.report.measure.inputs import make_feeds
    from tilewright.report.measure.verify import verify_program

    path, _, _ = saved(tmp_path)
    program = tilewright.load_program(path)
    assert program.drop_weights() == 0
    assert verify_program(program, "p", make_feeds(program.source)).verified


def test_the_file_is_one_that_other_tools_read(tmp_path):
    path, _, _ = saved(tmp_path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "tilewright program"
        names = file.keys()
        shapes = [tuple(file.get_tensor(n).shape) for n in names if n.startswith("constant/")]
        assert (256, 64) in shapes or (64, 256) in shapes
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    starts = {e["data_offsets"][0] % 64 for n, e in header.items() if n[:7] not in ("__metad", "padding")}
    assert starts == {0} and (8 + int.from_bytes(content[:8], "little")) % 64 == 0


def test_a_saved_program_is_a_program_to_compile(tmp_path):
    path, inputs, wanted = saved(tmp_path)
    again = tilewright.compile(path, budget_s=0, cache=False)
    torch.testing.assert_close(again(*inputs), wanted, rtol=1e-4, atol=1e-5)
    assert load(path).output_names == again.source.output_names


# -- whose code is run


def test_the_key_is_this_users_alone(tmp_path, caplog):
    path, key = tmp_path / "p.twp", tmp_path / "cache" / "key"
    key.unlink()
    program, inputs = PROGRAMS["f32"]()
    program.save(path)
    wanted = program(*inputs)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert torch.equal(tilewright.load_program(path)(*inputs), wanted)
    key.chmod(0o640)
    with pytest.raises(InputError, match="trust=True"):
        tilewright.load_program(path)
    assert "others can read it" in caplog.text


def test_code_that_another_key_signed_is_refused(tmp_path):
    path, inputs, wanted = saved(tmp_path)
    (tmp_path / "cache" / "key").write_bytes(bytes(32))
    with pytest.raises(InputError, match=r"not signed by this user's key.*\n.*trust=True, or --trust") as refused:
        tilewright.load_program(path)
    assert str(path) in str(refused.value)
    assert torch.equal(tilewright.load_program(path, trust=True)(*inputs), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(tilewright.load_program(path, trust=True)))(*inputs), wanted)


@pytest.mark.parametrize(
    "signature", ["", "0", "é" * 64, "0" * 64, "0" * 10_000], ids=["none", "short", "other", "wrong", "long"]
)
def test_what_is_no_signature_is_refused(tmp_path, signature):
    path, _, _ = saved(tmp_path)
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["signature"] = signature
    text = json.dumps(header, ensure_ascii=False).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    with pytest.raises(InputError, match=r"not signed by this user's key"):
        tilewright.load_program(path)


def test_a_program_is_saved_whole_while_calls_write_its_state(tmp_path, monkeypatch):
    program, inputs = PROGRAMS["state"]()
    real = write.write_tensors_to

    def later(*args):
        program(*inputs)
        return real(*args)

    monkeypatch.setattr(write, "write_tensors_to", later)
    before = {name: t.clone() for name, t in program.state.items()}
    program.save(tmp_path / "p.twp")
    again = tilewright.load_program(tmp_path / "p.twp")
    assert all(torch.equal(t, before[name]) for name, t in again.state.items())
    assert not all(torch.equal(t, before[name]) for name, t in program.state.items())


def test_where_no_key_can_be_kept_programs_are_not_signed(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("")
    path = tmp_path / "p.twp"
    program, inputs = PROGRAMS["f32"]()
    program.save(path)
    wanted = program(*inputs)
    assert "without a signature" in caplog.text
    with pytest.raises(InputError, match="trust=True"):
        tilewright.load_program(path)
    assert torch.equal(tilewright.load_program(path, trust=True)(*inputs), wanted)


def code_of(path: Path) -> str:
    """The name of an array of machine code."""
    container = Container(path)
    return next(iter(container.decoded(Whole).code.values()))


def test_changed_code_with_right_digests_is_refused(tmp_path):
    path, _, _ = saved(tmp_path)

    def change(part: bytearray) -> None:
        part[0x200] ^= 1

    reseal(path, code_of(path), change)
    with pytest.raises(InputError, match="trust=True"):
        tilewright.load_program(path)


def test_no_code_of_a_changed_manifest_is_run_and_its_graph_is_read_or_an_error(tmp_path, monkeypatch):
    path, inputs, wanted = saved(tmp_path)
    content = path.read_bytes()
    manifest, read = manifest_of(content), 0
    path.write_bytes(rewritten(content, manifest))  # the same in other words: not what was signed
    with pytest.raises(InputError, match="trust=True"):
        tilewright.load_program(path)
    assert torch.equal(tilewright.load_program(path, trust=True)(*inputs), wanted)
    monkeypatch.setattr(image, "mapped", lambda _: pytest.fail("code was mapped"))
    for seed in range(100):
        path.write_bytes(rewritten(content, with_an_edge(manifest, seed)))
        with contextlib.suppress(TilewrightError):  # for another machine it says so, and the graph is compiled
            tilewright.load_program(path, budget_s=0)
        with contextlib.suppress(TilewrightError):
            read += bool(tilewright.load(path))
    assert read > 33  # most of a manifest says how, not what


def test_a_type_that_is_none_is_an_error(tmp_path):
    path, _, _ = saved(tmp_path)
    manifest = manifest_of(path.read_bytes())
    next(iter(manifest["arrays"].values()))["kind"]["dtype"] = "opaque"
    path.write_bytes(rewritten(path.read_bytes(), manifest))
    with pytest.raises(InputError, match=r"there is no type opaque\["):
        tilewright.load(path)


def test_a_changed_byte_is_an_error_even_of_a_trusted_file(tmp_path):
    path, _, _ = saved(tmp_path)
    container = Container(path)
    whole = container.decoded(Whole)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name in (code_of(path), "manifest", next(n for n in whole.arrays if n.startswith("packed/"))):
        entry = name if name == "manifest" else whole.arrays[name].entry
        at = start + header[entry]["data_offsets"][0] + 5
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(InputError, match=r"a damaged program: .* was changed"):
            tilewright.load_program(path, trust=True)


def check_changed(path: Path, inputs: tuple[torch.Tensor, ...], wanted: torch.Tensor, seeds: range) -> int:
    """Read changed files; the number of those that were errors. The others must give the same bits with the same code."""
    content, errors = path.read_bytes(), 0
    code = Container(path).decoded(Whole).code.keys()
    other = path.with_name("changed.twp")
    for seed in seeds:
        other.write_bytes(changed(content, seed))
        try:
            program = tilewright.load_program(other, trust=bool(seed % 2), budget_s=0)
            assert torch.equal(program(*inputs), wanted), seed
            assert Container(other).decoded(Whole).code.keys() == code
        except TilewrightError:
            errors += 1
    return errors


def test_two_hundred_changed_files_are_errors_or_give_the_same(tmp_path):
    path, inputs, wanted = saved(tmp_path)
    assert check_changed(path, inputs, wanted, range(200)) > 150


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["int8", "attention", "embedding", "w4"])
def test_a_thousand_changed_files_are_errors_or_give_the_same(tmp_path, name):
    path, inputs, wanted = saved(tmp_path, name)
    assert check_changed(path, inputs, wanted, range(1000, 2000)) > 750


def test_other_files_are_told_what_they_are(tmp_path):
    for content, words in (
        (b"", "no safetensors file"),
        (b"\x80\x02abcdefgh", "no saved program: a pickle is no safetensors file"),
        (
            b"PK\x03\x04" + bytes(40),
            r"(?s)no saved program: a zip archive .*x\.twp\)\n  try: `tilewright compile FILE -o F\.twp`",
        ),
        (struct.pack("<Q", 2) + b"{}", "no saved program"),
    ):
        path = tmp_path / "x.twp"
        path.write_bytes(content)
        for reads in (tilewright.load_program, tilewright.load):
            with pytest.raises(InputError, match=words):
                reads(path)
    with pytest.raises(InputError, match=r"(?s)cannot read .*none\.twp.*try: a \.twp file on this machine"):
        tilewright.load_program(tmp_path / "none.twp")
    with pytest.raises(InputError, match="an argument of type int"):
        tilewright.load_program(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="an argument of type NoneType"):
        PROGRAMS["f32"]()[0].save(None)  # type: ignore[arg-type]
    path, _, _ = saved(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"7"'))
    with pytest.raises(InputError, match="version 7 of the format, 1 wanted"):
        tilewright.load_program(path)


# -- other machines


def warned(caplog) -> str:
    return " ".join(r.message for r in caplog.records if r.levelno == logging.WARNING)


def test_on_another_chip_it_says_so_and_is_compiled(tmp_path, monkeypatch, caplog):
    path, inputs, wanted = saved(tmp_path)
    here = machine_of(detect("cpu"))
    monkeypatch.setattr(read, "machine_of", lambda _: replace(here, chip="x86_64_other", name="Another"))
    again = tilewright.load_program(path, budget_s=0)
    assert "is compiled again from its graph: it is for" in warned(caplog) and "x86_64_other" in warned(caplog)
    torch.testing.assert_close(again(*inputs), wanted, rtol=1e-4, atol=1e-5)
    assert again.source.name == tilewright.load(path).name
    (tmp_path / "cache" / "key").write_bytes(bytes(32))  # none of its code is run: nobody need trust it
    torch.testing.assert_close(tilewright.load_program(path, budget_s=0)(*inputs), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("why", ["features", "version", "memory"])
def test_what_does_not_fit_here_is_compiled(tmp_path, monkeypatch, caplog, why):
    path, inputs, wanted = saved(tmp_path)
    here = machine_of(detect("cpu"))
    if why == "features":
        monkeypatch.setattr(read, "machine_of", lambda _: replace(here, features=here.features[1:]))
        words = "for a processor with"
    elif why == "version":
        monkeypatch.setattr(read, "made_by", lambda: "abc")
        words = "another version of Tilewright"
    else:
        monkeypatch.setattr(image, "_mprotect", lambda: lambda *_: -1)
        words = "map no machine code"
    again = tilewright.load_program(path, budget_s=0)
    assert words in warned(caplog)
    torch.testing.assert_close(again(*inputs), wanted, rtol=1e-4, atol=1e-5)


def test_another_version_may_write_its_steps_in_another_way(tmp_path, caplog):
    path, inputs, wanted = saved(tmp_path)
    manifest = manifest_of(path.read_bytes())
    manifest["made_by"], manifest["program"]["steps"], manifest["more"] = "abc", {"of": ["another", "kind"]}, 1
    path.write_bytes(rewritten(path.read_bytes(), manifest))
    torch.testing.assert_close(tilewright.load_program(path, budget_s=0)(*inputs), wanted, rtol=1e-4, atol=1e-5)
    assert "another version of Tilewright" in warned(caplog)


def test_a_stranger_may_not_call_what_it_likes_from_another_chip(tmp_path, monkeypatch):
    program, _ = compiled(Sorted(), torch.randn(4, 16))
    path = tmp_path / "p.twp"
    monkeypatch.setattr(write, "print_with_literals", lambda *a, real=write.print_with_literals: _renamed(*real(*a)))
    program.save(path)
    monkeypatch.undo()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "another"))
    here = machine_of(detect("cpu"))
    monkeypatch.setattr(read, "machine_of", lambda _: replace(here, chip="x86_64_other"))
    with pytest.raises(InputError, match="allow-calls"):
        tilewright.load_program(path, budget_s=0)
    with pytest.raises(InputError, match="allow-calls"):
        tilewright.load(path)


def _renamed(text, literals):
    return text.replace("aten.cumsum.default", "aten.empty_like.default"), literals


# -- machine code


def objects(count: int = 1) -> list[bytes]:
    """Kernels that store their number at an address."""
    found = []
    for n in range(count):
        module, f, (target,) = begin(1)
        f.store("i64", str(n), target)
        found.append(engine.object_code(end(module, f)))
    return found


def test_mapped_code_is_never_writable():
    code = image.mapped(dict(zip("ab", objects(2), strict=True)))
    for i, name in enumerate("ab"):
        result = torch.zeros(1, dtype=torch.int64)
        code[name].function()(result.data_ptr())
        assert int(result) == i
    rights = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        begin, end = (int(x, 16) for x in span.split("-"))
        rights[range(begin, end)] = mode
    address = code["a"].address("python")
    (mode,) = [m for r, m in rights.items() if address in r]
    assert mode == "r-xp"


def test_objects_that_are_not_whole_or_call_anything_are_refused():
    (good,) = objects()
    with pytest.raises(UnsupportedError, match="no whole object"):
        image.mapped({"a": good[:100]})
    with pytest.raises(UnsupportedError, match="x86-64"):
        image.mapped({"a": b"\x7fELF" + bytes(60)})
    with pytest.raises(UnsupportedError, match=r"calls 'PyLong_AsVoidPt_', which no kernel may"):
        image.mapped({"a": good.replace(b"PyLong_AsVoidPtr", b"PyLong_AsVoidPt_")})


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_damaged_objects_are_errors_when_they_are_mapped(start):
    """Whoever trusts a file runs its code; an object that is none is an error all the same."""
    (good,) = objects()
    for seed in range(start, start + 100):
        try:
            image.mapped({"a": changed(good, seed)})
        except UnsupportedError:
            continue


def test_an_executable_without_words_of_its_own_is_saved_too(tmp_path):
    program, inputs = PROGRAMS["f32"]()
    plain = Executable(program.source, program.graph, program.target, program.steps, program.trace, program._ready)
    path = tmp_path / "p.twp"
    plain.save(str(path))
    assert torch.equal(tilewright.load_program(path)(*inputs), program(*inputs))


def test_the_number_of_threads_is_kept_within_what_the_machine_has(tmp_path, monkeypatch):
    module, x = torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0, threads=3)
    program.save(tmp_path / "p.twp")
    for there, given, wanted in ((8, None, 3), (2, None, 2), (2, 5, 5)):
        monkeypatch.setattr(read, "usable", lambda there=there: there)
        again = tilewright.load_program(tmp_path / "p.twp", threads=given)
        assert again.threads == wanted and torch.equal(again(x), program(x))
    assert pickle.loads(pickle.dumps(program)).threads == 2
    with pytest.raises(InputError, match="threads=0 is no number of threads"):
        tilewright.load_program(tmp_path / "p.twp", threads=0)
    plain = tilewright.compile(module, example_inputs=(x,), budget_s=0)
    plain.save(tmp_path / "q.twp")
    assert tilewright.load_program(tmp_path / "q.twp").threads is None
