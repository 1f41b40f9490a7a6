"""QwenDecoder, with transformers as the judge: the same weights, random and small, give the same logits bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

import fuseboard as fb
from fuseboard import context
from fuseboard.engine.decoder import QwenDecoder, norms, rope, weights
from fuseboard.engine.decoder import layers as decoder_layers
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kv_cache import KVCache, RealKeys, as_one
from fuseboard.engine.sampling import DrawError, Sampler
from fuseboard.masks import check_mask_info

hf = pytest.importorskip("transformers", reason="transformers is not installed")

V5 = int(hf.__version__.split(".")[0]) >= 5
# transformers 5.24 renamed it.
CACHE = "cache" if "cache" in inspect.signature(hf.Qwen3ForCausalLM.forward).parameters else "past_key_values"
VOCABULARY, LENGTH, STEPS, LAYERS = 97, 14, 32, 3
PADS = {"one row": (0,), "rows alike": (0, 0), "left-padded": (0, 3, 11)}
CPU = torch.device("cpu")


def rope_of(kind, **options):
    """As this version of transformers wants it said."""
    if V5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}
    return {"rope_theta": 10000.0, "rope_scaling": {"rope_type": kind, **options}}


SHAPES = {
    "plain": {},
    "every head its keys": {"num_key_value_heads": 8},
    "one head's keys": {"num_key_value_heads": 1},
    "head dim of hidden over heads": {"head_dim": 8},
    "tied": {"tie_word_embeddings": True},
    "another epsilon": {"rms_norm_eps": 1e-5},
    "sliding after the first": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "window longer than the prompt": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "layer types": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "yarn": rope_of("yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn, its own factors": rope_of(
        "yarn", factor=2.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0, attention_factor=0.8
    ),
    "linear": rope_of("linear", factor=4.0),
    "dynamic, outgrown": {"max_position_embeddings": 24, **rope_of("dynamic", factor=2.0)},
}
KINDS = {"qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM), "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM)}


def config_of(kind="qwen3", **options):
    given = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    } | options  # fmt: skip
    config = KINDS[kind][0](**given)
    config._attn_implementation = "sdpa"
    return config


def model_of(kind="qwen3", dtype=torch.float32, **options):
    """transformers' model. Loaded in its dtype, as from_pretrained does: its frequencies stay fp32."""
    config = config_of(kind, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = KINDS[kind][1](config)
        for name, each in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(each, mean=float("norm" in name), std=0.2)
        if config.tie_word_embeddings:
            model.tie_weights()
        else:  # so that the most probable ids differ from step to step
            torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype).eval()
    model.model.rotary_emb.inv_freq = frequencies
    model.model.rotary_emb.original_inv_freq = frequencies.clone()
    return model


def prompts(pads, length=LENGTH):
    ids = torch.randint(1, VOCABULARY, (len(pads), length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def compare(model, pads, steps=STEPS, decoder=None):
    """Assert that the prefill's logits (padding's aside) and those of every step are transformers'."""
    decoder = decoder or QwenDecoder.from_transformers(model)
    ids, mask = prompts(pads)
    theirs, mine = hf.DynamicCache(config=model.config), decoder.cache(len(pads), attention_mask=mask)
    for step in range(steps + 1):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        right = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: theirs}).logits
        found = decoder(ids, cache=mine)
        real = mask.bool() if step == 0 else torch.ones_like(ids, dtype=torch.bool)
        assert torch.equal(found[real], right[real]), f"step {step}"
        ids = right[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    assert mine.length == LENGTH + steps
    return mine


@pytest.fixture(scope="module")
def pair():
    model = model_of()
    return model, QwenDecoder.from_transformers(model)


@pytest.fixture(scope="module")
def sliding():
    model = model_of(**SHAPES["sliding after the first"])
    return model, QwenDecoder.from_transformers(model)


# ---- logits


# Every shape in one dtype of each kind; the whole product is `slow`.
FEW = [
    *((kind, shape, torch.float32, "left-padded") for kind in KINDS for shape in SHAPES),
    *(("qwen3", shape, torch.bfloat16, "left-padded") for shape in SHAPES),
    *((kind, "plain", dtype, pads) for kind in KINDS for dtype in (torch.float32, torch.bfloat16) for pads in PADS),
    ("qwen3", "sliding after the first", torch.float32, "one row"),
    ("qwen3", "plain", torch.float16, "left-padded"),
    ("qwen3", "plain", torch.float64, "left-padded"),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "pads"), dict.fromkeys(FEW))
def test_logits_are_those_of_transformers(kind, shape, dtype, pads):
    compare(model_of(kind, dtype, **SHAPES[shape]), PADS[pads])


@pytest.mark.slow
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_for_every_combination(kind, shape, dtype, pads):
    compare(model_of(kind, dtype, **SHAPES[shape]), PADS[pads])


@pytest.mark.skipif(not V5, reason="transformers 4 gives Qwen3 no biases on the output")
def test_biases_of_a_qwen3_are_used():
    model = model_of(attention_bias=True)

    assert model.model.layers[0].self_attn.o_proj.bias is not None
    compare(model, PADS["left-padded"], steps=4)


def test_frequencies_that_a_model_had_rounded_are_part_of_what_it_computes():
    model = model_of().to(torch.bfloat16)  # casts the frequencies too
    decoder = QwenDecoder.from_transformers(model)

    compare(model, PADS["left-padded"], steps=8, decoder=decoder)
    assert decoder.report()["rope"] == "default, frequencies as the transformers model held them"
    assert QwenDecoder.from_transformers(model_of()).report()["rope"] == "default"


def test_logits_without_a_cache_and_of_the_last_tokens_only(pair):
    model, decoder = pair
    ids, mask = prompts((0, 0))
    with torch.no_grad():
        assert torch.equal(decoder(ids), model(ids).logits)
        for keep in (1, 3):  # rows of a strided slice: together or apart, by whether the weight wants a gradient
            assert torch.equal(decoder(ids, keep=keep), model(ids, logits_to_keep=keep).logits)
        ids, mask = prompts(PADS["left-padded"])
        right = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        assert torch.equal(decoder(ids, attention_mask=mask)[mask.bool()], right[mask.bool()])


def test_a_prompt_taken_in_by_pieces_gives_what_transformers_gives(sliding):
    model, decoder = sliding
    ids, mask = prompts(PADS["left-padded"])
    theirs, mine = hf.DynamicCache(config=model.config), decoder.cache(3, attention_mask=mask)
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 12), (12, 13), (13, LENGTH)):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
            right = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions, use_cache=True,
                **{CACHE: theirs},
            ).logits  # fmt: skip
            found = decoder(ids[:, start:stop], cache=mine)
            real = mask[:, start:stop].bool()
            assert torch.equal(found[real], right[real])


def test_embeddings_may_come_in_place_of_ids_and_the_hidden_state_in_place_of_logits(pair):
    model, decoder = pair
    ids, _ = prompts((0, 0))
    with torch.no_grad():
        embeds = model.model.embed_tokens(ids)
        before = embeds.clone()
        assert torch.equal(decoder(embeds=embeds), model(ids).logits)
        assert torch.equal(embeds, before)
        assert torch.equal(decoder.hidden(ids), model.model(ids).last_hidden_state)


def test_queries_and_keys_together_are_the_same_as_apart(pair):
    _, decoder = pair
    ids, _ = prompts((0, 0))
    with torch.no_grad():
        together = decoder(ids)
    with torch.enable_grad():  # where a gradient could be wanted they stay apart
        apart = decoder(ids)

    assert torch.equal(together, apart)


