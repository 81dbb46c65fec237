"""Two reports compared: what came and went, who does it, how long it takes; and files that are no reports."""

from __future__ import annotations

import json
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tilewright.report.explain import difference
from tilewright.report.schema import Difference, Explain, Finding, Input, Made, Peer, Perf, Quantized, Rejected, Step
from tilewright.report.text.difference_table import print_difference

LLVM = "instruction=vfmadd231ps zmm mr=9 nr=48"


def step(name: str, problem: str, us: float, by: str = "llvm", *, how: str = LLVM, kind: str = "gemm", **others: str) -> Step:
    rejected = [Rejected(n, why, "slower") for n, why in others.items()]
    return Step(name, kind, problem, by, how, us, 10, 10, 1.0, 1.0 / us, rejected)


def report(*steps: Step, us: float | None = None, **how: Any) -> Perf:
    total = sum(s.time_us for s in steps) if us is None else us
    given_ = {"program": "m.onnx", "target": "a machine", "verified": True, "unfused": [], "fallback": [], "inputs": []}
    return Perf(**{**given_, "total_us": total, "steps": list(steps), **how})


def compared(before: Perf, after: Perf) -> Difference:
    return difference.compare(before, after, ("a.json", "b.json"))


def layers(count: int, us: float = 100.0, **how: Any) -> list[Step]:
    """Two products and a norm for each layer; factors differ from layer to layer."""
    found: list[Step] = []
    for i in range(count):
        found += [
            step(f"layer.{i}.up", f"s8[8,16] @ s8[16,32] * 0.0{i + 1}:f32, gelu", us, **how),
            step(f"layer.{i}.down", f"s8[8,32] @ s8[32,16] * 0.5{i + 1}:f32", us / 2, **how),
            step(f"layer.{i}.norm", "layer_norm -> f32[8,16]", us / 10, "llvm_norm", how="lanes=16", kind="norm"),
        ]
    return found


def shown(d: Difference) -> str:
    out = Console(file=StringIO(), width=200)
    print_difference(out, d)
    return " ".join(cast("StringIO", out.file).getvalue().split())


def kinds(d: Difference) -> list[tuple[str, int, float | None]]:
    return [(a.what, a.count, a.effect_us) for a in d.altered]


def test_a_report_and_itself_are_the_same() -> None:
    d = compared(report(*layers(12)), report(*layers(12)))
    assert (d.altered, d.settings, d.findings, d.against, d.same, d.ratio) == ([], [], [], [], 36, 1.0)


def test_layers_that_change_alike_are_one_change_and_the_largest_effect_comes_first() -> None:
    after = layers(12)
    for i, s in enumerate(after):
        if s.name.endswith("down"):
            after[i] = step(s.name, s.problem, 20.0, "onednn", how="default", llvm="slower: 50.0 µs, 2.50 times the winner")
        if s.name.endswith("norm"):
            after[i] = msgspec.structs.replace(s, time_us=15.0)
    d = compared(report(*layers(12)), report(*after))
    assert kinds(d) == [("kernel", 12, -360.0), ("time", 12, 60.0)] and d.same == 12
    kernel = d.altered[0]
    assert [(s.name, s.problem, s.candidate) for s in (*kernel.before, *kernel.after)] == [
        ("layer.0-11.down", "s8[8,32] @ s8[32,16] * c", "llvm"),
        ("layer.0-11.down", "s8[8,32] @ s8[32,16] * c", "onednn"),
    ]
    assert kernel.why == ["after, llvm: slower: 50.0 µs, 2.50 times the winner"]
    assert (kernel.before_us, kernel.after_us, kernel.before_limit_us) == (600.0, 240.0, 12.0)


def test_settings_that_differ_are_named_and_a_value_may_have_spaces() -> None:
    d = compared(report(*layers(2)), report(*layers(2, us=90.0, how="instruction=vpdpbusd zmm mr=9 nr=32 kc=64")))
    assert [(a.what, a.count) for a in d.altered] == [("schedule", 2), ("schedule", 2), ("time", 2)]
    assert d.altered[0].why == ["instruction vfmadd231ps zmm -> vpdpbusd zmm, nr 48 -> 32, kc none -> 64"]
    named = compared(report(step("a", "p", 5.0, how="default")), report(step("a", "p", 5.0, how="other")))
    assert named.altered[0].why == ["default -> other"]


