"""Threads, blocks and clusters, and who goes on when.

Threads that go in step are a unit: one array of lanes to a register. Where they part, units part, along with their lanes, and
they meet again where the paths of the branch do. A unit that waits says what for; when all wait, that is a deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.flight import Flight
from ptx.memory import Fault, Global, Region, shared
from ptx.numbers import UNSIGNED, u4, u8
from ptx.watch import Watch

WARP = 32
EXIT = -1
PARAMETERS = 1 << 30  # addresses of parameters, of 32 bits in newer PTX
PARAMETER_BYTES = 1 << 12
PARTED = -2
SLICE = 400  # steps that a unit takes before the next one has its turn
MOST_STEPS = 20_000_000
AHEAD = "the kernel ahead"


@dataclass(frozen=True)
class How:
    """Options of a launch.

    Attributes:
        apart: each warp by itself; else a block's threads go in step as long as they can.
        seed: of a random order, warps apart, others coming between any two accesses to memory; None: one unit after the other.
        late: copies and products end as late as they may, instead of at once; who does not wait for them is found out.
        fenced_copies: products read what `cp.async` brought after a fence alone, as the PTX ISA wants. Triton's own pipelines
            have none.
        change: what is done to the PTX before.
        resident: blocks that run at a time.
        most_steps: steps after which a launch is taken not to end.
        early: launches begin before the one ahead of them has ended, where their kernels may (programmatic dependent launch).
    """

    apart: bool = False
    seed: int | None = None
    late: bool = False
    fenced_copies: bool = True
    change: Callable[[str], str] | None = None
    resident: int = 132
    most_steps: int = MOST_STEPS
    early: bool = False


class Deadlock(Exception):  # noqa: N818
    """Every thread waits."""


class Differ(Exception):  # noqa: N818
    """Lanes of a unit must part before an instruction: each with its value."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


@dataclass
class Join:
    """The step at which units that parted meet again."""

    step: int
    waits_for: int
    came: list[Unit] = field(default_factory=list)