def test_a_norm_weight_that_is_changed_later_is_seen():
    model = model_of()
    decoder = QwenDecoder.from_transformers(model)
    compare(model, (0,), steps=1, decoder=decoder)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight.mul_(2)  # shared with the decoder

    compare(model, (0,), steps=1, decoder=decoder)


def test_gradients_without_a_cache_are_those_of_transformers():
    model = model_of()
    decoder = QwenDecoder.from_transformers(model)
    decoder.requires_grad_(requires_grad=True)
    ids, _ = prompts((0, 0))
    decoder(ids).square().mean().backward()
    model(ids).logits.square().mean().backward()

    for name, each in decoder.named_parameters():
        other = model.get_parameter(name)
        torch.testing.assert_close(each.grad, other.grad, rtol=1e-4, atol=1e-6)


# ---- generating


def generated(model, ids, mask, **options):
    options = {"max_new_tokens": 20, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_generate(kind, pads, dtype):
    model = model_of(kind, dtype, **SHAPES["sliding after the first"])
    ids, mask = prompts(PADS[pads])
    found = QwenDecoder.from_transformers(model).generate(ids, attention_mask=mask, max_new_tokens=20)

    assert torch.equal(found, generated(model, ids, mask))
    assert len(set(found[0, LENGTH:].tolist())) > 2  # not one id over and over


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pads", PADS)
def test_sampled_ids_and_the_generator_are_those_of_generate(pair, pads, seed):
    model, decoder = pair
    ids, mask = prompts(PADS[pads])
    options = {"temperature": 1.3, "top_k": 40, "top_p": 0.9}
    if V5 or pads != "left-padded":  # transformers 4 penalises the padding id too
        options["repetition_penalty"] = 1.2
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        right = generated(model, ids, mask, **options | {"do_sample": True})
        after = torch.get_rng_state()
    generator = torch.Generator().manual_seed(seed)
    found = decoder.generate(
        ids, attention_mask=mask, max_new_tokens=20, sampler=Sampler(**options), generator=generator
    )

    assert torch.equal(found, right)
    assert torch.equal(generator.get_state(), after)


def test_rows_end_at_an_end_and_go_on_with_padding(pair):
    model, decoder = pair
    ids, mask = prompts(PADS["left-padded"])
    free = generated(model, ids, mask)[:, LENGTH:]
    ends = [int(free[0, 2]), int(free[1, 7])]
    right = generated(model, ids, mask, eos_token_id=ends, pad_token_id=5)
    found = decoder.generate(ids, attention_mask=mask, max_new_tokens=20, eos=ends, pad=5)

    assert torch.equal(found, right)
    assert 5 in found[0]
    tokens = list(decoder.stream(ids[:1], max_new_tokens=20, eos=ends[0]))
    assert len(tokens) == 3
    assert tokens[-1].ended == (True,)
    assert not any(tokens[1].ended)


def test_it_stops_when_all_rows_have_ended_and_fills_with_the_first_end(pair):
    model, decoder = pair
    ids, mask = prompts((0, 0))
    ends = sorted({int(each) for each in generated(model, ids, mask)[:, LENGTH + 1]})
    found = decoder.generate(ids, max_new_tokens=20, eos=ends)
    last = found[:, LENGTH:]

    assert last.shape[1] <= 2
    assert all(set(row.tolist()) & set(ends) for row in last)
    assert decoder.generate(ids, max_new_tokens=5, eos=()).shape[1] == LENGTH + 5


def test_the_ends_are_those_that_the_model_was_saved_with():
    model = model_of()
    ids, mask = prompts((0,))
    model.generation_config.eos_token_id = [int(generated(model, ids, mask)[0, LENGTH + 3])]
    decoder = QwenDecoder.from_transformers(model)

    assert decoder.eos == tuple(model.generation_config.eos_token_id)
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), generated(model, ids, mask))
    assert decoder.generate(ids, max_new_tokens=20, eos=()).shape[1] == LENGTH + 20


def test_a_function_may_choose(pair):
    _, decoder = pair
    ids, mask = prompts(PADS["left-padded"])
    seen = []

    def least(logits, step):
        seen.append((step, logits.dtype, tuple(logits.shape)))
        return logits.argmin(-1)

    found = decoder.generate(ids, attention_mask=mask, max_new_tokens=3, sampler=least)
    with torch.no_grad():
        first = decoder(ids, attention_mask=mask)[:, -1].argmin(-1)

    assert torch.equal(found[:, LENGTH], first)
    assert seen == [(step, torch.float32, (3, VOCABULARY)) for step in range(3)]
    with pytest.raises(fb.InputError, match=r"the sampler gave torch.float32 \(3, 97\); expected one integer id a row"):
        decoder.generate(ids, max_new_tokens=1, sampler=lambda logits, step: logits)
    with pytest.raises(fb.InputError, match="sampler is 3; expected a Sampler"):
        decoder.stream(ids, max_new_tokens=1, sampler=3)


def test_invalid_probabilities_raise_what_torch_raises():
    model = model_of()
    decoder = QwenDecoder.from_transformers(copy.deepcopy(model))
    with torch.no_grad():
        decoder.model.norm.weight.fill_(torch.nan)
    ids, _ = prompts((0,))
    with pytest.raises(DrawError, match="probability tensor contains either `inf`, `nan` or element < 0"):
        decoder.generate(ids, max_new_tokens=2, sampler=Sampler(), generator=torch.Generator())


def test_progress_is_told_and_may_end_it(pair):
    _, decoder = pair
    ids, _ = prompts((0, 0))
    told = []
    found = decoder.generate(ids, max_new_tokens=4, on_token=told.append)

    assert [token.index for token in told] == [0, 1, 2, 3]
    assert [list(token.ids) for token in told] == found[:, LENGTH:].T.tolist()
    assert torch.equal(told[2].tensor, found[:, LENGTH + 2 : LENGTH + 3])

    class StopError(Exception):
        pass

    def stop(token):
        raise StopError

    with pytest.raises(StopError):
        decoder.generate(ids, max_new_tokens=4, on_token=stop)


def test_a_closed_stream_leaves_nothing_behind(pair):
    _, decoder = pair
    ids, _ = prompts((0, 0))
    run = fb.Run()
    stream = fb.steps(decoder.stream(ids, max_new_tokens=10), "exact", run=run)
    first = next(stream)
    assert context.bound() is None  # between two steps
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    stream.close()

    assert context.bound() is None
    assert torch.is_grad_enabled()
    assert next(stream, None) is None
    assert sum(run.report()["attention"]["used"].values()) == LAYERS
    assert first.index == 0


def test_a_closed_stream_gives_its_cache_back(pair, monkeypatch):
    _, decoder = pair
    ids, _ = prompts((0,))
    made = []
    make = decoder.cache
    monkeypatch.setattr(decoder, "cache", lambda *a, **k: made.append(weakref.ref(cache := make(*a, **k))) or cache)
    stream = decoder.stream(ids, max_new_tokens=10)
    next(stream)
    assert made[0]() is not None
    stream.close()
    gc.collect()

    assert made[0]() is None


def test_a_stream_may_go_on_in_another_mode_and_thread_than_it_began_in(pair):
    model, decoder = pair
    ids, mask = prompts((0, 0))
    right = generated(model, ids, mask)[:, LENGTH:].T.tolist()
    with torch.inference_mode():
        stream = decoder.stream(ids, max_new_tokens=20)
        tokens = [next(stream)]
    tokens.append(next(stream))
    worker = threading.Thread(target=lambda: tokens.extend(stream))
    worker.start()
    worker.join(20)

    assert [list(token.ids) for token in tokens] == right


