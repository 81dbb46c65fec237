"""Torture of the cache of decisions, which must survive many writers at once, kill -9 while it writes, flipped bytes.

`make torture` runs it whole; the ordinary tests run it small. It imports no torch, so that hundreds of processes start fast."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tilewright.schedule.cache import Cache
from tilewright.schedule.record import Key, Record, RejectedRecord

KEY = Key(
    chip="x86_64_avx512",
    processor="A processor",
    cores=8,
    threads=8,
    driver="1.2",
    toolkit="13.0",
    libraries="torch 2",
    tilewright="0.1.0 abc",
    numerics="ieee",
    alignment_bytes=64,
    cold=False,
    budget="long",
    problem="0",
)


def record(problem: str, time_us: float = 1.5) -> Record:
    """A record of a problem, a few hundred bytes long."""
    losers = tuple(RejectedRecord(f"other{i}", f"slower: {problem} again", i + 2.5) for i in range(4))
    knobs = (("mr", 6), ("order", "nmk"), ("pack_lhs", False))
    key = msgspec.structs.replace(KEY, problem=problem)
    return Record("llvm", knobs, time_us, losers, key=key, problem=f"f32[{problem}]", made_s=1e9)


def children(count: int, work: Callable[[int], None]) -> list[int]:
    """Process ids of as many forks, each doing its work and then ending."""
    made: list[int] = []
    for number in range(count):
        process = os.fork()
        if not process:
            status = 1
            try:
                work(number)
                status = 0
            finally:
                os._exit(status)
        made.append(process)
    return made


def ended(processes: list[int]) -> list[int]:
    """Their exit codes, negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes]


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {what}")


def writers(folder: Path, processes: int, each: int) -> str:
    """Many processes tune at once, some of them the same problem: nothing is lost, nothing is done twice."""
    log = folder / "searched"

    def tune(number: int) -> None:
        cache = Cache(folder)
        for i in range(each):
            made = record(f"{number}.{i}", number + i)
            with cache.alone(made.key, 5) as held:
                assert held or cache.get(made.key) is None
                assert cache.put(made)
        for i in range(8):  # wanted by all
            shared = record(f"shared {i}")
            if cache.get(shared.key) is None:
                with cache.alone(shared.key, 60):
                    if cache.get(shared.key) is None:
                        with log.open("a") as out:
                            out.write(f"{i}\n")
                        time.sleep(0.01)
                        assert cache.put(shared)

    codes = ended(children(processes, tune))
    check(codes == [0] * processes, f"a writer failed: {codes}")
    cache = Cache(folder)
    written = [record(f"{n}.{i}", n + i) for n in range(processes) for i in range(each)]
    lost = [r.key.problem for r in written if cache.get(r.key) != r]
    check(not lost, f"{len(lost)} records were lost: {lost[:5]}")
    check(len(cache.records()) == processes * each + 8, "records that nobody wrote")
    check(sorted(log.read_text().split()) == sorted(map(str, range(8))), f"searched twice: {log.read_text().split()}")
    cache.close()
    return f"{processes} processes, {each} records each: 0 of {processes * each} lost, 8 problems wanted by all searched once"


def killed(folder: Path, kills: int, at_once: int, rng: random.Random) -> str:
    """Writers are killed at any moment: the file stays whole, and what was acknowledged is there."""
    acknowledged = 0
    for wave in range(-(-kills // at_once)):
        pipes = [os.pipe() for _ in range(at_once)]

        def write(number: int, pipes: list[tuple[int, int]] = pipes, wave: int = wave) -> None:
            cache = Cache(folder)
            for i in range(1_000_000):
                made = record(f"{wave}.{number}.{i}", i)
                with cache.alone(made.key, 5):
                    if cache.put(made):
                        os.write(pipes[number][1], f"{i}\n".encode())

        processes = children(at_once, write)
        for _, end in pipes:
            os.close(end)
        time.sleep(rng.uniform(0.003, 0.06))
        for p in processes:
            os.kill(p, signal.SIGKILL)
        check(ended(processes) == [-signal.SIGKILL] * at_once, "a writer ended by itself")
        cache = Cache(folder)
        for number, (end, _) in enumerate(pipes):
            with os.fdopen(end) as lines:
                for i in map(int, lines.read().split()):
                    acknowledged += 1
                    made = record(f"{wave}.{number}.{i}", i)
                    check(cache.get(made.key) == made, f"acknowledged and lost: {made.key.problem}")
        started = time.monotonic()
        with cache.alone(record(f"{wave}.0.0").key, 5) as held:
            check(held or cache.get(record(f"{wave}.0.0").key) is not None, "a dead process holds its lock")
        check(time.monotonic() - started < 2, "a dead process held its lock for a while")
        cache.close()
        with contextlib.closing(sqlite3.connect(folder / "decisions-0.sqlite")) as file:
            check(file.execute("PRAGMA quick_check").fetchall() == [("ok",)], "the file is corrupt")
    check(acknowledged > 0, "no record was written before the kill")
    check(not (folder / "decisions-1.sqlite").exists(), "a file was set aside")
    return f"{kills} kill -9 while writing: 0 corrupt, 0 of {acknowledged} acknowledged records lost"


def flipped(folder: Path, flips: int, rng: random.Random) -> str:
    """One byte of the file or its log is changed: each record is what was written or missing, and new ones can be kept."""
    whole = folder / "whole"
    cache = Cache(whole)
    written = [record(str(i), i) for i in range(60)]
    check(all(cache.put(r) for r in written), "nothing can be written")
    names = ("decisions-0.sqlite", "decisions-0.sqlite-wal")
    logged = {name: (whole / name).read_bytes() for name in names}
    cache.close()
    settled = {names[0]: (whole / names[0]).read_bytes()}
    missing = aside = 0
    for number in range(flips):
        state = (settled, logged)[number % 2]
        place = folder / f"flip{number}"
        place.mkdir(mode=0o700)
        victim = rng.choices(list(state), [len(content) for content in state.values()])[0]
        at, other = rng.randrange(len(state[victim])), rng.randrange(1, 256)
        for name, content in state.items():
            (place / name).touch(mode=0o600)
            flip = bytes([content[at] ^ other]) if name == victim else content[at : at + 1]
            (place / name).write_bytes(content[:at] + flip + content[at + 1 :])
        what = f"{victim} byte {at} ^ {other}"
        cache = Cache(place)
        with contextlib.redirect_stderr(io.StringIO()):
            found = [cache.get(r.key) for r in written]
            check(all(f is None or f == r for f, r in zip(found, written, strict=True)), f"{what}: a wrong record")
            check({*cache.records()} <= {*written}, f"{what}: a wrong record in the list")
            check(cache.put(record("new")) and cache.get(record("new").key) == record("new"), f"{what}: none can be added")
            check(cache.unusable is None, f"{what}: {cache.unusable}")
        missing += sum(f is None for f in found)
        aside += (place / "decisions-1.sqlite").exists()
        cache.close()
        shutil.rmtree(place)
    check(missing > 0 or flips < 100, "no flip hit anything")
    return f"{flips} random byte flips: only misses ({missing} of {flips * len(written)} reads; {aside} files set aside)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few seconds' worth")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    parts: list[Callable[[Path], str]] = [
        lambda f: writers(f, *((8, 25) if given.small else (32, 200))),
        lambda f: killed(f, *((24, 4) if given.small else (500, 4)), rng),
        lambda f: flipped(f, 100 if given.small else 2000, rng),
    ]
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            sys.stdout.write(f"{part(Path(folder))} [{time.monotonic() - started:.1f} s]\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
