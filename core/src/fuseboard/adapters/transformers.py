"""transformers models on the board: `register()` once, then load a model with `attn_implementation="fuseboard"`.

```python
from fuseboard.adapters import transformers

transformers.register()
model = AutoModel.from_pretrained(path, attn_implementation="fuseboard")
run = fb.Run()
with fb.bind("fast", run=run):
    model(**inputs)
```

Each attention class of a model is a site, `transformers.LlamaAttention.causal`, one for each of its kinds. With nothing
bound the result is that of `attn_implementation="sdpa"` bit for bit: a site's reference *is* transformers' own sdpa
function, and the dense mask is made by transformers' own sdpa mask function. The structure behind that mask travels
beside it, so that backends may use it.

Needs transformers 4.57 or newer. Under `torch.compile` the graph breaks at every mask and attention call, because a
compiled graph cannot read what is bound; not so under `fuseboard.engine.freeze`'s `with frozen.tracing():`, where mask
and attention are traced. A structure does not pass through a graph: there backends have the dense mask. Train, and
checkpoint, under `fuseboard.bind_process`: backward and the second forward run on threads that see no other binding.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fuseboard import context
from fuseboard.chain import REFERENCE, Route
from fuseboard.constraints import Refusal
from fuseboard.dispatch import attention
from fuseboard.errors import InputError, RefusedError
from fuseboard.masks import MaskInfo, Padding, mask_for
from fuseboard.site import Site

try:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        AttentionMaskInterface,
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )
except ImportError as error:
    _msg = (
        f"fuseboard.adapters.transformers needs transformers 4.57 or newer ({error}): pip install 'transformers>=4.57'"
    )
    raise ImportError(_msg) from error

__all__ = ["register"]

SDPA: Final = "sdpa"

_tracing = torch.compiler.is_dynamo_compiling

# Typed loosely: they are duck-typed where it matters, and transformers' annotations differ between its versions.
_sdpa: Any = sdpa_attention_forward
_sdpa_mask: Any = sdpa_mask
_attentions: Any = AttentionInterface
_masks: Any = AttentionMaskInterface

_SPARSE = 'a choice of keys instead of a mask; register("sdpa") and load the model with attn_implementation="sdpa"'
_EAGER = 'which sdpa would leave out; load the model with attn_implementation="eager"'
REFUSED: Final = {
    "softcap": f"a soft cap on the scores, {_EAGER}",
    "s_aux": f"attention sinks, {_EAGER}",
    "sinks": f"attention sinks, {_EAGER}",
    "head_mask": f"a factor for every head, {_EAGER}",
    "layer_head_mask": f"a factor for every head, {_EAGER}",
    "output_attentions": f"a wish for the attention weights, {_EAGER}",
    "indices": _SPARSE,
    "block_indices": _SPARSE,
}
"""Arguments that change the result and that transformers' sdpa has no place for: what they mean, and what to do."""
PAGED: Final = ("block_table", "read_index", "write_index")
"""Arguments of continuous batching, which makes the mask that sdpa needs for the name `sdpa` alone."""

_sites: dict[str, Site] = {}
_sites_lock = threading.Lock()


def register(name: str = "fuseboard", *, padding: Padding | None = None) -> None:
    """Make `attn_implementation=name` mean the board. Calling it again changes nothing, but for the padding.

    Args:
        name: What models are loaded with. `sdpa`, transformers' default, puts every model of the process on the board,
            and is the only name for models whose code asks whether it is called `sdpa`: any other is refused there.
        padding: On which side the padding of every batch lies that models of this name are given on a GPU: `right` or
            `left`, as the tokenizer's `padding_side`. More backends take such keys than keys padded anyhow, and to find
            it out would be to wait for the device. It is checked there, without waiting: a batch padded otherwise is a
            device-side assert, an error at the next wait. On the CPU it is read off the batch, and this is not needed.

    Raises:
        ValueError: transformers has another attention of that name already, or the side is none.
    """
    if padding not in _padded:
        msg = f"padding is {padding!r}; expected 'right', 'left' or None."
        raise ValueError(msg)
    if not isinstance(name, str) or not name.strip():
        msg = f"name is {name!r}; expected a word such as 'fuseboard'."
        raise ValueError(msg)
    taken = _attentions().get(name)
    if name == "eager" or (taken is not None and taken is not attend and name != SDPA):
        msg = f"transformers has an attention called {name!r} already; choose a name of its own, or 'sdpa'."
        raise ValueError(msg)
    _masks.register(name, _padded[padding])
    _attentions.register(name, attend)


