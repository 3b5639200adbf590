"""DeepSpeed as a peer: an optional dependency, imported only on ranks that train with it."""

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
    """How to install DeepSpeed; None if it is installed."""
    return None if importlib.util.find_spec(DEEPSPEED) is not None else MISSING


def version() -> str:
    """The installed DeepSpeed's version."""
    return importlib.metadata.version(DEEPSPEED)


def why_not(trial: Trial) -> str | None:
    """Why DeepSpeed cannot run a trial here, in one line; None if it can, and for other strategies."""
    if family_of(trial.strategy) != DEEPSPEED:
        return None
    if (reason := why_missing()) is not None:
        return reason
    switches = quantising_keys(trial.peer_configuration())
    if switches and trial.cluster.device == "cpu":
        return f"DeepSpeed {version()} has no quantising kernels for CPUs: {', '.join(switches)} need a GPU"
    return None


def configuration(trial: Trial) -> dict[str, Any]:
    """DeepSpeed's configuration: the trial's, completed by the trial's own fields, clipping included."""
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
    """DeepSpeed's engine of ``model``, changed in place, or a Refusal with its error; all ranks call it."""
    import torch
    import torch.distributed as dist

    # It asks the environment alone for the device, and for the rank of this process on its node.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index if device.type == "cuda" else dist.get_rank())
    library: Any = importlib.import_module(DEEPSPEED)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it logs every step of its own set-up
    # Its all-reduce for inference is compiled by every first start and never called in training; a
    # compilation that was killed leaves a lock behind that later ones wait for without end.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if (config.get("bf16") or {}).get("enabled"):
        from impl.pytree import cast_tensors  # images and the like; tokens stay as they are

        model.register_forward_pre_hook(lambda _, inputs: cast_tensors(inputs, torch.bfloat16))
    # It checks its configuration by assertions and errors of many kinds.
    with raising(Refusal, f"DeepSpeed {version()} refuses its configuration:"):
        library.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        engine, *_ = library.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    return engine
