"""fuseboard-tilelang where TileLang cannot work: what is imported, and what is said, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fuseboard as fb
from fuseboard.call import Sizes
from fuseboard.constraints import admit, guard
from fuseboard_tilelang import _package, attn, tilelang

SITE = fb.Site("tests.tilelang.claims")


def python(code: str, stand_in: Path | None = None, **environ: str) -> str:
    """What a fresh interpreter prints; `stand_in` is a folder to import from first."""
    env = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "TILELANG_CACHE_DIR")}
    paths = [*([str(stand_in)] if stand_in else []), *(path for path in sys.path if path)]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | environ
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a TileLang that has the name and nothing else: whoever imports it is caught."""
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("raise SystemExit('imported')")
    info = tmp_path / "tilelang-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.15\n")
    return tmp_path


@pytest.fixture
def absent() -> str:
    """Code that hides an installed TileLang, as if there were none."""
    return """
import importlib.metadata, importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "tilelang": raise ModuleNotFoundError(name)
found, version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name, *rest: None if name == "tilelang" else found(name, *rest)
def none(name):
    if name == "tilelang": raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = none
sys.meta_path.insert(0, Hidden())
"""


def test_importing_the_package_imports_neither_torch_nor_tilelang() -> None:
    code = "import sys, fuseboard_tilelang; print(sorted({'torch', 'tilelang', 'tvm'} & sys.modules.keys()))"

    assert python(code) == "[]"


def test_importing_every_module_of_it_imports_no_tilelang(installed: Path) -> None:
    code = """
import importlib, pkgutil, sys, fuseboard_tilelang
names = [each.name for each in pkgutil.iter_modules(fuseboard_tilelang.__path__)]
for name in names: importlib.import_module("fuseboard_tilelang." + name)
print(len(names) > 9, sorted({'tilelang', 'tvm'} & sys.modules.keys()))
"""

    assert python(code, installed) == "True []"


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    import fuseboard_tilelang

    with pytest.raises(AttributeError, match="has no attribute 'gem_kernel'; it has add_ln_kernel, attn_kernel"):
        _ = fuseboard_tilelang.gem_kernel


@pytest.mark.parametrize("call", ["compile_cpu(gemm_kernel, 4, 4)", "gemm_kernel(4, 4)"])
def test_without_tilelang_a_kernel_says_what_to_install(absent: str, call: str) -> None:
    code = f"""{absent}
from fuseboard_tilelang import compile_cpu, gemm_kernel
try: {call}
except ImportError as error: print(error)
"""

    assert python(code).startswith("TileLang is not installed: pip install --no-deps tilelang==0.1.15 apache-tvm-ffi==")


def test_without_tilelang_the_backend_says_what_to_install(absent: str) -> None:
    code = f"""{absent}
import torch, fuseboard as fb
q = torch.randn(1, 2, 4, 64)
try:
    with fb.bind(fb.policy_for("tilelang", True)): fb.attention(q, q, q, site=fb.Site("s"))
except fb.RefusedError as error: print(error)
"""
    said = python(code)

    assert "tilelang" in said
    assert "not installed" in said


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PATH": ""}, "no C++ compiler: none of g++, clang++, c++ is on PATH and $CXX is not set; install g++"),
        ({"CXX": "no-such-compiler"}, "$CXX is 'no-such-compiler', which is not found; name a C++ compiler there or"),
        (
            {"TILELANG_CACHE_DIR": os.devnull + "/cache"},
            "TileLang's cache folder /dev/null/cache cannot be made (Not a",
        ),
    ],
)
def test_without_a_compiler_or_a_cache_folder_the_cpu_form_says_so(
    installed: Path, environ: dict[str, str], said: str
) -> None:
    environ = {"TILELANG_CACHE_DIR": str(installed / "cache")} | environ
    code = """
import torch
from fuseboard_tilelang import compile_cpu, gemm_kernel, tilelang
print(tilelang.probe(torch.device("cpu")))
try: compile_cpu(gemm_kernel, 4, 4)
except ImportError as error: print(error)
"""
    probed, raised = python(code, installed, **environ).splitlines()

    assert probed.startswith(said)
    assert raised == probed


def test_without_nvcc_the_gpu_form_says_so(installed: Path) -> None:
    environ = {"TILELANG_CACHE_DIR": str(installed / "cache"), "CUDA_HOME": str(installed)}
    said = python("from fuseboard_tilelang import _package; print(_package.gpu_problem())", installed, **environ)

    assert said.startswith("TileLang compiles with nvcc, which is neither in $CUDA_HOME nor on PATH; install the CUDA")


def test_with_all_there_is_no_problem_and_nothing_is_imported(installed: Path) -> None:
    compiler = installed / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (compiler.parent / "nvcc").symlink_to(compiler)
    environ = {"TILELANG_CACHE_DIR": str(installed / "cache"), "PATH": str(compiler.parent)}
    code = """
import sys
from fuseboard_tilelang import _package
print(_package.cpu_problem(), _package.gpu_problem(), _package.nvcc(), _package.version(), "tilelang" in sys.modules)
"""

    assert python(code, installed, **environ) == f"None None {compiler.parent / 'nvcc'} 0.1.15 False"