def test_requests_on_one_decoder_do_not_see_each_other(sliding):
    model, decoder = sliding
    asked = [prompts(pads, length) for pads, length in (((0,), 5), ((0, 2), 9), ((1, 0, 4), 12), ((0,), 20))]
    right = [generated(model, ids, mask) for ids, mask in asked]
    found = [None] * len(asked)
    barrier = threading.Barrier(len(asked), timeout=20)

    def work(index):
        ids, mask = asked[index]
        parts = [ids]
        for token in decoder.stream(ids, attention_mask=mask, max_new_tokens=20):
            parts.append(token.tensor)
            barrier.wait()
        found[index] = torch.cat(parts, 1)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(asked))]
    for each in workers:
        each.start()
    for each in workers:
        each.join(30)

    assert all(torch.equal(*each) for each in zip(found, right, strict=True))


def test_it_draws_from_no_generator_but_its_own(pair):
    model, _ = pair
    before = torch.get_rng_state()
    decoder = QwenDecoder.from_transformers(model)
    decoder.generate(prompts((0,))[0], max_new_tokens=3)
    norms.fused_norm_exact.__wrapped__(CPU, torch.float32, 48, 1e-6)

    assert torch.equal(torch.get_rng_state(), before)


# ---- policies and sites


@pytest.mark.parametrize("shape", ["plain", "sliding after the first"])
@pytest.mark.parametrize("name", ["auto", "exact", "fast", "sdpa-math", "sdpa-cpu"])
def test_every_policy_gives_the_tokens_and_counts_every_layer_of_every_step(name, shape):
    model = model_of(**SHAPES[shape])
    decoder = QwenDecoder.from_transformers(model)
    ids, mask = prompts(PADS["left-padded"])
    steps, logits = 8, []
    try:
        policy = fb.policy_for(name)
    except fb.PolicyError:
        pytest.skip(f"{name} is not installed")

    def keep(scores, step):
        logits.append(scores.clone())
        return scores.argmax(-1)

    right = model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    run = fb.Run()
    with fb.bind(policy, run=run):
        found = decoder.generate(ids, attention_mask=mask, max_new_tokens=steps, sampler=keep)
    report = run.report()["attention"]

    assert torch.equal(found, right.sequences), report
    for mine, theirs in zip(logits, right.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert sum(report["used"].values()) == LAYERS * steps
    if name == "sdpa-math":
        assert report["used"] == {"sdpa-math": LAYERS * steps}


@pytest.mark.parametrize("pads", PADS)
def test_every_structure_describes_its_dense_mask(sliding, pads):
    _, decoder = sliding
    ids, mask = prompts(PADS[pads])
    cache = decoder.cache(len(ids), attention_mask=mask)
    with torch.no_grad():
        for start, stop in ((0, 2), (2, 3), (3, LENGTH), *((LENGTH, LENGTH + 1),) * 12):
            new = stop - start
            for kind, given in decoder.given(cache, new).items():
                length = cache.kept(decoder.config.window_of(kind)) + new
                if given.info is not None:
                    check_mask_info(given.mask, given.info, new, length, CPU)
                    assert given.info.padding == (None if cache.real is None else "left")
                else:
                    assert given.mask is None
                    assert given.causal == (new > 1)
            decoder(ids[:, :new], cache=cache)


def test_keys_reach_a_backend_unrepeated_and_padding_as_structure(pair, monkeypatch):
    _, decoder = pair
    ids, mask = prompts(PADS["left-padded"])
    given = []
    attention = decoder_layers.attention
    monkeypatch.setattr(
        decoder_layers, "attention", lambda q, k, v, **rest: given.append((q, k, rest)) or attention(q, k, v, **rest)
    )
    decoder.generate(ids, attention_mask=mask, max_new_tokens=2)

    for q, k, rest in given:
        assert (q.shape[1], k.shape[1]) == (8, 2)
        assert rest["enable_gqa"]
        assert rest["mask_info"].padding == "left"
    step = given[-1]
    assert step[1].shape[2] == LENGTH + 1
    assert step[1].stride(1) > step[1].shape[2] * step[1].shape[3]  # a view of a longer buffer


def test_the_sites_refuse_approximate_backends():
    assert not decoder_layers.FULL.approx_ok
    assert not decoder_layers.SLIDING.approx_ok


def in_child(code, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEBOARD_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CHILD = """
import torch, fuseboard as fb
from fuseboard.engine.decoder import QwenDecoder
config = {"model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "use_sliding_window": True,
          "sliding_window": 4, "max_window_layers": 1}
decoder = QwenDecoder(config)
generator = torch.Generator().manual_seed(0)
decoder.load({name: torch.randn(each.shape, generator=generator) for name, each in decoder.named_parameters()})
mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
ids = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5]])
"""


def test_every_declared_site_goes_through_the_dispatcher_and_every_structure_is_checked():
    found = in_child(
        CHILD + "decoder.generate(ids, attention_mask=mask, max_new_tokens=7)\n"
        "print({name: count for name, count in fb.site_calls().items() if name.startswith('qwen')})",
        FUSEBOARD_TEST="count",
        FUSEBOARD_DEBUG="masks",
    )

    assert found == ["{'qwen.full': 7, 'qwen.sliding': 14}"]


def test_it_needs_no_transformers_and_no_safetensors():
    found = in_child(
        CHILD + "decoder.generate(ids, attention_mask=mask, max_new_tokens=2)\n"
        "import sys; print([name for name in ('transformers', 'safetensors') if name in sys.modules])"
    )

    assert found == ["[]"]


# ---- the cache


def test_keys_are_views_of_a_buffer_that_grows_by_half():
    cache = KVCache([None], 1)
    moved, last = 0, None
    for length in range(1, 400):
        cache.begin()
        new = torch.full((1, 2, 1, 4), float(length))
        keys, values = cache.put(0, new, -new)
        cache.end(1)
        assert keys.shape == (1, 2, length, 4)
        moved += keys.untyped_storage().data_ptr() != last
        last = keys.untyped_storage().data_ptr()
        assert torch.equal(keys[0, 0, :, 0], torch.arange(1.0, length + 1))
        assert torch.equal(values, -keys)
    assert moved < 8
    assert cache.nbytes < 2 * 2 * 2 * 400 * 4 * 4


@pytest.mark.parametrize("first", [1, 3, 300])
def test_a_sliding_layer_keeps_what_its_window_sees(first):
    window = 5
    cache, everything = KVCache([window], 1), torch.arange(1.0, 1001)
    cache.begin()
    keys, _ = cache.put(0, *(everything[:first].view(1, 1, first, 1),) * 2)
    cache.end(first)
    assert torch.equal(keys.flatten(), everything[:first])
    for step in range(first, 700):
        cache.begin()
        keys, _ = cache.put(0, *(everything[step : step + 1].view(1, 1, 1, 1),) * 2)
        cache.end(1)
        assert torch.equal(keys.flatten(), everything[max(step + 1 - window, 0) : step + 1])
    assert cache.nbytes == 2 * (2 * window + 64) * 4


def test_a_cache_left_half_written_says_so(pair, monkeypatch):
    _, decoder = pair
    ids, _ = prompts((0,))
    cache = decoder.cache(1)
    monkeypatch.setattr(cache, "put", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        decoder(ids, cache=cache)
    with pytest.raises(RuntimeError, match="this cache was left half written"):
        decoder(ids, cache=cache)


def test_padding_anywhere_has_each_rows_positions(pair):
    model, decoder = pair
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1]])
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(3))
    found = decoder.generate(ids, attention_mask=mask, max_new_tokens=4)

    for row in range(3):  # each alone, without its padding, within the rounding of another shape
        alone = model.generate(
            ids[row, mask[row].bool()][None],
            attention_mask=torch.ones(1, int(mask[row].sum())).long(),
            max_new_tokens=4,
            do_sample=False,
        )
        assert torch.equal(found[row, -4:], alone[0, -4:])


