"""Saved GPU kernels, started without Triton through a driver that runs their PTX: with what Triton's launcher passes."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from attentions import attention
from fusions import by_row
from fusions import problem_of as fusion
from in_threads import in_threads
from ptx import H200, emulating
from ptx.cuda import Cuda
from ptx.machine import How
from w4_problems import posed

import tilewright
from tilewright import compiler
from tilewright.candidates.triton.runtime import cubin
from tilewright.candidates.triton.saved import launched
from tilewright.dtype import BF16, F16, F32
from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.build import const, input_, map_
from tilewright.ir.notation import parse
from tilewright.ir.text import parse as read
from tilewright.ir.text import print_with_literals
from tilewright.runtime import executable
from tilewright.runtime.artefact import read as reading
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.problem import Destination, problem_of
from tilewright.schedule.recipe import Launched, Recipe, recipe_of
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")


from tests.candidates.triton.hopper.test_gemm import WHOLE
from tests.candidates.triton.hopper.test_w4 import tile_config
from tilewright.candidates.triton.attention.candidate import CANDIDATE as ATTENTION
from tilewright.candidates.triton.attention.kernel import TileConfig as Split
from tilewright.candidates.triton.gemm.candidate import CANDIDATE as TRITON
from tilewright.candidates.triton.hopper.attention.candidate import CANDIDATE as HOPPER_ATTENTION
from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE as HOPPER
from tilewright.candidates.triton.hopper.w4.candidate import CANDIDATE as W4
from tilewright.candidates.triton.normalization.candidate import CANDIDATE as NORM


def line(text, *weights):
    found = problem_of(parse(text).outputs[0])
    return replace(found, weights=tuple(i in weights for i in range(len(found.types))))


def point(**knobs):
    return Schedule.of_point(replace(WHOLE, **{"tile_n": 64, "blocks": 2, "num_stages": 3} | knobs))


def first(candidate, problem, **wanted):
    """The first point that has these knobs."""
    points = plan_for(candidate, problem, H200).schedules()
    return next(s for s in points if all(dict(s.knobs).get(k) == v for k, v in wanted.items()))


def norm():
    x, r = input_("x", F32, (5, 96)), input_("r", F32, (5, 96))
    return fusion(*by_row(map_("add", x, r)))


def placed():
    """A result that is a part of an array."""
    x = input_("x", BF16, (3, 64))
    found = fusion(map_("multiply", x, const(torch.tensor(1.7).bfloat16(), BF16)))
    return replace(found, destinations=(Destination((9, 64), 0, 4),))


def made() -> dict[str, Any]:
    split = Schedule.of_point(Split(16, 16, 4, 3, "online", "ieee", 4, True))
    few = Schedule.of_point(tile_config("cluster=2 row_warps=4 k_warps=2 warp_tiles=1 launch_early"))
    return {
        "tma, a number and pdl": (HOPPER, line("bf16[70,96] @ bf16[96,200] + bias, silu -> bf16", 1), lambda p: point()),
        "stream-k": (HOPPER, line("f16[200,256] @ f16[256,160] -> f16", 1), lambda p: point(stream_k=3, blocks=4)),
        "a copy on each call": (HOPPER, line("f16[2,70,50] @ f16[50,77] + bias -> f16"), lambda p: point()),
        "packed codes": (HOPPER, line("s8[64,96] @ s8[96,64] -> s32", 1), lambda p: point()),
        "a kernel for any gpu": (TRITON, line("f32[33,70] @ f32[70,40] + bias, relu -> f32", 1), lambda p: first(TRITON, p)),
        "parts of k": (TRITON, line("f16[16,512] @ f16[512,32] -> f16", 1), lambda p: first(TRITON, p, split_k=4)),
        "few rows": (
            W4,
            posed("f16[5,512] @ s4[128,512]^T group=64 + bias -> f16"),
            lambda p: few,
        ),
        "attention by tma": (
            HOPPER_ATTENTION,
            problem_of(attention((1, 2, 2, 64, 128, 64, 64), F16)),
            lambda p: first(HOPPER_ATTENTION, p, kernel="flash"),
        ),
        "parts of the keys": (ATTENTION, problem_of(attention((2, 4, 4, 1, 70, 16, 16), BF16)), lambda p: split),
        "a norm": (NORM, norm(), lambda p: first(NORM, p)),
        "a part of an array": (NORM, placed(), lambda p: first(NORM, p)),
    }


class Kept:
    """A file's arrays and texts, in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, torch.Tensor] = {}

    def code(self, content: bytes) -> str:
        raise AssertionError("no code of a CPU")

    def bytes(self, memory: torch.Tensor) -> str:
        assert memory.dtype == torch.uint8 and memory.dim() == 1
        self.arrays[name := f"packed/{len(self.arrays)}"] = memory.clone()
        return name

    def text(self, roots: Any) -> str:
        from tilewright.ir.graph import Graph

        return print_with_literals(Graph("", (), tuple(roots), ("",) * len(roots)), {})[0]


