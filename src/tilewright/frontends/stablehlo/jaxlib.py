"""The one place that touches jaxlib's private API, as jaxlib 0.10, 0.11 and 0.12 have it.

jaxlib carries XLA's own HLO parser, the StableHLO dialects and StableHLO's reference interpreter; `jax` itself is not needed.
XLA's parser ends the process on some malformed modules (a failed check, not an exception), so HLO text is converted in a
process of its own: this file is also that process's program. Shardy's passes end theirs on some modules, and run there, too.
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright import children
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
# Without the full version Shardy's conversion to collectives fails a check on what is summed over ranks.
_PROPAGATE = (
    "builtin.module(func.func(chlo-legalize-to-stablehlo),sdy-lift-inlined-meshes,sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),sdy-resolve-permutation-factors,"
    "func.func(sdy-reshard-to-collectives))"
)
_PARTITION = "builtin.module(sdy-convert-global-to-local)"
_REDUCED = "tilewright.reduced"
_SUMMABLE = tuple(f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum", "and", "or"))
_QUANTISED = re.compile(r"!quant\.")
_LOCATED = re.compile(r'error: (?:loc\()?(?:fused\[)?"([^"\[]*).*?"(?::\d+:\d+)?[\])]*: ')  # what MLIR puts before its reason
_SAID = 300  # characters of XLA's reason
_MEND = "mend it there, or print the module again"
_WHOLE = "the text ends too early: print the module again, whole"
_IMPORTING = threading.Lock()
_HINT = "pip install 'tilewright[jax]'"


@dataclass(frozen=True)
class Api:
    """jaxlib's modules and the names in them that moved between releases."""

    ir: Any
    stablehlo: Any
    sdy: Any
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

    return Api(ir, dialects["stablehlo"], dialects["sdy"], passmanager, Context, register)


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
            named = re.search(r'"[^"]*":(\d+):(\d+): expected non-function type', str(error))
            if named and isinstance(program, str):
                word = re.match(r"\w*", program.splitlines()[int(named[1]) - 1][int(named[2]) - 1 :])
                what = f"StableHLO has no type {word[0]!r}" if word and word[0] else what
            if "unregistered dialect" in what or re.search(r"Dialect `\w+' not found", what):
                dialect = re.search(r"[!`\"']+(\w+)", what)
                name = f"the dialect {dialect.group(1)!r}" if dialect else "a dialect other than StableHLO"
                raise UnsupportedError(f"{name} is not read", where=at, hint="lower it to plain StableHLO first") from None
            raise InputError(f"malformed StableHLO: {what}", where=at, hint=_MEND) from None
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
    done = _elsewhere("convert", text.encode(errors="replace"), where)
    verdict, _, payload = done.stdout.partition(b"\n")
    if verdict == b"converted":
        return payload
    if verdict == b"refused":
        said = payload.decode(errors="replace")
        what, place = _hlo_diagnosis(said)
        hint = _MEND if text.rstrip().endswith("}") and "LINE OUT OF RANGE" not in said else _WHOLE
        raise InputError(f"malformed HLO: {what}", where=f"{where}, {place}" if place else where, hint=hint)
    raise InputError(f"malformed HLO: XLA's parser stopped at it: {_last_words(done)}", where=where, hint=_MEND)


def partitioned(module: Any, where: str) -> Any:
    """The module of one rank of a module in Shardy's spelling, in which collective operations move what must be moved.

    Shardy carries shardings to where none are said, says where values change theirs, and partitions, in another process.

    Raises:
        UnsupportedError: Shardy cannot partition it.
    """
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    done = _elsewhere("partition", out.getvalue(), where)
    verdict, _, payload = done.stdout.partition(b"\n")
    if verdict == b"partitioned":
        return parse(payload, where)
    what = payload.decode(errors="replace") if verdict == b"refused" else _last_words(done)
    hint = "other shardings of the inputs, or none within loops and lookups"
    raise UnsupportedError(f"Shardy, as jaxlib has it, cannot partition the program: {what[:300]}", where=where, hint=hint)