def test_a_mask_that_hides_nothing_is_no_mask_and_a_caller_may_say_so():
    ones = torch.ones(2, 5)
    assert RealKeys.of(ones, (2, 5), CPU, None) is None
    assert RealKeys.of(ones, (2, 5), CPU, True) is None  # on the CPU it is read all the same
    assert RealKeys.of(torch.zeros(2, 5), (2, 5), CPU, False) is None
    real = RealKeys.of(torch.tensor([[0, 0, 1], [1, 1, 1]]), (2, 3), CPU, True)
    assert (real.padding, real.longest) == ("left", (0, 1, 2, 3))
    real = RealKeys.of(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), (2, 4), CPU, True)
    assert real.longest == (0, 0, 1, 1, 2)
    with pytest.raises(fb.InputError, match=r"attention_mask has shape \(2, 5\); expected \(2, 4\)"):
        RealKeys.of(ones, (2, 4), CPU, None)


# ---- loading


@pytest.mark.filterwarnings("ignore")  # transformers' own while it loads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", ["one file", "several files"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_what_the_model_loaded_from_it_gives(tmp_path, kind, shards, dtype):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    model = model_of(kind, dtype, **SHAPES["yarn"] | SHAPES["tied"] | SHAPES["sliding after the first"])
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "several files" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "several files")
    decoder = QwenDecoder.from_folder(tmp_path)

    assert decoder.dtype == dtype
    assert decoder.eos == (3, 4)
    # The judge is loaded from there too: MKL's fp32 bits depend on how the weights are aligned in memory.
    judge = KINDS[kind][1].from_pretrained(tmp_path, attn_implementation="sdpa", dtype=dtype).eval()
    compare(judge, PADS["left-padded"], steps=6, decoder=decoder)
    assert QwenDecoder.from_folder(tmp_path, dtype=torch.float64).dtype == torch.float64


def test_weights_are_shared_unless_they_are_cast(pair):
    model, decoder = pair
    weight = model.model.layers[1].mlp.up_proj.weight

    assert decoder.model.layers[1].mlp.up_proj.weight.data_ptr() == weight.data_ptr()
    assert weight.requires_grad
    assert not any(each.requires_grad for each in decoder.parameters())
    cast = QwenDecoder.from_transformers(model, dtype=torch.bfloat16)
    assert cast.dtype == torch.bfloat16
    assert decoder.state_dict().keys() == model.state_dict().keys()


def test_a_stack_without_its_head_needs_a_tied_embedding():
    model = model_of(tie_word_embeddings=True)
    decoder = QwenDecoder.from_transformers(model.model)
    ids, _ = prompts((0,))
    with torch.no_grad():
        assert torch.equal(decoder(ids), model(ids).logits)
    with pytest.raises(weights.WeightsError, match=r"missing: lm_head\.weight"):
        QwenDecoder.from_transformers(model_of().model)


def test_every_weight_that_is_wrong_is_named_before_any_is_taken(pair):
    model, _ = pair
    state = dict(model.state_dict())
    del state["model.layers.2.self_attn.q_norm.weight"]
    state["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
    state["model.norm.weight"] = torch.zeros(63)
    decoder = QwenDecoder(model.config)
    with pytest.raises(weights.WeightsError) as caught:
        decoder.load(state)
    error = caught.value

    assert error.missing == ("model.layers.2.self_attn.q_norm.weight",)
    assert error.unexpected == ("model.layers.3.mlp.up_proj.weight",)
    assert error.misshapen == (("model.norm.weight", (63,), (64,)),)
    assert str(error) == (
        "the weights are not those of the configuration; nothing was loaded. "
        "missing: model.layers.2.self_attn.q_norm.weight; unexpected: model.layers.3.mlp.up_proj.weight; "
        "of another shape: model.norm.weight is (63,), expected (64,)."
    )
    assert decoder.device.type == "meta"
    with pytest.raises(RuntimeError, match=r"has no weights yet; call load\(\)"):
        decoder(prompts((0,))[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update({"model.norm.weight": s["model.norm.weight"].half()}), "several dtypes"),
        (lambda s: s.update({"model.norm.weight": s["model.norm.weight"].to(torch.int8)}), "quantised"),
        (lambda s: s.update({"model.norm.weight": s["model.norm.weight"].to("meta")}), "without memory"),
    ],
)
def test_weights_that_cannot_be_computed_with_are_refused(pair, change, said):
    state = dict(pair[0].state_dict())
    change(state)
    with pytest.raises(weights.WeightsError, match=said):
        QwenDecoder(pair[0].config).load(state)


@pytest.mark.parametrize(
    ("weights_given", "said"),
    [
        (
            lambda state: {**state, "model.norm.weight": state["model.norm.weight"].numpy()},
            "model.norm.weight; nothing",
        ),
        (lambda state: {**state, "model.norm.weight": None}, "model.norm.weight; nothing was loaded"),
        (lambda state: {**state, 5: state["model.norm.weight"]}, "no dense tensors with a name: 5; nothing was loaded"),
        (lambda state: {**state, "norm.weight": state["model.norm.weight"]}, "there twice, .*: norm.weight; nothing"),
        (lambda state: list(state.items()), "weights is a list; expected a mapping of names to tensors"),
    ],
)
def test_what_is_no_weight_is_named_and_nothing_is_loaded(pair, weights_given, said):
    decoder = QwenDecoder(pair[0].config)
    with pytest.raises((weights.WeightsError, fb.InputError), match=said):
        decoder.load(weights_given(dict(pair[0].state_dict())))
    assert decoder.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_that_cannot_be_computed_in_is_refused(pair, dtype):
    decoder = QwenDecoder(pair[0].config)
    with pytest.raises(fb.InputError, match=r"^dtype is .*; expected a floating torch.dtype to compute in"):
        decoder.load(pair[0].state_dict(), dtype=dtype)
    assert decoder.device.type == "meta"


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-0.6B", hf.Qwen3ForCausalLM])
def test_what_is_no_model_in_memory_is_refused(model):
    with pytest.raises(
        fb.InputError, match=r"expected a transformers model in memory. A folder is read by from_folder"
    ):
        QwenDecoder.from_transformers(model)


def test_weights_loaded_later_have_the_frequencies_of_the_configuration(pair):
    model, plain = pair
    rounded = model_of()
    rounded.model.rotary_emb.to(torch.bfloat16)
    decoder = QwenDecoder.from_transformers(rounded)
    decoder.graphs = "step-eager"
    ids, _ = prompts((0,))
    decoder.generate(ids, max_new_tokens=3, eos=())
    with torch.no_grad():
        assert not torch.equal(decoder(ids), plain(ids))
        decoder.load(model.state_dict())

        assert torch.equal(decoder(ids), plain(ids))
    assert decoder.report()["rope"] == "default"
    (whole,) = decoder._whole.values()
    assert not whole._spare  # its cosines were those of the frequencies before


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused():
    model = model_of(tie_word_embeddings=True)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(weights.WeightsError, match=r"tie_word_embeddings is set, but lm_head\.weight differs"):
        QwenDecoder(model.config).load(state)


