"""Sites: the named places where an engine computes attention, each with the reference that defines its result."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fuseboard.errors import SiteError
from fuseboard.masks import check_kind

if TYPE_CHECKING:
    from fuseboard.chain import Table
    from fuseboard.masks import MaskInfo
    from fuseboard.policy import Policy
    from fuseboard.run import Counter

__all__ = ["Site", "sites"]

# `F.scaled_dot_product_attention` as torch ships it, taken when fuseboard is loaded: whoever replaces it in torch's
# module later does not change what a site's reference is.
_SDPA = F.scaled_dot_product_attention

_sites: weakref.WeakValueDictionary[str, Site] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Site:
    """One place in an engine that computes attention; make it once, at module level.

    Attributes:
        name: Unique among living sites, dotted by custom: `qwen3tts.mimi`. Policies select sites by it.
        reference: The exact computation that the engine's upstream makes there: `(q, k, v)` and, of `mask`, `causal`,
            `scale`, `enable_gqa`, `dropout_p`, only those by name that the caller gave another value than the default.
            `F.scaled_dot_product_attention` is called by torch's own argument names.
        swappable: False: the reference answers under every policy.
        approx_ok: False: no backend that is not exact answers; autoregressive models set it, since their errors add up.

    Raises:
        SiteError: The name is empty, a pattern or another living site's, or the reference cannot take q, k and v.
    """

    __slots__ = ("__weakref__", "_mask_name", "approx_ok", "calls", "name", "reference", "swappable", "tables")

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., Tensor] | None = None,
        swappable: bool = True,
        approx_ok: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name.strip():
            msg = f"a site's name is {name!r}; expected a word such as 'engine.part'."
            raise SiteError(msg)
        if set(name) & set("*?[]"):
            msg = f"a site's name is {name!r}; expected none of * ? [ ], with which policies select several sites."
            raise SiteError(msg)
        if reference is not None and not callable(reference):
            msg = f"site {name!r}: reference is {reference!r}; expected a function of (q, k, v, ...)."
            raise SiteError(msg)
        if reference is not None and not _takes_qkv(reference):
            msg = f"site {name!r}: reference {reference!r} cannot be called with (q, k, v)."
            raise SiteError(msg)
        self.name = name
        self.reference: Callable[..., Tensor] = _SDPA if reference is None else reference
        self.swappable = swappable
        self.approx_ok = approx_ok
        self.calls: Counter | None = None
        self.tables: dict[Policy, Table] = {}
        self._mask_name = _names_of(self.reference)
        with _lock:
            if name in _sites:
                msg = f"site {name!r} exists already; a site is made once, at module level, and has a name of its own."
                raise SiteError(msg)
            _sites[name] = self

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
        dropout_p: float,
        mask_info: MaskInfo | None,
    ) -> Tensor:
        """The reference's result. A structure that came without its dense mask is written out for it."""
        if mask_info is not None:
            check_kind(mask_info)
            if mask is None and not mask_info.structure(q.shape[-2], k.shape[-2]).is_open:
                mask = mask_info.dense(q.shape[-2], k.shape[-2], q.device)
        # Only what differs from the default: parsing a keyword costs torch about a tenth of a microsecond, and a
        # reference need not know arguments that its engine never uses.
        mask_name, causal_name = self._mask_name
        given: dict[str, Any] = {}
        if mask is not None:
            given[mask_name] = mask
        if causal:
            given[causal_name] = causal
        if scale is not None:
            given["scale"] = scale
        if enable_gqa:
            given["enable_gqa"] = True
        if dropout_p:
            given["dropout_p"] = dropout_p
        return self.reference(q, k, v, **given)

    def __reduce__(self) -> Any:
        """Copied and pickled it is itself: a model that holds its site is copied, and the place is the same."""
        return _living, (self.name,)

    def __repr__(self) -> str:
        flags = ("" if self.swappable else ", swappable=False") + ("" if self.approx_ok else ", approx_ok=False")
        return f"Site({self.name!r}{flags})"


def sites() -> dict[str, Site]:
    """The living sites by name, in the order of their names."""
    with _lock:
        return dict(sorted(_sites.items()))


def _living(name: str) -> Site:
    """The site that a pickle means."""
    with _lock:
        found = _sites.get(name)
    if found is None:
        msg = f"no site {name!r} lives in this process; import the module that makes it before you unpickle."
        raise SiteError(msg)
    return found


def _takes_qkv(reference: Callable[..., Tensor]) -> bool:
    try:
        inspect.signature(reference).bind(None, None, None)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True


def _names_of(reference: Callable[..., Tensor]) -> tuple[str, str]:
    """What the reference calls its mask and its causal flag: torch's names if it is torch's, or shaped alike."""
    if reference is _SDPA:
        return "attn_mask", "is_causal"
    try:
        parameters = inspect.signature(reference).parameters
    except (TypeError, ValueError):  # a builtin: torch's own are the ones that have no signature
        return "attn_mask", "is_causal"
    return (
        "attn_mask" if "attn_mask" in parameters and "mask" not in parameters else "mask",
        "is_causal" if "is_causal" in parameters and "causal" not in parameters else "causal",
    )
