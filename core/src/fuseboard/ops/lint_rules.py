"""The rules of `fuseboard lint`: which full name means what, and what to write instead."""

from __future__ import annotations

import re
import sys
from functools import cache

__all__ = ["ADVICE", "KERNEL_RULES", "RULES", "WORDS", "is_attention_kernel", "of_environment", "of_name", "of_write"]

RULES = {
    "FB101": "torch's attention called past the board",
    "FB102": "an attention operator of aten called past the board",
    "FB103": "flex or variable-length attention of torch called past the board",
    "FB104": "a kernel package called past the board",
    "FB105": "a module of torch that computes attention itself",
    "FB201": "a process-wide switch of torch written",
    "FB202": "kernels of torch's attention switched for every thread",
    "FB203": "a process-wide default of torch set",
    "FB204": "a global random generator seeded",
    "FB205": "kernels of torch replaced for the whole process",
    "FB206": "an attribute of another package replaced",
    "FB207": "an environment variable that torch reads written",
    "FB301": "an allow without a reason",
    "FB302": "an allow that suppresses nothing",
    "FB901": "a file that is not valid Python",
    "FB902": "a file that could not be read",
}

# Where calling kernels is the purpose, these are off.
KERNEL_RULES = frozenset({"FB101", "FB102", "FB103", "FB104", "FB105"})

_CALL = "write fuseboard.attention(q, k, v, site=SITE, ...)"
_BIND = "choose kernels with fuseboard.bind(policy), which holds for one thread or task"
_HOST = "leave it to the host, which sets it once at its start"
ADVICE = {
    "FB101": _CALL,
    "FB102": f"{_CALL}; a kernel of one's own is a plugin",
    "FB103": f"{_CALL} with mask_info for the mask's structure",
    "FB104": f"{_CALL} and install the package's plugin",
    "FB105": f"project to q, k, v and {_CALL}",
    "FB201": _HOST,
    "FB202": _BIND,
    "FB203": f"pass dtype and device where they are used, or {_HOST}",
    "FB204": "draw from a torch.Generator (numpy.random.Generator, random.Random) of one's own",
    "FB205": f"a kernel is a plugin of fuseboard.backends; {_BIND}",
    "FB206": "pass what is needed, or subclass; every user of that package gets the replacement",
    "FB207": f"{_HOST}, before torch is imported",
}

# Kernel packages, and what in them computes attention. Their helpers (packing, rotary, norms) do not.
_FLASH = r"_?(?:wrapped_)?_?flash_attn_(?!interface|triton|2_cuda|3\b)\w+|flash_attn_func|Flash\w*Attention\w*|MHA"
_PACKAGES = {
    "flash_attn": _FLASH,
    "flash_attn_interface": _FLASH,
    "flash_attn_3": _FLASH,
    "flash_attn_2_cuda": r"\w*(?:fwd|bwd)\w*",
    "flash_attn_3_cuda": r"\w*(?:fwd|bwd)\w*",
    "vllm_flash_attn": _FLASH,
    "jvp_flash_attention": r"\w*attention",
    "xformers": r"(?:_?memory_efficient_attention|scaled_dot_product_attention|merge_attentions)\w*",
    "mslk": r"_?memory_efficient_attention\w*|\w*flash_attn\w*|\w*attention_forward\w*",
    "sageattention": r"sageattn\w*",
    "sageattn3": r"sageattn3\w*",
    "spas_sage_attn": r"\w*(?:sage|sparse)\w*attn\w*|spas_sage\w+",
    "flashinfer": r"(?:single|batch)_\w+_with_\w*kv_cache\w*"
    r"|Batch(?:Prefill|Decode|Attention)\w*|trtllm_\w*attention\w*",
    "natten": r"na[123]d(?!_)|na[123]d_(?:qk|av|fmha)|neighborhood_attention\w*|NeighborhoodAttention\w+|attention",
    "aiter": r"(?:flash_attn|mha|fmha)_\w+|\w+_flash_attn\w*",
    "torch_npu": r"npu_\w*(?:attention|flash)\w*",
    "torch_xla": r"(?:flash|paged|ragged_paged)_attention\w*",
    "transformer_engine": r"(?:Dot\w+Attention|MultiheadAttention)",
    "comfy_kitchen": r"\w*attention",
    "vllm": r"\w*flash_attn_varlen_func",
    "magi_attention": r"\w*flex_flash_attn\w*|calc_attn",
    "block_sparse_attn": r"\w*block_sparse_attn\w*func",
    "ring_flash_attn": r"\w*flash_attn\w*func",
    "tokamax": r"dot_product_attention",
}
# A released operator of such a package: `torch.ops.flash_attn_3.fwd`.
_OPS = r"(?:flash_attn\w*|xformers\w*|mslk|sageattention\w*|_?vllm_fa\d*_C|flashinfer)"
_KERNELS = "|".join(rf"{name}\.(?:\w+\.)*(?:{what})" for name, what in _PACKAGES.items())

