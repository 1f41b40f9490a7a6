"""`load`: a package that is whole, made for this torch and this machine, and checks every call.

torch's own `aoti_load_package` is not used: it imports inductor, which takes seconds, and compiles a small program to
find out about the CPU, only to warn. torch's C++ loader, which it calls in the end, needs neither compiler nor cache.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from fuseboard.engine.aot import archive
from fuseboard.engine.aot.check import Check
from fuseboard.engine.aot.contract import Constant, Contract, Input
from fuseboard.engine.aot.errors import ContractError, PackageError, Problem

__all__ = ["Package", "instructions", "load"]

_tracing = torch.compiler.is_dynamo_compiling


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    contiguous: bool = False,
    sha256: str | None = None,
) -> Package:
    """A package, ready to be called; nothing of it runs before the file and the machine were found right.

    Args:
        path: What `export` wrote.
        device: Where it is to run; None for the kind of device that it was made for. `cuda:1` moves it to another GPU
            of the same compute capability.
        contiguous: Copy an input whose layout is another one, instead of refusing it. Inputs that the model writes into
            are never copied.
        sha256: What the file's SHA-256 has to be, from a source that you trust. The digest inside of the file finds
            damage only.

    Raises:
        PackageError: The file is damaged or no package, or was made for another torch, CPU, GPU or kind of device.
    """
    path = Path(path)
    data, digest = archive.checked(path, sha256)
    try:
        contract = Contract.of(data["contract"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"its contract is of another kind than this fuseboard reads ({error}): export it anew."
        raise PackageError(str(path), "schema", msg) from error
    index = _place(str(path), contract, device)
    _fits(str(path), contract, index)
    place = torch.device("cpu") if index is None else torch.device("cuda", index)
    loader = _loader(str(path), index)
    return Package(path, digest, _at(contract, index), data.get("meta"), loader, place, contiguous)


def _again(path: str, device: str, contiguous: bool, sha256: str) -> Package:
    return load(path, device=device, contiguous=contiguous, sha256=sha256)


class Package:
    """A compiled model. `run(ids, mask)` is the model's own call, and detached.

    Copied and pickled, it is its path, and is loaded anew from the same file.

    Attributes:
        path: The file.
        sha256: Of the file.
        contract: What it takes.
        meta: What was given to `export` as `meta`, as JSON gives it back.
        device: Where it runs.
    """

    def __init__(
        self,
        path: Path,
        sha256: str,
        contract: Contract,
        meta: Any,
        loader: Any,
        device: torch.device,
        contiguous: bool,
    ) -> None:
        self.path = path
        self.sha256 = sha256
        self.contract = contract
        self.meta = meta
        self.device = device
        self._loader = loader
        self._check = Check(contract, contiguous, path.name)
        try:
            self._in_tree, self._out_tree = (pytree.treespec_loads(each) for each in contract.trees)
        except Exception as error:
            msg = f"its arguments or results are of a class that torch does not know here ({error}): import it first."
            raise PackageError(str(path), "load", msg) from error
        leaf = pytree.tree_structure(0)
        count = len(contract.outputs)
        self._tensor = self._out_tree == leaf
        self._tuple = self._out_tree == pytree.tree_structure((0,) * count)
        # The common call: tensors alone, by position.
        self._plain = (
            len(contract.inputs)
            if contract.flat and not contract.keywords and all(isinstance(each, Input) for each in contract.inputs)
            else -1
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result.

        Raises:
            ContractError: The package was not made for such a call; nothing ran.
        """
        if _tracing():
            from torch import _dynamo  # noqa: PLC0415 - loaded already, since it is tracing

            # Of a graph the package cannot be part: it breaks there.
            outside: Any = _dynamo.disable(self._called)  # type: ignore[no-untyped-call]
            return outside(args, kwargs)
        return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args if len(args) == self._plain and not kwargs else self._bound(args, kwargs)
        given = self._check(tensors)
        out = self._loader.run(given)
        if self._check.written:
            increment_version([given[i] for i in self._check.written])  # or a backward would use saved ones unwarned
        if self._tensor:
            return out[0]
        return tuple(out) if self._tuple else pytree.tree_unflatten(out, self._out_tree)

    def report(self) -> dict[str, Any]:
        """Which package runs, where, and which kernels its attention calls."""
        return {
            "path": str(self.path),
            "device": str(self.device),
            "policy": self.contract.policy,
            "attention": {site: dict(each) for site, each in self.contract.attention.items()},
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (str(self.path), str(self.device), self._check.contiguous, self.sha256)

    def __repr__(self) -> str:
        names = ", ".join(each.name for each in self.contract.inputs)
        return f"<Package {self.path.name}({names}) on {self.device}>"

    # ---- arguments

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The tensors among the arguments, in the package's order."""
        contract = self.contract
        leaves = self._by_name(args, kwargs) if contract.flat else self._nested(args, kwargs)
        problems = [
            Problem(each.name, f"is {_short(given)}", f"{each.value!r}", "its value was fixed by the export")
            for given, each in zip(leaves, contract.inputs, strict=True)
            if isinstance(each, Constant) and not (type(given) is type(each.value) and given == each.value)
        ]
        if problems:
            raise ContractError(problems, self.path.name)
        return [given for given, each in zip(leaves, contract.inputs, strict=True) if isinstance(each, Input)]

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = [each.name for each in self.contract.inputs]
        positional = names[: self.contract.positional]
        given = dict(zip(positional, args, strict=False))
        wrong = []
        if len(args) > len(positional):
            wrong.append(f"{len(args)} given by position")
        wrong += [f"{name} given twice" for name in kwargs if name in given]
        wrong += [f"{name} is unknown" for name in kwargs if name not in names]
        wrong += [f"{name} is missing" for name in names if name not in given and name not in kwargs]
        if wrong:
            by_name = [f"{name}=" for name in names[self.contract.positional :]]
            raise self._refused("; ".join(wrong), f"({', '.join([*positional, *by_name])})")
        given |= kwargs
        return [given[name] for name in names]

    def _nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        keywords = self.contract.keywords
        if sorted(kwargs) == sorted(keywords):
            kwargs = {name: kwargs[name] for name in keywords}
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if tree != self._in_tree:
            raise self._refused(_shape_of(tree), _shape_of(self._in_tree))
        return leaves

    def _refused(self, given: str, allowed: str) -> ContractError:
        advice = "give what the model was exported with"
        return ContractError([Problem("", f"arguments: {given}", allowed, advice)], self.path.name)


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)


