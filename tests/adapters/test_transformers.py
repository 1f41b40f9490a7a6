"""transformers models on the board: `auto` is transformers' own sdpa in bits, and structure reaches the backends."""

from __future__ import annotations

import copy
import gc
import inspect
import subprocess
import sys
import types

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry as registries
from fuseboard.masks import check_mask_info
from fuseboard.registry import Entry, Registry

hf = pytest.importorskip("transformers", reason="transformers is not installed")
masking = pytest.importorskip("transformers.masking_utils", reason="transformers is older than 4.57")

from fuseboard.adapters import transformers as adapter  # noqa: E402 - only where transformers is installed

V5 = int(hf.__version__.split(".")[0]) >= 5
# transformers 5.24 renamed it.
CACHE = "cache" if "cache" in inspect.signature(hf.Qwen3ForCausalLM.forward).parameters else "past_key_values"
BATCH, LENGTH, VOCABULARY = 3, 12, 64

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NO_END = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def bert():
    return hf.BertModel, hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def modernbert(**more):
    given = {**SMALL, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0, **more}
    return hf.ModernBertModel, hf.ModernBertConfig(**given)


def llama():
    return hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, **NO_END, num_key_value_heads=4)


def qwen3():
    return hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, **NO_END, num_key_value_heads=2, head_dim=8)


def mistral():
    return hf.MistralForCausalLM, hf.MistralConfig(
        **SMALL, **NO_END, num_key_value_heads=2, head_dim=8, sliding_window=5
    )


def gemma3():
    kinds = ["sliding_attention", "full_attention"]
    given = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "layer_types": kinds}
    return hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SMALL, **NO_END, **given)


DECODERS = [llama, qwen3, mistral, gemma3]
# transformers 4 keeps BERT in classes of its own, one for each implementation, and says so with a KeyError.
MODELS = [bert, modernbert, *DECODERS] if V5 else DECODERS


needs_bert = pytest.mark.skipif(not V5, reason="BERT takes no registered attention before transformers 5")


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()
    adapter.register()  # once is enough, twice is no error


def pair(make, dtype=torch.float32):
    """The same weights under transformers' sdpa and under the board."""
    kind, config = make()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config._attn_implementation = "sdpa"
        plain = kind(config).to(dtype).eval()
    config = copy.deepcopy(config)
    config._attn_implementation = "fuseboard"
    board = kind(config).to(dtype).eval()
    board.load_state_dict(plain.state_dict())
    assert board.config._attn_implementation == "fuseboard"
    return plain, board


