"""Peers and policies train the same model to the same losses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cluster.rank_processes import ALLOCATOR, run_ranks
from harness.suites.trial import Trial
from impl.plan.topology import Topology
from tests.harness.cluster import targets
from tests.harness.cluster.test_rank_processes import local
from tests.support.params import long

STEPS = 20
INSTALLED = pytest.mark.needs("DeepSpeed")


def trial(strategy: str, **changes: Any) -> Trial:
    return Trial.model_validate(
        {
            "strategy": strategy,
            "model": {"name": "gpt-tiny"},
            "policy": {"max_padding": 1.0},
            "cluster": {"nodes": 2, "ranks_per_node": 2},
            "sequence": 16,
            "tokens_per_rank": 32,
            "steps": STEPS,
            **changes,
        }
    )


def losses(one: Trial, tmp_path: Path) -> list[float]:
    """Mean loss over ranks of every step."""
    topology = Topology(1, 1) if one.strategy == "single" else one.topology()
    ranks = run_ranks(targets.train, one, local(topology, tmp_path / "log"))
    return [sum(step) / len(step) for step in zip(*ranks, strict=True)]


@cache
def reference(clip: float | None, accumulation: int, tied: bool, folder: Path) -> list[float]:
    return losses(trial("single", **changes(clip, accumulation, tied)), folder)


def changes(clip: float | None, accumulation: int, tied: bool) -> dict[str, Any]:
    return {
        "clip": clip,
        "accumulation": accumulation,
        "model": {"name": "gpt-tiny", "arguments": {"tied": tied}},
    }


ZERO_2 = '{"zero_optimization": {"stage": 2}}'
BF16: dict[str, Any] = {"peer": {"compute": "bf16"}}


@pytest.mark.parametrize(
    "setting", [pytest.param((None, 1, False), marks=pytest.mark.nightly), (0.5, 2, True)], ids=str
)
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp-tuned", {}),
        *long(("fsdp2", {})),
        *[
            pytest.param(name, {}, marks=pytest.mark.nightly)
            for name in ("ddp", "fsdp2-prefetch", "fsdp2-kept", "fsdp2-kept-prefetch")
        ],
        pytest.param("deepspeed", {}, marks=INSTALLED),
        pytest.param("deepspeed-hpz", {}, marks=INSTALLED),
        pytest.param("deepspeed", {"deepspeed_config": ZERO_2}, marks=INSTALLED),
        ("exact", {}),
    ],
)
def test_all_train_like_a_single_process(
    tmp_path_factory: pytest.TempPathFactory,
    strategy: str,
    more: dict[str, Any],
    setting: tuple[float | None, int, bool],
) -> None:
    """Peers and the exact policy have a single process's losses within 1e-4 over 20 steps."""
    folder = tmp_path_factory.getbasetemp()
    found = losses(trial(strategy, **changes(*setting), **more), folder)
    expected = reference(*setting, folder)
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        pytest.param("single", BF16, marks=pytest.mark.nightly),
        pytest.param("ddp-bf16", {}, marks=pytest.mark.nightly),
        pytest.param("ddp", BF16, marks=pytest.mark.nightly),
        ("ddp-bf16", BF16),
        pytest.param("fsdp2", BF16, marks=pytest.mark.nightly),
        *long(("fsdp2-kept-prefetch", BF16)),
        pytest.param("deepspeed", BF16, marks=INSTALLED),
        ("exact", {"policy": {"compute": "bf16", "max_padding": 1.0}}),
    ],
)
def test_in_16_bits_all_train_nearly_like_a_single_process(
    tmp_path_factory: pytest.TempPathFactory, strategy: str, more: dict[str, Any]
) -> None:
    """Each has the fp32 losses within bf16's 2^-8 of them over 20 steps, and not the same ones."""
    folder = tmp_path_factory.getbasetemp()
    found = losses(trial(strategy, **changes(0.5, 2, False), **more), folder)
    expected = reference(0.5, 2, False, folder)
    assert found == pytest.approx(expected, rel=2**-8)
    assert found != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ALLOCATOR)
def test_every_contender_has_the_same_allocator(tmp_path: Path, name: str) -> None:
    """Ranks run with the allocator's settings, and the sweep's own environment is left alone."""
    import os

    before = dict(os.environ)
    assert run_ranks(targets.environment, name, local(Topology(1, 1), tmp_path / "log")) == [ALLOCATOR[name]]
    assert dict(os.environ) == before
    assert torch.get_num_threads() >= 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ
