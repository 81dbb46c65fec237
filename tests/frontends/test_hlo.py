"""HLO text: XLA's own spelling, before and after optimisation, and what it does to malformed text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax_models
import numpy as np
import pytest
import torch
from against_jax import agree, run
from jax import lax
from paths import EXAMPLES

from tilewright.dtype import S8, S32
from tilewright.errors import InputError, MissingDependencyError, UnsupportedError
from tilewright.frontends import LoadOptions, hlo, load
from tilewright.frontends.stablehlo import jaxlib as _jaxlib
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Call, Convert, Gemm, Input

KINDS = ("hlo", "optimised")


def labels(graph: Graph) -> list[str]:
    return [n.op.label for n in graph.inputs if isinstance(n.op, Input)]


def gemms(graph: Graph) -> list[Gemm]:
    return [n.op for n in graph.nodes() if isinstance(n.op, Gemm)]


# The two spellings of openxla/xla #7117.


def test_the_two_spellings_of_a_narrow_product_are_exact_modulo_256() -> None:
    graphs = [load(EXAMPLES / name) for name in ("xla_7117_s8.hlo", "xla_7117_s32_convert.hlo")]
    rng = np.random.default_rng(7117)
    a, b = (torch.from_numpy(rng.integers(-128, 128, (16, 1024, 1024), dtype=np.int8)) for _ in range(2))
    narrow, converted = (evaluate(g, [a, b])[0] for g in graphs)
    assert narrow.dtype == converted.dtype == torch.int8
    assert torch.equal(narrow, converted)
    # Whole rows against int64, which is slow in NumPy, spread over every batch.
    for batch in range(16):
        rows = rng.integers(0, 1024, 6)
        wanted = a[batch].numpy()[rows].astype(np.int64) @ b[batch].numpy().astype(np.int64).T
        assert (narrow[batch].numpy()[rows].astype(np.int64) % 256 == wanted % 256).all()
    assert abs(wanted).max() > 127  # the product does leave s8


def test_the_narrow_product_accumulates_in_s8_and_the_wide_one_converts_outside() -> None:
    narrow, wide = load(EXAMPLES / "xla_7117_s8.hlo"), load(EXAMPLES / "xla_7117_s32_convert.hlo")
    assert [g.acc_dtype for g in gemms(narrow)] == [S8]
    assert [g.acc_dtype for g in gemms(wide)] == [S32]
    assert wide.outputs[0].op == Convert(S8, "wrap")
    assert labels(narrow) == labels(wide) == ["Arg_0.1", "Arg_1.2"]
    assert (narrow.output_names, wide.output_names) == (("dot.3",), ("convert.4",))
    assert (narrow.name, wide.name) == ("jit__einsum", "jit_f")
    assert narrow.origin(narrow.outputs[0]).startswith("jit(_einsum)/jit(main)/dot_general[")
    assert wide.origin(wide.outputs[0]).endswith("convert_element_type[new_dtype=int8 weak_type=False]")
    assert narrow.notes == wide.notes == ()


def test_percent_signs_change_nothing() -> None:
    text = (EXAMPLES / "xla_7117_s32_convert.hlo").read_text()
    for name in ("main.5", "Arg_0.1", "Arg_1.2", "dot.3", "convert.4"):
        text = text.replace(f" {name}", f" %{name}").replace(f"({name}", f"(%{name}")
    assert "%Arg_0.1, %Arg_1.2" in text
    plain, marked = load(EXAMPLES / "xla_7117_s32_convert.hlo"), load(text)
    assert plain.outputs[0] is marked.outputs[0]
    assert labels(marked) == ["Arg_0.1", "Arg_1.2"]


# JAX's programs, lowered and optimised.


@pytest.mark.parametrize("exact", [True, False])
def test_a_transformer_block_agrees_with_jax(exact: bool) -> None:
    def block(p: dict[str, object], x: object) -> object:
        return jax_models.transformer_block(p, x, exact=exact)

    graphs = agree(block, *jax_models.block_inputs(), kinds=KINDS, ulps=4, depth=8)
    for graph in graphs.values():
        assert len(gemms(graph)) == 6
        assert not any(isinstance(n.op, Call) for n in graph.nodes())


def test_an_mlp_agrees_with_jax() -> None:
    agree(jax_models.mlp, *jax_models.mlp_inputs(), kinds=KINDS, ulps=8, depth=2)


def test_a_quantised_dot_agrees_with_jax_bit_for_bit() -> None:
    graphs = agree(jax_models.quantised_dot, *jax_models.quantised_inputs(), kinds=KINDS)
    assert [g.acc_dtype for g in gemms(graphs["optimised"])] == [S32]


def test_what_the_optimiser_leaves_of_other_operators_agrees_with_jax() -> None:
    def f(x: object, i: object) -> object:
        values, places = lax.top_k(x, 3)
        spread = x.at[i].add(1.0)  # type: ignore[attr-defined]
        return values, places, x[i], x.argmax(-1), x.cumsum(0), spread, (x > 0).sum(), lax.sort(x, dimension=1)  # type: ignore

    x = np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32)
    x[2, 3] = np.nan
    agree(f, x, np.array([1, 4, 2], np.int32), kinds=KINDS, depth=2)


# Text by hand: what GPU dumps hold.

GPU = """HloModule jit_step, entry_computation_layout={(f32[4,6]{1,0}, f32[6,5]{0,1})->(f32[5,4]{1,0}, f32[])}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%inner (p: f32[4,5]) -> f32[4,5] {
  %p = f32[4,5]{1,0} parameter(0)
  ROOT %e = f32[4,5]{1,0} tanh(%p), metadata={op_name="jit(step)/tanh"}
}

