"""The code's shape: who may import whom, what the start must not cost, what must not stand in the source."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from tilewright.schedule.key import CHOOSING

SOURCE = ROOT / "src"
PACKAGE = SOURCE / "tilewright"
# From the ground up; those on one floor do not import each other.
FLOORS = (
    {"errors", "children", "processors", "sizes"},
    {
        "dtype",
        "digests",
        "discovery",
        "files",
        "cycles",
        "recent",
        "tracing",
        "deadline",
        "progress",
        "threads",
        "versions",
        "plug_ins",
    },
    {"ir", "hardware"},
    {"frontends", "rules", "schedule"},
    {"lowering"},
    {"candidates"},
    {"runtime"},
    {"report"},
    {"program"},
    {"ranged"},
    {"any_shape", "on_mesh"},
    {"compiler"},
    {"product", "m_dispatch", "racing"},
    {"linear", "jax", "dynamo", "ort", "onnx_backend"},
    {"integrations"},
    {"cli"},
)
FLOOR = {name: i for i, floor in enumerate(FLOORS) for name in floor}
# Inside `report`; those on one floor may import each other: a measurement says who did the work, an account verifies it.
REPORT_FLOORS = ({"schema", "words", "program"}, {"measure", "explain"}, {"text"}, {"html"})
OUTSIDE = {"tilewright": "tilewright/__init__.py", "__main__": "cli"}  # public names are imported when first asked for
# Packages whose modules are found by name, and what such a module defines.
DISCOVERED = {"frontends": "accepts", "candidates": "CANDIDATE", "hardware/chips": "CHIP"}
HEAVY = {"torch", "numpy", "ml_dtypes", "onnx", "onnxruntime", "jax", "jaxlib", "triton", "rich", "scipy", "plotly"}
REFUSED = {"pickle", "marshal", "shelve", "dill", "joblib", "eval()", "exec()", "os.system()", "os.popen()"}
FLAGS = {"shell", "allow_pickle", "weights_only"}
TO_ITS_CHILD = {"schedule/fork_server.py", "schedule/worker.py"}  # a process and the children it started exchange pickles


@functools.cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def known_names() -> frozenset[str]:
    return frozenset(map(module_name, modules()))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module of the product that a file imports, wherever in it, with the line."""
    known = known_names()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inner]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "tilewright")


def test_a_decision_depends_on_all_code_that_makes_a_kernel():
    """Code of a folder that a key does not digest could change, and old choices would be read back."""
    folders = {name for name in FLOOR if (PACKAGE / name).is_dir()}
    needed, found = {"candidates"}, set[str]()
    while needed - found:
        found |= needed
        files = [path for folder in found for path in (PACKAGE / folder).rglob("*.py")]
        needed |= {name.split(".")[1] for path in files for name, _ in imports(path) if "." in name} & folders
    assert found == set(CHOOSING)


def part(module: str) -> str:
    """The part of the product that a module belongs to: the second of its names."""
    pieces = module.split(".")
    name = pieces[1] if len(pieces) > 1 else pieces[0]
    return OUTSIDE.get(name, name)


