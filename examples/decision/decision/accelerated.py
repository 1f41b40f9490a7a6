"""`accelerate`: the model's forward on the kernels of `fuseboard-tilelang`, with the model's own weights.

Between the embedding and the heads everything runs there: projections, GEGLU, the residual stream with its norms,
rotation, and attention, given each row's length and the window in place of masks. On a GPU in bfloat16 or float16; on
the CPU in float32, by the kernels' CPU form, which is there to check and not to be fast. Results differ from the
model's own in rounding; `benchmarks/parity.py` says by how much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fuseboard as fb
from decision.config import SLIDING
from decision.heads import confidence, marked
from decision.model import DecisionModel, Logits

__all__ = ["Accelerated", "accelerate"]

_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32,)}


def accelerate(model: DecisionModel) -> Accelerated:
    """The model's forward on the kernels; it is called as the model is. The first calls compile kernels.

    Rows have to be padded on the right, as `collate` pads them: on the CPU another row is an error, and on a GPU, which
    would have to be waited for, its logits are NaN.

    Raises:
        ImportError: `fuseboard-tilelang` is not installed.
        InputError: The model is not what the kernels take: in training, or its weights in another dtype or place.
    """
    try:
        from fuseboard_tilelang import ops
    except ImportError as error:
        msg = (
            f"accelerate needs the plugin fuseboard-tilelang ({error}). "
            "Install it: pip install --no-deps fuseboard-tilelang"
        )
        raise ImportError(msg, name="fuseboard_tilelang") from error
    if model.training:
        msg = "model is in training mode, and the kernels have neither dropout nor a backward. Call model.eval()."
        raise fb.InputError("model", msg)
    kinds = {(each.device, each.dtype) for each in model.parameters()}
    if len(kinds) > 1:
        given = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        msg = f"the model's weights are {given}; expected one dtype on one device. Call model.to(device, dtype)."
        raise fb.InputError("model", msg)
    ((device, dtype),) = kinds
    allowed = _DTYPES.get(device.type, ())
    if dtype not in allowed:
        takes = "; ".join(f"{' or '.join(map(str, each))} on {kind}" for kind, each in _DTYPES.items())
        msg = f"the model's weights are {dtype} on {device}; the kernels take {takes}. Call model.to(device, dtype)."
        raise fb.InputError("model", msg)
    return Accelerated(model, ops)


class Accelerated:
    """What `accelerate` gives: no module, and no weights of its own.

    Attributes:
        model: Whose weights are used, as they are at each call.
    """

    def __init__(self, model: DecisionModel, ops: Any) -> None:
        self.model = model
        self._ops = ops
        self._angles: dict[tuple[str, int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, marker_positions: Tensor, marker_mask: Tensor
    ) -> Logits:
        """As `DecisionModel.forward`; nothing is recorded for a backward.

        Raises:
            InputError: Autocast is on, or (on the CPU) a row is not padded on the right.
        """
        if torch.is_autocast_enabled(input_ids.device.type):
            msg = "autocast is on, which the kernels do not see: leave it, and give the weights that dtype."
            raise fb.InputError("autocast", msg)
        with torch.no_grad():
            keys = attention_mask.to(torch.bool)
            lengths = keys.sum(-1, dtype=torch.int32)
            at = torch.arange(keys.shape[1], device=keys.device)
            right = (keys == (at[None] < lengths[:, None])).all(-1)
            if keys.device.type == "cpu" and not bool(right.all()):
                row = int(right.logical_not().nonzero()[0])
                msg = f"row {row} of attention_mask is not padded on the right; expected the real tokens first."
                raise fb.InputError("attention_mask", msg)
            hidden = self.encode(input_ids, lengths)
            hidden = hidden.masked_fill(~right[:, None, None], torch.nan)
            model = self.model
            decision = model.decision_head(marked(hidden, marker_positions, marker_mask), marker_mask)
            return decision, model.action_head(hidden[:, 0], confidence(decision, marker_mask))

    def encode(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden state, `(batch, length, hidden)`; what it holds beyond a row's length means nothing.

        Args:
            input_ids: `(batch, length)`.
            lengths: `(batch,)`, int32: how many of a row's tokens, the first ones, are real.
        """
        ops, encoder = self._ops, self.model.model
        config = encoder.config
        batch, length = input_ids.shape
        heads, dim = config.num_attention_heads, config.head_dim
        embeddings = encoder.embeddings
        stream = self._norm(None, embeddings.tok_embeddings(input_ids).view(batch * length, -1), embeddings.norm)
        x, step = stream, None
        layer: Any
        for layer in encoder.layers:
            if step is not None:
                x = self._norm(stream, step, layer.attn_norm)
            qkv = self._linear(x, layer.attn.Wqkv)
            cos, sin = self._turns(layer.kind, length, qkv.device)
            ops.rope_(qkv, cos, sin, None, heads, dim)
            q, k, v = qkv.view(batch, length, 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
            window = config.reach if layer.kind == SLIDING and config.reach < length - 1 else None
            out = ops.attention(q, k, v, lengths=lengths, window=window, scale=dim**-0.5)
            step = self._linear(out.transpose(1, 2).reshape(batch * length, -1), layer.attn.Wo)
            x = self._norm(stream, step, layer.mlp_norm)
            step = self._linear(ops.geglu(x, layer.mlp.Wi.weight, layer.mlp.Wi.bias), layer.mlp.Wo)
        return self._norm(stream, step, encoder.final_norm).view(batch, length, -1)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = self._ops.gemm(x, layer.weight, layer.bias)
        return out

    def _norm(self, stream: Tensor | None, step: Tensor | None, norm: nn.LayerNorm) -> Tensor:
        """Take the residual stream one step on, in place, and normalise it."""
        out: Tensor = self._ops.add_ln(stream, step, norm.weight, norm.bias, norm.eps)
        return out

    def _turns(self, kind: str, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 `(length, head_dim / 2)`, kept for each length."""
        key = (kind, length, device)
        found = self._angles.get(key)
        if found is None:
            rotary: Any = self.model.model.rotary[kind]
            angles = torch.arange(length, device=device)[:, None].float() * rotary.inverse
            found = self._angles[key] = (angles.cos(), angles.sin())
        return found
