"""Machine code in the process and on disk: kept, checked, shared between processes and threads, never trusted blindly."""

import gc
import os
import platform
import stat
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import warm
from in_threads import in_threads
from llvm_map import begin, end

from tilewright.candidates.llvm.expressions.text import PYTHON, THREADS, Function, Module
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime import engine
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import Unsupported, plan_for
from tilewright.schedule.problem import problem_of

CPU = detect("cpu")


def text(value):
    """A module whose kernel stores a number at the address it is given."""
    module, f, (target,) = begin(1)
    f.store("i64", str(value), target)
    return end(module, f)


def stored(call):
    result = torch.zeros(1, dtype=torch.int64)
    assert call(result.data_ptr()) is None
    return int(result)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def generated(monkeypatch):
    """Count how often machine code was generated."""
    calls = []
    parsed = engine._parsed

    def counted(*args):
        calls.append(args)
        return parsed(*args)

    monkeypatch.setattr(engine, "_parsed", counted)
    return calls


def only(folder) -> Path:
    (file,) = folder.iterdir()
    return file


def test_an_object_is_kept_for_its_owner_alone_and_used_again(folder, generated):
    first = engine.object_code(text(1))
    file = only(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert engine.object_code(text(1)) == first
    assert len(generated) == 1
    assert stored(engine._Loaded(first).bound(engine.METH_FASTCALL)) == 1


def test_another_kernel_another_processor_and_other_features_have_other_keys(folder, monkeypatch):
    cpu, features = engine.host()
    engine.object_code(text(1))
    engine.object_code(text(2))
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(
        engine, "host", lambda: ("x86-64-v3" if "x86" in engine._llvm().get_process_triple() else "generic", features)
    )
    engine.object_code(text(1))
    monkeypatch.setattr(engine, "host", lambda: (cpu, ""))
    engine.object_code(text(1))
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("at", [0, 31, 32, 200, -1])
def test_a_damaged_object_is_made_again(folder, generated, at):
    good = engine.object_code(text(3))
    file = only(folder)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert engine.object_code(text(3)) == good
    assert len(generated) == 2
    assert bytes(content) != file.read_bytes(), "the damaged file stayed"


def test_exchanged_objects_are_made_again(folder, generated):
    good = [engine.object_code(text(n)) for n in (11, 12)]
    one, other = folder.iterdir()
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    assert [engine.object_code(text(n)) for n in (11, 12)] == good
    assert len(generated) == 4


def test_objects_behind_a_link_or_in_an_open_folder_are_not_read(folder, generated, tmp_path):
    engine.object_code(text(13))
    file = only(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    engine.object_code(text(13))
    assert len(generated) == 2 and not only(folder).is_symlink()
    folder.chmod(0o777)
    engine.object_code(text(13))
    assert len(generated) == 3


@pytest.mark.parametrize("length", [0, 5, 32, 100])
def test_a_truncated_object_is_made_again(folder, generated, length):
    good = engine.object_code(text(4))
    file = only(folder)
    file.write_bytes(file.read_bytes()[:length])
    assert engine.object_code(text(4)) == good
    assert len(generated) == 2


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_could_have_written_is_ignored(folder, generated, mode):
    engine.object_code(text(5))
    only(folder).chmod(mode)
    engine.object_code(text(5))
    assert len(generated) == 2
    assert stat.S_IMODE(only(folder).stat().st_mode) == 0o600


def test_a_file_of_another_user_is_ignored(folder, generated, monkeypatch):
    engine.object_code(text(6))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    engine.object_code(text(6))
    assert len(generated) == 2


def test_writing_is_whole_or_not_at_all(folder, generated, monkeypatch):
    def torn(self, target):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", torn)
    assert stored(engine._Loaded(engine.object_code(text(7))).bound(engine.METH_FASTCALL)) == 7
    assert list(folder.iterdir()) == [], "something was left behind"


def test_a_folder_that_cannot_be_written_is_done_without(folder, generated, monkeypatch):
    def refused(**_):
        raise PermissionError("read-only")

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    assert stored(engine._Loaded(engine.object_code(text(8))).bound(engine.METH_FASTCALL)) == 8


def test_a_cache_that_cannot_exist_is_done_without(tmp_path, generated, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert stored(engine._Loaded(engine.object_code(text(9))).bound(engine.METH_FASTCALL)) == 9


CHILD = """
import sys, torch
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.problem import problem_of
from tilewright.schedule.candidate import Unsupported, plan_for
if sys.argv[1] == "cold":
    def never(*_):
        raise AssertionError("machine code was generated")
    engine._parsed = never
    engine._llvm().TargetMachine.emit_object = never
(node,) = parse("f32[40,50] @ f32[50,60] + bias, relu").outputs
problem, target = problem_of(node), detect("cpu")
plan = plan_for(gemm.CANDIDATE, problem, target)
kernel = plan.build(next(iter(plan.schedules())))
a, b, c = torch.randn(40, 50), torch.randn(50, 60), torch.randn(60)
(result,) = kernel.prepare({})([a, b, c])
torch.testing.assert_close(result, torch.relu(a @ b + c))
"""


def test_a_second_process_loads_without_generating_code(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for which in ("warm", "cold"):
        ran = warm.run(["-c", CHILD, which], environment, timeout=120)
        assert ran.returncode == 0, ran.stderr
    assert len(list(folder.iterdir())) == 3  # the kernel, what calls it, and the threads


def kernel(line):
    (node,) = parse(line).outputs
    problem = problem_of(node)
    schedule = next(iter(plan_for(gemm.CANDIDATE, problem, CPU).schedules()))
    return plan_for(gemm.CANDIDATE, problem, CPU).build(schedule).prepare({})


def test_several_python_threads_call_one_kernel_at_once():
    run = kernel("f32[200,300] @ f32[300,150] + bias, gelu")
    inputs = [[torch.randn(200, 300), torch.randn(300, 150), torch.randn(150)] for _ in range(4)]
    wanted = [run(i)[0].clone() for i in inputs]
    wrong = []

    def repeat(which):
        torch.set_num_threads(2)
        for _ in range(25):
            if not torch.equal(run(inputs[which])[0], wanted[which]):
                wrong.append(which)

    in_threads(4, repeat)
    assert not wrong


def test_the_number_of_threads_may_change_between_calls():
    run = kernel("s8[130,257] @ s8[257,190] -> s8 scale=tensor")
    given = [torch.randint(-128, 128, s, dtype=torch.int8) for s in ((130, 257), (257, 190))] + [torch.tensor(300.0)]
    results = []
    for count in (1, 4, 2, 7, 1, 3):
        torch.set_num_threads(count)
        results.append(run(given)[0].clone())
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_what_is_no_tensor_or_missing_is_told_and_nothing_is_kept():
    run = kernel("f32[8,8] @ f32[8,8]")
    a = torch.randn(8, 8)
    references = sys.getrefcount(a)
    for wrong, why in (([a, 3], TypeError), ([a], IndexError), ([a, None], TypeError), (5, TypeError)):
        with pytest.raises(why):
            run(wrong)
    assert sys.getrefcount(a) == references
    torch.testing.assert_close(run((a, a))[0], a @ a)


@pytest.mark.parametrize("size", [8, 40, 300])
def test_a_call_keeps_neither_its_sources_nor_its_results(size):
    run = kernel(f"f32[{size},{size}] @ f32[{size},{size}]")
    a, b = torch.randn(size, size), torch.randn(size, size).T
    before = sys.getrefcount(a), sys.getrefcount(b)
    for _ in range(3):
        results = run([a, b])
        plain = [torch.empty(1)]  # of which the interpreter counts one reference more or less
        counts = sys.getrefcount(results), sys.getrefcount(results[0])
        assert counts == (sys.getrefcount(plain), sys.getrefcount(plain[0]))
        gone = weakref.ref(results.pop())
        assert gone() is None
    assert (sys.getrefcount(a), sys.getrefcount(b)) == before


@pytest.mark.parametrize("name", ["expf", "memcpy", "system", "llvmish", "GOMP_critical_start"])
def test_a_kernel_cannot_call_what_it_is_not_given(name):
    with pytest.raises(ValueError, match="no function that a kernel may call"):
        Function(Module(), "f", []).intrinsic(name, "void")


def test_a_kernel_declares_nothing_else():
    (node,) = parse("s8[40,70] @ s8[70,50], gelu -> f32").outputs
    problem = problem_of(node)
    plan = plan_for(gemm.CANDIDATE, problem, CPU)
    nest = plan.nest_of(next(iter(plan.schedules())))
    declared = {
        n for n, text in GemmWriter(nest).write().declarations.items() if " internal constant " not in text
    }  # of its own
    assert {n for n in declared if not n.startswith("llvm.")} <= {*THREADS, *PYTHON, "_Py_NoneStruct"}


def test_a_system_without_a_thread_pool_is_told_so(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    why = engine.available()
    assert why is not None and "generated kernels have no threads on" in why and "riscv64" in why
    with pytest.raises(Unsupported, match="have no threads on"):
        engine.require()


def maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists maps")
def test_the_memory_of_kernels_that_nobody_holds_is_given_back(folder):
    seen = []
    held = engine.function(text(-1))
    for n in range(300):
        call = engine.function(text(1000 + n))
        assert stored(call) == 1000 + n
        del call
        seen.append(maps())
    assert seen[-1] <= seen[engine.RECENT + 8] + 8, (seen[0], seen[engine.RECENT + 8], seen[-1])
    assert seen[-1] - seen[0] <= 4 * engine.RECENT
    assert stored(held) == -1 and engine.function(text(-1)) is held, "what somebody holds stays"
    assert stored(engine.function(text(1000))) == 1000, "what was given back is loaded again"


def test_a_bound_kernel_keeps_its_code(folder):
    from tilewright.candidates.llvm.runtime.calls import Call, bound
    from tilewright.schedule.recipe import CallShape

    kernels = [weakref.ref(engine.function(text(2000 + n))) for n in range(engine.RECENT + 2)]
    gc.collect()
    assert kernels[0]() is None and kernels[-1]() is not None
    kernel = engine.function(text(3000))
    run = bound(Call(kernel, CallShape(2, (), 0, (), 0, 0, True)))
    alive = weakref.ref(kernel)
    del kernel
    engine._recent.clear()
    gc.collect()
    assert alive() is not None
    del run
    gc.collect()
    assert alive() is None
