"""Candidates, rules and chips of other packages: found, verified and explained like ours; broken ones left out by name.

Plug-ins are looked for once a process, so each test runs programs in processes of their own.
"""

import importlib.util
import re
import textwrap

import pytest
from installed import install, run
from paths import ROOT

EXAMPLE = (ROOT / "examples/plug_in/example_gemm.py").read_text()
CANDIDATES, RULES, CHIPS = "tilewright.candidates", "tilewright.rules", "tilewright.chips"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# A torch product that is asked first; `{before}` runs before each.
PRODUCT = """
'''A product by torch, as another package has it.'''
import torch
from tilewright.candidates.library import kernel_of_call
from tilewright.schedule.candidate import CPU, GEMM, Candidate, FixedPlan, Refusal, Schedule

def product(a, b):
    {before}
    return a @ b {after}

def build(problem, schedule):
    return kernel_of_call("{name}", schedule, problem, product)

def plan(problem, target):
    return FixedPlan([Schedule.of(way=i) for i in (0, 1)], lambda schedule: build(problem, schedule))

CANDIDATE = Candidate("{name}", GEMM, CPU, 0, plan)
"""
COMPILED = """
import torch, tilewright
from tilewright.ir.notation import parse
p = tilewright.compile(parse("f32[7,13] @ f32[13,5] + bias, relu"), budget_s={budget_s})
a, b, bias = torch.randn(7, 13), torch.randn(13, 5), torch.randn(5)
torch.testing.assert_close(p(a, b, bias), torch.relu(a @ b + bias), rtol=1e-4, atol=1e-5)
print("chosen:", p.steps[0].decision.kernel.candidate)
"""


def product(name="torch_product", before="pass", after=""):
    return PRODUCT.format(name=name, before=before, after=after)


def one_product(folder, version="0.1", **planted):
    folder.mkdir(exist_ok=True)
    install(folder, "torch-product", {"torch_product.py": product(**planted)}, {CANDIDATES: {"it": "torch_product"}}, version)
    return folder


@needs_triton
def test_a_triton_gemm_of_another_package_is_explained_and_a_planted_mistake_is_refused(tmp_path):
    mistake = EXAMPLE.replace("range(0, K, TILE)", "range(0, K - 1, TILE)").replace("example_gemm", "planted_gemm")
    assert mistake.count("planted_gemm") == 1 and "K - 1" in mistake
    files = {"example_gemm.py": EXAMPLE, "planted_gemm.py": mistake}
    install(tmp_path, "example-gemm", files, {CANDIDATES: {"sound": "example_gemm", "planted": "planted_gemm:CANDIDATE"}})
    program = """
import tilewright
from tilewright.ir.notation import parse
print(tilewright.compile(parse("f32[37,65] @ f32[65,29] + bias, relu"), budget_s=30).explain(everything=True))
"""
    out, _ = run(program, tmp_path, TRITON_INTERPRET="1", TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path), COLUMNS="200")
    said = " ".join(out.split())
    assert re.search(r"example_gemm \(tile=64\): [\d,.]+ µs", said)
    assert re.search(r"planted_gemm \(tile=64\).{,30}: the result is wrong: \d+ of 1073 elements differ", said)
    assert "refused that gave other results than the reference; report this to example-gemm (planted_gemm (tile=64)" in said
    assert "A plain Triton gemm, one block of the result at a time, of the package example-gemm" in said


@needs_triton
def test_the_example_compiles_for_hopper_without_a_device():
    """A process of its own compiles it: in this one, the interpreter of other tests takes the place of the compiler."""
    program = """
import sys
sys.path.insert(0, "examples/plug_in")
import example_gemm, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
names = example_gemm.gemm.arg_names
signature = {n: "*fp16" if n in "ab" else "*fp32" if n == "c" else "constexpr" if n in ("K", "TILE") else "i32" for n in names}
source = ASTSource(example_gemm.gemm, signature, {"K": 65, "TILE": 64})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print("wgmma" in kernel.asm["ptx"], len(kernel.asm["cubin"]) > 1000)
"""
    out, _ = run(program, ROOT, TRITON_INTERPRET="0")
    assert out.split() == ["True", "True"]