class Unit:
    """Threads in step.

    Attributes:
        R: registers.
        threads: their numbers in the block, ascending.
        waits: tells whether it may go on; None if it does not wait.
        then: what is done when it does.
        last: it goes on only when no other unit can.
        flight: what it has started.
    """

    def __init__(self, block: Block, threads: np.ndarray, R: list[Any], step: int) -> None:
        self.block, self.threads, self.R, self.step = block, threads, R, step
        self.n = len(threads)
        self.waits: Callable[[], bool] | None = None
        self.waits_for = ""
        self.parts: list[tuple[np.ndarray, int]] = []
        self.joins: list[Join] = []
        self.cluster_turn = 0
        self.then: Callable[[], None] | None = None
        self.last = False
        self.flight = Flight()
        whole = self.n % WARP == 0 and bool(
            (threads.reshape(-1, WARP)[:, :1] + np.arange(WARP) == threads.reshape(-1, WARP)).all()
        )
        self.warps = self.n // WARP if whole and (threads[::WARP] % WARP == 0).all() else 0

    def one(self, value: np.ndarray) -> int:
        """A value that all threads must have alike; units part until they do."""
        value = np.asarray(value)
        if value.ndim == 0:
            return int(value)
        first = value[0]
        if not (value == first).all():
            raise Differ(value)
        return int(first)

    def whole(self) -> int:
        """The number of warps; a fault where some lanes of a warp are elsewhere."""
        if not self.warps:
            raise Fault("an instruction of whole warps, of which some lanes are elsewhere")
        return self.warps

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Goes on once that is so."""
        if not until():
            self.waits, self.waits_for = until, what

    def finish(self, due: bool, then: Callable[[], None], what: str) -> None:
        """Waits for what it has started itself: if that may come late, until nobody else can go on."""
        if due and self.block.cluster.machine.late:
            self.waits, self.last, self.then, self.waits_for = (lambda: True), True, then, what
        else:
            then()

    def part(self, which: np.ndarray, step: int) -> Unit:
        """Some of the threads as a unit of their own."""
        lanes = np.nonzero(which)[0]
        known: dict[int, np.ndarray] = {}

        def of(x: np.ndarray) -> np.ndarray:  # what was one array stays one
            if id(x) not in known:
                known[id(x)] = x[lanes]
            return known[id(x)]

        made = Unit(self.block, self.threads[lanes], [None if x is None else of(x) for x in self.R], step)
        made.cluster_turn = self.cluster_turn
        made.flight = self.flight.of(made.threads, of)
        return made


class Block:
    """A block of threads."""

    def __init__(self, cluster: Cluster, rank: int, number: tuple[int, int, int], shared_bytes: int, threads: int) -> None:
        self.cluster, self.rank, self.number, self.size = cluster, rank, number, threads
        self.shared: Region = shared(shared_bytes, f"shared memory of block {number[0]}")
        self.barriers: dict[int, list[int]] = {}  # arrived threads, turn
        self.mbarriers: dict[int, Any] = {}
        self.exited = 0
        self.watch = Watch(self.shared.size, late=cluster.machine.late)

    def arrive(self, barrier: int, threads: int, want: int | None) -> Callable[[], bool]:
        """Arrive at `barrier`; the result tells whether those it wants have come."""
        state = self.barriers.setdefault(barrier, [0, 0, 0])
        state[0] += threads
        turn, wanted = state[1], want or self.size
        if state[0] > wanted:
            raise Fault(f"{state[0]} threads at barrier {barrier}, which waits for {wanted}")
        if state[0] == wanted:
            state[0], state[1] = 0, turn + 1

        def done() -> bool:
            if want is None and state[1] == turn and state[0] + self.exited >= self.size:
                state[0], state[1] = 0, turn + 1
            return state[1] != turn

        return done


class Cluster:
    """Blocks that see one another's shared memory."""

    def __init__(self, machine: Machine, first: int) -> None:
        self.machine, k = machine, machine.kernel
        x, y, _ = machine.grid
        self.blocks = [
            Block(self, r, ((first + r) % x, (first + r) // x % y, (first + r) // x // y), machine.shared_bytes, k.threads)
            for r in range(k.cluster)
        ]
        self.arrived, self.turn = 0, 0
        self.units: list[Unit] = []
        for b in self.blocks:
            step = WARP if machine.apart else k.threads
            for t in range(0, k.threads, step):
                registers: list[Any] = [None] * k.registers
                for number, kind in machine.program.unwritten.items():
                    registers[number] = (
                        np.zeros(step, bool) if kind == "pred" else np.full(step, -1).astype(UNSIGNED[int(kind)])
                    )
                self.units.append(Unit(b, np.arange(t, t + step), registers, 0))

    def done(self, turn: int) -> bool:
        """Tell whether all threads, but those that ended, have arrived at the cluster's barrier."""
        if self.turn == turn and self.arrived + sum(b.exited for b in self.blocks) >= len(self.blocks) * self.blocks[0].size:
            self.arrived, self.turn = 0, turn + 1
        return self.turn > turn


class Machine:
    """Runs a launch.

    Args:
        program: decoded (`decode.Program`).
        grid: blocks.
        arguments: one for each parameter.
        memory: that the addresses among the arguments lie in.
        shared_bytes: of a block.
        how: see there.

    Attributes:
        early: it may begin before the launch ahead of it in its stream has ended.
        ahead: that launch, if it is under way when this one begins.
        granted: numbers of blocks that let the launch behind begin, or have ended.
    """

    def __init__(
        self, program: Any, grid: Sequence[int], arguments: Sequence[Any], memory: Global, shared_bytes: int, how: How
    ) -> None:
        self.program, self.kernel, self.how = program, program.kernel, how
        self.grid: tuple[int, int, int] = (*grid, 1, 1)[:3]  # pyright: ignore
        self.memory, self.shared_bytes = memory, shared_bytes
        self.apart, self.late, self.resident = how.apart or how.seed is not None, how.late, how.resident
        self.random = None if how.seed is None else random.Random(how.seed)
        self.arguments = {n: _bits(a, self.kernel.params[n]) for n, a in zip(self.kernel.params, arguments, strict=True)}
        self.steps = 0
        self.pending: list[Callable[[], None]] = []
        self.early, self.over = False, False
        self.ahead: Machine | None = None
        self.granted: set[tuple[int, int, int]] = set()

    def begin(self, ahead: Machine | None) -> None:
        """Begin a run behind another launch, perhaps another one of the same."""
        self.ahead, self.over, self.granted = ahead, False, set()

    def follows(self) -> bool:
        """Tell whether the launch ahead has ended; not those ahead of that one, which it is to wait for."""
        return self.ahead is None or self.ahead.over

    @property
    def grants(self) -> bool:
        """Tell whether all blocks let the launch behind begin."""
        return len(self.granted) == self.grid[0] * self.grid[1] * self.grid[2]

    def later(self, what: Callable[[], None]) -> None:
        """Something that comes when it comes: at once, or late."""
        if self.late:
            self.pending.append(what)
        else:
            what()

    def run(self) -> None:
        """Run all blocks to their end."""
        for _ in self.rounds():
            pass

    def rounds(self) -> Iterator[None]:
        """Run all blocks to their end, in turns between which other launches may run."""
        count = self.grid[0] * self.grid[1] * self.grid[2]
        size = self.kernel.cluster
        if count % size:
            raise Fault(f"{count} blocks in clusters of {size}")
        firsts = list(range(0, count, size))
        if self.random:
            self.random.shuffle(firsts)
        running: list[Cluster] = []
        while firsts or running:
            while firsts and (len(running) + 1) * size <= max(self.resident, size):
                running.append(Cluster(self, firsts.pop(0)))
            if self.random:
                self.random.shuffle(running)
            went = False
            with np.errstate(all="ignore"):
                for cluster in running:
                    went |= self._step(cluster)
                self.granted |= {b.number for c in running if not c.units for b in c.blocks}
                running = [c for c in running if c.units]
                held = any(u.waits is not None and u.waits_for == AHEAD for c in running for u in c.units)
                if not (went or held or self._belated(running) or self._dissolve(running)):
                    raise Deadlock("\n".join(self._told(u) for c in running for u in c.units))
            yield
        if self.pending:
            raise Fault("the kernel ends before all copies to shared memory have come")
        self.over = True

    def tensor_map(self, address: int) -> Any:
        """The argument for the parameter at an address."""
        number = (address - PARAMETERS) // PARAMETER_BYTES
        return list(self.arguments.values())[number] if 0 <= number < len(self.arguments) else None

    def _told(self, u: Unit) -> str:
        warps = sorted({int(t) // WARP for t in u.threads})
        where = f"warps {warps[0]} to {warps[-1]}" if len(warps) > 1 else f"warp {warps[0]} ({u.n} lanes)"
        waits = f"waits for {u.waits_for}, after" if u.waits is not None else "at"
        return f"block {u.block.number[0]}, {where}, {waits} {self.program.said(u.step)}"

    def _belated(self, running: list[Cluster]) -> bool:
        """Let something happen that may come late, when nothing else can; tell whether anything did."""
        if self.pending:
            self.pending.pop(self.random.randrange(len(self.pending)) if self.random else 0)()
            return True
        waiting = [u for c in running for u in c.units if u.waits is not None and u.last]
        if waiting:
            u = self.random.choice(waiting) if self.random else waiting[0]
            u.last = False
        return bool(waiting)

    def _dissolve(self, running: list[Cluster]) -> bool:
        """Units that wait where others were to meet them go on by themselves."""
        found = False
        for cluster in running:
            for u in cluster.units:
                if u.joins and u in u.joins[-1].came:
                    join = u.joins.pop()
                    join.came.remove(u)
                    join.waits_for -= 1
                    u.waits, found = None, True
        return found

    def _step(self, cluster: Cluster) -> bool:
        """Every unit goes on for a while; whether any did."""
        went = False
        units = list(cluster.units)
        if self.random:
            self.random.shuffle(units)
        for u in units:
            if u not in cluster.units:
                continue
            if u.waits is not None:
                if u.last or not u.waits():
                    continue
                then, u.waits, u.then = u.then, None, None
                if then:
                    then()
            went = True
            self._go(cluster, u, self.random.choice((1, 2, 5, 30, SLICE)) if self.random else SLICE)
        return went

    def _go(self, cluster: Cluster, u: Unit, most: int) -> None:
        steps = self.program.steps
        for _ in range(most):
            self.steps += 1
            if self.steps > self.how.most_steps:
                raise Fault(f"it does not end; {self._told(u)}")
            at = u.step
            if u.joins and u.joins[-1].step == at and self._join(cluster, u):
                return
            try:
                next_step = steps[at](u)
            except Differ as d:
                values = np.broadcast_to(d.values, (u.n,))
                self._split(cluster, u, [(values == v, at) for v in np.unique(values)], self.program.meets.get(at))
                return
            except Exception as e:
                e.add_note(f"in {self._told(u)}")
                raise
            if next_step == EXIT:
                if u.flight.stores.open or any(u.flight.stores.closed):
                    raise Fault(f"a thread ends before its stores have read shared memory; {self._told(u)}")
                u.block.exited += u.n
                cluster.units.remove(u)
                for join in u.joins:
                    join.waits_for -= 1
                self._settle(cluster, u.joins)
                return
            if next_step == PARTED:
                self._split(cluster, u, u.parts, self.program.meets.get(at))
                return
            u.step = next_step
            if u.waits is not None:
                return

    def _split(self, cluster: Cluster, u: Unit, parts: list[tuple[np.ndarray, int]], meets: int | None) -> None:
        made = [u.part(which, step) for which, step in parts]
        joins = list(u.joins)
        for j in joins:
            j.waits_for += len(made) - 1
        if meets is not None:
            joins.append(Join(meets, len(made)))
        for m in made:
            m.joins = list(joins)
        at = cluster.units.index(u)
        cluster.units[at : at + 1] = made

    def _join(self, cluster: Cluster, u: Unit) -> bool:
        """Tell whether a unit that came to where others meet it has to wait, or has become one with them."""
        join = u.joins[-1]
        if join.waits_for <= 1:
            u.joins.pop()
            return self._join(cluster, u) if u.joins and u.joins[-1].step == u.step else False
        join.came.append(u)
        u.waits, u.waits_for = (lambda: False), "the other lanes of a branch"
        self._settle(cluster, [join])
        return True

    def _settle(self, cluster: Cluster, joins: list[Join]) -> None:
        for join in joins:
            if not join.came or len(join.came) < join.waits_for:
                continue
            threads = np.concatenate([c.threads for c in join.came])
            order = np.argsort(threads)
            came = join.came

            known: dict[tuple[int, ...], Any] = {}

            def merged(
                values: list[Any], came: list[Unit] = came, order: np.ndarray = order, known: dict[Any, Any] = known
            ) -> Any:
                if all(v is None for v in values):
                    return None
                key = tuple(map(id, values))
                if key not in known:
                    kind = next(v.dtype for v in values if v is not None)
                    values = [np.zeros(c.n, kind) if v is None else v for v, c in zip(values, came, strict=True)]
                    known[key] = np.concatenate(values)[order]
                return known[key]

            registers = [merged([c.R[i] for c in came]) for i in range(len(came[0].R))]
            made = Unit(came[0].block, threads[order], registers, join.step)
            made.joins = came[0].joins[:-1]
            for j in made.joins:
                j.waits_for -= len(came) - 1
            made.cluster_turn = came[0].cluster_turn
            made.flight = Flight.together([c.flight for c in came], merged)
            for c in came[1:]:
                cluster.units.remove(c)
            cluster.units[cluster.units.index(came[0])] = made
            join.came, join.waits_for = [], 0


def _bits(argument: Any, size: int) -> Any:
    """A number as a parameter of so many bytes."""
    if isinstance(argument, float):
        assert size == 4
        return int(np.float32(argument).view(u4))
    return argument & (1 << 8 * size) - 1 if isinstance(argument, int) else argument


def special(u: Unit, name: str) -> np.ndarray:
    """`%tid.x` and the like."""
    b, machine = u.block, u.block.cluster.machine
    root, _, axis = name[1:].partition(".")
    at = "xyz".find(axis) if axis else 0
    if root == "tid":
        return u.threads.astype(u4) if at == 0 else np.zeros(u.n, u4)
    if root == "laneid":
        return (u.threads % WARP).astype(u4)
    if root == "warpid":
        return (u.threads // WARP).astype(u4)
    if root in ("clock64", "globaltimer"):
        return np.full(u.n, machine.steps, u8)
    size = machine.kernel.cluster
    value = {
        "ntid": (b.size, 1, 1)[at],
        "ctaid": b.number[at],
        "nctaid": machine.grid[at],
        "clusterid": b.number[0] // size if at == 0 else b.number[at],
        "nclusterid": machine.grid[0] // size if at == 0 else machine.grid[at],
        "cluster_ctaid": b.rank if at == 0 else 0,
        "cluster_nctaid": size if at == 0 else 1,
        "cluster_ctarank": b.rank,
        "cluster_nctarank": size,
        "smid": (b.number[0]) % 132,
        "nsmid": 132,
        "clock": machine.steps & 0xFFFFFFFF,
    }[root]
    return np.full(u.n, value, u4)
