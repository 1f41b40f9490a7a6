"""The process switches. Each case is a process of its own, for what is tested stays on; none needs a GPU."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseboard.engine import features
from fuseboard.engine.features import SWITCHES, FeatureError
from fuseboard.ops.lint import lint_source

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "core" / "src" / "fuseboard" / "engine" / "features.py"
HAS_FP16_ACCUMULATION = hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation")
NEW_TF32 = hasattr(torch.backends.cuda.matmul, "fp32_precision")
ALL = ["fp16_accumulation", "tf32", "cudnn_benchmark", "reduced_precision", "math_reduction"]
HERE = [name for name in ALL if name != "fp16_accumulation" or HAS_FP16_ACCUMULATION]
CUDA = torch.version.cuda is not None or torch.version.hip is not None
NO_CUDA = f"torch {torch.__version__} is built without CUDA"


def effective(names: list[str]) -> list[str]:
    """Those of these switches that have an effect with the installed torch."""
    return [name for name in names if CUDA or name == "math_reduction"]


def reported(*names: str, **warnings: str) -> dict[str, list[str]]:
    """The `params` of a report with these switches on; warnings by the switch that they are about."""
    idle = {*names} - {*effective([*names])}
    said = {name: f"{name} is on, and without effect: {NO_CUDA}" for name in idle} | warnings
    found = {"fast": effective([name for name in SWITCHES if name in names])}
    return found | ({"warnings": [said[name] for name in SWITCHES if name in said]} if said else {})


START = """
import json, logging, sys
from fuseboard.engine import features
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
def show(found):
    print(json.dumps(found))
def fast():
    return features.report()["params"]
def refused(*arguments, **options):
    try:
        features.apply(*arguments, **options)
    except features.FeatureError as error:
        return [str(error), list(error.names), list(error.nearest)]
"""
# Every flag that a switch may touch, by every getter that torch has for it.
STATE = """
import torch
def state():
    matmul, found = torch.backends.cuda.matmul, {}
    for name in ("allow_fp16_accumulation", "allow_tf32", "fp32_precision", "allow_fp16_reduced_precision_reduction",
                 "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k",
                 "allow_bf16_reduced_precision_reduction_split_k"):
        found[name] = getattr(matmul, name, "absent")
    found["precision"] = torch.get_float32_matmul_precision()
    found["benchmark"] = torch.backends.cudnn.benchmark
    found["cudnn"] = [torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic]
    found["math"] = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if hasattr(torch.backends, "fp32_precision"):
        found["others"] = [torch.backends.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision,
                           torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision]
    return found
"""


def run(code: str, **environ: str) -> tuple[Any, str]:
    """What a program shows last, as data, and what it logs; a warning of torch is an error in it."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("FUSEBOARD_", "NVIDIA_TF32"))}
    env = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environ
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + code],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


# ---- what importing does


def test_importing_describing_and_reporting_load_no_torch_and_change_nothing():
    code = f"""
text, before, loaded = features.describe(), features.report(), "torch" in sys.modules
{STATE}
clean = state()
import importlib
importlib.reload(features)
show([all(name in text for name in features.SWITCHES), before, loaded, clean == state(), features.report()])
"""
    nothing = {"params": {"fast": []}}

    assert run(code) == ([True, nothing, False, True, nothing], "")


def test_every_switch_says_what_it_sets_where_and_with_what_effect():
    assert list(SWITCHES) == [*ALL[:4], "no_reduced_precision", ALL[4]]
    for name, switch in SWITCHES.items():
        assert switch.name == name
        assert all(what.startswith("torch.backends.") for what in switch.sets)
        assert switch.effect.endswith(".")
        assert "CUDA" in switch.devices
        assert switch.link.startswith("https://docs.pytorch.org/docs/stable/")
        assert switch.without == "" or SWITCHES[switch.without].without == name
        assert switch.assignment in features.describe()


# ---- applying


@pytest.mark.parametrize("name", HERE)
def test_a_switch_is_set_and_read_back_and_nothing_else_moves(name):
    changed = {
        "fp16_accumulation": {"allow_fp16_accumulation": True},
        "tf32": {"allow_tf32": True, "precision": "high"} | ({"fp32_precision": "tf32"} if NEW_TF32 else {}),
        "cudnn_benchmark": {"benchmark": True},
        "reduced_precision": {},
        "math_reduction": {"math": True},
    }[name]
    code = f"""{STATE}
before = state()
answer = features.apply([{name!r}])
after = state()
show([answer.as_json(), {{k: v for k, v in after.items() if before[k] != v}}, fast()])
"""
    (answer, found, fast), log = run(code)

    assert (answer["asked"], answer["refused"], answer["late"]) == ([name], {}, [])
    assert answer["in_force"] == effective([name])
    assert answer["without_effect"] == ({} if effective([name]) else {name: NO_CUDA})
    assert found == changed
    assert fast == reported(name)
    assert log == ""


