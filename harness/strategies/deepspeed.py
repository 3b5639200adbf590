"""Sets up DeepSpeed as a peer.  DeepSpeed is an optional dependency, imported only on ranks that train with it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from harness.errors import Refusal
from harness.suites.peers import DEEPSPEED, family_of, quantising_keys
from impl.errors import raising

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.suites.trial import Trial

MISSING: Final = "DeepSpeed is not installed: pip install -c constraints.txt -e '.[deepspeed]'"


def why_missing() -> str | None:
    """Return a text that says how to install DeepSpeed.  Returns None if DeepSpeed is installed."""
    return None if importlib.util.find_spec(DEEPSPEED) is not None else MISSING


def version() -> str:
    """Return the version of the installed DeepSpeed."""
    return importlib.metadata.version(DEEPSPEED)


def why_not(trial: Trial) -> str | None:
    """Return why DeepSpeed cannot run a trial on this machine.

    Returns None if DeepSpeed can run the trial, or if the trial's strategy does not use DeepSpeed.
    """
    if family_of(trial.strategy) != DEEPSPEED:
        return None
    if (reason := why_missing()) is not None:
        return reason
    switches = quantising_keys(trial.peer_configuration())
    if switches and trial.cluster.device == "cpu":
        return (
            f"{', '.join(switches)}: DeepSpeed {version()} can quantise only on GPUs; set cluster.device = 'cuda', "
            "or remove these keys"
        )
    return None


def configuration(trial: Trial) -> dict[str, Any]:
    """Return the configuration with which DeepSpeed trains a trial.

    It consists of the trial's DeepSpeed configuration (:meth:`~harness.suites.trial.Trial.peer_configuration`), and of
    keys for the trial's batch size, accumulation, gradient clipping and type (fp32 or bf16).
    """
    table = trial.peer_configuration()
    return {key: value for key, value in table.items() if key not in ("fp16", "train_batch_size")} | {
        "train_micro_batch_size_per_gpu": trial.tokens_per_rank // trial.sequence,
        "gradient_accumulation_steps": trial.accumulation,
        "gradient_clipping": trial.clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {**table.get("bf16", {}), "enabled": trial.peer.compute == "bf16"},
    }


def initialise(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """Make DeepSpeed's engine for ``model`` with ``deepspeed.initialize()``, and return it.  All ranks must call this.

    The model is changed in place.  With bf16, the model's floating-point inputs are cast to bf16.

    Raises:
        Refusal: if DeepSpeed raises an error; the message contains DeepSpeed's error.
    """
    import torch
    import torch.distributed as dist

    # DeepSpeed reads the device, and the rank of this process on its node, from the environment only.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index if device.type == "cuda" else dist.get_rank())
    library: Any = importlib.import_module(DEEPSPEED)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # otherwise it logs every step of its set-up
    # Do not let DeepSpeed compile its all-reduce for inference at its first start.  Training never calls it, and a
    # compilation that was killed leaves a lock behind, on which later starts wait for ever.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if (config.get("bf16") or {}).get("enabled"):
        from impl.pytree import cast_tensors  # it casts images and other floats; tokens stay integers

        model.register_forward_pre_hook(lambda _, inputs: cast_tensors(inputs, torch.bfloat16))
    # DeepSpeed checks its configuration with assertions and exceptions of many kinds.
    with raising(Refusal, f"DeepSpeed {version()} refuses its configuration:"):
        library.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        engine, *_ = library.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    return engine
