"""Packages for a GPU: made here, loaded by a fresh process, held to their contract; and those for another GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fuseboard as fb
from fuseboard.engine import aot
from fuseboard.engine.aot import archive

COMPILER = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
OLD = torch.__version__.startswith("2.6.")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler to build a package"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SITE = fb.Site("tests.aot.gpu")
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x, mask):
        q = self.project(x).unflatten(-1, (2, 32)).transpose(1, 2)
        out = fb.attention(q, q, q, site=SITE, mask=mask[:, None, None, :]).transpose(1, 2).flatten(2)
        return torch.nn.functional.gelu(out).unflatten(1, (-1, 16)).mean(2)


def inputs(rows=2, length=48):
    generator = torch.Generator().manual_seed(rows + length)
    x = torch.randn(rows, length, 64, generator=generator).to(**BF16)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    mask[:, :1] = True
    return x, mask.cuda()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Encoder().to(**BF16).eval()


@pytest.fixture(scope="module")
def package(model, tmp_path_factory):
    length = torch.export.Dim.AUTO if OLD else 16 * torch.export.Dim("sixteens", min=1, max=16)
    return aot.export(
        model, inputs(), tmp_path_factory.mktemp("gpu") / "encoder.pt2",
        dynamic_shapes={"x": {1: length}, "mask": {1: length}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(package):
    return aot.load(package)


def refused(run, *args) -> str:
    with pytest.raises(aot.ContractError) as error:
        run(*args)
    torch.cuda.synchronize()  # nothing was launched that fails later
    return str(error.value)


@pytest.mark.parametrize("length", [32, 48, 256])
def test_a_bf16_package_gives_what_eager_gives(run, model, length):
    with torch.no_grad():
        out, wanted = run(*inputs(length=length)), model(*inputs(length=length))

    assert out.dtype is torch.bfloat16
    assert out.device == torch.device("cuda", torch.cuda.current_device())
    assert torch.allclose(out.float(), wanted.float(), atol=3e-2)


def test_the_contract_names_the_gpu(package, run):
    target = package.contract.target

    assert (target.device, target.gpu) == ("cuda", torch.cuda.get_device_name())
    assert target.capability == torch.cuda.get_device_capability()
    assert target.cuda == torch.version.cuda
    assert [(each.device, each.index, each.alignment) for each in run.contract.tensors()] == [("cuda", 0, 16)] * 2
    assert str(run.device) == "cuda:0"


def test_calls_that_the_package_was_not_made_for_are_refused(run):
    x, mask = inputs()

    assert "x: is on cpu; the package takes cuda:0" in refused(run, x.cpu(), mask)
    assert "x: is float16; the package takes bfloat16" in refused(run, x.half(), mask)
    assert "x: size 0 is 1; the package takes 2 there" in refused(run, *inputs(rows=1))
    assert "nearest: 96 and 112" in refused(run, *inputs(length=100))
    assert "nearest: 32; pad to 32" in refused(run, *inputs(length=16))
    assert "x: has strides" in refused(run, x.transpose(1, 2).contiguous().transpose(1, 2), mask)
    assert "x: requires a gradient" in refused(run, x.requires_grad_(), mask)


def test_a_view_in_another_layout_or_unaligned_is_copied_when_asked_to(package, run, model):
    x, mask = inputs()
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    flat = torch.empty(x.numel() + 1, **BF16)
    unaligned = flat[1:].view_as(x).copy_(x)

    assert "x: starts at an address that is no multiple of 16" in refused(run, unaligned, mask)
    copying = aot.load(package, contiguous=True)
    with torch.no_grad():
        for each in (transposed, unaligned):
            assert torch.allclose(copying(each, mask).float(), model(x, mask).float(), atol=3e-2)


def test_a_package_runs_on_the_callers_stream(run):
    x, mask = inputs()
    wanted = run(x, mask)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        later = run(x.clone(), mask.clone())
        assert not stream.query()  # it waits behind the sleep, on this stream
    stream.synchronize()

    assert torch.equal(later, wanted)


CHILD = """
import os, sys
sys.path.insert(0, os.environ["HERE"])
import torch
from fuseboard.engine import aot

x, mask, wanted = (each.cuda() for each in torch.load("given.pt"))
run = aot.load("encoder.pt2")
out = run(x, mask)
assert torch.allclose(out.float(), wanted.float(), atol=1e-6), (out.float() - wanted.float()).abs().max()
try:
    run(x[:1], mask[:1])
except aot.ContractError:
    torch.cuda.synchronize()
    print("refused", "torch._inductor.codecache" in sys.modules)
"""


def test_a_fresh_process_without_a_compiler_loads_it_and_gives_the_same(package, run, tmp_path):
    shutil.copy(package.path, tmp_path)
    torch.save([each.cpu() for each in (*inputs(), run(*inputs()))], tmp_path / "given.pt")
    cache = tmp_path / "cache"
    cache.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "CUDA_HOME")}

    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180,
        env=kept | {"PATH": "", "HERE": str(Path(fb.__file__).parents[1]), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused False\n"
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": [7, 5], "gpu": "Tesla T4"}, r"made for Tesla T4, compute capability 7\.5, CUDA .*; cuda:0 is "),
        ({"cuda": "10.2"}, r"CUDA 10\.2; cuda:0 is .*: export it there"),
    ],
)
def test_a_package_for_another_gpu_or_cuda_is_refused_by_name(package, tmp_path, change, words):
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(package.path) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for each in old.infolist():
            if each.filename.endswith(archive.MEMBER):
                data = json.loads(old.read(each))
            else:
                new.writestr(each, old.read(each))
    data["contract"]["target"].update(change)
    archive.seal(path, data)

    with pytest.raises(aot.PackageError, match=words) as error:
        aot.load(path)
    assert error.value.reason == "gpu"


def test_devices_that_are_not_there_or_of_another_kind_are_refused(package):
    count = torch.cuda.device_count()
    with pytest.raises(aot.PackageError, match=f"there is no cuda:{count} here: torch sees {count}"):
        aot.load(package, device=f"cuda:{count}")
    with pytest.raises(aot.PackageError, match="was made for cuda, and cannot run on cpu"):
        aot.load(package, device="cpu")


def test_a_package_moves_to_another_gpu(package, run):
    if torch.cuda.device_count() < 2 or OLD:
        pytest.skip("needs two GPUs, and torch 2.7")
    moved = aot.load(package, device="cuda:1")
    assert torch.cuda.current_device() == 0
    x, mask = inputs()

    assert "x: is on cuda:0; the package takes cuda:1" in refused(moved, x, mask)
    out = moved(x.to("cuda:1"), mask.to("cuda:1"))
    assert str(out.device) == "cuda:1"
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), run(x, mask).cpu())
