"""`verify --mesh … --simulate`: all ranks of a mesh in one process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from cli_programs import FAST, invoke, write
from meshes import on, placed
from paths import ROOT

from tilewright.dtype import F32, S8, S32
from tilewright.ir.build import convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, LayerNorm, collective, gemm
from tilewright.rules.shard import localise

EXAMPLE = str(ROOT / "examples" / "tensor_parallel.tw")


def block(batch: int, rows: int, width: int, heads: int) -> Graph:
    """Two layers of a transformer over whole tensors, which places nothing."""
    weights: list[Node] = []

    def linear(x: Node, n: int) -> Node:
        weights.append(input_(f"w{len(weights)}", F32, (x.shape[-1], n)))
        return gemm(x, weights[-1])

    def by_heads(x: Node) -> Node:
        return transpose(reshape(x, (batch, rows, heads, width // heads)), (0, 2, 1, 3))

    x = y = input_("x", F32, (batch, rows, width))
    for _ in range(2):
        n = Node(LayerNorm(2, 1e-5), y)
        a = Node(Attention(0.5), *(by_heads(linear(n, width)) for _ in range(3)))
        y = map_("add", linear(reshape(transpose(a, (0, 2, 1, 3)), (batch, rows, width)), width), y)
        y = map_("add", linear(map_("relu", linear(Node(LayerNorm(2, 1e-5), y), 2 * width)), width), y)
    return Graph("block", (x, *weights), (y,), ("y",))


def verified(*args: object) -> dict[str, object]:
    result = invoke("verify", *args, "--simulate", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verified"] and found["steps"] == []
    return found


@pytest.mark.parametrize("mesh", ["tp=2", "tp=8", "tp=64", "dp=2,tp=4", "dp=8,tp=8"])
def test_a_program_that_places_nothing_is_placed_as_megatron_has_it(mesh: str, tmp_path: Path) -> None:
    found = verified(write(tmp_path, block(8, 4, 64, 64)), "--mesh", mesh)
    on_mesh = found["mesh"]
    assert on_mesh["axes"] == mesh and on_mesh["ranks"] == math.prod(int(p[3:]) for p in mesh.split(","))
    assert [t["operation"].split(" of ")[0] for t in on_mesh["traffic"]] == ["all_reduce"] * 4
    assert all(t["why"] == "" for t in on_mesh["traffic"])  # products carry them
    (said,) = on_mesh["planned"]
    assert "the weights of 8 products by columns and of 4 by rows over tp are split" in said
    assert ("1 input along the first axis over dp" in said) == ("dp" in mesh)
    lies = on_mesh["placements"]
    assert lies["w0"] == "[, tp]" and lies["w3"] == "[tp, ]" and len(lies) == (14 if "dp" in mesh else 12)
    assert (lies.get("x"), lies.get("y")) == (("[dp, , ]", "[dp, , ]") if "dp" in mesh else (None, None))


def test_512_ranks(tmp_path: Path) -> None:
    assert verified(write(tmp_path, block(1, 4, 512, 512)), "--mesh", "tp=512")["mesh"]["ranks"] == 512


def test_the_program_says_how_it_lies_and_the_report_what_travels() -> None:
    found = verified(EXAMPLE)  # the mesh is the program's own
    assert found["mesh"]["axes"] == "tp=2" and found["mesh"]["planned"] == []
    assert found["mesh"]["placements"] == {"w_gate": "[, tp]", "w_up": "[, tp]", "w_down": "[tp, ]"}
    words = " ".join(invoke("verify", EXAMPLE, "--mesh", "tp=8", "--simulate").stdout.split())
    assert "on a simulated mesh of 8 ranks, tp=8" in words and "w_down [tp, ]" in words
    assert "all_reduce of f32[64,256] over tp=8: a rank sends 112.0 KiB; part of" in words
    assert "Verified: 1 output agrees with the oracle." in words


def test_a_program_of_one_rank_is_held_against_itself_as_it_was_read(tmp_path: Path) -> None:
    x, w = input_("x", S8, (8, 16)), input_("w", S8, (16, 4))
    y = convert(gemm(placed(x, "", "tp"), placed(w, "tp", ""), acc_dtype=S32), S8)
    local = replace(localise(on("tp=4", y)), name="local")
    found = verified(write(tmp_path, local))
    assert found["end_to_end"][0]["error"] == 0 and [i["type"] for i in found["inputs"]] == ["s8[8,16]", "s8[16,4]"]
    result = invoke("verify", tmp_path / "local.tw", "--mesh", "tp=2", "--simulate")
    assert result.exit_code == 2 and "the program of one rank is for tp=4, not tp=2" in result.output


@pytest.mark.parametrize("fault", ["no reduction", "the mean of all ranks"])
def test_a_wrong_reduction_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = collective._reduce  # pyright: ignore[reportPrivateUsage]

    def wrong(fn, type, values):
        return values[0] if fault == "no reduction" else right(fn, type, values) / len(values)

    monkeypatch.setattr(collective, "_reduce", wrong)
    result = invoke("verify", EXAMPLE, "--simulate")
    assert result.exit_code == 1 and "output y" in result.output


def test_ranks_that_hold_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def drops(self, node, src):
        return src[0]

    monkeypatch.setattr(collective.AllReduce, "evaluate", drops)
    result = invoke("verify", EXAMPLE, "--simulate")
    assert result.exit_code == 1 and "ranks 0 and 1 hold other values of one part" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--mesh", "tp=2"), "this verb runs the ranks of a mesh in one process (--mesh)"),
        (("--mesh", "tp", "--simulate"), "no mesh: 'tp'"),
        (("--mesh", "dp=2", "--simulate"), "no mesh axis 'tp'"),
        (("--mesh", "tp=7", "--simulate"), "7 ranks do not divide an extent of 768"),
        (("--simulate", "--fp16"), "--fp16 or --bf16 is not for ranks that are simulated (--simulate)"),
        (("--simulate", "--int8"), "--int8, --fp8 or --w4 is not for ranks"),
        (("--simulate", "--source"), "--source is not for ranks"),
        (("--simulate", "--excess-precision"), "--excess-precision is not for ranks"),
    ],
)
def test_what_cannot_be_simulated_is_said(args: tuple[str, ...], message: str) -> None:
    result = invoke("verify", EXAMPLE, *args)
    assert result.exit_code == 2 and message in result.output, result.output


def test_a_program_without_a_mesh_and_one_that_is_saved(tmp_path: Path) -> None:
    path = write(tmp_path, Graph("plain", (x := input_("x", F32, (4, 4)),), (gemm(x, x),), ("y",)))
    result = invoke("verify", path, "--simulate")
    assert result.exit_code == 2 and "no mesh to simulate" in result.output and "--mesh tp=8" in result.output
    saved = tmp_path / "plain.twp"
    assert invoke("compile", path, "-o", saved, *FAST).exit_code == 0
    result = invoke("verify", saved, "--mesh", "tp=2", "--simulate")
    assert result.exit_code == 2 and "a saved program is one process's" in result.output


GEMMS = [
    ("bf16[16/tp,32] @ bf16[32,64/tp]", ["all_gather"]),
    ("bf16[16,32/tp] @ bf16[32/tp,8] + residual -> bf16 rows/tp", ["reduce_scatter"]),
    ("s8[16,32/tp] @ s8[32/tp,8] -> s8", ["all_reduce"]),
    ("f8e4m3fn[16/dp,64/tp] scale=tensor @ f8e4m3fn[16,64/tp]^T scale=channel -> bf16 rows/dp*tp", ["reduce_scatter"]),
    ("f32[16,32] @ f32[32,64] -> f32 columns/tp", []),
]


@pytest.mark.parametrize(("problem", "travels"), GEMMS)
def test_a_line_says_what_is_split(problem: str, travels: list[str]) -> None:
    result = invoke("gemm", problem, "--mesh", "dp=2,tp=4", "--simulate", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [t["operation"].split(" of ")[0] for t in found["mesh"]["traffic"]] == travels
    assert all(t["why"] == "" for t in found["mesh"]["traffic"]) and found["verified"]


def test_a_line_that_splits_says_what_is_wrong() -> None:
    for args, message in [
        (("f32[8/tp,8] @ f32[8,8]",), "extents are split, and there is no mesh"),
        (("f32[8/tp,8] @ f32[8,8]", "--mesh", "tp=2"), "this verb runs the ranks of a mesh in one process"),
        (("f32[8/tp,8] @ f32[8,8]", "--mesh", "tp=3", "--simulate"), "3 ranks do not divide an extent of 8"),
        (("f32[8/tp,8/tp] @ f32[8,8]", "--mesh", "tp=2", "--simulate"), "a mesh axis is used twice"),
        (("f32[8/,8] @ f32[8,8]",), "is not understood"),
        (("f32[8,8] @ f32[8,8] -> f32 rows",), "/ wanted"),
        (("f32[8,8] @ f32[8,8] -> f32 rows/2",), "a mesh axis wanted"),
        (("f32[8,8] @ f32[8,8] -> f32 rows/tp columns/tp",), "the result's placement is given twice"),
        (("f32[8/tp,8] @ f32[8,8]", "--simulate", "--mesh", "tp=2", "--perf"), "--perf is not for ranks that are simulated"),
    ]:
        result = invoke("gemm", *args)
        assert result.exit_code == 2 and message in result.output, (args, result.output)