_ATTENTIONS = (
    r"_?scaled_dot_product_(?!.*backward)\w*attention\w*|_(?:flash|efficient|cudnn)_attention_(?:forward|backward)\w*"
    r"|_scaled_dot_product_\w*backward\w*"
)
# ruff: noqa: ISC004 - a pattern on several lines
_NAMED: tuple[tuple[str, str], ...] = (
    (
        "FB101",
        r"torch\.(?:nn\.functional|_C\._nn|nn\.modules\.\w+\.F|nn\.attention)\.scaled_dot_product_attention",
    ),
    ("FB102", rf"torch\.ops\.aten\.(?:{_ATTENTIONS})(?:\.\w+|\[\])?"),
    ("FB102", rf"torch\.(?:_C\._VariableFunctions\.|_C\._nn\.|_VF\.)?(?:{_ATTENTIONS})"),
    ("FB102", r"torch\.(?:ops\.aten\.)?_triton_scaled_dot_attention(?:\.\w+)?"),
    (
        "FB103",
        r"torch\.nn\.attention\.(?:flex_attention\.flex_attention|varlen\.varlen_attn\w*)|torch\.ops\.torch_attn\.\w+"
        r"|torch\.ops\.higher_order\.flex_attention|torch\._higher_order_ops\.(?:\w+\.)?flex_attention",
    ),
    ("FB104", rf"{_KERNELS}|torch\.ops\.{_OPS}\.\w+(?:\.\w+)?"),
    (
        "FB105",
        r"torch\.nn\.(?:modules\.\w+\.)?(?:MultiheadAttention|Transformer(?:Encoder|Decoder)?(?:Layer)?)"
        r"|torch\.nn\.functional\.multi_head_attention_forward"
        r"|torch\.(?:ops\.aten\.)?_(?:native_multi_head_attention|transformer_encoder_layer_fwd)(?:\.\w+)?",
    ),
    (
        "FB202",
        r"torch\.nn\.attention\._?sdpa_kernel(?:_variadic)?|torch\.backends\.cuda\.(?:sdp_kernel"
        r"|enable_\w+_sdp|allow_fp16_bf16_reduction_math_sdp)|torch\._C\._set_(?:sdp|math_sdp)_\w+",
    ),
    (
        "FB201",
        r"torch\.backends(?:\.\w+)*\.(?:set_)?flags|torch\.backends\.disable_global_flags"
        r"|torch\._C\._set_(?:cublas|cudnn|mkldnn|onednn|nnpack|miopen|fp32|cpu_allow|linalg|blas|rocm_fa)_\w+",
    ),
    (
        "FB203",
        r"torch\.set_(?:default_\w+|float32_matmul_precision|num_threads|num_interop_threads|flush_denormal"
        r"|deterministic_debug_mode|warn_always|printoptions)|torch\.use_deterministic_algorithms"
        r"|torch\._C\._set_(?:default|deterministic|float32)_\w+|torch\.cuda\.set_sync_debug_mode",
    ),
    (
        "FB204",
        r"torch\.(?:(?:cuda|xpu|mps|mtia|npu|musa|hpu|mlu|accelerator)\.)?(?:random\.)?"
        r"(?:manual_seed(?:_all)?|seed(?:_all)?|set_rng_state(?:_all)?)"
        r"|torch\.(?:random\.)?default_generator\.(?:manual_seed|seed|set_state)"
        r"|torch\.cuda\.default_generators\[\]\.(?:manual_seed|seed|set_state)"
        r"|torch_xla(?:\.\w+)*\.set_rng_state|random\.(?:seed|setstate)|numpy\.random\.(?:seed|set_state)"
        r"|(?:transformers|diffusers|accelerate)(?:\.\w+)*\.(?:set_seed|enable_full_determinism)"
        r"|(?:pytorch_)?lightning(?:\.\w+)*\.seed_everything",
    ),
    (
        "FB205",
        r"torch\.nn\.attention\.(?:_registry\.)?(?:activate|register|restore)_flash_attention_impl"
        r"|torch\.nn\.attention\._fa\d\.register_flash_attention_fa\d"
        r"|torch\.ops\.aten\.\w+(?:\.\w+)?\.py_(?:impl|functionalize_impl)",
    ),
)
_MATCHERS = [(rule, re.compile(pattern)) for rule, pattern in _NAMED]

