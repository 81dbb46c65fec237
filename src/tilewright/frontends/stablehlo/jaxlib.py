"""The one place that touches jaxlib's private API, as jaxlib 0.10, 0.11 and 0.12 have it.

jaxlib carries XLA's own HLO parser, the StableHLO dialects and StableHLO's reference interpreter; `jax` itself is not needed.
XLA's parser ends the process on some malformed modules (a failed check, not an exception), so HLO text is converted in a
process of its own: this file is also that process's program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import InputError, MissingDependencyError, UnsupportedError

CONVERSION_TIMEOUT_S = 600
MAX_NESTING = 500
_CONVERSION_MEMORY_BYTES = 4 << 30
# Runs of opening and of closing brackets (an arrow's head is none), and strings, which hide theirs.
_BRACKETS = re.compile(r'[(\[{<]+|[)\]}]+|(?<!-)>+|"(?:[^"\\\n]|\\.)*"')
_EXPAND_CHLO = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
_PLAIN_CALLS = "func.func(stablehlo-legalize-composite-to-call)"
_CANONICAL = "stablehlo-refine-shapes,func.func(stablehlo-canonicalize-dynamism),canonicalize,symbol-dce"
_QUANT_TO_MATH = "builtin.module(func.func(stablehlo-legalize-quant-to-math,chlo-legalize-to-stablehlo))"
_QUANTISED = re.compile(r"!quant\.")
_AGAIN = "mend it there, or print the module again, whole"
_IMPORTING = threading.Lock()
_HINT = "pip install 'tilewright[jax]'"


@dataclass(frozen=True)
class Api:
    """jaxlib's modules and the names in them that moved between releases."""

    ir: Any
    stablehlo: Any
    passmanager: Any
    context: type[Any]
    register: Any


def api() -> Api:
    """Give jaxlib's MLIR bindings, imported on first use by one thread: passes are registered for the process.

    Raises:
        MissingDependencyError: jaxlib is missing, or lacks what is used here.
    """
    with _IMPORTING:
        return _imported()


@functools.cache
def _imported() -> Api:
    try:
        ir = importlib.import_module("jaxlib.mlir.ir")
        extension = importlib.import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext")
        names = ("chlo", "func", "mhlo", "sdy", "stablehlo")
        dialects = {n: importlib.import_module(f"jaxlib.mlir.dialects.{n}") for n in names}
        passmanager = importlib.import_module("jaxlib.mlir.passmanager")
        dialects["stablehlo"].register_stablehlo_passes()
        base = ir.Context.__mro__[1]
        registrars = (
            dialects["sdy"].register_dialect,
            dialects["mhlo"].register_mhlo_dialect,
            dialects["chlo"].register_dialect,
            dialects["stablehlo"].register_dialect,
        )
    except (ImportError, AttributeError) as error:
        raise _missing(error) from error

    class Context(ir.Context):
        """A context with the dialects of HLO alone: its parent's constructor loads others, which do not fit them."""

        def __init__(self) -> None:
            base.__init__(self)

    def register(context: Any) -> None:
        registry = ir.DialectRegistry()
        extension.register_dialects(registry)
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        for registrar in registrars:
            registrar(context)

    return Api(ir, dialects["stablehlo"], passmanager, Context, register)


def _missing(error: Exception) -> MissingDependencyError:
    try:
        version = f"jaxlib {importlib.import_module('jaxlib').__version__} is not one this reader knows (0.10 to 0.12)"
    except ImportError:
        version = "HLO and StableHLO are read by jaxlib, which is not installed"
    return MissingDependencyError(version, where=str(error).splitlines()[0], hint=_HINT)


def new_context() -> Any:
    """An MLIR context with the dialects of HLO, and no threads of its own."""
    found = api()
    context = found.context()
    found.register(context)
    context.enable_multithreading(False)
    context.allow_unregistered_dialects = False
    return context