def expression(text: str):
    (root,) = read(text, {}).outputs
    return root


def weights_of(problem, sources):
    return {i: sources[i] for i, w in enumerate(problem.weights) if w}


class Saved:
    """A kernel that ran through Triton's launcher, and its launch as data that went through JSON."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        candidate, self.problem, schedule = made()[name]
        self.sources = random_sources(self.problem)
        self.kept = Kept()
        with emulating(How()) as driver:
            run = plan_for(candidate, self.problem, H200).build(schedule(self.problem)).prepare(self.weights)
            self.results = [t.clone() for t in run(self.sources)]
            recipe = recipe_of(run, self.kept)
        ((self.kernel, self.arguments),) = driver.launched
        assert isinstance(recipe, Launched)
        self.recipe = msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe)
        assert self.recipe == recipe

    def cuda(self) -> Cuda:
        """A driver that knows its machine code."""
        return Cuda({self.kernel.asm["cubin"]: self.kernel.asm["ptx"]})

    @property
    def weights(self) -> dict[int, torch.Tensor]:
        return {i: self.sources[i] for i, w in enumerate(self.problem.weights) if w}

    def restored(self, recipe: Launched | None = None, **more: Any):
        """The runner of a recipe, in a process that has no Triton."""
        recipe = recipe or self.recipe
        return launched(recipe, self.problem, self.weights, H200, self.kept.arrays.__getitem__, expression, **more)


@cache
def saved(name: str) -> Saved:
    return Saved(name)


@pytest.fixture
def without_triton(monkeypatch):
    """Hide Triton from all that follows, and give it a driver of the test's own."""

    def begin(cuda: Cuda) -> Cuda:
        for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(cubin, "driver", lambda: cuda)
        monkeypatch.setattr(cubin, "_stream_of", lambda device: lambda index: 77 + index)
        cubin._loaded.cache_clear()
        return cuda

    with emulating(How()):
        yield begin
        monkeypatch.undo()
        cubin._loaded.cache_clear()


