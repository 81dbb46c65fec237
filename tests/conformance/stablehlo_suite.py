"""StableHLO's own test programs, out of a checkout of openxla/stablehlo: what passes, is refused and why, is wrong or crashes.

    python tests/conformance/stablehlo_suite.py CHECKOUT [--only SUBSTRING] [--suite testdata|quantized|interpret] [--list]

Each program runs in a child process with a time limit: a child that dies costs one case. Nothing of the checkout is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60
_CHECK = re.compile(
    r"check\.expect_(?P<how>\w+)\s+(?P<value>%[\w#]+),\s*(?P<constant>dense<[^>]*>)[^:]*:\s*(?P<type>tensor<[^\n]*)"
)
_GENERIC_CHECK = re.compile(
    r'"check\.expect_\w+"\((?P<value>%[\w#]+)\) <\{.*?value = (?P<constant>dense<[^>]*>) : '
    r"(?P<type>tensor<[^\n]*?>)(?:, .*)?\}> :.*"
)
_PAIR = re.compile(r"check\.expect_(?P<how>\w+)\s+(?P<value>%[\w#]+),\s*(?P<other>%[\w#]+)[^:]*:\s*(?P<type>tensor<[^\n]*)")
_CALL_CHECK = re.compile(
    r"^.*stablehlo\.custom_call @check\.[\w.]+\((?P<a>%[\w#]+), (?P<b>%[\w#]+)\).*\((?P<t>tensor.*)\) -> .*$", re.M
)
_SPLIT = re.compile(r"^// -----.*$", re.M)
_MAIN = re.compile(r"func\.func (?:public |private )?@[\w.]+\(\)[^{]*\{")


@dataclass(frozen=True)
class Program:
    """One test: a name, and text whose `main` gives (value, expected value) pairs one behind the other.

    Attributes:
        name: file and function.
        text: the module.
        inputs: text of a module whose `main` gives the arguments, if it takes any.
    """

    name: str
    text: str
    inputs: str = ""


def programs(checkout: Path, suite: str) -> Iterator[Program]:
    """The programs of one suite."""
    root = checkout / "stablehlo"
    if suite == "interpret":
        for path in sorted((root / "tests" / "interpret").rglob("*.mlir")):
            for i, part in enumerate(_SPLIT.split(path.read_text())):
                yield from _interpreted(f"{path.name}:{i}", part)
        return
    folder = root / "testdata" / ("quantized" if suite == "quantized" else "")
    for path in sorted(folder.glob("*.mlir")):
        text = path.read_text()
        if suite == "testdata":
            yield _with_inputs(path.name, text)
        elif "check.expect" in text:
            for i, part in enumerate(_SPLIT.split(text)):
                yield from _interpreted(f"{path.name}:{i}", part)
        else:
            yield _inside(path.name, text)


def _interpreted(name: str, text: str) -> Iterator[Program]:
    """A function for each that checks something, as `main`."""
    starts = [m.start() for m in re.finditer(r"^\s*func\.func ", text, re.M)]
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=False):
        body = text[begin:end]
        if "check.expect" not in body:
            continue
        label = re.search(r"@([\w.]+)", body)
        checks: list[tuple[str, str, str]] = []

        def constant(m: re.Match[str], checks: list[tuple[str, str, str]] = checks) -> str:
            checks.append((m["value"], f"%expected{len(checks)}", m["type"].strip()))
            return f"{checks[-1][1]} = stablehlo.constant {m['constant']} : {m['type']}"

        def pair(m: re.Match[str], checks: list[tuple[str, str, str]] = checks) -> str:
            checks.append((m["value"], m["other"], m["type"].split(", tensor")[0].strip().strip("()")))
            return ""

        changed = _PAIR.sub(pair, _CHECK.sub(constant, _GENERIC_CHECK.sub(constant, body)))
        types = ", ".join(f"{t}, {t}" for *_, t in checks)
        values = ", ".join(f"{a}, {b}" for a, b, _ in checks)
        changed = _MAIN.sub(f"func.func @main() -> ({types}) {{", changed, count=1)
        changed = re.sub(r"^(\s*)(func\.return|return)\s*$", rf"\1func.return {values} : {types}", changed, flags=re.M)
        yield Program(f"{name}:{label.group(1) if label else ''}", text[:begin] + changed + text[end:])


def _inside(name: str, text: str) -> Program:
    """A program whose only function checks what it computes."""
    pairs = [(m["a"], m["b"], m["t"]) for m in _CALL_CHECK.finditer(text)]
    values, types = ", ".join(f"{b}, {a}" for a, b, _ in pairs), ", ".join(t for *_, t in pairs)
    text = _CALL_CHECK.sub("", text)
    text = re.sub(r"@main\(\) -> .*\{", f"@main() -> ({types}) {{", text)
    return Program(name, re.sub(r"^\s*(func\.)?return .*$", f"return {values} : {types}", text, count=1, flags=re.M))


def _with_inputs(name: str, text: str) -> Program:
    """A program whose `main` calls @inputs and @expected."""
    head = re.search(r"func\.func public @main\(\) -> \(?.*\{$", text, re.M)
    made = re.search(r"%(?P<n>\w+)(?::(?P<count>\d+))? = call @inputs\(\) : \(\) -> (?P<types>.*)", text)
    pairs = [(m["a"], m["b"], m["t"]) for m in _CALL_CHECK.finditer(text)]
    if not pairs or head is None:
        return Program(name, text)
    values, types = ", ".join(f"{a}, {b}" for a, b, _ in pairs), ", ".join(t for *_, t in pairs)
    end = text.index("\n  }", head.start())
    main = text[head.start() : end]
    arguments = ""
    if made is not None:
        given = re.findall(r"tensor<[^ ]*>(?=[,)]|$)", made["types"].replace(" ", "").replace(",tensor", ", tensor"))
        arguments = ", ".join(f"%given{i}: {t}" for i, t in enumerate(given))
        main = main.replace(made.group(0), "")
        for i in range(len(given)):
            old = re.escape(f"%{made['n']}#{i}" if made["count"] else f"%{made['n']}") + r"(?![\w#])"
            main, values = (re.sub(old, f"%given{i}", v) for v in (main, values))
    main = _CALL_CHECK.sub("", main)
    main = re.sub(r"@main\(\) -> .*\{", f"@main({arguments}) -> ({types}) {{", main, count=1)
    main = re.sub(r"^    return .*$", f"    return {values} : {types}", main, flags=re.M)
    whole = text[: head.start()] + main + text[end:]
    inputs = text.replace("@main(", "@other(").replace("private @inputs(", "public @main(").replace("@inputs(", "@main(")
    inputs = inputs if made is not None else ""
    return Program(name, whole, inputs)


def judge(program: Program) -> tuple[str, str]:
    """Judge a program: "pass", "refused", "wrong", "zero" (right but for a zero's sign) or "untyped", and why."""
    import torch

    from tilewright.compiler import optimise
    from tilewright.errors import TilewrightError
    from tilewright.frontends import load
    from tilewright.ir.evaluate import evaluate

    try:
        feeds = evaluate(load(program.inputs), []) if program.inputs else []
        graph = load(program.text)
        feeds = [f for f in feeds if isinstance(f, torch.Tensor)]
        results = evaluate(optimise(graph), feeds)
    except TilewrightError as error:
        return "refused", f"{error.what[:110]}"
    except Exception as error:
        return "untyped", f"{type(error).__name__}: {str(error)[:160]}"
    for i in range(0, len(results), 2):
        problem = _differ(results[i], results[i + 1], powers="f8E8M0FNU" in program.text)
        if problem:
            return ("zero" if problem == "sign of zero" else "wrong"), problem
    return "pass", f"{len(results) // 2}"


def _differ(a: object, b: object, *, powers: bool = False) -> str:
    """Say how a value differs from what is expected, or nothing: floats within a few steps of a magnitude of one or more, bytes
    that are exponents (`powers`) as powers of two."""
    import torch

    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} is not {b.dtype}{list(b.shape)}"
    if a.dtype is torch.uint8 and powers:
        a, b = (torch.where(x == 255, torch.nan, torch.exp2(x.double() - 127)) for x in (a, b))
    if not a.is_floating_point():
        return "" if torch.equal(a, b) else f"{a.flatten()[:6]} is not {b.flatten()[:6]}"
    step = {torch.float64: 3e-5, torch.float32: 1e-4}.get(a.dtype, 5 * torch.finfo(a.dtype).eps)
    x, y = a.to(torch.float64), b.to(torch.float64)
    good = (x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= step * y.abs().clamp(min=1.0))
    if not good.all():
        return f"{x[~good][:4].tolist()} is not {y[~good][:4].tolist()}"
    return "" if torch.equal(x.signbit() & (x == 0), y.signbit() & (x == 0)) else "sign of zero"