def parse(program: str | bytes, where: str, context: Any = None) -> Any:
    """MLIR text or bytecode as an `ir.Module`, in its own context or the one given.

    Raises:
        InputError: malformed, and where; or nested so deep that the parser would exhaust the stack.
        UnsupportedError: it uses a dialect that is not read, or quantised types that StableHLO itself cannot lower.
    """
    if isinstance(program, str) and _nests_too_deep(program):
        raise InputError(
            f"brackets nest more than {MAX_NESTING} deep", where=where, hint="print the module again, or compile parts of it"
        )
    context = context or new_context()
    with context:
        quantised = isinstance(program, str) and _QUANTISED.search(program) is not None
        try:
            if quantised:
                _load_quant(context)
            module = api().ir.Module.parse(program)
        except Exception as error:
            what, place = _diagnosis(error)
            at = f"{where}, {place}" if place else where
            if "unregistered dialect" in what or re.search(r"Dialect `\w+' not found", what):
                dialect = re.search(r"[!`\"']+(\w+)", what)
                name = f"the dialect {dialect.group(1)!r}" if dialect else "a dialect other than StableHLO"
                raise UnsupportedError(f"{name} is not read", where=at, hint="lower it to plain StableHLO first") from None
            raise InputError(f"malformed StableHLO: {what}", where=at, hint=_AGAIN) from None
    problem = run_passes(module, _QUANT_TO_MATH) if quantised else None
    if problem:
        what = problem.partition(": %")[0]
        raise UnsupportedError(
            f"its quantised types have no lowering to plain ones: {what}",
            where=where,
            hint="write them as plain integers with stablehlo.uniform_quantize",
        )
    return module


def _load_quant(context: Any) -> None:
    """Make a context read quantised types, whose dialect has no binding: a pass that depends on it loads it."""
    empty = api().ir.Module.parse("module {}", context)
    run_passes(empty, "builtin.module(vhlo-legalize-to-stablehlo)")


def _nests_too_deep(text: str) -> bool:
    depth = 0
    for found in _BRACKETS.finditer(text):
        run = found.group()
        if run[0] in "([{<":
            depth += len(run)
            if depth > MAX_NESTING:
                return True
        elif run[0] != '"':
            depth -= len(run)
    return False


def _diagnosis(error: Exception) -> tuple[str, str]:
    """The message of an MLIR error, and the line that it names."""
    for line in str(error).splitlines():
        found = re.match(r'\s*error:\s*(?:"[^"]*":(\d+):(\d+):\s*)?(.*)', line)
        if found and found.group(3):
            what = re.sub(r'^"[^"]*"\(.*\): ', "", found.group(3))  # a location written out
            place = f"line {found.group(1)}" if found.group(1) else ""
            return what[:200], place
    return (str(error).splitlines() or [type(error).__name__])[0][:200], ""


def run_passes(module: Any, pipeline: str) -> str | None:
    """Run a pass pipeline in place; what went wrong, or None."""
    with module.context:
        try:
            api().passmanager.PassManager.parse(pipeline).run(module.operation)
        except Exception as error:
            return _diagnosis(error)[0]
    return None


def expand_chlo(module: Any) -> str | None:
    """Replace every CHLO operation by StableHLO's own decomposition of it; what went wrong, or None."""
    return run_passes(module, _EXPAND_CHLO)


def bind_arguments(module: Any, types: Sequence[str]) -> str | None:
    """Give the arguments of `main` these concrete types and carry them through the module; what went wrong, or None."""
    return run_passes(
        module, f"builtin.module({_PLAIN_CALLS},stablehlo-refine-arguments{{types={','.join(types)}}},{_CANONICAL})"
    )