def test_one_is_chosen_where_it_comes_first_and_not_where_it_is_switched_off(tmp_path):
    one_product(tmp_path)
    program = COMPILED.format(budget_s=0)
    kept = {"TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    assert run(program, tmp_path, **kept)[0] == "chosen: torch_product\n"
    assert run(program, tmp_path, TILEWRIGHT_PLUG_INS="0", **kept)[0] == "chosen: llvm\n"
    assert run(program, **kept)[0] == "chosen: llvm\n"


def test_kept_choices_hold_for_the_plug_ins_that_were_there(tmp_path):
    """Choices made without one are not read back with it, nor the other way round, nor after its code or version changed."""
    program = COMPILED.format(budget_s=0) + "print(p.steps[0].decision.rejected[0].why if p.steps[0].decision.rejected else '')"
    kept, folder = {"TILEWRIGHT_CACHE": str(tmp_path / "cache")}, tmp_path / "site"
    (tmp_path / "cache").mkdir()
    folder.mkdir()
    assert "chosen: llvm" in run(program, folder, **kept)[0]
    one_product(folder)
    assert "chosen: torch_product" in run(program, folder, **kept)[0]
    one_product(folder, after="+ 1")  # a mistake, which a choice that is read back would hide
    out, _ = run(program, folder, **kept)
    assert "chosen: llvm" in out
    one_product(folder)  # as it was: the choice that was made with it holds again
    assert "chosen: torch_product" in run(program, folder, **kept)[0]
    for file in folder.rglob("entry_points.txt"):
        file.unlink()
    assert "chosen: llvm" in run(program, folder, **kept)[0]


def test_the_key_names_packages_by_version_and_by_all_that_they_rest_on(tmp_path):
    """Not imported for that: the module here would end the process."""
    program = "from tilewright.plug_ins import packages; print(packages())"
    points = {CANDIDATES: {"a": "deep.inside"}, RULES: {"b": "deep.rules"}}
    files = {"deep/__init__.py": "", "deep/inside.py": "import os; os._exit(3)", "deep/data.json": "{}"}

    def said(**more):
        info = install(tmp_path, "deep", {**files, **more.get("files", {})}, points, more.get("version", "1.0"))
        if "needs" in more:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deep\nVersion: 1.0\nRequires-Dist: {more['needs']}\n")
        out, _ = run(program, tmp_path)
        (info / "entry_points.txt").unlink()
        return out.strip()

    first = said()
    assert re.fullmatch(r"deep 1\.0 [0-9a-f]{12}", first) and said() == first
    changed = [
        said(files={"deep/data.json": "[]"}),
        said(files={"deep/more.py": ""}),
        said(version="1.1"),
        said(needs="torch>=2"),
    ]
    assert len({first, *changed}) == 5
    assert run(program, tmp_path)[0].strip() == ""


BROKEN = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "empty": ("", "module empty defines no CANDIDATE"),
    "number": ("CANDIDATE = 3", "number is a int, and no Candidate"),
    "as_reference": ("PRODUCT: 0, plan)| 90, plan)", "a preference of 90, where 0 to 89 is due"),
    "nameless": ("PRODUCT:nameless|no name", "'no name' is no name for a candidate"),
    "llvm_again": ("PRODUCT:llvm_again|llvm", "tilewright has a candidate llvm"),
    "nowhere": ("PRODUCT:GEMM, CPU|GEMM, frozenset({'tpu'})", "its kinds of problem or of device are none of ours"),
    "planless": ("PRODUCT:0, plan)|0, 'plan')", "its plan is a str, and no function"),
    "failing": ("PRODUCT:    return Fixed|    raise KeyError('x')\n    return Fixed", "candidate failing failed to consider"),
    "silent": ("PRODUCT:    return Fixed|    return\n    return Fixed", "gave a NoneType, and no plan or refusal"),
}