# --- attention --------------------------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call.

    Args:
        module: The attention layer.
        query: `(batch, heads, q_length, head_dim)`.
        key: `(batch, kv_heads, k_length, head_dim)`.
        value: `(batch, kv_heads, k_length, v_head_dim)`.
        attention_mask: Boolean or additive; None when nothing is hidden but by causality.
        dropout: Probability of dropping a weight.
        scaling: Of the scores.
        is_causal: Whether a layer without a mask is causal; None asks the layer.
        **rest: What else the model passes. What sdpa cannot honour is refused, the rest is what sdpa ignores too.

    Returns:
        `(batch, q_length, heads, v_head_dim)`, and None for the weights.

    Raises:
        InputError: An argument would have to be dropped, or the model treats this implementation unlike sdpa.
    """
    if _tracing():
        traced: Any = getattr(context.in_graphs, "attention", None)
        known = None if traced is None else _traceable(module, query, key, value, attention_mask, rest)
        if known is not None:
            if is_causal is None or not known.obeys_is_causal:
                flag = known.causal if is_causal is None else bool(is_causal)
                is_causal = flag and attention_mask is None and _decided(query.shape[2] > 1)
            gqa = getattr(module, "num_key_value_groups", None) is not None
            out = traced(
                query, key, value, site=known.site, mask=attention_mask, causal=is_causal, scale=scaling,
                enable_gqa=gqa, dropout_p=dropout,
            )  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
    answer: tuple[Tensor, None] = _attend(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **rest
    )
    return answer


@torch.compiler.disable  # type: ignore[untyped-decorator]  # selection reads context variables, which no graph can
def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    flag = bool(getattr(module, "is_causal", True))
    known = _layers.get(module)
    if known is None or known.causal is not flag:
        known = _layers[module] = _look_at(module, causal=flag)
    site = known.site
    _refuse(module, known, rest)
    groups = getattr(module, "num_key_value_groups", None)
    why = _unsaid(query, key, value, attention_mask, groups or 1, rest)
    if why is not None:
        _note(site, why)
        out, _ = _sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **rest
        )
        return out, None
    if is_causal is None or not _obeys_is_causal():
        flag = flag if is_causal is None else bool(is_causal)
        is_causal = flag and attention_mask is None and query.shape[2] > 1
    if attention_mask is None and getattr(context.in_graphs, "frozen_for", False):
        _as_traced(query, key, value, site, causal=is_causal, scale=scaling, gqa=groups is not None, dropout=dropout)
    out = attention(
        query,
        key,
        value,
        site=site,
        mask=attention_mask,
        causal=is_causal,
        scale=scaling,
        enable_gqa=groups is not None,
        dropout_p=dropout,
        mask_info=_info_of(attention_mask, query, key),
    )
    return out.transpose(1, 2).contiguous(), None


def _traceable(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rest: dict[str, Any]
) -> _Known | None:
    """What is known of a layer whose call can be traced; None leaves it to `_attend`, outside of the graph.

    Read by dynamo: sizes are compared by branches, and nothing is looked up but attributes by name, which it guards.
    """
    known: _Known | None = getattr(_for_graphs, _kind(module, causal=bool(getattr(module, "is_causal", True))), None)
    if known is None or (known.unlike is not None and not _is_called_sdpa(getattr(module, "config", None))):
        return None
    for argument, given in rest.items():
        if given is None or given is False:
            continue
        if argument == "position_bias" or argument in REFUSED or argument in PAGED:
            return None
    groups = getattr(module, "num_key_value_groups", None) or 1
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:  # noqa: PLR2004
        return None
    for have, want in (
        (key.shape[0], value.shape[0]), (key.shape[1], value.shape[1]), (key.shape[2], value.shape[2]),
        (query.shape[0], key.shape[0]), (query.shape[1], key.shape[1] * groups),
    ):  # fmt: skip
        if have != want:
            return None
    if mask is not None and mask.shape[-1] != 1 and mask.shape[-1] != key.shape[2]:
        return None
    return known


def _as_traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    site: Site,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool,
    dropout: float,
) -> None:
    """Make a call without a mask as a graph may have it, so that it is frozen too: there transformers reads no padding.

    What it finds to hide nothing here, or no more than causality does, is a dense mask there.
    """
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    mask = torch.ones(shape, dtype=torch.bool, device=query.device)
    with contextlib.suppress(Exception):  # a strict policy may have nobody for it: then it is not frozen
        attention(
            query, key, value, site=site, mask=mask.tril() if causal else mask, scale=scale, enable_gqa=gqa,
            dropout_p=dropout,
        )  # fmt: skip


def _decided(condition: object) -> bool:
    if condition:  # noqa: SIM103 - a branch on a symbolic size is a guard; a symbolic truth value is no bool
        return True
    return False


class _Layer(NamedTuple):
    num_key_value_groups: int


class _PlainLayer(NamedTuple):
    """A layer that says nothing of groups."""


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """What transformers' sdpa makes of a call: it alone decides how heads are shared.

    Args:
        q: As in `attention`, like the arguments that follow.
        k: Likewise.
        v: Likewise.
        mask: Likewise.
        causal: Likewise.
        scale: Likewise.
        enable_gqa: The layer says how many query heads share a key head, be it one.
        dropout_p: Likewise.
    """
    layer = _Layer(q.shape[1] // k.shape[1]) if enable_gqa else _PlainLayer()
    out: Tensor
    out, _ = _sdpa(layer, q, k, v, mask, dropout=dropout_p, scaling=scale, is_causal=causal)
    return out.transpose(1, 2)


@functools.cache
def _obeys_is_causal() -> bool:
    """Whether sdpa takes `is_causal=True` as it is (transformers 4), or drops it for one query and beside a mask."""
    one, values = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    out, _ = _sdpa(_PlainLayer(), one, values * 0, values, None, is_causal=True)
    return bool(out.item() == 0.0)


def _unsaid(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: int, rest: dict[str, Any]
) -> str | None:
    """What a call has that `attention` has no words for, so that sdpa answers it directly; None for most calls."""
    if rest.get("position_bias") is not None:
        return "position bias"
    if torch._C._get_tracing_state() is not None or not isinstance(query, Tensor):
        return "tracing"
    if query.dim() != 4 or key.dim() != 4 or key.shape[:3] != value.shape[:3]:  # noqa: PLR2004
        return "shapes that broadcast"
    if query.shape[0] != key.shape[0] or query.shape[1] != key.shape[1] * groups:
        return "shapes that broadcast"
    if mask is not None and mask.shape[-1] not in (1, key.shape[2]):
        return "mask longer than the keys"
    return None


@functools.cache
def _direct(policy: str, why: str) -> Route:
    return Route(REFERENCE, () if policy == "auto" else ((policy, why),))


def _note(site: Site, why: str) -> None:
    """Record a call that sdpa answers directly as a fallback to the reference, which it is; strictly, none is made."""
    binding = context.bound()
    if binding is None:
        return
    policy = binding.policy.for_site(site.name)
    if policy.strict and site.swappable and policy.name != "auto":
        refusal = Refusal(policy.name, "adapter", why, "what fuseboard.attention can be told", None, why)
        msg = f"policy {policy.name!r} (strict) cannot run site {site.name!r}: {refusal}"
        raise RefusedError(policy.name, site.name, msg, [refusal])
    if binding.run is not None:
        binding.run.tick(_direct(policy.name, why))


class _Known(NamedTuple):
    """What is found out about a layer once.

    Attributes:
        causal: Its flag, at that time.
        site: Where its calls go.
        unlike: Why it would not give sdpa's result under another name, or None.
        obeys_is_causal: Whether sdpa takes `is_causal` as it is.
    """

    causal: bool
    site: Site
    unlike: str | None
    obeys_is_causal: bool


_layers: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()

# The same where dynamo can read and guard it, and where nothing else of it changes: by `_kind`, as attributes. And for
# mask functions, by `_models`: whether all seen treat this implementation like sdpa.
_for_graphs = types.SimpleNamespace()


def _kind(module: torch.nn.Module, *, causal: bool) -> str:
    return _identifier(f"{type(module).__module__}.{_site_name(module, causal=causal)}")


def _identifier(dotted: str) -> str:
    """A name that a guard can be written with; what cannot be one is looked up in vain, and so not traced."""
    name = dotted.replace(".", "__")
    return name if name.isidentifier() else "unnamed"


def _models(config: Any) -> str:
    # By a word in it: dynamo of torch 2.6 does not know a configuration's class.
    return _identifier(f"models_{getattr(config, 'model_type', None)}".replace("-", "_"))


def _tell_graphs(name: str, value: object) -> None:
    if name != "unnamed":
        setattr(_for_graphs, name, value)


def _look_at(module: torch.nn.Module, *, causal: bool) -> _Known:
    known = _Known(causal, _site(module, causal=causal), _unlike_sdpa(type(module).__module__), _obeys_is_causal())
    _tell_graphs(_kind(module, causal=causal), known)
    return known


def _is_called_sdpa(config: object) -> bool:
    return getattr(config, "_attn_implementation", None) == SDPA


def _refuse(module: torch.nn.Module, known: _Known, rest: dict[str, Any]) -> None:
    name = type(module).__name__
    if known.unlike is not None and not _is_called_sdpa(getattr(module, "config", None)):
        raise _unlike_error(name, known.unlike)
    for argument, value in rest.items():
        if value is None or value is False:
            continue
        if argument in REFUSED:
            msg = f"{name} passes {argument}: {REFUSED[argument]}."
            raise InputError(argument, msg)
        if argument in PAGED and not _is_called_sdpa(getattr(module, "config", None)):
            msg = (
                f"{name} runs under continuous batching, which makes masks for the name 'sdpa' alone. "
                'Call register("sdpa") and load the model with attn_implementation="sdpa".'
            )
            raise InputError(argument, msg)


_ASKS = re.compile(r"_attn_implementation\b[^\n]*(?:==|!=|\bin\b)[^\n]*[\"']sdpa[\"']")


@functools.cache
def _unlike_sdpa(code: str) -> str | None:
    """Why a modelling module would not give sdpa's result under another name, or None."""
    module = sys.modules.get(code)
    if module is None:
        return None
    # What transformers itself looks at before it lets a model use sdpa. Some of those that do not support it compute
    # attention by themselves, and would take our boolean mask for numbers to add.
    claims = [
        bool(each._supports_sdpa)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == code and hasattr(each, "_supports_sdpa")
    ]
    if claims and not any(claims):
        return 'does not support sdpa, which is the board\'s reference. Load it with attn_implementation="eager"'
    try:
        asks = _ASKS.search(inspect.getsource(module))
    except OSError:  # no source at hand
        return None
    answer = 'treats any other name unlike \'sdpa\'. Call register("sdpa") and load it with attn_implementation="sdpa"'
    return answer if asks else None