_SWITCH = re.compile(r"torch\.backends\..+|torch(?:\.\w+)*\._?config\..+")
_ENVIRONMENT = re.compile(
    r"(?:PYTORCH|TORCH|TORCHINDUCTOR|TORCHDYNAMO|CUBLAS|CUDNN|MKL|OMP|KMP)_\w+"
    r"|CUDA_(?:VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_ORDER)|NVIDIA_TF32_OVERRIDE"
)

# A source without one of these words and without a write to an imported name has no finding. Plain words: a search for
# each is many times as fast as one pattern with all of them.
WORDS = (
    *(
        "scaled_dot",
        "flash_attention_for",
        "efficient_attention_",
        "cudnn_attention_",
        "flash_attention_b",
        "flex_attention",
        "varlen_attn",
        "vllm_fa",
    ),
    *(f"{before}{name}" for name in (*_PACKAGES, "aten") for before in " .,'\"\t"),
    *("MultiheadAttention", "nn.Transformer", "TransformerEncoder", "TransformerDecoder", "multi_head_attention"),
    *(
        "transformer_encoder_layer",
        "sdpa_kernel",
        "sdp_kernel",
        "flash_sdp",
        "efficient_sdp",
        "cudnn_sdp",
        "math_sdp",
        "_sdp_",
        "_C._set",
        "import _set",
        "seed",
        "setstate",
    ),
    *("set_default_", "set_float32", "set_num_", "set_flush", "set_deterministic", "set_warn", "set_print", "set_sync"),
    *("set_state", "set_rng", "use_deterministic", "flags", "preferred_", "py_impl", "py_functionalize"),
    *("flash_attention_impl", "_fa3", "_fa4", "setattr", "delattr", "environ", "putenv", "unsetenv", "mock"),
    *("__dict__", "vars(", "fuseboard", "get_kernel", "enable_full", "_set_cu", "_set_fp32", "_set_mk"),
)


@cache
def of_name(name: str) -> str | None:
    """The rule against calling or handing on what has this full name, or None."""
    return next((rule for rule, pattern in _MATCHERS if pattern.fullmatch(name)), None)


def of_write(name: str, own: frozenset[str]) -> str | None:
    """The rule against assigning to this full name, or None. `own` are the top-level names of the source's project."""
    root, dot, _ = name.partition(".")
    if _SWITCH.fullmatch(name):
        return "FB201"
    if not dot or not root or root in own or root in sys.stdlib_module_names or name.endswith("[]"):
        return None
    return "FB206"


def of_environment(variable: str) -> str | None:
    """The rule against writing this environment variable, or None."""
    return "FB207" if _ENVIRONMENT.fullmatch(variable) else None


def is_attention_kernel(repository: str) -> bool:
    """Whether a kernel that `kernels.get_kernel` loads computes attention, by its repository's name."""
    return re.search(r"attn|attention", repository, re.IGNORECASE) is not None