def test_a_broken_candidate_is_left_out_with_its_package_and_error_named(tmp_path):
    files, points = {}, {"missing": "not_there", "unfound": "empty:NOTHING"}
    for name, (text, _) in BROKEN.items():
        if text.startswith("PRODUCT:"):
            what, to = text.removeprefix("PRODUCT:").split("|")
            text = product(name).replace(what.strip(), to.strip()) if name != "nameless" else product("no name")
            assert text != product(name)
        files[f"{name}.py"], points[name] = text, name
    install(tmp_path, "broken-things", files, {CANDIDATES: points})
    out, err = run(COMPILED.format(budget_s=0.2), tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    assert re.search("chosen: (llvm|split|aten)", out)
    for name, (_, why) in BROKEN.items():
        assert re.search(rf"plug-in broken-things 0\.1( \({CANDIDATES}: {name}\) is left out)?: .*{re.escape(why)}", err), name
    assert "missing) is left out: ModuleNotFoundError: No module named 'not_there'" in err
    assert "unfound) is left out: AttributeError" in err


PLAN = """class Odd:
        def schedules(self): {schedules}
        def build(self, schedule): {build}
        def work(self, schedule): raise TypeError('no work')
        def leading(self): raise TypeError('no leading')
        def pieces(self): raise TypeError('no pieces')
        def compile(self, schedule): raise TypeError('no code')
    return Odd()"""
ODD = {
    "without_points": ("raise KeyError('no points')", "pass"),
    "ending_early": ("yield Schedule.of(way=0); raise KeyError('no more')", "return build(problem, schedule)"),
    "building_nothing": ("return [Schedule.of(way=0)]", "return None"),
}


def test_a_plan_that_breaks_later_stops_nothing(tmp_path):
    files = {}
    for name, (schedules, build) in ODD.items():
        text = product(name).replace("GEMM, CPU, 0", "GEMM, CPU, 60")  # behind ours
        files[f"{name}.py"] = re.sub("return FixedPlan.*", PLAN.format(schedules=schedules, build=build), text)
    install(tmp_path, "odd-plans", files, {CANDIDATES: {name: name for name in ODD}})
    program = (
        COMPILED.format(budget_s=2)
        + """
print([str(r) + ": " + r.why for r in p.steps[0].decision.rejected], len(str(p.explain())))
from tilewright.frontends import LoadOptions
module = torch.nn.Linear(16, 24).eval()
load = lambda rows: tilewright.load(module, LoadOptions(example_inputs=(torch.empty(rows, 16),)))
p, x = tilewright.compile_rows(load, last=4, budget_s=0.2), torch.randn(3, 16)
torch.testing.assert_close(p(x), module(x), rtol=1e-4, atol=1e-5)
"""
    )
    out, err = run(program, tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    assert re.match("chosen: (llvm|split|aten)", out)
    assert "building_nothing (way=0): failed to build: it built a NoneType, and no kernel" in out
    for said in (
        "without_points failed in schedules: KeyError: 'no points'",
        "ending_early failed in work: TypeError: no work",
    ):
        assert f"plug-in odd-plans 0.1: candidate {said}" in err


def test_one_that_is_built_in_a_worker_alone_is_not_chosen(tmp_path):
    text = product("only_there").replace(
        "def build(problem, schedule):",
        "def build(problem, schedule):\n    assert 'tilewright.compiler' not in sys.modules, 'not here'",
    )
    install(tmp_path, "only-there", {"only_there.py": f"import sys\n{text}"}, {CANDIDATES: {"it": "only_there"}})
    program = """
import tilewright.compiler
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import discover
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search
problem = problem_of(parse("f32[7,13] @ f32[13,5]").outputs[0])
for others in (["reference"], ["llvm", "reference"]):
    found = [c for c in discover() if c.name in ("only_there", *others)]
    d = search(problem, detect("cpu"), budget_s=0.2, candidates=found)
    print(d.kernel.candidate, [r.why for r in d.rejected if r.candidate == "only_there" and r.kind == "unbuilt"])
"""
    out, _ = run(program, tmp_path, TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path))
    first, second = out.splitlines()
    assert first.startswith("reference ['failed to build in this process: not here'") and second.startswith("llvm")


def test_metadata_that_cannot_be_read_stops_nothing(tmp_path):
    one_product(tmp_path)
    for package, text in (("nameless", None), ("odd", "Version: 1\n\n")):
        metadata = install(tmp_path, package, {}, {CANDIDATES: {package: "torch_product", "!!": "!"}}) / "METADATA"
        metadata.unlink() if text is None else metadata.write_text(text)
    out, err = run(COMPILED.format(budget_s=0), tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    assert out == "chosen: torch_product\n"
    assert len(re.findall("left out: .*", err)) == 4, err


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("import os; os._exit(5)", "crashed: its process ended with status 5"),
        ("while True: pass", r"no answer in \d+ s: killed"),
    ],
)
def test_one_that_does_not_come_back_costs_itself_alone(tmp_path, before, why):
    one_product(tmp_path, before=before)
    program = "from tilewright.schedule import worker\nworker.LIMIT_S = 1.0\n" + COMPILED.format(budget_s=8)
    program += "print(*p.steps[0].decision.rejected)\nprint(p.explain())"
    out, _ = run(program, tmp_path, TILEWRIGHT_CACHE=str(tmp_path), TILEWRIGHT_WORKER="1", COLUMNS="200")
    assert "chosen: llvm" in out or "chosen: aten" in out
    assert re.search(rf"torch_product \(way=0\): {why}", " ".join(out.split()))