def batch(padding, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if padding == "absent":
        return {"input_ids": ids}
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, missing in enumerate((0, 3, 7)):
        if padding == "right" and missing:
            real[row, -missing:] = 0
        if padding == "left" and missing:
            real[row, :missing] = 0
    return {"input_ids": ids.masked_fill(real == 0, 0), "attention_mask": real}


def outputs(model, inputs):
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def same(left, right):
    return torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


class Plugin:
    """A backend of exact kernels that keeps what it was given."""

    def __init__(self, structures=(), masks=("bool", "additive"), exact=True):
        self.seen: list[types.SimpleNamespace] = []
        self._structures, self._masks, self._exact = structures, masks, exact

    @fb.hookimpl
    def info(self):
        return fb.BackendInfo("keeps what it was given")

    @fb.hookimpl
    def constraints(self):
        return fb.Constraints(
            devices={"cpu"},
            dtypes={torch.float32, torch.bfloat16},
            gqa=True,
            causal=fb.ALL_LENGTHS,
            masks=self._masks,
            structures=self._structures,
            custom_scale=True,
            backward=True,
            any_stride=True,
        )

    @fb.hookimpl
    def exactness(self):
        return fb.Exactness.EXACT if self._exact else fb.Exactness.APPROXIMATE

    @fb.hookimpl
    def kernel(self, device):
        def kernel(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
            self.seen.append(types.SimpleNamespace(q=q, k=k, mask=mask, info=mask_info, causal=causal, scale=scale))
            if mask_info is not None:
                mask = mask_info.dense(q.shape[2], k.shape[2], q.device)
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

        return kernel


ANY_STRUCTURE = (fb.StructureRule(keys={"none", "any", "right", "left"}, window={False, True}, ahead={False, True}),)


@pytest.fixture(scope="module")
def _installed():
    """A registry whose one backend takes structures and has been through its self-test."""
    plugin = Plugin(ANY_STRUCTURE)
    registry = Registry([Entry("recorder", lambda: plugin)])
    q = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    with registries.use(registry), fb.bind("fast"):
        fb.attention(q, q, q, site=fb.Site("test.warm"))
    return plugin, registry


@pytest.fixture
def recorder(_installed):
    plugin, registry = _installed
    plugin.seen.clear()
    with registries.use(registry):
        yield plugin


# --- auto is sdpa -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("padding", ["absent", "none", "right", "left"])
@pytest.mark.parametrize("make", MODELS)
def test_auto_equals_sdpa_bit_for_bit_forward_and_backward(make, padding, dtype):
    plain, board = pair(make, dtype)
    inputs = batch(padding)
    results = []
    for model in (plain, board):
        out = outputs(model, inputs)
        real = inputs.get("attention_mask", torch.ones(BATCH, LENGTH))[..., None].bool()
        torch.where(real, out, 0.0).float().square().sum().backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (expected, gradients), (out, own) = results

    assert same(out, expected)
    assert gradients.keys() == own.keys()
    assert gradients
    assert [name for name in own if not same(own[name], gradients[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", DECODERS)
def test_auto_generates_what_sdpa_generates_from_prompts_of_unequal_length(make, dtype):
    plain, board = pair(make, dtype)
    inputs = batch("left")
    given = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, out = (model.generate(**inputs, **given) for model in (plain, board))

    assert torch.equal(out.sequences, expected.sequences)
    assert all(same(own, theirs) for own, theirs in zip(out.logits, expected.logits, strict=True))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_auto_equals_sdpa_with_a_static_cache(padding):
    plain, board = pair(qwen3)
    given = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given |= {"cache_implementation": "static", "disable_compile": True}
    expected, out = (model.generate(**batch(padding), **given) for model in (plain, board))

    assert all(same(own, theirs) for own, theirs in zip(out.logits, expected.logits, strict=True))


def bart():
    given = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    given |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": VOCABULARY, "dropout": 0.0}
    return hf.BartForConditionalGeneration, hf.BartConfig(
        **given, max_position_embeddings=64, forced_eos_token_id=None, decoder_start_token_id=2
    )


def whisper():
    given = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    given |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": VOCABULARY, "dropout": 0.0}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.WhisperForConditionalGeneration, hf.WhisperConfig(
        **given, **tokens, num_mel_bins=8, max_source_positions=20, max_target_positions=32
    )


@pytest.mark.parametrize("make", [bart, whisper])
def test_auto_equals_sdpa_in_an_encoder_and_decoder(make):
    plain, board = pair(make) if V5 else pair_under_its_name(make)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if make is whisper:
        inputs = {"input_features": torch.randn(BATCH, 8, 40, generator=generator), "decoder_input_ids": ids[:, :5]}
    else:
        inputs = {**batch("right"), "decoder_input_ids": ids[:, :5]}
    results = []
    for model in (plain, board):
        with on_board(model is board):
            out = model(**inputs).logits
            out.square().sum().backward()
        results.append((out, [p.grad for p in model.parameters() if p.grad is not None]))
    (expected, gradients), (out, own) = results

    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(own, gradients, strict=True))
    kinds = {"Bart": "BartAttention", "Whis": "WhisperAttention"}[type(board).__name__[:4]]
    assert {f"transformers.{kinds}{kind}" for kind in ("", ".causal", ".cross")} <= fb.sites().keys()


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["exact", "fast", "recorder"])
@pytest.mark.parametrize("padding", ["absent", "right", "left"])
@pytest.mark.parametrize("make", MODELS)
def test_a_bound_backend_answers_every_layer_and_is_close(make, padding, policy, recorder):
    plain, board = pair(make)
    inputs = batch(padding)
    run = fb.Run()
    with torch.no_grad():
        expected = outputs(plain, inputs)
        with fb.bind(policy, run=run):
            out = outputs(board, inputs)
    real = inputs.get("attention_mask", torch.ones(BATCH, LENGTH)).bool()

    torch.testing.assert_close(out[real], expected[real], atol=2e-5, rtol=1e-4)
    assert run.report() == {"attention": {"policy": policy, "used": {"recorder": 2}, "fallbacks": {}}}
    assert len(recorder.seen) == 2


def test_key_heads_reach_a_backend_unrepeated(recorder):
    _, board = pair(qwen3)
    with torch.no_grad(), fb.bind("fast"):
        outputs(board, batch("absent"))

    assert {(call.q.shape[1], call.k.shape[1]) for call in recorder.seen} == {(4, 2)}


def test_generation_under_a_policy_gives_the_same_tokens_and_counts_each_step(recorder):
    plain, board = pair(qwen3)
    run = fb.Run()
    given = {"max_new_tokens": 6, "do_sample": False}
    expected = plain.generate(**batch("left"), **given)
    with fb.bind("exact", run=run):
        out = board.generate(**batch("left"), **given)

    assert torch.equal(out, expected)
    assert run.report()["attention"]["used"] == {"recorder": 2 * 6}


@needs_bert
def test_a_site_of_a_decoder_refuses_approximate_backends_and_an_encoders_takes_them():
    plugin = Plugin(exact=False)
    with registries.use(Registry([Entry("recorder", lambda: plugin)])):
        used = {}
        for make in (bert, llama):
            _, board = pair(make)
            run = fb.Run()
            with torch.no_grad(), fb.bind("fast", run=run):
                outputs(board, batch("absent"))
            used[make.__name__] = run.report()["attention"]["used"]

    assert used == {"bert": {"recorder": 2}, "llama": {"reference": 2}}


def test_sliding_and_full_layers_are_two_sites(recorder):
    _, board = pair(gemma3)
    run = fb.Run()
    with torch.no_grad(), fb.bind({"*.sliding": "recorder", "*": "auto"}, run=run):
        outputs(board, batch("absent"))

    assert run.report()["attention"]["used"] == {"recorder": 1, "reference": 1}
    assert {"transformers.Gemma3Attention.causal", "transformers.Gemma3Attention.causal.sliding"} <= fb.sites().keys()


def checkpointed(model, reentrant=False):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model.train()


def test_gradients_under_a_policy_bound_for_the_process_are_close_with_checkpointing(recorder):
    plain, board = pair(llama)
    plain.train()
    checkpointed(board)
    run = fb.Run()
    outputs(plain, batch("right")).square().sum().backward()
    with fb.bind_process("exact", run=run):
        outputs(board, batch("right")).square().sum().backward()

    for theirs, own in zip(plain.parameters(), board.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, atol=1e-4, rtol=1e-3)
    assert run.report()["attention"]["used"] == {"recorder": 4}


@pytest.mark.parametrize("reentrant", [False, True])
def test_auto_equals_sdpa_in_bits_with_checkpointing(reentrant):
    gradients = []
    for model in pair(llama):
        checkpointed(model, reentrant)
        embedded = model.get_input_embeddings()(batch("right")["input_ids"])
        outputs(model, {"inputs_embeds": embedded, **batch("right"), "input_ids": None}).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_compiled_before_anything_was_bound_obeys_a_later_policy(recorder):
    plain, board = pair(qwen3)
    compiled = torch.compile(board, backend="eager")
    run = fb.Run()
    with torch.no_grad():
        expected, out = outputs(plain, batch("left")), outputs(compiled, batch("left"))
        with fb.bind("exact", run=run):
            bound = outputs(compiled, batch("left"))
    real = batch("left")["attention_mask"].bool()

    assert same(out, expected)
    torch.testing.assert_close(bound[real], expected[real], atol=2e-5, rtol=1e-4)
    assert run.report()["attention"]["used"] == {"recorder": 2}


@needs_bert
def test_dropout_is_passed_on(recorder):
    kind, config = bert()
    config.attention_probs_dropout_prob = 0.5
    plain, board = pair(lambda: (kind, config))
    results = []
    for model in (plain, board):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            results.append(outputs(model.train(), batch("absent")))
    run = fb.Run()
    with fb.bind("fast", run=run):
        outputs(board, batch("absent"))

    assert torch.equal(*results)
    assert run.report()["attention"]["fallbacks"] == {"recorder→reference": {"dropout": 2}}


# --- structure --------------------------------------------------------------------------------------------------------


def infos(make, inputs, recorder, **binding):
    _, board = pair(make)
    with torch.no_grad(), fb.bind("fast", **binding):
        outputs(board, inputs)
    return [call.info for call in recorder.seen]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_reaches_a_backend_with_its_side(padding, recorder):
    found = infos(llama, batch(padding), recorder)

    assert [(info.causal, info.window, info.padding) for info in found] == [(True, None, padding)] * 2
    assert torch.equal(found[0].keys, batch(padding)["attention_mask"].bool())


@needs_bert
def test_a_bidirectional_padded_batch_has_keys_alone(recorder):
    found = infos(bert, batch("right"), recorder)

    assert [(info.causal, info.window, info.padding) for info in found] == [(False, None, "right")] * 2


def test_a_window_reaches_a_backend_where_it_hides_something(recorder):
    found = infos(gemma3, batch("absent"), recorder)

    assert [info and (info.causal, info.window, info.keys) for info in found] == [(True, 5, None), None]


@needs_bert
@pytest.mark.parametrize("padding", ["absent", "right", "left"])
def test_the_local_layers_of_an_encoder_say_how_far_they_see_on_either_side(padding, recorder):
    full, local = infos(modernbert, batch(padding), recorder)
    keys = None if padding == "absent" else batch(padding)["attention_mask"].bool()

    assert full is None if keys is None else (full.window, full.ahead) == (None, None)
    assert (local.causal, local.window, local.ahead) == (False, 5, 4)
    assert local.padding == (None if keys is None else padding)
    assert local.keys is None if keys is None else torch.equal(local.keys, keys)


def checked_structures(monkeypatch):
    """Every structure that the adapter finds from here on, each held against its dense mask."""
    checked = []
    inner = adapter._info_of

    def watched(mask, query, key):
        info = inner(mask, query, key)
        if info is not None:
            check_mask_info(mask, info, query.shape[2], key.shape[2], query.device)
            checked.append(info)
        return info

    monkeypatch.setattr(adapter, "_info_of", watched)
    return checked


@needs_bert
def test_every_structure_of_an_encoder_describes_its_dense_mask(recorder, monkeypatch):
    _, board = pair(modernbert)
    checked = checked_structures(monkeypatch)
    with torch.no_grad(), fb.bind("fast"):
        for padding in ("absent", "right", "left"):
            outputs(board, batch(padding))

    assert [each.ahead for each in checked] == [4, None, 4, None, 4]


@needs_bert
def test_an_encoder_on_a_kernel_of_structures_gives_sdpas_result():
    package = pytest.importorskip("fuseboard_tilelang._package", reason="this plugin's kernel takes no dense mask")
    problem = package.cpu_problem()
    if problem is not None:
        pytest.skip(problem)
    plain, board = pair(lambda: modernbert(hidden_size=128, num_attention_heads=2))
    inputs, run = batch("right"), fb.Run()
    real = inputs["attention_mask"].bool()
    with torch.no_grad(), fb.bind(fb.policy_for("tilelang", True), run=run):
        out = outputs(board, inputs)

    assert run.report()["attention"]["used"] == {"tilelang": 2}
    torch.testing.assert_close(out[real], outputs(plain, inputs)[real], atol=2e-5, rtol=1e-4)


def test_without_a_mask_the_causal_flag_says_it_all(recorder):
    infos(llama, batch("none"), recorder)

    assert [(call.mask, call.info, call.causal) for call in recorder.seen] == [(None, None, True)] * 2


@pytest.mark.parametrize("make", DECODERS)
def test_every_structure_of_a_generation_describes_its_dense_mask(make, recorder, monkeypatch):
    _, board = pair(make)
    checked = checked_structures(monkeypatch)
    with fb.bind("fast"):
        board.generate(**batch("left"), max_new_tokens=9, do_sample=False)

    assert len(checked) == 2 * 9
    assert {info.padding for info in checked} <= {"left", None}


def test_several_queries_onto_a_filled_cache_are_bottom_right_causal(recorder):
    _, board = pair(qwen3)
    ids = batch("absent")["input_ids"]
    cache = hf.DynamicCache(config=board.config)
    with torch.no_grad(), fb.bind("fast"):
        expected = board(input_ids=ids).logits
        board(input_ids=ids[:, :7], **{CACHE: cache})
        recorder.seen.clear()
        out = board(input_ids=ids[:, 7:], **{CACHE: cache}).logits

    assert [(call.info.causal, call.causal, call.mask) for call in recorder.seen] == [(True, False, None)] * 2
    torch.testing.assert_close(out, expected[:, 7:], atol=2e-5, rtol=1e-4)


def test_structure_travels_in_inference_mode_too(recorder):
    _, board = pair(llama)
    with torch.inference_mode(), fb.bind("fast"):
        outputs(board, batch("left"))

    assert [call.info.padding for call in recorder.seen] == ["left", "left"]


def made_mask(**changes):
    keys = batch("left")["attention_mask"].bool()
    given = {
        "batch_size": BATCH,
        "kv_length": LENGTH,
        "kv_offset": 0,
        "attention_mask": keys,
        "allow_is_causal_skip": False,
    }
    given |= {"q_length": LENGTH, "q_offset": 0} if V5 else {"cache_position": torch.arange(LENGTH)}
    given |= {"mask_function": masking.causal_mask_function, **changes}
    with fb.bind("auto"):
        return adapter.dense_mask(**given)


def info_of(mask, q_length=LENGTH, k_length=LENGTH, rows=BATCH):
    return adapter._info_of(mask, torch.zeros(rows, 1, q_length, 8), torch.zeros(rows, 1, k_length, 8))


def test_the_mask_itself_keeps_its_structure():
    mask = made_mask()

    check_mask_info(mask, info_of(mask), LENGTH, LENGTH, mask.device)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask[:, :, :, :-1],
        lambda mask: mask[:, :, -4:],
        lambda mask: mask.expand(BATCH, 2, LENGTH, LENGTH),
        lambda mask: mask.clone(),
        lambda mask: ~mask,
        lambda mask: mask.to(torch.float32),
        copy.deepcopy,
        lambda mask: mask.repeat(2, 1, 1, 1),
    ],
    ids=["slice of keys", "slice of queries", "expand", "clone", "not", "cast", "deepcopy", "repeat"],
)
def test_whatever_is_made_of_a_mask_has_no_structure(change):
    assert info_of(change(made_mask())) is None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("through", ["itself", "a view"])
