"""Facts and ceilings of the machine: recognised from text, measured once, kept safely."""

import json
import os
import stat
import sys
from dataclasses import replace

import msgspec
import pytest
import torch

from tilewright import threads
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, PRED, S4, S8, S32, S64, U8
from tilewright.errors import InputError
from tilewright.hardware import ceilings, detect
from tilewright.hardware.load import Load
from tilewright.hardware.target import Chip, MatrixUnit, Target

ZEN4 = """processor	: 0
vendor_id	: AuthenticAMD
model name	: AMD EPYC 9R14
flags		: fpu sse sse2 avx avx2 fma avx512f avx512bw avx512vl avx512_vnni avx512_bf16

processor	: 1
model name	: another
flags		: fpu
"""
ICE_LAKE = "model name : Intel(R) Xeon(R) 8375C\nflags : sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni\n"
SAPPHIRE_RAPIDS = ICE_LAKE.strip().replace("8375C", "8481C") + " avx512_bf16 amx_bf16 amx_tile amx_int8\n"
SKYLAKE = "model name : Intel(R) Xeon(R) Gold 6148\nflags : sse2 avx2 fma f16c avx512f avx512bw avx512vl\n"
HASWELL = "model name : Intel(R) Core(TM) i7-4770\nflags : sse2 avx2 fma f16c\n"
OLD = "model name : Pentium 4\nflags : mmx sse sse2\n"
GRAVITON = "processor : 0\nBogoMIPS : 2100\nFeatures : fp asimd evtstrm sve i8mm bf16\nCPU implementer : 0x41\n"
RISCV = "processor : 0\nisa : rv64imafdcv\n"


def chip(name):
    return next(c for c in detect.chips() if c.name == name)


@pytest.fixture
def machine(monkeypatch):
    """A machine whose /proc/cpuinfo says what it is told to."""

    def be(text, architecture="x86_64"):
        monkeypatch.setattr(detect, "_read", lambda path: text if path.name == "cpuinfo" else "")
        monkeypatch.setattr(detect, "_llvm_features", list)
        monkeypatch.setattr(detect.platform, "machine", lambda: architecture)
        monkeypatch.setattr(detect.platform, "processor", lambda: "")
        return detect.cpu.__wrapped__()

    return be


@pytest.mark.parametrize(
    ("text", "architecture", "name", "found", "exact"),
    [
        (ZEN4, "x86_64", "AMD EPYC 9R14", "x86_64_avx512_bf16", False),
        (ICE_LAKE, "x86_64", "Intel(R) Xeon(R) 8375C", "x86_64_avx512_vnni", False),
        (SKYLAKE, "x86_64", "Intel(R) Xeon(R) Gold 6148", "x86_64_avx512", False),
        (HASWELL, "x86_64", "Intel(R) Core(TM) i7-4770", "x86_64_avx2", False),
        (OLD, "x86_64", "Pentium 4", "x86_64", False),
        (GRAVITON, "aarch64", "aarch64", "aarch64", False),
        ("", "arm64", "arm64", "aarch64", False),
        ("", "AMD64", "AMD64", "x86_64", False),
        (RISCV, "riscv64", "riscv64", "x86_64", False),
    ],
)
def test_processors_are_recognised_by_what_they_report(machine, text, architecture, name, found, exact):
    t = machine(text, architecture)
    assert (t.name, t.chip.name, t.exact_match) == (name, found, exact)
    assert t.kind == "cpu" and t.device == "cpu" and t.cores >= 1


@pytest.mark.parametrize(("granted", "found"), [(True, "x86_64_amx"), (False, "x86_64_avx512_bf16")])
def test_tiles_count_only_where_the_system_lets_this_process_use_them(machine, monkeypatch, granted, found):
    asked = []
    monkeypatch.setattr(detect, "_granted", lambda component: asked.append(component) or granted)
    t = machine(SAPPHIRE_RAPIDS)
    assert (t.chip.name, "amx_tile" in t.features, asked) == (found, granted, [18])
    machine(ZEN4)
    assert asked == [18], "asked where there are no tiles"


