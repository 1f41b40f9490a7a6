"""Whether a package can be made with the C++ compiler that inductor would take."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from fuseboard.engine.aot.elf import needed
from fuseboard.engine.aot.errors import ExportError

__all__ = ["check_compiler"]

_PROBE = "#include <locale>\nstd::locale probe() { return std::locale(); }\n"
_SHARED = ("libstdc++.so", "libc++.so")


def check_compiler() -> None:
    """Finds out before a minute of compilation, and before a package is made that no process can load.

    Raises:
        ExportError: There is none, or it puts a C++ library of its own into what it makes.
    """
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415 - inductor, for those who export

    try:
        compiler = cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        msg = "there is no C++ compiler, which a package is made with: install g++, or name one in the variable CXX."
        raise ExportError("compiler", msg) from error
    if sys.platform == "linux" and not _shares(compiler):
        msg = (
            f"the C++ compiler {compiler} puts a C++ library of its own into what it makes, as with -static-libstdc++, "
            "and so into the package: beside torch's, loading that fails or ends the process. Name another one in the "
            "variable CXX, such as CXX=/usr/bin/g++, or give this one a libstdc++.so to link to."
        )
        raise ExportError("compiler", msg)


@functools.cache
def _shares(compiler: str) -> bool:
    """Whether it links to the C++ library of the process; True too where a trial says nothing."""
    # Of two copies in a process some symbols are one (STB_GNU_UNIQUE: the numbers of a locale's facets), and torch's
    # code for a package, which uses std::regex as soon as it is loaded, calls the wrong facet.
    with tempfile.TemporaryDirectory(prefix="fuseboard-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - the compiler that torch runs
        if done.returncode:
            return True  # what it cannot do, it says better of the package's own code
        with library.open("rb") as file:
            names = needed(file, 0, library.stat().st_size)
    return not names or any(each.startswith(_SHARED) for each in names)
