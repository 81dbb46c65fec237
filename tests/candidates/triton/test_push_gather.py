"""Rows that a kernel pushes to other ranks: ranks in one address space, launches in turns."""

from dataclasses import replace

import pytest
from between_ranks import between, late, results, right
from between_ranks import found_wrong as some_order_is_wrong
from ptx import H200

from tilewright.candidates import sequential
from tilewright.dtype import BF16, F32, S4, S8
from tilewright.ir.build import map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import AllGather, Param
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Schedule, concerns, discover, plan_for, refusal
from tilewright.schedule.problem import fusion_of

pytest.importorskip("triton")

from tilewright.candidates.triton.expressions import exchange
from tilewright.candidates.triton.runtime import gather as gathers
from tilewright.candidates.triton.runtime.gather import Gather
from tilewright.candidates.triton.runtime.module import assembly


@pytest.fixture
def few(monkeypatch):
    """Two programs of a warp each, and blocks of 512 bytes."""
    for name, value in (("MOST_WARPS", 1), ("FLAGS", 2), ("MOST_VECTORS", 1)):
        monkeypatch.setattr(gathers, name, value)


def pushed(problem, ranks, product="triton"):
    """A plan, how many ranks, and the point at which rows are pushed, with the first point of each piece."""
    plan, chosen = sequential.plan(problem, H200), []
    for piece in plan.pieces():
        able = {c.name: c for c in discover(kind="cuda") if concerns(c, piece, H200) and not refusal(c, piece, H200)}
        name = next(n for n in (product, "triton_norm") if n in able)
        chosen.append((name, next(iter(plan_for(able[name], piece, H200).schedules()))))
    return plan, ranks, plan.of_pieces(Schedule.of(reduce="library", gather="push"), chosen)


def whole(x, ranks, axis=0):
    return Node(AllGather(("tp",), (ranks,), axis=axis), x)


def alone(*types, ranks, of=lambda x: x):
    """A problem that gathers tensors, or what is computed of them."""
    given = [Node(Param(i, t)) for i, t in enumerate(types)]
    return fusion_of(given, [whole(of(x), ranks) for x in given])[0]


def squared(x):
    return map_("multiply", x, x)


ROWS = TensorType(BF16, (4, 1024))  # of which each of the two programs copies eight blocks
PLAIN = alone(ROWS, ranks=2)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("line", "ranks", "product"),
    [
        (
            "f8e4m3fn[2,128] scale=channel @ f8e4m3fn[16,128]^T scale=channel -> bf16",
            2,
            "triton",
        ),  # 4 bytes of scales
        ("bf16[6,64] @ bf16[32,64]^T -> bf16", 2, "hopper"),
        ("bf16[4,64] @ bf16[16,64]^T -> bf16", 4, "triton"),
        ("bf16[3,256] @ s4[64,256]^T group=64 -> bf16", 3, "hopper_w4"),
    ],
)
def test_a_product_reads_the_rows_of_all_ranks(line, ranks, product):
    """Several calls in turns drawn by lot; codes and their scales travel in one launch, and products may begin with it."""
    plan, *_ = given = pushed(between(line, ranks, "gather"), ranks, product)
    assert len(plan._turns()) == 2
    right(*given, calls=2, seed=len(line), early=True)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("dtype", "shape", "ranks"),
    [
        (BF16, (4, 256), 2),
        (F32, (1,), 4),
        (BF16, (1, 3), 3),  # 6 bytes of a rank
        (S8, (5, 7), 2),
        (S4, (3, 8), 2),
        (F32, (2, 33), 3),  # whole words, no whole vectors
    ],
)
def test_any_bytes_come_in_the_order_of_ranks(dtype, shape, ranks, few):
    right(*pushed(alone(TensorType(dtype, shape), ranks=ranks), ranks), calls=2, seed=1)


def test_gathers_around_fusions_go_together_until_one_is_read():
    """Two are one launch where the first is not read before the second one is computed."""
    types = TensorType(BF16, (2, 64)), TensorType(F32, (2,))
    wholes = [whole(squared(x), 2) for x in (Node(Param(i, t)) for i, t in enumerate(types))]
    last = whole(map_("add", wholes[0], wholes[0]), 2)
    problem = fusion_of([Node(Param(i, t)) for i, t in enumerate(types)], [*wholes, last])[0]
    plan, *_ = given = pushed(problem, 2)
    said = [len(gather.types) if gather else 0 for _, gather in plan._turns()]
    assert said == [0, 0, 2, 0, 1]
    right(*given, seed=2)