@pytest.mark.skipif((sys.platform, os.uname().machine) != ("linux", "x86_64"), reason="a call of this system's")
def test_tiles_that_are_not_there_are_not_granted():
    assert detect._granted(detect.XTILEDATA) == ("amx_tile" in detect.cpu().features)


def test_features_are_those_of_the_first_processor(machine):
    assert "avx512_bf16" in machine(ZEN4).features and "sve" in machine(GRAVITON, "aarch64").features


def test_this_machine():
    t = detect.detect("cpu")
    assert t is detect.detect("cpu:0") and 1 <= t.cores <= (os.cpu_count() or 1)
    if sys.platform == "linux":
        assert t.features >= t.chip.requires
        assert all(size >= 1 << 12 for size in t.caches_bytes.values())


def test_a_processor_has_as_many_cores_as_torch_has_threads(monkeypatch):
    cores = detect.cpu().cores
    for count in (1, cores, cores + 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda found=count: found)
        found = detect.detect("cpu")
        assert found.cores == min(count, cores) and detect.cores_of(found).endswith("cores" if cores > 1 else "core")
        assert (" of " in detect.cores_of(found)) == (count < cores)


def test_caches_are_read_from_the_system(monkeypatch, tmp_path):
    for i, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "32K"), ("2", "Unified", "1024K"), ("3", "Unified", "32M")]
    ):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    (tmp_path / "index9").mkdir()
    monkeypatch.setattr(detect, "SYSFS_CACHE", tmp_path)
    assert detect._caches() == {"L1d": 32 << 10, "L2": 1 << 20, "L3": 32 << 20}
    monkeypatch.setattr(detect, "SYSFS_CACHE", tmp_path / "nowhere")
    assert detect._caches() == {}


@pytest.mark.parametrize("name", ["tpu", "cpu:", "cuda:-1", "cuda:x", "CPU", "", "cuda:0:1", "mps"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(InputError, match=f"unknown device {name!r}") as caught:
        detect.detect(name)
    assert caught.value.hint == "cpu, cuda or cuda:0"


def test_absent_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"no CUDA device 7: torch sees 0\n  try: --device cpu \(device='cpu'\)"):
        detect.gpu.__wrapped__(7)
    detect.gpu.cache_clear()
    with pytest.raises(InputError, match="no CUDA device 0"):
        detect.detect("cuda")


GPUS = [  # name, compute capability or gfx architecture, the chip it is taken for, and whether it is that very chip
    ("Tesla V100-SXM2-16GB", (7, 0), "nvidia_v100", True),
    ("Tesla T4", (7, 5), "nvidia_t4", True),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "nvidia_a100", True),
    ("NVIDIA L4", (8, 9), "nvidia_l4", True),
    ("NVIDIA GeForce RTX 4090", (8, 9), "nvidia_rtx4090", True),
    ("NVIDIA RTX 4000 Ada Generation", (8, 9), "nvidia_l4", False),
    ("NVIDIA H100 80GB HBM3", (9, 0), "nvidia_h100", True),
    ("NVIDIA H200", (9, 0), "nvidia_h200", True),
    ("NVIDIA B200", (10, 0), "nvidia_b200", True),
    ("NVIDIA GeForce RTX 5090", (12, 0), "nvidia_rtx5090", True),
    ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", "amd_mi250", True),
    ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", "amd_mi300x", True),
    ("AMD Instinct MI355X", "gfx950", "amd_mi355", True),
    ("NVIDIA H20", (9, 0), "nvidia_h100", False),
    ("NVIDIA L40S", (8, 9), "nvidia_l4", False),
    ("NVIDIA A10", (8, 6), "nvidia_a100", False),
    ("NVIDIA B300", (10, 3), "nvidia_b200", False),
    ("NVIDIA of tomorrow", (14, 0), "nvidia", False),
    ("AMD Instinct MI100", "gfx908", "amd", False),
    ("AMD of tomorrow", "gfx1300", "amd", False),
]