def test_reductions_are_turned_off_by_a_name_of_their_own():
    code = f"""{STATE}
answer = features.apply("no_reduced_precision")
found = state()
show([found["allow_fp16_reduced_precision_reduction"], found["allow_bf16_reduced_precision_reduction"], fast()])
"""
    assert run(code)[0] == [False, False, reported("no_reduced_precision")]


def test_reductions_asked_for_are_turned_on_again_with_both_halves_of_torchs_pair():
    code = f"""{STATE}
clean = state()
matmul = torch.backends.cuda.matmul
off = (False, False) if hasattr(matmul, "allow_fp16_reduced_precision_reduction_split_k") else False
matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = off
mixed = state()
with features.restored():
    features.apply("reduced_precision")
    on = state()
show([on == clean, mixed != clean, state() == mixed])
"""
    assert run(code)[0] == [True, True, True]


def test_all_is_every_switch_that_speeds_up_and_lists_what_this_torch_lacks():
    (answer, fast), log = run('show([features.apply("all").as_json(), fast()])')

    assert answer["asked"] == ALL
    assert answer["in_force"] == fast["fast"] == effective(HERE)
    assert list(answer["without_effect"]) == [name for name in HERE if name not in effective(HERE)]
    assert list(answer["refused"]) == [name for name in ALL if name not in HERE]
    assert bool(log) == (not HAS_FP16_ACCUMULATION)


def test_names_come_as_a_list_or_as_the_text_of_a_setting():
    code = """
found = []
for names in ("tf32,cudnn_benchmark", " cudnn_benchmark , tf32,", {"cudnn_benchmark": 1, "tf32": 2}, ["tf32"] * 2):
    with features.restored():
        answer = features.apply(names)
        found.append([list(answer.asked), answer is features.apply(list(answer.asked))])
show(found)
"""
    assert run(code)[0] == [[["tf32", "cudnn_benchmark"], True]] * 3 + [[["tf32"], True]]


def test_the_same_again_is_the_same_answer_and_another_set_is_an_error_that_changes_nothing():
    code = f"""{STATE}
first, after = features.apply(["tf32"]), state()
same = features.apply(["tf32"]) is first
others = [refused(["tf32", "math_reduction"]), refused([]), refused("all")]
show([same, others, state() == after])
"""
    (same, others, unchanged), _ = run(code)

    assert same
    assert unchanged
    assert [each[1] for each in others] == [
        ["math_reduction"],
        ["tf32"],
        [name for name in sorted(ALL) if name != "tf32"],
    ]
    assert "applied already in this process: tf32; now asked: tf32, math_reduction." in others[0][0]
    assert "now asked: nothing." in others[1][0]


def test_nothing_is_a_choice_too():
    (answer, found, fast), _ = run('show([features.apply([]).as_json(), refused("tf32"), fast()])')

    assert answer == {"asked": [], "in_force": [], "refused": {}, "late": [], "without_effect": {}}
    assert "applied already in this process: nothing; now asked: tf32." in found[0]
    assert fast == {"fast": []}


WRONG = [
    (["tf23"], "no switch is called 'tf23'. Did you mean 'tf32'?", "tf32"),
    ("cudnn-benchmark", "Did you mean 'cudnn_benchmark'?", "cudnn_benchmark"),
    ("al", "Did you mean 'all'?", "all"),
    (["tf32", "zzz"], "no switch is called 'zzz'. Known: fp16_accumulation, tf32, ", None),
    ([""], "no switch is called ''", None),
    ([32], "named by a string; got 32", None),
    ("all,no_reduced_precision", "reduced_precision and no_reduced_precision contradict each other", None),
]


def test_a_wrong_name_is_an_error_with_the_nearest_and_leaves_everything_to_a_later_call():
    code = f"""{STATE}
before = state()
found = [[refused(names), state() == before] for names in {[names for names, _, _ in WRONG]!r}]
show([found, features.apply("tf32").asked])
"""
    (found, asked), _ = run(code)

    for ((message, _, near), clean), (_, words, nearest) in zip(found, WRONG, strict=True):
        assert words in message
        assert (near or [None])[0] == nearest
        assert clean
    assert asked == ["tf32"]