def test_a_folder_says_what_it_lacks(tmp_path, monkeypatch):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    with pytest.raises(fb.InputError, match=r"expected a folder with config\.json and safetensors"):
        QwenDecoder.from_folder(tmp_path)
    model = model_of()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(weights.WeightsError, match="names files that are not in the folder: model-00001"):
        QwenDecoder.from_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(fb.InputError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        QwenDecoder.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(fb.InputError, match="is not JSON"):
        QwenDecoder.from_folder(tmp_path)


@pytest.mark.parametrize("whole", [0, 100, 5000, -1, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"])
def test_a_file_of_weights_that_is_not_whole_is_named(tmp_path, pair, whole):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    pair[0].save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole.encode() if isinstance(whole, str) else file.read_bytes()[:whole])
    with pytest.raises(
        weights.WeightsError, match=r"model.safetensors is no whole safetensors file .* download it aga"
    ):
        QwenDecoder.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "[]", r"config.json holds a list; expected a JSON object"),
        ("generation_config.json", "[]", r"generation_config.json holds a list; expected a JSON object"),
        ("generation_config.json", '{"eos_token_id": "a"}', "eos_token_id is 'a'; expected an id"),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}', "weight_map is not a file's name for each weight"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "weight_map is not a file's name for each weight"),
    ],
)
def test_a_file_that_does_not_say_what_it_should_is_named(tmp_path, pair, name, text, said):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    pair[0].save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(fb.InputError, match=said):
        QwenDecoder.from_folder(tmp_path)


def test_without_safetensors_its_install_line_is_given(tmp_path, monkeypatch):
    model_of().config.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        QwenDecoder.from_folder(tmp_path)


def test_a_shard_that_has_more_than_its_index_says_is_read_by_the_index(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = model_of()
    model.config.save_pretrained(tmp_path)
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    names = sorted(state)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    stale = {first[0]: torch.zeros(3)}
    safetensors.save_file({name: state[name] for name in first}, tmp_path / "a.safetensors")
    safetensors.save_file({name: state[name] for name in second} | stale, tmp_path / "b.safetensors")
    index = {name: "a.safetensors" if name in first else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    found = QwenDecoder.from_folder(tmp_path).state_dict()
    assert all(torch.equal(found[name], state[name]) for name in names)


# ---- configurations

CONFIG = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; QwenDecoder computes 'qwen2' and 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; QwenDecoder computes 'silu'"),
        ({"quantization_config": {"bits": 4}}, "asks for quantization_config"),
        ({"softcap": 30.0}, "asks for softcap"),
        ({"is_causal": False}, "is_causal is False"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope type 'llama3' is not implemented"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope' is not implemented"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor; given None"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "'default' has no option 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "no option 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has 2 of them with 'chunked_attention'",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 of them; expected 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None with use_sliding_window None"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need an even one"),
        ({"hidden_size": None}, "the configuration lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0; expected an int of at least 1"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias is False"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'; expected an int of at least 1"),
        ({"num_attention_heads": 0, "num_key_value_heads": None}, "num_attention_heads is 0; expected an int of at"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'; expected an int of at least 1"),
        ({"head_dim": "8"}, "head_dim is '8'; expected an int of at least 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; expected a mapping with rope_type"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not implemented"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; expected a number above 0"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; expected a number above 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "a"}},
            "original_max_position_embeddings is 'a'; expected a number above 0",
        ),
        ({"eos_token_id": [2.5]}, "eos_token_id is [2.5]; expected an id, an int, or several"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'; expected an id"),
        ({"layer_types": 3}, "layer_types has 1 of them with 3; expected 2"),
        ({"layer_types": [["a"], 2]}, "layer_types has 2 of them with 2, ['a']; expected 2"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"},
            "max_window_layers is 'x'; expected an int",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(option, said):
    with pytest.raises(fb.InputError) as caught:
        QwenDecoder(CONFIG | option)

    assert said in str(caught.value)


@pytest.mark.parametrize("config", [None, "Qwen3-0.6B", [1], hf.Qwen3Config])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(fb.InputError, match=r"^config is .*; expected a config.json as a mapping, a transformers conf"):
        QwenDecoder(config)


def test_one_option_to_be_ignored_may_be_a_string_and_hides_no_other():
    longer = {"hidden_act": "gelu", "hidden_act_of_another": 1}
    with pytest.raises(fb.InputError, match="hidden_act is 'gelu'"):
        QwenDecoder(CONFIG | longer, ignore="hidden_act_of_another")


def test_an_option_that_says_nothing_about_the_arithmetic_may_be_ignored_by_name():
    with pytest.raises(fb.InputError, match=r"pass ignore=\['unsloth_version'\]"):
        QwenDecoder(CONFIG | {"unsloth_version": "1"})
    assert QwenDecoder(CONFIG | {"unsloth_version": "1"}, ignore=["unsloth_version"]).config.head_dim == 8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_read_alike_from_transformers_and_from_its_file(tmp_path, kind, shape):
    config = config_of(kind, **SHAPES[shape])
    config.save_pretrained(tmp_path)

    assert DecoderConfig.of(config) == DecoderConfig.of(json.loads((tmp_path / "config.json").read_text()))


def test_a_file_of_transformers_4_means_what_it_meant():
    old = CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}
    new = CONFIG | {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}, "max_position_embeddings": 64
    }  # fmt: skip
    assert DecoderConfig.of(old) == DecoderConfig.of(new)
    assert DecoderConfig.of(old).rope.options["original_max_position_embeddings"] == 64


@pytest.mark.skipif(not V5, reason="transformers 4 keeps these functions elsewhere")
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1000000, 5e6])
@pytest.mark.parametrize(
    "options",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4, "truncate": False, "beta_fast": 24, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"rope_type": "dynamic", "factor": 3.0},
    ],
)
def test_frequencies_are_those_of_transformers(options, theta, head_dim):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(
        head_dim=head_dim, max_position_embeddings=8192, rope_parameters={**options, "rope_theta": theta}
    )
    mine = DecoderConfig.of(config).rope
    theirs = ROPE_INIT_FUNCTIONS[mine.kind]
    lengths = [None] + ([torch.tensor(9000), torch.tensor(30001)] if mine.kind == "dynamic" else [])
    for length in lengths:
        right, factor = theirs(config, seq_len=length)
        found, mine_factor = rope.frequencies(mine, longest=None if length is None else int(length))
        assert torch.equal(found, right)
        assert mine_factor == factor


# ---- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_is_used_has_the_formulas_bits(dtype):
    for size in (16, 128, 1000):
        if norms.fused_norm_exact(CPU, dtype, size, 1e-6):
            x = torch.randn(301, size, generator=torch.Generator().manual_seed(5)).to(dtype) * 3
            assert torch.equal(torch.nn.functional.rms_norm(x, (size,), None, 1e-6), norms.upcast_norm(x, 1e-6))


@pytest.mark.parametrize("shape", ["plain", "linear", "yarn", "dynamic, outgrown"])
def test_a_default_device_of_the_callers_changes_nothing(shape):
    config, state = config_of(**SHAPES[shape]), dict(model_of().state_dict())
    ids, mask = prompts((0, 3))
    found = []
    for mode in (contextlib.nullcontext(), torch.device("meta")):
        norms.fused_norm_exact.cache_clear()
        with mode:
            decoder = QwenDecoder(config)
            decoder.load(state)
            logits = decoder(ids)
            decoder.graphs = "step-eager"
            found.append((logits, decoder.generate(ids, attention_mask=mask, max_new_tokens=20), decoder.report()))
    (logits, tokens, report), (logits_too, tokens_too, report_too) = found

    assert torch.equal(logits, logits_too)
    assert torch.equal(tokens, tokens_too)
    assert report == report_too