@pytest.mark.parametrize(("name", "architecture", "found", "exact"), GPUS)
def test_gpus_are_recognised_by_architecture_and_name(monkeypatch, name, architecture, found, exact):
    class Properties:
        multi_processor_count, L2_cache_size = 132, 50 << 20

    Properties.name = name
    amd = isinstance(architecture, str)
    if amd:
        Properties.gcnArchName = architecture
    else:
        Properties.major, Properties.minor = architecture
        Properties.shared_memory_per_block_optin = 227 << 10
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    t = detect.gpu.__wrapped__(1)
    assert (t.chip.name, t.exact_match, t.device, t.cores) == (found, exact, "cuda:1", 132)
    assert t.caches_bytes == {"L2": 50 << 20, "shared": t.chip.shared_bytes if amd else 227 << 10}
    assert t.features == ({"rocm", architecture.split(":")[0]} if amd else {"cuda", f"sm_{architecture[0]}{architecture[1]}"})


def test_llvm_tells_of_a_processor_where_the_system_has_no_file(monkeypatch):
    import llvmlite.binding as llvm

    found = {"sse2": True, "avx2": True, "fma": True, "f16c": True, "avxvnni": True, "avx512f": False}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: found)
    monkeypatch.setattr(detect, "_read", lambda path: "")
    t = detect.cpu.__wrapped__()
    assert t.chip.name == "x86_64_avx_vnni" and not t.exact_match and "avx512f" not in t.features


FULL = " avx512f avx512bw avx512vl avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("family", "model", "more", "found"),
    [
        (23, 1, "", "x86_64_zen1"),
        (23, 8, "", "x86_64_zen1"),
        (23, 49, "", "x86_64_avx2"),  # Zen 2
        (25, 1, "", "x86_64_avx2"),
        (25, 17, " avx512f avx512bw avx512vl", "x86_64_avx512"),
        (25, 17, FULL, "x86_64_avx512_bf16"),  # Zen 4
        (26, 2, FULL, "x86_64_zen5"),
        (26, 36, FULL, "x86_64_avx512_bf16"),  # Strix Point: data paths of 256 bits
    ],
)
def test_a_processor_of_one_model_is_told_by_family_and_model(monkeypatch, family, model, more, found):
    text = f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: {model}\nflags\t\t: avx2 fma f16c{more}\n"
    monkeypatch.setattr(detect, "_read", lambda path: text if path.name == "cpuinfo" else "")
    assert detect.cpu.__wrapped__().chip.name == found


NUMBERS = {"s4", "s8", "s32", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "bf16", "f16", "f32", "f64"}


def test_every_chip_gives_a_source_for_every_number():
    names = [c.name for c in detect.chips()]
    assert len(set(names)) == len(names) >= 6
    for c in detect.chips():
        assert c.units and c.requires and c.kind in ("cpu", "cuda")
        assert c.registers_bytes and len(c.source) > 20 and bool(c.shared_bytes) == (c.kind == "cuda")
        assert all(x.bytes > 0 and len(x.source) > 20 for x in c.levels)
        assert [x.bytes for x in c.levels] == sorted(x.bytes for x in c.levels)
        if c.kind == "cuda" and not c.family:
            assert c.sms and c.mhz and c.level("L2") and c.level("memory").gbps > 0
        elif not c.family:
            assert c.level("L1d").bytes_per_cycle > 0
        for unit in c.units:
            assert len(unit.source) > 20 and unit.ops_per_cycle > 0 and unit.instruction
            assert {unit.operand, unit.acc} <= NUMBERS
            assert min(unit.shape) >= 1
        assert len({(u.operand, u.instruction) for u in c.units}) == len(c.units)


