"""Types of what `--json` prints. Fields are added, never renamed or removed; docs/cli.md describes each."""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

from tilewright.schedule.record import Reason


class Input(msgspec.Struct, frozen=True):
    """An input and what was put into it; `filled` if it was a constant, which flatters a measurement."""

    name: str
    type: str
    data: str
    filled: bool


class Rejected(msgspec.Struct, frozen=True):
    """A candidate that was not chosen, or a point of its space (`schedule`; "" for all of it), the kind of reason, and a
    sentence."""

    candidate: str
    why: str
    kind: Reason
    schedule: str = ""


class Step(msgspec.Struct, frozen=True):
    """One step of the program, timed with the values it has in the program.

    `chosen` is how its kernel was: "read back", "measured" or "not measured"; "" for a call into the source's library.
    """

    name: str
    kind: str
    problem: str
    candidate: str
    schedule: str
    time_us: float
    ops: int
    bytes: int
    limit_us: float
    peak_fraction: float
    rejected: list[Rejected]
    chosen: str = ""


class Finding(msgspec.Struct, frozen=True):
    """Something that a reader should know: what, where in the source, why, and what it costs (null: not a step)."""

    op: str
    where: str
    why: str
    cost_us: float | None


class Layer(msgspec.Struct, frozen=True):
    """The outcome of quantising one product of a float model; `skip_reason` says why it stayed in float, null if it was
    quantised."""

    name: str
    product: str
    skip_reason: str | None
    error: float
    activation_scale: float | None
    weight_scale_min: float
    weight_scale_max: float


class Quantized(msgspec.Struct, frozen=True):
    """The quantisation of a float model: the scheme, the calibration data and the outcome by layer."""

    scheme: str
    calibration: str
    layers: list[Layer]


class Peer(msgspec.Struct, frozen=True):
    """Somebody else who ran the program, or why not (`why`; the figures are then null).

    `ratio` is their time over ours, the median over the rounds; `own_us` our time in these rounds; `difference` how far their
    results lie from ours, relative, in norm.
    """

    name: str
    what: str
    time_us: float | None
    own_us: float | None
    ratio: float | None
    difference: float | None
    why: str | None


class Perf(msgspec.Struct, frozen=True, kw_only=True):
    """`perf --json` and `gemm --perf --json`. `noise`: why its times are not reliable, "" if they are."""

    noise: str = ""
    program: str
    target: str
    total_us: float
    verified: bool
    steps: list[Step]
    unfused: list[Finding]
    fallback: list[Finding]
    inputs: list[Input]
    steps_per_layer: int | None = None
    quantized: Quantized | None = None
    attribution: dict[str, dict[str, int]] = msgspec.field(default_factory=dict[str, dict[str, int]])
    summary: list[str] = msgspec.field(default_factory=list[str])
    against: list[Peer] = msgspec.field(default_factory=list[Peer])
    choices: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class Port(msgspec.Struct, frozen=True):
    """An input or output as declared."""

    name: str
    type: str


class Read(msgspec.Struct, frozen=True):
    """`read --json`."""

    program: str
    inputs: list[Port]
    outputs: list[Port]
    nodes: int
    ops: dict[str, int]
    constant_bytes: int
    notes: list[str]


class Output(msgspec.Struct, frozen=True):
    """One result of `run`; the statistics are of its finite elements, null where there is none."""

    name: str
    type: str
    minimum: float | None
    maximum: float | None
    mean: float | None
    rms: float | None
    nans: int
    infinities: int


class Run(msgspec.Struct, frozen=True):
    """`run --json`."""

    program: str
    target: str
    inputs: list[Input]
    outputs: list[Output]
    written: str | None
    quantized: Quantized | None = None


