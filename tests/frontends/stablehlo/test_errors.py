"""Refusals of StableHLO text that cannot be read, and their words."""

from __future__ import annotations

import random
import re
from collections import Counter

import jax
import jax_models
import pytest

from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import load


def main(body: str) -> str:
    """A module that computes %r from %x, both f32[2]."""
    return f"func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {{\n{body}\nreturn %r : tensor<2xf32>\n}}\n"


def sorting(comparator: str) -> str:
    """A sort whose comparator computes %c from %a and %b."""
    return (
        f'%r = "stablehlo.sort"(%x) ({{\n^bb0(%a: tensor<f32>, %b: tensor<f32>):\n{comparator}\n'
        "stablehlo.return %c : tensor<i1>\n}) {dimension = 0 : i64} : (tensor<2xf32>) -> tensor<2xf32>"
    )


DIVIDING = """%i = stablehlo.convert %a : (tensor<f32>) -> tensor<i32>
%q = stablehlo.divide %i, %i : tensor<i32>
%c = stablehlo.compare LT, %q, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>"""
LOOKING_OUT = """%z = stablehlo.slice %x [0:1] : (tensor<2xf32>) -> tensor<1xf32>
%y = stablehlo.reshape %z : (tensor<1xf32>) -> tensor<f32>
""" + sorting("%c = stablehlo.compare LT, %a, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>")
REFUSED = {
    "truncated": (main("%r = stablehlo.abs %x : tensor<2xf32>")[:80], InputError, r"malformed StableHLO: .*line 2\)"),
    "no function": ("module @stablehlo.x {\n}\n", InputError, "0 are public: none"),
    "empty module": ("module @stablehlo {\n}\n", InputError, "no function is called main, and 0 are public: none"),
    "two entries": (
        "func.func @a() {\nreturn\n}\nfunc.func @b() {\nreturn\n}\n",
        InputError,
        r"2 are public: a, b.*\n  try: name one main",
    ),
    "no body": ("func.func private @main(tensor<2xf32>) -> tensor<2xf32>\n", InputError, "function 'main' has no body"),
    "types that do not fit": (
        main("%r = stablehlo.reshape %x : (tensor<2xf32>) -> tensor<3xf32>"),
        InputError,
        r"malformed StableHLO: .*line \d",
    ),
    "unknown operation": (main('%r = "stablehlo.nothing"(%x) : (tensor<2xf32>) -> tensor<2xf32>'), InputError, "nothing"),
    "another dialect": (main("%r = linalg.copy %x : tensor<2xf32>"), UnsupportedError, "dialect 'linalg' is not read"),
    "unregistered": (main('%r = "a.b"(%x) : (tensor<2xf32>) -> tensor<2xf32>'), UnsupportedError, "is not read"),
    "quantised types": (
        "func.func @main(%x: tensor<2x!quant.uniform<i8:f32, 1.0>>) {\n%r = stablehlo.reverse %x, dims = [0] : "
        "tensor<2x!quant.uniform<i8:f32, 1.0>>\nreturn\n}\n",
        UnsupportedError,
        "no lowering to plain ones: failed to legalize operation 'stablehlo.reverse'",
    ),
    "complex": ("func.func @main(%x: tensor<2xcomplex<f16>>) {\nreturn\n}\n", UnsupportedError, "element type complex<f16>"),
    "an odd float": ("func.func @main(%x: tensor<2xf6E2M3FN>) {\nreturn\n}\n", UnsupportedError, "element type f6E2M3FN"),
    "open extents": ("func.func @main(%x: tensor<?xf32>) {\nreturn\n}\n", UnsupportedError, r"tensor<\?xf32>.*are open"),
    "unranked": ("func.func @main(%x: tensor<*xf32>) {\nreturn\n}\n", UnsupportedError, r"tensor<\*xf32> cannot be carried"),
    "no tensor": ("func.func @main(%x: f32) {\nreturn\n}\n", UnsupportedError, "a value of type f32 cannot be carried"),
    "custom call": (
        main("%r = stablehlo.custom_call @lapack_sgetrf(%x) : (tensor<2xf32>) -> tensor<2xf32>"),
        UnsupportedError,
        r"custom call to 'lapack_sgetrf' cannot be expressed \(stablehlo.custom_call at line 2\)",
    ),
    "resharding": (
        main(
            "%h = stablehlo.custom_call @SPMDFullToShardShape(%x) : (tensor<2xf32>) -> tensor<1xf32>\n"
            "%r = stablehlo.abs %x : tensor<2xf32>"
        ),
        UnsupportedError,
        "it computes over parts of several devices, and a program runs on one",
    ),
    "random": (
        "func.func @main(%a: tensor<f32>, %s: tensor<1xi64>) -> tensor<2xf32> {\n%r = stablehlo.rng %a, %a, %s, "
        "distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<2xf32>\nreturn %r : tensor<2xf32>\n}\n",
        UnsupportedError,
        r"(?s)stablehlo.rng has no meaning here.*try: compute it outside, and make its result an input",
    ),
    "a scan from the end": (
        "func.func @main(%x: tensor<4xi32>, %i: tensor<i32>) -> tensor<4xi32> {\n"
        "%r:2 = chlo.scan(%x) inits(%i) dimension=0 attributes {is_reverse = true} {\n^bb0(%a: tensor<i32>, %b: tensor<i32>):\n"
        "%s = stablehlo.add %a, %b : tensor<i32>\nstablehlo.return %s, %s : tensor<i32>, tensor<i32>\n"
        "} : (tensor<4xi32>, tensor<i32>) -> (tensor<4xi32>, tensor<i32>)\nreturn %r#0 : tensor<4xi32>\n}\n",
        UnsupportedError,
        "a scan from the end is not read",
    ),
    "collective": (
        "func.func @main() -> tensor<ui32> {\n%r = stablehlo.partition_id : tensor<ui32>\nreturn %r : tensor<ui32>\n}\n",
        UnsupportedError,
        "partition_id needs several devices",
    ),
    "recursion": (
        main("%r = func.call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>"),
        InputError,
        "function 'main' calls itself",
    ),
    "division in a comparator": (
        main(sorting(DIVIDING)),
        UnsupportedError,
        "an integer division in a region",
    ),
    "a comparator that looks out": (main(LOOKING_OUT), UnsupportedError, "it cannot stand alone: .*stablehlo.sort at line 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_words(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    text, kind, pattern = REFUSED[case]
    with pytest.raises(kind, match=pattern) as caught:
        load(text)
    assert len(str(caught.value).splitlines()) <= 2
    assert capfd.readouterr() == ("", "")


def test_programs_that_explode_when_inlined_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [
        f"func.func private @f{i}(%x: tensor<2xf32>) -> tensor<2xf32> {{\n"
        f"%a = func.call @f{i + 1}(%x) : (tensor<2xf32>) -> tensor<2xf32>\n"
        f"%b = func.call @f{i + 1}(%a) : (tensor<2xf32>) -> tensor<2xf32>\nreturn %b : tensor<2xf32>\n}}"
        for i in range(90)
    ]
    last = "func.func private @f90(%x: tensor<2xf32>) -> tensor<2xf32> {\n%a = stablehlo.abs %x : tensor<2xf32>\n"
    text = main("%r = func.call @f0(%x) : (tensor<2xf32>) -> tensor<2xf32>")
    text = "\n".join([text, *levels, last + "return %a : tensor<2xf32>\n}\n"])
    monkeypatch.setattr("tilewright.frontends.stablehlo.walk.MAX_OPERATIONS", 2000)
    with pytest.raises(InputError, match="more than 2000 operations once inlined"):
        load(text)
    monkeypatch.setattr("tilewright.frontends.stablehlo.walk.MAX_DEPTH", 50)
    with pytest.raises(InputError, match="nest more than 50 deep"):
        load(text)


def test_text_that_would_exhaust_the_parser_is_refused() -> None:
    nested = "func.func @main() attributes {a = %s} {\nreturn\n}\n"
    load(nested % ("[" * 400 + "]" * 400))
    load(nested % ('"' + "[" * 4000 + '"'))  # a string hides its brackets, an arrow's head is none
    with pytest.raises(InputError, match="brackets nest more than 500 deep"):
        load(nested % ("[" * 200_000 + "]" * 200_000))


def test_locations_that_double_at_every_step_are_looked_into_only_so_far() -> None:
    doubling = "".join(f"#l{i + 1} = loc(fused[#l{i}, #l{i}])\n" for i in range(60))
    graph = load("#l0 = loc(unknown)\n" + doubling + main("%r = stablehlo.abs %x : tensor<2xf32> loc(#l60)"))
    assert graph.origin(graph.outputs[0]) == "abs"


def test_mutilated_text_gives_a_typed_error_or_a_graph(capfd: pytest.CaptureFixture[str]) -> None:
    params, x = jax_models.mlp_inputs((4, 3, 2), 2)
    whole = jax.jit(jax_models.mlp).lower(params, x).as_text()
    whole += main(sorting("%c = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>")).replace(
        "main", "more"
    )
    words = re.findall(r"\w+|\s+|.", whole)
    outcomes: Counter[str] = Counter()
    for seed in range(300):
        rng = random.Random(seed)
        mutant = list(words)
        for _ in range(rng.choice((1, 1, 2, 4))):
            i = rng.randrange(len(mutant))
            if rng.random() < 0.4:
                mutant[i] = rng.choice(["0", "-1", "9223372036854775807", "f64", "?", "i4", "", "%x", "tensor<2xi1>"])
            elif rng.random() < 0.5:
                mutant[i] = rng.choice(words)
            else:
                mutant = mutant[: i + 1]
        try:
            load("".join(mutant) + "\n")
            outcomes["read"] += 1
        except TilewrightError as error:
            outcomes[type(error).__name__] += 1
            assert len(str(error).splitlines()) <= 2
    assert outcomes["InputError"] > 100
    assert capfd.readouterr() == ("", "")
