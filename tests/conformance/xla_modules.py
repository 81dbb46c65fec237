"""XLA's own test modules, read out of a checkout, and what Tilewright makes of them.

`XLA_CHECKOUT` names a folder that holds `xla/…` (tag `upstream-jax-v0.10.2` of ROCm/xla is the parser that jaxlib 0.10.2
carries). Each raw string of a test file that holds a `dot` is a module; nothing of it is kept here. By hand:

    XLA_CHECKOUT=…/xla python tests/conformance/xla_modules.py [FILE…] [--show NAME]
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tilewright.compiler import optimise
from tilewright.errors import TilewrightError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.graph import Graph
from tilewright.ir.pattern import Trace
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


def modules(root: Path, file: str) -> Iterator[Module]:
    """The modules of a test file that hold a dot and no place left to fill in."""
    source = (root / file).read_text()
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


def main() -> None:
    """Count the files whose path holds a word of the command line, all by default, and list what is more than products."""
    root = checkout()
    if root is None:
        sys.exit("XLA_CHECKOUT names no folder that holds xla/")
    for file in [f for f in FILES if any(a in f for a in sys.argv[1:])] or FILES:
        counted = {True: 0, False: 0}
        lines: list[str] = []
        for module in modules(root, file):
            found = outcome(module.text)
            good = found.one_product if file in (FP8, INT4) else found.only_products
            counted[good] += 1
            if not good:
                lines.append(f"    {module.name}: {found.refused or ' '.join(found.kinds)}")
        sys.stdout.write("\n".join([f"{file}: {counted[True]} of {sum(counted.values())} are products alone", *lines, ""]))


if __name__ == "__main__":
    main()
