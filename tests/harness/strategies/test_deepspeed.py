"""What DeepSpeed cannot do here becomes a typed record with the reason, not a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cluster.rank_processes import LaunchError
from harness.records.trial_record import read
from harness.runs.feasibility import Host, forecast
from harness.runs.sweep import SweepOutcome
from harness.strategies import deepspeed
from harness.suites.trial import Trial
from tests.harness.runs.test_rank_trial import INSTALLED, outcomes
from tests.harness.runs.test_rank_trial import trial as gpt_trial
from tests.harness.runs.test_sweep import sweep, trial

HOST = Host(memory=1 << 36, gpus=(), namespaces=lambda: None)


def config(**zero: object) -> str:
    return json.dumps({"zero_optimization": {"stage": 3, **zero}})


def refusal(refused: Trial, folder: Path) -> str:
    """The reason on record of a trial that is refused beside one that runs."""
    beside = trial("exact")
    outcome, shown = sweep([refused, beside], folder)
    assert outcome == SweepOutcome(ok=2, failed=0, skipped=0), shown
    record = read(folder / f"{refused.id}.json")
    assert record.failure is not None
    assert (record.failure.kind, record.failure.by, record.failure.log) == ("refused", "deepspeed", None)
    assert "\n" not in record.failure.message
    assert not record.settled, "it is asked again the next time: it may be installed by then"
    assert read(folder / f"{beside.id}.json").failure is None
    return record.failure.message


def test_a_deepspeed_that_is_not_here_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DeepSpeed its trial is planned but not run, and the record tells how to install it; the others run."""
    monkeypatch.setattr(deepspeed, "why_missing", lambda: deepspeed.MISSING)
    peer = trial("deepspeed")
    assert "pip install" in refusal(peer, tmp_path)
    (foreseen,) = forecast([peer], HOST)
    assert foreseen.failure is not None
    assert foreseen.failure.message == deepspeed.MISSING
    assert foreseen.problems == ()


@INSTALLED
@pytest.mark.parametrize("switch", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantisers_without_a_gpu_are_on_record(tmp_path: Path, switch: str) -> None:
    """On CPUs, DeepSpeed's qwZ and qgZ are refused by their keys, before anything starts."""
    peer = trial("deepspeed", deepspeed_config=config(**{switch: True}))
    message = refusal(peer, tmp_path)
    assert switch in message
    assert deepspeed.version() in message
    (foreseen,) = forecast([peer], HOST)
    assert foreseen.failure is not None
    assert foreseen.failure.message == message
    gpu = peer.model_copy(update={"cluster": peer.cluster.model_copy(update={"device": "cuda"})})
    assert deepspeed.why_not(gpu) is None, "on a GPU they are left to DeepSpeed"


@INSTALLED
@pytest.mark.timeout(180)
def test_what_deepspeed_refuses_by_itself_is_a_refusal_in_its_words(tmp_path: Path) -> None:
    """A configuration that DeepSpeed refuses is recorded as refused, in one line with DeepSpeed's message and
    version.
    """
    peer = gpt_trial("stdlib", "deepspeed", deepspeed_config=config(zero_hpz_partition_sise=2))
    with pytest.raises(LaunchError) as caught:
        outcomes(peer, tmp_path / "log")
    assert caught.value.kind == "refused"
    message = str(caught.value)
    assert f"DeepSpeed {deepspeed.version()} refuses its configuration: " in message
    assert "\n" not in message


def test_the_trial_says_batches_clipping_and_type() -> None:
    """The configuration given to DeepSpeed has the trial's batch, clipping and type; DeepSpeed's default would clip
    at 1.0.
    """
    peer = gpt_trial("stdlib", "deepspeed", accumulation=3, clip=None, peer={"compute": "bf16"})
    table = deepspeed.configuration(peer)
    assert table["gradient_clipping"] == 0.0
    assert table["gradient_accumulation_steps"] == 3
    assert table["train_micro_batch_size_per_gpu"] == 2
    assert table["bf16"] == {"enabled": True}
    assert table["zero_optimization"] == {"stage": 3}, "overlap and persistence are as it ships them"
