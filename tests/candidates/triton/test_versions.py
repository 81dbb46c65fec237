"""Differences between versions of Triton: its hook, names in Gluon, PTX, launches, and the sentence of a refusal."""

import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import warm

pytest.importorskip("triton")

import triton
from triton import knobs

from tilewright.candidates.triton.hopper import ptx
from tilewright.candidates.triton.runtime import module as modules
from tilewright.candidates.triton.runtime import versions
from tilewright.schedule.bench import failure

UNKNOWN = f"{modules.GLUON_IMPORTS}\n\n@gluon.jit\ndef f(p0):\n    gl.of_the_year_2030(p0)\n"


def test_a_hook_says_what_it_adds_to_a_name_and_rewrites():
    stages = {"ptx": lambda source, metadata: source + " made"}
    with ptx.rewriting(lambda t: t + " rewritten"):
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook() == ("", "")
        hook(None, stages, None, None, 90)
    assert stages["ptx"]("text", None) == "text made rewritten"


def test_what_triton_does_not_know_is_refused_in_a_sentence_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.raises(versions.CompilerError) as refused:
        modules.compiled(modules.module(UNKNOWN).f, {"p0": "*fp32"}, modules.Arch("cuda", 90, 32))
    said = failure("failed to build", refused.value)
    assert said.startswith(f"failed to build: Triton 4.0.0 cannot compile this (made for {versions.MADE_FOR}): ")
    assert "of_the_year_2030" in said and "\n" not in said


def test_a_module_that_is_not_there_any_more_is_refused_too():
    with pytest.raises(versions.CompilerError, match=f"Triton {triton.__version__} cannot compile this"):
        modules.module(f"{modules.GLUON_IMPORTS}\nfrom triton.experimental.gluon.of_old import language\n")


SUMS = ",".join(f"%r{i}" for i in range(100, 164))
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{SUMS}}}, %rd1, %rd2, p, 1, 1, 0, 0;"
STAGE = "mov.b32 %r2, %r1; // stage\n\tshl.b32 \t%r3, %r2, 14;\n"


def test_a_stage_of_fewer_columns_begins_where_it_does():
    text = ptx.narrowed(STAGE + PRODUCT, 96)
    assert "mul.lo.s32 \t%r3, %r2, 12288;" in text and "shl" not in text and "n96" in text


@pytest.mark.parametrize("more", ["\tadd.s32 \t%r4, %r2, 1;\n", "\tshl.b32 \t%r5, %r2, 7;\n"])
def test_a_stage_that_is_used_otherwise_is_not_rewritten(more):
    with pytest.raises(ptx.UnexpectedPtx, match="stage's number"):
        ptx.narrowed(STAGE + more + PRODUCT, 96)


@pytest.mark.parametrize("listed", [False, True], ids=["3.6", "since 3.7"])
@pytest.mark.parametrize("descriptors", [False, True])
def test_a_launch_passes_what_tritons_launcher_takes(listed, descriptors, monkeypatch):
    calls = []

    def launcher(*given):
        calls.append(given)

    def made(*given):
        launcher("with new descriptors", *given)

    in_c = partial(launcher)  # no function of Python
    start = SimpleNamespace(launch=made if descriptors else in_c, launch_cooperative_grid=False, launch_pdl=True)
    if listed:
        start.arg_annotations, start.kernel_signature = "kinds", b"signature"
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda device: 100 + device))
    kernel = SimpleNamespace(function="f", packed_metadata=(4, 1, 0))
    versions.direct(kernel, start, (3, 2, 1), 5, (0.5,))("a", "b")
    before = (3, 2, 1, 105, "f", False, True)
    old = (*before, None, None, (4, 1, 0), None, None, None, "a", "b", 0.5)
    new = (*before, (4, 1, 0), None, None, None, None, None, "kinds", b"signature", ("a", "b", 0.5))
    assert calls == [new if listed else old]


# Under any Triton, as 3.8 has it: a view of shared memory is as large as what it is a view of.
WHOLE = """
from tilewright.candidates.triton.runtime import versions
versions.within = versions.whole_views = lambda: True
from math import prod
from ptx import H200, emulate
from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.runtime import _gluon
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

sizes, view = [], _gluon._view

def whole(buffer, dtype, shape, layout, _semantic):
    seen = prod(getattr(n, "value", n) for n in shape) * getattr(dtype, "value", dtype).primitive_bitwidth
    sizes.append((prod(buffer.shape) * buffer.dtype.primitive_bitwidth, seen))
    return view(buffer, dtype, shape, layout, _semantic=_semantic)

_gluon._view = whole
problem = problem_of(parse("bf16[70,96] @ bf16[96,200] + bias, relu -> bf16").outputs[0])
points = tile_configs(plan_of(problem, H200))
narrow = next(p for p in points if p.tile_n == 96 and p.num_stages * p.tile_n % 128)  # the ring's end holds rows of no stage
plain = next(p for p in points if p.tile_n == 64)
for point in (narrow, plain):
    sources = random_sources(problem)
    results = emulate(CANDIDATE, problem, Schedule.of_point(point), sources)
    assert check(problem, expect(problem, sources), results) is None
assert len(sizes) > 2 and all(here == seen for here, seen in sizes), sizes
print("agrees")
"""


def test_where_views_are_whole_a_kernel_asks_for_no_others(tmp_path):
    code = f"import sys; sys.path[:] = {sys.path!r}\n{WHOLE}"
    given = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = warm.run(["-c", code], given)
    assert done.stdout.strip() == "agrees", done.stderr


def test_who_compiles_for_others_has_the_launcher_made(monkeypatch, tmp_path):
    """Is made else where a kernel is first loaded, and told of there if it cannot be made."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = []
    monkeypatch.setattr(modules, "make_launcher", made.append)
    text = f"{modules.IMPORTS}\n\n@triton.jit\ndef kernel(p0):\n    tl.store(p0, 1.0)\n"
    how = (("p0", "*fp32"),), modules.Arch("cuda", 90, 32), 0, ()
    modules._machine_code.__wrapped__(text, *how)
    assert made == []
    monkeypatch.setattr(modules.fork_server, "in_worker", True)
    kernel = modules._machine_code.__wrapped__(text, *how)
    assert made == [kernel]
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", lambda *_: 1 / 0)
    versions.make_launcher(kernel)


def test_the_driver_s_types_are_there_before_a_launcher_is_loaded(monkeypatch):
    """A launcher that is loaded before them takes no TMA descriptor, and every kernel with one fails in that process."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    seen: list[object] = []
    monkeypatch.setattr(driver, "PyCUtensorMap", None, raising=False)
    monkeypatch.setattr(driver, "CudaUtils", lambda: monkeypatch.setattr(driver, "PyCUtensorMap", int))
    monkeypatch.setattr(driver, "CudaLauncher", lambda *_: seen.append(driver.PyCUtensorMap))
    for _ in range(2):
        versions.make_launcher(SimpleNamespace(src=None, metadata=None))
    assert seen == [int, int]
