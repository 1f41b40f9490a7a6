"""AOTInductor packages: a model compiled ahead of time into one `.pt2`, and a loader that checks every call.

    package = aot.export(model, (ids, mask), "encoder.pt2", dynamic_shapes={...})
    run = aot.load("encoder.pt2")
    out = run(ids, mask)

torch's own loader checks nothing by default: a length that is no multiple, a smaller batch or a transposed view gives
wrong numbers, or ends the process. Here a package knows what it takes (its `Contract`), derived from the graph that was
compiled and not from what was wished for, and a call outside of it is one `ContractError`. A file that is damaged, or
made for another torch, CPU or GPU, is a `PackageError` before any of it runs. Loading compiles nothing.

`contract` says what a package takes, `exporting` makes one from what `graph` reads, `package` loads one.
"""

from fuseboard.engine.aot.contract import Constant, Contract, Input, Output, Size, Target
from fuseboard.engine.aot.errors import ContractError, ExportError, PackageError, Problem
from fuseboard.engine.aot.exporting import Exported, export
from fuseboard.engine.aot.package import Package, load

__all__ = [
    "Constant",
    "Contract",
    "ContractError",
    "ExportError",
    "Exported",
    "Input",
    "Output",
    "Package",
    "PackageError",
    "Problem",
    "Size",
    "Target",
    "export",
    "load",
]
