"""Types of what `--json` prints. Fields are added, never renamed or removed; docs/cli.md describes each."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

import msgspec

from tilewright.hardware.link import Link
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

    `chosen` is how its kernel was: "read back", "measured" or "not measured"; "" for a call into the source's library. On a
    mesh, `sent_bytes` is the least that a rank sends in it, and `between_us` how long that took (null: nothing travels).
    `time_us` is the median of its timings, `low_us` and `high_us` their quartiles (null: it was timed once).
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
    sent_bytes: int = 0
    between_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None


class Finding(msgspec.Struct, frozen=True):
    """Something that a reader should know: what, where in the source, why, and what it costs (null: not a step)."""

    op: str
    where: str
    why: str
    cost_us: float | None


Basis = Literal["measured", "predicted", "limit", ""]
"""How a time is known: measured on this machine, expected by the cost model, the least that the machine's measured rates
allow, or not at all."""
By = Literal["generated", "library", "fallback"]
"""Who does a step: a generated kernel; a library that was faster or does what no generated kernel takes; or torch operation by
operation, the reference, or the source's own library."""


class StepGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that are alike: one problem but for its numbers, done by one kernel with the same settings. Views are in no group.

    Attributes:
        name: what the model calls them, numbers that count as a range: "encoder.layer.0-11.output.dense".
        steps: their indices, in order.
        kind, problem, candidate, schedule: as of a step; the problem has `c` in place of numbers that are no extents.
        by: the kind of who does it.
        why: why no generated kernel does it; "" where one does.
        total_us, least_us, median_us, most_us: of a call, for all of them and for one; null where nothing is known.
        basis: how these times are known.
        share: of the time of all steps.
        limit_us: the least that the machine's measured rates allow for one; null where none was measured.
        peak_fraction: `limit_us / median_us`.
        memory_bound: memory, not arithmetic, sets the limit.
        repeat: index of the layers (`Repeat`) that it is a part of; null outside them.
        product: index of its account among `products` of `explain`; null of a step that is no product.
        untimed: why a time was not measured; "" where all were.
    """

    name: str
    steps: list[int]
    kind: str
    problem: str
    candidate: str
    schedule: str
    by: By
    why: str
    total_us: float | None
    least_us: float | None
    median_us: float | None
    most_us: float | None
    basis: Basis
    share: float | None
    limit_us: float | None
    peak_fraction: float | None
    memory_bound: bool
    repeat: int | None = None
    product: int | None = None
    untimed: str = ""


class Repeat(msgspec.Struct, frozen=True):
    """Layers: `count` runs of `length` steps each that do the same, from the step with index `first` on. Views are not counted.
    The first and the last may differ in some of their steps from those between. `number` is what the model's names count the
    first of them as; null where these do not tell."""

    first: int
    count: int
    length: int
    number: int | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a program, which all reports take from here. Views are no steps.

    Attributes:
        steps: what runs one after the other.
        products: matrix multiplications and attentions among them.
        groups, product_groups: steps, and products, that are different (`StepGroup`).
        generated, library, fallback: steps by who does them; they add up to `steps`.
        unfused: steps that only quantise, dequantise, convert or move data.
    """

    steps: int
    products: int
    groups: int
    product_groups: int
    generated: int
    library: int
    fallback: int
    unfused: int


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the model, or in how it is compiled, whose change would save time.

    Attributes:
        kind: what it is, as a stable identifier: "qdq-before-bias".
        title: the same in words.
        where: names in the model.
        steps: indices of the steps that it slows down.
        why: what stands there, and why it costs time.
        change: what to do about it.
        saves_us: what a call would save, about; null where nothing tells.
        basis: where that number comes from, in words.
    """

    kind: str
    title: str
    where: list[str]
    steps: list[int]
    why: str
    change: str
    saves_us: float | None
    basis: str


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


class Made(msgspec.Struct, frozen=True):
    """The making of a report: the version of Tilewright and of what it depends on, when (UTC), by which command ("" where it
    was no command), and with how many threads on the CPU."""

    version: str
    packages: dict[str, str]
    system: str
    when: str
    command: str
    threads: int


class Traffic(msgspec.Struct, frozen=True):
    """An operation between ranks in a step of a program.

    Attributes:
        step: the step's name.
        operation: what it does over which mesh axes.
        sent_bytes: the least that a rank sends.
        why: the reason why it is a step of its own; "" where it is part of a product.
        number: the step's place in the program.
        link_us: what it takes by itself, by the links as they were measured, or by the chip's data file.
        exposed_us: of `perf`, how long ranks waited for what travels in the step, said with the first operation in it; null
            where a kernel sends by itself.
        hidden_us: of `perf`, how long other work went on while values travelled in the step: 0 where ranks wait for them at
            once; null where a kernel sends by itself.
    """

    step: str
    operation: str
    sent_bytes: int
    why: str
    number: int = 0
    link_us: float | None = None
    exposed_us: float | None = None
    hidden_us: float | None = None


class Perf(msgspec.Struct, frozen=True, kw_only=True):
    """`perf --json` and `gemm --perf --json`.

    Attributes:
        noise: why its times are not reliable, "" if they are.
        limits_noise: why its limits are not, and what was reached of them; "" if they are.
        total_us, total_low_us, total_high_us: of a call of the whole program, the median and the quartiles (null: it was timed
            once).
        steps_us: of all steps, each timed by itself, again and again.
        in_place_us: of all steps in their turn, behind those before them; null where that was not timed.
        rest: the words on what a call takes beside `steps_us`, or less than that.
        traffic: what travels between ranks.
    """

    noise: str = ""
    limits_noise: str = ""
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
    made: Made | None = None
    counts: Counts | None = None
    groups: list[StepGroup] = msgspec.field(default_factory=list[StepGroup])
    layers: list[Repeat] = msgspec.field(default_factory=list[Repeat])
    advice: list[Advice] = msgspec.field(default_factory=list[Advice])
    total_low_us: float | None = None
    total_high_us: float | None = None
    steps_us: float | None = None
    in_place_us: float | None = None
    rest: str = ""
    traffic: list[Traffic] = msgspec.field(default_factory=list[Traffic])


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


class OnMesh(msgspec.Struct, frozen=True):
    """The mesh of `verify --simulate`: how the inputs and results lie that are not whole on every rank, what travels, and what
    was placed for a program that places nothing."""

    axes: str
    ranks: int
    placements: dict[str, str]
    traffic: list[Traffic]
    planned: list[str]


class Verify(msgspec.Struct, frozen=True):
    """`verify --json`.

    `source`: with `--source`, which library of the source's own ran the program, too; its row is the last of `end_to_end`.
    `mesh`: with `--simulate`, the ranks that ran it; then there are no steps.
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
    mesh: OnMesh | None = None


