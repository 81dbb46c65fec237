"""Errors and bounds: the judge behind `verify`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright
from tilewright.dtype import BF16, F32, S8, S32
from tilewright.ir.build import convert, input_, map_, slice_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import LayerNorm, Quantize, Softmax, gemm
from tilewright.report.measure.compare import Gap, Tolerances, element_gap, exact_gap, rms_gap, tolerated_gap
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.verify import compare_step, verify_program

NAN, INF = math.nan, math.inf


def around(r: torch.Tensor, slack: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return r, r.double() - slack, r.double() + slack


def test_the_worst_element_is_the_one_that_uses_most_of_its_bound() -> None:
    r = torch.tensor([1.0, 2.0, 3.0])
    got = r + torch.tensor([0.0, 0.25, -0.5])
    gap = element_gap(got, r, r - torch.tensor([1.0, 0.5, 4.0]), r + 0.5)
    assert gap == Gap(0.25, 0.5) and gap.ratio == 0.5
    gap = element_gap(got, r, r - 0.125, r + 0.125)
    assert gap.error == 0.5 and gap.bound == 0.125 and gap.ratio == 4
    assert gap.why == "2 of 3 elements differ, most at [2]: 2.5 for 3"


def test_nothing_differs_where_infinities_and_nans_agree_or_nothing_is_known() -> None:
    r = torch.tensor([NAN, INF, -INF, 0.0])
    assert element_gap(r, *around(r, 0.0)) == Gap(0.0, 0.0)
    low = torch.tensor([NAN, 0.0, 0.0, NAN])
    assert element_gap(torch.tensor([1.0, INF, -INF, 7.0]), r, low, low).why is None
    empty = torch.empty(0, 3)
    assert element_gap(empty, *around(empty, 0.0)) == Gap(0.0, 0.0)


@pytest.mark.parametrize(("got", "wanted"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (-INF, INF)])
def test_a_number_in_place_of_none_is_wrong_and_so_is_the_reverse(got: float, wanted: float) -> None:
    r = torch.tensor([0.0, wanted])
    gap = element_gap(torch.tensor([0.0, got]), *around(r, 0.5))
    if math.isfinite(wanted):
        assert gap.error == INF and gap.why is not None
    assert rms_gap(torch.tensor([0.0, got]), r, 1.0).why == "1 of 2 elements are infinite or NaN on one side alone"


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.floats(0, 10), st.integers(0, 19))
def test_an_element_past_its_bound_is_found_wherever_it_is(values: list[float], slack: float, at: int) -> None:
    r = torch.tensor(values, dtype=torch.float64)
    got = r.clone()
    got[at % len(values)] += 2 * slack + 1
    assert element_gap(got, *around(r, slack)).why is not None
    assert element_gap(r, *around(r, slack)).why is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bool])
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    r = torch.tensor([0, 1, 1]).to(dtype)
    got = torch.tensor([0, 1, 0]).to(dtype)
    assert exact_gap(r, r) == Gap(0.0, 0.0)
    gap = exact_gap(got, r)
    assert gap.error == 1.0 and gap.why is not None and gap.why.startswith("1 of 3 elements differ, first at [2]: ")


def test_large_integers_are_not_compared_as_floats() -> None:
    r = torch.tensor([(1 << 62) + 1])
    assert exact_gap(r - 1, r).why == f"1 of 1 elements differ, first at [0]: {1 << 62} for {(1 << 62) + 1}"


def test_floats_that_are_only_moved_must_be_equal_and_nan_is() -> None:
    r = torch.tensor([NAN, 1.0])
    assert exact_gap(r, r.clone()).why is None
    assert exact_gap(torch.tensor([0.0, 1.0]), r).error == INF
    f8 = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert exact_gap(f8, f8.clone()).why is None


def test_root_mean_square() -> None:
    r = torch.tensor([3.0, 4.0])
    assert rms_gap(torch.tensor([3.0, 4.5]), r, 0.2) == Gap(0.1, 0.2)
    why = "the error's root mean square is 0.1 of the reference's, 0.05 allowed"
    assert rms_gap(torch.tensor([3.0, 4.5]), r, 0.05) == Gap(0.1, 0.05, why)
    assert rms_gap(torch.zeros(2), torch.zeros(2), 0.0) == Gap(0.0, 0.0)
    assert rms_gap(torch.ones(2), torch.zeros(2), 0.5).why is not None
    assert rms_gap(torch.empty(0), torch.empty(0), 0.0) == Gap(0.0, 0.0)


def test_tolerances_combine() -> None:
    r = torch.tensor([1.0, 100.0])
    got = torch.tensor([1.0, 101.0])
    assert tolerated_gap(got, r, Tolerances(rtol=0.02)).why is None
    assert tolerated_gap(got, r, Tolerances(atol=0.5)).why is not None
    assert tolerated_gap(got, r, Tolerances(rtol=0.006, atol=0.5)).why is None
    assert tolerated_gap(got, r, Tolerances(rtol=0.02, rms=1e-3)).why is not None
    assert tolerated_gap(got, r, Tolerances(rms=0.02)).why is None
    assert not Tolerances().given and Tolerances(rms=0.0).given and Tolerances(atol=0.0).elementwise


def compiled(*outputs: Node) -> tuple[tilewright.Executable, Graph]:
    graph = Graph(
        "g", tuple(n for n in Graph("", (), outputs, ()).nodes() if n.op.name == "input"), outputs, ("y",) * len(outputs)
    )
    return tilewright.compile(graph, budget_s=0), graph


def test_a_fusion_is_held_to_a_few_roundings() -> None:
    x = input_("x", BF16, (3, 8))
    program, graph = compiled(Node(Softmax(1), Node(LayerNorm(1, 1e-5), x)))
    (step,) = program.steps
    (feed,) = make_feeds(graph)
    assert compare_step(step, [feed.value]).ok
    run = step.run

    def wrong(by: float) -> object:
        class Step:
            name, part, decision = step.name, step.part, None

            def run(self, values: list[object]) -> list[object]:
                return [t + by for t in run(values)]

        return compare_step(Step(), [feed.value])  # type: ignore[arg-type]

    assert wrong(2**-12).ok  # a rounding of bf16 near 1
    row = wrong(1.0)
    assert not row.ok and row.why is not None and "24 of 24 elements differ" in row.why


def test_integers_a_fusion_makes_of_floats_may_round_the_other_way_by_one_code() -> None:
    x, s = input_("x", F32, (4, 4)), input_("s", F32, ())
    program, graph = compiled(Node(Quantize(S8), map_("sine", x), s))
    (step,) = program.steps
    values = [f.value for f in make_feeds(graph)]

    class Step:
        name, part, decision = step.name, step.part, None
        by = 0

        def run(self, given: list[object]) -> list[object]:
            return [(t.int() + self.by).to(torch.int8) for t in step.run(given)]

    shifted = Step()
    for shifted.by, ok in ((0, True), (1, True), (2, False)):
        assert compare_step(shifted, values).ok is ok  # type: ignore[arg-type]


def test_a_step_that_raises_is_a_step_that_differs() -> None:
    a = input_("a", F32, (2, 2))
    program, graph = compiled(gemm(a, a))
    (step,) = program.steps

    class Step:
        name, part, decision = step.name, step.part, step.decision

        def run(self, values: list[object]) -> list[object]:
            raise RuntimeError("no such kernel\nand more")

    row = compare_step(Step(), [f.value for f in make_feeds(graph)])  # type: ignore[arg-type]
    assert not row.ok and row.why == "failed: no such kernel"


def test_a_product_of_the_wrong_shape_or_type_is_wrong() -> None:
    a = input_("a", F32, (2, 3))
    b = input_("b", F32, (3, 4))
    program, graph = compiled(gemm(a, b))
    (step,) = program.steps

    class Step:
        name, part, decision = step.name, step.part, step.decision
        result = torch.zeros(2, 3)

        def run(self, values: list[object]) -> list[object]:
            return [self.result]

    row = compare_step(Step(), [f.value for f in make_feeds(graph)])  # type: ignore[arg-type]
    assert not row.ok and row.why == "the result is torch.float32[2, 3], f32[2,4] wanted"


def test_stores_that_nothing_reads_are_not_judged() -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 6))
    product = gemm(x, w)
    program, graph = compiled(map_("tanh", slice_(product, 1, 0, 2)), map_("tanh", product))
    assert verify_program(program, "g", make_feeds(graph)).verified


def test_integer_programs_are_exact_end_to_end_and_float_ones_are_not_held_to_it() -> None:
    a, b = input_("a", S8, (5, 7)), input_("b", S8, (7, 3))
    program, graph = compiled(convert(gemm(a, b), S8))
    report = verify_program(program, "g", make_feeds(graph))
    assert report.verified and report.end_to_end[0].bound == 0
    x = input_("x", BF16, (5, 7))
    y = input_("y", BF16, (7, 3))
    program, graph = compiled(convert(gemm(x, y), BF16))
    report = verify_program(program, "g", make_feeds(graph))
    assert report.verified and report.end_to_end[0].bound == pytest.approx(16 * BF16.epsilon)
    z = input_("z", S32, (3,))
    program, graph = compiled(map_("add", z, z))
    assert verify_program(program, "g", make_feeds(graph)).end_to_end[0].bound == 0
