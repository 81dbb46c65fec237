"""Shardings of HLO and StableHLO: their spellings, programs for several ranks, and what is not read."""

from __future__ import annotations

import importlib
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tilewright.cli.verbs import cli
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.stablehlo import collective
from tilewright.frontends.stablehlo.shardings import placed
from tilewright.ir.evaluate import evaluate, evaluate_mesh
from tilewright.ir.graph import Graph, label_of
from tilewright.ir.mesh import Mesh, Placement

MESH = "dp=2,tp=4"
HEAD = 'module {\n  sdy.mesh @mesh = <["dp"=2, "tp"=4]>\n'


def on_mesh(text: str, mesh: str = MESH, **options: object) -> Graph:
    return load(text, LoadOptions(mesh=mesh, **options))  # type: ignore[arg-type]


def hlo(body: str, head: str = "") -> str:
    add = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
    return f"HloModule m{head}\n{add}ENTRY main {{\n{body}\n}}\n"


def main(body: str, takes: str = "%x: tensor<8x16xf32>", gives: str = "tensor<8x16xf32>") -> str:
    return f"{HEAD}  func.func @main({takes}) -> {gives} {{\n{body}\n  }}\n}}\n"


def parts(graph: Graph, feeds: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The whole results of a program for one rank, run on every rank of its mesh."""
    assert graph.mesh is not None
    lies = dict(zip(map(label_of, graph.inputs), graph.placements, strict=False))
    split = {name: lies[name].split(value, graph.mesh) for name, value in feeds.items()}
    found = evaluate_mesh(graph, [{n: s[r] for n, s in split.items()} for r in range(graph.mesh.size)], graph.mesh)
    left = graph.placements[len(graph.inputs) :]
    return [p.joined([f[i] for f in found], graph.mesh) for i, p in enumerate(left)]


# Spellings.


def named(placement: Placement, mesh: Mesh) -> str:
    dims = ", ".join("{" + ", ".join(f"'{n}'" for n in names) + "}" for names in placement.splits)
    axes = ",".join(f"'{n}'={s}" for n, s in mesh.axes)
    return f"{{mesh[{axes}], [{dims}]}}"


def test_spellings_say_the_placements_that_xla_reads_in_them() -> None:
    """Random placements, in names; the device numbers that jaxlib makes of them; and these as a list."""
    sharding = importlib.import_module("jaxlib._hlo").HloSharding
    rng = random.Random(0)
    for _ in range(80):
        mesh = Mesh(tuple(zip("abc", rng.choices([2, 3, 4], k=rng.randint(1, 3)), strict=False)))
        names = [n for n, _ in mesh.axes]
        rng.shuffle(names)
        splits: list[list[str]] = [[], [], []]
        for name in names[: rng.randint(0, len(names))]:
            rng.choice(splits).append(name)
        placement = Placement(tuple(map(tuple, splits)))
        text = named(placement, mesh)
        read = sharding.v3_to_v2_sharding(sharding.from_string(text))
        texts = [text, str(read)]
        if read.is_tiled():
            devices = ",".join(map(str, read.tile_assignment_devices()))
            tile = ",".join(map(str, read.tile_assignment_dimensions()))
            texts.append(f"{{devices=[{tile}]{devices}{' last_tile_dim_replicate' * read.replicate_on_last_tile_dim()}}}")
        for spelt in texts:
            assert placed(spelt, 3, mesh, "t") == placement, (spelt, str(mesh))


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("{devices=[2,2]<=[4]}", InputError, "is of 4 devices, the mesh dp=2,tp=4 of 8"),
        (
            "{devices=[4,2]<=[8]}",
            UnsupportedError,
            r"do not lie along axes of the mesh dp=2,tp=4 \(t\)\n  try: a mesh with an axis",
        ),
        ("{devices=[2,4]0,1,2,3,4,5,6,6}", InputError, "each device once"),
        ("{devices=[2,4]<=[2,2]}", InputError, "a part for each device"),
        ("{devices=[8]<=[8]}", UnsupportedError, "is not read of a tensor of 2 axes"),
        ("{devices=[2,1,4]<=[8] last_tile_dims={manual}}", UnsupportedError, "is not read of a tensor of 2 axes"),
        ("{maximal device=1}", UnsupportedError, "the sharding {maximal device=1} is not read"),
        ("{mesh['a'=8], [{'a':(1)2}, {}]}", UnsupportedError, "whole axes of the mesh that it names"),
        ("{tiled}", InputError, "no sharding: {tiled}"),
    ],
)
def test_a_sharding_that_is_none_or_fits_no_mesh_is_refused(text: str, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern):
        placed(text, 2, Mesh.parse(MESH), "t")


def test_summands_are_read() -> None:
    mesh = Mesh.parse(MESH)
    wanted = Placement((("dp",), ()), ("tp",))
    assert placed("{devices=[2,1,4]<=[8] last_tile_dims={unreduced}}", 2, mesh, "t") == wanted
    assert placed("{mesh['dp'=2,'tp'=4], [{'dp'}, {}], unreduced={'tp'}}", 2, mesh, "t") == wanted


# One meaning, several ways to say it.

ROWS, COLUMNS, INNER = "{devices=[2,1,4]%s last_tile_dim_replicate}", "{devices=[1,4,2]%s last_tile_dim_replicate}", ""
LISTED = ("0,1,2,3,4,5,6,7", "0,4,1,5,2,6,3,7")
COUNTED = ("<=[8]", "<=[2,4]T(1,0)")


def mlp_hlo(x: str, w: str, v: str, y: str) -> str:
    return hlo(f"""
  x = f32[8,16] parameter(0), sharding={x}
  w = f32[16,32] parameter(1), sharding={w}
  v = f32[32,16] parameter(2), sharding={v}
  h = f32[8,32] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  t = f32[8,32] tanh(h)
  p = f32[8,16] dot(t, v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT y = f32[8,16] custom-call(p), custom_call_target="Sharding", sharding={y}""")


def spelt_by_devices(order: tuple[str, str]) -> str:
    rows, columns = "{devices=[2,1,4]%s last_tile_dim_replicate}", "{devices=[1,4,2]%s last_tile_dim_replicate}"
    return mlp_hlo(rows % order[0], columns % order[1], columns.replace("1,4,2", "4,1,2") % order[1], rows % order[0])


def spelt_by_axes() -> str:
    mesh = "mesh['dp'=2,'tp'=4]"
    return mlp_hlo(*(f"{{{mesh}, [{dims}]}}" for dims in ("{'dp'}, {}", "{}, {'tp'}", "{'tp'}, {}", "{'dp'}, {}")))


MLP = """
    %h = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
    %t = stablehlo.tanh %h : tensor<8x32xf32>
    %p = stablehlo.dot_general %t, %v, contracting_dims = [1] x [0] : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
"""
SDY = main(
    f"{MLP}    return %p : tensor<8x16xf32>",
    '%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}, '
    '%w: tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>}, '
    '%v: tensor<32x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"tp"}, {}]>}',
    '(tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>})',
)
CONSTRAINED = main(
    '    %x1 = sdy.sharding_constraint %x <@mesh, [{"dp"}, {}]> : tensor<8x16xf32>\n'
    '    %v1 = sdy.sharding_constraint %v <@mesh, [{"tp"}, {}]> : tensor<32x16xf32>\n'
    + MLP.replace("%x,", "%x1,").replace("%v,", "%v1,")
    + '    %r = stablehlo.custom_call @Sharding(%p) {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"} : '
    "(tensor<8x16xf32>) -> tensor<8x16xf32>\n    return %r : tensor<8x16xf32>",
    "%x: tensor<8x16xf32>, %w: tensor<16x32xf32>, %v: tensor<32x16xf32>",
)
LOCAL = """
      %h = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4x16xf32>, tensor<16x8xf32>) -> tensor<4x8xf32>
      %t = stablehlo.tanh %h : tensor<4x8xf32>
      %p = stablehlo.dot_general %t, %c, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x16xf32>) -> tensor<4x16xf32>
      %s = "stablehlo.all_reduce"(%p) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%l: tensor<f32>, %m: tensor<f32>):
        %n = stablehlo.add %l, %m : tensor<f32>
        stablehlo.return %n : tensor<f32>
      }) : (tensor<4x16xf32>) -> tensor<4x16xf32>
