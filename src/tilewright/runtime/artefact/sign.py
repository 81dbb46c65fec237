"""Signatures of saved programs, by a key that this user alone has."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from tilewright.errors import say
from tilewright.files import cache_folder, open_own
from tilewright.ir.artefact import Container

KEY_BYTES = 32


def signature_of(manifest: bytes, key: bytes | None) -> str:
    """The HMAC-SHA-256 of a manifest, in which every array's digest stands; "" without a key."""
    return "" if key is None else hmac.new(key, manifest, hashlib.sha256).hexdigest()


def user_key() -> bytes | None:
    """Give the user's key on this machine, made when first asked for; None, said once, where none can be kept to oneself."""
    try:
        file = cache_folder() / "key"
        if not file.exists():
            _make_key(file)
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise PermissionError(1, "others can read it", str(file))
            key = opened.read()
    except OSError as error:
        say(f"programs are saved without a signature: the key cannot be kept ({error.strerror}: {error.filename})")
        return None
    if len(key) != KEY_BYTES:
        say(f"programs are saved without a signature: {file} is no key; delete it, and another is made")
        return None
    return key


def _make_key(file: Path) -> None:
    """Make a key, unless another process does so first."""
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # readable by the owner alone
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(name, file)
        except FileExistsError:
            return
    finally:
        Path(name).unlink()


def signed(container: Container) -> bool:
    """Tell whether a key of this user signed a file's manifest."""
    if not container.signature:
        return False
    key = user_key()
    return key is not None and hmac.compare_digest(signature_of(container.manifest, key).encode(), container.signature.encode())
