"""Products whose epilogue stores partial sums into other ranks' memory: ranks in one address space, launches in turns."""

import pytest
import torch
from between_ranks import found_wrong as some_order_is_wrong
from between_ranks import late, results, right, summed
from ptx import H200

from tilewright.compiler import optimise
from tilewright.dtype import BF16 as BFLOAT16
from tilewright.dtype import F8E4M3FN, F32
from tilewright.errors import UnsupportedError
from tilewright.ir.build import const, convert, input_, map_, reduce_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.mesh import Mesh, simulate, team
from tilewright.ir.ops import Gemm, LayerNorm, Place, Quantize, gemm
from tilewright.lowering.pieces import joined
from tilewright.rules.shard import localise
from tilewright.schedule.problem import problem_of

pytest.importorskip("triton")

from tilewright.candidates.triton.expressions import exchange
from tilewright.candidates.triton.gemm.kernel import TileConfig
from tilewright.candidates.triton.normalization import candidate as triton_norm
from tilewright.candidates.triton.push_rows.candidate import CANDIDATE
from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.candidates.triton.push_tiles.candidate import CANDIDATE as TILES
from tilewright.candidates.triton.runtime import module as modules
from tilewright.schedule.candidate import Precompiled, Schedule, plan_for, refusal


def first(problem, name="triton"):
    """The first point whose product is by this generator."""
    return next(s for s in plan_for(CANDIDATE, problem, H200).schedules() if s["by"].startswith(f"{name}, "))


BF16 = "bf16[5,96] @ bf16[32,96]^T -> bf16"
FP8 = "f8e4m3fn[6,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16"
W4 = "bf16[4,256] @ s4[64,256]^T group=64 -> bf16"


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("line", "ranks", "name", "how"),
    [
        (BF16, 2, "triton", {}),
        (BF16, 3, "triton", {"then": "add"}),
        ("f16[1,64] @ f16[16,64]^T -> f16", 4, "triton", {"then": ""}),
        ("bf16[7,64] @ bf16[24,64]^T -> f32", 2, "triton", {}),
        (FP8, 2, "triton", {}),
        (W4, 2, "hopper_w4", {}),
        (W4, 4, "hopper_w4", {"scatter": True}),
        ("bf16[6,96] @ bf16[32,96]^T -> bf16", 3, "triton", {"scatter": True}),
    ],
)
def test_sums_over_ranks_and_what_follows(line, ranks, name, how):
    """Rows that all ranks get or each its own, in the types of programs, several calls in turns drawn by lot."""
    p = summed(line, ranks, **how)
    right(plan_for(CANDIDATE, p, H200), ranks, first(p, name), calls=3, seed=len(line), early=True)


def test_all_ranks_get_the_same_bits():
    p = summed(BF16, 3, then="")
    found = results(plan_for(CANDIDATE, p, H200), 3, first(p), calls=2, seed=5)
    for call in range(2):
        assert all(torch.equal(found[0][call][1][0], found[r][call][1][0]) for r in (1, 2))


@pytest.mark.parametrize("seed", [0, 3])
def test_parts_of_k_and_several_blocks_meet_before_the_flag(seed):
    """The blocks that finish tiles are counted, not those that have a part of K."""
    p = summed("bf16[17,512] @ bf16[64,512]^T -> bf16", 2)
    point = Schedule.of_point(TileConfig(16, 16, 32, 4, 2, split_k=2))
    tail = plan_for(CANDIDATE, p, H200).tail.plan.schedules()[0]
    right(plan_for(CANDIDATE, p, H200), 2, joined(Schedule(), [("triton", point), ("triton_norm", tail)]), calls=2, seed=seed)


def test_a_compiled_program_has_one_step_behind_its_product():
    """Sum over ranks, residual, norm and codes by row are stores of the product, and one kernel does them."""
    rows, k, n = 5, 64, 32
    x, residual = input_("x", BFLOAT16, (rows, k)), input_("r", BFLOAT16, (rows, n))
    splits = (((), ("tp",)), (("tp",), ()))
    a, b = (Node(Place(s), v) for s, v in zip(splits, (x, const(torch.randn(k, n).bfloat16() / 8)), strict=True))
    total = map_("add", gemm(a, b, out_dtype=BFLOAT16), residual)
    y = convert(Node(LayerNorm(1, 1e-5, center=False), total, const(torch.ones(n).bfloat16())), F32)
    scale = map_("divide", reduce_("maximum", map_("abs", y), [1], keepdims=True), const(448.0, F32))
    outputs = total, Node(Quantize(F8E4M3FN), y, scale), scale
    graph = Graph("step", (x, residual), outputs, ("total", "codes", "scale"), mesh=Mesh.parse("tp=2"))
    (product,) = [n for n in optimise(localise(graph)).nodes() if isinstance(n.op, Gemm)]
    problem = problem_of(product)
    assert len(problem.outputs) == 3
    right(plan_for(CANDIDATE, problem, H200), 2, first(problem), calls=2, seed=4)


def planted(monkeypatch, name, old, new):
    made = getattr(exchange, name)

    def other(*given):
        text = made(*given)
        if old not in text:
            raise RuntimeError(f"{old} is not in {text}")  # which nobody takes for a fault that was found
        return text.replace(old, new)

    monkeypatch.setattr(exchange, name, other)


def found_wrong(calls, most=12, **how):
    """Tell whether some order of ranks shows that results are wrong, or that one waits for ever."""
    p = summed(BF16, 2, then="add")
    return some_order_is_wrong(plan_for(CANDIDATE, p, H200), 2, first(p), calls, most, **how)


def test_a_kernel_that_does_not_wait_is_found(monkeypatch):
    planted(monkeypatch, "_wait", "@w bra D; mov", "bra D; mov")
    assert found_wrong(calls=2)