# Dense 1e12 operations a second, as the makers' data sheets give them, of the whole chip.
PEAKS = {
    "nvidia_v100": ("f16", 125),
    "nvidia_t4": ("f16", 65),
    "nvidia_a100": ("bf16", 312),
    "nvidia_l4": ("s8", 242.5),
    "nvidia_rtx4090": ("bf16", 165.2),
    "nvidia_h100": ("bf16", 989.4),
    "nvidia_h200": ("f8e4m3fn", 1978.9),
    "nvidia_b200": ("f8e4m3fn", 4500),
    "nvidia_rtx5090": ("s8", 838),
    "amd_mi250": ("f16", 362.1 / 2),
    "amd_mi300x": ("f8e4m3fnuz", 2614.9),
    "amd_mi355": ("bf16", 2516.6),
}


def test_every_gpu_is_held_against_its_data_sheet():
    assert set(PEAKS) == {c.name for c in detect.chips() if c.kind == "cuda" and not c.family}


@pytest.mark.parametrize("name", PEAKS)
def test_rates_and_clocks_add_up_to_the_data_sheet(name):
    operand, peak = PEAKS[name]
    c = chip(name)
    unit = next(u for u in c.units if u.operand == operand)
    assert unit.ops_per_cycle * c.sms * c.mhz * 1e-6 == pytest.approx(peak, rel=0.01)


def test_every_kind_of_device_has_a_family_to_fall_back_to():
    assert detect.match("cuda", frozenset({"cuda"})).name == "nvidia"
    assert (
        detect.match("cpu", frozenset({"sse2"})).name == "x86_64"
        and detect.match("cpu", frozenset({"asimd"})).name == "aarch64"
    )
    assert detect.match("cpu", frozenset()) is None
    assert detect.match("cuda", frozenset({"rocm"})).name == "amd"
    own = [c.family for c in detect.chips()]
    assert own == sorted(own)


def test_a_chip_is_found_by_file_name(tmp_path):
    (tmp_path / "quantum.py").write_text(
        "from tilewright.hardware.target import Chip, MatrixUnit\n"
        "UNIT = MatrixUnit('s8', 's32', 'qdot', 10**6, 'a dream, page 3')\n"
        "CHIP = Chip('quantum', 'cpu', frozenset({'sse2', 'qubits'}), (UNIT,))\n"
    )
    features = frozenset({"sse2", "avx2", "fma", "f16c", "qubits"})
    assert detect.match("cpu", features).name == "x86_64_avx2"
    assert detect.match("cpu", features, [tmp_path]).name == "quantum"
    assert "quantum" not in [c.name for c in detect.chips()]


