"""What each process switch does to the bits of a GPU. Each set of switches is applied in a process of its own.

`COMPUTE` runs the same operations in every process, on the same numbers. A switch must change what its description
says it changes, and leave the other operations alone. Where cuBLAS's choice of kernels decides whether any bit changes,
that is compared only on the device and versions that the registry names (`Switch.seen`). The processes start together,
since loading torch takes longest, and come to the GPU a few at a time. Every failure shows the whole table of its
process: what changed, and the errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseboard.engine.features import SWITCHES

pytestmark = pytest.mark.gpu

TF32 = ("NVIDIA_TF32", "TORCH_ALLOW_TF32")  # variables of NVIDIA's containers, which decide it beforehand
AT_A_TIME = 3  # each holds some 500 MB of a GPU
PATIENCE = 60

COMPUTE = r"""
import ctypes, hashlib, json, sys, time
NAMES = json.loads(sys.argv[1])
if NAMES is not None:
    from fuseboard.engine import features
    answer = features.apply(NAMES)
import torch, torch.nn.functional as F
sys.stdin.readline()

began = time.monotonic()
device = torch.device("cuda")

def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)

def bits(value):
    host = value.contiguous().cpu()
    return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())).hexdigest()

found, errors = {}, {}
def keep(name, value, exact):
    found[name] = bits(value)
    errors[name] = ((value.double() - exact).abs().max() / exact.abs().max()).item()
    print(f"{time.monotonic() - began:6.2f} s  {name}", file=sys.stderr, flush=True)  # where it was, should it hang

def product(dtype, m, k, n):
    a, b = draw(m, k, dtype=dtype), draw(k, n, seed=1, dtype=dtype)
    keep(f"{str(dtype).removeprefix('torch.')} product {m}x{k}x{n}", a @ b, a.double() @ b.double())

# Products: a square one, and thin ones with a long inner dimension, which cuBLAS splits along it.
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    product(dtype, 512, 4096, 512)
    product(dtype, 64, 65536, 64)
for dtype in (torch.float16, torch.bfloat16):
    for shape in ((16, 32768, 128), (128, 16384, 128), (8, 131072, 8), (100, 10000, 100)):
        product(dtype, *shape)
# The sum is 0; its first 64 products are 2**18, which float32 has exactly and float16 not at all. So large that cuBLAS
# does not split it along the inner dimension, which it may add up in float16 by default; splits at 128 do no harm.
a = torch.full((4096, 2048), 64.0, dtype=torch.float16, device=device)
b = a.view(4096, 16, 2, 64) * torch.tensor([1, -1], dtype=torch.float16, device=device)[:, None]
summed = a @ b.reshape(4096, 2048).t()
counts = [int(each.sum()) for each in (summed == 0, summed.isinf(), summed.isnan())]

q, k, v = (draw(2, 4, 256, 64, seed=seed) for seed in range(3))
math = torch.ops.aten._scaled_dot_product_attention_math
for dtype in (torch.bfloat16, torch.float16):
    given = [each.to(dtype) for each in (q, k, v)]
    exact = math(*[each.double() for each in given])[0]
    keep(f"math attention {str(dtype).removeprefix('torch.')}", math(*given)[0], exact)
if torch.cuda.get_device_capability() >= (8, 0):
    given = [each.bfloat16() for each in (q, k, v)]
    exact = math(*[each.double() for each in given])[0]
    keep("flash attention bfloat16", torch.ops.aten._scaled_dot_product_flash_attention(*given)[0], exact)

x, w = draw(1, 64, 4000), draw(96, 64, 7, seed=1)
keep("float32 convolution", F.conv1d(x, w, padding=3), F.conv1d(x.double(), w.double(), padding=3))
x = draw(64, 4096)
keep("softmax", x.softmax(-1), x.double().softmax(-1))
x = x.bfloat16()
keep("layer norm", F.layer_norm(x, (4096,)), F.layer_norm(x.double(), (4096,)))

report = None
if NAMES is not None:
    report = {"answer": answer.as_json(), "fast": features.report()["params"]}
elif any(name.startswith("fuseboard") for name in sys.modules):
    raise SystemExit("fuseboard was loaded")