class Saved(msgspec.Struct, frozen=True):
    """`compile --json`: the file and its bytes, the steps, and for how many the file has all that runs them.

    The others are built when it is read, by the candidates named.
    """

    program: str
    target: str
    written: str
    bytes: int
    steps: int
    complete: int
    built_by: list[str]
    quantized: Quantized | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Something compared with the oracle: its largest error and the bound at that element."""

    name: str
    kind: str
    problem: str
    candidate: str
    error: float
    bound: float
    ok: bool
    why: str | None


class Loss(msgspec.Struct, frozen=True):
    """Relative error, in norm, of a value of the quantised program against the float model's (null: not finite)."""

    name: str
    type: str
    error: float


class Accuracy(msgspec.Struct, frozen=True):
    """`verify --quantized`: the quantised program against the float model."""

    layers: list[Loss]
    outputs: list[Loss]


class Verify(msgspec.Struct, frozen=True):
    """`verify --json`.

    `source`: with `--source`, which library of the source's own ran the program, too; its row is the last of `end_to_end`.
    """

    program: str
    target: str
    verified: bool
    first_difference: Comparison | None
    steps: list[Comparison]
    end_to_end: list[Comparison]
    inputs: list[Input]
    quantized: Quantized | None = None
    accuracy: Accuracy | None = None
    source: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """A candidate with its settings and, if it was timed, its time; `recalled` if that was earlier, and read back;
    `provisional` says why the time is not reliable, "" if it is."""

    candidate: str
    schedule: str
    time_us: float | None
    predicted_us: float | None = None
    recalled: bool = False
    provisional: str = ""


class RejectedChoice(msgspec.Struct, frozen=True):
    """A candidate that was not chosen, as `Rejected`, and its time if it was timed.

    `differs`: of another point of the chosen candidate, the settings that are not those chosen.
    """

    candidate: str
    why: str
    time_us: float | None
    schedule: str
    predicted_us: float | None
    kind: Reason
    differs: str = ""


class Store(msgspec.Struct, frozen=True):
    """One result of a product: what happens to the accumulator on the way, and what is written."""

    steps: list[str]
    writes: str


