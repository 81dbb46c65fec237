"""Links between ranks: as measured and kept, or as a chip's data file has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.hardware.chips import nvidia_h100, nvidia_h200
from tilewright.hardware.detect import chips
from tilewright.hardware.link import Link
from tilewright.hardware.links import KEPT, LATENCY_US, keep_links, kept_links, key_of, links_for
from tilewright.hardware.target import Target

H200 = Target("NVIDIA H200", nvidia_h200.CHIP, "cuda", 132)
SUM, GATHER = Link("all_reduce", "tp", 4, 21.0, 320.0), Link("all_gather", "tp", 4, 18.0, None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def test_an_operation_takes_its_latency_and_its_bytes():
    found = links_for(H200, [SUM, GATHER])
    assert found.time_us("all_reduce", ["tp"], 0) == 21.0
    assert found.time_us("all_reduce", ["tp"], 320_000) == pytest.approx(22.0)
    assert found.time_us("all_gather", ["tp"], 1 << 30) == 18.0  # more bytes took no longer
    assert found.time_us("all_to_all", ["tp"], 0) == 18.0


def test_what_was_not_measured_takes_what_the_chip_says():
    found = links_for(H200, [SUM])
    expected = LATENCY_US["cuda"] + 360.0  # 0.8 of 450 GB/s
    assert found.time_us("all_reduce", ["dp"], 360 * 360_000) == pytest.approx(expected)


def test_chips_say_where_their_links_rates_are_from():
    for chip in chips():
        assert all(x.gbps > 0 and x.source for x in chip.links)
        assert [x.gbps for x in chip.links] == sorted((x.gbps for x in chip.links), reverse=True)
    assert nvidia_h100.CHIP.links[0].name == "NVLink 4"


def test_links_are_kept_by_mesh_and_circumstances(cache: Path):
    keys = [key_of(H200, f"tp={n}", "nccl, 1 host") for n in range(1, KEPT + 3)]
    assert kept_links(keys[0], "cuda") == []
    for key in keys:
        keep_links(key, "cuda", [SUM, GATHER])
    assert kept_links(keys[-1], "cuda") == [SUM, GATHER] and kept_links(keys[-1], "cpu") == []
    assert kept_links(keys[0], "cuda") == []  # the latest are kept
    assert kept_links(key_of(H200, "tp=9", "nccl, 2 hosts"), "cuda") == []
    (cache / "links-cuda.json").write_text("{")
    assert kept_links(keys[-1], "cuda") == []
