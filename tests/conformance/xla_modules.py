"""XLA's own test modules that hold a product, out of its tests' sources: against XLA's CPU client.

    python tests/conformance/xla_modules.py FOLDER [--only SUBSTRING] [--every N] [--list]

FOLDER holds a checkout of openxla/xla, or its *_test.cc files. Each module runs in a child with a time limit; one in which
XLA's own client dies is "no oracle".
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LIMIT_S = 60
LARGEST = 5_000_000  # elements in all values of a module
_TEXT = re.compile(r'R"(\w*)\((.*?)\)\1"', re.DOTALL)
_PRODUCT = re.compile(r"\b(?:scaled-|ragged-)?dot\(")
_STEPS = {"f64": 1e-8, "f32": 2e-4, "f16": 4e-3, "bf16": 3e-2}


def modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the modules."""
    for path in sorted(folder.rglob("*_test.cc")):
        for i, (_, text) in enumerate(_TEXT.findall(path.read_text(errors="replace"))):
            if _PRODUCT.search(text) and "parameter(" in text and "CHECK" not in text and "$" not in text:
                yield f"{path.name}:{i}", text


def judge(text: str) -> Iterator[tuple[str, str]]:
    """Verdicts as they are known; the last one counts."""
    import numpy as np
    import torch

    from against_jax import normal, to_torch, xla
    from tilewright.compiler import optimise
    from tilewright.errors import TilewrightError
    from tilewright.frontends import _jaxlib, load
    from tilewright.ir.evaluate import evaluate
    from tilewright.ir.types import TensorType

    try:
        graph = load(text)
    except TilewrightError as error:
        yield "refused", error.what[:110]
        return
    if sum(n.tensor.elements for n in graph.nodes() if isinstance(n.type, TensorType)) > LARGEST:
        yield "large", ""
        return
    arrays = [normal(n.dtype, n.shape, i) for i, n in enumerate(graph.inputs)]
    found = evaluate(optimise(graph), [to_torch(a) for a in arrays])
    yield "no oracle", "XLA's client died"
    header = text if "HloModule" in text else f"HloModule main {text}"
    try:
        wanted = xla(str(_jaxlib.parse(_jaxlib.hlo_to_stablehlo(header, ""), "")), *arrays)
    except Exception as error:
        yield "no oracle", str(error).splitlines()[0][:110]
        return
    for node, got, want in zip(graph.outputs, found, wanted, strict=False):
        assert isinstance(got, torch.Tensor)
        a, b = got.to(torch.float64).numpy(), np.asarray(want).astype(np.float64).reshape(node.shape)
        finite = np.isfinite(a) & np.isfinite(b)
        size = float(np.abs(b[finite]).max(initial=0.0))
        step = _STEPS.get(node.dtype.name, 0.13 if node.dtype.is_float else 0.0)
        if not ((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= step * max(size, 1e-3))).all():
            yield "wrong", f"{node.type}: {a.reshape(-1)[:4]} is not {b.reshape(-1)[:4]}"
            return
    yield "pass", ""


def serve() -> None:
    """In a child: a module's text on a line of JSON in, verdicts out, an empty line behind the last."""
    answer = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            for verdict in judge(json.loads(line)):
                answer.write(json.dumps(verdict) + "\n")
                answer.flush()
        except Exception as error:
            answer.write(json.dumps(("untyped", f"{type(error).__name__}: {str(error)[:140]}")) + "\n")
        answer.write("\n")
        answer.flush()


def run(found: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """The verdict on each module; a child that dies or takes too long is one."""
    child: subprocess.Popen[str] | None = None
    lines: queue.Queue[str] = queue.Queue()
    for name, text in found:
        if child is None:
            pipe = subprocess.PIPE
            command = [sys.executable, __file__, "--serve"]
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1)
            lines = queue.Queue()
            threading.Thread(target=_forward, args=(child.stdout, lines), daemon=True).start()
        assert child.stdin is not None
        child.stdin.write(json.dumps(text) + "\n")
        child.stdin.flush()
        verdict, why = "crash", ""
        while child is not None:
            try:
                line = lines.get(timeout=LIMIT_S)
            except queue.Empty:
                child.kill()
                verdict, line = ("slow" if verdict == "crash" else verdict), ""
            if line == "\n":
                break
            if line:
                verdict, why = json.loads(line)
            else:
                child.wait()
                child = None
        yield name, verdict, why
    if child is not None:
        child.communicate()


def _forward(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Lines as they come; nothing at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def main() -> None:
    """Run the modules and print a table."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="name every module that does not pass")
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        return serve()
    found = [m for m in modules(given.folder) if given.only in m[0]][:: given.every]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, verdict, why in run(found):
        counts[verdict] += 1
        if verdict != "pass":
            reasons[f"{verdict}: {why}"] += 1
            if given.list:
                sys.stdout.write(f"{verdict:8} {name[:100]}: {why}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(found)} modules, {dict(counts)}\n")
    for reason, count in reasons.most_common(30):
        sys.stdout.write(f"  {count:5} {reason[:180]}\n")
    return None


if __name__ == "__main__":
    main()