TARGET = Target("a machine", Chip("c", "cpu", frozenset(), (MatrixUnit("f32", "f32", "fma", 2, "x"),)), "cpu", 4)
RECORD = ceilings.Record("key", {"f32": 100.0, "bf16": 200.0, "s8": 400.0, "f64": 50.0}, 20.0, 15.0)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts measurements, which give RECORD; the cache is a fresh folder."""
    calls = []

    def measure(target, key):
        calls.append(key)
        return ceilings.Record(key, RECORD.peak_gops, RECORD.read_gbps, RECORD.copy_gbps)

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measure", measure)
    return calls


def test_ceilings_are_measured_once_and_kept(measured, tmp_path):
    first, second = ceilings.with_ceilings(TARGET), ceilings.with_ceilings(TARGET)
    assert len(measured) == 1 and first == second
    assert first.peak_gops == RECORD.peak_gops and (first.read_gbps, first.copy_gbps) == (20.0, 15.0)
    assert "a machine" in measured[0] and torch.__version__ in measured[0]
    (file,) = (tmp_path / "cache").glob("ceilings-cpu*.[jt]*")
    assert file.name == "ceilings-cpu.json" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    ceilings.with_ceilings(TARGET, remeasure=True)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "kept",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b'{"key": "KEY", "peak_gops": {"f32": 9.0}, "read_gbps": 1.0, "copy_gbps": 1.0}',
        b'[{"key": "x"}]',
        b'[{"key": 3, "peak_gops": {}, "read_gbps": 1, "copy_gbps": 1}]',
        b'[{"key": "KEY", "peak_gops": {"f32": -1.0}, "read_gbps": 1.0, "copy_gbps": 1.0}]',
        b'[{"key": "KEY", "peak_gops": {"f32": 1.0}, "read_gbps": 0.0, "copy_gbps": 1.0}]',
        b'[{"key": "KEY", "peak_gops": {"f32": "fast"}, "read_gbps": 1.0, "copy_gbps": 1.0}]',
        b'[{"key": "another machine", "peak_gops": {"f32": 9.0}, "read_gbps": 1.0, "copy_gbps": 1.0}]',
    ],
)
def test_a_record_that_is_broken_or_another_machines_is_measured_again(measured, tmp_path, kept):
    ceilings.with_ceilings(TARGET)
    file = tmp_path / "cache" / "ceilings-cpu.json"
    file.write_bytes(kept.replace(b"KEY", measured[0].encode()))
    assert ceilings.with_ceilings(TARGET).peak_gops == RECORD.peak_gops and len(measured) == 2
    assert json.loads(file.read_bytes())[-1]["key"] == measured[0]


def test_numbers_of_threads_have_rates_of_their_own_that_stay(measured):
    """A program on two threads and one on four, in turns, measure once each; what noise lowers is not kept."""
    for count in (2, 1, 2, 1):
        with threads.limited(count):
            ceilings.with_ceilings(TARGET)
    assert len(measured) == len(set(measured)) == 2
    for noise, wanted in (("busy", {**RECORD.peak_gops}), ("", {"f32": 1.0})):
        now = ceilings.Record("", {"f32": 1.0}, 1.0, 1.0, noise)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ceilings, "_measure", lambda t, key, now=now: msgspec.structs.replace(now, key=key))
            found = ceilings.with_ceilings(TARGET, remeasure=True)
        assert found.peak_gops == wanted and found.noise == ""


def test_ceilings_measured_under_load_are_measured_again_in_quiet(measured, monkeypatch, tmp_path):
    """Noise only lowers a rate: the most of both is kept, and is as reliable as the second measurement."""
    noise = "9 runnable tasks on 4 cores"
    lower = ceilings.Record("", {"f32": 60.0, "bf16": 210.0}, 5.0, 99.0, noise)
    quiet, planted = ceilings._measure, [lower, lower]
    monkeypatch.setattr(
        ceilings, "_measure", lambda t, key: msgspec.structs.replace(planted.pop(0), key=key) if planted else quiet(t, key)
    )
    loads = [Load(of_cores=4, runnable=9.0, others=0.2), Load(), Load()]
    monkeypatch.setattr(ceilings, "load_now", lambda device, threads: loads.pop(0))
    first = ceilings.with_ceilings(TARGET)
    assert first.noise == noise and first.peak_gops == lower.peak_gops
    assert ceilings.with_ceilings(TARGET) == first and len(planted) == 1, "still busy"
    assert ceilings.with_ceilings(TARGET).noise == noise and not planted, "seemed quiet, and was not"
    settled = ceilings.with_ceilings(TARGET)
    assert settled.noise == "" and settled.peak_gops == {**RECORD.peak_gops, "bf16": 210.0}
    assert (settled.read_gbps, settled.copy_gbps) == (20.0, 99.0)
    assert ceilings.with_ceilings(TARGET) == settled and not loads


def test_a_changed_machine_is_measured_again(measured, monkeypatch):
    ceilings.with_ceilings(TARGET)
    count = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: count + 1)
    ceilings.with_ceilings(TARGET)
    monkeypatch.setattr(torch, "__version__", "99")
    ceilings.with_ceilings(TARGET)
    assert len(set(measured)) == 3


def test_a_folder_that_cannot_be_written_costs_only_the_memory(measured, monkeypatch, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(in_the_way / "cache"))
    assert ceilings.with_ceilings(TARGET).peak_gops == RECORD.peak_gops
    assert ceilings.with_ceilings(TARGET).read_gbps == 20.0 and len(measured) == 2


def test_a_write_that_fails_leaves_the_old_record_and_no_litter(measured, monkeypatch, tmp_path):
    ceilings.with_ceilings(TARGET)
    before = (tmp_path / "cache" / "ceilings-cpu.json").read_bytes()

    def full(self, data):
        with self.open("wb") as f:
            f.write(data[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    ceilings.with_ceilings(TARGET, remeasure=True)
    assert [p.read_bytes() for p in (tmp_path / "cache").glob("ceilings-cpu*.[jt]*")] == [before]


def test_measured_numbers_are_sane(monkeypatch, tmp_path):
    """Small sizes, so that it is quick: still positive, and no machine of today multiplies faster than this."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    products = ceilings._products
    monkeypatch.setattr(ceilings, "_products", lambda device, size, large: products(device, 128, large))
    monkeypatch.setattr(ceilings.torch, "rand", lambda n, device: torch.zeros(1 << 20))
    t = ceilings.with_ceilings(detect.detect("cpu"))
    assert set(t.peak_gops) == {"f32", "bf16", "s8", "f64"}
    assert all(0 < v < 1e7 for v in t.peak_gops.values()) and t.peak_gops["f32"] > 0.1
    assert t.read_gbps >= t.copy_gbps > 0.01 and t.read_gbps < 1e5