def test_a_norm_with_other_bits_is_found_out(monkeypatch):
    # fp64: transformers rounds to fp32 on the way, torch does not.
    assert not norms.fused_norm_exact(CPU, torch.float64, 32, 1e-6)
    right = torch.nn.functional.rms_norm
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda x, *rest: right(x, *rest) * (1 + (x.shape[0] == 17) * 1e-6)
    )
    assert not norms.fused_norm_exact.__wrapped__(CPU, torch.float32, 32, 1e-6)  # for 17 rows alone
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *_: (_ for _ in ()).throw(NotImplementedError()))
    assert not norms.fused_norm_exact.__wrapped__(CPU, torch.float32, 32, 1e-6)


def test_the_test_of_a_norm_is_made_once_for_each_size(monkeypatch):
    made = []
    monkeypatch.setattr(
        "fuseboard.engine.decoder.model.fused_norm_exact", lambda *arguments: made.append(arguments) or False
    )
    model = model_of()
    decoder = QwenDecoder.from_transformers(model)
    compare(model, (0,), steps=3, decoder=decoder)  # by the formula, with the same bits

    assert {size for _, _, size, _ in made} == {16, 64}
    assert len(made) == 4 * LAYERS + 1
    assert decoder.report()["norm"] == {"16": "transformers' formula", "64": "transformers' formula"}


# ---- fused projections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_projections_give_the_same_within_rounding_and_are_reported(kind, dtype):
    model = model_of(kind, dtype)
    decoder = QwenDecoder.from_transformers(model)
    assert decoder.report()["fused_projections"] is False
    assert decoder.fuse() is decoder.fuse()
    ids, mask = prompts(PADS["left-padded"])
    with torch.no_grad():
        right = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        found = decoder(ids, attention_mask=mask)

    bound = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(found[mask.bool()], right[mask.bool()], rtol=0, atol=bound)
    report = decoder.report()
    assert report["fused_projections"] is True
    linears = [name for name, each in decoder.named_modules() if isinstance(each, torch.nn.Linear)]
    assert len(linears) == 4 * LAYERS + 1
    assert decoder.generate(ids, attention_mask=mask, max_new_tokens=3).shape == (3, LENGTH + 3)


def test_fused_projections_are_for_inference():
    decoder = QwenDecoder.from_transformers(model_of())
    with pytest.raises(RuntimeError, match="fuse\\(\\) is for inference"):
        decoder.train().fuse()
    decoder.eval().requires_grad_(requires_grad=True)
    with pytest.raises(RuntimeError, match="fuse\\(\\) is for inference"):
        decoder.fuse()
    decoder.requires_grad_(requires_grad=False).fuse()
    with pytest.raises(RuntimeError, match="fused projections are for inference"):
        decoder.train()
    with pytest.raises(RuntimeError, match="load into a new QwenDecoder"):
        decoder.load({})
    embeds = torch.randn(1, 3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="fused projections are for inference, and a gradient is wanted"):
        decoder(embeds=embeds)


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_fuse_that_ran_out_of_memory_can_be_called_again(monkeypatch, part):
    model = model_of()
    decoder, whole = QwenDecoder.from_transformers(model), QwenDecoder.from_transformers(model).fuse()
    ids, _ = prompts((0,))
    with monkeypatch.context() as patched:
        patched.setattr(getattr(decoder.model.layers[1], part), "fuse", lambda: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            decoder.fuse()
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), whole(ids))
        assert torch.equal(decoder.fuse()(ids), whole(ids))


# ---- arguments


def test_arguments_that_cannot_be_right_are_refused(pair):
    _, decoder = pair
    ids, mask = prompts((0, 0))
    cases = [
        (lambda: decoder.stream(ids[0], max_new_tokens=1), r"ids is torch.int64 \(14,\)"),
        (lambda: decoder.stream(ids.float(), max_new_tokens=1), "ids is torch.float32"),
        (lambda: decoder.generate(ids.float(), max_new_tokens=1), "ids is torch.float32"),
        (lambda: decoder.generate(ids.tolist(), max_new_tokens=1), r"ids is list; expected a tensor, int64 \(batch, "),
        (lambda: decoder.stream(ids.tolist(), max_new_tokens=1), "ids is list; expected a tensor"),
        (lambda: decoder(ids.tolist()), "ids is list; expected a tensor"),
        (lambda: decoder.stream(ids, max_new_tokens=0), "max_new_tokens is 0"),
        (lambda: decoder.stream(ids, max_new_tokens=1, attention_mask=mask[:1]), r"attention_mask has shape \(1, 14\)"),
        (decoder, "give either ids or embeds"),
        (lambda: decoder(embeds=torch.zeros(1, 2, 63)), r"embeds is torch.float32 \(1, 2, 63\)"),
        (lambda: decoder(ids, cache=decoder.cache(3)), "the cache is for 3 rows; given 2"),
        (lambda: decoder(ids, cache=decoder.cache(2), attention_mask=mask), "attention_mask belongs to the cache"),
        (lambda: decoder(ids + VOCABULARY), r"ids has \d+; expected ids of the vocabulary, 0 to 96"),
        (lambda: decoder(torch.tensor([[-1]])), "ids has -1; expected ids of the vocabulary, 0 to 96"),
        (lambda: decoder.stream(torch.tensor([[97]]), max_new_tokens=1), "ids has 97; expected ids of the vocabulary"),
        (lambda: decoder(ids, keep=-1), "keep is -1; expected an int of 0 or more"),
        (lambda: decoder(ids, attention_mask=mask.tolist()), r"attention_mask is a list; expected a tensor of shape"),
        (lambda: decoder.cache(2, attention_mask=mask.tolist()), r"attention_mask is a list; expected a tensor"),
        (lambda: decoder.cache(2, attention_mask=torch.tensor(1)), r"attention_mask has shape \(\)"),
        (lambda: decoder.stream(ids, max_new_tokens=1, attention_mask=[[1]]), "attention_mask is a list"),
        (lambda: decoder.cache(0), "batch is 0; expected an int of at least 1"),
        (lambda: decoder(embeds=[[1.0]]), "embeds is a list; expected a tensor"),
        (lambda: decoder(embeds=torch.zeros(1, 0, 64)), r"embeds is torch.float32 \(1, 0, 64\)"),
        (lambda: decoder(embeds=torch.zeros(1, 2, 64, device="meta")), "embeds is on meta; expected it on cpu"),
        (lambda: decoder(torch.ones(1, 2, dtype=torch.int64, device="meta")), "ids is on meta; expected it on cpu"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=2.5), "eos is 2.5; expected an id, an int, or several"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=[2.7]), r"eos is \[2.7\]; expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos="x"), "eos is 'x'; expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=True), "eos is True; expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=[5, False]), r"eos is \[5, False\]; expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=torch.tensor(5)), r"eos is tensor\(5\); expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=5, pad=97), "pad is 97, which rows that have ended"),
        (lambda: decoder.stream(ids, max_new_tokens=1, eos=5, pad="x"), "pad_token_id is 'x'; expected an id"),
        (lambda: decoder.stream(ids, max_new_tokens=1, sampler=Sampler), "expected a Sampler, a function of logits"),
        (lambda: decoder.generate(ids, max_new_tokens=1, on_token=5), "on_token is 5; expected a function of a Token"),
        (lambda: decoder.fixed(hf.DynamicCache()), r"cache is a DynamicCache; expected one from cache\(\)"),
        (lambda: decoder(ids, cache=hf.DynamicCache()), r"cache is a DynamicCache; expected one from cache\(\)"),
    ]
    for call, said in cases:
        with pytest.raises(fb.InputError, match=said):
            call()