"""
MANUAL = main(
    '    %r = sdy.manual_computation(%x, %w, %v) in_shardings=[<@mesh, [{"dp"}, {}]>, <@mesh, [{}, {"tp"}]>, '
    '<@mesh, [{"tp"}, {}]>] out_shardings=[<@mesh, [{"dp"}, {}]>] manual_axes={"dp", "tp"} '
    "(%a: tensor<4x16xf32>, %b: tensor<16x8xf32>, %c: tensor<8x16xf32>) {"
    f"{LOCAL}      sdy.return %s : tensor<4x16xf32>\n    }} : (tensor<8x16xf32>, tensor<16x32xf32>, tensor<32x16xf32>) -> "
    "tensor<8x16xf32>\n    return %r : tensor<8x16xf32>",
    "%x: tensor<8x16xf32>, %w: tensor<16x32xf32>, %v: tensor<32x16xf32>",
)
BEGIN = (
    '(f32[4,16], f32[16,8], f32[8,16]) custom-call(x, w, v), custom_call_target="xla.sdy.GlobalToLocalShape", '
    'frontend_attributes={xla.sdy.in_shardings="#sdy.sharding_per_value<[<@mesh, [{\\"dp\\"}, {}]>, <@mesh, [{}, {\\"tp\\"}]>, '
    '<@mesh, [{\\"tp\\"}, {}]>]>",xla.sdy.manual_axes="#sdy<manual_axes{\\"dp\\", \\"tp\\"}>"}'
)
END = (
    'f32[8,16] custom-call(body), custom_call_target="xla.sdy.LocalToGlobalShape", frontend_attributes={xla.sdy.manual_axes='
    '"#sdy<manual_axes{\\"dp\\", \\"tp\\"}>",xla.sdy.out_shardings="#sdy.sharding_per_value<[<@mesh, [{\\"dp\\"}, {}]>]>"}'
)
PARTITIONED = """
  h = f32[4,8] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[4,8] tanh(h)
  p = f32[4,16] dot(t, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT y = f32[4,16] all-reduce(p), channel_id=1, replica_groups=%s, use_global_device_ids=true, to_apply=add"""
MANUAL_HLO = f"""HloModule m, frontend_attributes={{xla.sdy.meshes={{mesh = #sdy.mesh<["dp"=2, "tp"=4]>}}}}
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}}
xla.sdy.manual_computation_body {{
  x = f32[4,16] parameter(0)
  w = f32[16,8] parameter(1)
  v = f32[8,16] parameter(2){PARTITIONED % "{{0,1,2,3},{4,5,6,7}}"}
}}
ENTRY main {{
  x = f32[8,16] parameter(0)
  w = f32[16,32] parameter(1)
  v = f32[32,16] parameter(2)
  begin = {BEGIN}
  b0 = f32[4,16] get-tuple-element(begin), index=0
  b1 = f32[16,8] get-tuple-element(begin), index=1
  b2 = f32[8,16] get-tuple-element(begin), index=2
  body = f32[4,16] call(b0, b1, b2), to_apply=xla.sdy.manual_computation_body
  ROOT y = {END}
}}
"""


def partitioned(groups: str) -> str:
    rows, columns = (f"{{devices=[{t}]{o} last_tile_dim_replicate}}" for t, o in (("2,1,4", "<=[8]"), ("1,4,2", COUNTED[1])))
    given = f"""
  x = f32[4,16] parameter(0), sharding={rows}
  w = f32[16,8] parameter(1), sharding={columns}
  v = f32[8,16] parameter(2), sharding={columns.replace("1,4,2", "4,1,2")}"""
    return hlo(given + PARTITIONED % groups, ", num_partitions=8")


WAYS = {
    "device numbers, listed": spelt_by_devices(LISTED),
    "device numbers, counted": spelt_by_devices(COUNTED),
    "axes with names": spelt_by_axes(),
    "sdy": SDY,
    "constraints": CONSTRAINED,
    "shard_map": MANUAL,
    "shard_map in HLO": MANUAL_HLO,
    "partitioned": partitioned("{{0,1,2,3},{4,5,6,7}}"),
    "partitioned, groups counted": partitioned("[2,4]<=[8]"),
    "partitioned, groups by axes": partitioned("mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)) {'b'}"),
}


def test_all_ways_to_say_one_thing_give_one_local_graph() -> None:
    read = {name: on_mesh(text) for name, text in WAYS.items()}
    first = read["sdy"]
    assert [n.op.name for n in first.nodes() if n.src] == ["gemm", "map", "gemm", "all_reduce"]
    assert [*map(str, first.placements)] == ["[dp, ]", "[, tp]", "[tp, ]", "[dp, ]"]
    for name, graph in read.items():
        assert graph.mesh == first.mesh and graph.outputs == first.outputs, name
        assert (graph.placements, graph.inputs) == (first.placements, first.inputs), name
    rng = torch.Generator().manual_seed(0)
    feeds = {n: torch.randn(s, generator=rng) for n, s in (("x", (8, 16)), ("w", (16, 32)), ("v", (32, 16)))}
    (found,) = parts(first, feeds)
    torch.testing.assert_close(found, torch.tanh(feeds["x"] @ feeds["w"]) @ feeds["v"], rtol=1e-4, atol=1e-4)


def test_without_a_mesh_what_is_said_is_noted() -> None:
    notes = "\n".join(load(spelt_by_devices(COUNTED)).notes)
    assert "input 'w' is sharded ({devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate})" in notes
    assert "shardings of operations are of no use on one device: Sharding (1)" in notes
    assert "output 'y' is sharded" in notes and "--mesh tp=2" in notes
    notes = "\n".join(load(CONSTRAINED).notes)
    assert "sdy.sharding_constraint (2), Sharding (1)" in notes and "--mesh dp=2,tp=4" in notes
    annotated = SDY.replace("tanh %h :", 'tanh %h {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {"tp"}]>]>} :')
    assert "stablehlo.tanh (1)" in "\n".join(load(annotated).notes)
    plain = "module {\n  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n    return %x : tensor<2xf32>\n  }\n}\n"
    assert load(plain).notes == ()
    for text in (MANUAL, MANUAL_HLO):
        with pytest.raises(UnsupportedError, match=r"(?s)over parts of several devices.*try: --mesh dp=2,tp=4"):
            load(text)
    with pytest.raises(UnsupportedError, match=r"(?s)all_reduce needs several devices.*try: say which: --mesh tp=4 \(mesh=…\)"):
        load(partitioned("{{0,1,2,3},{4,5,6,7}}"))


# Operations between ranks, against NumPy.

PRE = "  x = f32[4,8] parameter(0), sharding={devices=[2,2]<=[4]}\n"


def each_rank(body: str, mesh: str = "a=2,b=2", head: str = ", num_partitions=4") -> list[np.ndarray]:
    """Results of a body on each rank, whose x is [4, 8] full of its number, but for the first column, which counts rows."""
    graph = on_mesh(hlo(PRE + body, head), mesh, plan={"r": "[, ]"})
    feeds = [{"x": torch.from_numpy(value(r))} for r in range(4)]
    return [f[0].numpy() for f in evaluate_mesh(graph, feeds, Mesh.parse(mesh))]  # type: ignore[union-attr]


def value(rank: int) -> np.ndarray:
    x = np.full((4, 8), 10.0 * rank, np.float32)
    x[:, 0] += np.arange(4)
    return x


HOW = "channel_id=1, use_global_device_ids=true"
GROUPS = {"{{0,1},{2,3}}": [[0, 1], [2, 3]], "{{0,2},{1,3}}": [[0, 2], [1, 3]], "{{2,0},{3,1}}": [[2, 0], [3, 1]]}


@pytest.mark.parametrize("groups", ["{{0,1},{2,3}}", "{{0,2},{1,3}}", "{{0,1,2,3}}", "{}"])
@pytest.mark.parametrize("fn", ["add", "maximum"])
def test_reductions(groups: str, fn: str) -> None:
    rows = GROUPS.get(groups, [[0, 1, 2, 3]])
    how = HOW if groups != "{}" else "channel_id=1"
    body = f"  ROOT r = f32[4,8] all-reduce(x), {how}, replica_groups={groups}, to_apply=f"
    text = hlo(PRE + body, ", num_partitions=4").replace(
        "ENTRY", f"f {{\n a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] {fn}(a, b)\n}}\nENTRY"
    )
    graph = on_mesh(text, "a=2,b=2", plan={"r": "[, ]"})
    found = evaluate_mesh(graph, [{"x": torch.from_numpy(value(r))} for r in range(4)], Mesh.parse("a=2,b=2"))
    for row, r in [(group, r) for group in rows for r in group]:
        wanted = np.stack([value(p) for p in row])
        np.testing.assert_array_equal(found[r][0], wanted.sum(0) if fn == "add" else wanted.max(0))  # type: ignore[arg-type]


def test_gathers_scatters_and_exchanges() -> None:
    pair = "replica_groups={{0,1},{2,3}}"
    rows = [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = each_rank(f"  ROOT r = f32[4,16] all-gather(x), {HOW}, {pair}, dimensions={{1}}")
    assert all((f == np.concatenate([value(p) for p in row], 1)).all() for f, row in zip(found, rows, strict=True))
    found = each_rank(f"  ROOT r = f32[2,8] reduce-scatter(x), {HOW}, {pair}, dimensions={{0}}, to_apply=add")
    for r, (f, row) in enumerate(zip(found, rows, strict=True)):
        np.testing.assert_array_equal(f, sum(value(p) for p in row)[2 * (r % 2) : 2 * (r % 2) + 2])
    found = each_rank(f"  ROOT r = f32[4,8] all-to-all(x), channel_id=1, {pair}, dimensions={{0}}")
    for r, (f, row) in enumerate(zip(found, rows, strict=True)):
        np.testing.assert_array_equal(f, np.concatenate([value(p)[2 * (r % 2) : 2 * (r % 2) + 2] for p in row]))
    several = each_rank(
        "  u = f32[4,8] negate(x)\n"
        f"  e = (f32[4,8], f32[4,8]) all-to-all(x, u), channel_id=1, {pair}\n"
        "  e0 = f32[4,8] get-tuple-element(e), index=0\n  e1 = f32[4,8] get-tuple-element(e), index=1\n"
        "  ROOT r = f32[8,8] concatenate(e0, e1), dimensions={0}"
    )
    for r, (f, row) in enumerate(zip(several, rows, strict=True)):
        np.testing.assert_array_equal(f, np.concatenate([value(p) * (1, -1)[r % 2] for p in row]))
    turned = each_rank(f"  ROOT r = f32[8,8] all-gather(x), {HOW}, replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}")
    for r, f in enumerate(turned):
        np.testing.assert_array_equal(f, np.concatenate([value(r % 2), value(2 + r % 2)]))


def test_started_and_ended_apart() -> None:
    found = each_rank(
        f"  s = f32[4,8] all-reduce-start(x), {HOW}, replica_groups={{{{0,1,2,3}}}}, to_apply=add\n"
        "  ROOT r = f32[4,8] all-reduce-done(s)"
    )
    np.testing.assert_array_equal(found[2], sum(value(p) for p in range(4)))


def test_permutations_and_broadcasts() -> None:
    body = "  ROOT r = f32[4,8] collective-permute(x), channel_id=1, source_target_pairs=%s"
    ring = each_rank(body % "{{0,1},{1,2},{2,3},{3,0}}")
    shift = each_rank(body % "{{0,1},{2,3}}")
    for r in range(4):
        np.testing.assert_array_equal(ring[r], value((r - 1) % 4))
        np.testing.assert_array_equal(shift[r], value(r - 1) if r % 2 else 0 * value(0))
    swap = on_mesh(hlo(PRE + body % "{{0,1},{1,0},{2,3},{3,2}}", ", num_partitions=4"), "a=2,b=2", plan={"r": "[, ]"})
    assert {n.op.over for n in swap.nodes() if n.op.name == "all_gather"} == {("b",)}  # type: ignore[attr-defined]
    assert "collective_permute at r is read as an all-gather along b" in swap.notes
    sent = each_rank("  ROOT r = f32[4,8] collective-broadcast(x), channel_id=1, replica_groups={{0,1},{2,3}}")
    for r in range(4):
        np.testing.assert_array_equal(sent[r], value(r - r % 2))


def test_ranks_know_their_numbers() -> None:
    """Partitions and replicas are numbered apart; a slice that is a rank's own part of what all hold is one."""
    number = (
        "  i = u32[] %s-id()\n  j = f32[] convert(i)\n  k = f32[4,8] broadcast(j), dimensions={}\n  ROOT r = f32[4,8] add(x, k)"
    )
    for which, head, numbers in (
        ("partition", ", num_partitions=4", [0, 1, 2, 3]),
        ("replica", ", num_partitions=4", [0, 0, 0, 0]),
        ("replica", ", replica_count=4", [0, 1, 2, 3]),
        ("partition", ", replica_count=2, num_partitions=2", [0, 1, 0, 1]),
        ("replica", ", replica_count=2, num_partitions=2", [0, 0, 1, 1]),
    ):
        found = each_rank(number % which, head=head)
        assert [f[0, 1] - 10 * r for r, f in enumerate(found)] == numbers
    own = """  t = s32[4] constant({0,0,4,4})
  i = u32[] partition-id()
  z = s32[] constant(0)
  o = s32[1] dynamic-slice(t, i), dynamic_slice_sizes={1}
  p = s32[] reshape(o)
  ROOT r = f32[4,4] dynamic-slice(x, z, p), dynamic_slice_sizes={4,4}"""
    graph = on_mesh(hlo(PRE + own, ", num_partitions=4"), "a=2,b=2", plan={"r": "[, ]"})
    assert [(n.op.name, n.op.over) for n in graph.nodes() if n.src] == [("own", ("a",))]  # type: ignore[attr-defined]
    assert each_rank(own)[3].tolist() == value(3)[:, 4:].tolist()
    other = own.replace("{0,0,4,4}", "{0,1,3,4}")
    assert [f.tolist() for f in each_rank(other)] == [value(r)[:, s : s + 4].tolist() for r, s in enumerate((0, 1, 3, 4))]


def test_replicas_take_part_by_their_own_numbers() -> None:
    """Groups without a channel are of replicas; each partition is on its own."""
    how = "replica_groups={}, to_apply=add"
    found = each_rank(f"  ROOT r = f32[4,8] all-reduce(x), {how}", head=", replica_count=2, num_partitions=2")
    for r in range(4):
        np.testing.assert_array_equal(found[r], value(r % 2) + value(2 + r % 2))
    both = each_rank(f"  ROOT r = f32[4,8] all-reduce(x), channel_id=1, {how}", head=", replica_count=2, num_partitions=2")
    np.testing.assert_array_equal(both[1], sum(value(r) for r in range(4)))
    alone = each_rank(f"  ROOT r = f32[4,8] all-reduce(x), {how}")  # one replica, four partitions
    np.testing.assert_array_equal(alone[1], value(1))


# Programs that Shardy partitions.


def agrees(text: str, mesh: str, feeds: dict[str, torch.Tensor], **options: object) -> Graph:
    """The program of one rank, once all ranks together gave what one device gives."""
    graph = on_mesh(text, mesh, **options)
    wanted = evaluate(load(text), feeds)
    for found, right in zip(parts(graph, feeds), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    return graph


def test_functions_elementwise_functions_and_constants() -> None:
    """Programs with what Shardy leaves alone, or knows no rule for: calls, CHLO, constants with other values on each rank."""
    table = ", ".join("[" + ", ".join(f"{i * 16 + j}.0" for j in range(16)) + "]" for i in range(8))
    text = main(
        f"""    %c = stablehlo.constant dense<[{table}]> : tensor<8x16xf32>
    %0 = func.call @twice(%x) : (tensor<8x16xf32>) -> tensor<8x16xf32>
    %1 = chlo.erf %0 : tensor<8x16xf32> -> tensor<8x16xf32>
    %2 = chlo.square %1 : tensor<8x16xf32> -> tensor<8x16xf32>
    %3 = stablehlo.add %2, %c : tensor<8x16xf32>
    return %3 : tensor<8x16xf32>
  }}
  func.func private @twice(%a: tensor<8x16xf32>) -> tensor<8x16xf32> {{
    %0 = func.call @sum(%a, %a) : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>
    return %0 : tensor<8x16xf32>
  }}
  func.func private @sum(%a: tensor<8x16xf32>, %b: tensor<8x16xf32>) -> tensor<8x16xf32> {{
    %0 = stablehlo.add %a, %b : tensor<8x16xf32>
    return %0 : tensor<8x16xf32>""",
        '%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {"tp"}]>}',
    )
    graph = agrees(text, MESH, {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1))})
    assert [getattr(n.op, "fn", n.op.name) for n in graph.nodes()] == [
        "input",
        "add",
        "erf",
        "multiply",
        "const",
        "own",
        "own",
        "add",
    ]


LOOKUP = """
  table = f32[64,16] parameter(0), sharding=%s
  i = s32[8,1] parameter(1), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  g = f32[8,16] gather(table, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, \
slice_sizes={1,16}
  ROOT f = f32[8,16] fusion(g), kind=kLoop, calls=body"""


def lookup(table: str) -> str:
    body = "body {\n  p = f32[8,16] parameter(0)\n  ROOT n = f32[8,16] negate(p)\n}\nENTRY"
    return hlo(LOOKUP % table).replace("ENTRY", body)


def test_fusions_and_a_lookup() -> None:
    feeds = {"table": torch.randn(64, 16), "i": torch.tensor([0, 63, 17, 5, 32, 31, 16, 15], dtype=torch.int32).reshape(8, 1)}
    graph = agrees(lookup("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"), MESH, feeds)
    assert [*map(str, graph.placements)] == ["[, tp]", "[dp, ]", "[dp, tp]"]


def test_a_plan_says_how_inputs_lie() -> None:
    from torch.distributed.tensor import Replicate, Shard

    text = re.sub(r" \{sdy\.sharding = [^>]*>\}", "", SDY.replace(HEAD, "module {\n"))
    assert "sdy" not in text
    feeds = {n: torch.randn(s) for n, s in (("x", (8, 16)), ("w", (16, 32)), ("v", (32, 16)))}
    plan = {"x": "[dp, ]", "w": (None, "tp"), "v": [Replicate(), Shard(0)]}
    graph = agrees(text, MESH, feeds, plan=plan)
    assert graph.outputs == on_mesh(SDY).outputs and graph.placements == on_mesh(SDY).placements
    for wrong, kind, pattern in (
        ({"q": "[dp, ]"}, InputError, "the plan places 'q', which is no input.*its inputs are x, w, v"),
        ({"x": "[dp]"}, InputError, r"the placement \[dp\] is of 1 axes, the tensor has 2"),
        ({"x": "[pp, ]"}, InputError, "the mesh dp=2,tp=4 has no axis 'pp'"),
        ({"x": "rows"}, InputError, "no placement: 'rows'"),
        ({"x": 3}, InputError, "no placement: an argument of type int"),
        ({"x": [Shard(0)]}, InputError, "1 placement on the mesh"),
        ({"x": [Shard(0), Shard(2)]}, InputError, r"S\(2\) of a tensor of 2 axes"),
    ):
        with pytest.raises(kind, match=f"(?s){pattern}"):
            on_mesh(text, plan=wrong)


REFUSED = {
    "another mesh": (SDY, "tp=8", InputError, "the program is for a mesh of dp=2,tp=4, not of tp=8"),
    "another number of devices": (
        partitioned("{{0,1,2,3},{4,5,6,7}}"),
        "tp=4",
        InputError,
        "the program is for 8 devices, the mesh tp=4 has 4",
    ),
    "groups along no axes": (
        partitioned("{{0,2,4,6},{1,3,5,7}}"),
        MESH,
        UnsupportedError,
        r"(?s)the groups {{0,2,4,6},{1,3,5,7}} do not lie along axes of the mesh dp=2,tp=4.*try: .*as a=4,b=2",
    ),
    "groups of other sizes": (partitioned("{{0,1,2},{3,4,5,6,7}}"), MESH, UnsupportedError, "do not lie along axes"),
    "extents": (
        SDY.replace("8x16", "7x16").replace("8x32", "7x32"),
        MESH,
        UnsupportedError,
        r"2 ranks do not divide an extent of 7 \(the text given, input 0\)",
    ),
    "another order of devices": (
        SDY.replace('"tp"=4]>', '"tp"=4], device_ids=[1, 0, 2, 3, 4, 5, 6, 7]>'),
        MESH,
        UnsupportedError,
        "has its devices in another order than counted",
    ),
    "another function": (
        partitioned("{{0,1,2,3},{4,5,6,7}}").replace("add(a, b)", "subtract(a, b)"),
        MESH,
        UnsupportedError,
        "it reduces by another function than one of the graph's",
    ),
    "a lookup in a split table": (
        lookup("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        MESH,
        UnsupportedError,
        "Shardy, as jaxlib has it, cannot partition the program: stablehlo.gather along an axis that is split",
    ),
    "a custom call": (
        main(
            "    %r = stablehlo.custom_call @mhlo.erf(%x) : (tensor<8x16xf32>) -> tensor<8x16xf32>\n"
            "    return %r : tensor<8x16xf32>",
            '%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}',
        ),
        MESH,
        UnsupportedError,
        "a custom call to 'mhlo.erf' of values that are split",
    ),
    "GSPMD's own": (
        main(
            "    %h = stablehlo.custom_call @SPMDFullToShardShape(%x) : (tensor<8x16xf32>) -> tensor<4x16xf32>\n"
            "    return %x : tensor<8x16xf32>"
        ),
        MESH,
        UnsupportedError,
        "a computation over parts as GSPMD writes it .SPMDFullToShardShape. is not read",
    ),
    "no sharding at all": (
        SDY.replace('<@mesh, [{"dp"}, {}]>}, %w', '<@mesh, [{"dp"}]>}, %w'),
        MESH,
        InputError,
        "malformed StableHLO",
    ),
    "results that differ in no known way": (
        hlo(
            "  x = f32[4] parameter(0), sharding={devices=[8]<=[8]}\n  ROOT r = f32[4] reverse(x), dimensions={0}\n"
            "  i = u32[] partition-id()",
            ", num_partitions=8",
        ),
        "tp=8",
        UnsupportedError,
        "result 'r' differs from rank to rank along tp, and the program does not say how",
    ),
}


LOOP = main(
    "    %n = stablehlo.constant dense<3> : tensor<i32>\n    %i = stablehlo.constant dense<0> : tensor<i32>\n"
    "    %r:2 = stablehlo.while(%k = %i, %y = %x) : tensor<i32>, tensor<8x16xf32>\n    cond {\n"
    "      %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
    "      stablehlo.return %c : tensor<i1>\n    } do {\n      %o = stablehlo.constant dense<1> : tensor<i32>\n"
    "      %j = stablehlo.add %k, %o : tensor<i32>\n      %z = stablehlo.tanh %y : tensor<8x16xf32>\n"
    "      stablehlo.return %j, %z : tensor<i32>, tensor<8x16xf32>\n    }\n    return %r#1 : tensor<8x16xf32>",
    '%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}',
)


def test_a_loop_over_parts_is_read_where_shardy_partitions_it() -> None:
    """Shardy of jaxlib 0.10 does not, that of 0.12 does."""
    try:
        on_mesh(LOOP)
    except UnsupportedError as error:
        assert re.search(
            "Shardy, as jaxlib has it, cannot partition the program: .*condition block arguments", str(error), re.DOTALL
        )
    else:
        agrees(LOOP, MESH, {"x": torch.randn(8, 16)})


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_said(case: str) -> None:
    text, mesh, kind, pattern = REFUSED[case]
    with pytest.raises(kind, match=pattern):
        on_mesh(text, mesh)


@pytest.mark.parametrize(
    ("mesh", "plan", "pattern"),
    [
        (None, {"x": "[dp, ]"}, "a plan is given, and no mesh for it"),
        (7, None, "an argument of type int .*mesh"),
        ("tp=4", 3, "an argument of type int"),
    ],
)
def test_options_that_are_no_mesh_or_plan_are_refused(mesh: object, plan: object, pattern: str) -> None:
    with pytest.raises(InputError, match=f"(?s){pattern}"):
        LoadOptions(mesh=mesh, plan=plan)  # type: ignore[arg-type]


def test_meshes_of_others_are_read() -> None:
    import jax

    one = jax.make_mesh((1, 1), ("a", "b"))
    assert str(LoadOptions(mesh=one).mesh) == "a=1,b=1"  # type: ignore[arg-type]
    assert str(LoadOptions(mesh={"dp": 2, "tp": 3}).mesh) == "dp=2,tp=3"  # type: ignore[arg-type]


def test_a_program_that_says_nothing_is_placed_by_others() -> None:
    text = re.sub(r" \{sdy\.sharding = [^>]*>\}", "", SDY.replace(HEAD, "module {\n"))
    graph = on_mesh(text, "tp=2")
    assert str(graph.mesh) == "tp=2" and not graph.local and graph.outputs == load(text).outputs


def test_a_simulated_mesh_is_held_against_the_whole_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify --simulate` reads a program for its mesh, and for one device: a wrong reduction over ranks is found."""
    file = tmp_path / "program.mlir"
    file.write_text(SDY)
    words = ["verify", str(file), "--mesh", MESH, "--simulate"]
    assert "1 output agrees with the oracle" in CliRunner().invoke(cli, words).output
    monkeypatch.setattr(collective, "_fn", lambda site: "maximum")
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1 and "output result" in done.output


def test_a_constant_that_the_text_leaves_out_is_whole_on_every_rank() -> None:
    text = hlo("""
  x = f32[8,16] parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  c = f32[16,4] constant({...})
  ROOT y = f32[8,4] dot(x, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}""")
    graph = on_mesh(text)
    assert [*map(label_of, graph.inputs)] == ["x", "c"]
    assert [*map(str, graph.placements)] == ["[dp, ]", "[, ]", "[dp, ]"]


def test_partitions_of_partitions() -> None:
    """Text that Shardy printed after its own partitioner is a program of one rank, with its results' shardings."""
    text = main(
        LOCAL.replace("%a", "%x")
        .replace("%b,", "%w,")
        .replace("%c,", "%v,")
        .replace("tensor<f32>, %m: tensor<f32>", "tensor<f32>, %m: tensor<f32>")
        + "    return %s : tensor<4x16xf32>",
        '%x: tensor<4x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}, '
        '%w: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>}, '
        '%v: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"tp"}, {}]>}',
        '(tensor<4x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>})',
    )
    assert on_mesh(text).outputs == on_mesh(SDY).outputs
    assert on_mesh(text).placements == on_mesh(SDY).placements


def test_axes_are_counted_in_their_order() -> None:
    """Two axes that split one: the first is outermost."""
    for order in itertools.permutations(("dp", "tp")):
        axes = ", ".join(f'"{n}"' for n in order)
        text = main(
            "    %r = sdy.sharding_constraint %x <@mesh, [{}, {}]> : tensor<8x16xf32>\n    return %r : tensor<8x16xf32>",
            f"%x: tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{{axes}}}, {{}}]>}}",
        )
        graph = agrees(text, MESH, {"x": torch.randn(8, 16)})
        assert graph.placements[0].splits[0] == order
