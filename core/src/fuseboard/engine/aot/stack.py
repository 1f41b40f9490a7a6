"""The libraries in a package of torch's, without the executable stack that torch's constants make them ask for.

AOTInductor hands its constants to the assembler, in a file without the note that says how the stack is used; a linker
takes that for a stack that holds code. Nothing in these libraries does. To load one, the process's stacks would have to
become executable: glibc from 2.41 on refuses that, and so do SELinux, hardened kernels and some containers, or the
process ends there.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

__all__ = ["unexecutable"]

# ELF-64, little-endian (the System V ABI's elf.h): where the program headers are, and what one of them says.
_ELF = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<32xQ14xHH")
_PT_GNU_STACK = 0x6474E551
_PF_X = 1
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
                name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
                start = member.header_offset + _LOCAL.size + name + extra
                if _cleared(file, start, member.file_size):
                    _checked_anew(file, start, member)


def _cleared(file: BinaryIO, start: int, length: int) -> bool:
    """Whether the library at `start` asked for such a stack, which it does no longer."""
    file.seek(start)
    head = file.read(min(_HEADER.size, length))
    if len(head) < _HEADER.size or not head.startswith(_ELF):
        return False
    table, size, count = _HEADER.unpack(head)
    if table + size * count > length:
        return False
    for at in range(start + table, start + table + size * count, size):
        file.seek(at)
        kind, flags = struct.unpack("<II", file.read(8))
        if kind == _PT_GNU_STACK and flags & _PF_X:
            file.seek(at + 4)
            file.write(struct.pack("<I", flags & ~_PF_X))
            return True
    return False


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