def serve() -> None:
    """Serve a parent: programs on standard input, verdicts on standard output, a line of JSON each."""
    answer = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answer.write(json.dumps(judge(Program(**json.loads(line)))) + "\n")
        answer.flush()


def run(found: list[Program]) -> Iterator[tuple[Program, str, str]]:
    """Every program's verdict; a child that dies or takes too long is a verdict, too."""
    child: subprocess.Popen[str] | None = None
    for program in found:
        if child is None:
            command = [sys.executable, __file__, "--serve"]
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(vars(program)) + "\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], LIMIT_S)
        line = child.stdout.readline() if ready else ""
        if line:
            verdict, why = json.loads(line)
            yield program, verdict, why
            continue
        if not ready:
            child.kill()
        yield program, "crash" if ready else "slow", f"exit status {child.wait()}"
        child = None
    if child is not None:
        child.communicate()


def main() -> None:
    """Run suites and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--suite", choices=("testdata", "quantized", "interpret"), action="append")
    parser.add_argument("--list", action="store_true", help="name every program that does not pass")
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        return serve()
    for suite in given.suite or ("testdata", "quantized", "interpret"):
        found = [p for p in programs(given.checkout, suite) if given.only in p.name][:: given.every]
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for program, verdict, why in run(found):
            counts[verdict] += 1
            if verdict != "pass":
                reasons[f"{verdict}: {why}"] += 1
                if given.list:
                    sys.stdout.write(f"{verdict:8} {program.name[:100]}: {why}\n")
        sys.stdout.write(f"{suite}: {len(found)} programs, {dict(counts)}\n")
        for reason, count in reasons.most_common(30):
            sys.stdout.write(f"  {count:5} {reason[:180]}\n")
    return None


if __name__ == "__main__":
    main()
