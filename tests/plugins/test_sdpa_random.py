"""Every SDPA backend over random calls against float64: right, or refused with a reason. Never a wrong number."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fuseboard as fb
from fuseboard.selftest import attention_fp64

SITE = fb.Site("tests.random")
CPU = ("sdpa-cpu", "sdpa-math")
CUDA = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 64, 65]), st.integers(0, 70))


@attrs.frozen
class Case:
    """One random call, before it has tensors."""

    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int]
    layout: str
    mask: str
    mask_axes: tuple[bool, bool, bool, bool]
    mask_layout: str
    structure: tuple[str, bool, int | None] | None
    causal: bool
    scale: float | None
    grad: bool
    mask_grad: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Case:
    dim = draw(st.sampled_from([1, 3, 8, 17, 32, 40, 64, 72]))
    mask = draw(st.sampled_from(["none", "none", "bool", "additive", "additive float32"]))
    structure = None
    if draw(st.booleans()) and mask in ("none", "bool"):
        keys = draw(st.sampled_from(["none", "right", "left", "any"]))
        structure = (keys, draw(st.booleans()), draw(st.one_of(st.none(), st.integers(1, 40))))
    grad = draw(st.booleans())
    return Case(
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.sampled_from([0, 1, 2, 3])),
        heads=draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)])),
        lengths=(draw(LENGTHS), draw(LENGTHS)),
        dims=(dim, draw(st.sampled_from([dim, dim, dim, 24]))),
        layout=draw(st.sampled_from(["contiguous", "tokens first", "sliced", "strided", "offset", "overlapping"])),
        mask=mask,
        mask_axes=draw(st.tuples(*[st.booleans()] * 4)),
        mask_layout=draw(st.sampled_from(["contiguous", "expanded", "sliced", "low rank"])),
        structure=structure,
        causal=draw(st.booleans()) and structure is None,
        scale=draw(st.sampled_from([None, None, 0.3, -0.5, 0.0, 1e-60])),
        grad=grad,
        mask_grad=grad and mask == "additive" and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.nn.functional.pad(tensor, (0, 0, 0, 3))[:, :, : tensor.shape[2]]
    if layout == "strided":
        return torch.stack((tensor, tensor), -1)[..., 0]
    if layout == "offset":
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        room[1:] = tensor.reshape(-1)
        return room[1:].view(tensor.shape)
    if layout == "overlapping" and tensor.numel():  # rows one element apart, as windows over a signal are: other values
        _, _, length, dim = tensor.shape
        return torch.cat((tensor[:, :, 0], tensor[:, :, :, 0]), -1).unfold(-1, dim, 1)[:, :, :length]
    return tensor


def mask_of(case: Case, generator: torch.Generator, device: torch.device) -> Tensor | None:
    if case.mask == "none" or case.structure is not None:
        return None
    full = (case.batch, case.heads[0], *case.lengths)
    shape = [size if keep else 1 for size, keep in zip(full, case.mask_axes, strict=True)]
    if case.mask_layout == "low rank":
        shape = shape[2:]
    hidden = torch.rand(shape, generator=generator) < 0.4
    if shape[-2] and shape[-2] == full[-2]:
        hidden[..., 0, :] = True  # a row that sees nothing
    if case.mask == "bool":
        mask = ~hidden
    else:
        dtype = torch.float32 if case.mask == "additive float32" else case.dtype
        mask = torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf).to(dtype)
    mask = mask.to(device)
    if case.mask_layout == "expanded":
        mask = mask.expand(full)
    elif case.mask_layout == "sliced" and mask.numel():
        mask = torch.cat((mask, mask[..., :1]), -1)[..., :-1]
    return mask.requires_grad_() if case.mask_grad and mask.is_floating_point() else mask


def info_of(case: Case, device: torch.device) -> fb.MaskInfo | None:
    if case.structure is None:
        return None
    kind, causal, window = case.structure
    n_k = case.lengths[1]
    keys, padding = None, None
    if kind != "none":
        place, real = torch.arange(n_k), (torch.arange(case.batch)[:, None] * 7 + case.seed) % (n_k + 1)
        keys = {"right": place < real, "left": place >= n_k - real, "any": (place + real) % 3 != 0}[kind].to(device)
        padding = kind if kind in ("right", "left") else None
    return fb.MaskInfo(keys, causal, window, padding)


def judge(name: str, case: Case, device: torch.device) -> None:
    """Run one case under a strict policy for `name`, or under `fast`, and hold it against float64."""
    generator = torch.Generator().manual_seed(case.seed)
    (heads, kv_heads), (n_q, n_k), (dim, v_dim) = case.heads, case.lengths, case.dims

    def draw(*shape: int) -> Tensor:
        made = laid_out(torch.randn(shape, generator=generator).to(device, case.dtype), case.layout)
        return made.detach().requires_grad_(case.grad)

    q, k, v = (
        draw(case.batch, heads, n_q, dim),
        draw(case.batch, kv_heads, n_k, dim),
        draw(case.batch, kv_heads, n_k, v_dim),
    )
    mask, info = mask_of(case, generator, device), info_of(case, device)
    arguments = {
        "mask": mask,
        "mask_info": info,
        "causal": case.causal,
        "scale": case.scale,
        "enable_gqa": heads != kv_heads,
    }
    before = [tensor.detach().clone() for tensor in (q, k, v, mask) if tensor is not None]
    run = fb.Run()
    try:
        with fb.bind(fb.policy_for(name, name != "fast"), run=run):
            out = fb.attention(q, k, v, site=SITE, **arguments)
    except fb.RefusedError as error:
        assert error.refusals
        event(f"{name} refused: {error.refusals[-1].rule}")
        return
    except (RuntimeError, ValueError) as error:
        # Only the reference may raise here: torch refuses the causal flag beside a mask, for one.
        assert name == "fast", error
        with pytest.raises(type(error)):
            fb.attention(q, k, v, site=SITE, **arguments)
        return
    used = next(iter(run.report()["attention"]["used"]))
    event(f"{name} answered by {used}")
    if used == "reference":  # its result is right by definition, torch's NaN for a negative scale beside -inf included
        again = fb.attention(q, k, v, site=SITE, **arguments)
        assert torch.equal(out.nan_to_num(), again.nan_to_num())
        event("the reference's own result")
        return
    exact = [tensor.detach().double().requires_grad_(case.grad) for tensor in (q, k, v)]
    bias = mask.detach().double().requires_grad_() if mask is not None and case.mask_grad else mask
    want = attention_fp64(*exact, mask=bias, mask_info=info, causal=case.causal, scale=case.scale)
    tolerance = TOLERANCE[case.dtype]

    assert out.shape == want.shape
    assert out.dtype == case.dtype
    assert torch.allclose(out.detach().double(), want.detach(), atol=tolerance, rtol=tolerance)
    assert all(
        torch.equal(now.detach(), then)
        for now, then in zip([t for t in (q, k, v, mask) if t is not None], before, strict=True)
    )
    if not case.grad:
        return
    inputs = [q, k, v, *([mask] if case.mask_grad else [])]
    rights = [*exact, *([bias] if case.mask_grad else [])]
    seed = torch.randn(want.shape, generator=generator).to(device, torch.float64)
    got = torch.autograd.grad(out, inputs, seed.to(case.dtype), allow_unused=True)
    right = torch.autograd.grad(want, rights, seed)
    for mine, theirs in zip(got, right, strict=True):
        if mine is None:  # torch's own reference drops a mask from a call of size zero: nothing flows there anyway
            assert not theirs.any()
            assert 0 in (*q.shape, *k.shape)
            continue
        assert mine.shape == theirs.shape
        allowed = (
            8
            * tolerance
            * max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
            * math.sqrt(max(heads // kv_heads, 1))
        )
        assert torch.allclose(mine.double(), theirs, atol=allowed, rtol=8 * tolerance)


RANDOM = settings(
    max_examples=250, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors],
)  # fmt: skip


@pytest.mark.parametrize("name", [*CPU, "fast"])
@RANDOM
@given(case=cases((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
def test_random_calls_on_the_cpu_are_right_or_refused(name: str, case: Case) -> None:
    judge(name, case, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CUDA, "fast"])
@RANDOM
@given(case=cases((torch.bfloat16, torch.float16, torch.float32)))
def test_random_calls_on_the_gpu_are_right_or_refused(name: str, case: Case) -> None:
    judge(name, case, torch.device("cuda"))


@RANDOM
@given(case=cases((torch.float32, torch.bfloat16)))
def test_auto_is_bit_identical_to_torch_forward_and_backward(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    (heads, kv_heads), (n_q, n_k), (dim, v_dim) = case.heads, case.lengths, case.dims
    shapes = (case.batch, heads, n_q, dim), (case.batch, kv_heads, n_k, dim), (case.batch, kv_heads, n_k, v_dim)
    q, k, v = (laid_out(torch.randn(each, generator=generator).to(case.dtype), case.layout).detach() for each in shapes)
    mask = mask_of(case, generator, torch.device("cpu"))
    mine = [each.clone(memory_format=torch.preserve_format).requires_grad_(case.grad) for each in (q, k, v)]
    theirs = [each.clone(memory_format=torch.preserve_format).requires_grad_(case.grad) for each in (q, k, v)]
    gqa = heads != kv_heads

    def by_hand() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *theirs, attn_mask=mask, is_causal=case.causal, scale=case.scale, enable_gqa=gqa
        )

    try:
        want = by_hand()
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as caught:
            fb.attention(*mine, site=SITE, mask=mask, causal=case.causal, scale=case.scale, enable_gqa=gqa)
        assert str(caught.value) == str(error)
        return
    out = fb.attention(*mine, site=SITE, mask=mask, causal=case.causal, scale=case.scale, enable_gqa=gqa)

    assert torch.equal(out.nan_to_num(), want.nan_to_num())
    if case.grad:
        seed = torch.ones_like(want)
        for got, right in zip(
            torch.autograd.grad(out, mine, seed), torch.autograd.grad(want, theirs, seed), strict=True
        ):
            assert torch.equal(got.nan_to_num(), right.nan_to_num())