%gemm_fusion_dot.1_computation (parameter_0: f32[4,6], parameter_1: f32[6,5]) -> f32[4,5] {
  %parameter_0 = f32[4,6]{1,0} parameter(0)
  %parameter_1 = f32[6,5]{0,1} parameter(1)
  ROOT %dot.0 = f32[4,5]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/dot_general"}
}

%fused_sum (p0: f32[4,5]) -> (f32[], f32[4,5]) {
  %p0 = f32[4,5]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %t = f32[4,5]{1,0} fusion(%p0), kind=kLoop, calls=%inner
  %r = f32[] reduce(%t, %zero), dimensions={0,1}, to_apply=%add
  ROOT %pair = (f32[], f32[4,5]{1,0}) tuple(%r, %t)
}

%wrapped (w: f32[5,4]) -> f32[5,4] {
  %w = f32[5,4]{1,0} parameter(0)
  ROOT %n = f32[5,4]{1,0} negate(%w)
}

ENTRY %main.9 (Arg_0.1: f32[4,6], Arg_1.2: f32[6,5]) -> (f32[5,4], f32[]) {
  %Arg_0.1 = f32[4,6]{1,0} parameter(0)
  %Arg_1.2 = f32[6,5]{0,1} parameter(1)
  %gemm_fusion_dot.1 = f32[4,5]{1,0} fusion(%Arg_0.1, %Arg_1.2), kind=kCustom, calls=%gemm_fusion_dot.1_computation, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %both = (f32[], f32[4,5]{1,0}) fusion(%gemm_fusion_dot.1), kind=kInput, calls=%fused_sum
  %sum = f32[] get-tuple-element(%both), index=0
  %t = f32[4,5]{1,0} get-tuple-element(%both), index=1
  %columns = f32[4,5]{0,1} copy(%t)
  %turned = f32[5,4]{1,0} bitcast(%columns)
  %start = ((f32[5,4]{1,0}), f32[5,4]{1,0}, u32[]) async-start(%turned), calls=%wrapped
  %done = f32[5,4]{1,0} async-done(%start), calls=%wrapped
  ROOT %tuple.3 = (f32[5,4]{1,0}, /*index=1*/f32[]) tuple(%done, %sum)
}
"""


def test_nested_fusions_bitcasts_and_asynchronous_calls_are_inlined() -> None:
    graph = load(GPU)
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((4, 6)).astype(np.float32), rng.standard_normal((6, 5)).astype(np.float32)
    turned, total = run(graph, a, b)
    wanted = np.tanh(a @ b)
    np.testing.assert_allclose(turned.numpy(), -wanted.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total.numpy(), wanted.sum(), rtol=1e-5)
    assert labels(graph) == ["Arg_0.1", "Arg_1.2"]
    assert graph.output_names == ("done", "sum")
    (product,) = (n for n in graph.nodes() if isinstance(n.op, Gemm))
    assert graph.origin(product) == "jit(step)/dot_general"
    assert graph.notes == ("input 'Arg_1.2' has layout {0,1} in its source; it is taken and read row-major here",)


@pytest.mark.parametrize(
    ("source", "result"),
    [("{2,1,0}", "{1,0}"), ("{0,1,2}", "{1,0}"), ("{1,0,2}", "{0,1}"), ("{2,0,1}", "{0,1}")],
)
def test_a_bitcast_reads_the_bytes_of_one_layout_in_another(source: str, result: str) -> None:
    def strides(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        out, step = [0] * len(shape), 4
        for axis in map(int, layout.strip("{}").split(",")):
            out[axis], step = step, step * shape[axis]
        return tuple(out)

    graph = load(f"""HloModule m