@pytest.mark.parametrize(
    ("us", "noise", "changed"), [(104.0, "", False), (106.0, "", True), (120.0, "busy", False), (140.0, "busy", True)]
)
def test_times_that_chance_may_have_made_are_the_same(us: float, noise: str, changed: bool) -> None:
    d = compared(report(step("a", "p", 100.0), noise=noise), report(step("a", "p", us)))
    assert bool(d.altered) == changed and d.same == (not changed)


@pytest.mark.parametrize(
    ("spread", "noise", "covered"),
    [
        ((None, None), "", ""),
        (
            (95.0, 112.0),
            "",
            "no difference: half of the calls before took 95.0 to 112.0 µs, half of those after 109.0 to 111.0",
        ),
        ((99.0, 101.0), "", ""),
        ((99.0, 101.0), "busy", "no difference: on a busy machine two runs of one program may be 25% apart"),
    ],
)
def test_a_time_that_the_spread_of_both_runs_covers_is_no_difference(
    spread: tuple[float | None, float | None], noise: str, covered: str
) -> None:
    low, high = spread
    before = report(step("a", "p", 1.0), us=100.0, total_low_us=low, total_high_us=high, noise=noise)
    after = report(step("a", "p", 1.0), us=110.0, total_low_us=low and 109.0, total_high_us=low and 111.0)
    for one, other in ((before, after), (after, before)):
        d = compared(one, other)
        assert d.covered[:40] == covered[:40] and d.ratio == pytest.approx(other.total_us / one.total_us, abs=1e-4)
    d = compared(before, after)
    assert d.covered == covered
    assert covered in shown(d) and ("1.100 times as long" in shown(d)) == (not covered)
    assert d.altered[0].what == "outside" and d.altered[0].covered == (high == 112.0)


def test_runs_of_one_program_that_are_three_percent_apart_are_no_difference() -> None:
    d = compared(report(step("a", "p", 1.0), us=100.0), report(step("a", "p", 1.0), us=102.0))
    assert d.covered == "no difference: two runs of one program may be 3% apart" and "times as long" not in shown(d)


def test_a_steps_time_that_its_spread_covers_is_as_before_and_a_choice_is_said_to_be_no_faster() -> None:
    wide = msgspec.structs.replace(step("a", "p", 100.0), low_us=90.0, high_us=125.0)
    after = msgspec.structs.replace(step("a", "p", 120.0), low_us=118.0, high_us=130.0)
    assert compared(report(wide), report(after)).same == 1
    apart = msgspec.structs.replace(after, low_us=126.0)
    assert kinds(compared(report(wide), report(apart))) == [("time", 1, 20.0)]
    other = msgspec.structs.replace(after, candidate="onednn")
    d = compared(report(wide), report(other))
    assert kinds(d) == [("kernel", 1, 20.0)] and d.altered[0].covered
    assert "~ +20.0" in shown(d) and "~: single runs differ by as much, so chance may have made it." in shown(d)


def test_what_a_step_became_and_what_came_with_it_are_one_change() -> None:
    """A tail that is folded no more: the product loses it, and it is a step of its own."""
    fused, bare = "f32[8,16] @ f32[16,32] + bias, gelu", "f32[8,16] @ f32[16,32] + bias"
    norm = step("n", "layer_norm", 5.0, "llvm_norm", kind="norm")
    gelu = step("x.gelu", "gelu -> f32[8,32]", 30.0, "llvm_norm", kind="elementwise")
    for after in ([norm, step("x.add", bare, 40.0), gelu], [norm, step("x.gelu", bare, 40.0), gelu]):
        d = compared(report(norm, step("x.gelu", fused, 50.0)), report(*after))
        (a,) = d.altered
        assert (a.what, a.count, a.effect_us, d.same) == ("graph", 1, 20.0, 1)
        assert [s.problem for s in a.before] == [fused] and [s.problem for s in a.after] == [bare, "gelu -> f32[8,32]"]


