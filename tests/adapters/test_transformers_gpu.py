"""A transformers causal model on a GPU: the right tokens under every policy, from prompts of unequal length."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry

hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.masking_utils", reason="transformers is older than 4.57")

from fuseboard.adapters import transformers as adapter  # noqa: E402 - only where transformers is installed

# Kernel packages warn when they are imported and when they compile; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCABULARY, LENGTHS, NEW = 2000, (200, 131, 37, 1), 24
POLICIES = ("auto", "exact", "fast", "flash", "flash3", "flash4", "xformers", "sage", "sage3", "sdpa-flash",
            "sdpa-efficient", "sdpa-cudnn", "sdpa-math")  # fmt: skip


def qwen_like(implementation: str) -> Any:
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = implementation
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.Qwen3ForCausalLM(config)
    # Logits far apart, so that the tokens are a matter of attention and not of rounding.
    torch.nn.init.normal_(model.lm_head.weight, std=1.0, generator=torch.Generator().manual_seed(1))
    return model.to("cuda", torch.bfloat16).eval()


@pytest.fixture(scope="module")
def prompts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(max(LENGTHS)).expand(len(LENGTHS), -1) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(2, VOCABULARY, real.shape, generator=generator).masked_fill(~real, 0)
    return {"input_ids": ids.cuda(), "attention_mask": real.long().cuda()}


def generated(model: Any, prompts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The new tokens, `(batch, NEW)`, and their logits, `(batch, NEW, vocabulary)`."""
    found = model.generate(
        **prompts, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences[:, -NEW:], torch.stack(found.logits, 1)


@attrs.frozen
class Judge:
    """The same weights in float64, given each row alone and unpadded.

    Attributes:
        model: In float64.
        rounding: How far off the logits of transformers' own attention are, padded and in half precision.
    """

    model: Any
    rounding: float = 0.0

    def off_by(self, prompts: dict[str, Tensor], tokens: Tensor, logits: Tensor) -> tuple[float, float]:
        """How far the logits are from the truth about that very text, and the chosen tokens from the best."""
        errors, regrets = [], []
        for row, length, new, mine in zip(prompts["input_ids"], LENGTHS, tokens, logits, strict=True):
            with torch.no_grad():
                text = torch.cat((row[-length:], new[:-1]))
                right = self.model(text[None]).logits[0, -NEW:]
            errors.append(float((mine - right).abs().max()))
            regrets.append(float((right.amax(-1) - right.gather(1, new[:, None])[:, 0]).max()))
        return max(errors), max(regrets)


@pytest.fixture(scope="module")
def judge(prompts: dict[str, Tensor]) -> Judge:
    exact = Judge(qwen_like("sdpa").double())
    return Judge(exact.model, exact.off_by(prompts, *generated(qwen_like("sdpa"), prompts))[0])


@pytest.fixture(scope="module")
def board() -> Any:
    adapter.register()
    return qwen_like("fuseboard")


def test_a_wrong_mask_would_be_seen(judge: Judge, prompts: dict[str, Tensor]) -> None:
    # As by a kernel that drops the mask.
    padding_read = {**prompts, "attention_mask": torch.ones_like(prompts["attention_mask"])}
    error, regret = judge.off_by(prompts, *generated(qwen_like("sdpa"), padding_read))

    assert error > 10 * judge.rounding
    assert regret > 10 * judge.rounding


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_right_tokens(name: str, board: Any, prompts: dict[str, Tensor], judge: Judge) -> None:
    backend = registry.current().resolve(name)
    if backend is None and name not in ("auto", "exact", "fast"):
        pytest.skip(f"{name} is not installed")
    run = fb.Run()
    with fb.bind(name, run=run):
        error, regret = judge.off_by(prompts, *generated(board, prompts))
    report = run.report()["attention"]

    assert error < 2 * judge.rounding, report
    assert regret < 2 * judge.rounding, report
    assert sum(report["used"].values()) == 6 * NEW
    assert "sage" not in report["used"]  # a decoder's sites take exact backends only
    # Where the padding lies would have to be asked of the device: the structure is "any keys", which these take.
    if name in ("flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"):
        assert report["used"].get(name), report
    elif backend is not None and name not in report["used"]:
        assert any(passed.startswith(f"{name}→") for passed in report["fallbacks"]), report


def test_a_declared_side_reaches_the_backends(board: Any, prompts: dict[str, Tensor], judge: Judge) -> None:
    adapter.register(padding="left")
    seen = []
    inner = adapter._info_of
    try:
        adapter._info_of = lambda *given: seen.append(inner(*given)) or seen[-1]
        with fb.bind("exact"):
            error, regret = judge.off_by(prompts, *generated(board, prompts))
    finally:
        adapter._info_of = inner
        adapter.register()

    assert max(error, regret) < 2 * judge.rounding
    assert {info.padding for info in seen if info is not None} == {"left"}


def test_a_policy_for_each_site_gives_the_right_tokens_too(
    board: Any, prompts: dict[str, Tensor], judge: Judge
) -> None:
    run = fb.Run()
    with fb.bind({"*": "exact"}, run=run):
        error, regret = judge.off_by(prompts, *generated(board, prompts))

    assert max(error, regret) < 2 * judge.rounding, run.report()