ENTRY e {{
  p = f32[2,3,4]{source} parameter(0)
  ROOT b = f32[12,2]{result} bitcast(p)
}}
""")
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    memory = np.empty(24, np.float32)
    np.lib.stride_tricks.as_strided(memory, (2, 3, 4), strides(source, (2, 3, 4)))[...] = x
    wanted = np.lib.stride_tricks.as_strided(memory, (12, 2), strides(result, (12, 2)))
    np.testing.assert_array_equal(run(graph, x)[0].numpy(), wanted)


def test_a_bitcast_to_another_type_of_the_same_width_keeps_the_bits() -> None:
    graph = load("HloModule m\nENTRY e {\n  p = f32[2,3]{0,1} parameter(0)\n  ROOT b = s32[3,2]{1,0} bitcast(p)\n}\n")
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(graph, x)[0].numpy(), x.T.view(np.int32))
    with pytest.raises(UnsupportedError, match="regroups bytes"):
        load("HloModule m\nENTRY e {\n  p = f32[2,3] parameter(0)\n  ROOT b = s8[2,12] bitcast(p)\n}\n")


def test_a_constant_that_the_text_leaves_out_is_an_input_of_its_name() -> None:
    text = """HloModule m

%add_bias (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  %inside = f32[3]{0} constant({...})
  ROOT %s = f32[3]{0} add(%p, %inside)
}

ENTRY %e (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %constant.1 = f32[3]{0} constant({...}), metadata={op_name="w"}
  %m = f32[3]{0} multiply(%x, %constant.1)
  ROOT %f = f32[3]{0} fusion(%m), kind=kLoop, calls=%add_bias
}
"""
    graph = load(text)
    assert labels(graph) == ["x", "constant.1", "inside"]
    assert graph.notes == ("the text leaves out the values of constant.1, inside: they are inputs here",)
    x, w, b = (np.array(v, np.float32) for v in ([1, 2, 3], [4, 5, 6], [7, 8, 9]))
    np.testing.assert_array_equal(run(graph, x, w, b)[0].numpy(), x * w + b)
    with pytest.raises(InputError, match=r"left out in part.*\n.*xla_dump_large_constants"):
        load("HloModule m\nENTRY e {\n  ROOT c = (f32[3], s32[]) constant(({...}, 1))\n}\n")


def test_tuples_and_tokens_are_taken_apart() -> None:
    graph = load(
        """HloModule m
