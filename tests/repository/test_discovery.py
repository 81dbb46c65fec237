"""Adding a front end, a rule, a candidate or a chip is adding a file: a fake of each, dropped in a folder, is found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.discovery import in_turn, modules
from tilewright.dtype import F32
from tilewright.errors import InputError
from tilewright.frontends import SUFFIXES, LoadOptions, load
from tilewright.frontends import discover as discover_frontends
from tilewright.hardware.detect import chips, match
from tilewright.ir.build import input_, items, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Input
from tilewright.ir.pattern import Rule, rewrite
from tilewright.ir.pattern import discover as discover_rules
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import discover as discover_candidates

FRONTEND = '''
"""Reads words: "double" and nothing else."""
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from tilewright.dtype import F32
from tilewright.frontends import LoadOptions
from tilewright.ir.build import input_, items
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call
from tilewright.ir.types import TensorType

@dataclass(frozen=True)
class Word:
    """A dataclass looks its own module up: it must be one."""
    text: str

def accepts(program: object) -> bool:
    return isinstance(program, Word)

def load(program: object, options: LoadOptions) -> Graph:
    x = input_("x", F32, (2,))
    call = Node(Call("fake_words", program.text, "", (TensorType(F32, (2,)),)), x)
    return Graph("words", (x,), (call,), ("y",))

def evaluate_call(call: Call, values: Sequence[object]) -> Sequence[object]:
    assert call.target == "double"
    return [values[0] * 2]
'''
RULE = '''
from tilewright.ir.ops import Map
from tilewright.ir.pattern import Pat, rule

@rule(Pat(Map, where=lambda n: n.op.fn == "floor"), stage="fake")
def drop_floor_for_a_test(m):
    """floor(x) -> x. Wrong, and beside the point."""
    return m.node.src[0]
'''
CANDIDATE = """
from tilewright.schedule.candidate import Refusal

class Fake:
    name = "fake_for_a_test"
    kinds = frozenset({"gemm"})
    devices = frozenset({"cpu"})
    ranks = "one"
    preference = 1

    def plan(self, problem, target):
        return Refusal("it is a fake")

CANDIDATE = Fake()
"""
CHIP = """
from tilewright.hardware.target import Chip, MatrixUnit

