"""`export`: torch.export, AOTInductor, and the contract of what came out.

The contract is read from the graph that was compiled: sizes as torch's expressions of symbols, with the ranges and
guards that tracing and inductor arrived at. What the caller asked for is only compared with it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuseboard.engine.aot import archive
from fuseboard.engine.aot.compiler import check_compiler
from fuseboard.engine.aot.contract import Constant, Contract, Input, Target
from fuseboard.engine.aot.errors import ExportError
from fuseboard.engine.aot.graph import (
    GraphSizes,
    attention_guards,
    index_guards,
    input_of,
    number_of,
    output_of,
    value_limits,
)
from fuseboard.engine.aot.package import instructions
from fuseboard.engine.aot.tracing import attention_in_trace
from fuseboard.policy import Policy, policy_for

__all__ = ["Exported", "export"]

log = logging.getLogger("fuseboard")

# Tracing and inductor keep tables of the process, and say themselves that they are not for threads.
_one_at_a_time = threading.Lock()


@attrs.frozen
class Exported:
    """A package that was written. Stands for its path.

    Attributes:
        path: The file.
        sha256: Of the file, for whoever loads it elsewhere.
        contract: What it takes.
        meta: The caller's own, as it will be read back.
        seconds: How long `export` (tracing) and `compile` (and packaging) took.
    """

    path: Path
    sha256: str
    contract: Contract
    meta: Any
    seconds: Mapping[str, float]

    def __fspath__(self) -> str:
        return str(self.path)


def export(
    model: nn.Module,
    inputs: tuple[Any, ...] | list[Any] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    names: tuple[str, ...] | None = None,
    policy: Policy | str | Mapping[str, Policy | str] = "auto",
    meta: Any = None,
    inductor_configs: Mapping[str, Any] | None = None,
) -> Exported:
    """Compile a model into one file; `load` needs neither the model's code nor a compiler.

    Args:
        model: In the mode, dtype and place in which it is to run.
        inputs: An example of its arguments: a tuple of positional ones, or a mapping of those given by name. Sizes are
            fixed to the example's unless `dynamic_shapes` says otherwise.
        path: Ends in `.pt2`. It is written under another name and renamed: there is a whole package, or what was there
            before.
        kwargs: Arguments given by name, beside positional ones.
        dynamic_shapes: As for `torch.export.export`.
        names: What messages and keyword arguments call the inputs; None for their names in `forward`.
        policy: Which kernels `fuseboard.attention` calls in the package, decided here by running the example.
        meta: Anything that JSON takes, for `Package.meta`.
        inductor_configs: For AOTInductor.

    Raises:
        ExportError: The package would not do what the model does.
        NotFrozenError: The trace made another kind of attention call than the example.
        TypeError, ValueError: An argument cannot be right.
    """
    path, args, kwargs = Path(path), *_arguments(model, inputs, kwargs)
    if path.suffix != ".pt2":
        msg = f"path is {path}; expected a name that ends in .pt2, which torch's loader insists on."
        raise ValueError(msg)
    meta = json.loads(json.dumps(meta))  # what cannot be written should fail before a minute of compilation
    if torch._C._is_any_autocast_enabled():
        msg = (
            "export was called under autocast, and a package would not be: the casts of the trace fail to compile, or "
            "are wrong outside of it. Leave autocast, and give the weights the dtype that is to be computed in: "
            "copy.deepcopy(model).to(torch.bfloat16)."
        )
        raise ExportError("autocast", msg)
    device = _device_of(model, args, kwargs)
    _check_example(args, kwargs)
    check_compiler()
    with _one_at_a_time, torch.inference_mode(False), torch.no_grad(), _quiet():
        began = time.perf_counter()
        args, named = pytree.tree_map_only(Tensor, _alone, (args, kwargs))
        with attention_in_trace(model, args, named, policy_for(policy)) as answers:
            program = torch.export.export(model, args, named, dynamic_shapes=dynamic_shapes, strict=False)
        _check_outputs(program)
        written_into = _written(program)
        traced = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
        try:
            written = folder / path.name
            _compile(program, written, inductor_configs)
            contract = _contract(program, model, device, names, dynamic_shapes, written_into)
            contract = attrs.evolve(contract, policy=policy_for(policy).name, attention=answers)
            digest = archive.seal(written, {"contract": contract.data(), "meta": meta})
            os.replace(written, path)  # noqa: PTH105 - Path.replace does the same
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        done = time.perf_counter()
    for note in contract.notes:
        log.warning("%s: %s", path.name, note)
    return Exported(path, digest, contract, meta, {"export": traced - began, "compile": done - traced})


def _arguments(model: Any, inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(model, nn.Module):
        msg = f"model is a {type(model).__name__}; expected an nn.Module, as torch.export does."
        raise TypeError(msg)
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        twice = sorted(inputs.keys() & named.keys())
        if twice:
            msg = f"{', '.join(twice)}: given in inputs and in kwargs."
            raise ValueError(msg)
        return (), {**inputs, **named}
    if not isinstance(inputs, (tuple, list)):
        msg = f"inputs is a {type(inputs).__name__}; expected a tuple of the model's arguments, or a mapping by name."
        raise TypeError(msg)
    return tuple(inputs), named


def _device_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    found = {each.device for each in (*model.parameters(), *model.buffers(), *tensors)}
    gpus = sorted(str(each) for each in found if each.type != "cpu")
    if len(gpus) > 1 or any(each.type not in ("cpu", "cuda") for each in found):
        msg = (
            f"the model and its inputs are on {', '.join(sorted(map(str, found)))}; a package runs on the CPU, or on "
            "one CUDA device: move them there."
        )
        raise ExportError("device", msg)
    return torch.device(gpus[0] if gpus else "cpu")


def _check_example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for keys, each in pytree.tree_flatten_with_path((args, kwargs))[0]:
        name = pytree.keystr(keys)
        if not isinstance(each, Tensor):
            if each is None or isinstance(each, (bool, int, float, str)):
                continue
            msg = f"input {name} is a {type(each).__name__}; a package takes tensors, and None, numbers, text as fixed."
            raise ExportError("input", msg)
        if each.layout != torch.strided or each.is_nested:
            msg = f"input {name} is {each.layout}; a package takes strided tensors: give {name}.to_dense()."
            raise ExportError("input", msg)
        if any(stride == 0 and size > 1 for size, stride in zip(each.shape, each.stride(), strict=True)):
            msg = (
                f"input {name} is expanded (strides {each.stride()}), and the package would read every input so: give "
                "the example .contiguous()."
            )
            raise ExportError("input", msg)


def _alone(given: Tensor) -> Tensor:
    """A copy in the same layout: of one tensor that is given twice, the graph would read the last input alone."""
    memory = given.detach().untyped_storage().clone()  # type: ignore[no-untyped-call]
    alone = torch.empty(0, dtype=given.dtype, device=given.device)
    return alone.set_(memory, given.storage_offset(), given.shape, given.stride())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's deprecation warnings of its own code, which are errors where warnings are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def _compile(program: Any, path: Path, configs: Mapping[str, Any] | None) -> None:
    from torch._inductor.exc import CppCompileError  # noqa: PLC0415 - inductor, for those who export

    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(configs or {}))
    except CppCompileError as error:
        sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
        if all(not isinstance(each, torch.SymInt) or each.node.expr.is_Symbol for each in sizes):
            raise
        msg = (
            f"the C++ code that torch {torch.__version__} wrote does not compile. torch 2.6 fails so at sizes that are "
            "computed, such as 16 * Dim(...): use a newer one, or Dim.AUTO in their place; the package checks "
            "multiples all the same."
        )
        raise ExportError("sizes", msg) from error


# ---- what came out


def _written(program: Any) -> set[str]:
    """The inputs that the model writes into. The graph as exported still has that inside; a functional one tells."""
    signature = program.run_decompositions({}).graph_signature
    if signature.buffers_to_mutate:
        names = ", ".join(sorted(signature.buffers_to_mutate.values()))
        msg = (
            f"the model writes into its buffers {names}: a package would keep that to itself, call by call. Call "
            "model.eval(), or make the state an input and an output."
        )
        raise ExportError("state", msg)
    return set(signature.user_inputs_to_mutate.values())


def _check_outputs(program: Any) -> None:
    for i, spec in enumerate(each for each in program.graph_signature.output_specs if each.kind.name == "USER_OUTPUT"):
        if type(spec.arg).__name__ != "TensorArgument":
            what = repr(spec.arg.value) if hasattr(spec.arg, "value") else type(spec.arg).__name__
            msg = f"output {i} of the model is no tensor but {what}; a package gives tensors: leave it out, or wrap it."
            raise ExportError("output", msg)


def _contract(
    program: Any,
    model: nn.Module,
    device: torch.device,
    names: tuple[str, ...] | None,
    dynamic_shapes: Any,
    written: Collection[str],
) -> Contract:
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [each.arg for each in signature.input_specs if each.kind.name == "USER_INPUT"]
    outputs = [each.arg for each in signature.output_specs if each.kind.name == "USER_OUTPUT"]
    in_tree, out_tree = program.call_spec.in_spec, program.call_spec.out_spec
    args_tree, kwargs_tree = in_tree.children_specs if hasattr(in_tree, "children_specs") else in_tree.children()
    positional, keywords = args_tree.num_children, tuple(kwargs_tree.context or ())
    flat = in_tree.num_leaves == positional + len(keywords)
    names = _names(model, names, [each.name for each in inputs], positional, keywords if flat else None)
    sizes = GraphSizes(nodes[each.name].meta["val"] for each in inputs if each.name in nodes)
    limits = value_limits(program, sizes)
    taken: list[Input | Constant] = []
    for name, each in zip(names, inputs, strict=True):
        value = nodes[each.name].meta.get("val") if type(each).__name__ == "TensorArgument" else None
        if isinstance(value, Tensor):
            made_of = input_of(name, value, sizes, each.name in written, device)
            taken.append(attrs.evolve(made_of, values=limits.get(each.name, ())))
        elif hasattr(each, "value"):
            taken.append(Constant(name, each.value))
        else:
            msg = f"input {name} is a number that may change; a package takes tensors: make it one."
            raise ExportError("input", msg)
    made = Contract(
        inputs=tuple(taken),
        outputs=tuple(output_of(nodes[each.name].meta["val"], sizes) for each in outputs),
        symbols=sizes.symbols(),
        guards=tuple(dict.fromkeys((*sizes.guards(), *attention_guards(program, sizes), *index_guards(taken, device)))),
        positional=positional,
        keywords=keywords,
        flat=flat,
        trees=(pytree.treespec_dumps(in_tree), pytree.treespec_dumps(out_tree)),
        notes=(),
        target=_target(device),
        torch=str(torch.__version__),
        fuseboard=importlib.metadata.version("fuseboard"),
        policy="",
        attention={},
    )
    _determined(made)
    forward = _names(model, None, [each.name for each in inputs], positional, keywords if flat else None)
    return attrs.evolve(made, notes=(*_notes(made, forward, dynamic_shapes), *_draws(model)))


def _names(
    model: nn.Module,
    names: tuple[str, ...] | None,
    placeholders: list[str],
    positional: int,
    keywords: tuple[str, ...] | None,
) -> tuple[str, ...]:
    if names is not None:
        if len(names) != len(placeholders) or len(set(names)) != len(names):
            msg = f"names is {names}; expected a different one for each of {', '.join(placeholders)}."
            raise ValueError(msg)
        return tuple(names)
    if keywords is None:
        return tuple(placeholders)
    parameters = [
        each.name
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    first = parameters[:positional] if len(parameters) >= positional else placeholders[:positional]
    return (*first, *keywords)


def _target(device: torch.device) -> Target:
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # noqa: PLC0415 - inductor, for those who export

    gpu = device.type == "cuda"
    return Target(
        sys.platform, platform.machine(), str(pick_vec_isa()).upper(), instructions(), device.type,
        torch.cuda.get_device_name(device) if gpu else None,
        torch.cuda.get_device_capability(device) if gpu else None,
        torch.version.cuda if gpu else None,
    )  # fmt: skip


def _determined(made: Contract) -> None:
    """Every symbol has to follow from a size, or a call of any sizes would pass."""
    unknown = made.symbols.keys() - made.owners().keys()
    if unknown:
        msg = (
            f"{', '.join(sorted(unknown))} in the graph's sizes or strides follows from no input's size, so that calls "
            "could not be checked. Give contiguous examples, and each dynamic size an input where it stands alone."
        )
        raise ExportError("sizes", msg)


# ---- what was asked for


def _notes(made: Contract, names: tuple[str, ...], dynamic_shapes: Any) -> Iterator[str]:
    """Where the package takes something else than `dynamic_shapes` said; `names` are forward's own."""
    if not made.flat or dynamic_shapes is None:
        return
    by_name = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(names, dynamic_shapes, strict=False))
    for name, each in zip(names, made.inputs, strict=True):
        spec = by_name.get(name)
        if not isinstance(each, Input) or not isinstance(spec, (Mapping, tuple, list)):
            continue
        for axis, wish in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            size, asked = each.sizes[axis], _asked(wish)
            if asked is not None and asked != (size.low, size.high):
                low, high = asked
                said = f"{low} or more" if high is None else f"{low} to {high}"
                why = " (torch.export sets sizes 0 and 1 apart: export them by themselves)" if size.low > low else ""
                yield f"size {axis} of {each.name} was to be {said}; the package takes {size}{why}."
            elif size.fixed and type(wish).__name__ == "_DimHint" and "STATIC" not in str(wish):
                yield f"size {axis} of {each.name} was to be dynamic; the package takes {size} only."


def _draws(model: nn.Module) -> Iterator[str]:
    if any(each.training and isinstance(each, nn.modules.dropout._DropoutNd) for each in model.modules()):
        yield "the model's dropout is on, and so in the package: model.eval() turns it off."


def _asked(wish: Any) -> tuple[int, int | None] | None:
    """The bounds of a `Dim`, or of what was computed from one; None where none were given."""
    root = getattr(wish, "root", wish)
    low, high = number_of(getattr(root, "min", None)), number_of(getattr(root, "max", None))
    if low is None and high is None:
        return None
    fn = getattr(wish, "fn", None)
    if fn is not None and root is not wish:
        return int(fn(low or 0)), None if high is None else int(fn(high))
    return low or 0, high
