"""What each process switch does to the bits of a GPU. Each set of switches is applied in a process of its own.

`compute` runs the same operations in every process, on the same numbers. A switch must change what its description
says it changes, and leave the other operations alone.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fuseboard.engine.features import SWITCHES

pytestmark = pytest.mark.gpu

TF32 = ("NVIDIA_TF32", "TORCH_ALLOW_TF32")  # variables of NVIDIA's containers, which decide it beforehand

COMPUTE = r"""
import hashlib, json, sys
NAMES = json.loads(sys.argv[1])
if NAMES is not None:
    from fuseboard.engine import features
    answer = features.apply(NAMES)
import torch, torch.nn.functional as F

def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def bits(value):
    return hashlib.sha256(bytes(value.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()

def error(value, exact):
    return ((value.double().cpu() - exact).abs().max() / exact.abs().max()).item()

found, errors = {}, {}
def keep(name, value, exact=None):
    found[name] = bits(value)
    if exact is not None:
        errors[name] = error(value, exact)

# Products: square ones, and thin ones with a long inner dimension, which cuBLAS splits along it.
SHAPES = [(512, 4096, 512), (64, 65536, 64), (16, 32768, 128), (128, 16384, 128), (8, 131072, 8), (1, 16384, 4096),
          (100, 10000, 100)]
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for m, k, n in SHAPES:
        a, b = draw(m, k).to(dtype), draw(k, n, seed=1).to(dtype)
        name = f"{str(dtype).removeprefix('torch.')} product {m}x{k}x{n}"
        keep(name, a.cuda() @ b.cuda(), a.double() @ b.double() if m * n <= 512 * 512 else None)
# The sum is 0; its first 64 products are 2**18, which float32 has exactly and float16 not at all. So large that cuBLAS
# does not split it along the inner dimension, which it may add up in float16 by default; splits at 128 do no harm.
a = torch.full((4096, 2048), 64.0, dtype=torch.float16, device="cuda")
b = a.view(4096, 16, 2, 64) * torch.tensor([1, -1], dtype=torch.float16, device="cuda")[:, None]
summed = a @ b.reshape(4096, 2048).t()
found["float16 product with a large partial sum is finite"] = bool(torch.isfinite(summed).all())

q, k, v = (draw(2, 4, 256, 64, seed=seed) for seed in range(3))
math = torch.ops.aten._scaled_dot_product_attention_math
keep("math attention bfloat16", math(*(each.cuda().bfloat16() for each in (q, k, v)))[0])
keep("math attention float16", math(*(each.cuda().half() for each in (q, k, v)))[0])
keep("flash attention bfloat16", torch.ops.aten._scaled_dot_product_flash_attention(
    *(each.cuda().bfloat16() for each in (q, k, v)))[0])

x, w = draw(1, 64, 4000), draw(96, 64, 7, seed=1)
exact = F.conv1d(x.double(), w.double(), padding=3)
convolved = F.conv1d(x.cuda(), w.cuda(), padding=3)
errors["float32 convolution"] = error(convolved, exact)
keep("softmax", draw(64, 4096).cuda().softmax(-1))
keep("layer norm", F.layer_norm(draw(64, 4096).cuda().bfloat16(), (4096,)))

report = None
if NAMES is not None:
    report = {"answer": answer.as_json(), "fast": features.report()["params"]}
elif any(name.startswith("fuseboard") for name in sys.modules):
    raise SystemExit("fuseboard was loaded")
print(json.dumps({"found": found, "errors": errors, "report": report}))
"""


@functools.cache
def compute(*names: str | None) -> dict[str, Any]:
    """Bits by operation under these switches; None for a process that never loads fuseboard."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("FUSEBOARD_", *TF32))}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    asked = json.dumps(None if names == (None,) else list(names))
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE, asked], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def changed(*names: str) -> list[str]:
    """The operations that these switches change."""
    base, found = compute(None)["found"], compute(*names)["found"]
    assert base.keys() == found.keys()
    return [name for name in base if base[name] != found[name]]


@pytest.fixture(scope="module", autouse=True)
def repeatable() -> None:
    """Two processes without switches agree: else no difference would mean anything."""
    first = compute(None)["found"]
    compute.cache_clear()
    assert compute(None)["found"] == first


def needs(name: str) -> None:
    switch = SWITCHES[name]
    if switch.since and tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, switch.since.split("."))):
        pytest.skip(f"{name} needs torch {switch.since}")


def test_nothing_applied_changes_nothing():
    assert changed() == []
    assert compute()["report"]["fast"] == {"fast": []}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_applied_at_the_start_is_in_force_and_in_time(name):
    needs(name)
    found = compute(name)["report"]

    assert found["answer"]["in_force"] == [name]
    assert found["answer"]["late"] == []
    assert found["answer"]["notes"] == []
    assert found["fast"] == {"fast": [name]}


def test_tf32_changes_float32_products_and_what_is_made_of_them_alone_and_makes_them_less_exact():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 came with compute capability 8.0")
    found, name = changed("tf32"), "float32 product 512x4096x512"

    assert name in found
    # The math kernel multiplies in float32 whatever it is given.
    assert [each for each in found if not each.startswith(("float32 product", "math attention"))] == []
    assert compute("tf32")["errors"][name] > 10 * compute(None)["errors"][name]


def test_fp16_accumulation_changes_float16_products_alone_and_makes_them_less_exact():
    needs("fp16_accumulation")
    found, name = changed("fp16_accumulation"), "float16 product 512x4096x512"

    assert name in found
    # The math kernel multiplies in float32, unless math_reduction is on.
    assert [each for each in found if not each.startswith("float16 product")] == []
    assert compute(None)["found"]["float16 product with a large partial sum is finite"]
    assert not compute("fp16_accumulation")["found"]["float16 product with a large partial sum is finite"]
    assert compute("fp16_accumulation")["errors"][name] > compute(None)["errors"][name]


def test_reductions_turned_off_change_half_precision_products_alone_and_turned_on_are_the_default():
    found = changed("no_reduced_precision")

    assert found
    assert [each for each in found if not each.startswith(("float16 product", "bfloat16 product"))] == []
    assert changed("reduced_precision") == []


def test_math_reduction_changes_half_precision_in_the_math_kernel_alone():
    assert changed("math_reduction") == ["math attention bfloat16", "math attention float16"]


def test_cudnn_benchmark_changes_no_product_and_convolutions_by_rounding_at_most():
    # Which algorithm wins is the machine's business: that the bits differ cannot be promised, nor that they do not.
    assert changed("cudnn_benchmark") == []
    assert compute("cudnn_benchmark")["errors"]["float32 convolution"] < 5e-3


def test_two_switches_change_what_each_changes():
    assert set(changed("math_reduction", "tf32")) >= set(changed("math_reduction")) | set(changed("tf32"))


def test_auto_without_switches_is_torchs_own_attention_bit_for_bit():
    code = """
import torch, fuseboard as fb
from fuseboard.engine import features
import torch.nn.functional as F
site = fb.Site("features.gpu")
same = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=dtype) for _ in "qkv")
    mask = torch.rand(2, 1, 300, 300, device="cuda") > 0.3
    same.append(torch.equal(fb.attention(q, k, v, site=site), F.scaled_dot_product_attention(q, k, v)))
    same.append(torch.equal(
        fb.attention(q, k, v, site=site, mask=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
assert all(same), same
assert features.report() == {"params": {"fast": []}}
late = features.apply("tf32").late
assert late == ("CUDA was initialised before",), late
"""
    env = {name: text for name, text in os.environ.items() if not name.startswith(TF32)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
