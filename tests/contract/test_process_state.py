"""No module of ours touches state of the whole process, as `fuseboard lint` finds it; and the lint finds each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseboard.ops.lint import lint, lint_source, main

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
TREE = [str(ROOT / name) for name in ("core", "plugins", "examples", "benchmarks")]

# The modules that may, each for a reason that its lines give: `features`, called once by a host at its start; `cpu`,
# called there before torch is imported, when variables are the only way to reach it; the tripwire's tracing, which
# a host asks for by name and which undoes what it does; and the conformance kit, which puts back what a kernel changed.
ALLOWED = {
    ROOT / "core" / "src" / "fuseboard" / "engine" / "cpu.py",
    ROOT / "core" / "src" / "fuseboard" / "engine" / "features.py",
    ROOT / "core" / "src" / "fuseboard" / "ops" / "tripwire.py",
    ROOT / "core" / "src" / "fuseboard" / "testing" / "process.py",
}


def offences(source: str) -> list[str]:
    """What a source does to the process."""
    return [str(each) for each in lint_source(source.encode()) if each.rule.startswith("FB2")]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import torch\ntorch.backends.cudnn.benchmark, x = True, 1",
        "from torch.backends import cudnn\ncudnn.benchmark = True",
        "import torch.backends.cudnn as c\nc.deterministic |= True",
        "import torch\nsetattr(torch.backends.cudnn, 'benchmark', True)",
        "import torch.nn.functional as F\nF.scaled_dot_product_attention = None",
        "from torch.nn.attention import sdpa_kernel, SDPBackend\nwith sdpa_kernel([SDPBackend.MATH]): pass",
        "import torch\nwith torch.nn.attention.sdpa_kernel(1): pass",
        "from torch.nn.attention import sdpa_kernel as pin\nwith pin(1): pass",
        "import torch\ntorch.backends.cuda.enable_flash_sdp(False)",
        "import torch\ntorch._C._set_sdp_priority_order([1])",
        "import torch\ntorch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
        "import torch\ntorch.backends.cuda.preferred_blas_library('cublaslt')",
        "import torch\ntorch.manual_seed(0)",
        "from torch import manual_seed\nmanual_seed(0)",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import torch\ntorch.cuda.set_rng_state_all([])",
        "import numpy as np\nnp.random.seed(0)",
        "import random\nrandom.seed(1)",
        "import torch\ntorch.nn.attention.activate_flash_attention_impl('FA4')",
        "import torch\ntorch.nn.attention.restore_flash_attention_impl()",
        "import torch\ntorch.set_default_dtype(torch.float16)",
        "import torch\ntorch.set_float32_matmul_precision('high')",
        "import torch\ntorch.use_deterministic_algorithms(True)",
        "import torch\ntorch.set_flush_denormal(True)",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
    ],
)
def test_the_check_finds(source):
    assert offences(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ng = torch.Generator()\ng.manual_seed(0)",
        "import torch\ng = torch.Generator().manual_seed(0)",
        "import torch\nx = torch.backends.cuda.flash_sdp_enabled()",
        "import torch\nx = torch.backends.cudnn.benchmark",
        "import torch\nwith torch.set_grad_enabled(True): y = 1",
        "self.torch = 3",
    ],
)
def test_the_check_leaves_alone(source):
    assert offences(source) == []


def test_there_are_sources():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_state_of_the_process_is_touched_by(path):
    found = [str(each) for each in lint([str(path)]).findings if each.rule.startswith("FB2")]

    assert found == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path not in ALLOWED], ids=lambda path: path.name)
def test_nothing_is_allowed_by_a_comment_but_in_the_modules_that_may(path):
    source = path.read_text().replace("fuseboard: allow", "")

    assert offences(source) == []


def test_the_whole_tree_passes_the_lint(capsys):
    assert main(TREE) == 0, capsys.readouterr().out
