"""Sets up torch's own engines, DDP and FSDP2, as peers: engines with which our engine is compared.

:mod:`harness.suites.peers` describes the peers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from harness.suites.peers import AHEAD, BUCKET_MB, Peer
from harness.suites.trial import PeerSettings
from harness.workloads.models import under_autocast
from impl.zero import find_blocks


def wrap(
    peer: Peer,
    model: nn.Module,
    device: torch.device,
    settings: PeerSettings | None = None,
    ranks_per_node: int = 1,
) -> nn.Module:
    """Wrap ``model`` in DDP or FSDP2, or return it unwrapped for a single process.  All ranks must call this.

    The model is changed in place.

    Args:
        peer: The library (DDP or FSDP2) or a single process, and the options of the library.
        model: The model.
        device: The device that the model is on.
        settings: Data types, the ranks over which FSDP2 shards, and the size of DDP's buckets; None for the defaults.
        ranks_per_node: Number of ranks of each node.  With ``settings.group = "node"``, FSDP2 shards weights, gradients
            and optimizer states over the ranks of a node, and replicates them between nodes.
    """
    settings = settings or PeerSettings()
    if peer.family == "fsdp2":
        return _in_fsdp2(peer, model, device, settings, ranks_per_node)
    if settings.compute == "bf16":
        under_autocast(model, device)
    if peer.family == "single":
        return model
    devices = [device.index] if device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=peer.tuned, static_graph=peer.tuned,
        # None is DDP's default, which also makes the first bucket small; the same number in MB would not.
        bucket_cap_mb=None if settings.bucket_mb == BUCKET_MB else settings.bucket_mb,
    )  # fmt: skip
    if peer.compressed:
        ddp.register_comm_hook(None, _compress)
    return ddp


def algorithms(peer: Peer, settings: PeerSettings) -> dict[str, Any]:
    """Describe the collectives of DDP, FSDP2 or a single process, for the trial's record.

    Returns:
        A dict with a text for the collective that gathers weights (``gather``) and a text for the collective that
        reduces gradients (``reduce``), such as ``"all_gather of gloo, bf16"``.  A text is ``"none"`` if there is no
        such collective.
    """
    backend, wire = dist.get_backend(), peer.wire(settings.compute, settings.reduce_dtype)
    if peer.family == "single":
        return {"gather": "none", "reduce": "none"}
    if peer.family == "ddp":
        return {"gather": "none", "reduce": f"all_reduce of {backend}, {wire}, by bucket"}
    reduce = f"reduce_scatter of {backend}, {wire}"
    if settings.group == "node":
        reduce += " inside nodes, all_reduce between them"
    return {"gather": f"all_gather of {backend}, {wire}", "reduce": reduce}


def _compress(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of DDP in bf16, by calling torch's ``bf16_compress_hook``.

    Without NCCL, DDP refuses ``bf16_compress_hook``, although gloo can sum bf16.  DDP recognises the hook by its name,
    so this function, which only calls the hook, is accepted.
    """
    return default_hooks.bf16_compress_hook(group, bucket)  # type: ignore[arg-type]


# DDP compares a hook's annotations with types, but the annotations in this module are strings.
_compress.__annotations__ |= default_hooks.bf16_compress_hook.__annotations__


def _in_fsdp2(
    peer: Peer, model: nn.Module, device: torch.device, settings: PeerSettings, ranks_per_node: int
) -> nn.Module:
    """Make each block of ``model`` a unit of FSDP2; the remaining parameters belong to the root unit.

    A block is a repeated part of the model.  A unit of FSDP2 is a module whose parameters are gathered together.  The
    arguments are those of :func:`wrap`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # torch 2.13 warns about the old names of two collectives, and its own FSDP2 still uses these names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    types = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.compute == "bf16" else None,
        reduce_dtype=torch.float32 if settings.reduce_dtype == "fp32" else None,  # None: the type of weights
    )
    if settings.group == "node":
        sizes = (dist.get_world_size() // ranks_per_node, ranks_per_node)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": types}
    blocks = find_blocks(model)
    # None is torch's default: blocks are resharded after their forward pass, and the root is not.
    released = False if peer.kept else None
    for block in blocks:
        fully_shard(block, reshard_after_forward=released, **options)
    fully_shard(model, reshard_after_forward=released, **options)
    if peer.prefetch:
        _prefetch(model, blocks)
    return model


def _prefetch(model: Any, blocks: list[Any]) -> None:
    """Make every unit of FSDP2 start the all-gathers of the next two units, in forward and in backward passes.

    The units are ``model``, which is the root unit, and its repeated parts ``blocks``.
    """
    model._set_unshard_async_op(async_op=True)  # noqa: SLF001  # torch documents it under this private name
    forward, backward = [model, *blocks], [model, *reversed(blocks)]
    for place in range(len(forward)):
        ahead = slice(place + 1, place + 1 + AHEAD)
        forward[place].set_modules_to_forward_prefetch(forward[ahead])
        backward[place].set_modules_to_backward_prefetch(backward[ahead])