def _shape_of(tree: Any) -> str:
    return str(pytree.tree_unflatten(["·"] * tree.num_leaves, tree)).replace("'·'", "·")


# ---- does it fit this machine?


def _place(path: str, contract: Contract, device: str | torch.device | None) -> int | None:
    """The index of the GPU to run on; None for the CPU."""
    kind = contract.target.device
    wanted = torch.device(kind if device is None else device)
    if wanted.type != kind:
        msg = f'it was made for {kind}, and cannot run on {wanted}: export it there, or load it with device="{kind}".'
        raise PackageError(path, "device", msg)
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        msg = f"it was made for {contract.target.gpu}, and torch sees no GPU here."
        raise PackageError(path, "device", msg)
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        msg = f"there is no cuda:{index} here: torch sees {torch.cuda.device_count()}."
        raise PackageError(path, "device", msg)
    return index


def _fits(path: str, contract: Contract, index: int | None) -> None:
    target, here = contract.target, str(torch.__version__)
    if contract.torch != here:
        msg = f"it was made by torch {contract.torch}, and this is {here}: export it anew with this torch."
        raise PackageError(path, "torch", msg)
    if (target.platform, target.machine) != (sys.platform, platform.machine()):
        msg = (
            f"it was made for {target.platform} on {target.machine}, and this is {sys.platform} on "
            f"{platform.machine()}: export it here."
        )
        raise PackageError(path, "cpu", msg)
    able = instructions()
    missing = [each for each in target.instructions if able and each not in able]
    missing += [each for each in target.isa.lower().split() if not _supports(each)]
    if missing:
        msg = (
            f"it was made for a CPU with {', '.join(dict.fromkeys(missing))}, which this one has not: export it on the "
            "oldest CPU that has to run it."
        )
        raise PackageError(path, "cpu", msg)
    if index is None:
        return
    capability = torch.cuda.get_device_capability(index)
    if capability != target.capability or torch.version.cuda != target.cuda:
        made = f"{target.gpu}, compute capability {_dotted(target.capability)}, CUDA {target.cuda}"
        msg = (
            f"it was made for {made}; cuda:{index} is {torch.cuda.get_device_name(index)}, {_dotted(capability)}, CUDA "
            f"{torch.version.cuda}: export it there."
        )
        raise PackageError(path, "gpu", msg)


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else ".".join(map(str, capability))


_X86 = re.compile(
    r"pni|s?sse\w*|popcnt|avx\w*|f16c|fma4?|bmi[12]|abm|movbe|adx|v?aes|v?pclmulqdq|gfni|sha\w*|sm[34]|amx\w*|xop|tbm"
    r"|rdrand|rdseed|fsgsbase|clflushopt|clwb|3dnowprefetch|xsave\w*|movdir\w*|serialize|cx16|lahf_lm"
)
"""The flags that a compiler may make use of."""


def instructions() -> tuple[str, ...]:
    """What the CPU can do, in Linux's words; empty where that cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = found[1].split() if found else []
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return tuple(sorted({each for each in words if not x86 or _X86.fullmatch(each)}))


def _supports(isa: str) -> bool:
    """Whether torch finds one of inductor's vector instruction sets here. One that it cannot be asked about may be."""
    ask = getattr(torch._C._cpu, f"_is_{isa}_supported", None)
    return bool(ask()) if ask is not None else True


def _at(contract: Contract, index: int | None) -> Contract:
    """The contract where the package was loaded."""
    moved = tuple(
        attrs.evolve(each, index=index) if isinstance(each, Input) and each.device == "cuda" else each
        for each in contract.inputs
    )
    return attrs.evolve(contract, inputs=moved)


def _loader(path: str, index: int | None) -> Any:
    # Untyped, and of more arguments from torch 2.7 on: (path, model, single-threaded, runners, device).
    make: Any = torch._C._aoti.AOTIModelPackageLoader
    try:
        # It makes the package's device the current one, and leaves it so.
        with contextlib.nullcontext() if index is None else torch.cuda.device(index):
            try:
                return make(path, "model", False, 1, -1 if index is None else index)
            except TypeError:
                if index:
                    msg = f"torch {torch.__version__} loads a package onto cuda:0 only, not cuda:{index}."
                    raise PackageError(path, "device", msg) from None
                return make(path, "model")
    except (RuntimeError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PackageError(path, "load", f"torch cannot load it: {first}") from error
