"""Peers and policies train the same model on the same data to the same losses."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.cluster.rank_processes import ALLOCATOR, run_ranks
from harness.records.trial_record import Record
from harness.strategies.strategy import Strategy
from impl.policy.topology import Topology
from tests.harness.cluster import targets
from tests.harness.cluster.test_rank_processes import local
from tests.harness.runs.test_rank_trial import INSTALLED, result, text, trial
from tests.support.params import long, nightly

__all__ = ["text"]  # a fixture

STEPS = 20
ZERO_2 = '{"zero_optimization": {"stage": 2}}'
BF16: dict[str, Any] = {"peer": {"compute": "bf16"}}


def trained(text: str, strategy: str, setting: tuple[float | None, int, bool], **fields: Any) -> Record:
    """A record of all steps, with validations in their midst and end."""
    clip, accumulation, tied = setting
    model = {"name": "gpt-tiny", "arguments": {"tied": tied}}
    fields = {"clip": clip, "accumulation": accumulation, "model": model, "warmup": 0, **fields}
    return result(
        trial(text, strategy, steps=STEPS, validate_every=STEPS // 2, **fields), Path(f"{text}.log")
    )


reference = cache(trained)


def losses(record: Record) -> list[float]:
    """Mean loss over ranks of every step, and of every validation."""
    steps = zip(*([step.loss for step in rank.steps] for rank in record.ranks), strict=True)
    return [sum(step) / len(step) for step in steps] + [checked.loss for checked in record.validations]


@pytest.mark.parametrize("setting", [*nightly(((None, 1, False),)), (0.5, 2, True)], ids=str)
@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        *(("ddp", {}), ("ddp-tuned", {}), ("fsdp2-kept-prefetch", {}), ("exact", {})),
        *long(("fsdp2", {})),
        *nightly(("fsdp2-prefetch", {}), ("fsdp2-kept", {})),
        pytest.param("deepspeed", {}, marks=INSTALLED),
        pytest.param("deepspeed-hpz", {}, marks=INSTALLED),
        pytest.param("deepspeed", {"deepspeed_config": ZERO_2}, marks=INSTALLED),
    ],
)
def test_all_train_like_a_single_process(
    text: str, strategy: str, fields: dict[str, Any], setting: tuple[float | None, int, bool]
) -> None:
    """Over 20 steps, losses of peers and of the exact policy are within 1e-4 of a single process's, validation
    included; peers have no ledger.
    """
    record, expected = trained(text, strategy, setting, **fields), reference(text, "single", setting)
    assert record.reference_loss == pytest.approx(expected.reference_loss, abs=1e-6)
    assert losses(record)[0] == pytest.approx(record.reference_loss, abs=1e-4)
    assert losses(record) == pytest.approx(losses(expected), abs=1e-4)
    assert losses(expected)[STEPS - 1] < losses(expected)[0]
    if strategy != "exact":
        assert record.ranks[0].ledger is None
        assert record.predicted is None


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        *(("ddp-bf16", BF16), ("exact", {"policy": {"compute": "bf16", "max_padding": 1.0}})),
        *long(("fsdp2-kept-prefetch", BF16)),
        *nightly(("single", BF16), ("ddp-bf16", {}), ("ddp", BF16), ("fsdp2", BF16)),
        pytest.param("deepspeed", BF16, marks=INSTALLED),
    ],
)
def test_in_16_bits_all_train_nearly_like_a_single_process(
    text: str, strategy: str, fields: dict[str, Any]
) -> None:
    """Over 20 steps in bf16, losses are within 2^-8 of those in fp32, and not equal to them."""
    setting = (0.5, 2, False)
    record, expected = trained(text, strategy, setting, **fields), reference(text, "single", setting)
    assert losses(record) == pytest.approx(losses(expected), rel=2**-8)
    assert losses(record) != pytest.approx(losses(expected), rel=1e-6)


def test_every_configuration_has_the_same_allocator(tmp_path: Path) -> None:
    """Ranks run with the allocator's settings, and the sweep's own environment is left alone."""
    before = dict(os.environ)
    (environment,) = run_ranks(targets.environment, None, local(Topology(1, 1), tmp_path / "log"))
    assert ALLOCATOR.items() <= environment.items()
    assert dict(os.environ) == before
    assert torch.get_num_threads() >= 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_rehearsal_that_fails_restores_buffers_and_drops_gradients() -> None:
    """An error in a rehearsal of a library's strategy leaves nothing of its passes."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with contextlib.suppress(ValueError), Strategy(net, dict, None, ()).rehearsing():
        net(torch.randn(2, 4)).square().sum().backward()
        raise ValueError("boom")
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    assert all(parameter.grad is None for parameter in net.parameters())
