"""The decision engine: transformers' bits, weights from a folder, the dtype rule, graphs, and what stands outside."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuseboard as fb
from fuseboard.engine.freeze import freeze
from fuseboard.masks import check_mask_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "decision"))

from decision import heads, weights
from decision.answers import LEAST, Batch, Calibration, Question, answers, ask, collate, fitted
from decision.config import FULL, SLIDING, EncoderConfig
from decision.encoder import GLOBAL, LOCAL, Given
from decision.model import DecisionModel

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "decision"
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "local_attention": 32, "pad_token_id": 0,
}  # fmt: skip
SHAPES = {
    "usual": {},
    "norm biases, every second layer global": {"global_attn_every_n_layers": 2, "norm_bias": True},
    "all biases, narrow window": {"mlp_bias": True, "attention_bias": True, "local_attention": 16},
    "all layers global": {"global_attn_every_n_layers": 1},
    "odd head dim, wide window": {"hidden_size": 96, "num_attention_heads": 6, "local_attention": 128},
}
LENGTHS = (1, 2, 8, 9, 16, 17, 18, 33, 64, 65, 66, 130)  # below, at and above the windows' reach


@pytest.fixture(scope="module")
def tiny() -> DecisionModel:
    return weights.random_model()


def question(kind: str, tokens: int, options: int, seed: int = 0) -> Question:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 300, (tokens,), generator=generator).tolist()
    return Question(kind, ids, list(range(1, 1 + 2 * options, 2)))


def batch_of(*lengths: int, options: int = 3) -> Batch:
    return collate([question("choice", each, options, each) for each in lengths], vocabulary=300)


def masks(batch: int, length: int) -> list[torch.Tensor | None]:
    right = torch.ones(batch, length, dtype=torch.long)
    right[0, length // 2 + 1 :] = 0
    return [None, torch.ones(batch, length, dtype=torch.long), right, right.flip(1)]


# ---- transformers' bits


@pytest.fixture(scope="module")
def transformers():
    found = pytest.importorskip("transformers", minversion="5.0", reason="the encoder's model is transformers 5")
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def their(transformers, folder: Path, **how: object) -> nn.Module:
    """The model by transformers, its weights copied out of the file.

    Where they lie in the file's memory, at addresses that are not aligned, the CPU sums in another order: a few of
    thousands of results differ in the last bit from those of the very same weights elsewhere.
    """
    model = transformers.ModernBertModel.from_pretrained(folder, attn_implementation="sdpa", **how).eval()
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    return model


def saved(transformers, folder: Path, kind: str = "ModernBertModel", **changes: object) -> Path:
    """A checkpoint as transformers writes it, with biases that are not 0 and norms that are not 1."""
    config = transformers.ModernBertConfig(**{**SMALL, **changes}, attn_implementation="sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_encoder_gives_transformers_bits(transformers, tmp_path, changes, dtype):
    folder = saved(transformers, tmp_path, **changes)
    theirs = their(transformers, folder, dtype=dtype)
    ours = weights.load(folder, dtype=dtype).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for length in LENGTHS:
            ids = torch.randint(1, 300, (2, length), generator=generator)
            for which, mask in enumerate(masks(2, length)):
                wanted = theirs(ids, attention_mask=mask).last_hidden_state
                assert wanted.dtype == dtype
                assert torch.equal(ours(ids, mask), wanted), (length, which)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_encoder_gives_transformers_bits_under_autocast(transformers, tmp_path, dtype):
    folder = saved(transformers, tmp_path, norm_bias=True)
    theirs = their(transformers, folder)
    ours = weights.load(folder).model
    ids = torch.randint(1, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        for mask in masks(2, 40):
            assert torch.equal(ours(ids, mask), theirs(ids, attention_mask=mask).last_hidden_state)


def test_a_cast_leaves_the_rotary_frequencies_in_float32(tiny):
    low = DecisionModel(weights.TINY)
    low.load_state_dict(tiny.state_dict(), assign=True)
    low.to(torch.bfloat16).to("cpu").half().double()
    for kind in (FULL, SLIDING):
        assert torch.equal(low.model.rotary[kind].inverse, tiny.model.rotary[kind].inverse)
        assert low.model.rotary[kind].inverse.dtype == torch.float32


# ---- configurations and weights


def test_old_and_new_names_of_a_configuration_mean_the_same():
    old = EncoderConfig.of(
        {**SMALL, "global_rope_theta": 5e4, "local_rope_theta": 2e3, "global_attn_every_n_layers": 2}
    )
    rope = {
        FULL: {"rope_type": "default", "rope_theta": 5e4},
        SLIDING: {"rope_type": "default", "rope_theta": 2e3},
    }
    new = EncoderConfig.of({**SMALL, "rope_parameters": rope, "layer_types": [FULL, SLIDING, FULL]})

    assert old == new
    assert EncoderConfig.of(old.to_dict()) == old
    assert EncoderConfig.of({**SMALL, "global_rope_theta": 5e4, "local_rope_theta": None}).theta[SLIDING] == 5e4


def test_a_configuration_means_what_transformers_reads(transformers):
    config = EncoderConfig.of(transformers.ModernBertConfig(**SMALL))
    again = transformers.ModernBertConfig(**config.to_dict())

    assert config == EncoderConfig.of(SMALL)
    assert EncoderConfig.of(again) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'; this engine computes 'gelu'"),
        ({"attention_sinks": True}, "attention_sinks = True; which this engine does not know"),
        ({"model_type": "bert"}, "model_type is 'bert'"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_attention_heads": 5}, "num_attention_heads 5; expected an even number for each head"),
        ({"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types is .*chunked"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}}, "rope_type 'default' on whole heads"),
    ],
)
def test_a_configuration_that_asks_for_something_else_is_refused(changes, said):
    with pytest.raises(fb.InputError, match=said):
        EncoderConfig.of({**SMALL, **changes})


def test_a_checkpoint_for_another_task_gives_its_encoder_and_drawn_heads(transformers, tmp_path, caplog):
    folder = saved(transformers, tmp_path, "ModernBertForMaskedLM")
    with caplog.at_level(logging.WARNING):
        model = weights.load(folder, seed=3)
    theirs = their(transformers, folder)
    batch = batch_of(40, 21)

    assert "has no decision heads: theirs are drawn from seed 3" in caplog.text
    with torch.no_grad():
        wanted = theirs(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        assert torch.equal(model.model(batch.input_ids, batch.attention_mask), wanted)
        again = weights.load(folder, seed=3)(*batch)
    assert all(torch.equal(*pair) for pair in zip(model(*batch), again, strict=True))
    assert not torch.equal(weights.load(folder, seed=4)(*batch)[0], again[0])


def test_what_is_saved_loads_again_with_its_heads_and_in_shards(tmp_path, caplog):
    model = weights.random_model(EncoderConfig.of(SMALL), actions=5, seed=7)
    weights.save(model, tmp_path)
    batch = batch_of(40, 21)
    whole = weights.load(tmp_path)
    half = weights.load(tmp_path, dtype=torch.bfloat16)

    assert torch.equal(whole(*batch)[1], model(*batch)[1])
    assert whole(*batch)[1].shape == (2, 5)
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}

    from safetensors.torch import load_file, save_file

    found = load_file(tmp_path / "model.safetensors")
    names = sorted(found)
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: found[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(weights.load(tmp_path)(*batch)[0], model(*batch)[0])
    assert not caplog.records


def test_transformers_reads_the_encoder_of_what_is_saved(transformers, tmp_path):
    model = weights.random_model(EncoderConfig.of(SMALL), seed=7)
    weights.save(model, tmp_path)
    theirs = their(transformers, tmp_path)
    batch = batch_of(40, 21)
    with torch.no_grad():
        wanted = theirs(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        assert torch.equal(model.model(batch.input_ids, batch.attention_mask), wanted)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: found.pop("model.final_norm.weight"), r"missing: model\.final_norm\.weight"),
        (lambda found: found.update(extra=torch.zeros(2)), "unexpected: extra"),
        (
            lambda found: found.update({"action_head.out.bias": torch.zeros(9)}),
            r"of another shape: action_head\.out\.bias \(9,\), expected \(3,\)",
        ),
        (lambda found: found.update({"action_head.out.bias": torch.zeros(3).half()}), "several dtypes"),
    ],
    ids=["missing", "unexpected", "misshapen", "several dtypes"],
)
def test_weights_that_are_not_the_configurations_are_refused(tmp_path, spoil, said):
    from safetensors.torch import load_file, save_file

    weights.save(weights.random_model(EncoderConfig.of(SMALL)), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    spoil(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(fb.InputError, match=said):
        weights.load(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(fb.InputError, match=r"there is no .*config\.json"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(fb.InputError, match="is not JSON"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(fb.InputError, match=r"there is no .*model\.safetensors"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(fb.InputError, match="cannot be read"):
        weights.load(tmp_path)


def test_random_weights_are_the_seeds_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (weights.random_model(seed=seed) for seed in (1, 1, 2))

    assert torch.equal(torch.get_rng_state(), before)
    name = "layers.0.attn.Wqkv.weight"
    assert torch.equal(one.model.get_parameter(name), same.model.get_parameter(name))
    assert not torch.equal(one.model.get_parameter(name), other.model.get_parameter(name))


# ---- the dtype rule


@pytest.fixture
def without_the_rule(monkeypatch):
    """The action head as it was before the rule: float32 features go into the layer as they are."""

    def take_away() -> None:
        monkeypatch.setattr(heads, "in_weights_dtype", lambda x, layer: x)

    return take_away


def test_float32_inference_has_the_same_bits_with_and_without_the_rule(tiny, without_the_rule):
    batch = batch_of(100, 41)
    with_rule = tiny(*batch)
    without_the_rule()

    assert all(torch.equal(*pair) for pair in zip(with_rule, tiny(*batch), strict=True))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", [False, True], ids=["float32 weights", "low weights"])
def test_autocast_keeps_its_own_conversions(without_the_rule, low, autocast):
    model, batch = weights.random_model(dtype=autocast if low else torch.float32), batch_of(100, 41)
    with torch.autocast("cpu", dtype=autocast):
        with_rule = model(*batch)
        without_the_rule()
        before = model(*batch)

    assert all(torch.equal(*pair) for pair in zip(with_rule, before, strict=True))


def test_autocast_to_another_dtype_than_the_weights_rounds_once(without_the_rule):
    head = weights.random_model(dtype=torch.bfloat16).action_head
    generator = torch.Generator().manual_seed(0)
    pooled, features = torch.randn(5, 64, generator=generator), torch.rand(5, 3, generator=generator)
    with torch.autocast("cpu", dtype=torch.float16):
        with_rule = head(pooled, features)
        without_the_rule()
        before = head(pooled, features)
        twice = head(pooled.bfloat16().float(), features.bfloat16().float())

    assert torch.equal(with_rule, before)
    assert not torch.equal(with_rule, twice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_explicit_low_weights_run_outside_autocast_and_did_not_without_the_rule(without_the_rule, tiny, dtype):
    model, batch = weights.random_model(dtype=dtype), batch_of(100, 41)
    decision, action = model(*batch)
    wanted = tiny(*batch)

    assert (decision.dtype, action.dtype) == (torch.float32, torch.float32)
    assert torch.equal(decision.argmax(-1), wanted[0].argmax(-1))
    torch.testing.assert_close(action.softmax(-1), wanted[1].softmax(-1), atol=0.1, rtol=0)
    without_the_rule()
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(*batch)


def test_the_pooled_state_and_the_features_are_joined_in_float32():
    head = weights.random_model(dtype=torch.bfloat16).action_head
    seen = []
    head.dense.register_forward_pre_hook(lambda _layer, given: seen.append(given[0]))
    pooled, features = torch.ones(2, 64).bfloat16(), torch.full((2, 3), 1 + 2**-12)
    with torch.autocast("cpu", dtype=torch.float16):
        head(pooled, features)

    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0][:, -3:], features)  # bf16 would have made 1 of it


# ---- the board


def test_each_layer_is_a_call_of_its_site(tiny):
    run = fb.Run()
    with fb.bind("exact", run=run):
        answer = tiny(*batch_of(100, 41))
    used = run.report()["attention"]["used"]

    assert sum(used.values()) == 4
    torch.testing.assert_close(answer, tiny(*batch_of(100, 41)))
    for policy in ({GLOBAL.name: "sdpa-math", "*": "auto"}, {LOCAL.name: "sdpa-math", "*": "auto"}):
        run = fb.Run()
        with fb.bind(policy, run=run):
            tiny(*batch_of(100, 41))
        assert run.report()["attention"]["used"]["sdpa-math"] == 2


def test_a_copy_of_a_model_calls_the_same_sites(tiny):
    copied, batch = copy.deepcopy(tiny), batch_of(40)
    frozen = freeze(copied, "sdpa-math", tuple(batch))

    assert set(frozen.report()) == {"decision.global", "decision.local"}
    with frozen:
        assert torch.equal(copied(*batch)[0], tiny(*batch)[0])
    torch.testing.assert_close(copied(*batch), tiny(*batch))


def test_the_structure_is_told_where_there_is_one(tiny):
    encoder, batch = tiny.model, batch_of(100, 41)
    long = encoder.given(112, batch.attention_mask, torch.device("cpu"), right=True)
    short = encoder.given(17, torch.tensor([[1] * 9 + [0] * 8]), torch.device("cpu"))
    none = encoder.given(112, torch.ones(1, 112), torch.device("cpu"))

    assert long[FULL].info is not None
    assert long[FULL].info.padding == "right"
    assert (long[SLIDING].info.window, long[SLIDING].info.ahead, long[SLIDING].info.padding) == (17, 16, "right")
    for each in long.values():
        check_mask_info(each.mask, each.info, 112, 112, torch.device("cpu"))
    assert short[SLIDING] is short[FULL]  # no token is further away than the window reaches
    assert short[FULL].info is not None
    assert short[FULL].info.padding is None
    assert none[FULL] == Given()
    assert none[SLIDING].mask is not None
    assert (none[SLIDING].info.keys, none[SLIDING].info.ahead) == (None, 16)
    encoder.structures = False
    try:
        told = encoder.given(112, batch.attention_mask, torch.device("cpu"), right=True)
    finally:
        encoder.structures = True
    assert (told[FULL].info, told[SLIDING].info) == (None, None)
    seen = none[SLIDING].mask[0, 0].nonzero()
    assert int((seen[:, 0] - seen[:, 1]).abs().max()) == 16
    assert len(seen) == 112 * 33 - 16 * 17


def test_a_kernel_of_structures_answers_every_layer():
    package = pytest.importorskip("fuseboard_tilelang._package", reason="this plugin's kernel takes no dense mask")
    problem = package.cpu_problem()
    if problem is not None:
        pytest.skip(problem)
    model = weights.random_model(EncoderConfig.of({**SMALL, "hidden_size": 128, "num_attention_heads": 2}))
    model.right = True
    for batch in (batch_of(100, 41), batch_of(112), batch_of(9, 7)):
        run = fb.Run()
        with torch.no_grad(), fb.bind(fb.policy_for("tilelang", True), run=run):
            got = model(*batch)
        assert run.report()["attention"]["used"] == {"tilelang": 3}
        torch.testing.assert_close(got, model(*batch), atol=2e-5, rtol=1e-4)


def test_with_masks_checked_and_calls_counted_the_result_is_the_same(tiny, tmp_path):
    batch = batch_of(100, 41)
    torch.save(tuple(batch), tmp_path / "batch.pt")
    code = """
