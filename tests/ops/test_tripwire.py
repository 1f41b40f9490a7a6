"""The tripwire: who changed the state of the process. Each case changes it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuseboard.ops import tripwire

START = """
import json, logging, sys, threading
import torch, torch.nn.attention
import torch.nn.functional as F
from fuseboard.ops import tripwire
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
def show(changes):
    print(json.dumps([[c.what, c.before, c.after, c.who] for c in changes]))
"""
FLASH = "torch.backends.cuda.flash_sdp_enabled"
SDPA = "torch.nn.functional.scaled_dot_product_attention"
OWN = "torch's own"
VENDOR = """import torch
import torch.nn.functional as F


def fast(*args, **kwargs):
    return None


def load():
    torch.backends.cuda.enable_flash_sdp(False)


def patch():
    F.scaled_dot_product_attention = fast
"""


def run(folder: Path, code: str) -> tuple[Any, str]:
    """The last line that a program prints, as data, and what it logs; `engine/vendor.py` lies beside it."""
    (folder / "engine").mkdir(exist_ok=True)
    (folder / "engine/__init__.py").touch()
    (folder / "engine/vendor.py").write_text(VENDOR)
    (folder / "main.py").write_text(START + code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "main.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_nothing_changed_is_nothing_said(tmp_path):
    for trace in (False, True):
        code = f"""
with tripwire.watch(trace={trace}) as wire:
    torch.backends.cuda.enable_flash_sdp(torch.backends.cuda.flash_sdp_enabled())
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    torch.set_default_dtype(torch.float32)
    F.scaled_dot_product_attention = F.scaled_dot_product_attention
    q = torch.randn(1, 2, 4, 8)
    F.scaled_dot_product_attention(q, q, q)
    show(wire.changes())
"""
        assert run(tmp_path, code) == ([], "")


def test_a_comparison_finds_what_changed_and_says_that_it_did_not_see_who(tmp_path):
    found, log = run(
        tmp_path, "wire = tripwire.watch()\nfrom engine import vendor; vendor.load()\nshow(wire.changes())"
    )

    assert found == [[FLASH, True, False, None]]
    assert "by whom was not seen" in log


def test_tracing_names_the_line(tmp_path):
    code = """
with tripwire.watch(trace=True) as wire:
    from engine import vendor; vendor.load()
    wire.changes(), wire.changes()
show(wire.changes())
"""
    found, log = run(tmp_path, code)

    assert found == [[FLASH, True, False, "engine/vendor.py:10 in load()"]]
    assert log == (
        "WARNING torch.backends.cuda flash SDP was switched off (True -> False) by engine/vendor.py:10 in load(); "
        "every attention of this process is affected. Use fuseboard.bind(policy) instead.\n"
    )


def test_a_replaced_attention_has_the_place_of_its_code_and_tracing_that_of_its_assignment(tmp_path):
    for trace, who in ((False, "engine/vendor.py:5 in fast()"), (True, "engine/vendor.py:14 in patch()")):
        code = f"wire = tripwire.watch(trace={trace})\nfrom engine import vendor; vendor.patch()\nshow(wire.changes())"

        assert run(tmp_path, code)[0] == [[SDPA, OWN, "engine/vendor.py:5 in fast()", who]]


def test_what_is_put_back_between_two_looks_is_seen_by_tracing_alone(tmp_path):
    code = """
def other():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        pass
with tripwire.watch(trace={trace}) as wire:
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    show([c for c in wire.changes() if "flash" in c.what])
"""
    assert run(tmp_path, code.format(trace=False))[0] == []
    found, _ = run(tmp_path, code.format(trace=True))
    assert [each[:3] for each in found] == [[FLASH, True, False], [FLASH, False, True]]
    assert all(each[3].startswith("main.py:") and each[3].endswith(" in other()") for each in found)


@pytest.mark.parametrize(
    ("statement", "what", "after"),
    [
        ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark", True),
        ("held = torch.backends.cudnn.flags(benchmark=True); held.__enter__()", "torch.backends.cudnn.benchmark", True),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cuda.matmul.allow_tf32", True),
        ("torch.set_float32_matmul_precision('high')", "torch.get_float32_matmul_precision", "high"),
        ("torch.use_deterministic_algorithms(True)", "torch.are_deterministic_algorithms_enabled", True),
        ("torch.set_default_dtype(torch.float64)", "torch.get_default_dtype", "torch.float64"),
        (
            "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
            "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
            True,
        ),
    ],
)
def test_every_kind_of_switch_is_seen_by_both(tmp_path, statement, what, after):
    code = f"""
plain, traced = tripwire.watch(), tripwire.watch(trace=True)
{statement}
found = [c for c in plain.changes() if c.what == {what!r}] + [c for c in traced.changes() if c.what == {what!r}]
traced.close()
show(found)
"""
    found, _ = run(tmp_path, code)

    assert [each[2] for each in found] == [after, after]
    assert found[0][3] is None
    assert found[1][3].startswith("main.py:")


def test_a_kernel_of_aten_registered_from_python_has_the_place_of_its_registration(tmp_path):
    code = """