def test_a_mask_that_was_written_into_loses_its_structure(through, inference):
    with torch.inference_mode(mode=inference):
        mask = made_mask()
        assert info_of(mask) is not None
        (mask if through == "itself" else mask[:, :, 1:2]).fill_(True)

        assert info_of(mask) is None


def test_a_mask_used_for_other_lengths_or_rows_has_no_structure():
    mask = made_mask()

    assert info_of(mask, q_length=LENGTH - 1) is None
    assert info_of(mask, k_length=LENGTH + 1) is None
    assert info_of(mask, rows=BATCH * 2) is None


def test_structure_does_not_follow_what_its_caller_writes_later():
    keys = batch("left")["attention_mask"].bool()
    mask = made_mask(attention_mask=keys)
    keys.fill_(True)

    check_mask_info(mask, info_of(mask), LENGTH, LENGTH, mask.device)


def test_the_structure_of_a_mask_dies_with_it():
    gc.collect()
    before = len(adapter._carried)
    mask = made_mask()
    assert len(adapter._carried) == before + 1
    del mask
    gc.collect()

    assert len(adapter._carried) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda: masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: k < 3),
        lambda: masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: k != 3),
        lambda: masking.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
        lambda: lambda b, h, q, k: k <= q + 1,
    ],
    ids=["or", "and", "chunked", "own"],
)
def test_a_mask_function_that_is_not_known_gives_no_structure(function):
    mask = made_mask(mask_function=function())

    assert isinstance(mask, Tensor)
    assert info_of(mask) is None