def _unlike_error(who: str, why: str) -> InputError:
    return InputError("attn_implementation", f"{who}: its code {why}.")


def _site_name(module: torch.nn.Module, *, causal: bool) -> str:
    """What the site of a layer is called: its class, and which of the kinds that one class serves."""
    kind = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    window = getattr(module, "sliding_window", None)
    sliding = kind == "sliding_attention" if isinstance(kind, str) else isinstance(window, int) and window > 0
    name = type(module).__name__
    crossing = _crosses(module)
    parts = [f"transformers.{name}"]
    parts += ["causal"] if causal else ["cross"] if crossing else []
    parts += ["sliding"] if sliding else ["chunked"] if kind == "chunked_attention" else []
    return ".".join(parts)


def _crosses(module: torch.nn.Module) -> bool:
    """Whether a layer that is not causal looks at something else than its own text, as in a decoder."""
    of_decoder = getattr(module, "is_decoder", getattr(getattr(module, "config", None), "is_decoder", False))
    return "Cross" in type(module).__name__ or bool(of_decoder)


def _site(module: torch.nn.Module, *, causal: bool) -> Site:
    """The site of a layer."""
    full = _site_name(module, causal=causal)
    site = _sites.get(full)
    if site is None:
        with _sites_lock:
            site = _sites.get(full)
            if site is None:
                # Errors add up over the steps of a decoder; an encoder runs once.
                site = Site(full, reference=_reference, approx_ok=not causal and not _crosses(module))
                _sites[full] = site
    return site


