"""Run the programs Tilewright was made for on this machine, and print one scoreboard.

    python examples/demo.py [--out models] [--only xla] [--json F]

Each program is compiled (every kernel checked before it may win), its results are checked against the oracle's for the program
as it was read, and it is timed; beside it stand the least time this machine's
measured ceilings allow, and torch or onnxruntime on the same program. A peer runs in a process of its own, so that two thread
pools never share one; peer and product take turns, and the median of the rounds counts. Rounds in which other programs wanted
the cores are repeated for a while, and count only where that does not help: then the row says so.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent
ROUNDS = 3
WITHIN_S = 20.0  # for rounds of one program, where other programs disturb some
SECONDS_A_ROUND = 0.7
BUDGET_S = 15.0


@dataclass(frozen=True)
class Program:
    """One row: what it is, the file or module to compile, and who else can run it."""

    key: str
    what: str
    source: Callable[[Path], Any]
    peer: str
    run_peer: Callable[[Any], Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One line of the scoreboard; times in µs. `noise` says why they are not reliable, "" if they are."""

    program: str
    what: str
    verified: bool
    steps: int
    time_us: float
    limit_us: float
    peer: str
    peer_us: float | None
    note: str = ""
    noise: str = ""
    limits_noise: str = ""


@dataclass(frozen=True)
class Turn:
    """Times of a program in one round: their median in µs, and why they are not reliable, "" if they are."""

    us: float
    noise: str = ""


def _hlo(name: str) -> Callable[[Path], Any]:
    return lambda out: HERE / name


def _torch_int8(path: Any) -> Callable[[], object]:
    import torch

    a, b = (torch.randint(-128, 128, (16, 1024, 1024), dtype=torch.int8) for _ in range(2))
    out = torch.empty(16, 1024, 1024, dtype=torch.int8)

    def run() -> object:
        for i in range(16):
            out[i].copy_(torch.ops.aten._int_mm(a[i], b[i].t()))
        return out

    return run


def _mixed_input(out: Path) -> Any:
    from mixed_input import write_mixed_input

    return write_mixed_input("matmulnbits", out)


def _module(out: Path) -> Any:
    from nvfuser_linear import example_inputs, module

    return module(), example_inputs()


def _torch_module(program: Any) -> Callable[[], object]:
    import torch

    module, inputs = program

    def run() -> object:
        with torch.inference_mode():
            return module(*inputs)

    return run


def _model(name: str, variant: str) -> Callable[[Path], Any]:
    def write(out: Path) -> Any:
        from models import write_model

        return write_model(name, variant, out, batch=1, sequence=128)

    return write


def _onnxruntime(path: Any) -> Callable[[], object]:
    import onnxruntime

    import tilewright
    from tilewright.report.measure.inputs import make_feeds

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {f.shown.name: f.value.numpy() for f in make_feeds(tilewright.load(path))}  # type: ignore[attr-defined]
    return lambda: session.run(None, feeds)


PROGRAMS: Sequence[Program] = (
    Program("xla_s8", "openxla/xla #7117: s8 x s8 -> s8", _hlo("xla_7117_s8.hlo"), "torch._int_mm", _torch_int8),
    Program("xla_s32", "the same, spelt s32 + convert", _hlo("xla_7117_s32_convert.hlo"), "torch._int_mm", _torch_int8),
    Program("mixed_input", "NVIDIA/cutlass #1549: s4 weights, f16", _mixed_input, "onnxruntime", _onnxruntime),
    Program("linear_gelu", "NVIDIA/Fuser #1743: bf16 linear + gelu", _module, "torch eager", _torch_module),
    Program("bert", "BERT-base, f32, 1 x 128", _model("bert", "f32"), "onnxruntime", _onnxruntime),
    Program("bert_int8", "the same, int8 QDQ", _model("bert", "int8"), "onnxruntime", _onnxruntime),
    Program("distilgpt2", "DistilGPT2, f32, 1 x 128", _model("distilgpt2", "f32"), "onnxruntime", _onnxruntime),
)