def test_a_window_inside_other_functions_is_understood():
    function = masking.and_masks(masking.sliding_window_causal_mask_function(6), masking.sliding_window_overlay(4))
    mask = made_mask(mask_function=function)
    info = info_of(mask)

    assert (info.causal, info.window) == (True, 4)
    check_mask_info(mask, info, LENGTH, LENGTH, mask.device)


@pytest.mark.skipif(not V5, reason="transformers 4 has no windows on either side")
@pytest.mark.parametrize("reach", [0, 3, LENGTH])
def test_a_window_on_either_side_is_understood_alone_and_inside_other_functions(reach):
    around = masking.sliding_window_bidirectional_overlay(reach)
    for function, causal in (
        (masking.sliding_window_bidirectional_mask_function(reach), False),
        (masking.and_masks(around, masking.sliding_window_bidirectional_overlay(reach + 1)), False),
        (masking.and_masks(around, masking.causal_mask_function), True),
    ):
        mask = made_mask(mask_function=function)
        info = info_of(mask)

        assert (info.causal, info.window, info.ahead) == (causal, reach + 1, reach)
        check_mask_info(mask, info, LENGTH, LENGTH, mask.device)


def test_queries_that_do_not_end_at_the_last_key_give_no_structure():
    shift = {"q_length": 4, "q_offset": 2} if V5 else {"cache_position": torch.arange(2, 6)}
    mask = made_mask(**shift)

    assert mask.shape[-2:] == (4, LENGTH)
    assert info_of(mask, q_length=4) is None


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_declared_side_is_checked_where_the_keys_lie(side):
    other = {"right": "left", "left": "right"}[side]
    keys = {padding: batch(padding)["attention_mask"].bool() for padding in ("right", "left", "none")}

    assert adapter._held_to(side, keys[side]) == side
    assert adapter._held_to(side, keys["none"]) == side
    with pytest.raises(RuntimeError, match=f"not padded on the {side}"):
        adapter._held_to(side, keys[other])