# --- masks ------------------------------------------------------------------------------------------------------------


class _Carried(NamedTuple):
    """The structure behind a dense mask, and what must still hold for it to be that.

    Attributes:
        info: The structure.
        version: The mask's, which changes when anything is written into it.
        lengths: Queries and keys.
    """

    info: MaskInfo
    version: int
    lengths: tuple[int, int]


# By the tensor object itself: a slice, a copy, or the mask on another device is another object, and has no structure.
_carried: Any = WeakTensorKeyDictionary()


def dense_mask(*arguments: Any, padding: Padding | None = None, **given: Any) -> Tensor | None:
    """The mask function that transformers' models call: transformers' own sdpa mask, with its structure kept beside it.

    Args:
        *arguments: As transformers gives them.
        padding: The side of the padding, where `register` was told.
        **given: As transformers gives them.

    Returns:
        Boolean, `(batch, 1, q_length, k_length)`; None when sdpa needs none.

    Raises:
        InputError: The model treats this implementation unlike sdpa.
    """
    mask: Tensor | None
    if _tracing() and getattr(context.in_graphs, "attention", None) is not None:
        config = given.get("config")
        if config is None or _is_called_sdpa(config) or getattr(_for_graphs, _models(config), False):
            mask = _sdpa_mask(*arguments, **given)
            return mask
    mask = _dense_mask(padding, *arguments, **given)
    return mask