def test_the_first_end_pads_and_so_must_be_of_the_vocabulary():
    decoder = QwenDecoder.from_transformers(model_of(pad_token_id=None))
    with pytest.raises(fb.InputError, match="pad is 200, which rows that have ended would go on with"):
        decoder.stream(prompts((0, 0))[0], max_new_tokens=1, eos=(200, 5))


def test_one_row_and_ends_that_no_row_can_draw_need_no_padding_of_the_vocabulary(pair):
    _, decoder = pair
    ids, _ = prompts((0, 0))
    free = decoder.generate(ids, max_new_tokens=4, eos=())

    assert torch.equal(decoder.generate(ids, max_new_tokens=4, eos=-1), free)
    assert torch.equal(decoder.generate(ids[:1], max_new_tokens=4, eos=int(free[0, -1]), pad=97), free[:1])


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (torch.full((2,), VOCABULARY), "the sampler gave 97; expected ids of the vocabulary, 0 to 96"),
        (torch.full((2,), -1), "the sampler gave -1; expected ids of the vocabulary"),
        (torch.zeros(2, dtype=torch.bool), r"the sampler gave torch.bool \(2,\); expected one integer id a row"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "the sampler gave ids on meta; expected them on cpu"),
    ],
)
def test_what_a_function_gives_that_is_no_id_is_refused(pair, drawn, said):
    with pytest.raises(fb.InputError, match=said):
        pair[1].generate(prompts((0, 0))[0], max_new_tokens=3, sampler=lambda _logits, _step: drawn)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(5)[None], torch.arange(LENGTH), torch.arange(3 * LENGTH).view(3, LENGTH), list(range(LENGTH)),
     torch.arange(LENGTH, device="meta")[None]],
)  # fmt: skip
def test_positions_that_do_not_fit_are_refused_and_the_cache_is_as_it_was(pair, positions):
    _, decoder = pair
    ids, _ = prompts((0, 0))
    cache = decoder.cache(2)
    with pytest.raises(fb.InputError, match=r"^positions .*; expected "):
        decoder(ids, cache=cache, positions=positions)

    with torch.no_grad():
        assert torch.equal(decoder(ids, cache=cache), decoder(ids))


def test_a_cache_of_another_decoder_is_refused_and_left_as_it_was(pair):
    _, decoder = pair
    ids, _ = prompts((0,))
    others = {
        "it is for other layers": QwenDecoder.from_transformers(model_of(num_hidden_layers=5)),
        "it has 1 key heads of 16, and the decoder 2 of 16": QwenDecoder.from_transformers(
            model_of(num_key_value_heads=1)
        ),
        "it is torch.bfloat16 on cpu, and the decoder torch.float32 on cpu": copy.deepcopy(decoder).bfloat16(),
    }
    with torch.no_grad():
        for said, other in others.items():
            cache = other.cache(1)
            other(ids, cache=cache)
            with pytest.raises(fb.InputError, match=f"^the cache is not this decoder's: {said}; make a new one"):
                decoder(ids[:, :1], cache=cache)
            assert other(ids[:, :1], cache=cache).shape == (1, 1, VOCABULARY)


def test_a_decoder_that_is_cast_between_two_tokens_says_so():
    decoder = QwenDecoder.from_transformers(model_of())
    stream = decoder.stream(prompts((0,))[0], max_new_tokens=5, eos=())
    next(stream)
    decoder.bfloat16()
    with pytest.raises(fb.InputError, match=r"the cache is not this decoder's: it is torch.float32 on cpu"):
        next(stream)


def test_a_cache_filled_in_inference_mode_goes_on_outside(pair):
    _, decoder = pair
    ids, _ = prompts((0,))
    with torch.inference_mode():
        cache = decoder.cache(1)
        decoder(ids[:, :-1], cache=cache)
    with torch.no_grad():
        found = decoder(ids[:, -1:], cache=cache)
        torch.testing.assert_close(found, decoder(ids)[:, -1:])


def test_autocast_and_gradients_through_a_cache_are_refused(pair):
    _, decoder = pair
    ids, _ = prompts((0,))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="leave autocast"):
        decoder(ids)
    embeds = torch.randn(1, 3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="a cache is written in place, and a gradient is wanted"):
        decoder(embeds=embeds, cache=decoder.cache(1))


def test_parts_on_two_devices_or_in_two_dtypes_are_refused():
    decoder = QwenDecoder.from_transformers(model_of())
    decoder.model.norm.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"model.norm.weight is torch.bfloat16 on cpu, the"):
        decoder(prompts((0,))[0])


def test_the_report_says_how_it_computes(sliding):
    _, decoder = sliding
    report = decoder.report()

    assert json.loads(json.dumps(report)) == report
    assert report["sites"] == {"qwen.full": 1, "qwen.sliding": 2}
    assert (report["model"], report["dtype"], report["device"]) == ("qwen3", "float32", "cpu")
    assert report["queries and keys"] == "together"
    assert report["heads sharing a key"] == 4


def test_the_reference_packs_or_repeats_as_the_installed_transformers_does():
    source = Path(hf.__file__).parent / "integrations" / "sdpa_attention.py"

    assert decoder_layers.packs_queries() == ("def pack_gqa(" in source.read_text())


@pytest.mark.parametrize("packs", [True, False])
def test_packed_queries_and_repeated_keys_agree_within_rounding(monkeypatch, packs):
    monkeypatch.setattr(decoder_layers, "packs_queries", lambda: packs)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads, length in ((8, 1), (2, 9), (2, 9)))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    right = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double().repeat_interleave(4, 1), v.double().repeat_interleave(4, 1), attn_mask=mask
    )

    found = decoder_layers.reference(q, k, v, mask=mask, enable_gqa=True)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)


def test_a_pass_made_part_by_part_is_the_same(sliding):
    _, decoder = sliding
    ids, mask = prompts(PADS["left-padded"])
    whole, parts = (decoder.cache(3, attention_mask=mask) for _ in range(2))
    with torch.no_grad():
        for new in (LENGTH, 1, 1):
            right = decoder(ids[:, :new], cache=whole)
            hidden, cos, sin, given = decoder.begin(ids[:, :new], parts)
            for index, layer in enumerate(decoder.model.layers):
                q, k, v = layer.before(hidden, cos, sin)
                hidden = layer.after(hidden, layer.attend(q, *parts.put(index, k, v), given[layer.kind]))
            parts.end(new)
            assert torch.equal(decoder.end(hidden), right)


# ---- where bits may differ: within rounding


def test_weights_aligned_otherwise_in_memory_give_the_same_within_rounding(pair):
    model, _ = pair
    decoder = QwenDecoder(model.config)
    shifted = {}
    for name, each in model.state_dict().items():
        buffer = torch.empty(each.numel() + 6)  # 24 bytes in, as in a mapped file
        shifted[name] = buffer[6:].view(each.shape).copy_(each)
    decoder.load(shifted)
    ids, _ = prompts((0, 0))
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(decoder(ids[:, :1]), model(ids[:, :1]).logits, rtol=1e-5, atol=1e-4)