@pytest.mark.parametrize("side", ["right", "left"])
def test_on_the_cpu_the_side_is_read_whatever_was_declared(side, recorder):
    adapter.register("fuseboard", padding=side)
    try:
        assert [info.padding for info in infos(llama, batch("right"), recorder)] == ["right"] * 2
        recorder.seen.clear()
        assert [info.padding for info in infos(llama, batch("left"), recorder)] == ["left"] * 2
    finally:
        adapter.register("fuseboard")


def test_a_side_that_is_none_is_refused():
    with pytest.raises(ValueError, match="padding is 'both'; expected 'right', 'left' or None"):
        adapter.register(padding="both")


# --- refusals ---------------------------------------------------------------------------------------------------------


def layer(**attributes):
    module = torch.nn.Module()
    for name, value in {"is_causal": False, **attributes}.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("argument", "value", "means"),
    [
        ("softcap", 50.0, "soft cap"),
        ("s_aux", torch.zeros(2), "sinks"),
        ("head_mask", torch.ones(2), "factor"),
        ("output_attentions", True, "eager"),
        ("indices", torch.zeros(2), r'register\("sdpa"\)'),
    ],
)
def test_an_argument_that_sdpa_would_drop_is_refused(argument, value, means):
    q = torch.zeros(1, 2, 3, 8)

    with pytest.raises(fb.InputError, match=f"Module passes {argument}: .*{means}"):
        adapter.attend(layer(), q, q, q, None, **{argument: value})


