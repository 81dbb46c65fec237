"""Generated GPU kernels for nests, compiled with no GPU at hand: for every architecture, without spills, in wide accesses."""

import re
from dataclasses import replace

import pytest
import torch
from fusions import by_row, norm, problem_of
from rotated import heads, of_queries_and_keys, turned_in_pairs

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S8, S64
from tilewright.hardware.detect import chips
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, input_, map_, reduce_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Quantize, Softmax, gemm
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of as problem_of_node

pytest.importorskip("triton")

from tilewright.candidates.triton.normalization import candidate as rows
from tilewright.candidates.triton.runtime import module as modules
from tilewright.candidates.triton.runtime.module import Arch, assembly, needs
from tilewright.schedule.candidate import Unsupported, plan_for, refusal

ARCHES = [
    Arch("cuda", 80, 32),
    Arch("cuda", 89, 32),
    Arch("cuda", 90, 32),
    Arch("cuda", 100, 32),
    Arch("cuda", 120, 32),
    Arch("hip", "gfx942", 64),
    Arch("hip", "gfx950", 64),
]


def gpu(feature="sm_90", cores=132):
    chip = next(c for c in chips() if feature in c.requires and c.kind == "cuda")
    return Target("a GPU", chip, "cuda", cores, features=frozenset({"cuda", feature}))


def bert_norm(dtype=F16):
    """Norm of a sum, and its code for the next product."""
    x, residual = (input_(name, dtype, (24576, 768)) for name in "xr")
    scale, bias, step = input_("s", dtype, (768,)), input_("b", dtype, (768,)), input_("q", F32, ())
    y = norm(map_("add", x, residual), scale, bias)
    return problem_of(y, Node(Quantize(F8E4M3FN), y, step))


def norm_and_code():
    x, scale, bias = input_("x", F16, (24576, 768)), input_("s", F16, (768,)), input_("b", F16, (768,))
    y = norm(x, scale, bias)
    return problem_of(y, Node(Quantize(F8E4M3FN), y, input_("q", F32, ())))


def attention_softmax():
    return problem_of(Node(Softmax(3), input_("x", BF16, (4, 12, 384, 384))))


def dynamic():
    """Llama's activations, quantised by a scale of each row's own."""
    y = norm(input_("x", BF16, (2048, 4096)), input_("s", BF16, (4096,)), center=False)
    return problem_of(*by_row(convert(y, F32), S8))


def embedding():
    ids, table, place = input_("i", S64, (64, 384)), input_("t", F16, (28996, 768)), input_("p", F16, (384, 768))
    return problem_of(norm(map_("add", Node(Gather(0), table, ids), place)))


USUAL = [bert_norm, attention_softmax, dynamic, embedding]


def built(problem, target, arch=None):
    plan = plan_for(rows.CANDIDATE, problem, target)
    schedule = next(iter(plan.schedules()))
    elsewhere = replace(plan, arch=arch or plan.arch)
    return elsewhere.machine_code(elsewhere.tiles(schedule), schedule["num_warps"]).kernel


@pytest.mark.thin(3)
@pytest.mark.parametrize("arch", ARCHES, ids=lambda a: str(a.name))
@pytest.mark.parametrize("make", USUAL)
def test_usual_nests_compile_without_spills(make, arch):
    found = needs(built(make(), gpu(), arch))
    assert found.spills == 0 and 0 < found.registers <= 128
    assert found.shared_bytes <= 16 << 10  # reductions across warps, and a second arrangement for the narrower result


def test_memory_is_read_and_written_as_wide_as_it_can_be():
    code = assembly(built(bert_norm(), gpu()))
    assert set(re.findall(r"LDG\.E[.\w]*", code)) == {"LDG.E.128", "LDG.E"}, "one number, the scale, and 16 bytes a thread"
    assert "STG.E.64" in code or "STG.E.128" in code
    assert "LDL" not in code and "STL" not in code


def test_a_row_of_768_takes_a_warp_and_no_shared_memory():
    """Three times 256 columns: nothing is masked, and lanes alone exchange sums."""
    kernel = built(norm_and_code(), gpu())
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][.\w]*)", assembly(kernel), re.MULTILINE)
    assert needs(kernel).shared_bytes == 0 and not any(line.startswith(("BAR", "LDS", "STS")) for line in lines)
    assert sum(line.startswith("LDG.E.128") for line in lines) == 9, "columns, scale and bias"
    assert sum(line.startswith("SHFL") for line in lines) == 10, "two sums of 32 lanes"
    assert len(lines) <= 28 * 24, "rows in one piece of 1024 columns took 53 an element"
    assert needs(kernel).registers <= 64, "32 warps of an SM load while others compute"


@pytest.mark.parametrize("arch", [ARCHES[0], ARCHES[2], ARCHES[5]], ids=lambda a: str(a.name))
def test_queries_and_keys_are_turned_in_one_kernel_of_wide_accesses(arch):
    """The sizes are Llama 3 8B's: a thread reads 8 elements of each half, of the cosines and the sines, and writes both."""
    problem = problem_of(*of_queries_and_keys(batch=1, length=2048, head=128))
    kernel = built(problem, gpu(), arch)
    assert needs(kernel).spills == 0 and needs(kernel).shared_bytes == 0 and needs(kernel).registers <= 64
    if arch.backend == "cuda":
        code = assembly(kernel)
        accesses = re.findall(r"(?:LDG|STG)\.E[.\w]*", code)
        assert (accesses.count("LDG.E.128"), accesses.count("STG.E.128"), len(accesses)) == (12, 4, 16), "of both nests"


