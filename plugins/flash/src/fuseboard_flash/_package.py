"""Why a kernel package cannot be used, in words. Looks at files and metadata; imports nothing but in `explained`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["explained", "folders_of", "missing", "parameters", "version"]


def version(distribution: str) -> str | None:
    """The installed version by metadata; None when absent or unreadable."""
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # noqa: BLE001 - damaged metadata may raise anything
        return None


def missing(*modules: str) -> list[str]:
    """Which of these top-level modules cannot be found."""
    return [each for each in modules if importlib.util.find_spec(each) is None]


def folders_of(package: str) -> tuple[list[Path], bool]:
    """Where a top-level package lies, and whether it has an `__init__.py`: without one it is an empty namespace."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return [], False
    return [Path(each) for each in spec.submodule_search_locations or ()], spec.origin is not None


def parameters(file: Path, function: str) -> str:
    """The text of a function's parameters in a source file, unexecuted; empty when it is not there."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text.partition(f"\ndef {function}(")[2].partition("):")[0]


@contextlib.contextmanager
def explained(package: str, remedy: str) -> Iterator[None]:
    """Say what usually lies behind the errors that compiled packages raise at import.

    Args:
        package: What is imported, in words.
        remedy: What to do about it, such as an install line.
    """
    try:
        yield
    except (ImportError, OSError) as error:
        text = str(error).strip().partition("\n")[0]
        if "undefined symbol" in text:
            msg = f"{package} was built for another torch ({text}). Build it again: {remedy}"
        elif "cannot open shared object" in text:
            msg = f"{package} was built for another CUDA ({text}). Build it again: {remedy}"
        else:
            raise
        raise ImportError(msg) from error
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        msg = f"{package} was built without kernels for this GPU (no kernel image). Build it again: {remedy}"
        raise RuntimeError(msg) from error
