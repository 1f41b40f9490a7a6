"""`accelerate`: the decision model on TileLang's kernels, here in their CPU form; what it refuses; the parity table."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import attrs
import pytest
import torch

import fuseboard as fb

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # which `parity` takes away again

import parity
from decision import weights
from decision.accelerated import accelerate
from decision.answers import Batch, Question, collate
from decision.config import FULL, SLIDING

pytest.importorskip("fuseboard_tilelang", reason="accelerate runs on this plugin's kernels")
KERNELS = importlib.util.find_spec("tilelang") is not None and any(map(shutil.which, ("g++", "clang++", "c++")))
on_kernels = pytest.mark.skipif(not KERNELS, reason="needs TileLang and a C++ compiler")
# One layer of each kind, biases and none, so that few kernels are compiled.
SMALL = attrs.evolve(weights.TINY, num_hidden_layers=2, layer_types=(FULL, SLIDING), local_attention=16)


def batch_of(*lengths: int, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(0)
    asked = [
        Question("choice", torch.randint(1, 500, (each,), generator=generator).tolist(), [1, 4, each - 1])
        for each in lengths
    ]
    return collate(asked, vocabulary=512, device=device)


@on_kernels
@pytest.mark.slow
def test_the_kernels_give_the_models_answers():
    model = weights.random_model(SMALL)
    fast = accelerate(model)
    for batch in (batch_of(100, 41, 8), batch_of(9), batch_of(32), batch_of(130, 17)):
        torch.testing.assert_close(fast(*batch), model(*batch), atol=2e-5, rtol=1e-4)


@on_kernels
@pytest.mark.slow
def test_biases_are_taken_where_there_are_some():
    config = attrs.evolve(SMALL, norm_bias=True, mlp_bias=True, attention_bias=True)
    model = weights.random_model(config)
    generator = torch.Generator().manual_seed(1)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            each.copy_(torch.randn(each.shape, generator=generator) * 0.3)
    batch = batch_of(100, 41)
    torch.testing.assert_close(accelerate(model)(*batch), model(*batch), atol=5e-5, rtol=1e-4)


@on_kernels
def test_the_window_and_the_padding_are_not_dropped():
    narrow = weights.random_model(SMALL)
    wide = weights.random_model(attrs.evolve(SMALL, local_attention=256))
    batch = batch_of(100, 41)
    longer = Batch(batch.input_ids, torch.ones_like(batch.attention_mask), *batch[2:])

    given = accelerate(narrow)(*batch)[0]
    assert not torch.allclose(given, accelerate(wide)(*batch)[0], atol=1e-3)
    assert not torch.allclose(given[1], accelerate(narrow)(*longer)[0][1], atol=1e-3)


@on_kernels
def test_weights_are_the_models_as_they_are_at_the_call():
    model = weights.random_model(SMALL)
    fast, batch = accelerate(model), batch_of(41)
    before = fast(*batch)[0]
    model.model.layers[0].attn.Wo.weight.mul_(2)

    assert not torch.equal(fast(*batch)[0], before)
    torch.testing.assert_close(fast(*batch), model(*batch), atol=2e-5, rtol=1e-4)


def test_rows_that_are_not_padded_on_the_right_are_refused():
    ids, mask, *rest = batch_of(40, 21)
    with pytest.raises(fb.InputError, match="row 0 of attention_mask is not padded on the right"):
        accelerate(weights.random_model(SMALL))(ids, mask.flip(1), *rest)


def test_autocast_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(fb.InputError, match="autocast is on"):
        accelerate(weights.random_model(SMALL))(*batch_of(40))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: model.train(), "training mode"),
        (lambda model: model.bfloat16(), r"torch\.bfloat16 on cpu; the kernels take .* torch\.float32 on cpu"),
        (lambda model: model.double(), r"torch\.float64 on cpu; the kernels take torch\.bfloat16 or torch\.float16 on"),
        (lambda model: model.action_head.half(), "expected one dtype on one device"),
        (lambda model: model.to("meta"), "on meta"),
    ],
    ids=["training", "bfloat16 on the CPU", "float64", "two dtypes", "another device"],
)
def test_a_model_that_the_kernels_do_not_take_is_refused(spoil, said):
    model = weights.random_model(SMALL)
    spoil(model)
    with pytest.raises(fb.InputError, match=said):
        accelerate(model)


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fuseboard_tilelang", None)
    with pytest.raises(ImportError, match="pip install --no-deps fuseboard-tilelang"):
        accelerate(weights.random_model(SMALL))


# ---- parity


def test_the_questions_are_the_seeds_and_of_the_counted_kinds():
    asked = parity.questions(parity.COUNTS, 512, 0)

    assert [sum(each.kind == kind for each in asked) for kind in ("choice", "noul", "score")] == [48, 180, 60]
    assert asked == parity.questions(parity.COUNTS, 512, 0)
    assert asked != parity.questions(parity.COUNTS, 512, 1)
    for each in asked:
        marks = [each.ids[at] for at in each.markers]
        assert len(set(marks)) == len(marks)
        assert set(marks) <= set(range(1, 9))
        assert sum(token <= 8 for token in each.ids) == len(marks)


def test_the_fitted_head_decides_as_the_markers_say():
    model = weights.random_model(SMALL)
    parity.fit(model, 1, torch.device("cpu"))
    asked = parity.questions({"choice": 6, "noul": 12, "score": 6}, 512, 0)
    given = parity.probabilities(model, asked, parity.batches(asked, model, torch.device("cpu")))
    marks = [[each.ids[at] for at in each.markers] for each in asked]

    assert sum(int(one.argmax()) == ids.index(max(ids)) for one, ids in zip(given, marks, strict=True)) >= 22


def test_differences_and_disagreements_are_counted_by_kind():
    asked = parity.questions({"choice": 2, "noul": 2, "score": 1}, 512, 0)
    given = {name: [torch.tensor([0.25, 0.75]) for _ in asked] for name in ("fast", "stock", "fp32")}
    given["fast"][1] = torch.tensor([0.75, 0.25])
    given["stock"][2] = torch.tensor([0.2, 0.8])
    choice, noul, score = parity.compared(asked, given)

    assert choice["fast/stock"] == {"largest": 0.5, "argmax": 1}
    assert choice["stock/fp32"] == {"largest": 0.0, "argmax": 2}
    assert noul["fast/stock"]["largest"] == pytest.approx(0.05)
    assert noul["fast/stock"]["argmax"] == 2
    assert score["fast/fp32"] == {"largest": 0.0, "argmax": 1}
    assert "| bf16 | choice | 2 | 0.5000 | 1/2 |" in parity.table([{"dtype": "bf16", **choice}])
    assert (parity.shown(0.0), parity.shown(1e-7), parity.shown(0.0123)) == ("0.0000", "1.0e-07", "0.0123")


@on_kernels
@pytest.mark.slow
def test_the_benchmark_writes_its_table_on_the_cpu_too(tmp_path, capsys):
    out = tmp_path / "results" / "parity"
    arguments = ["--device", "cpu", "--size", "tiny", "--fraction", "20", "--out", str(out)]

    assert parity.main(arguments) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert [(row["dtype"], row["type"], row["n"]) for row in report["rows"]] == [
        ("fp32", "choice", 2), ("fp32", "noul", 9), ("fp32", "score", 3),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["fast/stock"]["largest"] < 1e-4
        assert row["fast/stock"]["argmax"] == row["n"]
        assert row["stock/fp32"] == {"largest": 0.0, "argmax": row["n"]}
    assert parity.table(report["rows"]) in out.with_suffix(".md").read_text()
    assert parity.table(report["rows"]) in capsys.readouterr().out


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_the_kernels_give_the_models_answers(dtype):
    config = attrs.evolve(weights.BASE, vocab_size=512, num_hidden_layers=4, layer_types=weights.BASE.layer_types[:4])
    wide = weights.random_model(config).cuda()
    model = copy.deepcopy(wide).to(dtype)
    fast = accelerate(model)
    for batch in (batch_of(300, 41, 8, device="cuda"), batch_of(9, device="cuda"), batch_of(130, 17, device="cuda")):
        given, stock, exact = (run(*batch)[0].softmax(-1) for run in (fast, model, wide))
        error = float((stock - exact).abs().max())
        assert float((given - exact).abs().max()) <= 2 * error + 0.01


@pytest.mark.gpu
def test_on_a_gpu_a_row_that_is_not_padded_on_the_right_is_nan():
    config = attrs.evolve(weights.BASE, vocab_size=512, num_hidden_layers=1, layer_types=(FULL,))
    model = weights.random_model(config, dtype=torch.bfloat16).cuda()
    batch = batch_of(100, 41, 100, device="cuda")
    mask = batch.attention_mask.clone()
    mask[1] = mask[1].flip(0)
    decision, action = accelerate(model)(batch.input_ids, mask, *batch[2:])

    for each in (decision, action):
        assert bool(each[1].isnan().any())
        assert bool(each[[0, 2]].isfinite().all())