def test_an_argument_that_is_absent_is_not_refused():
    q = torch.zeros(1, 2, 3, 8)

    adapter.attend(layer(), q, q, q, None, softcap=None, output_attentions=False, sliding_window=4)


def test_sinks_of_a_real_model_are_refused():
    kind, config = (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    )
    config._attn_implementation = "fuseboard"
    board = kind(config)

    with pytest.raises(fb.InputError, match="does not support sdpa"):
        outputs(board, batch("none"))


@pytest.mark.skipif(not V5, reason="before transformers 5 such models make their masks themselves")
def test_a_model_that_computes_attention_by_itself_is_refused_for_its_mask():
    config = hf.MegatronBertConfig(**SMALL)
    config._attn_implementation = "fuseboard"

    with pytest.raises(fb.InputError, match=r"MegatronBertConfig: its code does not support sdpa"):
        outputs(hf.MegatronBertModel(config), batch("right"))


def test_a_model_whose_code_asks_for_the_name_is_refused_under_another(monkeypatch):
    asking = types.ModuleType("asking")
    text = "if self.config._attn_implementation == 'sdpa':\n    pass\n"
    monkeypatch.setitem(sys.modules, "asking", asking)
    monkeypatch.setattr(adapter.inspect, "getsource", lambda module: text if module is asking else "")
    asked = layer(config=types.SimpleNamespace(_attn_implementation="fuseboard"))
    asked.__class__ = type("Asking", (torch.nn.Module,), {"__module__": "asking"})
    q = torch.zeros(1, 2, 3, 8)

    with pytest.raises(fb.InputError, match=r"Asking: its code treats any other name .* register\(\"sdpa\"\)"):
        adapter.attend(asked, q, q, q, None)
    asked.config._attn_implementation = "sdpa"
    adapter.attend(asked, q, q, q, None)


