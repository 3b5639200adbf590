"""DeepSpeed's ZeRO-3 on a CPU as a peer: an optional extra, imported only when used.

Unquantised, since its quantising kernels do not exist for CPUs.  By default it clips gradients at 1.0, and
keeps weights gathered that are used again within 1e9 elements, which is every model here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

KEPT_ELEMENTS: Final = 1_000_000_000  # its default: what is used again within so many stays gathered
_INFERENCE_OP: Final = "deepspeed_shm_comm"


def why_missing() -> str | None:
    """How to install DeepSpeed if it is missing; None if it is installed."""
    if importlib.util.find_spec("deepspeed") is not None:
        return None
    return "deepspeed is not installed: pip install -c constraints.txt -e '.[deepspeed]'"


def version() -> str:
    """Version of the installed DeepSpeed."""
    return importlib.metadata.version("deepspeed")


def config(*, sequences: int, kept: bool) -> dict[str, Any]:
    """DeepSpeed configuration: ZeRO-3 in fp32, everything sharded, no clipping.

    Args:
        sequences: of one rank in one step.
        kept: whether weights stay gathered between forward and backward, as by its default; else they are
            released after use.
    """
    return {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": KEPT_ELEMENTS if kept else 0,
        },
    }


def engine(
    model: nn.Module,
    build_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    sequences: int,
    kept: bool,
) -> Any:
    """Shard ``model`` in place over all ranks of the default group, which must all call it.

    Args:
        model: unsharded, the same on every rank.
        build_optimizer: of parameters.
        sequences: see :func:`config`.
        kept: likewise.

    Returns:
        DeepSpeed's engine: call it, then its ``backward(loss)`` and its ``step()``.
    """
    # It asks the environment alone for the device, and for the rank of this process on its node.
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    library: Any = importlib.import_module("deepspeed")
    # Its all-reduce for inference is compiled by every first start and never called in training; a
    # compilation that was killed leaves a lock behind that later ones wait for without end.
    library.ops.__compatible_ops__[_INFERENCE_OP] = False
    library.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    made, *_ = library.initialize(
        model=model,
        optimizer=build_optimizer(model.parameters()),
        config=config(sequences=sequences, kept=kept),
        dist_init_required=False,
    )
    return made


def step(made: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """One training step; returns the () loss before it."""
    loss: Tensor = made(tokens, targets)
    made.backward(loss)
    made.step()
    return loss.detach()
