"""TileLang itself: whether it can work here, by looking, and the one place that imports it.

Its import writes four environment variables that child processes would inherit, puts folders first in `sys.path`, and
fails where its cache folder cannot be made. So the folder is tried before, and the rest is put back after: what it
needs of them it has read by then.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["INSTALL", "RANGE", "cache_folder", "cpu_problem", "gpu_problem", "load", "nvcc", "version"]

RANGE = ">=0.1.14,<0.2"
INSTALL = (
    "pip install --no-deps tilelang==0.1.15 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext z3-solver==4.15.4.0 cloudpickle "
    "ml-dtypes psutil tqdm"
)
"""What TileLang needs besides torch, which it would replace if it were left to resolve it."""

_CACHE = "TILELANG_CACHE_DIR"
_CHANGED = ("PYTHONPATH", "TVM_LIBRARY_PATH", "TL_CUTLASS_PATH", "TL_TEMPLATE_PATH")
_COMPILERS = ("g++", "clang++", "c++")
_lock = threading.Lock()
_loaded: ModuleType | None = None


def version() -> str | None:
    """The installed version by its metadata; None where it is not installed."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$TILELANG_CACHE_DIR`, or what TileLang takes without it."""
    return Path(os.environ.get(_CACHE) or Path.home() / ".tilelang" / "cache")


def _missing() -> str | None:
    if importlib.util.find_spec("tilelang") is None:
        return f"TileLang is not installed: {INSTALL}"
    if os.environ.get(_CACHE) == "":
        return f"{_CACHE} is empty; TileLang takes that for a folder's name: unset it, or name one"
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        return f"TileLang's cache folder {folder} cannot be made ({reason}); set {_CACHE} to one that can be written"
    if not os.access(folder, os.W_OK):
        return f"TileLang's cache folder {folder} cannot be written; set {_CACHE} to one that can"
    return None


def cpu_problem() -> str | None:
    """Why no kernel can be made for the CPU here, or None. Nothing is imported."""
    missing = _missing()
    if missing is not None:
        return missing
    named = next((name for name in ("CXX", "CC") if os.environ.get(name)), None)
    if named is not None:
        if shutil.which(os.environ[named]) is None:
            return f"${named} is {os.environ[named]!r}, which is not found; name a C++ compiler there or unset it"
    elif not any(map(shutil.which, _COMPILERS)):
        return f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH and $CXX is not set; install g++"
    return None


def nvcc() -> str | None:
    """The CUDA compiler that TileLang finds, or None: by its environment variables, PATH, its wheel, its folder."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home is not None:
            return shutil.which("nvcc", path=str(Path(home) / "bin"))
    found = shutil.which("nvcc")
    if found is not None:
        return found
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or ():
            if file.name == "nvcc":
                return str(file.locate())
    return shutil.which("nvcc", path="/usr/local/cuda/bin")


def gpu_problem() -> str | None:
    """Why no kernel can be made for a GPU here, or None. Nothing is imported."""
    missing = _missing()
    if missing is not None:
        return missing
    if nvcc() is None and not _nvrtc():
        return (
            "TileLang compiles with nvcc, which is neither in $CUDA_HOME nor on PATH; install the CUDA toolkit, or the "
            "compiler alone: pip install nvidia-cuda-nvcc nvidia-cuda-cccl. Or compile without it: pip install "
            "cuda-python"
        )
    return None


def _nvrtc() -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    return False


def load() -> ModuleType:
    """TileLang, imported once.

    Raises:
        ImportError: It is not installed, has no place for what it compiles, or cannot be imported.
    """
    global _loaded  # noqa: PLW0603 - a package is imported once a process
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            problem = _missing()
            if problem is not None:
                raise ImportError(problem, name="tilelang")
            imported = sys.modules.get("tilelang")
            _loaded = imported if imported is not None else _imported()  # who imported it has settled it too
        return _loaded


def _imported() -> ModuleType:
    with _as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module("tilelang")
        logging.getLogger("tilelang").setLevel(logging.ERROR)  # it tells of every compilation
    return found


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Put back what TileLang's import changes, whatever happens inside."""
    environ, path = {name: os.environ.get(name) for name in _CHANGED}, list(sys.path)
    try:
        yield
    finally:
        for name, value in environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.path[:] = path
