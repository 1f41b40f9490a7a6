"""QwenDecoder on a GPU: transformers' bits with sdpa, one wait a token, and the right tokens under every policy."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.layers import reference
from fuseboard.engine.sampling import Sampler

hf = pytest.importorskip("transformers", reason="transformers is not installed")

# Kernel packages warn when they are imported and when they compile; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

CACHE = "cache" if "cache" in inspect.signature(hf.Qwen3ForCausalLM.forward).parameters else "past_key_values"
VOCABULARY, LENGTHS, NEW, LAYERS = 2000, (200, 131, 37, 1), 24, 4
POLICIES = ("auto", "exact", "fast", "flash", "flash3", "flash4", "xformers", "sage", "sage3", "sdpa-flash",
            "sdpa-efficient", "sdpa-cudnn", "sdpa-math")  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}


def model_of(kind: str = "qwen3", **options: Any) -> Any:
    given = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    } | options  # fmt: skip
    config = {"qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config}[kind](**given)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = {"qwen2": hf.Qwen2ForCausalLM, "qwen3": hf.Qwen3ForCausalLM}[kind](config)
    # Logits far apart, so that the tokens are a matter of attention and not of rounding.
    torch.nn.init.normal_(model.lm_head.weight, std=1.0, generator=torch.Generator().manual_seed(1))
    return model.to("cuda", torch.bfloat16).eval()


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Ids on the GPU, and the attention mask on the CPU, where it is read without waiting."""
    real = torch.arange(max(lengths)).expand(len(lengths), -1) >= max(lengths) - torch.tensor(lengths)[:, None]
    ids = torch.randint(2, VOCABULARY, real.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~real, 0)
    return ids.cuda(), real.long()