ENTRY e {
  pair = (f32[2], s32[2]) parameter(0)
  x = f32[2] parameter(1)
  first = f32[2] get-tuple-element(pair), index=0
  order = token[] after-all()
  held = f32[2] add-dependency(first, order)
  sum = f32[2] add(held, x)
  ROOT out = f32[2] opt-barrier(sum)
}
"""
    )
    assert len(graph.inputs) == 3
    a, i, x = np.array([1, 2], np.float32), np.array([1, 2], np.int32), np.array([3, 4], np.float32)
    np.testing.assert_array_equal(run(graph, a, i, x)[0].numpy(), a + x)


def test_a_sharded_argument_is_noted_and_taken_whole() -> None:
    text = (EXAMPLES / "xla_7117_s8.hlo").read_text().replace("sharding={replicated}", "sharding={devices=[2,1,1]<=[2]}", 1)
    note, how = load(text).notes
    assert "--mesh tp=2" in how
    assert "'Arg_0.1' is sharded" in note
    assert "the whole of it is taken" in note


# Files and errors.


def test_files_are_told_by_suffix_and_first_word(tmp_path: Path) -> None:
    text = (EXAMPLES / "xla_7117_s8.hlo").read_text()
    dump = tmp_path / "module_0001.before_optimizations.txt"
    dump.write_text("// a comment\n" + text)
    other = tmp_path / "notes.txt"
    other.write_text("nothing of the sort")
    assert hlo.accepts(dump)
    assert not hlo.accepts(other)
    assert hlo.accepts(text)
    assert not hlo.accepts("module {\n}")
    assert load(dump).outputs[0] is load(text).outputs[0]
    wrong = tmp_path / "program.hlo"
    wrong.write_text("module {}\n")
    with pytest.raises(
        InputError, match=r"begins with HloModule or a computation \(.*program.hlo\)\n  try: StableHLO goes in a .mlir"
    ):
        load(wrong)
    binary = tmp_path / "binary.hlo"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"not a text file \(.*binary.hlo\)"):
        load(binary)
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        hlo.load(tmp_path, LoadOptions())


BODY = "HloModule m\nENTRY e {\n%s\n}\n"
REFUSED = {
    "truncated": (
        (EXAMPLES / "xla_7117_s8.hlo").read_text()[:400],
        InputError,
        r"malformed HLO: .*\(the text given, line 6\)\n  try: the text ends too early: print the module again, whole",
    ),
    "another shape": (
        (EXAMPLES / "xla_7117_s8.hlo").read_text().replace("s8[16,1024,1024]{2,1,0} dot", "s8[16,1024,7]{2,1,0} dot"),
        InputError,
        r"malformed HLO: inferred shape .* is incompatible with .*16x1024x7xi8.* \(the text given, jit\(_einsum\)/jit\(main\)"
        r"/dot_general\)\n  try: mend it there",
    ),
    "no such value": (
        (EXAMPLES / "xla_7117_s8.hlo").read_text().replace("dot(Arg_0.1", "dot(Arg_9"),
        InputError,
        "malformed HLO: instruction does not exist: Arg_9 .*line 6",
    ),
    "empty": ("HloModule m\n", InputError, "malformed HLO"),
    "negative extent": (BODY % "  ROOT p = f32[-1] parameter(0)", InputError, "malformed HLO"),
    "overflow": (BODY % f"  ROOT p = f32[{', '.join(['2147483647'] * 3)}] parameter(0)", InputError, "overflow"),
    "unknown type": (BODY % "  ROOT p = f33[2] parameter(0)", InputError, "malformed HLO: HLO has no type 'f33' .*line 3"),
    "unknown type in a tuple": (
        BODY % "  p = f32[2] parameter(0)\n  ROOT t = (f32[2], s9[2]) tuple(p, p)",
        InputError,
        "malformed HLO: HLO has no type 's9' .*line 4",
    ),
    "unknown type of a signature": (
        "HloModule m, entry_computation_layout={(s9[2]{0})->s9[2]{0}}\n"
        + (BODY % "  ROOT p = s8[2] parameter(0)").partition("\n")[2],
        InputError,
        "malformed HLO: HLO has no type 's9' .*line 1",
    ),
    "unknown operation": (
        BODY % "  p = f32[2] parameter(0)\n  ROOT t = f32[2] frob(p)",
        InputError,
        "malformed HLO: HLO has no operation 'frob' .*line 4",
    ),
    # XLA ends its process at these, or did in some release.
    "parameter out of range": (BODY % "  ROOT p = f32[2] parameter(7)", InputError, "XLA's parser stopped at it: param_no"),
    "reshape to another size": (
        BODY % "  p = f32[2] parameter(0)\n  ROOT r = f32[3] reshape(p)",
        InputError,
        "malformed HLO: .*(StaticExtentProduct|number of elements)",
    ),
    "a constant of 40 GB": (BODY % "  ROOT c = f32[100000,100000] constant({1})", InputError, "malformed HLO"),
    "custom call": (
        BODY % '  p = f32[2] parameter(0)\n  ROOT c = f32[2] custom-call(p), custom_call_target="__cublas$gemm"',
        UnsupportedError,
        r"custom call to '__cublas\$gemm' cannot be expressed \(stablehlo.custom_call at c\)",
    ),
    "collective": (
        BODY % "  p = f32[2] parameter(0)\n  ROOT c = f32[4] all-gather(p), dimensions={0}, replica_groups={{0,1}}",
        UnsupportedError,
        "all_gather needs several devices",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_words(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    text, kind, pattern = REFUSED[case]
    with pytest.raises(kind, match=pattern) as caught:
        load(text)
    assert len(str(caught.value).splitlines()) <= 2
    assert capfd.readouterr() == ("", "")


def test_xla_is_given_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.frontends.stablehlo.jaxlib.CONVERSION_TIMEOUT_S", 0.001)
    with pytest.raises(InputError, match=r"longer than 0\.001 s"):
        load(EXAMPLES / "xla_7117_s8.hlo")


def test_reading_needs_jaxlib_and_not_jax() -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tilewright.frontends import load\n"
        "print(load(Path(sys.argv[1])).outputs[0].type, 'jax' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(EXAMPLES / "xla_7117_s8.hlo")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("s8[16,1024,1024] False\n", "")


def test_without_jaxlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _jaxlib._imported.cache_clear()
    monkeypatch.setitem(sys.modules, "jaxlib.mlir.dialects.chlo", None)
    try:
        with pytest.raises(MissingDependencyError, match=r"jaxlib [\d.]+ is not one.*\n  try: pip install 'tilewright\[jax\]'"):
            load(EXAMPLES / "xla_7117_s8.hlo")
        monkeypatch.setitem(sys.modules, "jaxlib", None)
        with pytest.raises(MissingDependencyError, match=r"read by jaxlib, which is not installed"):
            load(EXAMPLES / "xla_7117_s8.hlo")
    finally:
        _jaxlib._imported.cache_clear()


def test_every_node_knows_where_it_came_from() -> None:
    graph = load(GPU)
    assert {graph.origins[n] for n in graph.nodes()} >= {"Arg_0.1", "jit(step)/dot_general", "jit(step)/tanh", "turned", "n"}


BARE = """// no module around it
%double (x: f32[2]) -> f32[2] {
  %x = f32[2] parameter(0)
  ROOT %r = f32[2] add(%x, %x)
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %out = f32[2] call(%x), to_apply=%double
}
"""


def test_computations_without_a_module_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bare.hlo"
    path.write_text(BARE)
    for program in (BARE, path, "e {\n  x = f32[2] parameter(0)\n  ROOT out = f32[2] add(x, x)\n}"):
        graph = load(program)
        assert graph.output_names == ("out",)
        (got,) = run(graph, np.array([1.0, 2.0], np.float32))
        assert got.tolist() == [2.0, 4.0]
    with pytest.raises(InputError, match=r"malformed HLO: .*line 3\)"):
        load("e {\n  x = f32[2] parameter(0)\n  ROOT out = f32[2] nothing(x, x)\n}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "f32[4,8] scaled-dot(a, b, c, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            r"scales f8e4m3fn\[2,64,8\] do not divide f8e4m3fn\[4,64\] into blocks",
        ),
        (
            "f32[4,8] ragged-dot(a, c, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, "
            "rhs_group_dims={0}",
            r"ragged-dot, a product of groups of rows, is not read",
        ),
    ],
)
def test_products_that_are_not_read_are_refused_by_name(line: str, words: str) -> None:
    given = ["f8e4m3fn[4,64]", "f8e4m3fn[64,8]", "f8e4m3fn[2,64,8]", "bf16[4,2]", "bf16[2,8]", "s64[2]"]
    lines = [f"  {name} = {t} parameter({i})" for i, (name, t) in enumerate(zip("abcstg", given, strict=True))]
    with pytest.raises(UnsupportedError, match=words):
        load("\n".join(["HloModule m", "ENTRY e {", *lines, f"  ROOT r = {line}", "}"]))
