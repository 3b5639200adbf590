"""Presets are planned without building them, as they are built."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import Refusal
from harness.strategies.optimizers import state_bytes_per_element
from harness.suites.model_sizes import PRESETS
from harness.suites.trial import Model, Optimizer
from harness.workloads.models import build, unfilled
from harness.workloads.preset_parameters import parameters_of
from impl.engine.unit_planning import plan_units
from impl.plan import memory, unit_plan
from impl.policy.presets import preset
from impl.policy.topology import Topology

SEQUENCES = {"gpt": 48, "bert": 48, "vit": 64}
CHANGED = [
    *((name, {}) for name in PRESETS),
    *(("gpt-tiny", arguments) for arguments in ({"layers": 3, "tied": True}, {"vocab": 100, "width": 96})),
    ("bert-tiny", {"vocab": 100}),
    ("vit-small", {"layers": 1}),
]


@pytest.mark.parametrize(("name", "arguments"), CHANGED, ids=str)
def test_listed_parameters_are_those_of_the_module(name: str, arguments: dict[str, Any]) -> None:
    """Names, order, shapes and blocks agree with the module on the meta device, and so do the units."""
    model, sequence = Model(name=name, arguments=arguments), SEQUENCES[name.partition("-")[0]]
    placed, blocks = parameters_of(model, sequence)
    with unfilled():
        module = build(model, sequence)
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    assert {parameter.spec.name: parameter.spec.shape for parameter in placed} == shapes
    assert [parameter.spec.name for parameter in placed] == list(shapes)
    topology, policy = Topology(2, 2), preset("zero3")
    assert unit_plan.plan_units(placed, blocks, topology, policy) == plan_units(module, topology, policy)


def test_a_sequence_that_makes_no_image_is_refused() -> None:
    """The list is refused as the module is."""
    with pytest.raises(
        Refusal, match="cannot cut an image into 48 square patches; set sequence to one of"
    ) as listed:
        parameters_of(Model(name="vit-tiny"), 48)
    with pytest.raises(Refusal) as built:
        build(Model(name="vit-tiny"), 48)
    assert str(listed.value) == str(built.value)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_usual_optimizers_hold_what_a_trial_of_them_finds(name: str) -> None:
    """Their bytes an element are known without torch."""
    optimizer = Optimizer(name=name, arguments={"lr": 0.0, "weight_decay": 0.5})
    assert state_bytes_per_element(optimizer) == memory.ADAM_BYTES
