"""A host of its own beside kernel packages that are fake, broken or of another version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

HOST = """
import importlib, sys, attrs, fuseboard as fb, torch
from types import SimpleNamespace
from fuseboard.probe import Verdict
from fuseboard.registry import Entry, Registry, installed_entries, use

module, package = {module!r}, {package!r}
plugin, name = importlib.import_module(module), module.rpartition(".")[2]
hooks = {{each: hook for each, hook in vars(plugin).items() if hasattr(hook, "fuseboard_impl")}}
limits = attrs.evolve(plugin.LIMITS, devices={{"cpu"}})
hooks["constraints"] = fb.hookimpl(lambda: limits)
assert package not in sys.modules, "loading a plugin has imported its kernel package"
entries = [Entry(name, lambda: SimpleNamespace(**hooks), "fuseboard-" + name, "0.1.0")]
entries += [each for each in installed_entries() if each.name == "sdpa-cpu"]
SITE = fb.Site("child")
q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
run = fb.Run()
registry = Registry(entries)
other = registry.resolve("sdpa-cpu")
registry.verdicts["sdpa-cpu", "cpu"] = Verdict(ok=True, kernel=other.load(torch.device("cpu")))  # needs no time limit
with use(registry), fb.bind(name, run=run):
    out = fb.attention(q, q, q, site=SITE)
    print(fb.explain(SITE, q, q, q))
assert torch.allclose(out.float(), torch.nn.functional.scaled_dot_product_attention(q, q, q).float(), atol=5e-2)
print(run.report())
"""


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., str]:
    """Runs a host beside a fake package and gives what it printed; whatever the package does, it must never break."""

    def run(
        module: str, package: str, version: str | None, files: Mapping[str, str] | Path | None, **environ: str
    ) -> str:
        """Run it.

        Args:
            module: The plugin's, which the host is to prefer.
            package: The kernel package's name.
            version: What its metadata says.
            files: Its files by path, or a folder that holds it; None for no package at all.
            environ: Environment variables.
        """
        site = tmp_path / "site"
        paths = [str(site), *(path for path in sys.path if path)]
        if files is not None:
            info = site / f"{package}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        if isinstance(files, Path):
            paths.insert(1, str(files))
        for path, source in {} if files is None or isinstance(files, Path) else files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(source)
        env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEBOARD_")}
        env |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | environ
        command = [sys.executable, "-c", HOST.format(module=module, package=package)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
