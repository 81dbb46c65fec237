"""Rewrites of the PTX that Triton makes for Hopper, for what it cannot be told: integer products of 256 columns, unsigned
operands, and copies that two blocks of a cluster receive at once.

Each rewrite insists on finding what it expects: a compiler that writes otherwise raises instead of giving a wrong kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

# The digest of this file. A kernel's text names it, since Triton's cache knows a kernel by its text.
REWRITE_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]

Rewrite = Callable[[str], str]

_MMA = re.compile(
    r"(\twgmma\.mma_async\.sync\.aligned\.m64n)128(k32\.s32\.[su]8\.[su]8) \{([^}]*)\}, (%rd\d+), (%rd\d+), ([^;]*;)"
)
_STAGE = re.compile(r"mov\.b32 (%r\d+), %r\d+; // stage")
ROW = 128  # bytes of an operand's row in a stage
MARKED = 1000  # arrivals of what is no barrier and tells an address
_LOCK = Lock()


class UnexpectedPtx(Exception):  # noqa: N818
    """The compiler's text is not what a rewrite was made for."""


def widest_products(ptx: str) -> str:
    """Integer products of 128 columns, two by two as one of 256.

    Within a group that is committed together, Triton asks for all of K with the left 128 columns, then with the right ones.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    lines, group, fused = ptx.split("\n"), dict[str, tuple[int, re.Match[str]]](), 0
    for at, line in enumerate(lines):
        m = _MMA.match(line)
        if m and m[4] not in group:
            group[m[4]] = at, m
        elif m:
            before, lo = group.pop(m[4])
            if lo[6] != m[6] or lo[3] == m[3]:
                raise UnexpectedPtx("products of the two halves differ in more than their columns")
            lines[before] = ""
            lines[at] = f"{lo[1]}256{lo[2]} {{{lo[3]},{m[3]}}}, {lo[4]}, {lo[5]}, {lo[6]}"
            fused += 1
        elif "wgmma.commit_group" in line and group:
            raise UnexpectedPtx("products of the two halves differ in their left operand")
    if not fused:
        raise UnexpectedPtx("no integer products of 128 columns")
    return "\n".join(lines)


def narrowed(ptx: str, columns: int) -> str:
    """Products of fewer columns than Triton asks for, who knows powers of two alone: the last registers stay as they are.

    Where a kernel had to say `stage_of` (`gemm/_operand.py`), a stage of the right operand is as long as its own columns.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    whole = 1 << (columns - 1).bit_length()
    pattern = re.compile(rf"(wgmma\.mma_async\.sync\.aligned\.m64n){whole}(k\S+) \{{([^}}]*)\}}")

    def fewer(m: re.Match[str]) -> str:
        registers = m[3].split(",")
        if len(registers) != whole // 2:
            raise UnexpectedPtx(f"{len(registers)} registers for {whole} columns")
        return f"{m[1]}{columns}{m[2]} {{{','.join(registers[: columns // 2])}}}"

    text, count = pattern.subn(fewer, ptx)
    if not count:
        raise UnexpectedPtx(f"no products of {whole} columns")
    for stage in set(_STAGE.findall(text)):
        shift = (whole * ROW).bit_length() - 1
        text, count = re.subn(rf"shl\.b32 \t(%r\d+), {stage}, {shift};", rf"mul.lo.s32 \t\1, {stage}, {columns * ROW};", text)
        if count != len(re.findall(rf"{stage}\b", text)) - 1:
            raise UnexpectedPtx("a stage's number is not what it was")
    return text


