"""Files appear whole or not at all; links, devices and pipes are written through and stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write
from in_threads import in_threads

from tilewright.errors import InputError
from tilewright.files import read_own, require_writable, write_own, write_whole
from tilewright.report.measure.inputs import write_npz


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def read_meanwhile(path: Path) -> tuple[threading.Thread, list[bytes]]:
    """A reader of a pipe, to be joined, and where it puts what it reads."""
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(path.read_bytes()), daemon=True)
    reader.start()
    return reader, heard


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_pipe_gets_the_contents_and_stays_a_pipe(pipe: Path) -> None:
    require_writable(pipe)  # without a reader: does not wait for one
    for contents in (b"one", b"\0" * 200_000):
        reader, heard = read_meanwhile(pipe)
        require_writable(pipe)  # the reader hears nothing of it
        write_whole(pipe, contents)
        reader.join(10)
        assert heard == [contents]
    assert stat.S_ISFIFO(pipe.stat().st_mode) and names(pipe.parent) == ["pipe"]


def test_an_archive_goes_through_a_pipe(pipe: Path, tmp_path: Path) -> None:
    reader, heard = read_meanwhile(pipe)
    write_npz(pipe, {"x": np.arange(5)})
    reader.join(10)
    (tmp_path / "x.npz").write_bytes(heard[0])
    assert np.load(tmp_path / "x.npz")["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def nothing_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid to replace a file: as root, a test that fails here would otherwise take the machine's devices with it."""

    def never(path: Path, target: object) -> None:
        raise AssertionError(f"{target} is replaced")

    monkeypatch.setattr(Path, "replace", never)


@pytest.mark.usefixtures("nothing_replaced")
def test_devices_are_written_in_place() -> None:
    before = Path(os.devnull).stat().st_rdev
    require_writable(Path(os.devnull))
    write_whole(Path(os.devnull), b"gone")
    found = Path(os.devnull).stat()
    assert stat.S_ISCHR(found.st_mode) and found.st_rdev == before
    if Path("/dev/full").exists():
        with pytest.raises(InputError, match=r"cannot be written: No space left on device \(/dev/full\)\n  try: another place"):
            write_whole(Path("/dev/full"), b"text")


@pytest.mark.usefixtures("nothing_replaced")
def test_what_a_verb_writes_goes_to_devices_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)
    program = write(tmp_path, block())
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    assert invoke("perf", program, "--html", link, "--trace", os.devnull, "-n", "1", *FAST).exit_code == 0
    assert link.is_symlink() and stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_written_through(there: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to("folder/file")
    if there:
        file.write_bytes(b"old")
    require_writable(link)
    write_whole(link, b"new")
    assert link.is_symlink() and file.read_bytes() == b"new"
    assert names(tmp_path) == ["folder", "link"] and names(file.parent) == ["file"]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("none/file")
    (tmp_path / "d").symlink_to(".")
    for name, why in (("a", "Too many levels"), ("c", "No such file"), ("d", "Is a directory")):
        for act in (require_writable, lambda path: write_whole(path, b"text")):
            with pytest.raises(InputError, match=f"cannot be written: {why}"):
                act(tmp_path / name)
    assert names(tmp_path) == ["a", "b", "c", "d"]


def test_threads_write_one_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"

    def work(i: int) -> None:
        for _ in range(50):
            write_whole(file, bytes([i]) * 100_000)
            require_writable(file)
            found = file.read_bytes()
            assert len(found) == 100_000 and len(set(found)) == 1

    in_threads(4, work)
    assert names(tmp_path) == ["file"]


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for mode in (0o600, 0o640):
        file.touch()
        file.chmod(mode)
        write_whole(file, b"text")
        assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_file_that_must_not_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == file and mode == os.W_OK))  # root may write to all
    for act in (require_writable, lambda path: write_whole(path, b"text")):
        with pytest.raises(InputError, match="cannot be written: Permission denied"):
            act(file)
    assert file.read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_own_files_are_read_and_written_by_their_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own"
    for contents in (b"first", b"second"):
        write_own(file, contents)
        assert read_own(file) == contents and stat.S_IMODE(file.stat().st_mode) == 0o600 and names(tmp_path) == ["own"]
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="link"):
        read_own(tmp_path / "link")
    (tmp_path / "link").unlink()
    file.chmod(0o622)
    with pytest.raises(PermissionError, match="could have been written by someone else"):
        read_own(file)

    def torn(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", torn)
    with pytest.raises(OSError, match="no space"):
        write_own(file, b"third")
    assert file.read_bytes() == b"second" and names(tmp_path) == ["own"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127], ids=["one byte", "two bytes"])
def test_the_longest_names_are_written(name: str, tmp_path: Path) -> None:
    require_writable(tmp_path / name)
    write_whole(tmp_path / name, b"text")
    assert names(tmp_path) == [name]
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        require_writable(tmp_path / (name + "xx"))
