"""Peers are described as data: the type in which they send, and DeepSpeed's configuration."""

from __future__ import annotations

import pytest

from harness.suites.peers import PEERS, configuration, quantising_keys, zero_stage
from harness.suites.trial import PeerSettings, Trial


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


def test_gradients_in_fp32_beside_weights_in_bf16_are_both_named() -> None:
    """FSDP2 that reduces in fp32 sends two types, so that it is compared with nothing that sends bf16 alone."""
    assert PEERS["fsdp2"].wire("bf16", "fp32") == "bf16 and fp32"
    assert PEERS["fsdp2"].wire("fp32", "fp32") == "fp32"


def test_a_library_keeps_only_the_settings_that_it_reads() -> None:
    """Others return to their defaults, so that they do not change a trial's id."""
    settings = PeerSettings(compute="bf16", reduce_dtype="fp32", group="node", bucket_mb=5)
    assert settings.read_by("ddp") == PeerSettings(compute="bf16", bucket_mb=5)
    assert settings.read_by("fsdp2") == PeerSettings(compute="bf16", reduce_dtype="fp32", group="node")
    assert settings.read_by("deepspeed") == PeerSettings(compute="bf16")
    full = PeerSettings(reduce_dtype="fp32").read_by("fsdp2")
    assert full == PeerSettings(), "gradients of weights in fp32 are fp32 in any case"


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
    stage2 = PEERS["deepspeed-stage2-overlap"]
    own = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1_000_000}
    assert configuration(stage2, 4) == {"zero_optimization": own}
    replaced = own | {"reduce_bucket_size": 5}
    assert configuration(stage2, 4, {"zero_optimization": {"reduce_bucket_size": 5}}) == {
        "zero_optimization": replaced
    }
    with_copy = {"stage": 3, "overlap_comm": False, "zero_hpz_partition_size": 2}
    assert configuration(hpz, 2, table) == table | {"zero_optimization": with_copy}