def test_the_error_travels_between_processes_with_its_fields():
    error = pickle.loads(pickle.dumps(FeatureError(["tf23"], "no", nearest=["tf32"])))

    assert (str(error), error.names, error.nearest) == ("no", ("tf23",), ("tf32",))


# ---- an older torch


OLD = """
import torch
torch.__version__ = "2.6.0"
for name in ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"):
    if hasattr(torch._C, name):
        delattr(torch._C, name)
"""


def test_what_the_installed_torch_lacks_is_refused_with_the_version_and_the_rest_is_applied():
    (answer, fast), log = run(OLD + 'show([features.apply(["fp16_accumulation", "tf32"]).as_json(), fast()])')
    reason = (
        "needs torch 2.7 or newer; this is torch 2.6.0, which has no torch.backends.cuda.matmul.allow_fp16_accumulation"
    )

    assert answer["refused"] == {"fp16_accumulation": reason}
    assert answer["in_force"] == fast["fast"] == effective(["tf32"])
    assert log == f"WARNING switch fp16_accumulation is not applied: {reason}\n"


def test_strictly_it_is_an_error_and_nothing_is_applied():
    (found, fast), _ = run(OLD + 'show([refused(["fp16_accumulation", "tf32"], strict=True), fast()])')

    assert found[1] == ["fp16_accumulation"]
    assert "this torch lacks fp16_accumulation: needs torch 2.7 or newer" in found[0]
    assert fast == {"fast": []}


def test_flags_that_torch_has_frozen_are_an_error_and_what_was_written_before_is_put_back():
    code = f"""{STATE}
torch.backends.disable_global_flags()
before = state()
found = refused(["tf32", "cudnn_benchmark"])
show([found, state() == before, fast()])
"""
    (found, unchanged, fast), _ = run(code)

    assert found[1] == ["cudnn_benchmark"]
    assert "torch did not take torch.backends.cudnn.benchmark = True: not allowed to set" in found[0]
    assert "Every switch is as it was." in found[0]
    assert unchanged
    assert fast == {"fast": []}


# ---- too late


def test_models_loaded_before_are_named():
    code = """
import torch
lazily = torch.nn.Module.__new__(torch.nn.Linear)       # one whose constructor has not run
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.GELU(), torch.nn.LayerNorm(2))
show(features.apply("tf32").late)
"""
    late, log = run(code)

    assert late == ["3 modules with weights loaded before, such as Linear"]
    assert log.startswith("WARNING switches applied late: 3 modules with weights loaded before, such as Linear.")


def test_backends_probed_before_are_named():
    code = """
import torch, fuseboard as fb
q = torch.randn(1, 1, 4, 8)
site = fb.Site("late")
with fb.bind("sdpa-math"):
    fb.attention(q, q, q, site=site)
show(features.apply("tf32").late)
"""
    (late,), _ = run(code)

    assert late.startswith("backends probed before: ")
    assert "sdpa-math on cpu" in late


def test_cuda_initialised_before_is_said():
    # What is_initialized reads; a machine without a GPU cannot get there by itself.
    late, _ = run("import torch.cuda\ntorch.cuda._initialized = True\nshow(features.apply('tf32').late)")

    assert late == ["CUDA was initialised before"]


def test_importing_torch_and_fuseboard_alone_is_not_late():
    code = "import torch, fuseboard as fb, fuseboard.engine.decoder\nfb.policy_for('fast'); fb.Site('s')\n"

    assert run(code + "show(features.apply('all').late)")[0] == []


# ---- TF32 has two interfaces


MATMUL = "import torch\nmatmul = torch.backends.cuda.matmul\n"
GETTERS = "[matmul.allow_tf32, torch.get_float32_matmul_precision(), getattr(matmul, 'fp32_precision', 'tf32')]"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "torch.set_float32_matmul_precision('highest')",
        "torch.set_float32_matmul_precision('medium')",
        "matmul.allow_tf32 = False",
        *(
            (
                "matmul.fp32_precision = 'ieee'",
                "matmul.fp32_precision = 'tf32'",  # the old getters raise from here on
                "torch.backends.fp32_precision = 'tf32'",  # here too
                "torch.backends.fp32_precision = 'ieee'",
                "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
            )
            if NEW_TF32
            else ()
        ),
    ],
)
def test_whatever_was_written_before_every_getter_agrees_afterwards(before):
    code = f"{MATMUL}{before}\nfeatures.apply('tf32')\nshow([{GETTERS}, fast()])"

    precision = "medium" if "medium" in before else "high"

    (getters, fast), _ = run(code)

    assert getters == [True, precision, "tf32"]
    assert fast == ({"fast": ["tf32"]} if "torch.backends.fp32_precision = 'tf32'" in before else reported("tf32"))