class Product(msgspec.Struct, frozen=True):
    """One matmul or attention of the program, or several that are alike.

    `beside`: its unfused neighbours, operations that a product could hold and this one does not, each with the reason. `left`:
    its near misses, the sentences of rules that recognised the product and left it as it is.
    """

    names: list[str]
    kind: str
    problem: str
    operands: list[str]
    accumulates: str
    stores: list[Store]
    beside: list[Finding]
    left: list[str]
    chosen: Choice
    measured: bool
    rejected: list[RejectedChoice]
    rules: list[str] = msgspec.field(default_factory=list[str])
    limit_us: float | None = None
    memory_bound: bool = False
    mispredicted: list[str] = msgspec.field(default_factory=list[str])


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A function in a race, ours among them.

    `error` is the largest that it made, beside the `bound` there, in the unit that `measure` says: of one "element", or the
    "root mean square" of a result's errors relative to that of the result. `why` says what is wrong, and None of what is
    right. Times are quartiles of its `rounds`; `ratio` is its time over ours, the median over rounds that both ran.
    """

    name: str
    right: bool
    why: str | None
    error: float | None
    bound: float | None
    measure: str
    low_us: float | None = None
    median_us: float | None = None
    high_us: float | None = None
    rounds: int = 0
    ratio: float | None = None
    peak_fraction: float | None = None
    notes: list[str] = msgspec.field(default_factory=list[str])


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """Functions beside ours. `limit_us`: the least time that the machine's ceilings allow; `verdict`: a sentence on who is
    fastest; `products`: an account of ours, with why each kernel was chosen; `notes`: on how the race was run."""

    noise: str = ""
    program: str
    target: str
    inputs: list[Input]
    contenders: list[Contender]
    fastest: str
    verdict: str
    limit_us: float
    products: list[Product]
    notes: list[str] = msgspec.field(default_factory=list[str])


class Explain(msgspec.Struct, frozen=True, kw_only=True):
    """`explain --json`. `noise`: why times of its products are not reliable, "" if they are; `notes`: a sentence on each
    installed package that is newer than those that were tried."""

    noise: str = ""
    program: str
    target: str
    products: list[Product]
    unfused: list[Finding]
    fallback: list[Finding]
    steps: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    steps_per_layer: int | None = None
    quantized: Quantized | None = None
    notes: list[str] = msgspec.field(default_factory=list[str])


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    """`gemm --json` without `--perf`. `noise`: why its times are not reliable, "" if they are."""

    noise: str = ""
    program: str
    target: str
    verified: bool
    chosen: Choice
    measured: bool
    rejected: list[RejectedChoice]
    error: float
    bound: float
    why: str | None
    inputs: list[Input]


class Unit(msgspec.Struct, frozen=True):
    """A matrix unit of a chip and the rate it was seen to reach (null: not measured)."""

    operand: str
    acc: str
    instruction: str
    ops_per_cycle: int
    measured_gops: float | None
    source: str


class Device(msgspec.Struct, frozen=True):
    """One device of `devices --json`; of a processor's `cores` (a GPU's SMs) torch uses `used_cores`. `noise`: why the rates
    are not reliable, "" if they are."""

    device: str
    name: str
    chip: str
    exact_match: bool
    cores: int
    used_cores: int
    features: list[str]
    caches_bytes: dict[str, int]
    units: list[Unit]
    other_gops: dict[str, float]
    read_gbps: float
    copy_gbps: float
    notes: list[str]
    noise: str = ""


class Devices(msgspec.Struct, frozen=True):
    """`devices --json`."""

    devices: list[Device]


class Tuned(msgspec.Struct, frozen=True):
    """One problem of `tune --json`; `how` is "measured", "read back" or "not measured", `steps` how many it stands for;
    `provisional` says why its time is not reliable, "" if it is."""

    problem: str
    candidate: str
    schedule: str
    time_us: float | None
    how: str
    steps: int
    provisional: str = ""


class Tune(msgspec.Struct, frozen=True):
    """`tune --json`; `cache` is where decisions are kept, null if nowhere."""

    program: str
    target: str
    seconds: float
    budget_s: float
    problems: list[Tuned]
    cache: str | None
    exported: str | None
    imported: str | None


class LostCandidate(msgspec.Struct, frozen=True):
    """A candidate that crashed or hung on a problem and is not tried there again."""

    candidate: str
    problem: str
    why: str
    when: str


class CacheInfo(msgspec.Struct, frozen=True):
    """`cache info --json`; `path` is null where nothing can be kept, and `unusable` says why. Times are UTC."""

    path: str | None
    unusable: str | None
    records: int
    bytes: int
    by_chip: dict[str, int]
    by_version: dict[str, int]
    oldest: str | None
    newest: str | None
    refused: list[LostCandidate] = msgspec.field(default_factory=list[LostCandidate])
    programs: int = 0
    programs_bytes: int = 0


def to_json(report: msgspec.Struct) -> str:
    """The report as indented JSON text; not-a-number and infinities become null, controls and marks of direction escapes."""
    text = msgspec.json.format(encoded(report), indent=2).decode()
    return _UNSHOWN.sub(_escaped, text)


# What may be no character to show; all of it stands in strings.
_UNSHOWN = re.compile(r"[^\n -~]")


def _escaped(found: re.Match[str]) -> str:
    c = found[0]
    if c.isprintable():
        return c
    units = c.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def encoded(document: object) -> bytes:
    """JSON; what is no UTF-8 in the names of files becomes question marks, as on a terminal."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_sayable(msgspec.to_builtins(document)))


def _sayable(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_sayable(k): _sayable(v) for k, v in cast("dict[Any, Any]", value).items()}
    return [_sayable(v) for v in cast("list[Any]", value)] if isinstance(value, (list, tuple)) else value
