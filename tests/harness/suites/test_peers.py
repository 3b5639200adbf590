"""Peers are described as data: the type in which they send, and DeepSpeed's configuration."""

from __future__ import annotations

import pytest

from harness.suites.peers import PEERS, configuration, quantising_keys, zero_stage
from harness.suites.trial import Trial


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("ddp", "fp32", "fp32"),
        ("ddp-tuned", "fp32", "fp32"),
        ("ddp-bf16", "bf16", "bf16"),
        ("fsdp2-kept", "fp32", "bf16"),
        ("deepspeed", "fp32", "bf16"),
    ],
)
def test_what_travels(name: str, fp32: str, bf16: str) -> None:
    """DDP sends fp32 gradients unless its hook compresses them; other peers send in the type in which they compute."""
    assert (PEERS[name].wire("fp32"), PEERS[name].wire("bf16")) == (fp32, bf16)


@pytest.mark.parametrize(
    ("zero", "stage", "switches"),
    [
        ({"stage": 3}, 3, []),
        ({}, 0, []),
        ({"stage": 3, "zero_quantized_weights": True}, 3, ["zero_quantized_weights"]),
        ({"stage": 2, "zero_quantized_gradients": False}, 2, []),
    ],
)
def test_what_deepspeed_is_asked(zero: dict[str, object], stage: int, switches: list[str]) -> None:
    """Stage and quantising keys are read from the configuration."""
    table = {"zero_optimization": zero}
    assert (zero_stage(table), quantising_keys(table)) == (stage, switches)
    assert zero_stage(Trial(strategy="deepspeed").peer_configuration()) == 3


def test_deepspeed_is_as_shipped_but_for_its_copy() -> None:
    """Without a configuration DeepSpeed gets ZeRO-3 and nothing else; with hpZ, also the group of each node."""
    plain, hpz = PEERS["deepspeed"], PEERS["deepspeed-hpz"]
    assert configuration(plain, 4) == {"zero_optimization": {"stage": 3}}
    assert configuration(hpz, 4) == {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    table = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "wall_clock_breakdown": True}
    assert configuration(plain, 4, table) == table
    with_copy = {"stage": 3, "overlap_comm": False, "zero_hpz_partition_size": 2}
    assert configuration(hpz, 2, table) == table | {"zero_optimization": with_copy}