@pytest.mark.skipif(not NEW_TF32, reason="this torch has one interface (the newer came with 2.9)")
def test_a_report_reads_what_was_written_by_the_newer_interface_which_the_older_refuses_to_say():
    code = f"""{MATMUL}
matmul.fp32_precision = "tf32"
try:
    matmul.allow_tf32
    readable = True
except RuntimeError:
    readable = False
show([readable, fast()])
"""
    (readable, found), _ = run(code)
    somebody = {"tf32": "tf32 is on and was not applied by fuseboard: somebody else set it"} if CUDA else {}

    assert not readable
    assert found == reported("tf32", **somebody)


@pytest.mark.skipif(not NEW_TF32, reason="this torch has one interface (the newer came with 2.9)")
def test_a_mixed_state_is_left_readable():
    code = f"""{MATMUL}
matmul.fp32_precision = "tf32"
with features.restored():
    features.apply("tf32")
show({GETTERS})
"""
    assert run(code)[0] == [True, "high", "tf32"]


def test_convolutions_keep_their_own_switch():
    code = f"""{MATMUL}
before = torch.backends.cudnn.allow_tf32
features.apply("tf32")
show([before, torch.backends.cudnn.allow_tf32])
"""
    assert run(code)[0] == [True, True]


def test_nvidias_own_override_is_said_and_the_switch_is_not_in_force():
    reason = "NVIDIA_TF32_OVERRIDE=0 turns it off inside NVIDIA's libraries" if CUDA else NO_CUDA
    code = "show([features.apply('tf32').as_json(), fast()])"
    (answer, fast), _ = run(code, NVIDIA_TF32_OVERRIDE="0")

    assert (answer["in_force"], answer["without_effect"]) == ([], {"tf32": reason})
    assert fast == {"fast": [], "warnings": [f"tf32 is on, and without effect: {reason}"]}


@pytest.mark.skipif(CUDA, reason="this torch is built with CUDA")
def test_on_a_build_without_cuda_only_what_reaches_the_cpu_is_in_force():
    code = "show([str(features.apply(['tf32', 'cudnn_benchmark', 'math_reduction'])), fast()])"
    (shown, fast), _ = run(code)

    assert shown.splitlines() == [
        "in force: math_reduction",
        f"without effect: tf32, {NO_CUDA}",
        f"without effect: cudnn_benchmark, {NO_CUDA}",
    ]
    assert fast["fast"] == ["math_reduction"]
    assert fast["warnings"] == [
        f"tf32 is on, and without effect: {NO_CUDA}",
        f"cudnn_benchmark is on, and without effect: {NO_CUDA}",
    ]


@pytest.mark.skipif(CUDA or not NEW_TF32, reason="this torch is built with CUDA, or cannot say what its CPU does")
def test_tf32_is_in_force_without_cuda_once_it_reaches_the_products_of_the_cpu():
    code = """
import torch
torch.set_float32_matmul_precision("high")
show([features.apply("tf32").in_force, fast()])
"""
    assert run(code)[0] == [["tf32"], {"fast": ["tf32"]}]


# ---- reports


def test_a_report_says_what_is_in_force_and_not_what_was_asked():
    code = f"""{MATMUL}
features.apply(["tf32", "reduced_precision"])
matmul.allow_tf32 = False
torch.backends.cudnn.benchmark = True
show(fast())
"""
    somebody = {"cudnn_benchmark": "cudnn_benchmark is on and was not applied by fuseboard: somebody else set it"}
    off = {"tf32": "tf32 was applied and is off: somebody changed it since"}

    assert run(code)[0] == reported("cudnn_benchmark", "reduced_precision", **off, **(somebody if CUDA else {}))


def test_a_report_joins_that_of_a_run():
    code = """
import fuseboard as fb
features.apply(["tf32"])
show({**fb.Run().report(), **features.report()})
"""
    assert run(code)[0] == {
        "attention": {"policy": [], "used": {}, "fallbacks": {}},
        "params": reported("tf32"),
    }


