"""The ring of a kernel that is a source file, and how such a kernel is compiled with generated functions (no GPU at hand)."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import ring_kernel
from ptx import How, run
from ptx.bulk import TensorMap
from ring_kernel import Summed

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper._pipeline import Pipeline, pipeline
from tilewright.candidates.triton.hopper.gemm.tma import descriptor
from tilewright.candidates.triton.runtime.module import Arch, build, instance, module

SUMMED = Summed(rows=16, columns=32, steps=7, stages=3)


def written(config=SUMMED, more=0.25):
    body = Text("gl")
    body.do("m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))[:, None]")
    body.do("n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))[None, :]")
    factor = body.number("factor", 1.5)
    at = "o0 + (group * acc.shape[0] + m) * acc.shape[1] + n"
    body.do(f"gl.store({at}, acc * {factor} + gl.load(p2 + n) + group + {more})")
    functions = {"epilogue": (("acc", "group: gl.constexpr", "layout: gl.constexpr", "side"), body)}
    return instance("ring_kernel.summed", config, ["a_desc", "b_desc"], ["p2", "o0"], functions, body.numbers)


@pytest.mark.parametrize("how", [{}, {"late": True}, {"late": True, "seed": 1}], ids=str)
def test_stages_go_round_between_a_producer_and_two_consumers(how):
    rows, columns, steps = SUMMED.rows, SUMMED.columns, SUMMED.steps
    box = descriptor("fp32", [rows, columns])
    pointers = {"a_desc": box, "b_desc": box, "p2": "*fp32", "o0": "*fp32"}
    built = build(written(), pointers, Arch("cuda", 90, 32), num_warps=4)
    a, b = torch.randn(2, steps * rows, columns)
    bias, out = torch.randn(columns), torch.zeros(2, rows, columns)
    maps = [TensorMap(t.data_ptr(), 128, 4, (rows, columns), tuple(t.shape), (columns, 1)) for t in (a, b)]
    given = [x for m in maps for x in (m, *m.shape, *m.strides)]
    kernel = built.kernel
    run(kernel.asm["ptx"], (1,), [*given, bias.data_ptr(), out.data_ptr(), *built.numbers], kernel.metadata.shared, How(**how))
    wanted = (a + b).view(steps, rows, columns).sum(0) * 1.5 + bias + 0.25
    assert torch.allclose(out, torch.stack([wanted, wanted + 1]), atol=1e-5)


def test_a_kernel_is_known_by_all_that_goes_into_it(monkeypatch):
    def key(text):
        return module(text).kernel.cache_key

    first = written().text
    found = {key(first), key(written(replace(SUMMED, stages=2)).text), key(written(more=0.5).text)}
    monkeypatch.setattr(Pipeline.acquire, "hash", "of another source")
    for caller in (pipeline, ring_kernel.summed):
        monkeypatch.setattr(caller, "hash", None)
    assert len(found | {key(first + "# once more")}) == 4
