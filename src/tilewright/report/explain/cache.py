"""The account of `cache info`, for which torch is not imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from tilewright.report.schema import CacheInfo, LostCandidate
from tilewright.runtime.program_folder import kept_programs
from tilewright.schedule.cache import Cache


def describe_cache(cache: Cache | None) -> CacheInfo:
    """Describe the records that are kept, and where; and the compiled programs."""
    sizes = [size for _, size in kept_programs()]
    if cache is None:
        nothing = CacheInfo(None, "there is no folder for it", 0, 0, {}, {}, None, None)
        return msgspec.structs.replace(nothing, programs=len(sizes), programs_bytes=sum(sizes))
    records = cache.records()
    made = sorted(r.made_s for r in records)
    return CacheInfo(
        path=None if cache.file is None else str(cache.file),
        unusable=cache.unusable,
        records=len(records),
        bytes=cache.bytes(),
        by_chip=_counted([r.key.chip for r in records]),
        by_version=_counted([r.key.tilewright for r in records]),
        oldest=_time(made[0]) if made else None,
        newest=_time(made[-1]) if made else None,
        refused=[LostCandidate(r.candidate, r.problem, r.why, _time(r.made_s)) for r in cache.lost()],
        programs=len(sizes),
        programs_bytes=sum(sizes),
    )


def _counted(names: Sequence[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