def test_importing_tilelang_leaves_the_environment_and_the_search_path_as_they_were(tmp_path: Path) -> None:
    problem = _package.cpu_problem()
    if problem is not None:
        pytest.skip(problem)
    code = """
import json, os, sys
before, path = dict(os.environ), list(sys.path)
from fuseboard_tilelang import _package, compile_cpu, gemm_kernel
_package.load()
compile_cpu(gemm_kernel, 4, 4)
print(json.dumps([before == dict(os.environ), path == sys.path, "tilelang" in sys.modules]))
"""

    assert json.loads(python(code, TILELANG_CACHE_DIR=str(tmp_path))) == [True, True, True]
    assert any(tmp_path.iterdir())


def call(**changes: object) -> fb.Call:
    known: dict[str, object] = {
        "device_type": "cuda", "device_index": 0, "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64,
        "v_head_dim": 64, "gqa": False, "one_query": False, "long_queries": False, "lengths": "equal", "empty": False,
        "mask": "none", "mask_dtype": None, "mask_grad": False, "structure": None, "causal": False,
        "custom_scale": False, "negative_scale": False, "dropout": False, "grad": False, "packed_last": True,
        "wrapped": None,
    }  # fmt: skip
    return fb.Call(**{**known, **changes})


def sizes(**changes: object) -> Sizes:
    known: dict[str, object] = {
        "batch": 2, "heads": 4, "kv_heads": 4, "q_length": 128, "k_length": 128, "head_dim": 64, "v_head_dim": 64,
        "strides": ((1,) * 4,) * 3, "mask_shape": None, "dropout_p": 0.0,
    }  # fmt: skip
    return Sizes(**{**known, **changes})


def rules(one: fb.Call, exact: Sizes) -> set[str]:
    _, refusals = admit(tilelang.LIMITS, "tilelang", one)
    return {each.rule for each in (*refusals, *guard(tilelang.LIMITS, "tilelang", one, exact))}


@pytest.mark.parametrize(
    ("changes", "exact", "refused"),
    [
        ({}, {}, set()),
        ({"dtype": torch.float16, "gqa": True, "causal": True, "lengths": "more queries"}, {}, set()),
        ({"device_type": "cpu", "capability": None, "dtype": torch.float32}, {}, set()),
        ({"dtype": torch.float32}, {}, {"dtype"}),
        ({"device_type": "cpu", "capability": None}, {}, {"dtype"}),
        ({"capability": (8, 0)}, {}, {"capability"}),
        ({"head_dim": 80, "v_head_dim": 80}, {}, {"head_dim"}),
        ({"v_head_dim": 128}, {}, {"v_head_dim"}),
        ({"grad": True}, {}, {"gradient"}),
        ({"dropout": True}, {}, {"dropout"}),
        ({"mask": "bool"}, {}, {"mask"}),
        ({"mask": "additive", "mask_dtype": torch.bfloat16}, {}, {"mask"}),
        ({"negative_scale": True, "custom_scale": True}, {}, {"scale"}),
        ({"empty": True}, {}, {"empty"}),
        ({}, {"batch": 65536, "q_length": 1, "k_length": 2}, {"batch"}),
        ({}, {"heads": 65536, "q_length": 1, "k_length": 2}, {"heads"}),
        ({}, {"q_length": 2**25}, {"elements"}),
        ({}, {"k_length": 2**30, "batch": 1, "heads": 1, "kv_heads": 1}, {"elements", "lengths"}),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(
    changes: dict[str, object], exact: dict[str, object], refused: set[str]
) -> None:
    assert rules(call(**changes), sizes(**exact)) == refused


def test_on_the_cpu_it_ranks_after_everything() -> None:
    cpu = call(device_type="cpu", capability=None, dtype=torch.float32)

    assert tilelang.rank(cpu, sizes()) == float("inf")
    assert tilelang.rank(call(), sizes()) < float("inf")


def test_few_blocks_cost_the_way_of_one_along_the_keys() -> None:
    def cost(k_length: int, q_length: int = 1) -> float:
        exact = sizes(batch=1, heads=16, kv_heads=8, q_length=q_length, k_length=k_length, head_dim=128, v_head_dim=128)
        return tilelang.rank(call(head_dim=128, lengths="fewer queries"), exact)

    assert cost(256) == cost(1024) == 30.0
    assert cost(16384) == pytest.approx(295, rel=0.05)  # 279 µs a layer on an H200, where flash-attn takes 24
    assert cost(16384) == cost(16384, q_length=17) == cost(16384, q_length=128)


@pytest.mark.parametrize("offset", ["bottom right", "top left"])
@pytest.mark.parametrize("n_q", [1, 2, 5])
@pytest.mark.parametrize("n_k", [1, 2, 5, 9])
def test_bounds_hide_what_a_mask_of_them_hides(n_q: int, n_k: int, offset: str) -> None:
    shift = n_k - n_q if offset == "bottom right" else 0
    apart = torch.arange(n_k) - torch.arange(n_q)[:, None] - shift
    for left in (0, 1, 4, 8, attn.OPEN):
        for right in (0, 1, 4, 8, attn.OPEN):
            seen = (apart >= -left) & (apart <= right)
            assert attn.hides(n_q, n_k, shift, left, right) is not bool(seen.all()), (left, right)


def test_its_install_line_keeps_torch() -> None:
    assert tilelang.install_line().startswith("pip install --no-deps tilelang==")
    assert tilelang.info().requires == {"tilelang": ">=0.1.14,<0.2"}
