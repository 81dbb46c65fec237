"""JSON from outside: whatever is wrong with it, each reader has one answer."""

import msgspec
import pytest

from tilewright.errors import InputError
from tilewright.files import NotJSONError, cache_folder, decoded
from tilewright.hardware import ceilings
from tilewright.ir.safetensors import TensorFile
from tilewright.report.explain.difference import read_report
from tilewright.schedule.record import read_records
from tilewright.schedule.shipped import read

WRONG = {
    "no JSON": b"{",
    "nothing": b"",
    "a broken string": b'{"key": "\xff\xfe"}',
    "a lone half of a pair": rb'{"key": "\ud800"}',
    "too deep": b"[" * 100_000 + b"]" * 100_000,
    "another type": b"[1, 2]",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_error(wrong):
    with pytest.raises(NotJSONError, match=r"\w+"):
        decoded(WRONG[wrong], dict[str, str])
    assert decoded(msgspec.json.encode({"key": "é"}), dict[str, str]) == {"key": "é"}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("reader", [read_report, read_records, read, TensorFile], ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_readers_of_files_say_which_file(reader, wrong, tmp_path):
    path = tmp_path / "given"
    length = len(WRONG[wrong]).to_bytes(8, "little") if reader is TensorFile else b""
    path.write_bytes(length + WRONG[wrong])
    with pytest.raises(InputError) as found:
        reader(path)
    assert "given" in str(found.value) and found.value.hint


@pytest.mark.parametrize("wrong", WRONG)
def test_damaged_ceilings_are_measured_again(wrong, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    file = cache_folder() / "ceilings-cpu.json"
    file.write_bytes(WRONG[wrong])
    file.chmod(0o600)
    assert ceilings._load("key", "cpu") is None