def interpret(module: Any, inputs: Sequence[Any]) -> list[Any]:
    """StableHLO's reference interpreter on elements attributes. It ends the process on an operation it does not know.

    Raises:
        UnsupportedError: it refuses the module.
    """
    said: list[str] = []

    def listen(diagnostic: Any) -> bool:
        said.append(str(diagnostic.message))
        return True

    with module.context:
        handler = module.context.attach_diagnostic_handler(listen)
        try:
            return list(api().stablehlo.eval_module(module, list(inputs)))
        except ValueError as error:
            raise UnsupportedError(f"the StableHLO interpreter refused: {(said or [str(error)])[0]}") from None
        finally:
            handler.detach()


def hlo_to_stablehlo(text: str, where: str) -> bytes:
    """HLO text as MLIR bytecode of the same module in StableHLO and MHLO, converted by XLA in another process.

    Raises:
        InputError: malformed; says where.
        MissingDependencyError: no jaxlib, or one without this conversion.
    """
    api()  # a missing jaxlib is reported from here, once
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command,
            input=text.encode(errors="replace"),
            capture_output=True,
            env=environment,
            timeout=CONVERSION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"XLA's parser took longer than {CONVERSION_TIMEOUT_S} s",
            where=where,
            hint="give StableHLO (.mlir), which is read here, or parts of it",
        ) from None
    verdict, _, payload = done.stdout.partition(b"\n")
    if verdict == b"converted":
        return payload
    if verdict == b"missing":
        raise MissingDependencyError(payload.decode(), where=where, hint=_HINT)
    if verdict == b"refused":
        what, place = _hlo_diagnosis(payload.decode(errors="replace"))
        raise InputError(f"malformed HLO: {what}", where=f"{where}, {place}" if place else where, hint=_AGAIN)
    raise InputError(
        f"malformed HLO: XLA's parser stopped at it: {_last_words(done)}", where=where, hint="is the file complete?"
    )


def _hlo_diagnosis(message: str) -> tuple[str, str]:
    """XLA's reason and the line it names. Later places are those of enclosing rules, so the first counts."""
    found = re.search(r"was parsing (\d+):\d+: error: (.*)", message)
    if found:
        return found.group(2)[:200], f"line {found.group(1)}"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    what = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0].rstrip(":")
    return re.sub(r"^[A-Z_]+: ", "", what)[:200], ""


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode(errors="replace")
    check = re.search(r"(?:Check failed|LLVM ERROR): (.*)", said) or re.search(r"(MemoryError|bad_alloc)", said)
    return check.group(1)[:160] if check else f"exit status {done.returncode}"


def _convert(text: str) -> bytes:
    """Convert HLO text to MLIR bytecode, in the other process."""
    found = api()
    try:
        hlo, core = importlib.import_module("jaxlib._hlo"), importlib.import_module("jaxlib._jax")
        from_text, to_stablehlo = hlo.hlo_module_from_text, core.mlir.hlo_to_stablehlo
    except (ImportError, AttributeError) as error:
        raise _missing(error) from error
    proto = from_text(text).as_serialized_hlo_module_proto()
    with new_context():
        module = found.ir.Module.parse(to_stablehlo(proto))
        out = io.BytesIO()
        module.operation.write_bytecode(out)
    return out.getvalue()


@contextlib.contextmanager
def _only_answer() -> Generator[Any]:
    """Standard output, with anything a library prints there sent to standard error instead."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with answer:
        yield answer


def main() -> None:
    """Convert HLO text on standard input; answer with a verdict and, on the next line, bytecode or a reason."""
    with _only_answer() as answer:
        text = sys.stdin.buffer.read().decode()
        with contextlib.suppress(ImportError, ValueError, OSError):
            resource = importlib.import_module("resource")  # not on Windows
            limit = _CONVERSION_MEMORY_BYTES + 64 * len(text)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            answer.write(b"converted\n" + _convert(text))
        except MissingDependencyError as error:
            answer.write(b"missing\n" + error.what.encode())
        except Exception as error:
            answer.write(b"refused\n" + str(error).encode())


if __name__ == "__main__":
    main()