def test_a_name_that_transformers_uses_is_refused():
    with pytest.raises(ValueError, match="'flash_attention_2' already"):
        adapter.register("flash_attention_2")
    with pytest.raises(ValueError, match="'eager' already"):
        adapter.register("eager")


def test_position_bias_is_computed_by_sdpa_and_recorded(recorder):
    if not V5:
        pytest.skip("sdpa takes no position bias before transformers 5")
    generator = torch.Generator().manual_seed(0)
    q, bias = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 2, 3, 3, generator=generator)
    run = fb.Run()
    with fb.bind("fast", run=run):
        out, _ = adapter.attend(layer(), q, q, q, None, position_bias=bias)
    expected, _ = hf.integrations.sdpa_attention.sdpa_attention_forward(layer(), q, q, q, None, position_bias=bias)

    assert torch.equal(out, expected)
    assert run.report()["attention"]["fallbacks"] == {"fast→reference": {"position bias": 1}}


def test_queries_shared_by_a_batch_work_under_a_policy_as_under_sdpa(recorder):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(2, 2, 5, 8, generator=generator)
    run = fb.Run()
    with fb.bind("fast", run=run):
        out, _ = adapter.attend(layer(), q, k, k, None)
    expected, _ = hf.integrations.sdpa_attention.sdpa_attention_forward(layer(), q, k, k, None)

    assert torch.equal(out, expected)
    assert run.report()["attention"]["fallbacks"] == {"fast→reference": {"shapes that broadcast": 1}}


def test_a_strict_policy_lets_no_call_go_to_sdpa_in_silence(recorder):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(2, 2, 5, 8, generator=generator)
    with fb.bind(fb.policy_for("fast", strict=True)), pytest.raises(fb.RefusedError, match="shapes that broadcast"):
        adapter.attend(layer(), q, k, k, None)


# --- names and imports ------------------------------------------------------------------------------------------------


class on_board:
    """Put every model called `sdpa` on the board for a block."""

    def __init__(self, enabled=True):
        self.enabled = enabled

    def __enter__(self):
        self._before = (
            hf.AttentionInterface._global_mapping["sdpa"],
            masking.AttentionMaskInterface._global_mapping["sdpa"],
        )
        if self.enabled:
            adapter.register("sdpa")

    def __exit__(self, *_):
        hf.AttentionInterface.register("sdpa", self._before[0])
        masking.AttentionMaskInterface.register("sdpa", self._before[1])


def pair_under_its_name(make):
    """For models whose code asks for the name: both are called `sdpa`, and one runs `on_board`."""
    plain, board = pair(make)
    board.config._attn_implementation = "sdpa"
    for module in board.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "sdpa"
    return plain, board


@pytest.mark.parametrize("make", [MODELS[0], gemma3])
def test_under_the_name_sdpa_every_model_is_on_the_board_with_the_same_bits(make, recorder):
    plain, _ = pair(make)
    run = fb.Run()
    with torch.no_grad():
        expected = outputs(plain, batch("left"))
        with on_board():
            out = outputs(plain, batch("left"))
            with fb.bind("fast", run=run):
                outputs(plain, batch("left"))

    assert same(out, expected)
    assert run.report()["attention"]["used"] == {"recorder": 2}


def test_importing_fuseboard_does_not_import_transformers():
    code = "import sys, fuseboard as fb; fb.attention; fb.Site; fb.bind; sys.exit('transformers' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