def timed(run: Callable[[], object], what: str = "", seconds: float = SECONDS_A_ROUND) -> Turn:
    """Time calls after one to warm up, as many as fit in `seconds` (three at least), and watch the machine meanwhile.

    `what` names the calls where times far apart are noise, too; "" where they are not.
    """
    from tilewright.hardware.load import Meter
    from tilewright.schedule.race import scatter
    from tilewright.threads import count

    run()
    times: list[float] = []
    meter = Meter("cpu", count())
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    return Turn(statistics.median(times), meter.load().noise or (scatter(what, times) if what else ""))


def in_turns(ours: Callable[[], Turn], theirs: Callable[[], Turn | None]) -> tuple[Turn, Turn | None]:
    """Time both in turns: `ROUNDS` rounds that nothing disturbed, or as many as end within `WITHIN_S`, `ROUNDS` at least.

    Returns:
        The medians of quiet rounds if there are `ROUNDS` of them, else of all, with why these are not reliable. None for a peer
        that cannot run.
    """
    rounds: list[tuple[Turn, Turn | None]] = []
    quiet: list[tuple[Turn, Turn | None]] = []
    began = time.monotonic()
    while len(quiet) < ROUNDS:
        if len(rounds) >= ROUNDS and (time.monotonic() - began) * (1 + 1 / len(rounds)) > WITHIN_S:
            break
        mine = ours()
        peer = theirs() if not rounds or rounds[-1][1] is not None else None
        rounds.append((mine, peer))
        if not mine.noise and (peer is None or not peer.noise):
            quiet.append(rounds[-1])
    counted = quiet if len(quiet) >= ROUNDS else rounds
    return _median([mine for mine, _ in counted]), _median([t for _, t in counted if t is not None]) if counted[-1][1] else None


def _median(turns: Sequence[Turn]) -> Turn:
    """The median of turns, with the last one's noise of those that have any."""
    return Turn(statistics.median(t.us for t in turns), next((t.noise for t in reversed(turns) if t.noise), ""))


