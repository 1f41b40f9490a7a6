"""Five TileLang kernels, each for GPU and CPU from one source: GEMM, GEGLU, residual + LayerNorm, RoPE, attention.

`ops` is what to call: functions of tensors that check everything first. `gemm`, `geglu`, `add_ln`, `rope` and `attn`
hold the kernels' factories, `compile` makes kernels of them and keeps them, `tilelang` is the attention backend.
`_package` alone imports TileLang; importing this package imports neither it nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseboard_tilelang.add_ln import add_ln_kernel
    from fuseboard_tilelang.attn import attn_kernel
    from fuseboard_tilelang.compile import compile_cpu, compile_gpu
    from fuseboard_tilelang.geglu import gemm_geglu_kernel
    from fuseboard_tilelang.gemm import gemm_kernel
    from fuseboard_tilelang.rope import rope_kernel

__all__ = [
    "add_ln_kernel",
    "attn_kernel",
    "compile_cpu",
    "compile_gpu",
    "gemm_geglu_kernel",
    "gemm_kernel",
    "rope_kernel",
]

_HOMES = {
    "gemm_kernel": "gemm",
    "gemm_geglu_kernel": "geglu",
    "add_ln_kernel": "add_ln",
    "rope_kernel": "rope",
    "attn_kernel": "attn",
    "compile_cpu": "compile",
    "compile_gpu": "compile",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}."
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