@pytest.mark.parametrize("name", made())
def test_a_saved_kernel_is_started_as_tritons_launcher_starts_it(name, without_triton):
    s = saved(name)
    cuda = without_triton(s.cuda())
    with pytest.raises(ImportError):
        importlib.import_module("triton")
    run = s.restored()
    for _ in range(2):  # counters are left as they were found
        results = run(s.sources)
        assert len(results) == len(s.results)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results, s.results, strict=True))
    again = recipe_of(run, other := Kept())
    assert msgspec.structs.replace(again, code=s.recipe.code, held=s.recipe.held) == s.recipe
    assert {t.numpy().tobytes() for t in other.arrays.values()} == {t.numpy().tobytes() for t in s.kept.arrays.values()}
    metadata = s.kernel.metadata
    (first, second) = [c for c in cuda.calls if c[0] == "launch"]
    early = [6] if metadata.launch_pdl else []
    block = (32 * s.kernel.packed_metadata[0], 1, 1)
    assert first == second == ("launch", s.recipe.code.grid, block, metadata.shared, early, 77)
    large = ("attribute", 8, (227 << 10) - 16) in cuda.calls and ("cache", 1) in cuda.calls
    assert large == (metadata.shared > 48 << 10)
    assert ("retain", 0) in cuda.calls, "a thread had no context"
    for theirs, ours in zip(s.arguments, cuda.given[0], strict=False):  # ours are followed by scratch memory
        if hasattr(theirs, "box"):
            assert replace(theirs, address=0) == replace(ours, address=0)
        elif isinstance(theirs, float):
            assert ours == int(torch.tensor(theirs).view(torch.int32)) % (1 << 32)
        elif abs(theirs) < 1 << 20:  # no address
            assert ours == theirs % (1 << 32)
    assert cuda.given[0][len(s.arguments) :] == [0, 0]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_a_program_is_read_and_run_without_triton(without_triton, tmp_path, monkeypatch, caplog):
    """A GPU whose kernels run on the CPU: what it cannot be asked for is a CUDA graph."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(executable, "OnDevice", lambda *given, **how: lambda inputs: None)
    monkeypatch.setattr(compiler, "detect", lambda device: H200)
    monkeypatch.setattr(reading, "detect", lambda device: H200)
    torch.manual_seed(0)
    module, x = Model().eval().bfloat16(), torch.randn(33, 64).bfloat16()
    with emulating(How()) as driver:
        program = tilewright.compile(module, example_inputs=(x,), budget_s=0, cache=False)
        candidates = [s.decision.kernel.candidate for s in program.steps if s.decision is not None]
        assert candidates == ["triton_norm", "hopper", "hopper"]
        program.save(tmp_path / "p.twp")
        wanted = program(x)
    without_triton(Cuda({k.asm["cubin"]: k.asm["ptx"] for k, _ in driver.launched}))
    again = tilewright.load_program(tmp_path / "p.twp")
    assert torch.equal(again(x), wanted) and not [r for r in caplog.records if r.name == "tilewright"]
    again.save(tmp_path / "q.twp")
    assert torch.equal(tilewright.load_program(tmp_path / "q.twp")(x), wanted)


def test_a_driver_that_does_not_take_the_code_says_so(without_triton):
    s = saved("a norm")
    without_triton(Cuda({}))
    why = f"does not take the machine code of {s.recipe.code.entry}: CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.raises(UnsupportedError, match=why):
        s.restored()


def test_without_a_driver_it_is_said():
    def missing(name):
        raise OSError(f"{name}: not there")

    cubin.driver.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cubin.ctypes, "CDLL", missing)
        with pytest.raises(UnsupportedError, match=r"there is no CUDA driver: libcuda\.so\.1: not there"):
            cubin.driver()


def changed(recipe: Launched, where: str, value: Any) -> bytes:
    """The recipe as JSON, with another value at a place such as `code.maps.0.swizzle`."""
    made = at = msgspec.json.decode(msgspec.json.encode(recipe))
    *path, last = (int(n) if n.isdigit() else n for n in where.split("."))
    for name in path:
        at = at[name]
    assert at[last] != value
    at[last] = value
    return msgspec.json.encode(made)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("code.entry", "a b"),
        ("code.grid.0", -1),
        ("code.grid.1", 1 << 16),
        ("code.threads", 100),
        ("code.shared_bytes", 1 << 30),
        ("code.maps.0.dtype", 13),
        ("code.maps.0.swizzle", 4),
        ("code.maps.0.element_bytes", 3),
        ("code.maps.0.box.0", 257),
        ("code.maps.0.shape.0", 0),
        ("code.maps.0.strides.0", -16),
        ("code.maps.0.offset_bytes", -2),
        ("code.numbers.0", 1 << 31),
        ("code.numbers.0", "1"),
        ("pointers.0.of", "memory"),
        ("pointers.0.number", -1),
        ("results.0.dtype", None),
        ("held", [[-1, "packed/0"]]),
        ("operands", [{"number": 3}]),
    ],
)  # fmt: skip
def test_a_number_that_none_can_be_is_refused_as_it_is_read(where, value):
    with pytest.raises(msgspec.ValidationError, match="at `"):
        msgspec.json.decode(changed(saved("tma, a number and pdl").recipe, where, value), type=Recipe)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        ("pointers.0.number", 9, "a saved launch does not fit"),
        ("pointers.2.number", 2, "a saved launch does not fit"),
        ("results.0.dtype", "f16", "a saved launch does not fit"),
        ("results.0.shape.0", 71, "a saved launch does not fit"),
        ("code.maps.0.box", [64], "a saved launch does not fit"),
        ("code.maps.0.strides", [64], "a saved launch does not fit"),
        ("held", [[1, "packed/0"]], "a saved launch does not fit"),
        ("code.maps", [], "takes 128 bytes as argument 0, and 8 are given"),
        ("code.numbers", [], r"takes 4 bytes as argument \d+, and 8 are given"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(where, value, why, without_triton):
    s = saved("tma, a number and pdl")
    without_triton(s.cuda())
    recipe = msgspec.json.decode(changed(s.recipe, where, value), type=Recipe)
    with pytest.raises(InputError, match=why):
        s.restored(recipe)


def test_calls_from_several_threads_have_arguments_of_their_own(without_triton, monkeypatch):
    s = saved("tma, a number and pdl")
    cuda = without_triton(s.cuda())
    inside, both = [], threading.Barrier(2, timeout=60)
    launch = cuda.cuLaunchKernelEx

    def together(config, function, arguments, extra):
        both.wait()
        inside.append(arguments)
        return launch(config, function, arguments, extra)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", together)
    run = s.restored()
    found = {}
    in_threads(2, lambda i: found.update({i: run(s.sources)}))
    assert len({ctypes.addressof(a) for a in inside}) == 2
    assert all(torch.equal(found[i][0], s.results[0]) for i in range(2))