RULE = """
'''Rules of another package.'''
from dataclasses import replace
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Map, Gemm
from tilewright.ir.pattern import Match, Pat, graph_pass, rule
from tilewright.ir.build import convert, map_
from tilewright.dtype import F64

@rule(Pat(Map, where=lambda n: n.op.fn == "relu"), stage="{stage}")
def {name}(m: Match) -> Node | None:
    '''relu(relu(x)) -> relu(x). Exact: yes.'''
    {body}
"""


def rules_of(*bodies):
    return {f"{name}.py": RULE.format(name=name, stage=stage, body=body) for name, stage, body in bodies}


def test_a_rule_of_another_package_is_applied_and_explained(tmp_path):
    body = "return m.node.src[0] if m.node.src[0].op == m.node.op else None"
    install(
        tmp_path,
        "more-rules",
        rules_of(("drop_second_relu_of_mine", "accumulator", body)),
        {RULES: {"r": "drop_second_relu_of_mine"}},
    )
    program = """
import torch, tilewright
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.ReLU())
p = tilewright.compile(module, example_inputs=(torch.randn(2, 8),), budget_s=0)
print([s.rule for s in p.trace.steps])
"""
    out, err = run(program, tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    assert "drop_second_relu_of_mine" in out and "plug-in" not in err


EXPLAINED = """
import sys
from tilewright.cli.verbs import main
from tilewright.runtime import programs
programs.LEAST_BYTES = 0
sys.argv = {words}
main()
"""
BEHIND_PRODUCTS = """HloModule behind
ENTRY main {
  a = s8[8,16] parameter(0)
  b = s8[16,16] parameter(1)
  first = s32[8,16] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  narrow = s8[8,16] convert(first)
  second = s32[8,16] dot(narrow, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wide = f32[8,16] convert(second)
  other = s32[8,16] negate(second)
  ROOT all = (f32[8,16], s32[8,16]) tuple(wide, other)
}
"""


def how_to_rule():
    """The rule of docs/how-to/add-a-kernel-or-rule.md, as a reader copies it into a module."""
    page = (ROOT / "docs/how-to/add-a-kernel-or-rule.md").read_text()
    code, _ = page.partition("## A rule")[2].partition("```python\n")[2].split("trace = Trace()")
    return code


def test_the_rule_of_the_how_to_keeps_casts_out_of_products_with_a_warm_cache(tmp_path):
    program = tmp_path / "behind.hlo"
    program.write_text(BEHIND_PRODUCTS)

    def explained(*words):
        code = EXPLAINED.format(words=["tilewright", "explain", str(program), "--budget", "0", *words])
        return run(code, tmp_path, TILEWRIGHT_CACHE=str(tmp_path), COLUMNS="300")[0]

    def sentences(text):
        return set(re.findall(r"convert (\w+)[^:\n]*: keep casts of products: an example that changes nothing", text))

    before = explained()
    assert re.search("Folded +convert to s8", before) and "Not folded" not in before
    assert len([*tmp_path.glob("programs/*.twp")]) == 1  # it is read back where the key is the same
    info = install(tmp_path, "my-rules", {"my_rules.py": how_to_rule()}, {RULES: {"mine": "my_rules"}})
    for warm in (explained(), explained()):
        assert "Not folded" in warm and sentences(warm) == {"narrow", "wide"}, warm
        assert not re.search("Folded +convert", warm)
    assert len([*tmp_path.glob("programs/*.twp")]) == 2
    assert "keep casts of products: an example that changes nothing" in explained("--json")
    (tmp_path / "my_rules.py").write_text(how_to_rule().replace("changes nothing", "says more"))
    assert "keep casts of products: an example that says more" in explained()
    (info / "entry_points.txt").unlink()
    again = explained()
    assert re.search("Folded +convert to s8", again) and "keep casts" not in again


def test_what_a_rule_of_another_package_refuses_is_the_same_program(tmp_path):
    install(tmp_path, "my-rules", {"my_rules.py": how_to_rule()}, {RULES: {"mine": "my_rules"}})
    program = f"""
import torch, tilewright
graph = tilewright.load({BEHIND_PRODUCTS!r})
p = tilewright.compile(graph, budget_s=0)
a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((8, 16), (16, 16)))
second = (a.int() @ b.int()).to(torch.int8).int() @ b.int()
wide, other = p(a, b)
assert torch.equal(wide, second.float()) and torch.equal(other, -second)
print(sorted(n.op.name for n in p.graph.nodes()), [(m.rule, m.held) for m in p.trace.near_misses if m.held])
"""
    out, err = run(program, tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    assert "'convert', 'convert'" in out and "'call'" not in out and not err
    assert out.count("('keep_casts_of_products', True)") == 2


def test_a_broken_rule_is_left_out_with_its_package_and_error_named(tmp_path):
    files = rules_of(
        ("rule_that_raises", "accumulator", "raise KeyError('no such thing')"),
        ("rule_that_changes_the_type", "accumulator", "return convert(m.node, F64)"),
        ("rule_without_an_end", "accumulator", "return map_('relu', m.node)"),
        ("rule_of_no_stage", "sometime", "return None"),
        ("absorb_tail_into_store", "epilogue", "return None"),
    )
    files["a_pass.py"] = textwrap.dedent("""
        from tilewright.dtype import F64
        from tilewright.ir.build import convert
        from tilewright.ir.pattern import graph_pass
        @graph_pass(stage="tails")
        def pass_that_raises(graph, trace):
            raise ValueError("a pass")
        @graph_pass(stage="tails")
        def pass_that_widens(graph, trace):
            return graph.with_outputs([convert(n, F64) for n in graph.outputs])
    """)
    own = (ROOT / "src/tilewright/rules/epilogue.py").read_text()
    taken = re.search(r"^def (\w+)\(m: Match", own, re.MULTILINE)[1]
    files["taken.py"] = files.pop("absorb_tail_into_store.py").replace("absorb_tail_into_store", taken)
    install(tmp_path, "bad-rules", files, {RULES: {name.removesuffix(".py"): name.removesuffix(".py") for name in files}})
    program = """
import torch, tilewright
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
x = torch.randn(2, 8)
for _ in range(2):
    p = tilewright.compile(m, example_inputs=(x,), budget_s=0)
    torch.testing.assert_close(p(x), m(x))
print([s.rule for s in p.trace.steps])
"""
    out, err = run(program, tmp_path, TILEWRIGHT_CACHE=str(tmp_path))
    for said in (
        "plug-in bad-rules: the rule rule_that_raises is left out: rule rule_that_raises failed: KeyError: 'no such thing'",
        "plug-in bad-rules: the rule rule_that_changes_the_type is left out: rule rule_that_changes_the_type changes the type",
        "plug-in bad-rules: the rule rule_without_an_end is left out: rules do not converge: rule_without_an_end",
        "plug-in bad-rules: the rule pass_that_raises is left out: it failed: ValueError: a pass",
        "plug-in bad-rules: the rule pass_that_widens is left out: it failed: it changes the types of inputs or results",
        "plug-in bad-rules: the rule rule_of_no_stage never runs: there is no stage 'sometime'",
        f"plug-in bad-rules 0.1 (tilewright.rules: taken) is left out: two rules are named {taken}",
    ):
        assert err.count(said) == 1, f"{said}\n{err}"
    assert "rule_" not in out


def test_a_chip_of_another_package_is_matched_and_a_broken_one_left_out(tmp_path):
    text = """
from tilewright.hardware.target import Chip, MatrixUnit
UNITS = (MatrixUnit("f16", "f32", "mma", 4096, "a data sheet"),)
CHIP = Chip("{name}", "{kind}", frozenset({{"cuda", "sm_990"}}), UNITS, named="{named}")
"""
    files = {
        "new_chip.py": text.format(name="new_chip", kind="cuda", named="Newest"),
        "ours.py": text.format(name="x86_64", kind="cuda", named=""),
        "other.py": text.format(name="other", kind="tpu", named=""),
        "pattern.py": text.format(name="pattern", kind="cuda", named="("),
    }
    install(tmp_path, "new-chips", files, {CHIPS: {n.removesuffix(".py"): n.removesuffix(".py") for n in files}})
    program = """
from tilewright.hardware.detect import detect, match
print(match("cuda", frozenset({"cuda", "sm_990"}), name="Newest 1").name, detect("cpu").chip.kind)
"""
    out, err = run(program, tmp_path)
    assert out.split() == ["new_chip", "cpu"]
    for said in (
        "ours) is left out: there is a chip x86_64 already",
        "other) is left out: its kind is neither cpu nor cuda",
        "pattern) is left out: the pattern '(' of names that it has is none",
    ):
        assert f"plug-in new-chips 0.1 ({CHIPS}: {said}" in err


SAVE = COMPILED.format(budget_s=0) + "p.save('program.twp')\ntorch.save([a, b, bias, p(a, b, bias)], 'tensors.pt')"
LOAD = """
import os, torch, tilewright
p = tilewright.load_program("program.twp", budget_s=0)
*inputs, wanted = torch.load("tensors.pt", weights_only=True)
torch.testing.assert_close(p(*inputs), wanted, rtol=1e-4, atol=1e-5)
print("runs:", p.steps[0].decision.kernel.candidate)
"""


def test_a_saved_program_runs_a_plug_ins_kernel_only_where_it_is_installed_as_it_was(tmp_path):
    site = one_product(tmp_path / "site", before="open('it_ran', 'w').close()")
    here = {"TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    at = f"import os; os.chdir({str(tmp_path)!r})\n"
    ran = tmp_path / "it_ran"
    assert run(at + SAVE, site, **here)[0] == "chosen: torch_product\n"
    ran.unlink()
    out, err = run(at + LOAD, site, **here)
    assert out == "runs: torch_product\n" and ran.exists() and "compiled again" not in err
    ran.unlink()
    out, err = run(at + LOAD, **here)
    assert out == "runs: llvm\n" and not ran.exists()
    assert re.search(
        r"program.twp is compiled again from its graph: its kernel torch_product is of the package "
        r"torch-product 0.1 [0-9a-f]{12}, which does not plug in here",
        err,
    )
    one_product(site, before="open('it_ran', 'w').close(); 1")
    out, err = run(at + LOAD, site, **here)
    assert "its kernel torch_product is of torch-product 0.1" in err and "is installed" in err
    assert out == "runs: torch_product\n"  # compiled again, of which it is a part

    impostor = one_product(tmp_path / "impostor")
    out, err = run(at + LOAD, impostor, **here)
    assert "is compiled again from its graph" in err
