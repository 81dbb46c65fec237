"""Ceilings that this machine has been seen to reach: the rate of each matrix unit and of memory, measured once and kept.

Where code is generated for the machine, the rate of a unit is measured on its instruction, in a loop that touches nothing but
registers; a candidate's module offers such loops as `LOOPS`. Elsewhere it is the rate of the best library matmul on a large
square. A kernel may exceed that rate; reports then show a fraction above 1. Memory is read and copied past the last cache.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import torch

from tilewright import deadline, threads
from tilewright.discovery import modules
from tilewright.files import NotJSONError, alone, cache_folder, decoded, read_own, write_own
from tilewright.hardware.load import Meter, Threads, load_now
from tilewright.hardware.target import Target

ROUNDS = 7
LONGEST_S = 1.0  # after which no further round begins: a type that the processor has no unit for takes seconds a product
LEEWAY = 1.05  # what a kernel's time may err by
MEASURED_S = 3.0  # about what measuring them takes
WAIT_S = 20.0  # for another process that measures them
VERSION = 6  # of how ceilings are measured
MOST_KEPT = 16  # records of a kind of device


Rate = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Loops:
    """The measurements that a candidate offers and a library cannot.

    Attributes:
        peaks: by operand type, what measures 1e9 operations a second of the unit alone.
        read: what measures 1e9 bytes a second of reading the memory it is given, by all threads; it may write to the first
            page.
    """

    peaks: Mapping[str, Callable[[], float]]
    read: Callable[[torch.Tensor], float]


class Record(msgspec.Struct, frozen=True):
    """The ceilings kept on disk for one machine: rates in 1e9 operations or bytes a second, and why they are not reliable, ""
    if they are."""

    key: str
    peak_gops: dict[str, Rate]
    read_gbps: Rate
    copy_gbps: Rate
    noise: str = ""


def known(target: Target) -> bool:
    """Tell whether this machine's rates were measured before, and are kept."""
    return _load(_key(target), target.kind) is not None


def with_ceilings(target: Target, *, remeasure: bool = False) -> Target:
    """The target with its measured rates: read back if this machine and torch measured them before, else measured now.

    Those measured while other processes kept the machine busy are provisional: they are measured again when it is quiet, and
    each is then the most of both. A folder that cannot be written costs the memory of it, not the measurement. Of processes
    that start at once one measures, and the others wait.

    Raises:
        OverrunError: nothing is kept, and the time of the work around it was over before all was measured.
    """
    key = _key(target)
    record = None if remeasure else _load(key, target.kind)
    if record is None or (record.noise and not load_now(target.device, threads.count()).noise):
        with contextlib.ExitStack() as waiting:
            with contextlib.suppress(OSError):
                waiting.enter_context(alone(cache_folder() / f"ceilings-{target.kind}.lock", min(WAIT_S, deadline.left_s())))
            there = _load(key, target.kind)
            if not remeasure and there is not None and there != record:  # another process measured them meanwhile
                return _with(target, there)
            try:
                measured = _measure(target, key)
            except deadline.OverrunError:
                if record is None:
                    raise
                return _with(target, record)
            if there is not None and (measured.noise or not remeasure):
                measured = _most(there, measured)
            record = measured
            _save(record, target.kind)
    return _with(target, record)


def _most(before: Record, now: Record) -> Record:
    """The most of two measurements, as noise only lowers a rate, as reliable as the better one."""
    names = {**before.peak_gops, **now.peak_gops}
    peaks = {n: max(before.peak_gops.get(n, 0.0), now.peak_gops.get(n, 0.0)) for n in names}
    read, copy = max(before.read_gbps, now.read_gbps), max(before.copy_gbps, now.copy_gbps)
    return Record(now.key, peaks, read, copy, now.noise if before.noise else "")


def corrected(target: Target, seen_gops: Mapping[str, float]) -> tuple[Target, list[str]]:
    """The target with ceilings that nothing was seen to exceed, and a sentence on each that had been too low.

    A ceiling that a kernel exceeds was measured while something else ran, or through a library that is not the best. All are
    measured again, once, if there is time; each is then the most of what was measured either time and what was seen, and is
    kept.

    Args:
        target: with its measured rates.
        seen_gops: what kernels reached, in 1e9 operations a second, by the operand type of the unit that they used.
    """
    low = {n: rate for n, rate in seen_gops.items() if rate > LEEWAY * target.peak_gops.get(n, rate)}
    if not low:
        return target, []
    record, again = Record(_key(target), dict(target.peak_gops), target.read_gbps, target.copy_gbps, target.noise), None
    with contextlib.suppress(deadline.OverrunError):
        again = _measure(target, _key(target))
        record = _most(record, again)
    most = record.peak_gops
    most |= {n: max(rate, most[n]) for n, rate in low.items()}
    _save(record, target.kind)
    said = [
        f"the ceiling of {n} was measured too low, {target.peak_gops[n]:,.1f} Gop/s: a kernel reached {rate:,.1f}; "
        + ("no time is left" if again is None else f"measured again it is {again.peak_gops.get(n, 0.0):,.1f}")
        + f", and {most[n]:,.1f} is kept"
        for n, rate in low.items()
    ]
    return _with(target, record), said