def test_pairs_of_neighbours_are_read_and_written_whole():
    """Every other element is what either half of the results needs: 48 loads of 2 bytes, were they read so."""
    code = assembly(built(problem_of(turned_in_pairs(*heads(BF16, 1, 2048, 32, 128))), gpu()))
    assert set(re.findall(r"(?:LDG|STG)\.E[.\w]*", code)) == {"LDG.E.128", "STG.E.128"}
    assert not re.search(r"\b(?:LDS|STS|SHFL)\b", code), "no thread needs what another read"


def test_a_norm_may_be_launched_before_the_kernel_ahead_has_ended():
    kernel, older = built(norm_and_code(), gpu()), built(norm_and_code(), gpu(), Arch("cuda", 80, 32))
    assert kernel.metadata.launch_pdl and not older.metadata.launch_pdl
    ptx = kernel.asm["ptx"]
    assert -1 < ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), "nothing is read before that one has written"
    assert "griddepcontrol" not in older.asm["ptx"]


def test_an_index_out_of_range_ends_the_program():
    assert "__assertfail" in built(embedding(), gpu()).asm["ptx"]
    assert "__assertfail" not in built(bert_norm(), gpu()).asm["ptx"]


def test_points_are_legal_and_ranked():
    for make in USUAL:
        problem = make()
        plan = plan_for(rows.CANDIDATE, problem, gpu())
        points = list(plan.schedules())
        assert len(points) == len(set(points)) == rows.POINTS
        (nest,) = plan.nests
        for p in points:
            (tiles,) = plan.tiles(p)
            assert tiles.chunks * p["tile_n"] >= nest.columns > (tiles.chunks - 1) * p["tile_n"]
            assert p["tile_m"] * p["tile_n"] == 8 * 32 * p["num_warps"], "16 bytes of f16 or bf16 a thread"
            assert tiles.grid * p["tile_m"] >= nest.rows
        (held,) = plan.tiles(points[0])
        assert held.chunks * held.tile_n == nest.columns, "no lane without a column"


def test_few_rows_are_shared_out_among_many_programs():
    x, scale = input_("x", F16, (64, 50)), input_("s", F16, (50,))
    points = list(plan_for(rows.CANDIDATE, problem_of(norm(x, scale, center=False)), gpu()).schedules())
    assert points and len(points) == len(set(points)) and {p["tile_n"] for p in points} == {64}
    assert points[0] == min(points, key=lambda p: p["tile_m"])


@pytest.mark.parametrize(
    ("problem", "target", "why"),
    [
        (bert_norm(), replace(gpu(), features=frozenset({"cuda", "sm_70"})), "Triton does not compile for a GPU"),
        (
            problem_of(Node(Softmax(1), input_("x", F32, (4, 40000)))),
            gpu(),
            "a row of 40,000 columns does not fit into registers",
        ),
        (
            problem_of(reduce_("multiply", input_("x", F32, (4, 40)), (1,))),
            gpu(),
            "reducing f32 by multiply has no vector form",
        ),
    ],
)
def test_refusals(problem, target, why):
    assert refusal(rows.CANDIDATE, problem, target) == why


def test_functions_in_f64_and_64_bit_integers_compile():
    x, a, b = input_("x", F32, (8, 100)), input_("a", S64, (8, 100)), input_("b", S64, (100,))
    floats = [map_(fn, x) for fn in ("log_plus_one", "exponential_minus_one", "tan", "atanh", "cbrt", "asin", "sinh")]
    floats += [map_(fn, x, input_("y", F32, (100,))) for fn in ("power", "remainder", "atan2")]
    integers = [map_(fn, a, b) for fn in ("divide", "modulo", "power", "shift_right_logical")]
    for problem in (problem_of(*floats), problem_of(*integers, reduce_("and", a, (1,)), reduce_("multiply", a, (1,)))):
        schedule = next(iter(plan_for(rows.CANDIDATE, problem, gpu()).schedules()))
        plan_for(rows.CANDIDATE, problem, gpu()).compile(schedule)


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(modules, "installed", lambda: False)
    with pytest.raises(Unsupported, match=re.escape(modules.INSTALL)):
        rows.CANDIDATE.plan(bert_norm(), gpu())
    assert modules.INSTALL == "Triton is not installed: pip install tilewright[gpu]"


def test_counters_are_one_launch():
    from ptx import H200, emulate

    problem = problem_of(*(map_("add", input_(f"at{i}", S64, (1,) if i % 2 else ()), const(i, S64)) for i in range(70)))
    (schedule, *_) = plan_for(rows.CANDIDATE, problem, H200).schedules()
    sources = [torch.randint(-9, 1 << 40, t.shape) for t in problem.types]
    results = emulate(rows.CANDIDATE, problem, schedule, sources)
    assert check(problem, expect(problem, sources), results) is None


def test_products_are_no_rows():
    x = input_("x", F32, (4, 4))
    assert problem_of_node(gemm(x, x)).kind not in rows.CANDIDATE.kinds
    assert refusal(rows.CANDIDATE, problem_of(map_("add", x, const(1.0, F32))), gpu()) is None
