"""What is asked of a shared library's file: its program headers, and which libraries it needs.

Of 64 bits and little-endian alone, as x86-64 and AArch64 are (System V ABI, "Object Files" and "Program Loading and
Dynamic Linking"); of any other file nothing is found.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

__all__ = ["GNU_STACK", "Segment", "needed", "segments"]

_MAGIC = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<32xQ14xHH")  # where the program headers are, their size, how many
_SEGMENT = struct.Struct("<IIQQ8xQ")
_ENTRY = struct.Struct("<QQ")
_LOAD, _DYNAMIC = 1, 2
GNU_STACK = 0x6474E551
"""The segment whose flags say how the stack is used."""
_NEEDED, _STRINGS, _STRINGS_SIZE = 1, 5, 10


class Segment(NamedTuple):
    """One program header: what it is, where it stands, and what of the file goes to which address."""

    kind: int
    flags: int
    header: int
    offset: int
    address: int
    size: int


def segments(file: BinaryIO, start: int, length: int) -> list[Segment]:
    """Those of the library that is `length` bytes of the file from `start`; positions are the file's."""
    file.seek(start)
    head = file.read(min(_HEADER.size, length))
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        return []
    table, size, count = _HEADER.unpack(head)
    if size < _SEGMENT.size or table + size * count > length:
        return []
    file.seek(start + table)
    headers = file.read(size * count)
    found = []
    for at in range(0, size * count, size):
        kind, flags, offset, address, held = _SEGMENT.unpack_from(headers, at)
        found.append(Segment(kind, flags, start + table + at, start + offset, address, held))
    return found


def needed(file: BinaryIO, start: int, length: int) -> list[str]:
    """The names of the libraries that it is linked to."""
    found = segments(file, start, length)
    dynamic = next((each for each in found if each.kind == _DYNAMIC), None)
    if dynamic is None:
        return []
    file.seek(dynamic.offset)
    entries = list(_ENTRY.iter_unpack(file.read(dynamic.size)))
    values = dict(reversed(entries))
    address = values[_STRINGS]
    home = next(each for each in found if each.kind == _LOAD and each.address <= address < each.address + each.size)
    file.seek(home.offset + address - home.address)
    strings = file.read(values[_STRINGS_SIZE])
    return [strings[at : strings.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED]