def _right_padded(*arguments: Any, **given: Any) -> Tensor | None:
    return dense_mask(*arguments, padding="right", **given)


def _left_padded(*arguments: Any, **given: Any) -> Tensor | None:
    return dense_mask(*arguments, padding="left", **given)


_padded: Final[dict[str | None, Callable[..., Tensor | None]]] = {
    None: dense_mask, "right": _right_padded, "left": _left_padded,
}  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dense_mask(padding: Padding | None, *arguments: Any, **given: Any) -> Tensor | None:
    config = given.get("config")
    if config is not None and not _is_called_sdpa(config):
        unlike = _unlike_sdpa(type(config).__module__.replace("configuration_", "modeling_"))
        _tell_graphs(_models(config), unlike is None and getattr(_for_graphs, _models(config), True))
        if unlike is not None:
            raise _unlike_error(type(config).__name__, unlike)
    if context.bound() is None or arguments:
        mask: Tensor | None = _sdpa_mask(*arguments, **given)
        return mask
    # Outside inference mode, whose tensors do not count what is written into them.
    with torch.inference_mode(mode=False), torch.no_grad():
        mask = _sdpa_mask(**given)
        if type(mask) is Tensor and not mask.is_inference():
            info = _structure(given, mask.shape[-2], mask.shape[-1], padding)
            if info is not None:
                _carried[mask] = _Carried(info, mask._version, (mask.shape[-2], mask.shape[-1]))
    return mask


def _info_of(mask: Tensor | None, query: Tensor, key: Tensor) -> MaskInfo | None:
    """The structure behind this very mask, unless the mask was written into or is used for other lengths."""
    found: _Carried | None = None if mask is None else _carried.get(mask)
    if found is None or mask is None or found.version != mask._version:
        return None
    keys = found.info.keys
    fits = found.lengths == (query.shape[2], key.shape[2]) and mask.device == query.device
    return found.info if fits and (keys is None or keys.shape[0] == query.shape[0]) else None


def _structure(given: dict[str, Any], q_length: int, k_length: int, padding: Padding | None = None) -> MaskInfo | None:
    """The structure that a mask is made from, when that is certain. Waits for no device."""
    parts = _parts(given.get("mask_function", causal_mask_function))
    offset = given.get("kv_offset", 0)
    if parts is None or not isinstance(offset, int):
        return None
    if parts != _Bounds() and _first_query(given, q_length) != k_length - q_length + offset:
        return None  # not aligned bottom-right, such as a static cache that is not full
    real = given.get("attention_mask")
    causal, window, ahead = parts
    if real is None:
        return MaskInfo(None, causal, window, ahead=ahead)
    plain = isinstance(real, Tensor) and real.dtype == torch.bool and real.dim() == 2  # noqa: PLR2004
    if not plain or real.shape[0] != given.get("batch_size"):
        return None
    # A copy: the caller's own may be written into later. Keys past its end are padding.
    keys = real.new_zeros(real.shape[0], k_length)
    real = real[:, offset : offset + k_length]
    keys[:, : real.shape[1]] = real
    if keys.device.type != "cpu":
        return MaskInfo(keys, causal, window, None if padding is None else _held_to(padding, keys), ahead)
    # Reads where the padding lies.
    return mask_for(0, k_length, keys=keys, causal=causal, window=window, ahead=ahead).info


