"""fuseboard: one attention call for PyTorch engines; every kernel is a plugin, and every output says what it used.

```python
import fuseboard as fb

SITE = fb.Site("tts.decoder")                      # once, at module level
out = fb.attention(q, k, v, site=SITE)             # the reference, until a policy is bound

run = fb.Run()
with fb.bind("fast", run=run):
    out = fb.attention(q, k, v, site=SITE)         # the fastest backend that fits the call
print(run.report())
```

Names are resolved when first used: `import fuseboard` loads neither torch nor any plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseboard.backend import BackendInfo as BackendInfo
    from fuseboard.backend import Exactness as Exactness
    from fuseboard.backend import Kernel as Kernel
    from fuseboard.backend import Later as Later
    from fuseboard.call import Call as Call
    from fuseboard.call import Sizes as Sizes
    from fuseboard.call import describe as describe
    from fuseboard.constraints import ALL_LENGTHS as ALL_LENGTHS
    from fuseboard.constraints import Constraints as Constraints
    from fuseboard.constraints import Guard as Guard
    from fuseboard.constraints import HeadDims as HeadDims
    from fuseboard.constraints import KnownBad as KnownBad
    from fuseboard.constraints import Refusal as Refusal
    from fuseboard.constraints import StructureRule as StructureRule
    from fuseboard.context import bind as bind
    from fuseboard.context import bind_process as bind_process
    from fuseboard.context import steps as steps
    from fuseboard.dispatch import attention as attention
    from fuseboard.dispatch import site_calls as site_calls
    from fuseboard.errors import DeclinedError as DeclinedError
    from fuseboard.errors import FuseboardError as FuseboardError
    from fuseboard.errors import InputChangedError as InputChangedError
    from fuseboard.errors import InputError as InputError
    from fuseboard.errors import MaskMismatchError as MaskMismatchError
    from fuseboard.errors import PolicyError as PolicyError
    from fuseboard.errors import RefusedError as RefusedError
    from fuseboard.errors import SettingsError as SettingsError
    from fuseboard.errors import SiteError as SiteError
    from fuseboard.explanation import Explanation as Explanation
    from fuseboard.explanation import explain as explain
    from fuseboard.hookspecs import hookimpl as hookimpl
    from fuseboard.masks import Masked as Masked
    from fuseboard.masks import MaskInfo as MaskInfo
    from fuseboard.masks import Structure as Structure
    from fuseboard.masks import mask_for as mask_for
    from fuseboard.policy import Policy as Policy
    from fuseboard.policy import policy_for as policy_for
    from fuseboard.run import Run as Run
    from fuseboard.site import Site as Site
    from fuseboard.site import sites as sites

__version__ = "0.1.0"

_WHERE = {
    "backend": ("BackendInfo", "Exactness", "Kernel", "Later"),
    "call": ("Call", "Sizes", "describe"),
    "constraints": ("ALL_LENGTHS", "Constraints", "Guard", "HeadDims", "KnownBad", "Refusal", "StructureRule"),
    "context": ("bind", "bind_process", "steps"),
    "dispatch": ("attention", "site_calls"),
    "errors": (
        "DeclinedError",
        "FuseboardError",
        "InputChangedError",
        "InputError",
        "MaskMismatchError",
        "PolicyError",
        "RefusedError",
        "SettingsError",
        "SiteError",
    ),
    "explanation": ("Explanation", "explain"),
    "hookspecs": ("hookimpl",),
    "masks": ("MaskInfo", "Masked", "Structure", "mask_for"),
    "policy": ("Policy", "policy_for"),
    "run": ("Run",),
    "site": ("Site", "sites"),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [*sorted(_HOME)]  # noqa: PLE0604 - strings, from the table above


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        msg = f"module 'fuseboard' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"fuseboard.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
