"""`flash4`: FlashAttention 4, from the package flash-attn-4 (CuTe DSL).

It compiles a kernel for each head dimension, dtype, ratio of heads and kind of mask, not for each length: 2 to 3
seconds at the first call of a kind, which a growing cache pays once. Real keys are named by where each row's start and
how many they are. The kernel still loads whole tiles of values, so those of keys that are not real are first set to
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    Guard,
    HeadDims,
    KnownBad,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import GRID, aligned, as_tokens, needs_grad, scale_of
from fuseboard_flash import _cost, _layout, _limits, _package

RANGE = ">=4.0.0b36,<5"
_INSTALL = (
    f'pip install --no-deps "flash-attn-4{RANGE}" nvidia-cutlass-dsl quack-kernels apache-tvm-ffi '
    "torch-c-dlpack-ext einops, and nvidia-cutlass-dsl's own libs for your CUDA, in one call"
)
_MODULES = ("cutlass", "quack", "tvm_ffi", "einops")


def _multiple(grad: bool) -> int:
    # Between one multiple of 32 and the next the backward on Hopper gives a wrong gradient of q, without an error, and
    # does not compile on Blackwell: https://github.com/Dao-AILab/flash-attention/pull/2896, issues/2492
    return 32 if grad else 8


def _padded_dim(call: Call, sizes: Sizes) -> int:
    multiple = _multiple(call.grad)
    return -(-max(sizes.head_dim, sizes.v_head_dim) // multiple) * multiple


def _dim_fits(call: Call, sizes: Sizes) -> bool:
    # On 10.x and 11.x: up to 128, or 256. Below 32 the launch failed on 10.x:
    # https://github.com/Dao-AILab/flash-attention/issues/2591
    if call.capability is None or call.capability[0] not in (10, 11):
        return True
    dim = _padded_dim(call, sizes)
    return 32 <= dim <= 128 or dim == 256  # noqa: PLR2004 - the kernel's own limits


def _backward_exists(call: Call, _sizes: Sizes) -> bool:
    return not call.grad or call.capability is None or call.capability >= (9, 0)


def _offsets_fit(call: Call, sizes: Sizes) -> bool:
    # Not known to be 64 bits wide everywhere in generated code: not claimed.
    longest = max(sizes.heads * sizes.q_length, sizes.kv_heads * sizes.k_length)
    return sizes.batch * longest * _padded_dim(call, sizes) < 2**31


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=256),
    v_head_dims=HeadDims(high=256),
    gqa=True,
    causal={"equal", "fewer queries"},
    structures=(
        StructureRule(causal={True}, window={False, True}),
        StructureRule(causal={False}, window={True}, ahead={False, True}),
        # It aligns causality and windows to the last *real* key, the structure to the last key: the same only with left
        # padding.
        StructureRule(keys={"right"}, causal={False}),
        StructureRule(keys={"left"}, window={False, True}),
        StructureRule(keys={"left"}, causal={False}, window={True}, ahead={True}),
    ),
    custom_scale=True,
    backward=True,
    any_stride=True,
    guards=(
        *GRID,
        _limits.ACCUMULATOR,
        Guard(
            "head_dim", _dim_fits, "32 to 128, or 256, on compute capability 10 and 11", lambda sizes: sizes.head_dim
        ),
        Guard("gradient", _backward_exists, "compute capability 9.0 or more", None, "torch.no_grad()"),
        Guard("tensor size", _offsets_fit, "less than 2**31 elements each", None, "split the batch"),
    ),
)
"""What it takes. No dense mask, no dropout."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "FlashAttention 4", requires={"flash-attn-4": RANGE}, homepage="https://github.com/Dao-AILab/flash-attention"
    )


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only."""
    return Exactness.EXACT


@hookimpl
def known_bad() -> Iterator[KnownBad]:
    """GPUs that it accepts without having been validated there."""
    yield KnownBad(
        "wrong results were seen on compute capability 12",
        "https://github.com/Dao-AILab/flash-attention/pull/2553",
        call=lambda call: call.capability is not None and call.capability[0] == 12,  # noqa: PLR2004 - a capability
    )
    yield KnownBad(
        "more shared memory than there is on compute capability 8 beyond a head dimension of 128",
        "https://github.com/Dao-AILab/flash-attention/issues/2750",
        call=lambda call: (
            call.capability is not None and call.capability[0] == 8 and max(call.head_dim, call.v_head_dim) > 128  # noqa: PLR2004
        ),
    )


@hookimpl
def install_line(torch_version: str) -> str:
    """Keeps the installed torch."""
    return _INSTALL


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the rates of `_cost`, once compiled."""
    keys = "none" if call.structure is None else call.structure.keys
    copies = 0.0 if keys == "none" else 1.0 if call.grad else 0.5  # values, and keys where a gradient is needed
    return _cost.microseconds(_cost.FLASH4, call, sizes, copies=copies)


