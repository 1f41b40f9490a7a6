"""Verdicts on disk: what they depend on, and every way in which a disk or a neighbour can fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuseboard import verdicts

MACHINE = {
    "torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "cudnn": 91900, "driver": "580.65",
    "devices": [{"device": "cpu", "name": "EPYC", "capability": "AVX512"},
                {"device": "cuda:0", "name": "H200", "capability": (9, 0), "memory": 1}],
}  # fmt: skip
YES = {"requires": {}, "limit": 300.0, "ok": True, "reason": "", "stage": "", "seconds": 1.5, "detail": []}
NO = YES | {"ok": False, "reason": "import failed: OSError", "stage": "import"}
SLOW = YES | {"ok": False, "reason": "did not end within 300 s during its import", "stage": "time limit"}


def key(device="cuda:0", distribution="fuseboard-sdpa", **machine):
    return verdicts.key("acme", distribution, device, MACHINE | machine)


def read(where, wanted=None, limit=300.0, **options):
    return verdicts.read(where, wanted or key(), limit=limit, **options)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Install distributions of one module on a path of their own."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(name, version="1.0", code="x = 1\n", record=None, point=None):
        info = site / f"{name}-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if record is not None:
            (info / "RECORD").write_text(record)
        if point is not None:
            (info / "entry_points.txt").write_text(f"[fuseboard.backends]\nacme = {point}\n")
        (site / f"{name}.py").write_text(code)
        return site

    return install


def test_a_verdict_is_read_as_it_was_written_and_a_person_can_read_it(tmp_path):
    verdicts.write(tmp_path / "deep" / "cache", key(), NO)
    kept = read(tmp_path / "deep" / "cache")

    assert {name: kept[name] for name in NO} == NO
    (file,) = (tmp_path / "deep" / "cache").iterdir()
    assert file == verdicts.path(tmp_path / "deep" / "cache", key())
    assert file.name.startswith("acme-cuda0-")
    assert json.loads(file.read_text())["key"]["device name"] == "H200"
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    "other",
    [
        *({"torch": "2.12.0"}, {"cuda": "12.8"}, {"hip": "6.4"}, {"cudnn": 92000}, {"driver": "590.1"}),
        {"devices": [{"device": "cuda:0", "name": "H100", "capability": (9, 0)}]},
        {"devices": [{"device": "cuda:0", "name": "H200", "capability": (10, 0)}]},
        {"device": "cpu"},
        {"distribution": "fuseboard-flash"},
    ],
)
def test_another_machine_is_another_verdict(tmp_path, other):
    verdicts.write(tmp_path, key(), YES)

    assert read(tmp_path) is not None
    assert read(tmp_path, key(**other)) is None


def test_a_process_that_uses_the_cpu_alone_shares_verdicts_with_one_that_knows_cudnn():
    assert key("cpu", cudnn=None) == key("cpu")
    assert key("cuda:0", cudnn=None) != key("cuda:0")


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "TRITON_PTXAS_PATH", "XFORMERS_X"])
def test_a_variable_that_decides_what_is_loaded_is_another_verdict(monkeypatch, name):
    before = key()
    monkeypatch.setenv(name, "/elsewhere")

    assert key() != before
    assert key()["environment"][name] == "/elsewhere"


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "HOME", "CUDA_VISIBLE_DEVICES"])
def test_a_variable_that_decides_nothing_is_not(monkeypatch, name):
    before = key()
    monkeypatch.setenv(name, "/elsewhere")

    assert key() == before


def test_a_plugin_that_is_edited_in_place_or_built_again_is_another_verdict(packages):
    packages("acme_plugin", point="acme_code")
    site = packages("acme_code", record="acme_code.py,sha256=1,6\n")
    before = key(distribution="acme_plugin")
    (site / "acme_code.py").write_text("x = 2\n")
    edited = key(distribution="acme_plugin")
    packages("acme_plugin", record="acme_plugin.py,sha256=2,6\n", point="acme_code")
    (site / "acme_code.py").write_text("x = 1\n")
    built = key(distribution="acme_plugin")
    packages("acme_plugin", version="1.1", record="acme_plugin.py,sha256=2,6\n", point="acme_code")

    seen = [before, edited, built, key(distribution="acme_plugin")]
    assert len({json.dumps(each["plugin"]) for each in seen}) == 4
    assert "acme_code" not in sys.modules


def test_a_plugin_with_equal_content_is_the_same_verdict_whenever_it_was_installed(packages):
    site = packages("acme_plugin")
    before = key(distribution="acme_plugin")
    os.utime(site / "acme_plugin.py", (1, 1))

    assert key(distribution="acme_plugin") == before


@pytest.mark.parametrize("verdict", [YES, NO])
def test_a_required_package_that_was_changed_removed_or_added_drops_the_verdict(tmp_path, packages, verdict):
    site = packages("acme_kernel")
    cache = tmp_path / "cache"

    def kept():
        return read(cache) is not None

    def write():
        verdicts.write(cache, key(), verdict | {"requires": verdicts.packages(["acme_kernel", "acme_missing"])})
        assert kept()

    write()
    packages("acme_kernel", version="1.1")
    assert not kept()
    write()
    os.utime(site / "acme_kernel.py", (1, 1))  # built again in place
    assert not kept()
    write()
    packages("acme_missing")
    assert not kept()
    write()
    (site / "acme_missing-0.dist-info" / "METADATA").unlink()
    assert not kept()
    assert not {"acme_kernel", "acme_missing"} & set(sys.modules)


def test_a_no_is_dropped_when_another_package_is_installed_and_a_yes_is_not(tmp_path, packages):
    cache = tmp_path / "cache"
    for verdict, stays in ((NO, False), (YES, True)):
        verdicts.write(cache, key(), verdict)
        assert read(cache) is not None
        packages(f"acme_{verdict['stage']}_library")
        assert (read(cache) is not None) is stays


def test_a_no_is_believed_for_a_day_and_a_yes_for_ever(tmp_path):
    begun = time.time()
    for verdict, after_a_day in ((NO, False), (YES, True)):
        verdicts.write(tmp_path, key(), verdict)

        assert read(tmp_path, now=lambda: begun + verdicts.LASTS - 60) is not None
        assert (read(tmp_path, now=lambda: time.time() + verdicts.LASTS + 60) is not None) is after_a_day


def test_a_no_from_the_future_is_not_believed(tmp_path):
    """The clock went backwards: its age cannot be told."""
    for verdict, believed in ((NO, False), (YES, True)):
        verdicts.write(tmp_path, key(), verdict)
        assert (read(tmp_path, now=lambda: time.time() - 3600) is not None) is believed


def test_a_time_limit_says_nothing_about_a_longer_one(tmp_path):
    verdicts.write(tmp_path, key(), SLOW)

    assert read(tmp_path, limit=300) is not None
    assert read(tmp_path, limit=20) is not None
    assert read(tmp_path, limit=301) is None
    verdicts.write(tmp_path, key(), NO)
    assert read(tmp_path, limit=301) is not None


# ---- damage


def test_a_file_cut_at_any_length_is_no_verdict(tmp_path):
    wanted = key()
    verdicts.write(tmp_path, wanted, YES)
    file = verdicts.path(tmp_path, wanted)
    whole = file.read_bytes()
    for length in range(len(whole.rstrip())):
        file.write_bytes(whole[:length])
        assert read(tmp_path, wanted) is None, length
    file.write_bytes(whole)
    assert read(tmp_path, wanted) is not None


def test_a_file_that_was_edited_is_no_verdict(tmp_path):
    verdicts.write(tmp_path, key(), NO)
    file = verdicts.path(tmp_path, key())
    text = file.read_text()
    for before, after in (('"ok": false', '"ok": true'), ("H200", "H100"), ("OSError", "OSErro"), ("1.5", "2.5")):
        assert before in text
        file.write_text(text.replace(before, after))
        assert read(tmp_path) is None, before


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b"3", b"\xff\xfe", b"[" * 100_000, b'{"check": 1}', b"1" * 10_000, b" " * (1 << 21)],
    ids=range(10),
)
def test_a_file_of_something_else_is_no_verdict(tmp_path, text):
    verdicts.path(tmp_path, key()).write_bytes(text)

    assert read(tmp_path) is None
    verdicts.write(tmp_path, key(), YES)
    assert read(tmp_path) is not None


def test_a_valid_file_of_another_key_or_layout_is_no_verdict(tmp_path):
    verdicts.write(tmp_path, key(), YES)
    other = key(torch="2.12.0")
    verdicts.path(tmp_path, key()).rename(verdicts.path(tmp_path, other))  # as if two keys had one hash
    assert read(tmp_path, other) is None
    for missing in ("requires", "ok"):
        verdicts.write(tmp_path, key(), {name: value for name, value in YES.items() if name != missing})
        assert read(tmp_path) is None


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "fuseboard"]


def test_a_folder_in_the_files_place_is_said_once_and_harms_nobody(tmp_path, caplog):
    (verdicts.path(tmp_path, key()) / "x").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "fuseboard"):
        for _ in range(3):
            verdicts.write(tmp_path, key(), YES)
            assert read(tmp_path) is None

    (line,) = logged(caplog)
    assert line.startswith(f"verdicts are not kept: {tmp_path} cannot be written (")
    assert line.endswith("). Set FUSEBOARD_CACHE to a folder that can be, or to off.")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no names there")
def test_a_pipe_in_the_files_place_does_not_hang(tmp_path):
    os.mkfifo(verdicts.path(tmp_path, key()))

    assert read(tmp_path) is None
    verdicts.write(tmp_path, key(), YES)
    assert read(tmp_path) is not None


def test_a_folder_that_cannot_be_made_is_said_once_and_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "fuseboard"):
        for _ in range(3):
            verdicts.write(tmp_path / "file" / "cache", key(), YES)
            assert read(tmp_path / "file" / "cache") is None

    assert len(logged(caplog)) == 1


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "geteuid"), reason="POSIX permissions")
@pytest.mark.parametrize("place", ["folder", "proc"])
def test_a_read_only_folder_serves_what_it_has(tmp_path, caplog, place):
    where = tmp_path / "cache"
    verdicts.write(where, key(), YES)
    if place == "proc":  # read-only also for root
        where = Path("/proc/self/fuseboard")
    elif os.geteuid() == 0:
        pytest.skip("root writes into read-only folders")
    else:
        where.chmod(0o500)
    with caplog.at_level(logging.WARNING, "fuseboard"):
        verdicts.write(where, key(), NO)
        verdicts.write(where, key(), NO)
    found = read(where)
    if place == "folder":
        where.chmod(0o700)

    assert (found is None) if place == "proc" else found["ok"]
    assert len(logged(caplog)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")
def test_a_full_disk_is_said_once_and_leaves_no_half_file(python, tmp_path):
    code = f"""