CHIP = Chip(
    name="fake_for_a_test",
    kind="cpu",
    requires=frozenset({"fake_feature"}),
    units=(MatrixUnit("s8", "s32", "fake.dot", 4, "nowhere"),),
)
"""


def test_a_front_end_is_found_and_evaluates_its_calls(tmp_path: Path):
    own = discover_frontends()
    (tmp_path / "fake_words.py").write_text(FRONTEND)
    found = discover_frontends([tmp_path])
    assert [m.__name__ for m in found] == [*(m.__name__ for m in own), "tilewright.frontends.fake_words"]
    module = found[-1]
    program = module.Word("double")
    assert module.accepts(program) and not any(m.accepts(program) for m in own)
    graph = module.load(program, LoadOptions())
    assert evaluate(graph, [torch.tensor([1.0, 2.0])])[0].tolist() == [2.0, 4.0]
    assert discover_frontends([tmp_path])[-1] is module


def test_a_rule_is_found(tmp_path: Path):
    (tmp_path / "fake_rule.py").write_text(RULE)
    found = {r.name: r for r in discover_rules("tilewright.rules", Rule, [tmp_path])}
    x = input_("x", F32, ())
    graph = Graph("g", (x,), (map_("floor", x),), ("y",))
    assert rewrite(graph, [found["drop_floor_for_a_test"]]).outputs == (x,)
    assert "drop_floor_for_a_test" not in {r.name for r in discover_rules("tilewright.rules", Rule)}


def test_a_candidate_is_found_in_the_order_of_preference(tmp_path: Path):
    (tmp_path / "fake_candidate.py").write_text(CANDIDATE)
    found = discover_candidates([tmp_path])
    assert "fake_for_a_test" in [c.name for c in found]
    assert [c.preference for c in found] == sorted(c.preference for c in found)
    assert "fake_for_a_test" not in [c.name for c in discover_candidates()]


def test_a_chip_is_found_where_its_features_are(tmp_path: Path):
    (tmp_path / "fake_chip.py").write_text(CHIP)
    assert "fake_for_a_test" in [c.name for c in chips([tmp_path])]
    assert match("cpu", frozenset({"fake_feature"}), [tmp_path]).name == "fake_for_a_test"
    assert (
        match("cpu", frozenset({"fake_feature"})) is None or match("cpu", frozenset({"fake_feature"})).name != "fake_for_a_test"
    )


def test_every_module_of_the_product_is_found_once_in_name_order():
    found = [m.__name__ for m in modules("tilewright.candidates")]
    assert found == sorted(set(found)) and "tilewright.candidates.reference" in found
    assert "tilewright.candidates.library.aten" in found and not [n for n in found if "._" in n]


def test_a_folder_that_defines_the_name_is_one_module():
    found = [m.__name__.removeprefix("tilewright.frontends.") for m in modules("tilewright.frontends", defining="accepts")]
    assert {"hlo", "onnx", "torch"} <= set(found) and found == sorted(n for n in found if "." not in n)


def test_files_are_run_once_in_name_order_and_underscores_are_left_alone(tmp_path: Path):
    log = tmp_path / "log"
    for name in ("b_second", "a_first"):
        (tmp_path / f"{name}.py").write_text(f"open({str(log)!r}, 'a').write({name!r} + ' ')\n")
    (tmp_path / "_helper.py").write_text("raise RuntimeError\n")
    (tmp_path / "notes.txt").write_text("not python")
    first, again = (modules("tilewright.rules", [tmp_path])[-2:] for _ in range(2))
    assert [m.__name__ for m in first] == ["tilewright.rules.a_first", "tilewright.rules.b_second"]
    assert log.read_text() == "a_first b_second " and first == again
    assert sys.modules["tilewright.rules.a_first"] is first[0]


def test_what_fails_to_import_is_not_hidden_and_may_be_mended(tmp_path: Path):
    broken = tmp_path / "mended_later.py"
    broken.write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        modules("tilewright.rules", [tmp_path])
    broken.write_text("VALUE = 1\n")
    assert modules("tilewright.rules", [tmp_path])[-1].VALUE == 1


def test_two_files_may_not_be_the_same_module(tmp_path: Path):
    (tmp_path / "canonical.py").write_text("")
    with pytest.raises(InputError, match=r"two files are module tilewright.rules.canonical: .*canonical.py\n  try: rename one"):
        modules("tilewright.rules", [tmp_path])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text("")
    with pytest.raises(InputError, match=r"two files are module tilewright.rules.same_name: .*one.*two"):
        modules("tilewright.rules", [tmp_path / "one", tmp_path / "two"])


def test_a_folder_that_is_not_there_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match=r"no such folder: .*nowhere \(searching for modules of tilewright.rules\)"):
        modules("tilewright.rules", [tmp_path / "nowhere"])


# -- reading a program


def test_a_graph_is_read_as_it_is_and_verified():
    x = input_("x", F32, (2,))
    graph = Graph("g", (x,), (x,), ("y",))
    assert load(graph) is graph
    with pytest.raises(Exception, match="1 outputs but 0 names"):
        load(Graph("g", (x,), (x,), ()))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("nowhere.onnx", f"no such file: nowhere.onnx\n  try: a file ending in {SUFFIXES}"),
        (Path("nowhere.hlo"), "no such file: nowhere.hlo"),
        ("", "the program is empty"),
        (" \n", "the program is empty"),
        ("/dev/null", "is no regular file: /dev/null"),
        ("/", "is a folder: /"),
        ("a" * 5000, r"cannot be opened \(File name too long\): a{200}…"),
        ("nul\x00byte", "no such file: nul"),
        (Path("new\nline"), "no such file: new\nline"),
        (5, "nothing here reads type int\n  try: HLO or StableHLO text, ONNX, a torch ExportedProgram or nn.Module"),
        (None, "nothing here reads type NoneType"),
        (b"bytes", "nothing here reads type bytes"),
        ("several\nlines of nothing", "nothing here reads type str"),
    ],
)
def test_what_nothing_reads_is_an_input_error(program, message):
    with pytest.raises(InputError, match=message):
        load(program)


@pytest.mark.parametrize(
    ("given", "said"), [({"batch": "3"}, "'3'"), ({"batch": -1}, "-1"), ({"input_dims": {"x": (2, "b")}}, "'b'")]
)
def test_extents_that_are_none(given, said):
    with pytest.raises(InputError, match=f"{said} is no extent"):
        LoadOptions(**given)


@pytest.mark.parametrize(
    ("given", "said"), [({"x": 3}, r"type int \(input_dims of 'x'\)\n  try: an extent for each"), ([("x", (3,))], "type list")]
)
def test_shapes_that_are_none(given, said):
    for act in (lambda: LoadOptions(given), lambda: tilewright.compile(Graph("g", (), (), ()), input_dims=given)):
        with pytest.raises(InputError, match=f"an argument of {said}"):
            act()


def test_options_are_no_dictionary():
    with pytest.raises(InputError, match=r"an argument of type dict \(options\)\n  try: tilewright.frontends.LoadOptions\("):
        load("model.onnx", {"batch": 1})


def test_a_file_that_nothing_reads(tmp_path: Path):
    file = tmp_path / "program.unknown"
    file.write_text("?")
    with pytest.raises(InputError, match=r"nothing here reads .*program.unknown\n  try: a file is told by its suffix"):
        load(file)


@pytest.mark.parametrize("suffix", [*re.findall(r"\.\w+", SUFFIXES), ".pt2"])
def test_a_suffix_in_capitals_is_the_same(suffix, tmp_path: Path):
    def readers(name: str) -> list[str]:
        file = tmp_path / name
        file.write_text("HloModule m")
        return [m.__name__ for m in discover_frontends() if m.accepts(file)]

    assert readers(f"M{suffix.upper()}") == readers(f"m{suffix}") != []


def test_a_call_is_kept_as_it_is():
    x = input_("x", F32, (2,))
    call = Node(Call("onnx", "Foo", '{"a": 1}', (TensorType(F32, (2,)), TensorType(F32, ()))), x)
    assert [i.tensor for i in items(call)] == [TensorType(F32, (2,)), TensorType(F32, ())]
    assert isinstance(call.src[0].op, Input)


def test_a_module_is_imported_once_it_is_asked_for(tmp_path):
    """The first that reads a program keeps those after it from being imported."""
    (tmp_path / "first.py").write_text("accepts = bool")
    (tmp_path / "second.py").write_text("raise RuntimeError('imported')")
    found = in_turn("tilewright.hardware.chips", (tmp_path,), "accepts")
    assert next(found).__name__ == "tilewright.hardware.chips.first"
    with pytest.raises(RuntimeError, match="imported"):
        next(found)


def test_a_package_of_candidates_that_says_whom_it_is_for_has_no_others():
    everyone = discover_candidates()
    assert {k: [c.name for c in discover_candidates(kind=k)] for k in ("cpu", "cuda")} == {
        k: [c.name for c in everyone if k in c.devices] for k in ("cpu", "cuda")
    }


def test_a_program_on_a_cpu_imports_no_kernels_for_gpus():
    code = "import sys; from tilewright.schedule.candidate import discover; discover(kind='cpu'); print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert [n for n in names if n.startswith("tilewright.candidates.triton.")] == []
    assert "tilewright.candidates.llvm.gemm.candidate" in names