def test_a_frozen_model_of_transformers_agrees_within_rounding():
    model = model_of(hidden_size=512, vocab_size=4000).requires_grad_(requires_grad=False)
    decoder = QwenDecoder.from_transformers(model)
    ids, _ = prompts((0, 0))
    with torch.no_grad():
        frozen = model(ids, logits_to_keep=1).logits
        right = model.requires_grad_(requires_grad=True)(ids, logits_to_keep=1).logits
        found = decoder(ids, keep=1)

    assert torch.equal(found, right)
    torch.testing.assert_close(found, frozen, rtol=1e-5, atol=1e-4)


def test_a_dynamic_rope_does_not_remember_longer_sequences():
    options = SHAPES["dynamic, outgrown"]
    decoder = QwenDecoder.from_transformers(model_of(**options))
    fresh = prompts((0,), 40)[0], prompts((0,), 30)[0]
    with torch.no_grad():
        for ids in fresh:  # the longer one first
            assert torch.equal(decoder(ids), model_of(**options)(ids).logits)


def test_a_dynamic_rope_takes_given_positions():
    model = model_of(**SHAPES["dynamic, outgrown"])
    decoder = QwenDecoder.from_transformers(model)
    ids, _ = prompts((0,), 6)
    positions = torch.arange(40, 46)[None]
    with torch.no_grad():
        assert torch.equal(decoder(ids, positions=positions), model(ids, position_ids=positions).logits)


def test_a_dynamic_model_that_has_grown_is_taken_over_as_it_began():
    model = model_of(**SHAPES["dynamic, outgrown"])
    with torch.no_grad():
        model(prompts((0,), 40)[0])
    decoder = QwenDecoder.from_transformers(model)

    assert decoder.report()["rope"] == "dynamic"
    compare(model_of(**SHAPES["dynamic, outgrown"]), (0,), steps=16, decoder=decoder)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_keys_and_values_in_one_memory_are_taken_in_as_those_apart(window: int | None, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    together, apart = KVCache([window], 2, reserve=8), KVCache([window], 2, reserve=8)
    for new in (7, *(1,) * 150):
        both = torch.randn(2, 2, new, heads, 4, generator=generator)
        k, v = both.unbind(0)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        one = as_one(k, v)
        assert one is not None
        assert torch.equal(one, torch.stack((k, v)))
        assert as_one(k.clone(), v.clone()) is None
        assert as_one(v, k) is None
        found, wanted = together.put(0, k, v), apart.put(0, k.clone(), v.clone())
        assert all(map(torch.equal, found, wanted))
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
        together.end(new)
        apart.end(new)
        assert all(map(torch.equal, together.held(0), apart.held(0)))


# ---- what is kept from pass to pass


SHAPE_OF_NORMS = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip


def test_norm_weights_that_lie_where_others_lay_or_say_nothing_of_a_change_are_seen():
    config = {**SHAPE_OF_NORMS, "model_type": "qwen3"}
    names = [(name, each.shape) for name, each in QwenDecoder(config).named_parameters()]

    def weights_of(seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in names}

    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        decoder = QwenDecoder(config)
        for seed in range(6):
            decoder.load(weights_of(seed))
            fresh = QwenDecoder(config)
            fresh.load(weights_of(seed))
            assert torch.equal(decoder(ids), fresh(ids)), seed
            for each in (decoder, fresh):
                each.model.layers[0].self_attn.q_norm.weight.data.mul_(2)  # by `.data`: its version stays
            want = decoder(ids)
            fresh.load({name: each.clone() for name, each in fresh.state_dict().items()})
            assert torch.equal(want, fresh(ids)), seed


def test_a_padded_prompt_in_pieces_stretches_a_dynamic_rope_when_it_gets_so_long():
    model = model_of(max_position_embeddings=12, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    decoder = QwenDecoder.from_transformers(model)
    ids = torch.randint(1, 90, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        whole = decoder.cache(2, attention_mask=mask)
        short = decoder.cache(2, attention_mask=mask[:, :8])
        assert torch.equal(decoder(ids[:, :8], cache=whole), decoder(ids[:, :8], cache=short))
        assert [whole.longest(new) for new in (1, 4, 5, 12, 13)] == [9, 12, 13, 20, 21]


def test_a_cache_of_another_dtype_is_refused_by_whole_steps_too(pair):
    decoder = QwenDecoder.from_transformers(pair[0])
    ids, _ = prompts((0,))
    with torch.no_grad():
        cache = decoder.cache(1)
        decoder(ids, cache=cache)
        decoder.bfloat16()
        with pytest.raises(fb.InputError, match=r"it is torch\.float32 on cpu, and the decoder torch\.bfloat16 on cpu"):
            decoder.fixed(cache)


def test_a_cache_that_was_lent_before_the_weights_were_loaded_anew_serves_no_later_request(pair):
    rounded = model_of()
    rounded.model.rotary_emb.to(torch.bfloat16)
    decoder, fresh = QwenDecoder.from_transformers(rounded), QwenDecoder.from_transformers(pair[0])
    ids, _ = prompts((0,))
    decoder.graphs = fresh.graphs = "step-eager"
    stream = decoder.stream(ids, max_new_tokens=30, eos=())
    next(stream), next(stream)
    decoder.load(pair[0].state_dict())
    stream.close()
    (whole,) = decoder._whole.values()

    assert not whole._spare
    assert torch.equal(decoder.generate(ids, max_new_tokens=9, eos=()), fresh.generate(ids, max_new_tokens=9, eos=()))
    assert len(whole._spare) == 1


def test_a_prompt_that_its_owner_writes_afterwards_is_taken_as_it_was_given(pair):
    decoder = QwenDecoder.from_transformers(pair[0])
    ids = torch.tensor([[5, 6, 7]])
    want = decoder.generate(ids, max_new_tokens=4, eos=())
    mine = ids.clone()
    stream = decoder.stream(mine, max_new_tokens=4, eos=())
    mine.fill_(1)
    assert [token.ids[0] for token in stream] == want[0, 3:].tolist()
    mine = ids.clone()
    assert torch.equal(decoder.generate(mine, max_new_tokens=4, eos=(), on_token=lambda _token: mine.fill_(1)), want)


@pytest.mark.parametrize("wrong", ["x", -5, 5.5, True, None])
def test_what_is_no_count_is_refused_before_anything_is_made(pair, wrong):
    decoder = QwenDecoder.from_transformers(pair[0])
    ids, _ = prompts((0,))
    cache = decoder.cache(1)
    with torch.no_grad():
        decoder(ids, cache=cache)
    for call, name in (
        (lambda: decoder.cache(1, reserve=wrong), "reserve"),
        (lambda: decoder.fixed(cache, capacity=wrong), "capacity"),
        (lambda: decoder(ids, keep=wrong), "keep"),
        (lambda: decoder.cache(wrong), "batch"),
    ):
        with pytest.raises(fb.InputError, match=f"{name} is {wrong!r}; expected an int of"):
            call()
    with pytest.raises(fb.InputError, match="cache is a NoneType; expected one from cache"):
        decoder.begin(ids, None)


def test_a_copy_tests_its_norms_where_it_is(pair):
    decoder = QwenDecoder.from_transformers(pair[0])
    ids, _ = prompts((0,))
    with torch.no_grad():
        want = decoder(ids)
        copied = pickle.loads(pickle.dumps(decoder))
        assert copied._ready is None
        assert torch.equal(copied(ids), want)