def test_one_slot_for_all_calls_is_found(monkeypatch):
    """A rank that is ahead writes where one that is behind still reads."""
    monkeypatch.setattr(exchange.Exchange, "slot_of", lambda self, epoch, dtype: str(exchange.LINE * 8 // dtype.bits))
    assert found_wrong(calls=4, most=40)


def test_a_flag_set_by_the_first_block_is_found(monkeypatch):
    planted(monkeypatch, "_arrival", "setp.eq.u32 q, c, 1;", "setp.eq.u32 q, c, 0;")
    assert found_wrong(calls=2, turns=(1, 3))


def test_a_flag_that_is_never_set_is_found(monkeypatch):
    planted(monkeypatch, "_arrival", "@q st.relaxed.sys.global.b32 [$4], t;", "")
    assert found_wrong(calls=1, most=1)


def test_a_call_that_is_not_counted_is_found(monkeypatch):
    planted(monkeypatch, "_end", "add.s32 t, $1, 1;", "mov.b32 t, $1;")
    assert found_wrong(calls=3)


@pytest.mark.conformance
def test_what_keeps_to_the_protocol_passes_the_same_orders():
    assert not found_wrong(calls=3, most=3)


def test_a_rank_that_does_not_come_is_named_to_the_host(monkeypatch):
    """The wait ends by itself, and the host finds which rank it was. Behind it others end at once, and name nobody."""
    planted(monkeypatch, "_arrival", "@q st.relaxed.sys.global.b32 [$3], t;", "")
    limits, prepare = [], exchange.Exchange.prepare

    def prepared(self, memory):
        prepare(self, memory)
        limits.append(memory.buffers[memory.own][exchange.LIMIT : exchange.LIMIT + 8].view(torch.int64))

    monkeypatch.setattr(exchange.Exchange, "prepare", prepared)
    p = summed(BF16, 2, then="")
    results(plan_for(CANDIDATE, p, H200), 2, first(p), seed=1, limit_s=50e-6)
    assert late[-1][0] in (1, 2) and late[-1][1] == 0  # nobody's flag comes to the first rank
    assert [int(t) for t in limits] == [0, 50_000]
    results(plan_for(CANDIDATE, p, H200), 2, first(p), seed=1, limit_s=0)
    assert late[-1] == [0, 0]


@pytest.mark.parametrize(
    ("line", "ranks", "why"),
    [
        ("bf16[65,96] @ bf16[32,96]^T -> bf16", 2, "65 rows for 2 ranks: up to 64"),
        ("bf16[4,96] @ bf16[32,96]^T -> bf16", 17, "4 rows for 17 ranks"),
        ("s8[4,96] @ s8[32,96]^T -> s32", 2, "add of s32: sums of f32, bf16 or f16"),
    ],
)
def test_what_is_not_pushed_is_refused_with_a_sentence(line, ranks, why):
    assert why in refusal(CANDIDATE, summed(line, ranks, then=""), H200)


def test_ranks_that_are_not_there_exchange_nothing_on_the_host():
    member = VirtualRanks(Mesh.parse("tp=2"), "cpu").member(0)
    with pytest.raises(UnsupportedError, match="exchange nothing on the host"):
        member.exchange(torch.zeros(1), ("tp",), len)
    with pytest.raises(UnsupportedError, match="simulated ranks have no memory that others reach"):
        simulate(Mesh.parse("tp=2"), lambda r: team().symmetric(("tp",), 64))


@pytest.mark.parametrize("name", ["triton", "hopper_w4"])
def test_machine_code_has_flags_for_the_system_and_no_multicast(name):
    p = summed(W4 if name == "hopper_w4" else BF16, 4)
    plan = plan_for(CANDIDATE, p, H200)
    texts = []
    build = modules.build
    with pytest.MonkeyPatch.context() as m:
        for where in (modules, triton_norm):
            m.setattr(where, "build", lambda *a, **k: (texts.append(build(*a, **k)), texts[-1])[1])
        plan.build(first(p, name))
    ptx = [t.kernel.asm["ptx"] for t in texts]
    assert len(ptx) == 2
    assert ptx[0].count("st.relaxed.sys.global.b32") == 5 and "fence.acq_rel.sys" in ptx[0] and "atom.acq_rel.sys" in ptx[0]
    assert "ld.acquire.sys" in ptx[1]
    assert "griddepcontrol.launch_dependents" in ptx[0], "the kernel behind begins while sums are stored"
    ahead, _, behind = ptx[1].partition("ld.acquire.sys")
    before = ahead.partition("griddepcontrol.wait")[2]
    assert before.count("ld.global") > 2 and "griddepcontrol" not in before, "residual and epoch are read before the wait"
    assert "griddepcontrol.launch_dependents" in behind
    assert not any("multimem" in x for x in ptx)
    sass = modules.assembly(texts[0].kernel)
    assert "MEMBAR" in sass and ".SYS" in sass


@pytest.mark.parametrize(
    ("candidate", "line"), [(CANDIDATE, "bf16[9,96] @ bf16[40,96]^T -> bf16"), (TILES, "bf16[288,64] @ bf16[72,64]^T -> bf16")]
)
def test_all_machine_code_of_a_point_is_made_beforehand(candidate, line):
    """That of the kernels behind the product, too: `build` compiles nothing more."""
    plan = plan_for(candidate, summed(line, 2), H200)
    point = plan.schedules()[0]
    assert isinstance(plan, Precompiled)
    before = modules._machine_code.cache_info().misses
    plan.compile(point)
    made = modules._machine_code.cache_info().misses
    plan.build(point)
    assert before < made == modules._machine_code.cache_info().misses