def unsigned(ptx: str, lhs: bool, rhs: bool) -> str:
    """Integer products whose left or right operand is unsigned.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    text, count = re.subn(r"(\.k32|k32)\.s32\.s8\.s8", rf"\1.s32.{'us'[not lhs]}8.{'us'[not rhs]}8", ptx)
    if not count:
        raise UnexpectedPtx("no integer products")
    return text


_INIT = re.compile(r"\t@%p\d+ mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);")
_ARRIVE = re.compile(r"\t(@%p\d+) mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\];")
_COPY = re.compile(
    r"(\t@%p\d+ cp\.async\.bulk\.tensor\.\dd\.shared::)(?:cluster|cta)(\.global\.mbarrier::complete_tx::bytes)"
    r"( \[%r\d+\], \[(%rd\d+), \{[^}]*\}\], \[%r\d+\]);"
)


def _arrive_at_both(arrive: re.Match[str]) -> str:
    """An arrival at a barrier and at the other block's."""
    there = f".reg .b32 %there;\n\tmapa.shared::cluster.u32 %there, {arrive[2]}, %other;"
    return f"{arrive[0]}\n\t{{\n\t{there}\n\t{arrive[1]} mbarrier.arrive.shared::cluster.b64 _, [%there];\n\t}}"


def multicast(ptx: str, right: int) -> str:
    """Two blocks to a cluster. Copies of the right operand (the descriptor of that number) arrive in both; a stage is free once
    both have read it; barriers are set up before either starts, since each is told of by the other.

    One thread sets them up at the kernel's very beginning, where all threads can still meet those of the other block.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    at, barriers = _places(ptx)
    descriptors = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    if len(descriptors) <= right:
        raise UnexpectedPtx("descriptors are not where they were")
    moved = set(re.findall(rf"mov\.b64 \t(%rd\d+), {descriptors[right]};", ptx))
    short = set(re.findall(rf"mov\.b32 \t(%r\d+), {descriptors[right]};", ptx))  # since 3.9
    moved |= {new for new, old in re.findall(r"cvt\.u64\.u32 \t(%rd\d+), (%r\d+);", ptx) if old in short}
    of_right = {new for new, old in re.findall(r"cvta\.param\.u64 \t(%rd\d+), (%rd\d+);", ptx) if old in moved}
    copies = [m for m in _COPY.finditer(ptx) if m[4] in of_right]
    if not copies or not _ARRIVE.search(ptx):
        raise UnexpectedPtx("no copy of the right operand, or no stage that is given back")
    ptx = _COPY.sub(lambda m: f"{m[1]}cluster{m[2]}.multicast::cluster{m[3]}, %both;" if m[4] in of_right else m[0], ptx)
    ptx = _ARRIVE.sub(lambda m: m[0] if m[2] in at else _arrive_at_both(m), ptx)  # those at a fixed place are a block's own
    named = [
        "\t.reg .b16 %both;",
        "\tmov.b16 %both, 3;",
        "\tmov.u32 %other, %cluster_ctarank;",
        "\txor.b32 %other, %other, 1;",
    ]
    return _in_clusters(ptx, 2, barriers, named)


def split(ptx: str, blocks: int, groups: int, ring_bytes: tuple[int, int]) -> str:
    """Clusters of blocks that send one another parts of sums (`gemm/_reduction.py`), each of so many warpgroups.

    What looks like barriers of MARKED arrivals tells where both operands' rings are, of `ring_bytes`, which must follow one
    another. The last barriers are `empty`, at which all of the cluster's warpgroups arrive in every block, and `full`, one of
    each warpgroup.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    at, found = _places(ptx)
    rings = {count: offset for offset, count in found if count > MARKED}
    barriers = [(offset, count) for offset, count in found if count <= MARKED]
    if len(rings) != 2 or len(barriers) < 3 + groups:
        raise UnexpectedPtx("the rings are not marked")
    (first, length), (second, _) = sorted(zip((rings[n] for n in sorted(rings)), ring_bytes, strict=True))
    empty, full = barriers[-1 - groups][0], [offset for offset, _ in barriers[-groups:]]
    if first + length != second or full != [full[0] + 8 * g for g in range(groups)]:
        raise UnexpectedPtx("the rings or the barriers do not follow one another")
    there = "\n\t".join(
        f"mapa.shared::cluster.u32 %there, %there0, {i};\n\t{{0}} mbarrier.arrive.shared::cluster.b64 _, [%there];"
        for i in range(blocks)
    )
    arrivals = 0

    def everywhere(m: re.Match[str]) -> str:
        nonlocal arrivals
        if at.get(m[2]) != empty:
            return m[0]
        arrivals += 1
        return f"\t{{\n\t.reg .b32 %there0, %there;\n\tmov.b32 %there0, {m[2]};\n\t{there.format(m[1])}\n\t}}"

    ptx = _ARRIVE.sub(everywhere, ptx)
    ptx, sends = re.subn(r"\bFULL\b", f"global_smem+{full[0]}", ptx)
    ptx = re.sub(r"\bRING\b", f"global_smem+{first}", ptx)
    if arrivals != 2 * groups or not sends:
        raise UnexpectedPtx("nobody says that the ring is empty or full, or nobody sends")
    return _in_clusters(ptx, blocks, barriers, [])


