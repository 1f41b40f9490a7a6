"""Graphs and LayerSteps where there is no GPU: reasons, signatures, the eager form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuseboard.engine.graphs import Graphs, signature, unusable
from fuseboard.engine.steps import LayerSteps, Stack


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_graphs_says_so(device: str) -> None:
    assert unusable(device) == f"{device} has no CUDA graphs"
    with pytest.raises(RuntimeError, match=f"no graphs on {device}: {device} has no CUDA graphs"):
        Graphs(device)


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert unusable("cuda:1") in ("there is no CUDA device", "graphs are not verified on ROCm")


def moved(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.clone()


def replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().clone())


def transposed(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.t()


def cast(module: nn.Linear) -> None:
    module.bfloat16()


def taken_out(module: nn.Linear) -> None:
    module.bias = None


def swapped_buffer(module: nn.Linear) -> None:
    module.scale = torch.ones(3)


@pytest.mark.parametrize("change", [moved, replaced, transposed, cast, taken_out, swapped_buffer])
def test_weights_that_lie_elsewhere_change_the_signature(change) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("scale", torch.ones(3))
    lies = signature(nn.Sequential(module))

    assert not lies.changed()
    change(module)
    assert lies.changed()


def test_values_written_in_place_leave_the_signature_as_it_was() -> None:
    module = nn.Linear(4, 4)
    lies = signature(module)
    with torch.no_grad():
        module.weight.fill_(1)

    assert not lies.changed()


def test_without_graphs_every_step_is_eager_and_the_report_says_so() -> None:
    seen = []

    def attend(layer, tensors):
        seen.append(layer)
        return tensors[0] + 1

    stack = Stack(
        count=3,
        before=lambda _layer, hidden, _inputs: (hidden * 2,),
        attend=attend,
        after=lambda layer, hidden, attended, inputs: hidden + attended + inputs[0] * layer,
        end=lambda hidden, _inputs: hidden.sum(),
    )
    steps = LayerSteps(stack, None)
    answer = steps(torch.ones(2), (torch.full((2,), 10.0),))

    # x -> x + (2x + 1) + 10 * layer: 1 -> 4 -> 23 -> 90
    assert answer.tolist() == 180
    assert seen == [0, 1, 2]
    assert steps.report() == {"eager steps": 1}