class Choice(msgspec.Struct, frozen=True):
    """A candidate with its settings and, if it was timed, its time; `recalled` if that was earlier, and read back;
    `provisional` says why the time is not reliable, "" if it is; `checked` at which shapes it was verified, "" if here."""

    candidate: str
    schedule: str
    time_us: float | None
    predicted_us: float | None = None
    recalled: bool = False
    provisional: str = ""
    checked: str = ""


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
    its near misses, the sentences of rules that recognised the product and left it as it is. `name` is what the model calls
    them all (`StepGroup`), `names` what the source calls each. `inside` are the steps within an attention: of its "scores"
    before they are masked, of its "weights" before they multiply values.
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
    name: str = ""
    inside: dict[str, list[str]] = msgspec.field(default_factory=dict[str, list[str]])


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
    fastest; `products`: an account of ours, with why each kernel was chosen; `notes`: on how the race was run; `limits_noise`:
    why the limit is not reliable, "" if it is."""

    noise: str = ""
    limits_noise: str = ""
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
    """`explain --json`. `noise`: why times of its products are not reliable, `limits_noise`: why limits are not, "" if they
    are; `notes`: a sentence on each installed package that is newer than those that were tried."""

    noise: str = ""
    limits_noise: str = ""
    program: str
    target: str
    products: list[Product]
    unfused: list[Finding]
    fallback: list[Finding]
    steps: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    steps_per_layer: int | None = None
    traffic: list[Traffic] = msgspec.field(default_factory=list[Traffic])
    quantized: Quantized | None = None
    notes: list[str] = msgspec.field(default_factory=list[str])
    made: Made | None = None
    counts: Counts | None = None
    groups: list[StepGroup] = msgspec.field(default_factory=list[StepGroup])
    layers: list[Repeat] = msgspec.field(default_factory=list[Repeat])
    advice: list[Advice] = msgspec.field(default_factory=list[Advice])


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    """`gemm --json` without `--perf`. `noise`: why its times are not reliable, "" if they are. `sampled`: how many elements of
    each result were compared, where there was no time for all (null: all were); the largest error is then not known."""

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
    sampled: int | None = None


class Unit(msgspec.Struct, frozen=True):
    """A matrix unit of a chip and the rate it was seen to reach (null: not measured)."""

    operand: str
    acc: str
    instruction: str
    ops_per_cycle: int
    measured_gops: float | None
    source: str


class Device(msgspec.Struct, frozen=True):
    """One device of `devices --json`; of a processor's `cores` (a GPU's SMs) torch uses `used_cores`.

    Attributes:
        exact_match: the chip is described by its own file; False where that of its family stands for it.
        noise: why the rates are not reliable, "" if they are.
        clock_ghz: the least clock that gives the measured rates at the operations a cycle; null where none was measured, and
            where no such chip runs so fast.
        doubt: why the description cannot be this chip's, "" if it can.
        assumed: numbers that are another model's, with their sources.
    """

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
    clock_ghz: float | None = None
    doubt: str = ""
    assumed: list[str] = msgspec.field(default_factory=list[str])


class Devices(msgspec.Struct, frozen=True):
    """`devices --json`; `links` are those of a mesh."""

    devices: list[Device]
    links: list[Link] = msgspec.field(default_factory=list[Link])


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


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of two reports that `diff` compares, or a contender that it was timed against.

    Attributes:
        file: the report's, or the contender's name.
        program, target, noise: as in the report.
        total_us: of a call of the whole program; null of `explain`, which does not time it.
        low_us, high_us: its quartiles; null where they are not known.
        steps_us: of all steps; null where no time is known.
        steps: their number, without views; 0 of a contender.
    """

    file: str
    program: str
    target: str
    noise: str
    total_us: float | None = None
    steps_us: float | None = None
    steps: int = 0
    low_us: float | None = None
    high_us: float | None = None