import warnings
warnings.simplefilter("ignore")  # torch 2.6 warns of an override
wire = tripwire.watch()
library = torch.library.Library("aten", "IMPL")
library.impl("_flash_attention_forward", lambda *a, **k: None, "CUDA")
show(wire.changes())
"""
    ((what, before, after, who),), _ = run(tmp_path, code)

    assert (what, before) == ("aten::_flash_attention_forward on CUDA", OWN)
    if after == tripwire.FROM_PYTHON:  # torch 2.6 does not say where
        assert who is None
        return
    line = (tmp_path / "main.py").read_text().splitlines().index('library = torch.library.Library("aten", "IMPL")') + 1
    assert who == f"main.py:{line}"
    assert after.endswith(who)


def test_an_activated_flash_implementation_is_seen_with_who_activated_it(tmp_path):
    code = """
attention = torch.nn.attention
if not hasattr(attention, "register_flash_attention_impl"):
    print(json.dumps(None)); sys.exit()
class Handle:
    def remove(self): pass
attention.register_flash_attention_impl("mine", register_fn=Handle)
with tripwire.watch(trace=True) as wire:
    attention.activate_flash_attention_impl("mine")
    show(wire.changes())
"""
    found, _ = run(tmp_path, code)
    if found is None:
        pytest.skip("this torch has no flash implementations to activate (2.10 and newer have)")

    ((what, before, after, who),) = found
    assert (what, before, after) == ("torch.nn.attention.current_flash_attention_impl", None, "mine")
    assert who.startswith("main.py:")


def test_closing_puts_everything_back(tmp_path):
    code = """
def all_of_torch():
    modules = torch._C, F, torch.backends.cudnn, torch.backends.cuda, torch.nn.attention
    modules += tuple(filter(None, [getattr(torch.nn.attention, "_registry", None)]))
    return [(type(m), dict(vars(m))) for m in modules] + [dict(vars(torch.library.Library)), tripwire.state()]
before = all_of_torch()
first, second = tripwire.watch(trace=True), tripwire.watch(trace=True)
assert all_of_torch() != before
first.close()
torch.backends.cuda.enable_flash_sdp(False); torch.backends.cuda.enable_flash_sdp(True)
assert [len(each.changes()) for each in (first, second)] == [0, 2]
second.close(); second.close()
print(json.dumps(all_of_torch() == before))
"""
    assert run(tmp_path, code)[0] is True


def test_what_somebody_else_put_over_a_traced_setter_stays(tmp_path):
    code = """
wire = tripwire.watch(trace=True)
ours = torch._C._set_sdp_use_flash
def theirs(on): ours(on)
torch._C._set_sdp_use_flash = theirs
wire.close()
torch.backends.cuda.enable_flash_sdp(False)
print(json.dumps([torch._C._set_sdp_use_flash is theirs, torch.backends.cuda.flash_sdp_enabled(), len(wire.changes())]))
"""
    assert run(tmp_path, code)[0] == [True, False, 0]


def test_many_threads_are_told_apart(tmp_path):
    code = """
start = threading.Barrier(4)
def switch(name):
    start.wait()
    for _ in range(20):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    seen[name] = len([c for c in wire.changes() if f"{name}_sdp" in c.what])
seen = {}
with tripwire.watch(trace=True) as wire:
    threads = [threading.Thread(target=switch, args=(n,)) for n in ("flash", "mem_efficient", "math", "cudnn")]
    [t.start() for t in threads]; [t.join() for t in threads]
print(json.dumps(seen))
"""
    assert run(tmp_path, code)[0] == dict.fromkeys(("flash", "mem_efficient", "math", "cudnn"), 40)


def test_the_state_is_data_and_asking_for_it_starts_no_cuda(tmp_path):
    code = """
state = tripwire.state()
assert not torch.cuda.is_initialized()
assert json.loads(json.dumps(state)).keys() == state.keys()
print(json.dumps(state))
"""
    found, log = run(tmp_path, code)

    assert log == ""
    assert found[FLASH] is True
    assert found[SDPA] == OWN
    assert not [name for name in found if name.startswith("aten::")]


def test_tf32_set_by_both_interfaces_is_said_and_no_error(tmp_path):
    code = """
if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    print(json.dumps(None)); sys.exit()
torch.backends.cuda.matmul.fp32_precision = "tf32"
print(json.dumps(tripwire.state()))
"""
    found, _ = run(tmp_path, code)
    if found is None:
        pytest.skip("this torch has one interface to TF32 (2.9 and newer have two)")

    assert found["torch.backends.cuda.matmul.fp32_precision"] == "tf32"
