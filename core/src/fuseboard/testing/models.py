"""Calls that real models make, by project name: their heads, dimensions and masks, with small batches and lengths."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["MODELS"]

Fields: TypeAlias = dict[str, Any]


def _calls(heads: int, kv_heads: int, q_length: int, k_length: int, dim: int, **more: Any) -> Fields:
    shape = {"heads": heads, "kv_heads": kv_heads, "q_length": q_length, "k_length": k_length, "head_dim": dim}
    return {"batch": 1, **shape, "v_head_dim": dim, **more}


MODELS: dict[str, Fields] = {
    "llama-3.1-8b.decode": _calls(32, 8, 1, 301, 128, layout="cache"),
    "llama-3.1-8b.prefill": _calls(32, 8, 61, 61, 128, structure=("none", True, None), layout="transposed"),
    "qwen3-0.6b.batch": _calls(16, 8, 37, 37, 128, batch=2, structure=("left", True, None), layout="transposed"),
    "qwen3-0.6b.chunk": _calls(16, 8, 16, 200, 128, structure=("none", True, None), layout="cache"),
    "mistral-7b.window": _calls(32, 8, 80, 80, 128, structure=("none", True, 32), layout="transposed"),
    "gemma-2.train": _calls(8, 4, 48, 48, 256, structure=("none", True, None), scale=0.0625, grad="qkv"),
    "deepseek-v3.mla": _calls(16, 16, 40, 40, 192, v_head_dim=128, structure=("none", True, None), scale=0.1147),
    "minilm-l6.batch": _calls(12, 12, 48, 48, 32, batch=3, structure=("right", False, None), beside="additive"),
    "modernbert.local": _calls(
        12, 12, 80, 80, 64, batch=2, structure=("right", False, 17), ahead=16, layout="transposed"
    ),
    "whisper-large.cross": _calls(20, 20, 1, 1500, 64, layout="transposed"),
    "clip-l.text": _calls(12, 12, 77, 77, 64, causal=True),
    "vit-b16": _calls(12, 12, 197, 197, 64, layout="transposed"),
    "sd-1.5.cross": _calls(8, 8, 256, 77, 40, batch=2, layout="transposed"),
    "sdxl.self": _calls(10, 10, 256, 256, 64, layout="transposed"),
    "flux.joint": _calls(24, 24, 160, 160, 128),
    "t5.encoder": _calls(8, 8, 50, 50, 64, scale=1.0, layout="transposed"),
}
