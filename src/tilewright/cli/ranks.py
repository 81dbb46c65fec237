"""`--mesh`: a verb as a job of several ranks, each in a process of its own, which torchrun starts or this command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import click

from tilewright import children
from tilewright.errors import InputError

JOB = "TILEWRIGHT_JOB"  # the file by which ranks that this command started find each other
PEER = 75  # exit code where another rank ended it: EX_TEMPFAIL of <sysexits.h>, to be started again
GRACE_S = 7.0  # for ranks to say what they miss, once another one failed
ENDING_S = 1.0  # for one to end when it is asked to
POLL_S = 0.02

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=N,…",
    help="Run as one rank of a mesh, such as tp=2: of those that torchrun started, or of as many processes started here.",
)


def rank() -> int | None:
    """The rank of this process in a job; None for a process that is in none."""
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() and "WORLD_SIZE" in os.environ else None


def start(verb: str, args: Sequence[str], mesh: str) -> int:
    """Run a verb in a process for each rank of a mesh; the exit code of the job.

    Raises:
        InputError: it is no mesh.
    """
    from tilewright.ir.mesh import Mesh
    from tilewright.processors import usable

    count = Mesh.parse(mesh).size
    if count > 8 * usable():
        raise InputError(
            f"{count} processes on {usable()} processors", where="--mesh", hint="fewer, or torchrun on several hosts"
        )
    with tempfile.TemporaryDirectory(prefix="tilewright-job-") as folder:
        common = {**os.environ, JOB: str(Path(folder) / "store"), "WORLD_SIZE": str(count)}
        common.setdefault("OMP_NUM_THREADS", str(max(1, usable() // count)))
        common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch says of a rank that is gone where its own code noticed
        if sys.platform == "linux":
            common.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, "-m", "tilewright", verb, *args]
        ranks = [_started(command, {**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(count)]
        try:
            return _ended(ranks)
        finally:
            _end(ranks)
            _relay([_error_of(common[JOB], r) for r in range(count)])


def tell(message: str) -> None:
    """Say why this process ends. A rank that this command started leaves it to the command, which says it once; the first says
    it itself, too."""
    own, job = rank(), os.environ.get(JOB)
    if job and own is not None:
        with contextlib.suppress(OSError):
            _error_of(job, own).write_text(message, "utf-8")
            if own:
                return
    _say(message, [own] if own else [])


def _say(message: str, ranks: Sequence[int]) -> None:
    of = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " if ranks else ""
    click.echo(f"{of}{click.style('error:', fg='red', bold=True)} {message}", err=True)


def _error_of(job: str, rank: int) -> Path:
    """The file in which a rank leaves why it ended."""
    return Path(f"{job}.error.{rank}")


def _relay(files: Sequence[Path]) -> None:
    """Say what ranks left and the first did not say itself, each sentence once."""
    said: dict[str, list[int]] = {}
    for r, file in enumerate(files):
        with contextlib.suppress(OSError):
            said.setdefault(file.read_text("utf-8"), []).append(r)
    for message, ranks in said.items():
        if 0 not in ranks:
            _say(message, ranks)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, or for some seconds once one failed. A rank that was killed, or missed another one, counts most."""
    until = None
    while any(r.poll() is None for r in ranks):
        if until is None and any(r.returncode for r in ranks):
            until = time.monotonic() + GRACE_S
        if until is not None and time.monotonic() > until:
            break
        time.sleep(POLL_S)
    codes = [PEER if r.returncode is None or r.returncode < 0 else r.returncode for r in ranks]
    return PEER if PEER in codes else next((code for code in codes if code), 0)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left of a job."""
    for r in ranks:
        if r.poll() is None:
            r.terminate()
    until = time.monotonic() + ENDING_S
    for r in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            r.wait(max(0.0, until - time.monotonic()))
        if r.poll() is None:
            r.kill()
            r.wait()


@contextlib.contextmanager
def as_rank() -> Generator[None]:
    """A context for a verb in one rank's process: it ends with the command that started it, and the first alone prints."""
    if JOB in os.environ:
        children.die_with_parent()
    if not rank():
        yield
        return
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        yield