def shown(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_part_has_its_floor():
    assert {part(module_name(p)) for p in modules()} == set(FLOOR) | {"tilewright/__init__.py"}


def test_nothing_imports_from_its_own_floor_or_above():
    wrong = []
    for path in modules():
        here = part(module_name(path))
        if here == "tilewright/__init__.py":
            continue
        for name, line in imports(path):
            there = part(name)
            lazily_public = there == "tilewright/__init__.py" and here == "cli"  # its version
            if there != here and not lazily_public and FLOOR.get(there, len(FLOORS)) >= FLOOR[here]:
                wrong.append(f"{shown(path, line)}: {here} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_accounts_know_nothing_of_how_they_are_shown():
    floor = {name: i for i, names in enumerate(REPORT_FLOORS) for name in names}
    wrong = []
    for path in sorted((PACKAGE / "report").rglob("*.py")):
        here = module_name(path).split(".")[2:3] or ["schema"]
        for name, line in imports(path):
            if name.startswith("tilewright.report.") and floor[name.split(".")[2]] > floor[here[0]]:
                wrong.append(f"{shown(path, line)}: {here[0]} imports {name}")
    assert not wrong, "\n".join(wrong)


def defines(path: Path, name: str) -> bool:
    """Tell whether a module gives a name a value, or a function that name, at its top level."""
    for node in parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if getattr(node, "name", None) == name or any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return True
    return False


@pytest.mark.parametrize("package", DISCOVERED)
def test_modules_found_by_name_stand_alone(package):
    """Adding one is adding a file or a folder, and taking one away is deleting it; parts of its own folder may know it."""
    wrong = []
    found = {module_name(p): p for p in (PACKAGE / package).rglob("*.py") if defines(p, DISCOVERED[package])}
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for name, line in imports(path):
            at = found.get(name)
            if at is not None and at != path and not (at.stem == "__init__" and at.parent in path.parents):
                wrong.append(f"{shown(path, line)} imports {name}")
    assert len(found) > 4
    assert not wrong, "\n".join(wrong)


def loaded_after(statement: str) -> set[str]:
    program = f"import sys, json; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    return {name.split(".")[0] for name in json.loads(result.stdout)}


@pytest.mark.parametrize("statement", ["import tilewright", "import tilewright.cli.verbs"])
def test_the_start_imports_nothing_heavy(statement):
    assert not loaded_after(statement) & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = f"""
import sys
from tilewright.cli.verbs import main
sys.argv = ["tilewright", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
print("loaded:", *sorted({{m.split(".")[0] for m in sys.modules}}))
"""
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert not set(result.stdout.rsplit("loaded:")[-1].split()) & (HEAVY - {"rich"})


def test_the_public_names_are_there():
    import tilewright

    for name in tilewright.__all__:
        assert getattr(tilewright, name) is not None
    with pytest.raises(AttributeError, match="module 'tilewright' has no attribute 'nothing'"):
        _ = tilewright.nothing


def test_optional_packages_are_imported_inside_functions():
    """Packages of an extra must not be needed to import anything else: neither by a module nor by what it imports at once."""
    optional = {"onnx", "jax", "jaxlib", "triton", "plotly", "perfetto", "pynvml", "transformers", "onnxruntime", "onnxscript"}
    at_once = {module_name(p): top_level_imports(p) for p in modules()}
    own = [p.parent for p in modules() if p.stem == "__init__" and any(defines(p, name) for name in DISCOVERED.values())]
    of_onnx = {"onnx_backend"}  # subclasses of onnx's own
    named = [p for p in modules() if not p.stem.startswith("_") and p.stem not in of_onnx and p.parent not in own]
    reached, todo = set(), [module_name(p) for p in named]
    while todo:
        name = todo.pop()
        if name in at_once and name not in reached:
            reached.add(name)
            todo += at_once[name]
    wrong = [f"{m} imports {n}" for m in sorted(reached) for n in at_once[m] if n.split(".")[0] in optional]
    assert not wrong, "\n".join(wrong)


def top_level_imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
    return found


# Words with which no docstring begins: what follows them is no sentence by itself.
BARE = re.compile(
    r"(what|how|where|whether|which|who|whose|why|when|of|as|at|by|for|from|in|on|to|with|without|beside|behind|between|under|over"
    r"|after|before|into|through|within|than|if)\b",
    re.IGNORECASE,
)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for path in tracked():
        if path.suffix != ".py" or not re.search(rf'"""{BARE.pattern}', path.read_text("utf-8"), re.IGNORECASE):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if BARE.match(text):
                    wrong.append(f"{shown(path, node.body[0].lineno)}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


# Decorators that enter a function in no table. One that is in a table raises what the table's readers catch.
PLAIN = {"property", "staticmethod", "classmethod", "contextmanager", "cache", "cached_property", "lru_cache", "override"}


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
            if names <= PLAIN:
                yield node


def errors(body: list[ast.stmt]) -> Iterator[int]:
    """The lines at which statements raise an error of their own that they do not catch."""
    for node in body:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.lineno
        elif isinstance(node, ast.Try):
            uncaught = [] if node.handlers else [node.body]
            for part in (*uncaught, node.orelse, node.finalbody, *(h.body for h in node.handlers)):
                yield from errors(part)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from errors(case.body)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for part in ("body", "orelse"):
                yield from errors(getattr(node, part, []))


def test_a_public_function_that_raises_says_so():
    """One without a docstring has that of what it overrides."""
    wrong = []
    for path in modules():
        for function in public_functions(parsed(path).body):
            text = ast.get_docstring(function)
            if text is not None and "Raises:" not in text:
                wrong += [shown(path, line) for line in errors(function.body)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("if x:\n  raise E(x)", 1),
        ("for i in x:\n  while i:\n    raise E()\n  else:\n    raise E()", 2),
        ("try:\n  raise E()\nexcept E:\n  pass", 0),
        ("try:\n  pass\nexcept E:\n  raise F()", 1),
        ("try:\n  raise E()\nfinally:\n  pass", 1),
        ("with x:\n  raise", 0),
        ("match x:\n  case 1:\n    raise E()", 1),
        ("def inner():\n  raise E()", 0),
    ],
)
def test_errors_are_found(text, count):
    assert len([*errors(ast.parse(text).body)]) == count


def test_no_module_is_called_after_nothing():
    empty = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [str(p) for p in modules() if p.stem.strip("_") in empty]


def test_nothing_executes_or_unpickles_its_input():
    wrong = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [f"{node.func.id}()"]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = [ast.unparse(node.func) + "()"] if node.func.attr in {"system", "popen", "load"} else []
                flags = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in FLAGS}
                if flags.get("shell") == "True" or flags.get("allow_pickle") == "True" or flags.get("weights_only") == "False":
                    wrong.append(f"{shown(path, node.lineno)}: {ast.unparse(node)[:80]}")
                if names == ["torch.load()"] and flags.get("weights_only") != "True":
                    wrong.append(f"{shown(path, node.lineno)}: torch.load without weights_only=True")
            refused = REFUSED - {"pickle"} if path.relative_to(PACKAGE).as_posix() in TO_ITS_CHILD else REFUSED
            wrong += [f"{shown(path, node.lineno)}: {n}" for n in names if n in refused]  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def tracked() -> list[Path]:
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_repository_speaks_of_the_product_alone():
    unfinished = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
    machines = "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w", r"C:\\\\Us" + "ers"])
    names = "|".join(["HELP" + r"ERS\.md", "Cla" + "ude", "Chat" + "GPT", "Copi" + "lot"])
    forbidden = re.compile(rf"\b(?:{unfinished}|{names})\b|(?:{machines})")
    wrong = []
    for path in tracked():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := forbidden.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found[0]}")
    assert not wrong, "\n".join(wrong)


def test_every_error_raised_on_purpose_is_one_of_ours():
    """The command line shows these in two lines; anything else that escapes is a bug."""
    ours = set(re.findall(r"^class (\w+)\(", (PACKAGE / "errors.py").read_text(), re.M)) - {"TilewrightError"}
    protocol = {"AttributeError", "TypeError", "NotImplementedError", "AssertionError", "KeyError", "ValueError"}
    counted: dict[str, int] = {}
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                counted[node.exc.func.id] = counted.get(node.exc.func.id, 0) + 1
    assert {"Exception", "RuntimeError", "BaseException", "TilewrightError"} & set(counted) == set()
    assert sum(counted[n] for n in counted if n in ours) > 10 * sum(counted[n] for n in counted if n in protocol)