import logging, resource, sys, pathlib
sys.path.insert(0, {str(Path(__file__).parent)!r})
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import test_verdicts as t
from fuseboard import verdicts
where = pathlib.Path("cache")
verdicts.write(where, t.key(), t.YES)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
verdicts.write(where, t.key(), t.NO)
verdicts.write(where, t.key(), t.NO)
print(t.read(where)["ok"], len(list(where.iterdir())))
"""
    assert python(code).splitlines() == [
        "verdicts are not kept: cache cannot be written (File too large). "
        "Set FUSEBOARD_CACHE to a folder that can be, or to off.",
        "True 1",
    ]


def test_eight_processes_that_write_one_verdict_leave_a_whole_one_at_every_moment(tmp_path):
    wanted = key()
    code = f"""
import pathlib, sys
sys.path[:] = {sys.path!r}
from fuseboard import verdicts
number = sys.argv[1]
verdict = {YES!r} | {{"reason": number, "detail": [number * 500] * 20}}
sys.stdin.readline()
for _ in range(40):
    verdicts.write(pathlib.Path({str(tmp_path)!r}), {wanted!r}, verdict)
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], stdin=subprocess.PIPE, text=True)
        for number in range(8)
    ]
    verdicts.write(tmp_path, wanted, YES | {"reason": "first", "detail": []})
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        found = read(tmp_path, wanted)
        assert found is not None
        assert set(found["detail"]) <= {found["reason"] * 500}
        seen.add(found["reason"])
    for writer in writers:
        writer.communicate()

    assert [writer.returncode for writer in writers] == [0] * 8
    assert len(seen) > 1
    assert [each.name for each in tmp_path.iterdir()] == [verdicts.path(tmp_path, key()).name]


# ---- where


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's folders")
def test_the_folder_is_the_one_named_or_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert verdicts.folder("") == Path("/home/ada/.cache/fuseboard")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ada")
    assert verdicts.folder("") == Path("/var/cache/ada/fuseboard")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert verdicts.folder("") == Path("/home/ada/.cache/fuseboard")
    assert verdicts.folder("~/kept") == Path("/home/ada/kept")
    monkeypatch.chdir(tmp_path)
    assert verdicts.folder("kept") == tmp_path / "kept"
    assert verdicts.folder("off") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert verdicts.folder("") == Path("/home/ada/Library/Caches/fuseboard")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/c/ada")
    assert verdicts.folder("") == Path("/c/ada/fuseboard")


def test_without_a_home_nothing_is_kept(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    assert verdicts.folder("") is None