def test_steps_that_came_and_went_alone() -> None:
    one, two, more = step("a", "p", 5.0), step("b", "q", 6.0), step("c", "copy", 7.0, kind="move")
    d = compared(report(one, two), report(one, more, two))
    assert kinds(d) == [("graph", 1, 7.0)] and not d.altered[0].before and d.altered[0].after[0].name == "c"
    d = compared(report(one, more, two), report(one, two))
    assert kinds(d) == [("graph", 1, -7.0)] and not d.altered[0].after and d.same == 2
    assert kinds(compared(report(one), report())) == [("graph", 1, -5.0)]
    assert kinds(compared(report(), report())) == []


def test_steps_that_are_alike_within_a_change_are_one_line() -> None:
    other = step("z", "q8", 7.0, kind="call")
    d = compared(report(*layers(12)), report(other))
    (a,) = d.altered
    assert [(s.count, s.name) for s in a.before] == [(12, f"layer.0-11.{x}") for x in ("up", "down", "norm")]
    assert (a.count, [s.count for s in a.after], a.effect_us) == (1, [1], 7.0 - 1920.0)


def test_another_export_of_a_model_is_recognised_by_its_problems() -> None:
    after = [msgspec.structs.replace(s, name=f"node_{i}") for i, s in enumerate(layers(3))]
    assert compared(report(*layers(3)), report(*after)).same == 9


def test_another_type_is_told_layer_by_layer_by_names() -> None:
    after = [msgspec.structs.replace(s, problem=s.problem.replace("s8", "bf16"), time_us=3 * s.time_us) for s in layers(12)]
    d = compared(report(*layers(12)), report(*after))
    assert kinds(d) == [("graph", 12, 2400.0), ("graph", 12, 1200.0), ("time", 12, 240.0)]
    assert [(a.before[0].name, a.after[0].name) for a in d.altered[:2]] == [(f"layer.0-11.{x}",) * 2 for x in ("up", "down")]


def test_the_time_of_a_call_that_no_step_accounts_for() -> None:
    d = compared(report(step("a", "p", 5.0), us=9.0), report(step("a", "p", 5.0), us=6.0))
    assert kinds(d) == [("outside", 1, -3.0)] and (d.altered[0].before_us, d.altered[0].after_us) == (4.0, 1.0)


def test_circumstances_findings_and_contenders() -> None:
    made = Made(
        "0.1 ab", {"torch": "2.11.0", "triton": "3.6.0"}, "Linux", "2026-01-01T00:00:00+00:00", "tilewright perf m.onnx", 1
    )
    later = msgspec.structs.replace(
        made, version="0.2 cd", packages={"torch": "2.13.0", "triton": "3.6.0"}, when="2027", threads=4
    )
    fell = Finding("Conv", "conv1", "torch runs it", 5.0)
    peers = [Peer("torch", "torch", 20.0, 10.0, 2.0, 0.0, None), Peer("xla", "XLA", None, None, None, None, "no jax")]
    before = report(
        step("a", "p", 5.0), made=made, fallback=[fell], inputs=[Input("x", "f32[1,8]", "random", False)], against=peers
    )
    after = report(
        step("a", "p", 5.0),
        made=later,
        program="n.onnx",
        target="another",
        inputs=[Input("x", "f32[4,8]", "random", False)],
        quantized=Quantized("int8", "", []),
        unfused=[Finding("quantize", f"q{i}", "nothing reads it", None) for i in range(3)],
        against=[msgspec.structs.replace(peers[0], time_us=15.0, ratio=1.5), peers[1]],
    )
    d = compared(before, after)
    assert {s.what: (s.before, s.after) for s in d.settings} == {
        "program": ("m.onnx", "n.onnx"),
        "machine": ("a machine", "another"),
        "quantised": ("none", "int8"),
        "input x": ("f32[1,8]", "f32[4,8]"),
        "Tilewright": ("0.1 ab", "0.2 cd"),
        "threads": ("1", "4"),
        "torch": ("2.11.0", "2.13.0"),
    }
    assert [(f.what, f.came, f.op, f.where, f.count) for f in d.findings] == [
        ("fell back", False, "Conv", "conv1", 1),
        ("unfused", True, "quantize", "q0-2", 3),
    ]
    assert [(p.name, p.before_us, p.after_us, p.before_ratio, p.after_ratio) for p in d.against] == [
        ("torch", 20.0, 15.0, 2.0, 1.5),
        ("xla", None, None, None, None),
    ]


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    names, problems = st.sampled_from(["a", "b", "c.1", "c.2"]), st.sampled_from(["p", "q * 1.5", "q * 2.5", "r"])
    of = st.tuples(
        names, problems, st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from(["llvm", "aten"]), st.sampled_from(["gemm", "norm"])
    )
    return [step(n, p, us, by, kind=kind) for n, p, us, by, kind in draw(st.lists(of, max_size=8))]