def test_more_than_travels_in_one_launch_travels_in_two(monkeypatch):
    problem = alone(TensorType(F32, (2, 8)), TensorType(F32, (1, 8)), ranks=2)
    monkeypatch.setattr(sequential, "MOST_PUSHED", 64)
    assert [len(gather.types) for _, gather in sequential.plan(problem, H200)._turns()] == [1, 1]


def test_a_graph_that_is_replayed_takes_both_slots(few):
    """Three calls, so that each takes another slot when they are made again."""
    right(*pushed(PLAIN, 2), calls=3, seed=3, replays=3)


def test_numbers_of_calls_wrap(monkeypatch, few):
    counted(monkeypatch, -3)
    right(*pushed(PLAIN, 2), calls=4, seed=3)


def counted(monkeypatch, calls):
    """So many calls were counted before."""
    prepare = exchange.Exchange.prepare

    def prepared(self, memory):
        prepare(self, memory)
        self.words(memory)[exchange.EPOCH // 4].fill_(calls)

    monkeypatch.setattr(exchange.Exchange, "prepare", prepared)


def planted(monkeypatch, name, old, new):
    made = getattr(exchange, name)

    def other(*given):
        text = made(*given)
        if old not in text:
            raise RuntimeError(f"{old} is not in {text}")  # which nobody takes for a fault that was found
        return text.replace(old, new)

    monkeypatch.setattr(exchange, name, other)


def rewritten(monkeypatch, change):
    """Kernels whose lines are changed."""
    text = Gather.text

    def other(self):
        source = text(self)
        lines = source.text.splitlines()
        changed = change(lines)
        if changed == lines:
            raise RuntimeError("nothing is changed")  # which nobody takes for a fault that was found
        return replace(source, text="\n".join(changed))

    monkeypatch.setattr(Gather, "text", other)


def found_wrong(calls=2, most=12, **how):
    """Tell whether some order of ranks shows that results are wrong, or that one waits for ever."""
    return some_order_is_wrong(*pushed(PLAIN, 2), calls, most, turns=(1, 3), **how)


def test_a_kernel_that_does_not_wait_is_found(monkeypatch, few):
    planted(monkeypatch, "_wait", "@w bra D; mov", "bra D; mov")
    assert found_wrong()


def test_a_flag_set_before_its_rows_is_found(monkeypatch, few):
    def early(lines):
        (at,) = (i for i, line in enumerate(lines) if "fence.acq_rel.sys" in line)
        first = next(i for i, line in enumerate(lines) if "epoch = " in line)
        return [*lines[: first + 1], lines[at], *lines[first + 1 : at], *lines[at + 1 :]]

    rewritten(monkeypatch, early)
    assert found_wrong()


@pytest.mark.conformance
def test_a_wait_for_another_program_is_found(monkeypatch, few):
    old = f"({exchange.OWN} + ({exchange.LINE // 4} + program))"
    rewritten(monkeypatch, lambda lines: [line.replace(old, old.replace("program", "0")) for line in lines])
    assert found_wrong()


def test_rows_read_before_the_kernel_ahead_has_ended_are_found(monkeypatch, few):
    """A kernel may let the gather begin at once."""
    problem = alone(TensorType(BF16, (2, 256)), ranks=2, of=squared)
    right(*pushed(problem, 2), calls=2, seed=1, early=True)
    rewritten(monkeypatch, lambda lines: [line for line in lines if "gdc_wait()" not in line])
    assert some_order_is_wrong(*pushed(problem, 2), 2, early=True)


def test_one_slot_for_all_calls_is_found(monkeypatch, few):
    """A rank that is ahead writes where one that is behind still reads."""
    monkeypatch.setattr(exchange.Exchange, "slot_of", lambda self, epoch, dtype: str(exchange.LINE * 8 // dtype.bits))
    assert found_wrong(calls=4, most=40)


def test_a_call_that_is_not_counted_is_found(monkeypatch, few):
    planted(monkeypatch, "_end", "add.s32 t, $1, 1;", "mov.b32 t, $1;")
    assert found_wrong(calls=3)


def test_a_flag_of_long_ago_is_none(monkeypatch, few):
    """A flag that is 2^31 calls old would be ahead by a difference with a sign."""
    counted(monkeypatch, -(1 << 31) + 5)
    right(*pushed(PLAIN, 2), calls=2, seed=3)
    planted(monkeypatch, "_wait", "setp.lt.u32 w, f, 2;", "setp.ge.s32 w, f, 0;")
    assert found_wrong()


@pytest.mark.conformance
def test_what_keeps_to_the_protocol_passes_the_same_orders(few):
    assert not found_wrong(calls=4, most=6)


def test_a_rank_that_does_not_come_is_named_to_the_host(monkeypatch, few):
    """The wait ends by itself, and the host finds which rank it was."""
    planted(monkeypatch, "_flags", "@q st.relaxed.sys.global.b32 [$3], t;", "")
    results(*pushed(PLAIN, 2), seed=1, limit_s=50e-6)
    assert late[-1][0] == 0 and late[-1][1] in (1, 2)  # nobody's flag comes to the second rank


def test_problems_that_share_memory_take_turns_in_it(few):
    """Two gathers of one problem, of one program and of two: flags of the second one are behind the first one's."""
    first, second = TensorType(F32, (1,)), TensorType(BF16, (4, 256))
    given = [Node(Param(i, t)) for i, t in enumerate((first, second))]
    roots = [whole(map_("add", whole(given[0], 2), whole(given[0], 2)), 2), whole(given[1], 2)]
    plan, *_ = given = pushed(fusion_of(given, roots)[0], 2)
    memory = {gather.exchange for _, gather in plan._turns() if gather}
    assert len(memory) == 1 and [g.programs for _, g in plan._turns() if g] == [1, 2]
    right(*given, calls=2, seed=4)


def test_rows_are_pushed_between_gpus_alone():
    def points(problem, target=H200):
        return [str(s) for s in sequential.plan(problem, target).schedules()]

    assert points(PLAIN) == ["reduce=library gather=library", "reduce=library gather=push"]
    scattered = between("bf16[4,64] @ bf16[16,64]^T -> bf16", 2, "scatter")
    assert all("gather" not in point for point in points(scattered))
    amd = replace(H200, features=frozenset({"gfx942"}))
    large = TensorType(BF16, (2, 1 << 20)), TensorType(BF16, (2, (1 << 20) + 1))
    none = [
        (PLAIN, amd),
        (alone(ROWS, ranks=1), H200),
        (alone(ROWS, ranks=17), H200),
        (alone(TensorType(BF16, (0, 8)), ranks=2), H200),
        (alone(large[1], ranks=2), H200),
    ]
    columns = Node(Param(0, ROWS))
    none.append((fusion_of([columns], [whole(columns, 2, axis=1)])[0], H200))
    assert all(points(problem, target)[0] == "reduce=library" for problem, target in none)
    assert len(points(alone(large[0], ranks=2))) == 2


def test_machine_code_stores_vectors_and_has_flags_for_the_system():
    gather = Gather((TensorType(BF16, (16, 8192)),), 4, H200)
    kernel = gather.build().kernel
    ptx = kernel.asm["ptx"]
    assert ptx.count("st.global.v4.b32") == 4 + 1 + 4 and ptx.count("ld.global.v4.b32") == 1 + 4
    assert ptx.count("st.relaxed.sys.global.b32") == 5 and "fence.acq_rel.sys" in ptx and "ld.acquire.sys" in ptx
    assert -1 < ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), "nothing is read before the kernel ahead has ended"
    assert "multimem" not in ptx and gather.programs <= H200.cores
    older = replace(gather, target=replace(H200, features=frozenset({"cuda", "sm_80"}))).build().kernel
    assert "griddepcontrol" not in older.asm["ptx"] and not older.metadata.launch_pdl
    sass = assembly(kernel)
    assert "MEMBAR" in sass and ".SYS" in sass