@torch.no_grad()
def both(model: Any, decoder: QwenDecoder, lengths: tuple[int, ...], steps: int) -> list[tuple[Tensor, Tensor]]:
    """The logits of real tokens, mine and theirs, for the prefill and each step; ids are theirs."""
    ids, mask = prompts(lengths)
    theirs, mine = hf.DynamicCache(config=model.config), decoder.cache(len(lengths), attention_mask=mask)
    mask = mask.cuda()
    found = []
    for step in range(steps + 1):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        right = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: theirs}).logits
        logits = decoder(ids, cache=mine)
        real = mask.bool() if step == 0 else torch.ones_like(ids, dtype=torch.bool)
        found.append((logits[real], right[real]))
        ids = right[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return found


def strides_matter() -> bool:
    """Whether torch's own attention gives other bits for keys that are a view of a longer buffer, as a cache's are.

    cuDNN, torch's first choice on some devices, plans a kernel by strides too. All else is the same as in transformers.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    for batch, length, queries in itertools.product((1, 2, 4), (*range(48, 72), *range(200, 226)), (1, None)):
        q = draw(batch, 8, queries or length, 64)
        k, v = (draw(batch, 2, 320, 64)[:, :, :length] for _ in "kv")
        mask = torch.ones(batch, 1, queries or length, length, dtype=torch.bool, device="cuda").tril_(
            length - q.shape[2]
        )
        for given in ({"mask": mask}, {"causal": queries is None}):
            views = reference(q, k, v, enable_gqa=True, **given)
            if not torch.equal(views, reference(q, k.contiguous(), v.contiguous(), enable_gqa=True, **given)):
                return True
    return False


@pytest.mark.parametrize("lengths", [(61,), (64, 64), LENGTHS])
@pytest.mark.parametrize("options", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_logits_are_those_of_transformers(kind: str, options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model = model_of(kind, **options)
    decoder = QwenDecoder.from_transformers(model)
    differing = []
    for step, (mine, theirs) in enumerate(both(model, decoder, lengths, 8)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.1 * float(theirs.float().std()))
        if not torch.equal(mine, theirs):
            differing.append((step, float((mine.float() - theirs.float()).abs().max())))

    assert not differing or strides_matter(), (differing, decoder.report())


def test_ids_are_those_of_generate() -> None:
    model = model_of(**SLIDING)
    ids, mask = prompts(LENGTHS)
    right = model.generate(ids, attention_mask=mask.cuda(), max_new_tokens=NEW, do_sample=False)
    found = QwenDecoder.from_transformers(model).generate(ids, attention_mask=mask, max_new_tokens=NEW)

    assert torch.equal(found, right) or strides_matter()


def test_sampled_ids_are_those_of_generate() -> None:
    model = model_of()
    ids, mask = prompts(LENGTHS)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(5)
        right = model.generate(
            ids, attention_mask=mask.cuda(), max_new_tokens=NEW, do_sample=True, temperature=1.5, top_k=50, top_p=0.95
        )
    found = QwenDecoder.from_transformers(model).generate(
        ids, attention_mask=mask, max_new_tokens=NEW, sampler=Sampler(temperature=1.5, top_k=50, top_p=0.95),
        generator=torch.Generator("cuda").manual_seed(5),
    )  # fmt: skip

    assert torch.equal(found, right) or strides_matter()


@pytest.mark.parametrize("name", ["auto", "exact", "fast"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_host_waits_once_a_token(name: str, padded: bool) -> None:
    decoder = QwenDecoder.from_transformers(model_of(**SLIDING))
    ids, mask = prompts(LENGTHS if padded else (64, 64))
    sampler = Sampler(temperature=0.9, top_k=20, eos_token_id=1)

    def go() -> int:
        generator = torch.Generator("cuda").manual_seed(0)
        with fb.bind(name):
            return len(list(decoder.stream(
                ids, attention_mask=mask, max_new_tokens=NEW, sampler=sampler, generator=generator
            )))  # fmt: skip

    go()  # what is found out once: forms of norms, probes of backends, masks of ids
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # fuseboard: allow(counts waits, and is put back)
        try:
            steps = go()
        finally:
            torch.cuda.set_sync_debug_mode(before)  # fuseboard: allow(puts it back)
    waits = [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]

    assert len(waits) == steps, waits


def test_a_mask_on_the_device_costs_no_wait_when_the_caller_says_that_there_is_padding() -> None:
    decoder = QwenDecoder.from_transformers(model_of())
    ids, mask = prompts(LENGTHS)
    right = decoder.generate(ids, attention_mask=mask, max_new_tokens=3)
    on_device = mask.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")  # fuseboard: allow(finds waits, and is put back)
    try:
        with torch.no_grad():
            logits = decoder(ids, cache=decoder.cache(len(LENGTHS), attention_mask=on_device, padded=True), keep=1)
    finally:
        torch.cuda.set_sync_debug_mode(before)  # fuseboard: allow(puts it back)

    assert torch.equal(logits[:, -1].float().argmax(-1), right[:, max(LENGTHS)])


class Judge:
    """transformers in float64, given each row alone and unpadded."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def off_by(self, tokens: Tensor, logits: Tensor) -> tuple[float, float]:
        """How far the logits are from the truth about that very text, and the chosen tokens from the best."""
        errors, regrets = [], []
        ids, _ = prompts(LENGTHS)
        for row, length, new, mine in zip(ids, LENGTHS, tokens, logits, strict=True):
            right = self.model(torch.cat((row[-length:], new[:-1]))[None]).logits[0, -NEW:]
            errors.append(float((mine - right).abs().max()))
            regrets.append(float((right.amax(-1) - right.gather(1, new[:, None])[:, 0]).max()))
        return max(errors), max(regrets)


@pytest.fixture(scope="module")
def judge() -> Judge:
    # Rounded to bfloat16 first, frequencies included: the same model.
    return Judge(model_of(**SLIDING).double())


@pytest.fixture(scope="module")
def decoder() -> QwenDecoder:
    return QwenDecoder.from_transformers(model_of(**SLIDING))


def chosen(decoder: QwenDecoder) -> tuple[Tensor, Tensor]:
    """The new tokens, `(batch, NEW)`, and their logits, `(batch, NEW, vocabulary)`."""
    ids, mask = prompts(LENGTHS)
    logits: list[Tensor] = []

    def keep(scores: Tensor, step: int) -> Tensor:
        logits.append(scores.clone())
        return scores.argmax(-1)

    found = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW, sampler=keep)
    return found[:, -NEW:], torch.stack(logits, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_right_tokens(name: str, decoder: QwenDecoder, judge: Judge) -> None:
    if registry.current().resolve(name) is None and name not in ("auto", "exact", "fast"):
        pytest.skip(f"{name} is not installed")
    rounding, _ = judge.off_by(*chosen(decoder))
    run = fb.Run()
    with fb.bind(name, run=run):
        error, regret = judge.off_by(*chosen(decoder))
    report = run.report()["attention"]

    assert error < 2 * rounding, report
    assert regret < 2 * rounding, report
    assert sum(report["used"].values()) == LAYERS * NEW
    assert "sage" not in report["used"]  # the sites take exact backends only


def test_fused_projections_agree_within_rounding_and_say_so(judge: Judge) -> None:
    model = model_of(**SLIDING)
    rounding, _ = judge.off_by(*chosen(QwenDecoder.from_transformers(model)))
    fused = QwenDecoder.from_transformers(model).fuse()
    error, regret = judge.off_by(*chosen(fused))

    assert error < 2 * rounding
    assert regret < 2 * rounding
    assert fused.report()["fused_projections"] is True
    assert fused.report()["queries and keys"] == "together"