seconds = round(time.monotonic() - began, 1)
print(json.dumps({"found": found, "errors": errors, "sums": counts, "report": report, "seconds": seconds}))
"""

AUTO = """
import sys, torch, fuseboard as fb
from fuseboard.engine import features
import torch.nn.functional as F
sys.stdin.readline()
site = fb.Site("features.gpu")
same = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=dtype) for _ in "qkv")
    mask = torch.rand(2, 1, 300, 300, device="cuda") > 0.3
    same[dtype, "plain"] = torch.equal(fb.attention(q, k, v, site=site), F.scaled_dot_product_attention(q, k, v))
    same[dtype, "mask"] = torch.equal(
        fb.attention(q, k, v, site=site, mask=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
assert all(same.values()), same
assert features.report() == {"params": {"fast": []}}, features.report()
late = features.apply("tf32").late
assert late == ("CUDA was initialised before",), late
"""

PLAIN, NOTHING, PAIR = "no fuseboard", "nothing applied", "math_reduction and tf32"
ASKED: dict[str, list[str] | None] = {
    PLAIN: None, NOTHING: [], **{name: [name] for name in SWITCHES}, PAIR: ["math_reduction", "tf32"],
}  # fmt: skip
REFERENCE = "auto"


class Child:
    """A process that loads what it needs, and leaves the GPU alone until told to begin."""

    def __init__(self, folder: Path, name: str, code: str, *arguments: str) -> None:
        env = {name: text for name, text in os.environ.items() if not name.startswith(("FUSEBOARD_", *TF32))}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.name = name
        self.status: int | None = None
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env=env, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True,
            )  # fmt: skip

    def begin(self) -> None:
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has failed already: its status and what it said tell
            pass

    def wait(self) -> None:
        try:
            self.status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def answer(self) -> str:
        """What it printed, or a failed test with all that it said."""
        out, err = self.out.read_text(), self.err.read_text()
        ended = f"was killed after {PATIENCE} s" if self.status is None else f"ended with {self.status}"
        assert self.status == 0, f"the process {self.name!r} {ended}, having said:\n{out}{err}"
        return out


class Children:
    """All of them, and what they found."""

    def __init__(self, children: dict[str, Child]) -> None:
        self.children = children

    def __getitem__(self, name: str) -> dict[str, Any]:
        return json.loads(self.children[name].answer().splitlines()[-1])

    def changed(self, name: str, base: str = PLAIN) -> list[str]:
        """The operations whose bits are not those of `base`."""
        without, found = self[base]["found"], self[name]["found"]
        assert without.keys() == found.keys(), self.told(name)
        return [each for each in without if without[each] != found[each]]

    def told(self, name: str) -> str:
        """All that is known of a process, for messages."""
        plain, found = self[PLAIN], self[name]
        rows = [
            f"  {'changed' if found['found'].get(each) != bits else 'same':8}{found['errors'].get(each, -1):10.2e}"
            f"{plain['errors'][each]:10.2e}  {each}"
            for each, bits in plain["found"].items()
        ]
        return "\n".join(
            [
                f"{name}, on {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}:",
                f"  {'bits':8}{'error':>10}{'without':>10}",
                *rows,
                f"  zeros, infinities, NaN of the large partial sums: {found['sums']}, without {plain['sums']}",
                f"  {found['seconds']} s on the GPU; {found['report']}",
            ]
        )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Every process, at its end."""
    folder = tmp_path_factory.mktemp("switches")
    children = {name: Child(folder, name, COMPUTE, json.dumps(names)) for name, names in ASKED.items()}
    children[REFERENCE] = Child(folder, REFERENCE, AUTO)
    try:
        waiting = list(children.values())
        while waiting:
            group, waiting = waiting[:AT_A_TIME], waiting[AT_A_TIME:]
            for each in group:
                each.begin()
            for each in group:
                each.wait()
        yield Children(children)
    finally:
        for each in children.values():
            each.kill()


def needs(name: str) -> None:
    switch = SWITCHES[name]
    if switch.since and tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, switch.since.split("."))):
        pytest.skip(f"{name} needs torch {switch.since}")


def half_products(ran: Children) -> list[str]:
    return [each for each in ran[PLAIN]["found"] if each.startswith(("float16 product", "bfloat16 product"))]


def test_nothing_applied_changes_nothing(ran):
    """Neither does another process: else no difference would mean anything."""
    assert ran.changed(NOTHING) == [], ran.told(NOTHING)
    assert ran[NOTHING]["report"]["fast"] == {"fast": []}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_applied_at_the_start_is_in_force_and_in_time(name, ran):
    needs(name)
    found = ran[name]["report"]

    assert found["answer"] == {"asked": [name], "in_force": [name], "refused": {}, "late": [], "without_effect": {}}
    assert found["fast"] == {"fast": [name]}