def _places(ptx: str) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Registers that hold fixed addresses of shared memory, and of each barrier its address and its arrivals."""
    bases = set(re.findall(r"mov\.b32 \t(%r\d+), global_smem;", ptx))
    added = re.findall(r"add\.s32 \t(%r\d+), (%r\d+), (\d+);", ptx)
    at = {name: int(offset) for name, base, offset in added if base in bases} | dict.fromkeys(bases, 0)
    barriers = [(at[m[1]], int(m[2])) for m in _INIT.finditer(ptx) if m[1] in at]
    if len(barriers) != len(_INIT.findall(ptx)) or len(barriers) < 2:
        raise UnexpectedPtx("barriers are not where they were")
    return at, barriers


def _in_clusters(ptx: str, size: int, barriers: list[tuple[int, int]], more: list[str]) -> str:
    """Clusters of so many blocks, whose barriers one thread sets up before any block of the cluster goes on."""
    start = [
        "\t.reg .b32 %other;",
        "\t.reg .pred %first;",
        "\tmov.u32 %other, %tid.x;",
        "\tsetp.eq.u32 %first, %other, 0;",
        *(f"\t@%first mbarrier.init.shared::cta.b64 [global_smem+{offset}], {count};" for offset, count in barriers),
        "\tfence.mbarrier_init.release.cluster;",
        "\tbarrier.cluster.arrive.release.aligned;",
        "\tbarrier.cluster.wait.acquire.aligned;",
        *more,
    ]
    ptx, entries = re.subn(r"(?m)^(// %bb\.0:.*)$", lambda m: "\n".join([m[1], *start]), _INIT.sub("", ptx))
    if entries != 1:
        raise UnexpectedPtx("the kernel does not begin as it did")
    return clustered(ptx, size)


@contextmanager
def rewriting(*rewrites: Rewrite) -> Generator[None]:
    """Rewrite the PTX of what Triton compiles in this thread meanwhile, in order. Its cache knows nothing of it.

    From 3.7 on Triton first asks the hook, with no arguments, for what its cache is to add to the kernel's name: nothing, since
    a text names `REWRITE_DIGEST`.
    """
    from triton import knobs

    if not rewrites:
        yield
        return
    mine = get_ident()

    def hook(*given: Any) -> tuple[str, str] | None:
        if not given:
            return "", ""
        if get_ident() == mine:  # else it is somebody else's kernel
            stages: dict[str, Callable[..., str]] = given[1]
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: reduce(lambda text, f: f(text), rewrites, make(source, metadata))
        return None

    with _LOCK, knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = hook  # pyright: ignore[reportAttributeAccessIssue]
        yield


def clustered(ptx: str, size: int) -> str:
    """Blocks in clusters of so many, which the kernel itself makes use of.

    Raises:
        UnexpectedPtx: the text is not what this was made for.
    """
    ptx, headers = re.subn(r"(?m)^(\.reqntid .*)$", rf"\1\n.explicitcluster\n.reqnctapercluster {size}, 1, 1", ptx)
    if headers != 1:
        raise UnexpectedPtx("the kernel does not begin as it did")
    return ptx
