"""XLA's own test modules that hold a product, read out of a checkout: what folds, and what XLA's CPU client makes of them.

`XLA_CHECKOUT` names a folder that holds `xla/…` (tag `upstream-jax-v0.10.2` of ROCm/xla is the parser that jaxlib 0.10.2
carries). Each raw string of a test that holds a dot of any kind is a module; nothing of it is kept here. By hand:

    XLA_CHECKOUT=… python tests/conformance/xla_modules.py folds [WORD…]
    XLA_CHECKOUT=… python tests/conformance/xla_modules.py compare [WORD…] [--every N] [--list]

A word picks the tests whose path and name hold it. `folds` counts the modules of FILES whose plan is products alone; `compare`
runs every module in a child with a time limit, against XLA's client: where that dies there is "no oracle".
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np
import torch

from tilewright.compiler import optimise
from tilewright.errors import TilewrightError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.stablehlo import jaxlib as _jaxlib
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.pattern import Trace
from tilewright.ir.types import TensorType
from tilewright.runtime.partition import partition

FP8 = "xla/backends/gpu/transforms/gemm_rewriter_fp8_test.cc"
INT4 = "xla/backends/gpu/codegen/triton/tests/fusion_emitter_int4_device_test.cc"
FILES = (
    FP8,
    INT4,
    "xla/backends/gpu/transforms/gemm_rewriter_test.cc",
    "xla/backends/gpu/transforms/gemm_fusion_test.cc",
    "xla/backends/gpu/transforms/hoist_fused_bitcasts_test.cc",
    "xla/backends/gpu/codegen/triton/triton_gemm_fusion_test.cc",
    "xla/backends/gpu/codegen/triton/support_test.cc",
    "xla/backends/gpu/codegen/cudnn_test.cc",
    "xla/service/cpu/tests/restricted/onednn_matmul_test.cc",
    "xla/hlo/transforms/simplifiers/algebraic_simplifier_test.cc",
    "xla/hlo/transforms/simplifiers/dot_merger_test.cc",
    "xla/tests/dot_operation_test.cc",
)
# What the tests put in for NVIDIA.
REPLACED = {"<<F8E4M3>>": "f8e4m3fn", "<<F8E5M2>>": "f8e5m2", "<<F8E4M3_AMAX>>": "448."}
PRODUCTS = ("gemm", "attention")
LIMIT_S = 60
LARGEST = 5_000_000  # elements in all values of a module that is run
_STEPS = {"f64": 1e-8, "f32": 2e-4, "f16": 4e-3, "bf16": 3e-2}  # and 0.13 for a smaller float


@dataclass(frozen=True)
class Module:
    """One HLO module of a test file: the test's name, the number of the string in the test, and the text."""

    file: str
    name: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """The steps of a module at every call, by kind, or why it was refused; and why something stands beside a product."""

    kinds: tuple[str, ...]
    refused: str = ""
    why: tuple[str, ...] = ()
    graph: Graph | None = None

    @property
    def one_product(self) -> bool:
        return self.kinds == ("gemm",) or self.kinds == ("attention",)

    @property
    def only_products(self) -> bool:
        return bool(self.kinds) and set(self.kinds) <= {*PRODUCTS}


def checkout() -> Path | None:
    """The folder that `XLA_CHECKOUT` names, if it is there."""
    named = os.environ.get("XLA_CHECKOUT")
    return Path(named) if named and (Path(named) / "xla").is_dir() else None


def everything(root: Path) -> Iterator[Module]:
    """The modules of every test file of a checkout that can be run: they take parameters."""
    for path in sorted(root.rglob("*_test.cc")):
        yield from (m for m in modules(root, str(path.relative_to(root))) if "parameter(" in m.text)


def modules(root: Path, file: str) -> Iterator[Module]:
    """The modules of a test file that hold a dot and no place left to fill in."""
    source = (root / file).read_text(errors="replace")
    tests = [(m.start(), m.group(1)) for m in re.finditer(r"TEST(?:_[A-Z]+)?\(\s*\w+,\s*(\w+)\)", source)]
    count: dict[str, int] = {}
    for found in re.finditer(r'R"(\w*)\((.*?)\)\1"', source, re.DOTALL):
        text = found.group(2)
        for what, by in REPLACED.items():
            text = text.replace(what, by)
        if "CHECK" in text or not re.search(r"\bdot\(", text) or "{\n" not in text:
            continue
        name = next((n for at, n in reversed(tests) if at < found.start()), "top")
        for filled in _layouts(text):
            if re.search(r"\$\d|\$\{|<<", filled):
                continue
            count[name] = count.get(name, 0) + 1
            yield Module(file, f"{name}#{count[name]}", filled if "HloModule" in filled else f"HloModule m\n{filled}")


