"""`perf --against`: other libraries run the same program on the same inputs, in turns with it, each in a process of its own.

As a module of its own process (`python -m tilewright.cli.against NAME`) it is one of them.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.given import Given, progress
from tilewright.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tilewright.ir.graph import Graph
    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.schema import Comparison, Peer, Verify
    from tilewright.runtime.executable import Executable

ROUNDS = 7
WARM_S, TIMED_S = 0.1, 0.3
START_S = 5.0  # of a peer's process, to import its library and to read the program
LEAST_ROUNDS = 3
LEAST_READY_S = 20.0  # for a peer to be ready, and for a turn of its, however small a budget is
SEARCH_S = 0.2  # for each problem of torch's, where there is time
SEARCHING = 0.5  # of the time to be ready, for such searches; the rest to read the program, and to run it once


@dataclass(frozen=True)
class Case:
    """A program and its inputs on a device.

    Attributes:
        given: the program as the command names it.
        device: the device.
        threads: number of threads that each contender may use.
        search_s: seconds that one may search for each problem.
        ready_s: seconds in which one has to be ready to run; null where it has as many as it takes.
    """

    given: Given
    device: str
    threads: int
    search_s: float = SEARCH_S
    ready_s: float | None = None

    def load(self) -> tuple[Graph, list[Feed]]:
        """The program's graph as it was read, and a value for each input."""
        graph = self.given.load()
        return graph, self.given.feeds(graph)

    def told(self) -> dict[str, Any]:
        """The case as JSON holds it, for another process (`of`)."""
        given = asdict(self.given)
        paths = {name: value and str(value) for name, value in given.items() if name in ("file", "inputs")}
        return {"given": given | paths, "device": self.device, "threads": self.threads} | {
            "search_s": self.search_s,
            "ready_s": self.ready_s,
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Case:
        """The case that another process told."""
        given = told["given"]
        paths = {name: value and Path(value) for name, value in given.items() if name in ("file", "inputs")}
        return cls(Given(**(given | paths)), told["device"], told["threads"], told["search_s"], told["ready_s"])


def _case(given: Given, device: str, option: str) -> Case:
    """The case of a verb with `option`.

    Raises:
        UsageError: an input is fixed, which nobody else does.
    """
    from tilewright.threads import count

    if given.fixed:
        raise click.UsageError(f"{option} runs the file as it is, with all its inputs: leave --fix out")
    return Case(given, device, count())


def torch_peer(case: Case) -> Callable[[], object]:
    """torch's own kernels: norms, attentions and other recognised operations whole, all else one after the other."""
    from tilewright.compiler import CANONICAL
    from tilewright.hardware.detect import detect
    from tilewright.ir.pattern import Rule, Trace, discover, released, rewrite
    from tilewright.report.measure.perf import bind
    from tilewright.runtime.executable import Executable
    from tilewright.runtime.prepare import prepare
    from tilewright.schedule.candidate import MATRIX_LIBRARIES, kernel_of, plan_for
    from tilewright.schedule.candidate import discover as candidates
    from tilewright.schedule.search import Decision, search
    from tilewright.schedule.space import foremost

    ends = time.monotonic() + (math.inf if case.ready_s is None else SEARCHING * case.ready_s)
    source, feeds = case.load()
    trace, target = Trace(), detect(case.device)
    graph = source
    for stage in ("accumulator", "recognise"):
        rules = discover("tilewright.rules", Rule)
        graph = rewrite(graph, [r for r in rules if r.stage in (stage, CANONICAL)], trace)
    graph = released(graph, trace)
    libraries = [c for c in candidates() if c.preference >= MATRIX_LIBRARIES.start and c.name != "split"]
    known, untried = dict[Any, Decision](), list[Decision]()

    def decided(problem: Any, weights: Mapping[int, torch.Tensor]) -> Decision:
        left_s = ends - time.monotonic()
        first = foremost(problem, target, libraries) if left_s <= 0 else None
        if first is not None:  # unexamined: its results are compared with ours in the end
            candidate, point = first
            kernel = kernel_of(plan_for(candidate, problem, target), point)
            untried.append(Decision(problem, kernel, None, (), measured=False, verified=False))
            return untried[-1]
        within_s = None if left_s == math.inf else max(0.0, left_s)
        return search(problem, target, budget_s=case.search_s, candidates=libraries, weights=weights, within_s=within_s)

    def decide(problem: Any, weights: Mapping[int, torch.Tensor]) -> Decision:
        if problem not in known:
            known[problem] = decided(problem, weights)
        return known[problem]

    program = prepare(source, graph, target, trace, decide, made=Executable)
    inputs = bind(program, feeds)
    note = f"the time was over: {len(untried)} of {len(known)} problems by the first kernel, not the fastest" if untried else ""
    return _waited(lambda: program.run(inputs), case.device, note)


def _waited(run: Callable[[], object], device: str, note: str = "") -> Callable[[], object]:
    """A call that ends when the device is done; with what there is to say of it."""
    from tilewright.schedule.measure import synchronize

    def waited() -> object:
        result = run()
        synchronize(device)
        return result

    setattr(waited, "note", note)  # noqa: B010 - a function's type declares none
    return waited


def onnxruntime_peer(case: Case) -> Callable[[], object]:
    """ONNX Runtime on the same file, with all its optimisations.

    Raises:
        UnsupportedError: the file is no ONNX, or this build does not run on the device.
    """
    if case.given.file.suffix.lower() != ".onnx":
        raise UnsupportedError("it reads ONNX files alone")
    import onnxruntime as ort

    wanted = "CPUExecutionProvider" if case.device == "cpu" else "CUDAExecutionProvider"
    if wanted not in ort.get_available_providers():
        raise UnsupportedError(f"this build of it has no {wanted}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 4
    session = ort.InferenceSession(str(case.given.file), options, providers=[wanted])
    _, feeds = case.load()
    values = {f.shown.name: _numpy(f.value) for f in feeds}
    return lambda: session.run(None, values)


def onnx_peer(case: Case) -> Callable[[], object]:
    """onnx's own evaluator, operator by operator.

    Raises:
        UnsupportedError: the file is no ONNX.
    """
    if case.given.file.suffix.lower() != ".onnx":
        raise UnsupportedError("it reads ONNX files alone")
    import onnx
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(onnx.load(case.given.file))
    _, feeds = case.load()
    values = {f.shown.name: _numpy(f.value) for f in feeds}
    return lambda: session.run(None, values)


def xla_peer(case: Case) -> Callable[[], object]:
    """XLA on the CPU, compiled from the same text.

    Raises:
        UnsupportedError: the file is neither HLO nor StableHLO, or the device is no CPU.
    """
    if case.device != "cpu":
        raise UnsupportedError("it is run on the CPU alone")
    file = case.given.file
    if file.suffix.lower() not in (".hlo", ".mlir", ".stablehlo", ".txt"):
        raise UnsupportedError("it reads HLO and StableHLO alone")
    if hasattr(os, "sched_setaffinity"):  # it takes as many threads as there are cores to run on
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from tilewright.frontends import hlo
    from tilewright.frontends.stablehlo.jaxlib import hlo_to_stablehlo

    jax.config.update("jax_enable_x64", True)  # or 64-bit inputs become 32-bit ones
    text = file.read_text("utf-8")
    native: Any = importlib.import_module("jaxlib._jax")
    device: Any = jax.devices("cpu")[0]
    code = hlo_to_stablehlo(hlo.with_header(text, file.name), file.name) if hlo.accepts(text) else text
    compiled = device.client.compile_and_load(code, native.DeviceList((device,)), native.CompileOptions())
    _, feeds = case.load()
    arrays = [jax.device_put(_numpy(f.value), device) for f in feeds]

    def run() -> object:
        results = compiled.execute(arrays)
        for r in results:
            r.block_until_ready()
        return results

    return run


def _numpy(value: object) -> np.ndarray:
    """An input as NumPy has it, in the types of ml_dtypes where NumPy lacks one."""
    import numpy as np
    import torch

    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


PEERS: dict[str, Callable[[Case], Callable[[], object]]] = {
    "torch": torch_peer,
    "onnxruntime": onnxruntime_peer,
    "xla": xla_peer,
}
READERS = {**PEERS, "onnx": onnx_peer}


def beside_s(budget_s: float, peers: Sequence[str]) -> float:
    """Seconds of a budget for timing peers: as long as they take, but no more than half of it."""
    rounds_s = ROUNDS * (len(peers) + 1) * (WARM_S + TIMED_S)
    return min(len(peers) * START_S + rounds_s, budget_s / 2)


def beside(
    measured: Measured, program: Executable, feeds: Sequence[Feed], given: Given, peers: Sequence[str], left_s: float = math.inf
) -> Measured:
    """The measured program with the peers' times beside it. Once `left_s` seconds are over no further round begins, but for
    the least that there are to be; a peer has its share of them to be ready, and `LEAST_READY_S` at least."""
    from msgspec.structs import replace as replaced

    share_s = None if left_s == math.inf else max(LEAST_READY_S, left_s / (len(peers) + 1))
    case = replace(_case(given, program.target.device, "--against"), search_s=min(SEARCH_S, left_s / 100), ready_s=share_s)
    rows = against(program, feeds, case, peers, left_s)
    return replace(measured, report=replaced(measured.report, against=rows))


def with_source(report: Verify, program: Executable, feeds: Sequence[Feed], given: Given, budget_s: float) -> Verify:
    """The report with what the source's own library made of the program, which may change the verdict. A library has as long as
    the whole budget, and `LEAST_READY_S` at least."""
    from msgspec.structs import replace as replaced

    ready_s = max(LEAST_READY_S, budget_s) if budget_s > 0 else None
    said, row = by_source(program, feeds, replace(_case(given, "cpu", "--source"), ready_s=ready_s))
    if row is None:
        return replaced(report, source=said)
    first = report.first_difference or (None if row.ok else row)
    return replaced(
        report, source=said, end_to_end=[*report.end_to_end, row], verified=report.verified and row.ok, first_difference=first
    )


def against(
    program: Executable, feeds: Sequence[Feed], case: Case, peers: Sequence[str], left_s: float = math.inf
) -> list[Peer]:
    """The peers' times and ours, interleaved; ours is timed in this process, whose threads sleep while it waits."""
    import numpy as np

    from tilewright.report.measure.perf import bind
    from tilewright.report.measure.rounds import Contender, Here, Process, compete

    inputs = bind(program, feeds)
    environment = {"OMP_NUM_THREADS": str(case.threads), "TOKENIZERS_PARALLELISM": "false"}
    contenders: list[Contender] = []
    try:
        for name in peers:
            contenders.append(Process(name, [sys.executable, "-m", __spec__.name, name], environment, case.ready_s))
        ours = Here("tilewright", _waited(lambda: program.run(inputs), case.device))
        with progress("timing beside others") as show, tempfile.TemporaryDirectory() as folder:
            times, refused = compete(
                [*contenders, ours],
                case.told(),
                rounds=ROUNDS,
                enough=LEAST_ROUNDS,
                within_s=left_s,
                warm_s=WARM_S,
                timed_s=TIMED_S,
                least=2,
                results=Path(folder),
                keep=["tilewright"],
                progress=show,
            )
            found = {n: np.load(Path(folder) / f"{n}.npy") for n in times}
    finally:
        for contender in contenders:
            if isinstance(contender, Process):
                contender.stop()
    refused = {n: _with_hint(why, case) for n, why in refused.items()}
    notes = {c.name: c.note for c in contenders}
    return [_row(name, times, refused, found, notes[name]) for name in peers]


def _with_hint(why: str, case: Case) -> str:
    """The sentence why a library gave nothing, with what to try where it had no more time."""
    from tilewright.report.measure.rounds import SILENT

    return f"{why}; a larger --budget gives it more" if case.ready_s is not None and why.startswith(SILENT) else why


def by_source(program: Executable, feeds: Sequence[Feed], case: Case) -> tuple[str, Comparison | None]:
    """A sentence on who else ran the program, and how far its results lie from ours; nothing without such a library.

    It is the source's own: onnxruntime, or onnx's evaluator, for ONNX; XLA's CPU client for HLO and StableHLO, in a process of
    its own. So what a front end misreads shows, which the oracle cannot see: it runs the program as it was read.
    """
    import numpy as np

    from tilewright.report.measure.perf import bind
    from tilewright.report.measure.rounds import Here, Process

    inputs = bind(program, feeds)
    refused: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        Here("tilewright", lambda: program.run(inputs)).take(None, Path(folder) / "ours.npy")
        ours = np.load(Path(folder) / "ours.npy").reshape(-1)
        for name in ("onnxruntime", "onnx") if case.given.file.suffix.lower() == ".onnx" else ("xla",):
            command = [sys.executable, "-m", __spec__.name, name]
            peer = Process(name, command, {"TOKENIZERS_PARALLELISM": "false"}, case.ready_s)
            try:
                with progress(f"running it by {name}", case.ready_s):
                    why = peer.take(case.told(), Path(folder) / f"{name}.npy")
            finally:
                peer.stop()
            if why is None:
                theirs = np.load(Path(folder) / f"{name}.npy").reshape(-1)
                return f"the source's own library, {name}, ran the program, too", _compared(name, ours, theirs, program)
            refused.append(f"{name}: {_with_hint(why, case)}")
    return f"no library of the source's own ran the program ({'; '.join(refused)})", None


def _compared(name: str, ours: np.ndarray, theirs: np.ndarray, program: Executable) -> Comparison:
    """One row of `verify`: the error is relative, of all results together, and may be what `verify_program` allows a whole
    program; of integers that no float is behind it must be none."""
    import numpy as np

    from tilewright.report.measure.verify import coarsest_rounding, rms_bound
    from tilewright.report.schema import Comparison
    from tilewright.report.words import EVERY_OUTPUT

    bound = max(0.0 if c is None else rms_bound(c) for c in map(coarsest_rounding, program.source.outputs))
    error, why = float("inf"), None
    if ours.size != theirs.size:
        why = f"{theirs.size} numbers from {name}, {ours.size} here"
    else:
        with np.errstate(invalid="ignore"):
            differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
            unequal = ours[differ] - theirs[differ]
        size = float(np.linalg.norm(theirs[np.isfinite(theirs)]))
        error = float(np.linalg.norm(unequal)) / (size or 1.0) if np.isfinite(unequal).all() else float("inf")
        if error > bound:
            at = int(np.flatnonzero(differ)[0])
            why = (
                f"{int(differ.sum())} of {ours.size} numbers differ, the first {ours[at]:g} for {theirs[at]:g}: read otherwise"
            )
    return Comparison(
        f"the whole program by {name}", "output", EVERY_OUTPUT, "the whole program", error, bound, why is None, why
    )


def _row(
    name: str, times: Mapping[str, Sequence[float]], refused: Mapping[str, str], found: Mapping[str, np.ndarray], note: str
) -> Peer:
    import statistics

    import torch

    from tilewright.report.measure.accuracy import relative_error
    from tilewright.report.measure.rounds import ratio
    from tilewright.report.schema import Peer

    about = " ".join((PEERS[name].__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
    what = "; ".join(filter(None, (about, note)))
    if name in refused:
        return Peer(name, what, None, None, None, None, refused[name])
    theirs, ours, mine = times[name], times["tilewright"], found["tilewright"]
    same = found[name].size == mine.size
    apart = relative_error(torch.from_numpy(mine.reshape(-1)), torch.from_numpy(found[name].reshape(-1))) if same else None
    own_us, us = 1e6 * statistics.median(ours), 1e6 * statistics.median(theirs)
    return Peer(name, what, round(us, 3), round(own_us, 3), round(ratio(ours, theirs), 4), apart, None)


def _main() -> None:
    from tilewright.report.measure.rounds import serve

    serve(lambda case: READERS[sys.argv[1]](Case.of(case)))


if __name__ == "__main__":
    _main()