@hookimpl
def probe(device: torch.device) -> str | None:
    """What metadata cannot tell: whose files `flash_attn.cute` are, and whether what they import can be found."""
    folders, _ = _package.folders_of("flash_attn")
    files = [file for each in folders if (file := each / "cute" / "interface.py").is_file()]
    if not files:
        return f"flash-attn-4's metadata is there, and flash_attn/cute is not. Install it again: {_INSTALL}"
    # flash-attn 2.8 ships an old copy of the same folder: the later install wins, removing either damages the other.
    wanted = {
        "flash_attn_func": ("learnable_sink", "return_lse"),
        "flash_attn_varlen_func": ("seqused_k", "return_lse"),
    }
    for function, names in wanted.items():
        found = _package.parameters(files[0], function)
        lacks = [each for each in names if each not in found]
        if lacks:
            other = _package.version("flash-attn")
            whose = f"flash-attn {other} has overwritten it" if other else "it is not flash-attn-4's"
            return (
                f"flash_attn/cute has a {function} without {lacks[0]}: {whose}. Install flash-attn-4 again, after "
                f"flash-attn: pip install --no-deps --force-reinstall 'flash-attn-4{RANGE}'"
            )
    lacking = _package.missing(*_MODULES)
    if "cutlass" in lacking and _package.version("nvidia-cutlass-dsl") is not None:
        return (
            "nvidia-cutlass-dsl is installed, and cutlass cannot be found: its .pth file was not processed, as happens "
            "with --target and PYTHONPATH. Add its folder nvidia_cutlass_dsl/dsl_packages to the path, or install it "
            "into an environment"
        )
    return f"flash-attn-4 imports {', '.join(lacking)}, which cannot be found. Install: {_INSTALL}" if lacking else None


@hookimpl
def kernel(device: torch.device) -> Flash4:
    """Import flash-attn-4."""
    with _package.explained("what flash-attn-4 stands on", _INSTALL):
        from flash_attn import cute  # type: ignore[import-not-found]  # noqa: PLC0415 - only here

        return Flash4(cute)


class Flash4:
    """`flash_attn_func`, and `flash_attn_varlen_func` for padded keys. Arguments are named: the fourth is another."""

    def __init__(self, package: Any) -> None:
        self._func: Callable[..., Any] = package.flash_attn_func
        self._varlen: Callable[..., Any] = package.flash_attn_varlen_func

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Pad, align, and call the function for the structure."""
        if causal and k.shape[2] > q.shape[2]:  # top-left: no query sees a key beyond the number of queries
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        dim, v_dim, multiple = q.shape[3], v.shape[3], _multiple(needs_grad(q, k, v))
        if dim % multiple or v_dim != dim:
            scale = scale_of(q, scale)
            q, k, v = _layout.heads_padded(q, k, v, multiple)
        q, k, v = aligned(q), aligned(k), aligned(v)
        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        if mask_info is not None:
            options |= {"causal": mask_info.causal, **_window(mask_info)}
        if mask_info is None or mask_info.keys is None:
            out = _layout.first(self._func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options))
            out = out.transpose(1, 2)
        else:
            out = self._padded(q, k, v, mask_info, options)
        return out[..., :v_dim] if out.shape[3] != v_dim else out

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, info: MaskInfo, options: dict[str, Any]) -> Tensor:
        """Padded keys: how many are real, and for left padding where they start among all tokens."""
        hidden = info.derived("hidden", lambda: ~_keys(info)[:, None, :, None])
        # A weight of zero times a value that is no number is no number; in the backward the same holds of the keys. The
        # fill also gives zero for gradients that the kernel does not write.
        v = v.masked_fill(hidden, 0)
        if needs_grad(q, k, v):
            k = k.masked_fill(hidden, 0)
        if info.padding == "right":
            out = self._varlen(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seqused_k=info.lengths(), **options
            )
            return _layout.first(out).transpose(1, 2)
        batch, heads, n_q, dim = q.shape
        n_k = k.shape[2]
        starts = _layout.row_starts(info, batch, n_k)
        shifted = info.derived(("first real key", n_k), lambda: _shifted(info, starts, n_k))
        out = self._varlen(
            as_tokens(q), as_tokens(k), as_tokens(v),
            cu_seqlens_q=_layout.row_starts(info, batch, n_q), cu_seqlens_k=shifted, max_seqlen_q=n_q,
            max_seqlen_k=n_k, seqused_k=info.lengths(), **options,
        )  # fmt: skip
        return _layout.first(out).view(batch, n_q, heads, dim).transpose(1, 2)


def _keys(info: MaskInfo) -> Tensor:
    if info.keys is None:
        msg = "padded keys need MaskInfo.keys."
        raise ValueError(msg)
    return info.keys


def _shifted(info: MaskInfo, starts: Tensor, n_k: int) -> Tensor:
    shifted = starts.clone()
    shifted[:-1] += n_k - info.lengths()
    return shifted


def _window(info: MaskInfo) -> dict[str, Any]:
    # None is open; a -1 beside a 0 is taken as a number and hides every key:
    # https://github.com/NVIDIA/TransformerEngine/issues/3528
    if info.window is None and info.ahead is None:
        return {}
    return {"window_size": (None if info.window is None else info.window - 1, 0 if info.causal else info.ahead)}
