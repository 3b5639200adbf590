"""Before anything runs, it is checked which optimizers may train shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import Refusal
from harness.strategies.optimizers import check_elementwise, state_bytes_per_element
from harness.suites.trial import Optimizer
from impl.engine.elementwise_probe import ELEMENTWISE
from tests.support import optimizers as own

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def of_ones_own(name: str, **arguments: Any) -> Optimizer:
    return Optimizer(name=f"tests.support.optimizers:{name}", arguments=arguments)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        (Optimizer(name="SGD"), 0),
        (Optimizer(name="AdamW"), 8),
        (of_ones_own("HalvesGradients", lr=0.1), 0),
        (of_ones_own("Lion", lr=0.1), 4),
        (of_ones_own("OwnArguments", rate=0.1, limit=0.5), 0),
    ],
)
def test_elementwise_optimizers_may_train_shards(optimizer: Optimizer, size: int) -> None:
    """Elementwise optimizers pass, also those that change gradients in place."""
    check_elementwise(optimizer)
    assert state_bytes_per_element(optimizer) == size


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (of_ones_own("Lamb"), "two pieces of a tensor"),
        (of_ones_own("DecaysMatrices"), "of 2 dimensions"),
        (of_ones_own("Langevin"), "it draws random numbers"),
        (
            of_ones_own("Raises"),
            "not known to be elementwise: its steps on small tensors raised ValueError: no c",
        ),
        (Optimizer(name="Adafactor"), "two pieces of a tensor"),
        (Optimizer(name="LBFGS"), "two pieces of a tensor"),
        (Optimizer(name="SparseAdam"), "does not support dense gradients"),
    ],
)
def test_others_are_refused(optimizer: Optimizer, why: str) -> None:
    """Other optimizers are refused in one line that names the suite's key."""
    with pytest.raises(Refusal, match=r"optimizer\.name = ") as refusal:
        check_elementwise(optimizer)
    assert str(refusal.value).startswith(f"optimizer.name = {optimizer.name!r} is not ")
    assert why in str(refusal.value)


def test_a_users_word_counts() -> None:
    """A class that the user has declared elementwise passes, as with the engine."""
    ELEMENTWISE.add(own.Langevin)
    try:
        check_elementwise(of_ones_own("Langevin"))
    finally:
        ELEMENTWISE.discard(own.Langevin)