class Peer:
    """A peer in a process of its own that times itself each time it is asked; None where it cannot run the program."""

    def __init__(self, key: str, out: Path) -> None:
        command = [sys.executable, __file__, "--peer", key, "--out", str(out)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self) -> tuple[Turn | None, str]:
        """One round, or None and why not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            return None, (self._process.stderr.read().strip().splitlines() or ["it stopped"])[-1][:120]
        return Turn(**json.loads(line)), ""

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def answer_as_peer(key: str, out: Path) -> None:
    """Time the peer of one program once for every line on standard input."""
    program = next(p for p in PROGRAMS if p.key == key)
    run = program.run_peer(program.source(out))
    for _ in sys.stdin:
        click.echo(json.dumps(asdict(timed(run))))


def run_program(program: Program, out: Path, tell: Callable[[str], None]) -> Row:
    """Compile, check and time one program, beside its peer."""
    import tilewright
    from tilewright.report.explain.choices import provisional_words
    from tilewright.report.measure.inputs import make_feeds
    from tilewright.report.measure.perf import bind
    from tilewright.report.measure.verify import verify_program
    from tilewright.report.measure.work import measured_ceilings, work_of

    tell("preparing")
    source = program.source(out)
    module, example = source if isinstance(source, tuple) else (source, None)
    tell("compiling")
    compiled = tilewright.compile(module, example_inputs=example, budget_s=BUDGET_S)
    feeds = make_feeds(compiled.source)
    tell("checking")
    checked = verify_program(compiled, program.key, feeds, steps=False)
    inputs = bind(compiled, feeds)
    tell("timing")
    wrong = checked.first_difference
    note = "" if wrong is None else f"{wrong.name} differs from the oracle: {wrong.why}"
    peer = Peer(program.key, out)

    def theirs() -> Turn | None:
        nonlocal note
        turn, why = peer.ask()
        if turn is None:
            note = note or f"{program.peer}: {why}"
        return turn

    try:
        own, other = in_turns(lambda: timed(lambda: compiled.run(inputs), "calls of the program"), theirs)
    finally:
        peer.close()
    ceilings, _ = measured_ceilings(compiled)  # no lower than what its kernels were seen to reach
    limit = sum(work_of(step).limit_us(ceilings) for step in compiled.steps)
    noise = own.noise or ("" if other is None else other.noise)
    chosen = provisional_words([s.decision for s in compiled.steps if s.decision is not None])
    return Row(
        program.key,
        program.what,
        checked.verified,
        sum(step.part.kind != "view" for step in compiled.steps),
        own.us,
        limit,
        program.peer,
        None if other is None else other.us,
        note,
        "; ".join(words for words in (noise, chosen) if words),
        ceilings.noise,
    )


def noisy_words(rows: Sequence[Row]) -> list[str]:
    """The sentences over the table on what is not reliable in it, and what to do; none where all is."""
    from tilewright.report.text.tables import noise_words

    noisy = [r for r in rows if r.noise]
    said = noise_words(noisy[0].noise if noisy else "", next((r.limits_noise for r in rows if r.limits_noise), ""))
    if noisy:
        which = "All rows were" if len(noisy) == len(rows) else f"{len(noisy)} of {len(rows)} rows, marked ~, were"
        said.append(f"{which} taken in noise. Run it again when the machine is quiet.")
    return said


def scoreboard(rows: Sequence[Row], machine: str) -> Any:
    """The table; times taken in noise have a mark."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"Tilewright on {machine}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("program", no_wrap=True)
    table.add_column("")  # gives way where a terminal is narrow
    table.add_column("verified", no_wrap=True)
    for name in ("steps", "ms", "limit ms", "peer ms", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    for r in rows:
        mark = "~ " if r.noise else ""
        ratio = "" if r.peer_us is None else f"{mark}{r.peer_us / r.time_us:.2f}x"
        peer_ms = "-" if r.peer_us is None else f"{mark}{r.peer_us / 1e3:.2f}"
        cells = (
            r.program,
            r.what,
            "yes" if r.verified else "NO",
            str(r.steps),
            f"{mark}{r.time_us / 1e3:.2f}",
            f"{r.limit_us / 1e3:.2f}",
        )
        table.add_row(*cells, peer_ms, ratio, r.peer)
    return table


@click.command(help="Run the example programs on this machine and print one scoreboard.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=HERE / "models", help="Where models are kept.")
@click.option("--only", multiple=True, help="Programs whose name starts so; may be repeated.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows there too.")
@click.option("--peer", hidden=True, help="Answer as the peer of one program.")
def main(out: Path, only: tuple[str, ...], json_file: Path | None, peer: str | None) -> None:
    """Run every program and print the scoreboard; exit 1 if a result was wrong."""
    if peer is not None:
        answer_as_peer(peer, out)
        return
    from rich.console import Console

    from tilewright.errors import TilewrightError
    from tilewright.files import require_writable, write_whole
    from tilewright.hardware.detect import detect
    from tilewright.report.text.console import console as plain_console

    for start in only:
        if not any(p.key.startswith(start) for p in PROGRAMS):
            raise click.BadParameter(f"none of {', '.join(p.key for p in PROGRAMS)} starts with {start!r}", param_hint="--only")
    try:
        if json_file is not None:
            require_writable(json_file)
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, TilewrightError) as error:
        raise click.UsageError(str(error)) from error
    console = plain_console()
    progress = Console(stderr=True)
    wanted = [p for p in PROGRAMS if not only or any(p.key.startswith(o) for o in only)]
    rows: list[Row] = []
    with progress.status("") as status:
        for program in wanted:
            try:
                if not progress.is_terminal:
                    progress.print(f"{program.key} …", highlight=False)
                rows.append(run_program(program, out, lambda what, p=program: status.update(f"{p.key}: {what}")))
            except TilewrightError as error:
                progress.print(f"{program.key}: {error}", style="red")
    for said in noisy_words(rows):
        console.print(said, style="bold yellow", highlight=False, markup=False)
    console.print(scoreboard(rows, f"{detect('cpu').name}, {detect('cpu').cores} cores"))
    for row in rows:
        if row.noise and len(rows) > 1:
            console.print(f"{row.program}: {row.noise}", style="yellow", highlight=False, markup=False)
        if row.note:
            console.print(f"{row.program}: {row.note}", style="yellow", highlight=False)
    if json_file is not None:
        write_whole(json_file, json.dumps([asdict(r) for r in rows], indent=1).encode())
    sys.exit(0 if len(rows) == len(wanted) and all(r.verified for r in rows) else 1)


if __name__ == "__main__":
    main()
