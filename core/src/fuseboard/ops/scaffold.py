"""`fuseboard new-plugin NAME`: write a backend's project, whose placeholder kernel passes the conformance kit at once.

Also `python -m fuseboard.ops.scaffold NAME`. Loads no torch and no plugin. Status: 0 when the project was written, 2
when it was not; nothing is ever overwritten.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from string import Template

from fuseboard import registry
from fuseboard.ops.cli import Parser, UnusableError

__all__ = ["main"]

TEMPLATES = "new_plugin"
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""What the packaging specifications allow."""


def main(argv: list[str]) -> int:
    """Run `fuseboard new-plugin`; its exit status."""
    parser = Parser(
        prog="fuseboard new-plugin", description="Write a plugin project whose placeholder passes the conformance kit."
    )
    parser.add_argument("name", metavar="NAME", help="the backend's name, as policies will say it")
    parser.add_argument("--path", type=Path, metavar="DIR", help="the folder to write, new or empty; default ./D")
    parser.add_argument("--distribution", metavar="D", help="what pip will install; default NAME-attention")
    parser.add_argument("--kernel-package", metavar="P", help="the distribution that has the kernel, if there is one")
    args = parser.parse_args(argv)
    name: str = args.name
    _check_name(name)
    distribution: str = args.distribution or f"{name}-attention"
    package: str | None = args.kernel_package
    module = _module(distribution, package)
    folder: Path = args.path or Path(distribution)
    files = _files(name, distribution, module, package)
    _write(folder, files)
    lines = [f"Wrote {len(files)} files into {folder}. Next:", "", f"    cd {shlex.quote(str(folder))}"]
    lines += ["    pip install -e .", f"    pytest --fuseboard-backend {name}", ""]
    if package is not None and not _is_installed(package):
        lines += [f"{package} is not installed here, and {name} runs nowhere without it: install it first.", ""]
    lines += [f"Then put your kernel's call into {module}.py, and claim what it takes."]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _check_name(name: str) -> None:
    if name in registry.RESERVED or not registry._NAME.fullmatch(name):
        msg = f"a backend cannot be called {name!r}: use a word of a-z, 0-9 and '-_.' that is no policy."
        raise UnusableError(msg)
    for entry in registry.installed_entries():
        if entry.name == name:
            msg = (
                f"{entry.distribution} {entry.version} has a backend called {name!r} already; choose another name, or "
                f"uninstall it: pip uninstall {entry.distribution}"
            )
            raise UnusableError(msg)
    packages = registry.INSTALL_HINTS.get(name)
    if packages is not None:
        msg = f"{name!r} is the backend of {packages[0]}, which is not installed here; choose another name."
        raise UnusableError(msg)


def _module(distribution: str, package: str | None) -> str:
    """The module's name: the distribution's, as Python can say it."""
    if not _DISTRIBUTION.fullmatch(distribution):
        msg = f"a distribution cannot be called {distribution!r}: use letters, digits and '-_.', no other at an end."
        raise UnusableError(msg)
    if package is not None and not _DISTRIBUTION.fullmatch(package):
        msg = f"--kernel-package {package!r} is no distribution: give the name that pip installs, without a version."
        raise UnusableError(msg)
    if package is not None and _normal(package) == _normal(distribution):
        msg = f"--distribution and --kernel-package are both {distribution!r}: the plugin is a package of its own."
        raise UnusableError(msg)
    if _is_installed(distribution):
        msg = f"{distribution} is installed here already; choose another name for yours: --distribution."
        raise UnusableError(msg)
    module = re.sub(r"[-_.]+", "_", distribution).lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        module = f"fuseboard_{module}"
    if importlib.util.find_spec(module) is not None:
        msg = (
            f"its module would be called {module!r}, which hides one that can be imported here; choose --distribution."
        )
        raise UnusableError(msg)
    return module


def _files(name: str, distribution: str, module: str, package: str | None) -> dict[str, str]:
    """Every file's path and text."""
    words = {"name": name, "distribution": distribution, "module": module}
    words["key"] = f'"{name}"' if "." in name else name  # a bare dot in TOML begins a table
    words |= {"imports": "", "requires": "", "extra": "", "install": "", "load": "return attend"}
    if package is not None:
        imported = _import_name(package)
        words["imports"] = "\nimport importlib\n"
        words["requires"] = f', requires={{"{package}": ""}}'
        words["extra"] = (
            "\n[project.optional-dependencies]\n"
            "# Never a dependency: installing the plugin must not change anybody's torch.\n"
            f'kernel = ["{package}"]\n'
        )
        words["install"] = (
            "\n@hookimpl\ndef install_line(torch_version: str) -> str:\n"
            '    """Give the command that installs the kernel and keeps the installed torch."""\n'
            f'    return "pip install --no-deps {package}"\n\n'
        )
        words["load"] = f'importlib.import_module("{imported}")  # hand it to `attend`\n    return attend'
    top = importlib.resources.files(__package__) / TEMPLATES
    texts = {
        "pyproject.toml": top / "pyproject.toml.txt",
        f"{module}.py": top / "module.py.txt",
        "README.md": top / "README.md.txt",
        "conformance-xfails.txt": top / "conformance-xfails.txt.txt",
        "tests/test_claims.py": top / "test_claims.py.txt",
    }
    return {path: Template(text.read_text(encoding="utf-8")).substitute(words) for path, text in texts.items()}


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        if folder.is_dir() and any(folder.iterdir()):
            msg = f"{folder} is not empty, and nothing is overwritten; give another folder: --path."
            raise UnusableError(msg)
        for path, text in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        msg = f"{folder} cannot be written: {error.strerror or error}."
        raise UnusableError(msg) from None


def _import_name(package: str) -> str:
    """What to import of a distribution: its first module where it is installed, else its name."""
    modules = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if _normal(package) in map(_normal, owners) and not module.startswith("_")
    ]
    named = re.sub(r"[-_.]+", "_", package).lower()
    return named if named in modules or not modules else min(modules)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UnusableError as error:
        sys.stderr.write(f"fuseboard new-plugin: {error}\n")
        sys.exit(2)