class Setting(msgspec.Struct, frozen=True):
    """Something that two reports were made with, and that differs: the program, the machine, a version, the command."""

    what: str
    before: str
    after: str


class AlteredStep(msgspec.Struct, frozen=True):
    """One of the steps that a change is about, or `count` that are alike: `name` is that of all that changed alike, as in
    `StepGroup`; `problem` has `c` for numbers, and `schedule` lists those of all."""

    name: str
    kind: str
    problem: str
    candidate: str
    schedule: str
    count: int = 1


class Altered(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and how often it occurs.

    Attributes:
        what: "graph" (steps came, went, or became others), "kernel" (another candidate does it), "schedule" (other settings),
            "time" (the same kernel takes another time) or "outside" (the time of a call that no step accounts for).
        count: how often it occurs.
        before, after: the steps that it is about, those of one occurrence; none on one side where they came or went.
        before_us, after_us, before_limit_us, after_limit_us: of all occurrences; null where not all are known.
        effect_us: `after_us` less `before_us`.
        covered: the times of single runs differ by as much, so the effect may be chance.
        why: of "kernel", the sentences why the other one's kernel was not taken; of "schedule", the settings that differ.
    """

    what: str
    count: int
    before: list[AlteredStep] = msgspec.field(default_factory=list[AlteredStep])
    after: list[AlteredStep] = msgspec.field(default_factory=list[AlteredStep])
    before_us: float | None = None
    after_us: float | None = None
    before_limit_us: float | None = None
    after_limit_us: float | None = None
    effect_us: float | None = None
    why: list[str] = msgspec.field(default_factory=list[str])
    covered: bool = False


class AlteredFinding(msgspec.Struct, frozen=True):
    """A finding of one report alone: it `came`, or went; `what` is "fell back" or "unfused", and `where` names all places."""

    what: str
    came: bool
    op: str
    where: str
    why: str
    count: int


class AlteredPeer(msgspec.Struct, frozen=True):
    """A contender of both reports: its times, and its ratio to ours, before and after."""

    name: str
    before_us: float | None
    after_us: float | None
    before_ratio: float | None
    after_ratio: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`diff --json`.

    Attributes:
        settings: what differs beside the programs.
        ratio: the time after over that before: of a call, or of all steps where no call was timed; null where nothing is known.
        covered: the sentence why `ratio` says nothing, as single runs of each differ by as much; "" where it does.
        altered: the changes, those of the largest effect first.
        same: steps that are as they were.
    """

    before: Side
    after: Side
    settings: list[Setting] = msgspec.field(default_factory=list[Setting])
    ratio: float | None = None
    altered: list[Altered] = msgspec.field(default_factory=list[Altered])
    same: int = 0
    findings: list[AlteredFinding] = msgspec.field(default_factory=list[AlteredFinding])
    against: list[AlteredPeer] = msgspec.field(default_factory=list[AlteredPeer])
    covered: str = ""


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
