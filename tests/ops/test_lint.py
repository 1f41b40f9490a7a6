"""`fuseboard lint`: what it finds by every form of name, what it leaves alone, and what it makes of odd files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuseboard.ops import lint as linting
from fuseboard.ops.lint import Options, lint, lint_source, main
from fuseboard.ops.lint_rules import ADVICE, RULES, WORDS

F = "import torch.nn.functional as F\n"


def rules(source: str, **options) -> list[str]:
    return [each.rule for each in lint_source(source.encode(), **options)]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        # every form of a name
        (f"{F}F.scaled_dot_product_attention(q)", "FB101"),
        ("import torch\ntorch.nn.functional.scaled_dot_product_attention(q)", "FB101"),
        ("import torch as t\nt._C._nn.scaled_dot_product_attention(q)", "FB101"),
        ("import torch.nn\ntorch.nn.functional.scaled_dot_product_attention(q)", "FB101"),
        ("from torch import nn\nnn.functional.scaled_dot_product_attention(q)", "FB101"),
        ("from torch.nn import functional\nfunctional.scaled_dot_product_attention(q)", "FB101"),
        ("from torch.nn.functional import scaled_dot_product_attention as a\na(q)", "FB101"),
        ("from torch.nn.functional import *\nscaled_dot_product_attention(q)", "FB101"),
        (f"{F}sdpa = F.scaled_dot_product_attention\nsdpa(q)", "FB101"),
        (f"{F}a, b = F.scaled_dot_product_attention, 1\na(q)", "FB101"),
        (f"{F}a = b = F.scaled_dot_product_attention\nb(q), a", "FB101"),
        (f"{F}a = F.scaled_dot_product_attention if x else None\na(q)", "FB101"),
        (f"{F}(a := F.scaled_dot_product_attention)(q)", "FB101"),
        (f"{F}def f():\n    global a\n    a = F.scaled_dot_product_attention\ndef g(): a(q)", "FB101"),
        (f"{F}def f():\n a = None\n def g():\n  nonlocal a\n  a = F.scaled_dot_product_attention\n a()", "FB101"),
        ("def f(q):\n    import torch.nn.functional as F\n    return F.scaled_dot_product_attention(q)", "FB101"),
        (f"{F}class A:\n    F = None\n    def f(self): F.scaled_dot_product_attention(q)", "FB101"),
        (f"{F}[F.scaled_dot_product_attention(q) for q in qs]", "FB101"),
        (f"{F}getattr(F, 'scaled_dot_product_attention')(q)", "FB101"),
        ("import importlib\nimportlib.import_module('torch.nn.functional').scaled_dot_product_attention(q)", "FB101"),
        ("import sys\nsys.modules['torch.nn.functional'].scaled_dot_product_attention(q)", "FB101"),
        (f"{F}vars(F)['scaled_dot_product_attention'](q)", "FB101"),
        ("try:\n    from flash_attn import flash_attn_func as f\nexcept ImportError:\n    f = None\nf(q)", "FB104"),
        # a reference that gets out
        (f"{F}def f(self): self.attend = F.scaled_dot_product_attention", "FB101"),
        (f"{F}table = {{'sdpa': F.scaled_dot_product_attention}}", "FB101"),
        (f"{F}def f(): return F.scaled_dot_product_attention", "FB101"),
        (f"{F}def f(attend=F.scaled_dot_product_attention): ...", "FB101"),
        (f"{F}class A:\n    attend = F.scaled_dot_product_attention", "FB101"),
        (f"{F}attend = F.scaled_dot_product_attention", "FB101"),
        (f"{F}apply(attend=F.scaled_dot_product_attention)", "FB101"),
        (f"{F}f = lambda: F.scaled_dot_product_attention", "FB101"),
        ("from flash_attn import flash_attn_func\n__all__ = ['flash_attn_func']", "FB104"),
        (f"{F}a, (b, *c) = 1, [F.scaled_dot_product_attention, 2]", "FB101"),
        (f"{F}self.a, b = F.scaled_dot_product_attention, 2", "FB101"),
        # what is called
        ("import torch\nops = torch.ops.aten\nops._scaled_dot_product_flash_attention.default(q)", "FB102"),
        ("import torch\ntorch.ops.aten._flash_attention_forward(q)", "FB102"),
        ("import torch\ntorch.ops.aten._efficient_attention_forward.default(q)", "FB102"),
        ("import torch\ntorch.ops.aten.scaled_dot_product_attention(q)", "FB102"),
        ("import torch\ntorch._scaled_dot_product_flash_attention_for_cpu(q)", "FB102"),
        ("from torch.nn.attention.flex_attention import flex_attention\nflex_attention(q)", "FB103"),
        ("from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(q)", "FB103"),
        ("import flash_attn\nflash_attn.flash_attn_func(q)", "FB104"),
        ("from flash_attn.flash_attn_interface import flash_attn_varlen_func as f\nf(q)", "FB104"),
        ("import flash_attn_interface as f3\nf3.flash_attn_func(q)", "FB104"),
        ("from flash_attn.cute import flash_attn_func\nflash_attn_func(q)", "FB104"),
        ("import xformers.ops as xops\nxops.memory_efficient_attention(q)", "FB104"),
        ("from xformers.ops import fmha\nfmha.memory_efficient_attention_forward(q)", "FB104"),
        ("from sageattention import sageattn\nsageattn(q)", "FB104"),
        ("import sageattn3\nsageattn3.sageattn3_blackwell(q)", "FB104"),
        ("import flashinfer\nflashinfer.single_prefill_with_kv_cache(q)", "FB104"),
        ("import mslk.attention.fmha as f\nf.memory_efficient_attention(q)", "FB104"),
        ("from kernels import get_kernel\nget_kernel('kernels-community/flash-attn3')", "FB104"),
        ("from torch import nn\nnn.MultiheadAttention(8, 2)", "FB105"),
        ("from torch import nn\nclass A(nn.TransformerEncoderLayer): ...", "FB105"),
        (f"{F}F.multi_head_attention_forward(q)", "FB105"),
        # process-wide state
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", "FB201"),
        ("import torch\nx, torch.backends.cudnn.benchmark = 1, True", "FB201"),
        ("import torch\nbackends = torch.backends\nbackends.cudnn.benchmark |= True", "FB201"),
        ("import torch\nsetattr(torch.backends.cudnn, name, True)", "FB201"),
        ("import torch\ndel torch.backends.cudnn.benchmark", "FB201"),
        ("import torch\nwith x() as torch.backends.cudnn.benchmark: ...", "FB201"),
        ("import torch\nfor torch.backends.cudnn.benchmark in (1, 2): ...", "FB201"),
        ("from torch.backends import cudnn\nwith cudnn.flags(enabled=False): ...", "FB201"),
        ("import torch\ntorch.backends.cuda.preferred_linalg_library('magma')", "FB201"),
        ("import torch._inductor.config as c\nc.max_autotune = True", "FB201"),
        ("from torch.nn.attention import sdpa_kernel as pin\nwith pin(1): ...", "FB202"),
        ("import torch\nwith torch.backends.cuda.sdp_kernel(): ...", "FB202"),
        ("import torch\ntorch.backends.cuda.enable_mem_efficient_sdp(False)", "FB202"),
        ("import torch\ntorch._C._set_sdp_use_flash(False)", "FB202"),
        ("import torch\ntorch.set_default_dtype(torch.float16)", "FB203"),
        ("from torch import set_float32_matmul_precision as s\ns('high')", "FB203"),
        ("import torch\ntorch.set_num_threads(1)", "FB203"),
        ("import torch\ntorch.use_deterministic_algorithms(True)", "FB203"),
        ("import torch\ntorch.manual_seed(0)", "FB204"),
        ("import torch\ntorch.cuda.manual_seed_all(0)", "FB204"),
        ("import torch\ntorch.seed()", "FB204"),
        ("from torch.random import set_rng_state\nset_rng_state(s)", "FB204"),
        ("import numpy as np\nnp.random.seed(0)", "FB204"),
        ("import random\nrandom.seed(0)", "FB204"),
        ("from torch.nn.attention import activate_flash_attention_impl\nactivate_flash_attention_impl('FA4')", "FB205"),
        ("from torch.library import Library\nlib = Library('aten', 'IMPL')", "FB205"),
        (f"{F}F.scaled_dot_product_attention = mine", "FB206"),
        (f"{F}setattr(F, 'scaled_dot_product_attention', mine)", "FB206"),
        (f"{F}F.__dict__['scaled_dot_product_attention'] = mine", "FB206"),
        (f"{F}import functools\nfunctools.partial(setattr, F, 'relu')", "FB206"),
        (f"{F}object.__setattr__(F, 'relu', mine)", "FB206"),
        ("from unittest import mock\nwith mock.patch('torch.nn.functional.relu'): ...", "FB206"),
        ("import torch\ndef test(monkeypatch): monkeypatch.setattr(torch.nn.functional, 'relu', 1)", "FB206"),
        ("import transformers\ntransformers.models.llama.modeling_llama.LlamaAttention.forward = mine", "FB206"),
        ("from transformers.models.llama import modeling_llama as m\nm.apply_rotary_pos_emb = mine", "FB206"),
        ("import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'", "FB207"),
        ("from os import environ\nenviron.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'x')", "FB207"),
    ],
)  # fmt: skip
def test_it_finds(source, rule):
    assert rules(source) == [rule]


@pytest.mark.parametrize(
    "source",
    [
        f"{F}def f(F): F.scaled_dot_product_attention(q)",
        f"{F}def f():\n    F = mine()\n    F.scaled_dot_product_attention(q)",
        f"{F}[F.scaled_dot_product_attention(q) for F in mine]",
        f"{F}f = lambda F: F.scaled_dot_product_attention(q)",
        f"{F}'F.scaled_dot_product_attention(q)'  # F.scaled_dot_product_attention(q)",
        f"{F}if F.scaled_dot_product_attention is None: ...",
        f"{F}ok = hasattr(F, 'scaled_dot_product_attention') and callable(F.scaled_dot_product_attention)",
        f"{F}x = F.scaled_dot_product_attention.__doc__",
        f"{F}def f(attend: F.scaled_dot_product_attention): ...",
        "from .functional import scaled_dot_product_attention as a\na(q)",
        "from mine import flash_attn_func\nflash_attn_func(q)",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flash_attn import MHA as MHA",
        "try:\n    import flash_attn\n    has = True\nexcept ImportError:\n    has = False",
        "from flash_attn.bert_padding import unpad_input\nunpad_input(x)",
        "import flash_attn\nversion = flash_attn.__version__",
        "from torch import nn\nok = isinstance(m, nn.MultiheadAttention)",
        "import torch\nx = torch.backends.cuda.flash_sdp_enabled()",
        "import torch\nx = torch.backends.cuda.preferred_linalg_library()",
        "import torch\ng = torch.Generator().manual_seed(0)",
        "import torch\ng = torch.Generator()\ng.manual_seed(0)\ng.set_state(s)",
        "import torch\nwith torch.set_grad_enabled(True): ...",
        "import random\nr = random.Random(0)\nr.seed(1)",
        "import numpy as np\nr = np.random.default_rng(0)",
        "class A:\n    def f(self): self.torch = self.x.backends = 1",
        "CACHE = {}\nCACHE['x'] = 1\nlimit = 3\ndef f():\n    global limit\n    limit = 4",
        "from . import config\nconfig.debug = True",
        "import os\nos.environ['MY_ENGINE'] = '1'",
        "import sys\nsys.stdout.x = 1\nsetattr(sys.modules[__name__], 'y', 1)",
    ],
)  # fmt: skip
def test_it_leaves_alone(source):
    assert rules(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "site = fb.Site('s', reference=F.scaled_dot_product_attention)",
        "site = fb.Site('s', reference=lambda q, k, v: F.scaled_dot_product_attention(q, k, v))",
        "def ref(q, k, v): return F.scaled_dot_product_attention(q, k, v)\nsite = fb.Site('s', reference=ref)",
        "class A:\n    @staticmethod\n    def ref(q, k, v): return F.scaled_dot_product_attention(q, k, v)\n"
        "site = fb.Site('s', reference=A.ref)",
        "import functools\ndef ref(q, k, v, *, w): return F.scaled_dot_product_attention(q, k, v)\n"
        "site = fb.Site('s', reference=functools.partial(ref, w=1))",
    ],
)
def test_a_direct_call_belongs_in_a_sites_reference(source):
    assert rules(f"{F}import fuseboard as fb\n{source}") == []


def test_a_function_beside_the_reference_is_not_the_reference():
    source = f"{F}import fuseboard as fb\ndef ref(q): ...\ndef other(q): F.scaled_dot_product_attention(q)\n"

    assert rules(f"{source}fb.Site('s', reference=ref)") == ["FB101"]
    assert rules(f"{source}fb.Site('s', reference=other)") == []


def test_a_reference_may_call_kernels_but_not_write_state():
    source = "import torch, fuseboard as fb\ndef ref(q): torch.manual_seed(0)\nfb.Site('s', reference=ref)"

    assert rules(source) == ["FB204"]


def test_a_finding_says_where_what_and_what_to_write_instead():
    (found,) = lint_source(f"{F}é = 'é'; é, F.scaled_dot_product_attention(q)".encode(), "engine.py")

    assert str(found) == (
        "engine.py:2:13: FB101 torch.nn.functional.scaled_dot_product_attention is called: "
        "write fuseboard.attention(q, k, v, site=SITE, ...)"
    )


# ---- comments


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.manual_seed(0)  # fuseboard: allow(a demo)", []),
        ("torch.manual_seed(  # fuseboard: allow(a demo)\n    0,\n)", []),
        ("f(  # fuseboard: allow(a demo)\n    torch.manual_seed(0),\n)", []),
        ("f(\n    torch.manual_seed(0),  # fuseboard: allow(a (nested) demo)\n)", []),
        ("torch.manual_seed(0)  # noqa: X # fuseboard: allow(a demo)", []),
        ("torch.manual_seed(0)  # fuseboard: allow()", ["FB204", "FB301"]),
        ("torch.manual_seed(0)  # fuseboard: allow", ["FB204", "FB301"]),
        ("x = 1  # fuseboard: allow(a demo)", ["FB302"]),
        ("# fuseboard: allow(a demo)\ntorch.manual_seed(0)", ["FB302", "FB204"]),
        ("if x:  # fuseboard: allow(a demo)\n    torch.manual_seed(0)", ["FB302", "FB204"]),
        ("'# fuseboard: allow(a demo)'; torch.manual_seed(0)", ["FB204"]),
        ("# fuseboard: allow-file(a demo)\ntorch.manual_seed(0)\ntorch.set_num_threads(1)", []),
        ("# fuseboard: allow-file(a demo)", ["FB302"]),
        ("# fuseboard: allow-file()\ntorch.manual_seed(0)", ["FB301", "FB204"]),
    ],
)
def test_a_comment_allows_what_stands_there_and_needs_a_reason(source, expected):
    assert rules(f"import torch\n{source}") == expected


# ---- files


def test_a_folder_is_walked_without_what_is_not_its_own(tmp_path):
    bad = "import torch\ntorch.manual_seed(0)\n"
    places = [".git/a.py", "__pycache__/a.py", "build/a.py", "node_modules/a.py", ".venv/a.py", "env/lib/a.py"]
    write(tmp_path, {**dict.fromkeys([*places, "b/c.py", "a.py", "notes.txt"], bad), "env/pyvenv.cfg": ""})

    report = lint([str(tmp_path)])

    assert [os.path.relpath(each.path, tmp_path) for each in report.findings] == ["a.py", "b/c.py"]
    assert report == lint([str(tmp_path), str(tmp_path / "b"), str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "rule", "says"),
    [
        (b"def f(:\n", "FB901", "not valid Python"),
        (b"x = 1\0\n", "FB901", "null bytes"),
        (b"# -*- coding: nonsense -*-\n", "FB902", "cannot be decoded"),
        (b"x = '\xff'\n", "FB902", "cannot be decoded"),
        (b"x = " + b" + ".join([b"1"] * 100_000), "FB902", "nested too deeply"),
        (b"#" * 9_000_000, "FB902", "too large (9 MB"),
    ],
)
def test_a_file_that_cannot_be_checked_is_one_line(tmp_path, content, rule, says):
    (tmp_path / "odd.py").write_bytes(content)

    (found,) = lint([str(tmp_path)]).findings

    assert found.rule == rule
    assert says in found.message


@pytest.mark.parametrize("name", ["latin-1", "utf-8-sig", "cp1251"])
def test_a_source_is_read_in_its_own_encoding(name):
    cookie = "" if name == "utf-8-sig" else f"# coding: {name}\n"
    source = f"{cookie}import torch; torch.manual_seed(0)\n".encode(name)

    assert [each.rule for each in lint_source(source)] == ["FB204"]


def test_links_that_lead_nowhere_or_in_circles_are_a_line_each(tmp_path):
    write(tmp_path, {"a/ok.py": ""})
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    os.mkfifo(tmp_path / "pipe.py")

    found = {Path(each.path).name: each.message for each in lint([str(tmp_path)]).findings}

    assert sorted(found) == ["gone.py", "pipe.py", "self.py", "up"]
    assert "not followed" in found["up"]


def test_a_long_chain_of_operators_is_no_deep_tree():
    source = f"import torch\nx = {' + '.join(['1'] * 900)}\ntorch.manual_seed(0)"

    assert rules(source) == ["FB204"]


def test_a_project_may_write_its_own_modules(tmp_path):
    source = "import engine\nimport other\nengine.debug = True\nother.debug = True\n"
    write(tmp_path, {"engine/__init__.py": "", "engine/part/__init__.py": "", "engine/part/a.py": source})

    assert [each.line for each in lint([str(tmp_path)]).findings] == [4]


# ---- the command


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuseboard.ops.lint", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_status_is_0_for_clean_1_for_findings_and_2_for_a_question_that_means_nothing(tmp_path):
    write(tmp_path, {"bad.py": "import torch\ntorch.manual_seed(0)\n", "good.py": "import torch\n"})

    clean, found = run("good.py", cwd=tmp_path), run(".", cwd=tmp_path)

    assert (clean.returncode, clean.stdout) == (0, "0 findings in 1 files\n")
    assert found.returncode == 1
    assert found.stdout.startswith("bad.py:2:1: FB204 torch.manual_seed is called: draw from")
    assert found.stdout.endswith("1 findings in 2 files\n")
    for wrong in (["nowhere"], [], ["good.py", "--select", "FB7"], ["good.py", "--nonsense"]):
        done = run(*wrong, cwd=tmp_path)
        assert done.returncode == 2, wrong
        assert len(done.stderr.splitlines()) == 1


def test_rules_are_selected_and_counted_and_given_as_data(tmp_path, capsys):
    write(tmp_path, {"bad.py": f"{F}import torch\ntorch.manual_seed(0)\nF.scaled_dot_product_attention(q)\n"})
    path = str(tmp_path)

    assert main([path, "--json", "--select", "FB1"]) == 1
    assert [each["rule"] for each in json.loads(capsys.readouterr().out)["findings"]] == ["FB101"]
    assert main([path, "--statistics", "--ignore", "FB101,FB9"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"     1 FB204 {RULES['FB204']}"
    assert main([path, "--ignore", "FB1", "--ignore", "FB2"]) == 0
    assert main([path, "--exclude", "bad.*"]) == 0


def test_the_page_names_every_key_of_the_data(tmp_path, capsys):
    write(tmp_path, {"bad.py": "import torch\ntorch.manual_seed(0)\n"})
    assert main([str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()

    assert data["schema"] == 1
    keys = [*data, *(f"findings[].{key}" for key in data["findings"][0])]
    assert sorted(re.findall(r"^\| `([a-z]+(?:\[\]\.[a-z]+)?)` \|", page, re.MULTILINE)) == sorted(keys)


def test_where_kernels_are_the_purpose_only_writes_are_found(tmp_path, capsys):
    source = f"{F}import torch\ntorch.manual_seed(0)\nF.scaled_dot_product_attention(q)\n"
    write(tmp_path, {"plugins/a/src/x.py": source, "engine/x.py": source})

    main([str(tmp_path), "--kernels", str(tmp_path / "plugins/*/src"), "--json"])

    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(os.path.relpath(each["path"], tmp_path), each["rule"]) for each in found] == [
        ("engine/x.py", "FB204"),
        ("engine/x.py", "FB101"),
        ("plugins/a/src/x.py", "FB204"),
    ]


def test_the_nearest_pyproject_says_the_same(tmp_path, capsys):
    write(
        tmp_path,
        {
            "pyproject.toml": '[tool.fuseboard.lint]\nkernels = [\n"plugins/*/src",  # why\n]\nignore = ["FB2"]\n',
            "plugins/a/src/x.py": f"{F}F.scaled_dot_product_attention(q)\n",
            "engine/x.py": "import torch\ntorch.manual_seed(0)\n",
        },
    )

    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path / "plugins/a"), "--kernels", "elsewhere"]) == 1
    (tmp_path / "pyproject.toml").write_text('[tool.fuseboard.lint]\nkernel = ["x"]\n')
    assert main([str(tmp_path)]) == 2
    assert "has no key 'kernel'. Keys: kernels, exclude, select, ignore." in capsys.readouterr().err


def test_the_table_is_read_alike_without_a_toml_parser(tmp_path):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none to compare with")
    file = Path(__file__).parents[2] / "pyproject.toml"
    text = file.read_text()

    assert linting.plain_table(text, file) == tomllib.loads(text)["tool"]["fuseboard"]["lint"]
    assert linting.plain_table(text, file)["kernels"]


def test_it_loads_no_torch(tmp_path):
    code = "from fuseboard.ops.lint import main; main(['.']); import sys; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "False"


def test_every_rule_is_documented_and_every_rule_of_code_has_advice():
    page = (Path(__file__).parents[2] / "docs/lint.md").read_text()

    assert [rule for rule in RULES if f"`{rule}`" not in page] == []
    assert set(ADVICE) == {rule for rule in RULES if rule < "FB3"}


def test_a_word_that_is_looked_for_first_is_in_every_source_that_has_a_finding():
    """The cheap look before the walk never says no to a source with a finding: all examples above, once more."""
    examples = next(mark for mark in test_it_finds.pytestmark if mark.name == "parametrize").args[1]
    for source, rule in examples:
        if rule not in ("FB201", "FB206"):  # found by their form: a write to an imported name
            assert any(word in source for word in WORDS), source


def test_options_match_folders_and_names():
    options = Options(exclude=("plugins/*/src", "gen_*.py", "a/**/c"))

    inside = {
        path: options.lies_in(path, options.exclude) for path in ("plugins/x/src/a.py", "x/gen_1.py", "a/b/b/c/d.py")
    }
    outside = {path: options.lies_in(path, options.exclude) for path in ("plugins/x/y/src/a.py", "x/gen.py", "b/a/c")}

    assert all(inside.values())
    assert not any(outside.values())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML parser")
@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ('[tool.fuseboard]\nlint.exclude = ["*.py"]\n', 0),
        ('[tool.fuseboard]\nlint = { exclude = ["*.py"] }\n', 0),
        ('[tool."fuseboard".lint]\nexclude = ["*.py"]\n', 0),
        ('[ tool.fuseboard.lint ]\nexclude = ["*.py"]\n', 0),
        ('[tool]\ntext = """\n[tool.fuseboard.lint]\nexclude = ["*.py"]\n"""\n', 1),
        ('[project]\ndependencies = ["fuseboard"\n', 1),
    ],
)
def test_the_table_is_found_however_toml_lets_it_be_written(tmp_path, capsys, text, findings):
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "engine.py").write_text("import torch\ntorch.manual_seed(0)\n")
    assert main([str(tmp_path)]) == bool(findings)
    assert f"{findings} findings in " in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML parser")
def test_a_table_that_is_none_stops_the_run(tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text("[tool.fuseboard]\nlint = 3\n")
    assert main([str(tmp_path)]) == 2
    assert "[tool.fuseboard.lint] is 3, expected a table." in capsys.readouterr().err