def test_tf32_changes_float32_products_and_what_is_made_of_them_alone_and_makes_them_less_exact(ran):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 came with compute capability 8.0")
    found, name = ran.changed("tf32"), "float32 product 512x4096x512"

    assert name in found, ran.told("tf32")
    # The math kernel multiplies in float32 whatever it is given. Convolutions are TF32 by default.
    others = [each for each in found if not each.startswith(("float32 product", "math attention"))]
    assert others == [], ran.told("tf32")
    assert ran["tf32"]["errors"][name] > 10 * ran[PLAIN]["errors"][name], ran.told("tf32")


def test_fp16_accumulation_changes_float16_products_alone_and_makes_them_less_exact(ran):
    needs("fp16_accumulation")
    found, name = ran.changed("fp16_accumulation"), "float16 product 512x4096x512"

    assert name in found, ran.told("fp16_accumulation")
    # The math kernel multiplies in float32, unless math_reduction is on.
    others = [each for each in found if not each.startswith("float16 product")]
    assert others == [], ran.told("fp16_accumulation")
    assert ran["fp16_accumulation"]["errors"][name] > ran[PLAIN]["errors"][name], ran.told("fp16_accumulation")


def test_fp16_accumulation_overflows_in_a_partial_sum_that_is_finite_without_it(ran):
    needs("fp16_accumulation")
    without, found = ran[PLAIN]["sums"], ran["fp16_accumulation"]["sums"]

    assert without[1:] == [0, 0], ran.told("fp16_accumulation")
    assert found[1] + found[2] > 0, ran.told("fp16_accumulation")


def test_reductions_turned_off_change_half_precision_products_alone_and_round_them_once(ran):
    """Whether torch's default is any different is cuBLAS's business."""
    name = "no_reduced_precision"
    found, errors, without = ran.changed(name), ran[name]["errors"], ran[PLAIN]["errors"]
    products = half_products(ran)

    assert set(found) <= set(products), ran.told(name)
    for each in products:
        # Rounded once, each number is the nearest that the dtype has: within half a step, which relative to the largest
        # is eps / 2 at most, and no further off than any other kernel's. What is added covers the sum in fp32 itself.
        assert errors[each] <= 1.02 * torch.finfo(getattr(torch, each.split()[0])).eps / 2, ran.told(name)
        assert errors[each] <= 1.05 * without[each], ran.told(name)


# cudnn_benchmark is not asked: which algorithm wins is decided anew in every process.
@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "cudnn_benchmark"])
def test_on_the_device_and_versions_that_the_registry_names_a_switch_changes_what_it_says(name, ran):
    needs(name)
    seen = SWITCHES[name].seen
    here = (torch.cuda.get_device_name(), torch.__version__.partition("+")[0], torch.version.cuda)
    if here != (seen.device, seen.torch, seen.cuda):
        pytest.skip(f"seen on {seen.device}, torch {seen.torch}, CUDA {seen.cuda}; here is {', '.join(map(str, here))}")
    kinds = {" ".join(each.split()[:2]) for each in ran.changed(name)}

    assert {f"{kind}s" if kind.endswith("product") else kind for kind in kinds} == {*seen.changed}, ran.told(name)
    if "reduced" in name:
        assert f" {len(half_products(ran))} " in seen.tried


def test_reductions_turned_on_are_the_default(ran):
    assert ran.changed("reduced_precision") == [], ran.told("reduced_precision")


def test_math_reduction_changes_half_precision_in_the_math_kernel_alone(ran):
    found = ran.changed("math_reduction")

    assert found == ["math attention bfloat16", "math attention float16"], ran.told("math_reduction")


def test_cudnn_benchmark_changes_convolutions_alone_and_by_rounding_at_most(ran):
    # Which algorithm wins is the machine's business: that the bits differ cannot be promised, nor that they do not.
    assert set(ran.changed("cudnn_benchmark")) <= {"float32 convolution"}, ran.told("cudnn_benchmark")
    assert ran["cudnn_benchmark"]["errors"]["float32 convolution"] < 5e-3, ran.told("cudnn_benchmark")


def test_two_switches_change_what_each_changes(ran):
    each = set(ran.changed("math_reduction")) | set(ran.changed("tf32"))

    assert set(ran.changed(PAIR)) >= each, "\n".join(ran.told(name) for name in (PAIR, "math_reduction", "tf32"))


def test_auto_without_switches_is_torchs_own_attention_bit_for_bit(ran):
    ran.children[REFERENCE].answer()
