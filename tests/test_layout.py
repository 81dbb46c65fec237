"""The floors: who may import whom, and what the tree promises about itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tilewright"
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = (
    {"errors", "dtype", "discovery"},
    {"ir", "hardware"},
    {"frontends", "rules", "schedule"},
    {"candidates"},
    {"runtime", "report"},
    {"compiler"},
    {"product"},
    {"cli", "_cli_errors", "_cli_options", "__main__", "__init__"},
)
# Within a floor: the basics are one another's, and the command line is several files.
TOGETHER = ({"errors", "dtype", "discovery"}, {"cli", "_cli_errors", "_cli_options", "__main__", "__init__"})
HEAVY = ("torch", "numpy", "onnx", "onnxruntime", "jax", "jaxlib", "rich", "triton", "transformers", "msgspec")


def part_of(module: str) -> str:
    names = module.split(".")
    own = len(names) == 1 or names[1] == "__version__"
    return "__init__" if own else names[1]


def floor_of(part: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if part in floor)


def imported(file: Path) -> list[tuple[str, int]]:
    """Modules of the package that a file imports, anywhere in it, for types only or not."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            found.append((node.module, node.lineno))
            if node.module == "tilewright":
                found += [(f"tilewright.{a.name}", node.lineno) for a in node.names]
    return [(m, line) for m, line in found if m == "tilewright" or m.startswith("tilewright.")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_file_imports_only_lower_floors_and_its_own_part(file: Path) -> None:
    own = part_of("tilewright." + ".".join(file.relative_to(SOURCE).with_suffix("").parts))
    if file == SOURCE / "__init__.py":
        return  # names the public functions, imported when first used
    for module, line in imported(file):
        other = part_of(module)
        if other == own or module == "tilewright" or any(own in t and other in t for t in TOGETHER):
            continue
        assert floor_of(other) < floor_of(own), f"{file.relative_to(ROOT)}:{line} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_front_ends_do_not_import_each_other(file: Path) -> None:
    """A front end's own parts start with an underscore and its name; StableHLO is what HLO is read as."""
    if file.parent != SOURCE / "frontends" or file.stem == "__init__":
        return
    family = {"hlo": "stablehlo", "jaxlib": "stablehlo"}

    def family_of(stem: str) -> str:
        name = stem.lstrip("_").split("_")[0]
        return family.get(name, name)

    for module, line in imported(file):
        names = module.split(".")
        if names[:2] == ["tilewright", "frontends"] and len(names) > 2:
            assert family_of(names[2]) == family_of(file.stem), f"{file.name}:{line} imports {module}"


def test_every_part_stands_on_a_floor() -> None:
    parts = {p.stem if p.is_file() else p.name for p in SOURCE.iterdir() if p.name not in ("__pycache__", "py.typed")}
    assert parts == set().union(*FLOORS) & parts, parts - set().union(*FLOORS)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_files_stay_small_and_safe(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 400, "look for the second idea in it"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {n.split(".")[0] for n in names} & {"pickle", "marshal", "shelve"}, f"{file}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{file}:{node.lineno}"


def test_no_file_names_a_machine_or_holds_unfinished_work() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = tracked.stdout.split() if tracked.returncode == 0 else [str(f.relative_to(ROOT)) for f in FILES]
    own = Path(__file__).name
    for name in files:
        file = ROOT / name
        if file.suffix not in (".py", ".md", ".toml", ".yml", ".txt") or file.name == own or not file.exists():
            continue
        text = file.read_text()
        assert not re.search(r"(?<![\w.])/(work|root|home)/[a-z]", text), f"{name} holds a path of a machine"
        if name.startswith("src/"):
            assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), f"{name} says it is unfinished"


@pytest.mark.parametrize("command", [["-c", "import tilewright"], ["-m", "tilewright", "--help"]])
def test_nothing_heavy_is_imported_at_start(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    loaded = {
        line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")
    }
    assert "tilewright" in loaded
    assert not loaded & set(HEAVY)
