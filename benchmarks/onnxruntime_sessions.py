"""Runs onnxruntime's own Python session tests with `tilewright.ort`'s classes in place of onnxruntime's, and lists what holds.

    python benchmarks/onnxruntime_sessions.py <onnxruntime>/onnxruntime/test [file.py …] [name of a test …]

The folder is that of a checkout of onnxruntime: `python/` holds the tests, `testdata/` their models. Each test runs twice, in a
process for each side: as it is, and with our classes. One that fails as it is says nothing, and neither does one that makes no
session, value or binding here; both are counted apart.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

FILES = (
    "onnxruntime_test_python.py",
    "onnxruntime_test_python_iobinding.py",
    "onnxruntime_test_python_mlops.py",
    "onnxruntime_test_python_nested_control_flow_op.py",
    "onnxruntime_test_python_sparse_matmul.py",
    "onnxruntime_test_python_symlink_data.py",
    "onnxruntime_test_python_bfloat16.py",
)
HELD, FAILED, SKIPPED = "holds", "does not hold", "skipped"


class _Outcomes(unittest.TestResult):
    """The outcome of each test, and why it did not hold."""

    def __init__(self, used: list[str]) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}
        self._used = used

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._used.clear()
        self._note(test, HELD, "")

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        self.found[_name(test)]["used"] = bool(self._used)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        if _name(test) in self.found:  # else a part of a test, for a device that there is not
            self._note(test, SKIPPED, reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._note(test, FAILED, _sentence(err[1]))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._note(test, FAILED, _sentence(err[1]))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            self._note(test, FAILED, _sentence(err[1]))

    def _note(self, test: unittest.TestCase, status: str, why: str) -> None:
        self.found[_name(test)] = {"status": status, "why": why}


def _name(test: unittest.TestCase) -> str:
    return test.id().removeprefix("onnxruntime_test_")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _ours(used: list[str]) -> None:
    """Put our classes in onnxruntime's place."""
    import onnxruntime

    import tilewright.ort as ort
    from tilewright.ort import binding, session, values

    stood: dict[str, Any] = {}

    def counted(kind: type, **more: Any) -> type:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            used.append(kind.__name__)
            kind.__init__(self, *args, **{**more, **kwargs})

        return type(kind.__name__, (kind,), {"__init__": init})

    for module in (values, binding, session, ort):
        for name in ("OrtValue", "IOBinding"):
            if hasattr(module, name):
                setattr(module, name, stood.setdefault(name, counted(getattr(ort, name))))
    stood["InferenceSession"] = counted(ort.InferenceSession, budget_s=0, cache=False)
    for name in ort.__all__:
        setattr(onnxruntime, name, stood.get(name, getattr(ort, name)))


def _older_onnx() -> None:
    """Give tests of other releases the onnx that they were written for: `onnx.mapping`, and no format and no opset that the
    installed onnxruntime does not read yet."""
    import onnx
    import onnxruntime
    from onnx import helper

    codes = [c for c in onnx.TensorProto.DataType.values() if c]
    rows = {c: types.SimpleNamespace(np_dtype=helper.tensor_dtype_to_np_dtype(c)) for c in codes}
    mapping: Any = types.ModuleType("onnx.mapping")
    mapping.TENSOR_TYPE_MAP = rows
    mapping.NP_TYPE_TO_TENSOR_TYPE = {r.np_dtype: c for c, r in rows.items()}
    sys.modules.setdefault("onnx.mapping", mapping)

    def reads(opset: int) -> bool:
        x, y = (helper.make_tensor_value_info(n, 1, [1]) for n in "xy")
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:
            return False
        return True

    newest = next(v for v in range(onnx.defs.onnx_opset_version(), 0, -1) if reads(v))
    onnx.defs.onnx_opset_version = lambda: newest
    helper.OP_SET_ID_VERSION_MAP = {
        k: v for k, v in helper.OP_SET_ID_VERSION_MAP.items() if k[0] != "ai.onnx" or k[1] <= newest
    }
    onnx.IR_VERSION = min(onnx.IR_VERSION, 11)


def run_here(folder: Path, ours: bool, only: list[str]) -> dict[str, dict[str, Any]]:
    """Outcomes of all tests in this process."""
    used: list[str] = []
    sys.path.insert(0, str(folder))
    _older_onnx()
    if ours:
        _ours(used)
    outcomes = _Outcomes(used)
    files = [o for o in only if o.endswith(".py")] or [f for f in FILES if (folder / f).exists()]
    only = [o for o in only if o not in files]
    for file in files:
        for case in _cases(unittest.defaultTestLoader.loadTestsFromName(file.removesuffix(".py"))):
            if not only or any(o in case.id() for o in only):
                print(case.id(), file=sys.stderr, flush=True)
                case.run(outcomes)
    return outcomes.found


def _cases(suite: Any) -> list[unittest.TestCase]:
    return [c for s in suite for c in _cases(s)] if isinstance(suite, unittest.TestSuite) else [suite]


def run(test_folder: Path, ours: bool, only: list[str]) -> dict[str, dict[str, Any]]:
    """Outcomes of all tests in a process of its own, which writes into a copy of the models' folder."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(test_folder / "testdata", Path(scratch, "testdata"))
        out = Path(scratch, "outcomes.json")
        side = "ours" if ours else "theirs"
        command = [sys.executable, str(Path(__file__).resolve()), f"--{side}", str(test_folder / "python"), str(out), *only]
        subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def main(arguments: list[str]) -> int:
    """Print a line for each test, and counts."""
    if arguments and arguments[0] in ("--ours", "--theirs"):
        side, folder, out, *only = arguments
        Path(out).write_text(json.dumps(run_here(Path(folder), side == "--ours", only)))
        return 0
    if not arguments:
        print("skipped: say where the folder onnxruntime/test of a checkout of onnxruntime is")
        return 0
    test_folder, only = Path(arguments[0]).resolve(), arguments[1:]
    theirs, ours = run(test_folder, False, only), run(test_folder, True, only)
    counts: Counter[str] = Counter()
    for name, mine in ours.items():
        before = theirs.get(name, {"status": FAILED, "why": "there is no such test"})
        if before["status"] != HELD:
            verdict, why = "not judged", f"here {mine['status']}, with onnxruntime itself {before['status']}: {before['why']}"
        elif not mine["used"] and mine["status"] == HELD:
            verdict, why = "not about sessions", ""
        else:
            verdict, why = mine["status"], mine["why"]
        counts[verdict] += 1
        print(f"{verdict:18}  {name}{'  ' + re.sub(r'[|]', '/', why) if why else ''}")
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