@given(programs(), programs())
def test_every_step_is_in_one_piece_and_effects_add_up(before: list[Step], after: list[Step]) -> None:
    rows = [difference.rows_of(report(*steps)) for steps in (before, after)]
    pieces = difference._pieces(*rows)
    for side in range(2):
        assert [r for piece in pieces for r in piece[side]] == rows[side]
    d = compared(report(*before), report(*after))
    effect = sum(a.effect_us or 0.0 for a in d.altered)
    assert effect == pytest.approx(sum(s.time_us for s in after) - sum(s.time_us for s in before), abs=0.05 * 4 * 8)
    assert sum(a.count * sum(s.count for s in a.after) for a in d.altered) + d.same == len(after)


@given(st.data())
def test_an_alignment_is_the_best_there_is(data: st.DataObject) -> None:
    n, m = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    scores = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n * m, max_size=n * m)), np.int32).reshape(n, m)

    @cache
    def most(i: int, j: int) -> int:
        if i == n or j == m:
            return 0
        return max(most(i + 1, j), most(i, j + 1), most(i + 1, j + 1) + int(scores[i, j]))

    pairs = difference._aligned(scores)
    assert sum(int(scores[p]) for p in pairs) == most(0, 0)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs)) and all(scores[p] for p in pairs)


# -- the command


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


def printed(tmp_path: Path, name: str, *command: object) -> Path:
    result = invoke(*command, "--json", *FAST)
    assert result.exit_code == 0, result.output
    (tmp_path / name).write_text(result.stdout)
    return tmp_path / name


def words(text: str) -> str:
    return " ".join(text.split())


def test_reports_of_the_commands_are_compared(surroundings: None, tmp_path: Path) -> None:
    program = write(tmp_path, block())
    perf = printed(tmp_path, "a.json", "perf", program, "-n", 1)
    explain = printed(tmp_path, "b.json", "explain", program)
    other = tmp_path / "other"
    other.mkdir()
    gemm = printed(other, "c.json", "gemm", "f32[4,8] @ f32[8,16], relu", "--perf", "-n", 1)
    for one in (perf, explain):
        d = msgspec.json.decode(invoke("diff", one, one, "--json").stdout, type=Difference)
        assert d.altered == [] and d.same == d.before.steps > 1
    d = msgspec.json.decode(invoke("diff", perf, gemm, "--json").stdout, type=Difference)
    assert (d.after.steps, d.same) == (1, 0) and {"program", "command"} < {s.what for s in d.settings}
    said = invoke("diff", perf, gemm, env={"COLUMNS": "400"}).stdout
    assert f"program: {program} -> f32[4,8] @ f32[8,16], relu" in said and "1 after, of which 0 did not change." in said
    text = words(invoke("diff", perf, perf).stdout)
    assert "steps before" in text and "no difference: two runs of one program may be 3% apart" in text


def test_the_text_ranks_and_says_what_is_not_listed(tmp_path: Path) -> None:
    before, after = layers(12, us=1000.0), layers(12, us=1000.0)
    after[1] = step("layer.0.down", after[1].problem, 100.0, "onednn", llvm="slower")
    after += [step(f"s.{i}", f"copy {i * 'x'}", 0.01, kind="move", by="aten") for i in range(1)]
    after[2] = step("layer.0.norm", "layer_norm -> f32[8,16]", 101.0, "aten", how="", kind="norm")
    paths = [tmp_path / n for n in ("a.json", "b.json")]
    for path, steps in zip(paths, (before, after), strict=True):
        path.write_bytes(msgspec.json.encode(report(*steps, noise="9 runnable tasks" if path is paths[0] else "")))
    text = words(invoke("diff", *paths, env={"COLUMNS": "160"}).stdout)
    assert "Times are not reliable: 9 runnable tasks." in text
    assert "36 steps before, 37 after, of which 34 did not change." in text
    assert "-400.0 500.0 100.0 1 other kernel, llvm -> onednn: gemm layer.0.down" in text and "after, llvm: slower" in text
    assert "came + move s.0" in text and "1 more change, +1.0 µs together, not listed: --all lists all" in text
    whole = words(invoke("diff", *paths, "--all", env={"COLUMNS": "160"}).stdout)
    assert "other kernel, llvm_norm -> aten: norm layer.0.norm" in whole and "not listed" not in whole