# ---- putting back


@pytest.mark.parametrize(
    "before", ["", "torch.set_float32_matmul_precision('medium')", "torch.backends.cudnn.benchmark = True"]
)
def test_what_was_there_is_put_back_whatever_it_was(before):
    code = f"""{STATE}
{before}
start = state()
for names in ("all", "no_reduced_precision", ["tf32"]):
    with features.restored():
        features.apply(names)
        assert state() != start or names == ["tf32"]  # which "medium" has already
    assert state() == start, names
show(features.apply("math_reduction").in_force)
"""
    assert run(code)[0] == ["math_reduction"]


def test_it_is_put_back_when_the_block_raises_and_the_choice_before_it_holds_again():
    code = f"""{STATE}
features.apply(["tf32"])
start = state()
try:
    with features.restored():
        features.apply("cudnn_benchmark")
        raise KeyError
except KeyError:
    pass
show([state() == start, features.apply(["tf32"]).asked, fast()])
"""
    assert run(code)[0] == [True, ["tf32"], reported("tf32")]


# ---- results


def test_the_math_kernel_changes_its_bits_on_the_cpu_and_nothing_else_does():
    code = """
import torch
draw = torch.Generator().manual_seed(0)
q, w = torch.randn(1, 4, 128, 64, generator=draw), torch.randn(256, 256, generator=draw)
def compute():
    half = q.bfloat16()
    return {
        "math bf16": torch.ops.aten._scaled_dot_product_attention_math(half, half, half)[0],
        "math fp32": torch.ops.aten._scaled_dot_product_attention_math(q, q, q)[0],
        "fused bf16": torch.nn.functional.scaled_dot_product_attention(half, half, half),
        "matmul fp32": w @ w,
        "matmul bf16": w.bfloat16() @ w.bfloat16(),
        "matmul fp16": w.half() @ w.half(),
        "conv fp32": torch.nn.functional.conv1d(w[None], w[:, :, None]),
    }
base, changed = compute(), {}
for name in features.SWITCHES:
    with features.restored():
        features.apply(name)
        changed[name] = [key for key, value in compute().items() if not torch.equal(value, base[key])]
show(changed)
"""
    found, _ = run(code)

    assert found == {name: (["math bf16"] if name == "math_reduction" else []) for name in SWITCHES}


# ---- the tripwire and the lint


def test_the_tripwire_names_this_module_for_every_change():
    code = f"""
from fuseboard.ops import tripwire
with tripwire.watch(trace=True) as wire:
    features.apply({[*(name for name in HERE if name != "reduced_precision"), "no_reduced_precision"]!r})
    show([[each.what, each.after, each.who] for each in wire.changes()])
"""
    found, _ = run(code)
    seen = {what: after for what, after, _ in found}

    assert {name for name in HERE if name != "reduced_precision"} <= {
        name for name, switch in SWITCHES.items() if all(seen.get(what) is value for what, value in switch.sets.items())
    }
    assert seen["torch.get_float32_matmul_precision"] == "high"
    assert all(re.search(r"features\.py:\d+ in _set\(\)$", who) for _, _, who in found)


def test_the_lint_finds_each_of_its_writes_and_allows_them_by_their_comments_alone():
    source = SOURCE.read_text()
    bare = source.replace("fuseboard: allow", "")
    found = [each.line for each in lint_source(bare.encode()) if each.rule.startswith("FB2")]
    place = bare[: bare.index("def _set(")].count("\n"), bare[: bare.index("def _set(")].count("\n") + 40

    assert lint_source(source.encode()) == []
    assert len(found) == len(re.findall(r"# fuseboard: allow\(", source)) == 9
    assert all(place[0] < line < place[1] for line in found)


# ---- the page


def test_what_the_page_has_a_host_do_runs():
    page = (ROOT / "docs" / "features.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    assert blocks
    for block in blocks:
        run(f"{block}\nshow(0)")


def test_the_page_names_every_switch_with_its_effect_of_one_line():
    page = (ROOT / "docs" / "features.md").read_text().partition("## What each is worth")[0]

    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(SWITCHES)


def test_the_benchmark_has_operations_for_every_switch(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    concerns = runpy.run_path(str(ROOT / "benchmarks" / "features.py"))["CONCERNS"]

    assert list(concerns) == list(SWITCHES)
