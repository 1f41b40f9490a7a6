"""`QwenDecoder`: Qwen2 and Qwen3 models on the board, with transformers' own output bit for bit on the CPU.

```python
decoder = QwenDecoder.from_folder("Qwen3-0.6B", device="cuda")
ids = decoder.generate(prompt_ids, attention_mask=mask, max_new_tokens=200)
for token in fb.steps(decoder.stream(prompt_ids, max_new_tokens=200), "exact", run=run):
    print(token.ids)
```

Attention goes through two sites, `qwen.full` and `qwen.sliding`, whose reference is transformers' sdpa attention. The
host waits for the device once a token: to read the ids, who has ended, and whether a draw was invalid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuseboard.engine.decoder import fixed
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.fixed import FixedCache
from fuseboard.engine.decoder.generation import (
    Chooser,
    Draw,
    Token,
    check_autocast,
    check_count,
    check_ids,
    check_range,
    steps,
)
from fuseboard.engine.decoder.kernels.exact import ExactGlue, exact_for
from fuseboard.engine.decoder.kernels.glue import Glue, glue_for
from fuseboard.engine.decoder.kernels.products import Products, products_for
from fuseboard.engine.decoder.kv_cache import KVCache, RealKeys
from fuseboard.engine.decoder.layers import SITES, Given, Layer, packs_queries, untouched
from fuseboard.engine.decoder.loading import Loading
from fuseboard.engine.decoder.norms import RMSNorm, fused_norm_exact
from fuseboard.engine.decoder.rope import cos_sin, frequencies, signed
from fuseboard.engine.decoder.steps import DecoderSteps
from fuseboard.engine.decoder.streamed import Streamed
from fuseboard.engine.decoder.whole_step import WholeSteps
from fuseboard.engine.graphs import Graphs, unusable
from fuseboard.engine.sampling import Sampler
from fuseboard.errors import InputError
from fuseboard.masks import MaskInfo

__all__ = ["Draw", "QwenDecoder", "Token"]

_RESERVE = 256
_LINEARS = (
    ("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj"),
)  # fmt: skip
_FORMS = (True, False, "step", "step-eager")


class _Stack(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # A weight of its own: Embedding fills one that it makes, which on meta imports torch._dynamo, two seconds long.
        weight = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.embed_tokens.requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList([Layer(config, kind) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class QwenDecoder(Loading):
    """A Qwen2 or Qwen3 causal model: weights by transformers' names, caches and requests apart from it.

    One decoder serves several threads at once; each batch has a cache of its own. Its weights want no gradient unless
    you ask for one; without a cache it can be trained.

    Attributes:
        config: Its shape.
        eos: The ids that end a row, unless `generate` is told others.
        pad: What a row that has ended is filled with.
        fused: Whether `fuse` was called.
        exact_glue: Whether steps of one token may use kernels that do several elementwise operations at once, with
            torch's bits, where a trial on the device finds them so. No number depends on it.
    """

    def __init__(self, config: Any, *, ignore: Collection[str] = ()) -> None:
        """Build the modules, without memory for weights: `load` puts them in.

        Args:
            config: A `config.json` as a mapping, a transformers configuration, or a `DecoderConfig`.
            ignore: Options that you know to say nothing about the model's arithmetic.

        Raises:
            InputError: The configuration asks for something that is not implemented; the message names it.
        """
        super().__init__()
        self.config = config = DecoderConfig.of(config, ignore=ignore)
        self.eos = config.eos
        self.pad = config.pad
        self.fused = False
        self.exact_glue = True
        self._exact: ExactGlue | None = None
        self._no_exact_glue: str | None = None
        self._graphs: bool | str = True
        self._glue = (False, False)
        self._multiplied: set[int] = set()  # of how many rows there were steps with products
        self._one_token: dict[torch.device, DecoderSteps] = {}
        self._whole: dict[tuple[torch.device, bool], WholeSteps] = {}
        self._misfit: str | None = None
        self._streamed: Streamed | None = None
        self.model = _Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        self.lm_head.requires_grad_(requires_grad=False)
        self._tie()
        self._windows = [config.window_of(kind) for kind in config.layer_types]
        self._kinds = sorted(set(config.layer_types))
        self._ready: tuple[torch.device, torch.dtype, bool] | None = None
        self._given_frequencies: Tensor | None = None
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}
        self.eval()

    def _tie(self) -> None:
        """A head that is the embedding again."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    # ---- its forms

    def fuse(self, *, glue: bool = False, products: bool = False) -> QwenDecoder:
        """Stack q, k and v, and gate and up, into single linears: fewer launches, and maybe other bits.

        For inference only. Not undone: load anew for the weights apart. A second call may only add the glue.

        Args:
            glue: Also make norms, rotation and gate three Triton kernels a layer in steps over a fixed cache, where a
                trial on the device finds them right; `report()["glue"]` says what became of it.
            products: With the glue, also make the layers' matrix products of few rows, up to 16 in a 16-bit dtype and
                up to 3 in float32, by Triton kernels that have norm, gate and residual inside; of more, and of more
                than one in wide models, cuBLAS is faster. `report()["products"]` says what became of it.

        Raises:
            RuntimeError: It is being trained, its weights want gradients, or no weights are loaded.
        """
        self._prepare()
        self._for_inference("fuse()")
        if self._streamed is not None and not self.fused:
            msg = "the layers are streamed; call fuse() before stream_layers()."
            raise RuntimeError(msg)
        if not self.fused:
            with torch.inference_mode(mode=False), torch.no_grad():
                for layer in self.model.layers:
                    assert isinstance(layer, Layer)
                    layer.fuse()
            self.fused = True
            self._one_token.clear()  # graphs of the weights apart
            self._drop_whole()
        asked = (self._glue[0] or glue or products, self._glue[1] or products)
        if asked != self._glue:
            self._lay_out()
            self._glue = asked
            self._drop_whole()
        return self

    def _lay_out(self) -> None:
        """Weights row after row, as the glue's kernels read them: those that came transposed are copied."""
        with torch.inference_mode(mode=False), torch.no_grad():
            for module in self.modules():
                for name, each in list(module.named_parameters(recurse=False)):
                    if not each.is_contiguous():
                        setattr(module, name, nn.Parameter(each.detach().contiguous(), requires_grad=False))
        self._tie()

    def _for_inference(self, what: str) -> None:
        if self.training or any(each.requires_grad for each in self.parameters()):
            msg = f"{what} is for inference; call eval() and requires_grad_(False) first."
            raise RuntimeError(msg)

    def stream_layers(self, device: torch.device | str) -> QwenDecoder:
        """Keep the layers in pinned host memory, and copy each to the device as a pass comes to it.

        For a model that the device has no room for: load it on the CPU, and fuse it there. A token then takes as long
        as its weights take to come over. Embedding, norm and head stay on the device. The bits do not change. With
        `graphs = "step"` the graph copies the weights itself, where that was measured to be faster at its capture.
        Not undone: load anew for weights that stay. One pass at a time runs.

        Args:
            device: Where to compute.

        Raises:
            InputError: The device has no memory.
            RuntimeError: It is being trained, its weights want gradients, or no weights are loaded.
        """
        self._prepare()
        self._for_inference("stream_layers()")
        if self._streamed is None:
            device = torch.device(device)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if device.type == "meta":
                msg = "device is meta, which has no memory; expected the one to compute on."
                raise InputError("device", msg)
            before, others = self.device, (self.model.embed_tokens, self.model.norm, self.lm_head)
            try:
                for each in others:
                    each.to(device)
                made = Streamed([layer for _, layer in self._layers()], device)
            except BaseException:  # out of memory, mostly: all stays as it was
                for each in others:
                    each.to(before)
                self._tie()
                raise
            self._tie()
            self._one_token.clear()
            self._drop_whole()
            self._streamed = made
        return self

    @property
    def streamed(self) -> bool:
        """Whether the layers are streamed."""
        return self._streamed is not None

    def _refuse_streamed(self, what: str) -> None:
        if self._streamed is not None:
            msg = f"the layers are streamed, so that their parameters are not all there to be {what}; load anew."
            raise RuntimeError(msg)

    def state_dict(self, *given: Any, **options: Any) -> Any:
        """As in torch; not with streamed layers."""
        self._refuse_streamed("saved")
        return super().state_dict(*given, **options)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._refuse_streamed("moved or cast")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def glue(self) -> Glue | str:
        """The kernels that `fuse(glue=True)` asked for, or why there are none."""
        if not self._glue[0]:
            return "not asked for"
        # Streamed weights are written between the kernels that read them.
        return glue_for(self.device, self.dtype, self.config, early=not self.streamed)

    def products(self, rows: int) -> Products | str:
        """The kernels that `fuse(products=True)` asked for, in steps of so many rows, or why there are none."""
        if not self._glue[1]:
            return "not asked for"
        self._multiplied.add(rows)
        for index, layer in self._layers():
            for part, name in _LINEARS:
                module = getattr(getattr(layer, part), name)
                if not untouched(module, nn.Linear):
                    what = type(module).__name__
                    if type(module) is nn.Linear:
                        what += " with hooks, a forward of its own or weights that are no plain tensors"
                    return f"model.layers.{index}.{part}.{name} is a {what}: it is called as it is"
        return products_for(self.device, self.dtype, self.config, rows=rows, early=not self.streamed)

    @property
    def graphs(self) -> bool | str:
        """How steps of one token are made, where there are CUDA graphs.

        * True: a graph between any two attention calls, which see the growing cache: the bits of a step without graphs.
        * False: no graphs.
        * `"step"`: one graph for the whole step, draw included, over a cache of fixed capacity, where attention may be
          another kernel's: rounding may differ. Without graphs the same is done eagerly, with the same bits.
        * `"step-eager"`: what `"step"` computes, never by graphs: to compare with.

        Raises:
            InputError: When it is set to anything else.
        """
        return self._graphs

    @graphs.setter
    def graphs(self, form: bool | str) -> None:
        if form not in _FORMS or isinstance(form, int) is not isinstance(form, bool):
            msg = f"graphs is {form!r}; expected one of {', '.join(map(repr, _FORMS))}."
            raise InputError("graphs", msg)
        self._graphs = form
        if form not in ("step", "step-eager"):
            self._drop_whole()

    def _drop_whole(self) -> None:
        for each in self._whole.values():
            each.drop()

    def train(self, mode: bool = True) -> QwenDecoder:
        """As in torch; not with fused projections."""
        if mode and (self.fused or self._streamed is not None):
            what = "fused projections" if self.fused else "streamed layers"
            msg = f"{what} are for inference; load the weights into a new QwenDecoder to train it."
            raise RuntimeError(msg)
        super().train(mode)
        return self

    # ---- where it is

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.model.embed_tokens.weight.dtype

    def _prepare(self) -> None:
        """Once for a device and dtype: are all weights there, and which form of norm has transformers' bits."""
        now = (self.device, self.dtype)
        ready = (*now, self.exact_glue)
        if ready == self._ready:
            return
        if self.device.type == "meta":
            msg = "this QwenDecoder has no weights yet; call load(), or make it with from_folder or from_transformers."
            raise RuntimeError(msg)
        for name, each in self.named_parameters():
            if (each.device, each.dtype) != now:
                msg = f"{name} is {each.dtype} on {each.device}, the embedding {now[1]} on {now[0]}; expected the same."
                raise RuntimeError(msg)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.fused = fused_norm_exact(*now, module.size, module.eps)
        found = exact_for(*now, self.config) if self.exact_glue else "not asked for"
        exact = None if isinstance(found, str) else found
        for _, layer in self._layers():
            layer.exact = exact
        self._exact = exact
        self._no_exact_glue = found if isinstance(found, str) else None
        self._ready = ready

    def rotation(self, positions: Tensor, longest: int | None) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for `Layer.before`, `(batch or 1, length, 1, head_dim)`.

        Args:
            positions: Int64 `(batch or 1, length)`.
            longest: The length of the longest sequence, for a `dynamic` rope; None reads the positions, which waits.
        """
        rope, device = self.config.rope, positions.device
        if rope.kind == "dynamic":
            longest = int(positions.max()) + 1 if longest is None else longest  # their values decide, so this waits
            if longest > rope.trained:
                inverse, factor = frequencies(rope, longest=longest, device=device)
                cos, sin = cos_sin(positions, inverse, factor, self.dtype)
                return cos, signed(sin)
        held = self._frequencies.get(device)
        if held is None:
            inverse, factor = frequencies(rope, device=device)
            if self._given_frequencies is not None:
                inverse = self._given_frequencies.to(device)
            held = self._frequencies.setdefault(device, (inverse, factor))
        cos, sin = cos_sin(positions, *held, self.dtype)
        return cos, signed(sin)

    # ---- one pass

    def cache(
        self,
        batch: int,
        *,
        attention_mask: Tensor | None = None,
        padded: bool | None = None,
        reserve: int = 0,
    ) -> KVCache:
        """A new cache for a batch.

        Args:
            batch: How many rows.
            attention_mask: `(batch, prompt_length)`, 0 for padding.
            padded: Whether any token is padding. None reads the mask, which waits for the device if it lies there.
            reserve: For how many tokens to take memory at first.

        Raises:
            InputError: The batch or the reserve is no count, or the mask has another shape.
        """
        check_count("batch", batch, 1)
        check_count("reserve", reserve, 0)
        shape = (batch, attention_mask.shape[-1] if isinstance(attention_mask, Tensor) and attention_mask.dim() else 0)
        with torch.inference_mode(mode=False), torch.no_grad():
            real = RealKeys.of(attention_mask, shape, self.device, padded)
            return KVCache(self._windows, batch, real=real, reserve=reserve)

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        padded: bool | None = None,
        positions: Tensor | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Logits, `(batch, length, vocab)`, in the decoder's dtype.

        Args:
            ids: `(batch, length)`.
            embeds: `(batch, length, hidden_size)`, in their place.
            cache: Goes on from the tokens it has seen, and takes these in.
            attention_mask: Without a cache: `(batch, length)`, 0 for padding. A cache knows it from `cache()`.
            padded: As for `cache()`.
            positions: `(batch or 1, length)`; left out, each row's real tokens are counted.
            keep: Logits for so many last tokens; 0 for all.

        Raises:
            InputError: The arguments do not fit each other.
        """
        check_count("keep", keep, 0)
        hidden = self.hidden(
            ids, embeds=embeds, cache=cache, attention_mask=attention_mask, padded=padded, positions=positions
        )
        return self.end(hidden[:, -keep:] if keep else hidden, normalised=True)

    def embedded(self, ids: Tensor) -> Tensor:
        """The first hidden state, `(batch, length, hidden_size)`.

        Raises:
            InputError: There are ids beyond the vocabulary, and they are on the CPU.
        """
        try:
            return self.model.embed_tokens(ids)  # type: ignore[no-any-return]
        except IndexError:
            check_range("ids has", "ids", ids, self.config.vocab_size)
            raise

    def hidden(
        self,
        ids: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        padded: bool | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The last hidden state, normalised, `(batch, length, hidden_size)`; arguments as for `forward`."""
        self._prepare()
        hidden = self._embedded(ids, embeds)
        self._check(hidden, cache, attention_mask)
        batch, new = hidden.shape[:2]
        if positions is not None:
            _check_positions(positions, hidden)
        if cache is None:
            real = RealKeys.of(attention_mask, (batch, new), self.device, padded)
            begun = self._begin(hidden, KVCache(self._windows, batch, real=real), positions)
        else:
            begun = self._begin(hidden, cache, positions)
        hidden, cos, sin, given = begun
        delta: Tensor | None = None
        with self.one_pass():
            for index, layer in self.visited():
                hidden, q, k, v = layer.enter(hidden, delta, cos, sin)
                if cache is not None:
                    k, v = cache.put(index, k, v)
                hidden, delta = layer.leave(hidden, layer.attend(q, k, v, given[layer.kind]))
        if cache is not None:
            cache.end(new)
        return self.normalised(hidden, delta)

    def visited(self) -> Iterator[tuple[int, Layer]]:
        """The layers in their order, each when its weights are on the device; within `one_pass`."""
        return self._layers() if self._streamed is None else self._streamed.visited()

    def _layers(self) -> Iterator[tuple[int, Layer]]:
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            yield index, layer

    def one_pass(self) -> contextlib.AbstractContextManager[None]:
        """Around a pass through the layers: where they are streamed, one pass at a time has them."""
        return contextlib.nullcontext() if self._streamed is None else self._streamed.one_pass()

    def begin(self, ids: Tensor, cache: KVCache) -> tuple[Tensor, Tensor, Tensor, dict[str, Given]]:
        """The first part of a pass that the caller goes on with: `before`, `put`, `attend`, `after` of each layer.

        Then come `end`, and `cache.end`. Waits for no device.

        Returns:
            The first hidden state, the cosines and the signed sines for `Layer.before`, and what attention is told for
            each kind of layer.

        Raises:
            RuntimeError: The layers are streamed, so that the caller would meet other weights than theirs.
        """
        self._refuse_streamed("used one by one")
        self._prepare()
        _check_growing(cache)
        hidden = self._embedded(ids, None)
        self._check(hidden, cache, None)
        return self._begin(hidden, cache, None)

    def _begin(
        self, hidden: Tensor, cache: KVCache, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Given]]:
        new = hidden.shape[1]
        cache.begin()
        longest = cache.longest(new) if positions is None else None
        if positions is None:
            positions = cache.positions(new, hidden.device)
        cos, sin = self.rotation(positions, longest)
        return hidden, cos, sin, self.given(cache, new)

    def normalised(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """The last norm, of what `Layer.leave` gives for the last layer."""
        return self.model.norm.added(hidden, delta, self.serving(hidden))[1]

    def serving(self, hidden: Tensor) -> ExactGlue | None:
        """The kernels with torch's bits, where they may be used now."""
        return self._exact if self._exact is not None and self._exact.serves(hidden) else None

    def end(self, hidden: Tensor, *, normalised: bool = False) -> Tensor:
        """What follows the last layer: norm and head."""
        hidden = hidden if normalised else self.model.norm(hidden)
        # As one matrix: rows of a strided slice are multiplied together or batch by batch, the weight copied for each,
        # by whether the *weight* wants a gradient, under no_grad too. transformers' weights do, and these do not.
        logits = self.lm_head(hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], -1)  # type: ignore[no-any-return]

    def given(self, cache: KVCache, new: int) -> dict[str, Given]:
        """What attention is told for the next `new` tokens, for each kind of layer. Waits for no device.

        Exactly where transformers makes a dense mask there is one, since another kernel may answer a call with a mask,
        be it one that hides nothing.
        """
        return {kind: self._given(cache, new, self.config.window_of(kind)) for kind in self._kinds}

    def _given(self, cache: KVCache, new: int, window: int | None) -> Given:
        kept = cache.kept(window)
        length, start = kept + new, cache.length - kept
        keys = cache.real_keys(start, start + length)
        if keys is None and (window is None or length < window) and (new == 1 or kept == 0):
            return Given(causal=new > 1)
        padding = None if cache.real is None else cache.real.padding
        # Not by `mask_for`, which would look up what nobody told it, such as on which side the padding lies.
        info = MaskInfo(keys, causal=True, window=window, padding=padding if keys is not None else None)
        if new > 1:
            return Given(mask=info.dense(new, length, self.device), info=info)
        # One query sees every real key that was kept, so that nothing has to be computed to say so.
        if keys is not None:
            return Given(mask=keys[:, None, None, :], info=info)
        return Given(mask=torch.ones(1, 1, 1, length, dtype=torch.bool, device=self.device), info=info)

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        if (ids is None) == (embeds is None):
            msg = "give either ids or embeds."
            raise InputError("ids", msg)
        if embeds is not None:
            self._check_embeds(embeds)
            return embeds
        assert ids is not None
        check_ids(ids, self.device)
        return self.embedded(ids)

    def _check_embeds(self, embeds: Tensor) -> None:
        wanted = ("batch", "length", self.config.hidden_size)
        if not isinstance(embeds, Tensor):
            msg = f"embeds is a {type(embeds).__name__}; expected a tensor, {self.dtype} of shape {wanted}."
            raise InputError("embeds", msg)
        shape = tuple(embeds.shape)
        if len(shape) != 3 or shape[-1] != wanted[-1] or 0 in shape or embeds.dtype != self.dtype:  # noqa: PLR2004
            msg = f"embeds is {embeds.dtype} {shape}; expected {self.dtype} of shape {wanted}."
            raise InputError("embeds", msg)
        if embeds.device != self.device:
            msg = f"embeds is on {embeds.device}; expected it on {self.device}, where the decoder is."
            raise InputError("embeds", msg)

    def _check(self, hidden: Tensor, cache: KVCache | None, attention_mask: Tensor | None) -> None:
        check_autocast(hidden.device)
        if torch.is_grad_enabled() and (cache is not None or self.fused or self._streamed is not None):
            wants = hidden.requires_grad or any(each.requires_grad for each in self.parameters())
            if wants:
                kind = "fused projections" if self.fused else "streamed layers"
                what = "a cache is written in place" if cache is not None else f"{kind} are for inference"
                msg = f"{what}, and a gradient is wanted; run it under torch.no_grad(), or without."
                raise RuntimeError(msg)
        if cache is None:
            return
        if attention_mask is not None:
            msg = "attention_mask belongs to the cache: give it to cache()."
            raise InputError("attention_mask", msg)
        _check_growing(cache)
        if hidden.shape[0] != cache.batch:
            msg = f"the cache is for {cache.batch} rows; given {hidden.shape[0]}."
            raise InputError("cache", msg)
        heads = (self.config.num_key_value_heads, self.config.head_dim)
        why = cache.misfit(self._windows, heads, (hidden.dtype, hidden.device))
        if why is not None:
            msg = f"the cache is not this decoder's: {why}; make a new one."
            raise InputError("cache", msg)

    # ---- generating

    def stream(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        padded: bool | None = None,
        sampler: Sampler | Draw | None = None,
        generator: torch.Generator | None = None,
        eos: int | Iterable[int] | None = None,
        pad: int | None = None,
        ahead: bool = False,
    ) -> Generator[Token, None, None]:
        """Generate token by token: a generator, which can be closed between any two.

        Each step runs under whatever is bound where it is asked for; `fb.steps(decoder.stream(...), policy)` binds for
        the steps alone. No gradient mode or binding is left behind between two steps, nor after closing.

        Args:
            ids: The prompts, `(batch, length)`, padded on the left where they are of unequal length.
            max_new_tokens: How many tokens at most; fewer when all rows have ended.
            attention_mask: `(batch, length)`, 0 for padding; on the CPU it is read without waiting for the device.
            padded: Whether any token is padding, where you know; see `cache`.
            sampler: A `Sampler`, or a function of logits and step; None takes the most probable id.
            generator: What a `Sampler` draws with.
            eos: The id or ids that end a row; None for the sampler's own, else the model's; `()` for none.
            pad: What a row that has ended goes on with; None likewise, else the first of `eos`.
            ahead: With `graphs = "step"` and a `Sampler`, launch each step before the token before it is given out, so
                that the device need not wait for the host. The tokens are the same, and a step that nobody asks for
                leaves no trace; but weights or a policy that you change between two tokens count one token later.

        Raises:
            InputError: An argument cannot be right.
            DrawError: At the step that drew from invalid probabilities, in torch.multinomial's words.
        """
        self._prepare()
        check_ids(ids)
        check_range("ids has", "ids", ids, self.config.vocab_size)
        check_count("max_new_tokens", max_new_tokens, 1)
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            msg = f"attention_mask is a {type(attention_mask).__name__}; expected a tensor, as ids is."
            raise InputError("attention_mask", msg)
        if attention_mask is not None and attention_mask.shape != ids.shape:
            msg = f"attention_mask has shape {tuple(attention_mask.shape)}; expected that of ids, {tuple(ids.shape)}."
            raise InputError("attention_mask", msg)
        chooser = Chooser.of(sampler, eos, pad, (self.eos, self.pad))
        if ids.shape[0] > 1:  # one row alone ends with its last token
            chooser.check_pad(self.config.vocab_size)
        ids = ids.to(self.device, non_blocking=True, copy=True)  # which the caller may write before the first step
        reserve = ids.shape[1] + min(max_new_tokens, _RESERVE)
        cache = self.cache(ids.shape[0], attention_mask=attention_mask, padded=padded, reserve=reserve)
        mask = None if cache.real is None else cache.real.keys
        state = chooser.sampler.start(ids, self.config.vocab_size, generator=generator, attention_mask=mask)
        return steps(self, ids, cache, chooser, state, max_new_tokens, ahead=ahead)

    # ---- one token over a fixed cache

    def fixed(self, cache: KVCache, *, capacity: int = 0) -> FixedCache:
        """A cache of fixed capacity that goes on from a growing one, for `step` and `WholeSteps`.

        Args:
            cache: From `cache()`, with the prompt in it; it stays as it is.
            capacity: For how many tokens to have room, rounded up; it doubles when it is full.

        Raises:
            InputError: Its padding is not on the left, and there are sliding layers; or it is not this decoder's; or
                the capacity is no count.
            RuntimeError: It was left half written.
        """
        self._prepare()
        _check_growing(cache)
        check_count("capacity", capacity, 0)
        made = FixedCache(self, cache.batch, fixed.capacity_for(max(capacity, cache.length + 1)))
        made.fill(self, cache)
        return made

    def step(self, ids: Tensor, cache: FixedCache) -> Tensor:
        """Logits of one token a row, `(batch, 1, vocab)`, eagerly; the cache takes the token in. Waits for nothing.

        Args:
            ids: `(batch, 1)`.
            cache: From `fixed`.

        Raises:
            InputError: The ids or the cache do not fit.
        """
        self._prepare()
        fixed.check(self, ids, cache)
        self._check(cache.positions, None, None)
        with torch.no_grad():
            cache.prepare(self)
            logits = fixed.step(self, ids, cache)
        cache.length += 1
        return logits

    def _whole_for(self, cache: KVCache) -> WholeSteps | None:
        """Who makes whole steps for a request, if they are asked for and its cache can be taken over."""
        if self.graphs not in ("step", "step-eager"):
            return None
        self._misfit = fixed.misfit(cache, self._windows)
        if self._misfit is not None:
            return None
        by_graphs = self._no_graphs() is None
        found = self._whole.get((self.device, by_graphs))
        if found is None:
            made = WholeSteps(self, Graphs(self.device) if by_graphs else None)
            found = self._whole.setdefault((self.device, by_graphs), made)
        return found

    def _next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Logits, `(batch, 1, vocab)`, by graphs where they serve."""
        if ids.shape[1] > 1 or not cache.length or self._no_graphs() is not None:
            return self.forward(ids, cache=cache, keep=1)
        steps = self._one_token.get(self.device)
        if steps is None:
            steps = self._one_token.setdefault(self.device, DecoderSteps(self, Graphs(self.device)))
        return steps(ids, cache)

    def _no_graphs(self) -> str | None:
        if self._streamed is not None and self.graphs is True:
            return "the layers are streamed"
        return unusable(self.device) if self.graphs in (True, "step") else "switched off"

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: graphs hold addresses of this one's weights."""
        self._refuse_streamed("copied")
        # Where it is unpickled the norms are tested anew: on another machine or torch their form may be another.
        return {**self.__dict__, "_one_token": {}, "_whole": {}, "_ready": None}

    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        padded: bool | None = None,
        sampler: Sampler | Draw | None = None,
        generator: torch.Generator | None = None,
        eos: int | Iterable[int] | None = None,
        pad: int | None = None,
        on_token: Callable[[Token], object] | None = None,
        ahead: bool | None = None,
    ) -> Tensor:
        """Prompts and what follows them, `(batch, length + new)`, as transformers' `generate` returns them.

        Args:
            ids: As for `stream`, like the arguments that follow.
            max_new_tokens: Likewise.
            attention_mask: Likewise.
            padded: Likewise.
            sampler: Likewise.
            generator: Likewise.
            eos: Likewise.
            pad: Likewise.
            on_token: Called after each step; what it raises ends the generation.
            ahead: As for `stream`; None where there is no `on_token`, so that nobody could tell.

        Raises:
            InputError: As `stream`.
            DrawError: Likewise.
        """
        if on_token is not None and not callable(on_token):
            msg = f"on_token is {on_token!r}; expected a function of a Token, or None."
            raise InputError("on_token", msg)
        tokens = self.stream(
            ids, max_new_tokens=max_new_tokens, attention_mask=attention_mask, padded=padded, sampler=sampler,
            generator=generator, eos=eos, pad=pad, ahead=on_token is None if ahead is None else ahead,
        )  # fmt: skip
        parts = [ids.to(self.device, non_blocking=True, copy=True)]
        with contextlib.closing(tokens):  # when a callback raises too, whose traceback would keep it open
            for token in tokens:
                parts.append(token.tensor)
                if on_token is not None:
                    on_token(token)
        return torch.cat(parts, dim=1)

    # ---- report

    def report(self) -> dict[str, Any]:
        """How it computes here, as JSON-ready data, to be put beside an output."""
        self._prepare()
        config = self.config
        glue = self.glue
        norms = {module.size: module.fused for module in self.modules() if isinstance(module, RMSNorm)}
        own = self._given_frequencies is None
        fixed_form = self.graphs in ("step", "step-eager") and self._misfit is None
        whole = self._whole.get((self.device, self._no_graphs() is None))
        steps = whole if fixed_form else self._one_token.get(self.device)
        return {
            "model": config.model_type,
            "layers": config.num_hidden_layers,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "norm": {
                str(size): "F.rms_norm, then weight" if fused else "transformers' formula"
                for size, fused in sorted(norms.items())
            },
            "queries and keys": "together" if self.fused or self.device.type == "cpu" else "apart",
            "rope": config.rope.kind if own else f"{config.rope.kind}, frequencies as the transformers model held them",
            "heads sharing a key": config.groups,
            "masked single queries": "packed" if packs_queries() else "keys repeated",
            "fused_projections": self.fused,
            "streamed": None
            if self._streamed is None
            else {
                "layers": config.num_hidden_layers,
                "bytes a token": self._streamed.nbytes,
                "measured": None if whole is None else whole.measured,
            },
            "exact_glue": self._no_exact_glue or "Triton, one token at a time",
            "glue": glue if isinstance(glue, str) else "Triton",
            "products": self._products_said(),
            "graphs": {"captured": 0, "replays": 0, "failed": None} if steps is None else steps.report(),
            "no_graphs": self._no_graphs(),
            "step": self._form(),
            "sites": {SITES[kind].name: config.layer_types.count(kind) for kind in self._kinds},
        }

    def _products_said(self) -> str | dict[str, str]:
        """What makes the products of a step, for each number of rows that there was one of."""
        if not self._glue[1]:
            return "not asked for"
        return {str(rows): str(self.products(rows)) for rows in sorted(self._multiplied.copy())}

    def _form(self) -> dict[str, Any]:
        """How steps of one token are made, and why not as one graph."""
        asked = self.graphs in ("step", "step-eager")
        whole = self._whole.get((self.device, True))
        failed = None if whole is None else whole.report()["failed"] or whole.slower
        why = self._misfit or self._no_graphs() or failed if asked else "not asked for"
        between = self._no_graphs() is None and self._streamed is None
        if not asked or self._misfit is not None:
            form = "graphs between attention calls" if between else "eager"
        else:
            form = "eager, over a fixed cache" if why else "one graph"
        return {"form": form, "why not one graph": why}

    def extra_repr(self) -> str:
        """What torch prints."""
        return f"{self.config.model_type}, fused={self.fused}"


def _check_growing(cache: object) -> None:
    if not isinstance(cache, KVCache):
        msg = f"cache is a {type(cache).__name__}; expected one from cache()."
        raise InputError("cache", msg)


def _check_positions(positions: Tensor, hidden: Tensor) -> None:
    if not isinstance(positions, Tensor):
        msg = f"positions is a {type(positions).__name__}; expected a tensor, (batch or 1, length)."
        raise InputError("positions", msg)
    batch, new = hidden.shape[:2]
    if tuple(positions.shape) not in ((batch, new), (1, new)) or positions.device != hidden.device:
        msg = (
            f"positions has shape {tuple(positions.shape)} on {positions.device}; "
            f"expected ({batch} or 1, {new}) on {hidden.device}."
        )
        raise InputError("positions", msg)