def test_a_contender_stands_in_place_of_a_file(tmp_path: Path) -> None:
    peers = [Peer("onnxruntime", "", 30.0, 10.0, 3.1, 0.0, None), Peer("xla", "", None, None, None, None, "it reads HLO alone")]
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(report(step("a", "p", 5.0), us=11.0, against=peers)))
    d = msgspec.json.decode(invoke("diff", path, "onnxruntime", "--json").stdout, type=Difference)
    assert (d.before.total_us, d.after.total_us, d.ratio, d.after.file) == (10.0, 30.0, 3.1, "onnxruntime")
    assert "3.100 times as long. onnxruntime does not say what its steps are." in words(
        invoke("diff", path, "onnxruntime").stdout
    )
    result = invoke("diff", path, "xla")
    assert result.exit_code == 2 and "xla did not run the program: it reads HLO alone" in result.stderr
    result = invoke("diff", path, "tensorrt")
    assert result.exit_code == 2
    assert f"there is no file 'tensorrt'; {path} was timed against onnxruntime, xla" in words(result.stderr)


NOT_OURS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"steps", "it is no JSON: "),
    "nothing": (b"", "it is no JSON: "),
    "deep": (b"[" * 100_000, "it is no JSON: "),
    "a list": (b"[]", "it is JSON, and no report of perf or explain"),
    "of another verb": (b'{"devices": []}', "it is JSON, and no report of perf or explain"),
    "of something else": (b'{"steps": 1, "total_us": 2}', "it is no report that this version knows: "),
    "without times": (
        msgspec.json.encode(report(step("a", "p", 1.0))).replace(b'"time_us":1.0', b'"time_us":null'),
        "it is no report that this version knows: Expected `float`, got `null` - at `$.steps[0].time_us`",
    ),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_files_that_are_no_reports_are_refused_in_two_lines(case: str, tmp_path: Path) -> None:
    content, said = NOT_OURS[case]
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_bytes(msgspec.json.encode(report()))
    bad.write_bytes(content)
    for pair in ((good, bad), (bad, good)):
        result = invoke("diff", *pair)
        assert result.exit_code == 2 and result.stdout == "" and said in result.stderr, result.stderr
        assert str(bad) in result.stderr and "perf FILE --json" in result.stderr and len(result.stderr.splitlines()) <= 2


def test_other_mistakes(tmp_path: Path) -> None:
    perf, explain = tmp_path / "p.json", tmp_path / "e.json"
    perf.write_bytes(msgspec.json.encode(report()))
    explain.write_bytes(msgspec.json.encode(Explain(program="m", target="t", products=[], unfused=[], fallback=[])))
    result = invoke("diff", perf, explain)
    assert result.exit_code == 2 and "is of perf, and" in result.stderr and "compare two reports of one verb" in result.stderr
    result = invoke("diff", perf, tmp_path / "none.json")
    assert result.exit_code == 2 and "the report cannot be read: No such file or directory" in result.stderr
    assert invoke("diff", perf, tmp_path).exit_code == 2
    rows = difference.rows_of(report(step("a", "p", 1.0)))
    with pytest.raises(difference.InputError, match="too long to be compared"):
        difference._scores(rows * 20_000, rows * 20_000)


def test_reports_of_older_versions_lack_fields(tmp_path: Path) -> None:
    full = json.loads(msgspec.json.encode(report(*layers(1))))
    for name in ("groups", "made", "counts", "layers", "advice", "against", "noise", "choices"):
        full.pop(name)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(full))
    assert compared(difference.read_report(path), report(*layers(1))).same == 3  # type: ignore[arg-type]