def _elsewhere(task: str, given: bytes, where: str) -> subprocess.CompletedProcess[bytes]:
    """A process of this file's program, with its answer: a verdict and, on the next line, a result or reason.

    Raises:
        InputError: it takes too long.
        MissingDependencyError: no jaxlib, or one that lacks what the task takes.
    """
    api()  # a missing jaxlib is reported from here, once
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", __file__, task]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, env=environment, timeout=CONVERSION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        hint = "give StableHLO (.mlir), which is read here, or parts of it"
        raise InputError(f"XLA's {task} took longer than {CONVERSION_TIMEOUT_S} s", where=where, hint=hint) from None
    verdict, _, payload = done.stdout.partition(b"\n")
    if verdict == b"missing":
        raise MissingDependencyError(payload.decode(), where=where, hint=_HINT)
    return done


def _hlo_diagnosis(message: str) -> tuple[str, str]:
    """XLA's reason and the place that it names.

    Later places are those of enclosing rules, so the first counts that says more than that something cannot be parsed.
    """
    for line, column, what, source in re.findall(r"was parsing (\d+):(\d+): error: (.*)(?:\n(.*))?", message):
        if not what.endswith(":"):
            said = _unknown(what, source[int(column) - 1 :]) or what.rpartition(", error: ")[2]
            return said[:_SAID], f"line {line}"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    what = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0].rstrip(":")
    at = _LOCATED.match(what)
    what = re.sub(r"^[A-Z_]+: ", "", what[at.end() :] if at else what)
    return what[:_SAID], at[1][:80] if at else ""


def _unknown(what: str, source: str) -> str | None:
    """The sentence on a type or an operation that XLA's parser does not know, by the text where it stopped; None of anything
    else. A type that is none where one begins an instruction it takes for an operation."""
    word = re.match(r"\W*(\w+)", source)
    if word is None or not what.startswith(("expected primitive type", "expects opcode")):
        return None
    operation = what.startswith("expects opcode") and not source[word.end() :].startswith("[")
    return f"HLO has no {'operation' if operation else 'type'} {word[1]!r}"


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode(errors="replace")
    check = re.search(r"(?:Check failed|LLVM ERROR): (.*)", said) or re.search(r"(MemoryError|bad_alloc)", said)
    return check.group(1)[:160] if check else f"its process {children.ending(done.returncode)}"


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


def _settle(block: Any) -> str | None:
    """See that Shardy's conversion to local types will do right by a block; why it will not.

    It makes every sum over ranks of reductions by whatever function (marked here, mended by `_mend`), and gets lookups and
    updates along split axes wrong: it reads past the end of a constant, or leaves out that another rank is meant. Operands of
    custom calls it leaves as they lie.
    """
    for op in (o.operation for o in block.operations):
        axes = _moved_along(op)
        if axes and _split_axes(op.operands[0]) & axes:
            return f"{op.name} along an axis that is split"
        if op.name == "stablehlo.custom_call" and any(_split_axes(v) for v in (*op.operands, *op.results)):
            return f"a custom call to {op.attributes['call_target_name'].value!r} of values that are split"
        if op.name in ("sdy.all_reduce", "sdy.reduce_scatter"):
            maker = op.operands[0].owner
            name = getattr(maker, "name", "an argument")
            if name == "stablehlo.reduce":
                inner = [o.operation for o in maker.regions[0].blocks[0].operations]
                if len(inner) != 2 or len(maker.results) != 1 or inner[0].name not in _SUMMABLE:
                    return f"{name} by a function of its own along an axis that is split"
                maker.attributes[_REDUCED] = api().ir.StringAttr.get(inner[0].name)
            elif name not in ("stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution"):
                return f"{name} along an axis that is split"
        found = next((w for r in op.regions for b in r.blocks if (w := _settle(b)) is not None), None)
        if found is not None:
            return found
    return None


def _moved_along(op: Any) -> set[int]:
    """The axes of an operation's first operand along which it looks up, writes or sorts elements."""
    if op.name in ("stablehlo.gather", "stablehlo.dynamic_gather"):
        return _numbers_of(op.attributes["dimension_numbers"], "start_index_map")
    if op.name == "stablehlo.scatter":
        return _numbers_of(op.attributes["scatter_dimension_numbers"], "scatter_dims_to_operand_dims")
    if op.name == "stablehlo.dynamic_update_slice":
        shapes = [[int(d) for d in v.type.shape] for v in (op.operands[0], op.operands[1])]
        return {i for i, (d, e) in enumerate(zip(*shapes, strict=True)) if d != e}
    if op.name == "stablehlo.dynamic_slice":
        sizes = [int(d) for d in op.attributes["slice_sizes"]]
        return {i for i, (d, e) in enumerate(zip(op.operands[0].type.shape, sizes, strict=True)) if int(d) != e}
    if op.name == "stablehlo.sort":
        return {int(op.attributes["dimension"].value)}
    return set()