def _held_to(padding: Padding, keys: Tensor) -> Padding:
    """The side that was said, of keys that the device is told to check without anybody waiting."""
    before, after = keys[:, :-1], keys[:, 1:]
    as_said = (after <= before if padding == "right" else after >= before).all()
    torch._assert_async(as_said, f"a batch is not padded on the {padding}, as fuseboard's register() was told")
    return padding


def _first_query(given: dict[str, Any], q_length: int) -> int | None:
    """The position of the first query, the others following it; None where that is not known without waiting."""
    positions = given.get("cache_position")
    if positions is None:
        first = given.get("q_offset", 0)
        return first if isinstance(first, int) else None
    if not isinstance(positions, Tensor) or positions.device.type != "cpu" or positions.shape != (q_length,):
        return None
    start = int(positions[0]) if q_length else 0
    return start if bool((positions == torch.arange(start, start + q_length)).all()) else None


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


class _Bounds(NamedTuple):
    """What a mask function hides, as `MaskInfo` says it."""

    causal: bool = False
    window: int | None = None
    ahead: int | None = None


class _Functions(NamedTuple):
    """The code of transformers' functions: "both of", a window, one on either side, no limit; None where unknown."""

    both: CodeType | None = None
    window: CodeType | None = None
    around: CodeType | None = None
    nowhere: CodeType | None = None


@functools.cache
def _known_functions() -> _Functions:
    """Transformers' functions where they mean what we take them for.

    They are held against `MaskInfo` on a few positions, so that a transformers that changes them is not misread.
    """
    from transformers import masking_utils  # noqa: PLC0415 - not all versions have what is asked of it

    row, column = torch.arange(6)[:, None], torch.arange(6)[None, :]
    nothing = torch.zeros((), dtype=torch.long)

    def means(function: Callable[..., Any], info: MaskInfo) -> bool:
        seen = torch.as_tensor(function(nothing, nothing, row, column)).expand(6, 6)
        return torch.equal(seen, info.dense(6, 6, row.device)[0, 0])

    both = window = around = nowhere = None
    sliding = sliding_window_causal_mask_function(2)
    if means(causal_mask_function, MaskInfo(causal=True)) and means(sliding, MaskInfo(causal=True, window=2)):
        inner = _cells(sliding).get("mask_functions", ())
        if len(inner) == 2 and causal_mask_function in inner:  # noqa: PLR2004
            overlay = inner[0] if inner[1] is causal_mask_function else inner[1]
            if _cells(overlay) == {"sliding_window": 2}:
                both, window = sliding.__code__, overlay.__code__
    local = getattr(masking_utils, "sliding_window_bidirectional_overlay", None)
    if local is not None and means(local(2), MaskInfo(window=3, ahead=2)) and _cells(local(2)) == {"sliding_window": 2}:
        around = local(2).__code__
    free = getattr(masking_utils, "bidirectional_mask_function", None)
    if free is not None and means(free, MaskInfo()):
        nowhere = free.__code__
    return _Functions(both, window, around, nowhere)


def _parts(function: Any) -> _Bounds | None:
    """The bounds of a mask function that is made of transformers' own alone; None for any other."""
    known = _known_functions()
    code = getattr(function, "__code__", None)
    found: _Bounds | None = None
    if function is causal_mask_function:
        found = _Bounds(causal=True)
    elif code is None:
        found = None
    elif code is known.nowhere:
        found = _Bounds()
    elif code is known.window:
        width = _cells(function)["sliding_window"]
        found = _Bounds(window=width) if isinstance(width, int) and width > 0 else None
    elif code is known.around:
        reach = _cells(function)["sliding_window"]
        found = _Bounds(window=reach + 1, ahead=reach) if isinstance(reach, int) and reach >= 0 else None
    elif code is known.both:
        parts = [_parts(each) for each in _cells(function)["mask_functions"]]
        bounds = [each for each in parts if each is not None]
        if len(bounds) == len(parts):
            found = _Bounds(
                any(each.causal for each in bounds),
                min((each.window for each in bounds if each.window is not None), default=None),
                min((each.ahead for each in bounds if each.ahead is not None), default=None),
            )
    return found
