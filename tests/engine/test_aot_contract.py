"""A package's contract as data: expressions, checks and the file around it; nothing is compiled here."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseboard.engine import aot
from fuseboard.engine.aot import archive, elf
from fuseboard.engine.aot.check import KNOWN, Check
from fuseboard.engine.aot.contract import evaluate, parsed, symbols_of

LENGTH = aot.Size("16*s0", 32, 128, "s0", 16, 0)
ROWS = aot.Size("s1", 2, None, "s1", 1, 0)
TARGET = aot.Target("linux", "x86_64", "AVX2", ("avx2",), "cpu")


def fixed(size: int) -> aot.Size:
    return aot.Size(size, size, size)


def contract(*inputs: aot.Input, guards: tuple[str, ...] = (), **changes) -> aot.Contract:
    made = aot.Contract(
        inputs=inputs or (ids(), mask()),
        outputs=(aot.Output("float32", (ROWS, fixed(3)), (3, 1), "cpu"),),
        symbols={"s0": (2, 8), "s1": (2, None)},
        guards=guards, positional=2, keywords=(), flat=True, trees=("", ""), notes=("a note",), target=TARGET,
        torch="2.13.0", fuseboard="0.1.0", policy="auto", attention={"site": {"every call": "reference"}},
    )  # fmt: skip
    return attrs.evolve(made, **changes)


def ids(**changes) -> aot.Input:
    return attrs.evolve(aot.Input("ids", "int64", (ROWS, LENGTH), ("16*s0", 1), "contiguous", "cpu"), **changes)


def mask(**changes) -> aot.Input:
    return attrs.evolve(aot.Input("mask", "bool", (ROWS, LENGTH), ("16*s0", 1), "contiguous", "cpu"), **changes)


def call(rows: int, length: int, mask_rows: int | None = None, mask_length: int | None = None):
    mask_shape = (mask_rows or rows, mask_length or length)
    return torch.zeros(rows, length, dtype=torch.int64), torch.ones(mask_shape, dtype=torch.bool)


def lines(check: Check, tensors) -> list[str]:
    with pytest.raises(aot.ContractError) as error:
        check(tensors)
    return [str(each) for each in error.value.problems]


# ---- as data


@pytest.mark.parametrize(
    "made",
    [
        contract(),
        contract(ids(values=((0, "s1 - 1"),)), aot.Constant("flag", value=None), guards=("(s0 % 2) == 0",)),
        contract(target=attrs.evolve(TARGET, device="cuda", gpu="NVIDIA H200", capability=(9, 0), cuda="13.0")),
    ],
)
def test_a_contract_comes_back_from_json_as_it_was(made):
    assert aot.Contract.of(json.loads(json.dumps(made.data()))) == made


def test_a_contract_reads_well():
    assert str(contract(ids(written=True), mask(), guards=("(s0 % 2) == 0",))) == (
        "package for torch 2.13.0, x86_64 AVX2\n"
        "    ids: int64 [2 or more; 32 to 128, a multiple of 16], contiguous, on cpu, written into\n"
        "    mask: bool [2 or more; 32 to 128, a multiple of 16], contiguous, on cpu\n"
        "    -> float32 [2 or more; 3] on cpu\n"
        "    only where (s0 % 2) == 0\n"
        "    note: a note"
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (aot.Size("4*s0 + 1", 9, 33, "s0", 4, 1), "9 to 33, in steps of 4"),
        (aot.Size("4*s0 + 8", 16, 40, "s0", 4, 8), "16 to 40, a multiple of 4"),
        (aot.Size("s0*s1", 4, None), "4 or more"),
    ],
)
def test_a_size_reads_well(size, words):
    assert str(size) == words


# ---- expressions


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("16*s0 + 1", 49),
        ("s0 // 2", 1),
        ("-s0 + 2*s1", 7),
        ("max(1, s0 // 2)", 1),
        ("(s0 % 2) == 1", True),
        ("s0 != s1 and s1 == 5", True),
        ("not (s0 > 1 or s1 < 2)", False),
        ("1 < s0 < s1", True),
        ("(1/2)*s0 == s0/2", True),
        ("(s1 % (s0 // 16)) == 0", None),
    ],
)
def test_an_expression_has_the_value_that_python_gives_it(expression, value):
    assert evaluate(expression, {"s0": 3, "s1": 5}) == value


@given(st.integers(1, 4096), st.integers(1, 64))
@settings(deadline=None, max_examples=100)
def test_torchs_condition_of_a_view_holds_for_multiples_alone(length, part):
    condition = f"s0 == {part}*(s0 // {part})"

    assert evaluate(condition, {"s0": length}) == (length % part == 0)


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "s0.real", "s0[0]", "(lambda: 1)()", "'x'", "s0 if s1 else 2", "pow(s0, 2)", "s0 +"],
)
def test_an_expression_of_anything_else_is_refused(expression):
    with pytest.raises(ValueError, match=r"is no expression of sizes|is not understood"):
        parsed(expression)


def test_the_symbols_of_an_expression_are_not_its_functions():
    assert symbols_of("max(s0, 16*s1) > 2") == {"s0", "s1"}


# ---- checks

NEAR = "the package takes 32 to 128, a multiple of 16 (nearest: 32 and 48; pad to 48 or cut to 32)"
SAME = " (give both the same length)"


@pytest.mark.parametrize(("rows", "length"), [(2, 32), (2, 128), (5000, 48)])
def test_sizes_within_the_bounds_pass_unchanged(rows, length):
    tensors = call(rows, length)
    out = Check(contract(), contiguous=False, package="x.pt2")(tensors)

    assert [a is b for a, b in zip(out, tensors, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("sizes", "problems"),
    [
        ((2, 40), ["ids: size 1 is 40; " + NEAR]),
        ((1, 48), ["ids: size 0 is 1; the package takes 2 or more (nearest: 2; pad to 2)"]),
        ((0, 48), ["ids: size 0 is 0; the package takes 2 or more (nearest: 2; pad to 2)"]),
        ((2, 48, 3), ["mask: size 0 is 3; the package takes 2, since size 0 of ids is 2" + SAME]),
        ((2, 48, 2, 64), ["mask: size 1 is 64; the package takes 48, since size 1 of ids is 48" + SAME]),
        (
            (2, 40, 2, 33),
            [
                "ids: size 1 is 40; " + NEAR,
                "mask: size 1 is 33; " + NEAR,
            ],
        ),
    ],
)  # fmt: skip
def test_sizes_that_are_wrong_are_told_with_what_would_be_right(sizes, problems):
    assert lines(Check(contract(), contiguous=False, package="x.pt2"), call(*sizes)) == problems


def test_a_condition_of_the_graph_is_a_limit_and_the_nearest_sizes_obey_it():
    check = Check(contract(guards=("(s0 % 3) == 0",)), contiguous=False, package="x.pt2")

    check(call(2, 96))
    assert lines(check, call(2, 64)) == [
        "ids: size 1 is 64; the package takes 32 to 128, a multiple of 16, where (s0 % 3) == 0 "
        "(nearest: 48 and 96; pad to 96 or cut to 48)"
    ]


def test_a_condition_on_two_sizes_names_both():
    check = Check(contract(guards=("s0*s1 <= 20",)), contiguous=False, package="x.pt2")

    check(call(4, 80))
    assert lines(check, call(5, 80)) == [
        "size 1 of ids is 80 and size 0 of ids is 5; the package takes sizes where s0*s1 <= 20"
    ]


def test_a_size_computed_from_several_follows_from_them():
    flat = aot.Input("flat", "float32", (aot.Size("16*s0*s1", 64, None),), (1,), "contiguous", "cpu")
    check = Check(contract(ids(), flat), contiguous=False, package="x.pt2")

    check((call(2, 48)[0], torch.zeros(96)))
    assert lines(check, (call(2, 48)[0], torch.zeros(97)))[0].startswith("flat: size 0 is 97; the package takes 96 = ")


@pytest.mark.parametrize("contiguous", [False, True])
def test_an_input_that_the_model_writes_into_is_never_copied(contiguous):
    check = Check(contract(ids(written=True), mask()), contiguous=contiguous, package="x.pt2")
    rows, flags = call(48, 48)

    (line,) = lines(check, (rows.T, flags))
    assert line.endswith("(the model writes into ids, so that a copy would not do)")


@pytest.mark.parametrize("contiguous", [False, True])
def test_memory_that_the_model_writes_into_is_shared_with_no_other_input(contiguous):
    row = aot.Input("total", "float32", (fixed(2), fixed(4)), (4, 1), "contiguous", "cpu", written=True)
    check = Check(contract(attrs.evolve(row, name="x", written=False), row), contiguous=contiguous, package="x.pt2")
    memory = torch.zeros(5, 4)

    for x, total in ((memory[:2], memory[2:4]), (memory[3:], memory[:2])):
        check((x, total))
        (line,) = lines(check, (memory[1:3], total))
        assert line == (
            "x: shares memory with total; the package takes memory of its own, since the model writes into total "
            "(give x.clone())"
        )


def test_a_copy_is_made_in_the_layout_that_the_package_reads():
    image = aot.Input(
        "image", "float32", tuple(map(fixed, (2, 3, 4, 5))), (60, 1, 15, 3), "channels_last", "cpu"
    )  # fmt: skip
    given = torch.randn(2, 3, 4, 5)
    check = Check(contract(image), contiguous=True, package="x.pt2")
    for _ in range(2):
        (out,) = check((given,))
        assert out.stride() == (60, 1, 15, 3)
        assert torch.equal(out, given)
    assert "image: has strides (60, 20, 5, 1); the package takes channels_last, strides (60, 1, 15, 3)" in lines(
        Check(contract(image), contiguous=False, package="x.pt2"), (given,)
    )[0]  # fmt: skip


def test_strides_of_sizes_of_one_are_of_no_account():
    one = aot.Input("x", "float32", (fixed(1), fixed(4)), (4, 1), "contiguous", "cpu")

    Check(contract(one), contiguous=False, package="x.pt2")((torch.zeros(2, 9)[:1, :4],))


def test_an_address_that_is_not_aligned_is_refused_or_copied():
    aligned = aot.Input("x", "float32", (fixed(4),), (1,), "contiguous", "cpu", None, 16)
    given = torch.arange(8.0)[1:5]

    (line,) = lines(Check(contract(aligned), contiguous=False, package="x.pt2"), (given,))
    assert line.startswith("x: starts at an address that is no multiple of 16, as a slice may")
    (out,) = Check(contract(aligned), contiguous=True, package="x.pt2")((given,))
    assert torch.equal(out, given)
    assert out.data_ptr() % 16 == 0


def test_indices_have_to_lie_within_all_that_they_index():
    rows = ids(values=((0, 49), ("-s1", "s1 - 1")))
    check = Check(contract(rows, mask()), contiguous=False, package="x.pt2")
    given, flags = call(4, 32)

    for value, right in ((3, True), (0, True), (4, False), (-1, False)):
        given[1, 2] = value
        if right:
            check((given, flags))
        else:
            (line,) = lines(check, (given, flags))
            assert "; the package takes 0 to 3 (they are indices" in line


def test_what_is_remembered_is_bounded_and_remembers_no_refusal():
    check = Check(contract(), contiguous=False, package="x.pt2")
    for rows in range(2, KNOWN + 50):
        check(call(rows, 32))
    for _ in range(2):
        assert lines(check, call(1, 32))

    assert len(check._known) <= KNOWN


# ---- the file


@pytest.fixture
def package(tmp_path):
    """A zip with a root folder, as torch writes one, sealed."""
    path = tmp_path / "x.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("x/archive_format", "pt2")
        file.writestr("x/data/aotinductor/model/code.so", bytes(range(256)) * 40)
    archive.seal(path, {"contract": {"schema": 1}, "meta": None})
    return path


def test_what_was_sealed_is_read_again(package):
    data, digest = archive.checked(package)

    assert data == {"contract": {"schema": 1}, "meta": None}
    assert archive.checked(package, digest) == (data, digest)


def library(stack: int, constants: bytes) -> bytes:
    """The beginning of an ELF file: two program headers, the second PT_GNU_STACK."""
    header = struct.pack("<6s26xQ14xHH", b"\x7fELF\x02\x01", 64, 56, 2).ljust(64, b"\0")
    return header + struct.pack("<II48x", 1, 5) + struct.pack("<II48x", 0x6474E551, stack) + constants


class Unseekable(io.RawIOBase):
    """A file into which a zip is written with its checksums behind the data, as torch does."""

    def __init__(self, file):
        self.file = file

    def writable(self):
        return True

    def write(self, data):
        return self.file.write(data)


@pytest.mark.parametrize("described", [False, True], ids=["header", "descriptor"])
def test_a_library_that_wants_an_executable_stack_wants_it_no_longer(tmp_path, described):
    path, constants = tmp_path / "x.pt2", bytes(range(256)) * 9000  # more than is read at once
    short, other = library(7, b"")[:50], b"\xcf\xfa\xed\xfe" + constants
    with path.open("wb") as raw, zipfile.ZipFile(Unseekable(raw) if described else raw, "w") as file:
        file.writestr("x/archive_format", "pt2")
        file.writestr("x/model/wants.so", library(7, constants))
        file.writestr("x/model/does_not.so", library(6, constants))
        file.writestr("x/model/short.so", short)
        file.writestr("x/model/mach.so", other)
        file.writestr("x/model/text.cpp", library(7, constants))
    archive.seal(path, {"contract": {"schema": 1}, "meta": None})

    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.read("x/model/wants.so") == library(6, constants) == file.read("x/model/does_not.so")
        assert file.read("x/model/text.cpp") == library(7, constants)
        assert (file.read("x/model/short.so"), file.read("x/model/mach.so")) == (short, other)
    local = path.read_bytes()
    at = local.index(b"x/model/wants.so")
    crc = zlib.crc32(library(6, constants))
    stored = local.index(library(6, constants)) + len(library(6, constants))
    if described:
        assert struct.unpack_from("<4sI", local, stored) == (b"PK\x07\x08", crc)
    else:
        assert struct.unpack_from("<I", local, at - 16) == (crc,)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_the_libraries_that_a_library_needs_are_read_from_its_file(tmp_path):
    path = Path(torch._C.__file__)
    behind = tmp_path / "inside of another file"
    behind.write_bytes(b"before" + path.read_bytes() + b"behind")

    with path.open("rb") as file:
        names = elf.needed(file, 0, path.stat().st_size)
        assert elf.needed(file, 1, path.stat().st_size) == elf.needed(file, 0, 20) == []
    with behind.open("rb") as file:
        assert elf.needed(file, len(b"before"), path.stat().st_size) == names

    assert "libtorch_python.so" in names


def test_a_change_of_any_byte_is_found(package):
    whole = package.read_bytes()
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 0x20
        package.write_bytes(data)
        with pytest.raises(aot.PackageError) as error:
            archive.checked(package)
        assert error.value.reason in ("altered", "unreadable"), at


def test_a_file_cut_anywhere_is_refused(package):
    whole = package.read_bytes()
    for length in range(0, len(whole), 97):
        package.write_bytes(whole[:length])
        with pytest.raises(aot.PackageError) as error:
            archive.checked(package)
        assert error.value.reason in ("altered", "unreadable"), length


def test_a_package_of_somebody_elses_a_missing_one_a_folder_and_an_impossible_name_are_refused(tmp_path):
    path = tmp_path / "theirs.pt2"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive_format", "pt2")

    too_long = f"{'n' * 300}.pt2"
    for name, reason in (
        ("theirs.pt2", "foreign"), ("none.pt2", "missing"), (".", "missing"), (too_long, "unreadable"),
    ):  # fmt: skip
        with pytest.raises(aot.PackageError) as error:
            aot.load(tmp_path / name)
        assert error.value.reason == reason


def test_a_contract_that_is_none_is_refused(package):
    with pytest.raises(aot.PackageError, match="its contract is of another kind than this fuseboard reads") as error:
        aot.load(package)
    assert error.value.reason == "schema"