def test_limits():
    t = Target(**{f: getattr(TARGET, f) for f in ("name", "chip", "kind", "cores")}, peak_gops=RECORD.peak_gops, read_gbps=20.0)
    assert t.limit_us(2_000_000, 0, F32) == 20.0 and t.limit_us(0, 2_000_000, F32) == 100.0
    assert t.limit_us(2_000_000, 1_000_000, S8) == 50.0
    assert TARGET.limit_us(10**9, 10**9, F32) == 0.0
    assert [t.peak_for(d) for d in (S4, U8, PRED, S8)] == [400.0] * 4
    assert [t.peak_for(d) for d in (BF16, F8E4M3FN)] == [200.0] * 2
    assert [t.peak_for(d) for d in (F16, F32)] == [100.0] * 2 and t.peak_for(S32) == t.peak_for(F64) == 50.0
    assert t.peak_for(S64) == 50.0


def test_a_torch_device_is_one():
    import torch

    assert detect.detect(torch.device("cpu")) == detect.detect("cpu")
    with pytest.raises(InputError, match="unknown device None"):
        detect.detect(None)  # type: ignore[arg-type]


def test_a_ceiling_that_a_kernel_exceeds_is_measured_again_and_kept(measured):
    """The first measurement ran beside something else: the most of both and of what was seen counts, and nothing else falls."""
    t = ceilings.with_ceilings(TARGET)
    assert ceilings.corrected(t, {"f32": 104.9, "s8": 10.0, "unknown": 1e9}) == (t, []) and len(measured) == 1
    low = replace(t, peak_gops={**RECORD.peak_gops, "f32": 60.0, "s8": 500.0}, read_gbps=5.0, copy_gbps=99.0)
    raised, (said,) = ceilings.corrected(low, {"f32": 90.0, "bf16": 200.0})
    assert len(measured) == 2
    assert raised.peak_gops == {**RECORD.peak_gops, "f32": 100.0, "s8": 500.0}
    assert (raised.read_gbps, raised.copy_gbps) == (20.0, 99.0)
    assert said == (
        "the ceiling of f32 was measured too low, 60.0 Gop/s: a kernel reached 90.0; "
        "measured again it is 100.0, and 100.0 is kept"
    )
    assert ceilings.with_ceilings(TARGET) == raised and len(measured) == 2
    raised, (said,) = ceilings.corrected(raised, {"bf16": 300.0})  # a library set that ceiling, and the kernel is better
    assert raised.peak_gops["bf16"] == 300.0 and said.endswith("measured again it is 200.0, and 300.0 is kept")
    assert ceilings.corrected(raised, {"bf16": 300.0}) == (raised, []) and len(measured) == 3