import sys, torch
import fuseboard as fb
from decision import weights
batch = torch.load(sys.argv[1], weights_only=True)
for right in (False, True):
    model = weights.random_model()
    model.right = right
    torch.save(tuple(model(*batch)), sys.argv[2])
    with fb.bind("exact"):
        model(*batch)
print({name: count for name, count in fb.site_calls().items() if name.startswith("decision.")})
"""
    environ = {
        **os.environ, "FUSEBOARD_DEBUG": "masks", "FUSEBOARD_TEST": "count", "PYTHONPATH": str(ENGINE),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    command = [sys.executable, "-c", code, str(tmp_path / "batch.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'decision.global': 8, 'decision.local': 8}"
    given = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(*pair) for pair in zip(given, tiny(*batch), strict=True))


def test_padding_changes_nothing_but_rounding(tiny):
    alone, beside = batch_of(41), batch_of(100, 41)
    torch.testing.assert_close(tiny(*alone)[0][0], tiny(*beside)[0][1], atol=1e-4, rtol=1e-4)


# ---- graphs


def dynamic():
    from torch.export import Dim

    rows, tokens, slots = Dim("rows", min=1, max=8), 16 * Dim("tokens16", min=2, max=32), Dim("slots", min=2, max=8)
    return ({0: rows, 1: tokens}, {0: rows, 1: tokens}, {0: rows, 1: slots}, {0: rows, 1: slots})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_exports_for_a_range_of_rows_tokens_and_slots(dtype):
    model = weights.random_model(dtype=dtype)
    with torch.no_grad():
        graph = torch.export.export(model, tuple(batch_of(100, 41)), dynamic_shapes=dynamic(), strict=False).module()
        for batch in (batch_of(100, 41), batch_of(20, options=2), batch_of(500, 33, 480, options=8), batch_of(64, 64)):
            torch.testing.assert_close(graph(*batch), tuple(model(*batch)), atol=0.1, rtol=0.02)
            if dtype == torch.float32:
                torch.testing.assert_close(graph(*batch), tuple(model(*batch)))


def test_the_model_is_one_graph_under_frozen_tracing():
    model = weights.random_model()
    model.model.structures = False
    batch = batch_of(100, 41)
    for policy in ("auto", "sdpa-math"):
        frozen = freeze(model, policy, tuple(batch))
        torch._dynamo.reset()
        graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        with torch.no_grad(), frozen.tracing():
            torch.testing.assert_close(graph(*batch), model(*batch))
            torch.testing.assert_close(graph(*batch_of(200, 9, 31)), model(*batch_of(200, 9, 31)))


# ---- heads


def test_a_slot_without_an_option_has_no_weight_wherever_it_points(tiny):
    batch = batch_of(100, 41, options=3)
    there = tiny(*batch)
    mask = torch.cat((batch.marker_mask, torch.zeros(2, 2, dtype=torch.bool)), dim=1)
    more = torch.cat((batch.marker_positions, torch.tensor([[10**6, -5]] * 2)), dim=1)
    decision, action = tiny(batch.input_ids, batch.attention_mask, more, mask)

    torch.testing.assert_close(decision[:, :3], there[0])
    torch.testing.assert_close(action, there[1])
    assert (decision.softmax(-1)[:, 3:] == 0).all()


def test_a_marker_outside_of_the_tokens_is_an_error(tiny):
    batch = batch_of(100, 41)
    with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
        tiny(batch.input_ids, batch.attention_mask, batch.marker_positions + 200, batch.marker_mask)


def test_confidence_is_what_it_says():
    logits = torch.tensor([[2.0, 0.0, heads.LOWEST], [1.0, heads.LOWEST, heads.LOWEST], [heads.LOWEST] * 3])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    p = 1 / (1 + math.exp(-2))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    wanted = torch.tensor([[p, entropy, 2 * p - 1], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])

    torch.testing.assert_close(heads.confidence(logits, mask), wanted)
    torch.testing.assert_close(heads.confidence(logits[1:2, :1], mask[1:2, :1]), wanted[1:2])
    ties = heads.confidence(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(ties, torch.tensor([[0.25, math.log(4), 0.0]]))


def test_markers_are_read_where_they_stand():
    hidden = torch.arange(24.0).view(2, 4, 3)
    states = heads.marked(hidden, torch.tensor([[3, 1], [0, 99]]), torch.tensor([[True, True], [True, False]]))
    assert states[0].tolist() == [[9, 10, 11], [3, 4, 5]]
    assert states[1, 0].tolist() == [12, 13, 14]


# ---- questions and answers


def test_questions_are_padded_on_the_right_to_a_multiple_of_sixteen():
    batch = collate(
        [Question("choice", [5, 6, 7], [0, 2]), Question("noul", range(1, 50), [3, 9])], vocabulary=50, pad=9
    )

    assert batch.input_ids.shape == (2, 64)
    assert batch.input_ids[0, :5].tolist() == [5, 6, 7, 9, 9]
    assert batch.attention_mask.sum(-1).tolist() == [3, 49]
    assert batch.marker_positions.tolist() == [[0, 2], [3, 9]]
    one = collate([Question("choice", [5, 6, 7], [1])], vocabulary=50)
    assert (one.input_ids.shape, one.marker_mask.tolist()) == ((1, 32), [[True, False]])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Question("maybe", [1], [0]), "kind is 'maybe'; expected one of choice, noul, score"),
        (lambda: Question("choice", [], [0]), "ids is empty"),
        (lambda: Question("choice", [1, 2], [2]), r"markers is \(2,\); expected places in 2 tokens"),
        (lambda: Question("choice", [1, 2], []), "expected places in 2 tokens, at least one"),
        (lambda: Question("noul", [1, 2, 3], [0, 1, 2]), "a noul question has two, no and yes"),
        (lambda: collate([], vocabulary=9), "questions is empty"),
        (lambda: collate([Question("choice", [1, 9], [0])], vocabulary=9), "question 0 holds token id 9; .* 0 to 8"),
        (lambda: Calibration({"maybe": 1.0}), "has 'maybe'; expected 'choice' or"),
        (lambda: Calibration({"choice:many": 1.0}), "has 'choice:many'; expected 'choice' or"),
        (lambda: Calibration({"choice": 0.0}), "temperature of 'choice' is 0.0; expected a positive number"),
    ],
)
def test_what_means_nothing_is_refused(make, said):
    with pytest.raises(fb.InputError, match=said):
        make()


def test_answers_are_of_the_questions_kind():
    questions = [question("choice", 9, 3), question("noul", 9, 2), question("score", 9, 3)]
    low = heads.LOWEST
    decision = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, low], [0.0, 0.0, math.log(2)]])
    action = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 9.0]])
    choice, noul, score = answers(questions, (decision, action))

    assert (choice.value, choice.action) == (1, 1)
    assert (noul.value, len(noul.probabilities)) == (False, 2)
    assert noul.probability == pytest.approx(1 / (1 + math.exp(-2)))
    assert score.value == pytest.approx(0.25 * 1 + 0.5 * 2)
    assert score.action_probability == pytest.approx(1 / (1 + math.exp(-9)))


def test_a_temperature_is_the_kinds_from_its_number_of_options_on():
    calibration = Calibration({"choice": 2.0, "choice:3+": 4.0, "noul": 1.5})
    asked = [question("choice", 9, 2), question("choice", 9, 3), question("noul", 9, 2), question("score", 9, 4)]
    hot = answers([asked[1]], (torch.tensor([[0.0, 4.0, 8.0]]), torch.zeros(1, 2)), calibration)[0]

    assert [calibration.of(each) for each in asked] == [2.0, 4.0, 1.5, 1.0]
    assert hot.probabilities == pytest.approx(tuple(torch.tensor([0.0, 1.0, 2.0]).softmax(-1).tolist()))


def test_a_temperature_too_low_is_cut_with_a_warning():
    with pytest.warns(UserWarning, match="temperature of choice:11\\+ is 0.1; 0.5 is used"):
        assert Calibration({"choice:11+": 0.1}).temperatures == {"choice:11+": LEAST}


def test_a_fitted_temperature_is_the_one_the_labels_were_drawn_at():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20000, 4, generator=generator) * 3
    logits[:, 3][::2] = heads.LOWEST
    right = torch.multinomial((logits / 2.5).softmax(-1), 1, generator=generator)[:, 0]
    assert fitted(logits, right) == pytest.approx(2.5, rel=0.05)


def test_a_model_is_asked_in_one_batch(tiny):
    asked = [question("choice", 60, 3), question("noul", 20, 2), question("score", 33, 5)]
    together, alone = ask(tiny, asked), [ask(tiny, [each])[0] for each in asked]

    assert [each.kind for each in together] == ["choice", "noul", "score"]
    for one, other in zip(together, alone, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
        assert one.action == other.action


def test_weights_ask_for_no_gradient_until_somebody_says_so(tiny):
    assert not any(each.requires_grad for each in tiny.parameters())
    model = weights.random_model()
    model.requires_grad_(requires_grad=True)
    decision, action = model(*batch_of(40))
    (F.softmax(decision, -1)[0, 0] + action.sum()).backward()
    missing = [name for name, each in model.named_parameters() if each.grad is None or not bool(each.grad.any())]
    assert missing == []
