"""The file: a zip of torch's, with the contract as a member and a digest of everything at its very end.

The digest is in the archive's comment, the last bytes of a zip, and is of every byte before it: members, padding, the
directory. It finds damage, not malice: whoever changes a file can write another digest. Authenticity is a digest that
came another way.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from fuseboard.engine.aot.errors import PackageError
from fuseboard.engine.aot.stack import unexecutable

__all__ = ["MEMBER", "checked", "seal"]

MEMBER = "extra/fuseboard.json"
"""Below the archive's root, where torch looks for a package's extra files."""
_MARK = b"fuseboard-sha256:"
_DIGITS = 64
_CHUNK = 1 << 20


def seal(path: Path, data: dict[str, Any]) -> str:
    """Write `data` into a package of torch's, and the digest behind it. Gives the file's SHA-256.

    Its libraries ask for no executable stack then (`stack`).
    """
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        unexecutable(path, archive)
        format_name = next(name for name in archive.namelist() if name.endswith("archive_format"))
        root = format_name.removesuffix("archive_format")
        # A time of its own would make equal packages differ.
        member = zipfile.ZipInfo(root + MEMBER, (1980, 1, 1, 0, 0, 0))
        archive.writestr(member, json.dumps(data, indent=1))
        archive.comment = _MARK + b"0" * _DIGITS
    digest, _, _ = _digests(path)
    with path.open("r+b") as file:
        file.seek(-_DIGITS, 2)
        file.write(digest.encode())
    return _digests(path)[1]


def checked(path: Path, sha256: str | None = None) -> tuple[dict[str, Any], str]:
    """What `seal` wrote, from a file that is what it was then; and the file's SHA-256.

    Raises:
        PackageError: It is not, or it is no such file.
    """
    try:
        if not path.is_file():
            raise PackageError(str(path), "missing", "there is no such file; aot.export makes one.")
        digest, whole, tail = _digests(path)
    except OSError as error:
        raise PackageError(str(path), "unreadable", f"it cannot be read: {error}.") from error
    if sha256 is not None and whole != sha256.lower():
        msg = f"its SHA-256 is {whole}, and the one asked for is {sha256}: it is another file. It was not loaded."
        raise PackageError(str(path), "digest", msg)
    if tail != _MARK + digest.encode():
        raise _altered(path, tail)
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith(MEMBER))
            data = json.loads(archive.read(name))
    except (zipfile.BadZipFile, StopIteration, ValueError, NotImplementedError, RuntimeError) as error:
        msg = f"its contract cannot be read ({error}): it was not made by aot.export."
        raise PackageError(str(path), "schema", msg) from error
    if not isinstance(data, dict):
        raise PackageError(str(path), "schema", "its contract is no object: it was not made by aot.export.")
    return data, whole


def _digests(path: Path) -> tuple[str, str, bytes]:
    """The digest of all but the stored digest, that of all, and the last bytes."""
    with path.open("rb") as file:
        left = max(file.seek(0, 2) - _DIGITS, 0)
        file.seek(0)
        body, tail = hashlib.sha256(), b""
        while left > 0:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                break
            body.update(chunk)
            tail = (tail + chunk)[-len(_MARK) :]
            left -= len(chunk)
        rest = file.read()
        whole = body.copy()
        whole.update(rest)
    return body.hexdigest(), whole.hexdigest(), tail + rest


def _altered(path: Path, tail: bytes) -> PackageError:
    """The digest is not that of the file: what has happened to it?"""
    sealed = tail.startswith(_MARK)
    try:
        with zipfile.ZipFile(path) as archive:
            ours = any(name.endswith(MEMBER) for name in archive.namelist())
            broken = archive.testzip()
    except Exception as error:  # noqa: BLE001 - zipfile raises whatever damaged bytes lead it to
        if sealed:
            msg = f"it was changed after it was made: the digest does not fit, and it is no whole zip ({error})."
            return PackageError(str(path), "altered", f"{msg} Nothing of it was loaded.")
        msg = f"it is no whole package: truncated, or another kind of file ({error}). Nothing of it was loaded."
        return PackageError(str(path), "unreadable", msg)
    if not ours and not sealed:
        msg = "it has no contract: it was not made by aot.export, and calls of it could not be checked. Export it anew."
        return PackageError(str(path), "foreign", msg)
    where = f"in {broken}" if broken else "outside of its members' data"
    msg = f"it was changed after it was made, {where}: the digest does not fit. Nothing of it was loaded."
    return PackageError(str(path), "altered", msg)