def _key(target: Target) -> str:
    return f"{VERSION}|{target.name}|{target.chip.name}|{target.cores}|{threads.count()}|torch {torch.__version__}"


def _with(target: Target, record: Record) -> Target:
    return replace(
        target, peak_gops=record.peak_gops, read_gbps=record.read_gbps, copy_gbps=record.copy_gbps, noise=record.noise
    )


def _load(key: str, kind: str) -> Record | None:
    return next((record for record in _kept(kind) if record.key == key), None)


def _kept(kind: str) -> list[Record]:
    """Records of devices of a kind, by number of threads, version of torch, …: those saved last at the end."""
    try:
        return decoded(read_own(cache_folder() / f"ceilings-{kind}.json"), list[Record])
    except (OSError, NotJSONError):
        return []


def _save(record: Record, kind: str) -> None:
    with contextlib.suppress(OSError):
        others = [r for r in _kept(kind) if r.key != record.key]
        write_own(cache_folder() / f"ceilings-{kind}.json", msgspec.json.encode([*others, record][-MOST_KEPT:]))


def _measure(target: Target, key: str) -> Record:
    """All rates, or none: a unit without one would be taken for another's."""
    deadline.check()
    device = target.device
    large = target.kind == "cuda"
    meter = Meter(device, threads.count())
    loops = [found for m in modules("tilewright.candidates", defining="LOOPS") if (found := m.LOOPS(target)) is not None]
    peaks = {name: measure() for each in loops for name, measure in each.peaks.items()}
    size = 8192 if large else 1024
    for name, build in _products(device, size, large).items():
        if name in peaks:
            continue
        deadline.check()
        try:
            run = build()
            seconds = _best_seconds(run, device)
        except (RuntimeError, NotImplementedError):  # no such kernel on this device
            continue
        peaks[name] = 2 * size**3 / seconds / 1e9
    deadline.check()
    x = torch.ones((1 << 32 if large else past_caches(target)) // 4, device=device)
    half = len(x) // 2
    reads = (lambda: torch.sum(x), lambda: torch.amax(x), lambda: torch.dot(x, x))
    read = max(x.nbytes / _best_seconds(f, device) / 1e9 for f in reads)
    copy = 2 * x[:half].nbytes / _best_seconds(lambda: x[half:].copy_(x[:half]), device) / 1e9
    read = max(read, copy, *(each.read(x) for each in loops))
    return Record(key, peaks, read, copy, meter.load().noise)


def past_caches(target: Target) -> int:
    """Bytes of which a processor's last cache holds an eighth at most, where that is no more than half a gigabyte."""
    return max(1 << 28, min(1 << 29, 8 * target.caches_bytes.get("L3", 0)))


def _products(device: str, size: int, large: bool) -> dict[str, Callable[[], Callable[[], object]]]:
    def floats(dtype: torch.dtype) -> Callable[[], Callable[[], object]]:
        def build() -> Callable[[], object]:
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty(size, size, dtype=dtype, device=device)
            return lambda: torch.mm(a, b, out=out)

        return build

    def integers() -> Callable[[], object]:
        a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        b = b.t() if large else b
        return lambda: torch.ops.aten._int_mm(a, b)

    def fp8() -> Callable[[], object]:
        a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch.ops.aten._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    found = {"f32": floats(torch.float32), "bf16": floats(torch.bfloat16), "s8": integers}
    if large:
        return found | {"f16": floats(torch.float16), "f8e4m3fn": fp8}
    return found | {"f64": floats(torch.float64)}  # torch's f16 product on a CPU is no ceiling of anything


def _best_seconds(run: Callable[[], object], device: str) -> float:
    """The fastest of a few timed runs after a warm-up: a ceiling is what the machine can do, not what it does on average."""
    for _ in range(2):
        run()
        deadline.check()
    times, own = list[float](), Threads()
    alone = device == "cpu" and threads.count() == 1  # then waiting for a core can be told from work

    def finished() -> None:
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)

    began = time.perf_counter()
    while len(times) < ROUNDS and time.perf_counter() - began < LONGEST_S:
        deadline.check()
        if device != "cpu":
            torch.cuda.synchronize(device)
        sample = own.timed(finished)
        times.append(sample.own_s if alone else sample.wall_s)
    return min(times) if min(times) > 0 else statistics.median(times)
