"""The libraries in a package of torch's, without the executable stack that torch's constants make them ask for.

AOTInductor hands its constants to the assembler, in a file without the note that says how the stack is used; a linker
takes that for a stack that holds code. Nothing in these libraries does. To load one, the process's stacks would have to
become executable: glibc before 2.41 makes them so, later ones refuse, and so do SELinux and hardened kernels.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from fuseboard.engine.aot.elf import GNU_STACK, segments

__all__ = ["unexecutable"]

_EXECUTABLE = 1  # PF_X
# A zip's local header and data descriptor (APPNOTE 4.3.7 and 4.3.9).
_LOCAL = struct.Struct("<26xHH")
_LOCAL_CRC = 14
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIBED = 1 << 3
_CHUNK = 1 << 20


def unexecutable(path: Path, archive: zipfile.ZipFile) -> None:
    """Changes each stored library of an open archive in its file, and `archive`, which has its checksums to write."""
    with path.open("r+b") as file:
        for member in archive.infolist():
            if member.filename.endswith(".so") and member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                start = member.header_offset + _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
                if _cleared(file, start, member.file_size):
                    _checked_anew(file, start, member)


def _cleared(file: BinaryIO, start: int, length: int) -> bool:
    """Whether the library at `start` asked for such a stack, which it does no longer."""
    stack = next((each for each in segments(file, start, length) if each.kind == GNU_STACK), None)
    if stack is None or not stack.flags & _EXECUTABLE:
        return False
    file.seek(stack.header + 4)
    file.write(struct.pack("<I", stack.flags & ~_EXECUTABLE))
    return True


def _checked_anew(file: BinaryIO, start: int, member: zipfile.ZipInfo) -> None:
    """A member's checksum stands in its header or behind its data; in the directory too, which `zipfile` writes."""
    file.seek(start)
    left, crc = member.file_size, 0
    while left:
        chunk = file.read(min(left, _CHUNK))
        crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    member.CRC = crc
    at = member.header_offset + _LOCAL_CRC
    if member.flag_bits & _DESCRIBED:
        at = file.tell()
        at += len(_DESCRIPTOR) if file.read(4) == _DESCRIPTOR else 0
    file.seek(at)
    file.write(struct.pack("<I", crc))
