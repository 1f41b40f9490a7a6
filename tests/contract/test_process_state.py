"""No module of ours touches state of the whole process: read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])

# The one module that may, called once by a host at its start.
ALLOWED = {ROOT / "core" / "src" / "fuseboard" / "engine" / "features.py"}

CALLS = {
    # switches kernels for every thread
    "sdpa_kernel", "_sdpa_kernel", "enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp",
    "enable_cudnn_sdp",
    "_set_sdp_use_flash", "_set_sdp_use_mem_efficient", "_set_sdp_use_math", "_set_sdp_use_cudnn",
    "_set_sdp_priority_order",
    "allow_fp16_bf16_reduction_math_sdp", "preferred_linalg_library", "preferred_blas_library",
    # registers a flash implementation for every caller
    "activate_flash_attention_impl", "register_flash_attention_impl", "restore_flash_attention_impl",
    # generators and defaults of the whole process
    "manual_seed_all", "seed_all", "set_rng_state", "set_rng_state_all", "seed",
    "set_default_dtype", "set_default_device", "set_default_tensor_type", "set_float32_matmul_precision",
    "use_deterministic_algorithms", "set_num_threads", "set_num_interop_threads", "set_flush_denormal",
    "set_grad_enabled_globally",
}  # fmt: skip
SEEDING = {
    *("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.mps.manual_seed"),
    *("random.seed", "np.random.seed", "numpy.random.seed"),
}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    return node.targets if isinstance(node, ast.Delete) else []


def offences(source: str) -> list[str]:
    """What a source does to the process, with its lines."""
    tree = ast.parse(source)
    real = {}  # what a local name stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            real |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        for target in targets(node):
            flat = [*target.elts] if isinstance(target, (ast.Tuple, ast.List)) else [target]
            for each in flat:
                inner = each.value if isinstance(each, ast.Subscript) else each
                head, _, rest = dotted(inner).partition(".")
                name = f"{real.get(head, head)}.{rest}"
                if name.startswith("torch.") and (rest or not head):
                    found.append(f"line {node.lineno}: assigns to {name}")
        if isinstance(node, ast.Call):
            head, _, rest = dotted(node.func).partition(".")
            name = ".".join(filter(None, (real.get(head, head), rest)))
            if name.rsplit(".", 1)[-1] in CALLS or name in SEEDING:
                found.append(f"line {node.lineno}: calls {name}")
            if name == "setattr" and node.args and dotted(node.args[0]).startswith("torch"):
                found.append(f"line {node.lineno}: sets an attribute of {dotted(node.args[0])}")
    return found


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
        "import torch\ntorch.manual_seed(0)",
        "from torch import manual_seed\nmanual_seed(0)",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import random\nrandom.seed(1)",
        "import torch\ntorch.nn.attention.activate_flash_attention_impl('FA4')",
        "import torch\ntorch.set_default_dtype(torch.float16)",
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
    if path in ALLOWED:
        pytest.skip("the one module that may")

    assert offences(path.read_text()) == []