def _layouts(text: str) -> list[str]:
    """A template of the fp8 tests for each layout and contracted axis of both operands, as they loop over them; any other text
    as it is. Batched ones are filled in plainly."""
    if "<<Ashape>>" not in text:
        return [text]
    filled: list[str] = []
    batch = "2," if "[2," in text else ""
    for left, right, by_column in product((0, 1), (0, 1), (False, True)):
        order = ("{1,2,0}" if by_column else "{2,1,0}") if batch else ("{0,1}" if by_column else "{1,0}")
        axis = len(batch) // 2
        values = {
            "<<Lcd>>": f"{{{left + axis}}}",
            "<<Rcd>>": f"{{{right + axis}}}",
            "<<Ashape>>": f"[{batch}{'64,32' if left else '32,64'}]",
            "<<Bshape>>": f"[{batch}{'16,32' if right else '32,16'}]",
            "<<Alayout>>": order,
            "<<Blayout>>": order,
            "<<Olayout>>": order,
        }
        one = text
        for what, by in values.items():
            one = one.replace(what, by)
        filled.append(one)
    return filled


def outcome(text: str) -> Outcome:
    """The plan of a module, no kernel built or run."""
    trace = Trace()
    try:
        graph = optimise(load(text, LoadOptions()), trace)
    except TilewrightError as e:
        return Outcome((), str(e).split("\n")[0][:150])
    kinds = tuple(p.kind for p in partition(graph) if not p.once and p.kind != "view")
    return Outcome(kinds, why=tuple(dict.fromkeys(f"{n.rule}: {n.why}" for n in trace.near_misses)), graph=graph)


def judge(text: str) -> Iterator[tuple[str, str]]:
    """Verdicts as they are known; the last one counts."""
    from against_jax import normal, to_torch, xla

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
    try:
        wanted = xla(str(_jaxlib.parse(_jaxlib.hlo_to_stablehlo(text, ""), "")), *arrays)
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
    """Serve a parent: a module's text on a line of JSON in, verdicts out, an empty line behind the last."""
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


def run(found: Sequence[Module]) -> Iterator[tuple[Module, str, str]]:
    """The verdict on each module; a child that dies or takes too long is one."""
    child: subprocess.Popen[str] | None = None
    lines: queue.Queue[str] = queue.Queue()
    for module in found:
        if child is None:
            pipe = subprocess.PIPE
            command = [sys.executable, __file__, "serve"]
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1)
            lines = queue.Queue()
            threading.Thread(target=_forward, args=(child.stdout, lines), daemon=True).start()
        assert child.stdin is not None
        child.stdin.write(json.dumps(module.text) + "\n")
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
        yield module, verdict, why
    if child is not None:
        child.communicate()


def _forward(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Lines as they come; nothing at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def folds(root: Path, words: Sequence[str]) -> None:
    """Print, for each file, how many modules are products alone, and what the others are."""
    for file in FILES:
        counted = {True: 0, False: 0}
        lines: list[str] = []
        for module in picked(modules(root, file), words):
            found = outcome(module.text)
            good = found.one_product if file in (FP8, INT4) else found.only_products
            counted[good] += 1
            if not good:
                lines.append(f"    {module.name}: {found.refused or ' '.join(found.kinds)}")
        if any(counted.values()):
            sys.stdout.write("\n".join([f"{file}: {counted[True]} of {sum(counted.values())} are products alone", *lines, ""]))


def compare(found: Sequence[Module], named: bool) -> None:
    """Print how many modules agree with XLA's client, and why others do not."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for module, verdict, why in run(found):
        counts[verdict] += 1
        if verdict != "pass":
            reasons[f"{verdict}: {why}"] += 1
            if named:
                sys.stdout.write(f"{verdict:8} {module.file}:{module.name}: {why}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(found)} modules, {dict(counts)}\n")
    for reason, count in reasons.most_common(30):
        sys.stdout.write(f"  {count:5} {reason[:180]}\n")


def picked(found: Iterator[Module], words: Sequence[str]) -> list[Module]:
    """The modules whose path and name hold one of the words, if any are given."""
    return [m for m in found if not words or any(w in f"{m.file}:{m.name}" for w in words)]


def main() -> None:
    """Count or compare, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("folds", "compare", "serve"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="name every module that does not pass")
    given = parser.parse_args()
    if given.what == "serve":
        return serve()
    root = checkout()
    if root is None:
        sys.exit("XLA_CHECKOUT names no folder that holds xla/")
    if given.what == "folds":
        return folds(root, given.words)
    return compare(picked(everything(root), given.words)[:: given.every], given.list)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    main()
