"""Process switches: what a host may turn on for its whole process, once, at its start. Off until it does.

Every one changes results, of the references and of `auto` too, in every model of the process. This is the one module of
fuseboard that writes torch's process-wide state, in `_set` and nowhere else; it is called before models are loaded (for
training, before the trainer):

```
from fuseboard.engine import features

features.apply(["tf32", "cudnn_benchmark"])        # or "tf32,cudnn_benchmark", or "all"
output["report"] = {**run.report(), **features.report()}
```

`report()` says what is really in force, read back from torch. Importing this module does nothing, and loads no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from fuseboard.errors import FuseboardError

__all__ = ["ALL", "SWITCHES", "Applied", "FeatureError", "Seen", "Switch", "apply", "describe", "report", "restored"]

log = logging.getLogger("fuseboard")

ALL = "all"
"""Every switch that speeds something up."""
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""`0` turns TF32 off inside NVIDIA's libraries, whatever torch says."""

_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_BACKENDS = "https://docs.pytorch.org/docs/stable/backends.html"


class FeatureError(FuseboardError, ValueError):
    """What was asked of the process switches cannot be done. Nothing was written.

    Attributes:
        names: The names at fault.
        nearest: Known names that resemble the first of them, best first.
    """

    def __init__(self, names: Iterable[str], message: str, *, nearest: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.nearest = tuple(nearest)


@attrs.frozen
class Seen:
    """What a switch did on one device, by `benchmarks/features.py`. Another device or version may take other kernels.

    Attributes:
        gains: Times as fast, by operation, of those that it could change, but for what lies within the noise.
        changed: The kinds of operation that it changed; empty for none.
        tried: What it could have changed and did not; empty where it changed some.
        device: The device, by torch's name for it.
        torch: torch's version.
        cuda: The version of CUDA that torch was built with.
    """

    gains: Mapping[str, float]
    changed: tuple[str, ...] = ()
    tried: str = ""
    device: str = "NVIDIA H200"
    torch: str = "2.11.0"
    cuda: str = "13.0"

    def __str__(self) -> str:
        what = f"other bits in {' and '.join(self.changed)}" if self.changed else f"the same bits in {self.tried}"
        gains = ", ".join(f"{gain:.2f} ({operation})" for operation, gain in self.gains.items())
        speed = f"times as fast: {gains}" if gains else "no time beyond the noise"
        return f"Seen on one {self.device}, torch {self.torch}, CUDA {self.cuda}: {what}; {speed}"


@attrs.frozen
class Switch:
    """One switch of the whole process.

    Attributes:
        name: What `apply` takes and `report` gives.
        sets: Values by the attribute or getter of torch that has them.
        devices: Where it has an effect.
        may: What it may do to results, in words.
        seen: What it did on one device.
        link: Where torch describes it.
        since: The first torch that has it; empty for all that fuseboard supports.
        speeds_up: Whether `all` has it. The others give back precision that torch trades for speed by itself.
        rounds_only: Whether it keeps arithmetic in the inputs' precision and range, so that last bits alone change.
        default: Whether torch starts with it on; it is then reported only when it was asked for.
        without: The switch that says the opposite; empty for none.
    """

    name: str
    sets: Mapping[str, bool]
    devices: str
    may: str
    seen: Seen
    link: str
    since: str = ""
    speeds_up: bool = True
    rounds_only: bool = True
    default: bool = False
    without: str = ""

    @property
    def effect(self) -> str:
        """What it may do to results, and what it was seen to do."""
        return f"{self.may} {self.seen}."

    @property
    def assignment(self) -> str:
        """What is written, as one would write it."""
        return "; ".join(
            f"torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp({value})" if what == _MATH else f"{what} = {value}"
            for what, value in self.sets.items()
        )


@attrs.frozen
class Applied:
    """What `apply` did.

    Attributes:
        asked: The switches asked for.
        in_force: Those that were on, read back from torch after writing, and have an effect in this process.
        refused: Why torch has not each of those that it lacks.
        late: Signs that something was computed or loaded before, under other switches; empty when there are none.
        without_effect: Why each of those that are on has no effect in this process.
    """

    asked: tuple[str, ...]
    in_force: tuple[str, ...]
    refused: Mapping[str, str] = attrs.field(factory=dict)
    late: tuple[str, ...] = ()
    without_effect: Mapping[str, str] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return {
            "asked": list(self.asked),
            "in_force": list(self.in_force),
            "refused": dict(self.refused),
            "late": list(self.late),
            "without_effect": dict(self.without_effect),
        }

    def __str__(self) -> str:
        lines = [f"in force: {', '.join(self.in_force) or 'nothing'}"]
        lines += [f"refused: {name}, {reason}" for name, reason in self.refused.items()]
        lines += [f"late: {each}" for each in self.late]
        lines += [f"without effect: {name}, {reason}" for name, reason in self.without_effect.items()]
        return "\n".join(lines)


# ---- the switches, and the torch attributes behind them

_FP16_ACCUMULATION = "torch.backends.cuda.matmul.allow_fp16_accumulation"
_TF32 = "torch.backends.cuda.matmul.allow_tf32"
_BENCHMARK = "torch.backends.cudnn.benchmark"
_FP16_REDUCTION = "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
_BF16_REDUCTION = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
_MATH = "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed"
_HALVES = "all 12 fp16 and bf16 products tried"

SWITCHES: dict[str, Switch] = {
    each.name: each
    for each in (
        Switch(
            name="fp16_accumulation",
            sets={_FP16_ACCUMULATION: True},
            since="2.7",
            rounds_only=False,
            devices="CUDA",
            may="fp16 matrix products add up in fp16 instead of fp32: fewer correct digits, and a partial "
            "sum beyond 65504 overflows.",
            seen=Seen(
                {
                    "fp16 product 64x65536x64": 0.73,
                    "fp16 decoder, prompt of 1024": 0.94,
                    "fp16 decoder, 16 steps of 8 rows": 0.92,
                },
                changed=("float16 products",),
            ),
            link=f"{_NOTES}#full-fp16-accmumulation-in-fp16-gemms",
        ),
        Switch(
            name="tf32",
            sets={_TF32: True},
            rounds_only=False,
            devices="CUDA 8.0+",
            may="fp32 matrix products read their inputs with 10 bits of mantissa instead of 23, those inside "
            "the math kernel of torch's attention too. Convolutions are left alone: their default is TF32 already.",
            seen=Seen(
                {
                    "fp32 product 4096x4096x4096": 7.82,
                    "bf16 math attention 4x16x1024x64": 1.39,
                    "fp32 decoder, prompt of 1024": 3.24,
                    "fp32 decoder, 16 steps of 8 rows": 1.59,
                },
                changed=("float32 products", "math attention"),
            ),
            link=f"{_NOTES}#tensorfloat-32-tf32-on-ampere-and-later-devices",
        ),
        Switch(
            name="cudnn_benchmark",
            sets={_BENCHMARK: True},
            devices="CUDA",
            may="cuDNN times its convolution algorithms for each new shape and keeps the fastest: another one may "
            "win on the next start, with other last bits. Each new length is a new search, and takes memory.",
            seen=Seen(
                {"fp32 convolution 256 to 256, width 11": 0.93, "fp16 convolution 256 to 256, width 11": 1.02},
                tried="all 3 convolutions tried",
            ),
            link=f"{_BACKENDS}#torch.backends.cudnn.torch.backends.cudnn.benchmark",
        ),
        Switch(
            name="reduced_precision",
            sets={_FP16_REDUCTION: True, _BF16_REDUCTION: True},
            devices="CUDA",
            may="Permits cuBLAS to add partial sums of fp16 and bf16 matrix products in that dtype. It is torch's own "
            "default: nothing changes unless somebody turned it off; asked for, it is listed.",
            seen=Seen({}, tried=_HALVES),
            link=f"{_NOTES}#reduced-precision-reduction-in-fp16-gemms",
            default=True,
            without="no_reduced_precision",
        ),
        Switch(
            name="no_reduced_precision",
            sets={_FP16_REDUCTION: False, _BF16_REDUCTION: False},
            devices="CUDA",
            may="Forbids cuBLAS to add partial sums of fp16 and bf16 matrix products in that dtype: they are added in "
            "fp32. No bit changes where it takes the same kernel either way.",
            seen=Seen({"fp16 product 64x65536x64": 0.96, "bf16 decoder, prompt of 1024": 0.99}, tried=_HALVES),
            link=f"{_NOTES}#reduced-precision-reduction-in-fp16-gemms",
            speeds_up=False,
            without="reduced_precision",
        ),
        Switch(
            name="math_reduction",
            sets={_MATH: True},
            devices="CPU, CUDA",
            may="The math kernel of torch's attention computes fp16 and bf16 in that dtype instead of fp32, on the "
            "CPU too, whatever torch's name for it says.",
            seen=Seen({"bf16 math attention 4x16x1024x64": 2.21}, changed=("math attention",)),
            link=f"{_BACKENDS}#torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        ),
    )
}


def _get(what: str) -> Any:
    """The value of one of torch's flags; None where this torch has no such flag, or cannot say."""
    import torch  # noqa: PLC0415 - not before somebody asks

    found: Any = torch
    try:
        for name in what.split(".")[1:]:
            found = getattr(found, name)
        return found() if callable(found) else found
    except (AttributeError, RuntimeError):  # RuntimeError: TF32 was set by the newer interface, asked by the older
        return None


def _set(what: str, value: Any) -> None:
    """Write one of torch's flags: the only place of fuseboard that does."""
    import torch  # noqa: PLC0415 - as above

    matmul = torch.backends.cuda.matmul
    if what == _FP16_ACCUMULATION:
        matmul.allow_fp16_accumulation = value  # fuseboard: allow(a host asked, once, at its start)
    elif what == _TF32:
        # The older interface sets the newer one too, so that every getter of both goes on working; not so the other
        # way round, and torch.compile reads the older one.
        matmul.allow_tf32 = value  # fuseboard: allow(a host asked, once, at its start)
    elif what == _BENCHMARK:
        torch.backends.cudnn.benchmark = value  # fuseboard: allow(a host asked, once, at its start)
    elif what == _FP16_REDUCTION:
        matmul.allow_fp16_reduced_precision_reduction = value  # fuseboard: allow(a host asked, once, at its start)
    elif what == _BF16_REDUCTION:
        matmul.allow_bf16_reduced_precision_reduction = value  # fuseboard: allow(a host asked, once, at its start)
    elif what == _MATH:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(value)  # fuseboard: allow(a host asked, at its start)
    elif what == _PRECISION:
        torch.set_float32_matmul_precision(value)  # fuseboard: allow(puts back what was there)
    elif what == _CPU_TF32:
        mkldnn = torch.backends.mkldnn
        mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]  # fuseboard: allow(puts back what was there)
    elif what == _NEW_TF32:
        matmul.fp32_precision = value  # fuseboard: allow(puts back what was there)


# What writing TF32 touches besides, in the order in which it can be put back.
_PRECISION = "torch.get_float32_matmul_precision"
_CPU_TF32 = "torch.backends.mkldnn.matmul.fp32_precision"
_NEW_TF32 = "torch.backends.cuda.matmul.fp32_precision"
_STATE = (
    _FP16_ACCUMULATION,
    _BENCHMARK,
    _FP16_REDUCTION,
    _BF16_REDUCTION,
    _MATH,
    _TF32,
    _PRECISION,
    _CPU_TF32,
    _NEW_TF32,
)
_SPLIT = "_split_k"
"""Ends the name of a reduction's second half, which newer versions of torch write as a pair."""


def _on(switch: Switch) -> bool:
    """Whether a switch is on now."""
    if _TF32 in switch.sets and (precision := _get(_NEW_TF32)) is not None:
        return bool(precision == "tf32")  # never raises, while the older interface may
    return all(_get(what) is value for what, value in switch.sets.items())


def _missing(switch: Switch) -> str | None:
    """The flag of torch that a switch needs and this version has not."""
    return next((what for what in switch.sets if what != _TF32 and _get(what) is None), None)


def _read_state() -> dict[str, Any]:
    return {what: (_get(what), _get(what + _SPLIT)) for what in _STATE}


def _put_back(state: Mapping[str, tuple[Any, Any]]) -> None:
    for what, (value, split) in state.items():
        if value is not None and (_get(what), _get(what + _SPLIT)) != (value, split):
            _set(what, value if split is None else (value, split))


_lock = threading.Lock()
_applied: Applied | None = None


def apply(names: str | Iterable[str], *, strict: bool = False) -> Applied:
    """Turn switches on for the whole process: once, by the host, at its start.

    The same names again give the same answer; other names are an error, for no half of a process may run under each.
    An empty list is a choice like any other.

    Args:
        names: Names of `SWITCHES`, as a list or separated by commas; `all` for every one that speeds something up.
        strict: A switch that the installed torch lacks is an error, not an entry of `refused`.

    Raises:
        FeatureError: A name is unknown, two contradict each other, others were applied before, or torch did not take
            a value. The switches are then as they were.
    """
    global _applied  # noqa: PLW0603 - this module owns the process's choice
    asked = _known(names)
    with _lock:
        if _applied is not None:
            if _applied.asked == asked:
                return _applied
            before, now = (", ".join(each) or "nothing" for each in (_applied.asked, asked))
            msg = (
                f"switches were applied already in this process: {before}; now asked: {now}. They are applied once, by "
                "the host, before models are loaded; name all of them there."
            )
            raise FeatureError(sorted({*asked} ^ {*_applied.asked}), msg)
        refused = {name: reason for name in asked if (reason := _unsupported(SWITCHES[name])) is not None}
        if refused and strict:
            msg = f"this torch lacks {'; '.join(f'{name}: {reason}' for name, reason in refused.items())}."
            raise FeatureError(refused, msg)
        late = tuple(_signs_of_lateness()) if asked else ()
        written = tuple(name for name in asked if name not in refused)
        _write(written)
        idle = {name: reason for name in written if (reason := _idle(SWITCHES[name])) is not None}
        answer = Applied(asked, tuple(name for name in written if name not in idle), refused, late, idle)
        _applied = answer
    for name, reason in refused.items():
        log.warning("switch %s is not applied: %s", name, reason)
    if late:
        log.warning(
            "switches applied late: %s. What was computed or chosen before had other numbers; call "
            "fuseboard.engine.features.apply first.",
            "; ".join(late),
        )
    return answer


def report() -> dict[str, Any]:
    """What is in force now, to be put beside an output: `{"params": {"fast": ["tf32"]}}`.

    Read back from torch, not remembered. `fast` has the switches that are on, have an effect in this process, and were
    applied or are none that torch turns on by itself, whoever did; where that is not what `apply` was asked for,
    `params` has `warnings` too.
    """
    if "torch" not in sys.modules:
        return {"params": {"fast": []}}
    applied = {*_applied.in_force, *_applied.without_effect} if _applied is not None else set()
    fast: list[str] = []
    warnings: list[str] = []
    for name, switch in SWITCHES.items():
        on = _on(switch)
        if name in applied and not on:
            warnings.append(f"{name} was applied and is off: somebody changed it since")
        elif on and (name in applied or not switch.default):
            idle = _idle(switch)
            if idle is not None:
                warnings.append(f"{name} is on, and without effect: {idle}")
                continue
            fast.append(name)
            if name not in applied:
                warnings.append(f"{name} is on and was not applied by fuseboard: somebody else set it")
    return {"params": {"fast": fast, **({"warnings": warnings} if warnings else {})}}


def describe() -> str:
    """Every switch in words; reads and writes nothing."""
    return "\n".join(
        f"{each.name}\n    {each.assignment}\n    {each.effect}\n    "
        f"{each.devices}; {f'torch {each.since} and newer' if each.since else 'every torch'}; {each.link}"
        for each in SWITCHES.values()
    )


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put everything back when the block ends, and forget what was applied in it. For tests.

    Every flag reads as before; but one that could not be read, since TF32 had been set by torch's newer interface and
    is asked by the older, is left readable.
    """
    global _applied  # noqa: PLW0603 - as above
    with _lock:
        before, state = _applied, _read_state()
        _applied = None
    try:
        yield
    finally:
        with _lock:
            _put_back(state)
            _applied = before


# ---- how


def _known(names: str | Iterable[str]) -> tuple[str, ...]:
    """The switches of these names, in the order of `SWITCHES`."""
    given = names.split(",") if isinstance(names, str) else list(names)
    wanted: set[str] = set()
    for each in given:
        if not isinstance(each, str):
            msg = f"a switch is named by a string; got {each!r}. Known: {', '.join([*SWITCHES, ALL])}."
            raise FeatureError([repr(each)], msg)
        name = each.strip()
        if name == ALL:
            wanted |= {switch.name for switch in SWITCHES.values() if switch.speeds_up}
        elif name in SWITCHES:
            wanted.add(name)
        elif name or not isinstance(names, str):
            nearest = difflib.get_close_matches(name, [*SWITCHES, ALL], n=3)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            msg = f"no switch is called {name!r}.{hint} Known: {', '.join([*SWITCHES, ALL])}."
            raise FeatureError([name], msg, nearest=nearest)
    for name, switch in SWITCHES.items():
        if name in wanted and switch.without in wanted:
            msg = f"{name} and {switch.without} contradict each other; name one of them."
            raise FeatureError([name, switch.without], msg)
    return tuple(name for name in SWITCHES if name in wanted)


def _unsupported(switch: Switch) -> str | None:
    import torch  # noqa: PLC0415 - as above

    missing = _missing(switch)
    if missing is None:
        return None
    needs = f"torch {switch.since} or newer" if switch.since else "another build of torch"
    return f"needs {needs}; this is torch {torch.__version__}, which has no {missing}"


def _write(names: Iterable[str]) -> None:
    """Write, and read back; all or none."""
    state = _read_state()
    for name in names:
        switch = SWITCHES[name]
        if name == "tf32" and _tf32_agrees():
            continue  # after set_float32_matmul_precision("medium"), writing it once more would make getters raise
        why = None
        try:
            for what, value in switch.sets.items():
                _set(what, value)
        except RuntimeError as error:  # torch's flags can be frozen
            why = str(error)
        if why is None and _on(switch) and (name != "tf32" or _tf32_agrees()):
            continue
        _put_back(state)
        why = why or f"it reads {', '.join(f'{_get(what)!r}' for what in switch.sets)} afterwards"
        msg = f"torch did not take {switch.assignment}: {why}. Every switch is as it was."
        raise FeatureError([name], msg)


def _tf32_agrees() -> bool:
    """Whether TF32 is on by every getter of torch's two interfaces, and none of them raises."""
    return _get(_TF32) is True and _get(_PRECISION) in ("high", "medium") and _get(_NEW_TF32) in ("tf32", None)


def _idle(switch: Switch) -> str | None:
    """Why a switch has no effect in this process, whatever torch's flag says; None where it may have one."""
    import torch  # noqa: PLC0415 - as above

    # Whether the machine has a GPU is not asked: asking would begin what must come after.
    if torch.version.cuda is None and torch.version.hip is None:
        reaches_cpu = "CPU" in switch.devices or (switch.name == "tf32" and _cpu_multiplies_in_tf32())
        return None if reaches_cpu else f"torch {torch.__version__} is built without CUDA"
    if switch.name == "tf32" and os.environ.get(TF32_OVERRIDE) == "0":
        return f"{TF32_OVERRIDE}=0 turns it off inside NVIDIA's libraries"
    return None


def _cpu_multiplies_in_tf32() -> bool:
    """Whether the flags of TF32 reach the CPU's matrix products."""
    import torch  # noqa: PLC0415 - as above

    precision = _get(_CPU_TF32)
    if precision is not None:
        return bool(precision == "tf32")
    # Before torch 2.9 one flag holds for oneDNN too, which follows it on CPUs that have such products.
    has_products = getattr(torch.cpu, "_is_amx_fp16_supported", None)
    return has_products is not None and bool(has_products())


def _signs_of_lateness() -> Iterator[str]:
    """What shows that this process has computed, or is about to with what it has loaded."""
    import torch  # noqa: PLC0415 - as above

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield "CUDA was initialised before"
    kinds = Counter(
        type(each).__name__
        for each in gc.get_objects()
        # By type(): isinstance would ask proxies for their class, and wake them.
        if issubclass(type(each), torch.nn.Module) and _has_weights(each)
    )
    if kinds:
        count = f"{kinds.total()} module{'s' * (kinds.total() != 1)}"
        yield f"{count} with weights loaded before, such as {kinds.most_common(1)[0][0]}"
    registry = sys.modules.get("fuseboard.registry")
    current = getattr(registry, "_current", None)
    asked = sorted(f"{name} on {device}" for name, device in list(current.verdicts if current is not None else ()))
    if asked:
        yield f"backends probed before: {', '.join(asked)}"


def _has_weights(module: Any) -> bool:
    # vars(): a module whose constructor has not run has no parameters to ask for.
    return any(each is not None for each in vars(module).get("_parameters", {}).values())