def _numbers_of(attribute: Any, key: str) -> set[int]:
    found = re.search(rf"{key} = \[([\d, ]*)\]", str(attribute))
    return {int(d) for d in found[1].split(",") if d.strip()} if found else set()


def _mend(block: Any) -> None:
    """Have ranks' results of reductions put together by the function that they were reduced by; drop what is said of shardings
    of values within functions, which are settled."""
    for op in reversed([o.operation for o in block.operations]):
        maker = op.operands[0].owner if op.name in ("stablehlo.all_reduce", "stablehlo.reduce_scatter") else None
        if maker is not None and _REDUCED in getattr(maker, "attributes", {}):
            (body,) = op.regions[0].blocks
            add = next(iter(body.operations)).operation
            name, at = str(maker.attributes[_REDUCED].value), api().ir.InsertionPoint(add)
            kinds, given = [add.results[0].type], list(add.operands)
            made = api().ir.Operation.create(name, results=kinds, operands=given, ip=at, loc=add.location)
            add.results[0].replace_all_uses_with(made.results[0])
            add.erase()
        for key in ("sdy.sharding", "sdy.sharding_rule", _REDUCED):
            if key in op.attributes:  # what else stands alone as a module of its own names no mesh
                del op.attributes[key]
        for region in op.regions:
            for inner in region.blocks:
                _mend(inner)


def _split_axes(value: Any) -> set[int]:
    """The axes of a value that its sharding splits."""
    sdy, owner = api().sdy, value.owner
    found = None
    if hasattr(owner, "attributes"):
        if "sdy.sharding" in owner.attributes:
            per_value = list(sdy.TensorShardingPerValueAttr(owner.attributes["sdy.sharding"]).shardings)
            found = per_value[value.result_number]
        elif "out_sharding" in owner.attributes:
            found = owner.attributes["out_sharding"]
        elif "sharding" in owner.attributes:
            found = owner.attributes["sharding"]
    else:
        holder = owner.owner
        attrs = list(holder.attributes["arg_attrs"]) if "arg_attrs" in holder.attributes else []
        if value.arg_number < len(attrs) and "sdy.sharding" in attrs[value.arg_number]:
            found = attrs[value.arg_number]["sdy.sharding"]
    if found is None:
        return set()
    dims = sdy.TensorShardingAttr(found).dimension_shardings
    return {i for i, d in enumerate(dims) if list(sdy.DimensionShardingAttr(d).axes)}


def _partition(bytecode: bytes) -> bytes:
    """Partition a module in Shardy's spelling, in the other process."""
    with new_context():
        module = api().ir.Module.parse(bytecode)
        problem = run_passes(module, _PROPAGATE)
        problem = problem or _settle(module.body) or run_passes(module, _PARTITION)
        if problem is not None:
            raise ValueError(problem)
        with api().ir.Location.unknown():
            _mend(module.body)
        out = io.BytesIO()
        module.operation.write_bytecode(out)
    return out.getvalue()


def main() -> None:
    """Do a task on what stands on standard input; answer with a verdict and, on the next line, bytecode or a reason."""
    with children.answers("wb") as answer:
        given = sys.stdin.buffer.read()
        with contextlib.suppress(ImportError, ValueError, OSError):
            resource = importlib.import_module("resource")  # not on Windows
            limit = _CONVERSION_MEMORY_BYTES + 64 * len(given)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            partition = sys.argv[1:] == ["partition"]
            answer.write(b"partitioned\n" + _partition(given) if partition else b"converted\n" + _convert(given.decode()))
        except MissingDependencyError as error:
            answer.write(b"missing\n" + error.what.encode())
        except Exception as error:
            answer.write(b"refused\n" + str(error).encode())


if __name__ == "__main__":
    main()
