"""Writes the tables of docs/conformance.md from a run of onnx's node tests: `python tests/conformance/report.py`."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from onnx_node_suite import NAMED, Outcome, outcomes

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
START, END = "<!-- generated: tests/conformance/report.py -->", "<!-- end of generated -->"


def tables(found: Sequence[Outcome]) -> str:
    """The generated part of the document."""
    import onnx

    by_op: dict[str, Counter[str]] = defaultdict(Counter)
    for o in found:
        by_op[o.op][o.status] += 1
    total = Counter(o.status for o in found)
    passed = len(found) - total["fail"]
    lines = [
        f"onnx {onnx.__version__}: **{passed} of {len(found)} cases pass ({100 * passed / len(found):.1f} %)**, "
        f"{total['native']} of them natively, {total['torch']} with torch's operators and {total['call']} with a call; "
        f"{total['fail']} fail.",
        "",
        "### The operators this compiler is about",
        "",
        *_table({op: by_op[op] for op in NAMED}),
        "",
        "### What fails, and why",
        "",
        "| case | reason |",
        "|---|---|",
        *(f"| `{o.name}` | {o.reason.replace('|', '/')} |" for o in found if o.status == "fail"),
        "",
        "### Every operator",
        "",
        *_table({op: by_op[op] for op in sorted(by_op, key=str.lower)}),
    ]
    return "\n".join(lines)


def _table(by_op: dict[str, Counter[str]]) -> list[str]:
    head = ["| operator | cases | pass | native | torch | call |", "|---|---:|---:|---:|---:|---:|"]
    return head + [
        f"| {op} | {sum(c.values())} | {sum(c.values()) - c['fail']} | {c['native']} | {c['torch']} | {c['call']} |"
        for op, c in by_op.items()
    ]


def written(document: str, generated: str) -> str:
    """The document with its generated part replaced."""
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{generated}\n\n{END}{after}"


def main() -> None:
    """Run everything and rewrite the document."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(), tables(outcomes())))


if __name__ == "__main__":
    main()
