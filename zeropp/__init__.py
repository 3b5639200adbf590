"""Shards any torch module with ZeRO-3 or ZeRO++, offers the codecs and collectives, and loads records of measurements.

This is the module that users import::

    import zeropp

    zero = zeropp.shard(model, policy=zeropp.preset("zeropp"))

The code is in :mod:`impl`, :mod:`harness` and :mod:`report`.  The first use of a name, such as ``zeropp.shard``,
imports the module that defines the name.  Therefore ``import zeropp`` is fast, and training imports neither pandas nor
the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from impl import __version__ as __version__

if TYPE_CHECKING:
    from harness.audit.inside import audit as audit
    from harness.strategies import Strategy as Strategy
    from impl import zero as zero
    from impl.adapters.inside_fsdp2 import fsdp2 as fsdp2
    from impl.checkpoint import save_load as _save_load
    from impl.checkpoint.full_state import consolidated as consolidated
    from impl.checkpoint.full_state import export as export
    from impl.checkpoint.save_load import CheckpointError as CheckpointError
    from impl.codecs import reference as reference
    from impl.codecs.codec import CodecError as CodecError
    from impl.codecs.codec import parse as _parse
    from impl.codecs.codec import user_codec as user_codec
    from impl.codecs.rounding_noise import Key as Key
    from impl.comm.mesh import Mesh as Mesh
    from impl.comm.mesh import make_mesh as _make_mesh
    from impl.comm.watchdog import WireError as WireError
    from impl.comm.wire import Wire as Wire
    from impl.deepspeed.config_to_policy import recipe as recipe
    from impl.engine.muon import Muon as Muon
    from impl.engine.muon import hidden_matrices as hidden_matrices
    from impl.parameters.access import Gradient as Gradient
    from impl.parameters.access import OptimizerState as OptimizerState
    from impl.parameters.access import Weights as Weights
    from impl.parameters.external import register_external_parameter as register_external_parameter
    from impl.parameters.external import register_forward_method as register_forward_method
    from impl.policy.own_method import MethodError as MethodError
    from impl.policy.own_method import method as method
    from impl.policy.policy import BitBudget as BitBudget
    from impl.policy.policy import Feedback as Feedback
    from impl.policy.policy import LossScale as LossScale
    from impl.policy.policy import MemoryLimits as MemoryLimits
    from impl.policy.policy import Offload as Offload
    from impl.policy.policy import Policy as Policy
    from impl.policy.policy import PolicyError as PolicyError
    from impl.policy.presets import preset as preset
    from impl.policy.spans import Span as Span
    from impl.policy.topology import Topology as Topology
    from impl.quantized_collectives import quantized_all_gather as quantized_all_gather
    from impl.quantized_collectives import quantized_reduce_scatter as quantized_reduce_scatter
    from impl.simulate import simulate as simulate
    from impl.transport.group import MeshError as MeshError
    from impl.unit.own_gather import GatherMethod as GatherMethod
    from impl.unit.own_reduction import ReductionMethod as ReductionMethod
    from impl.zero import GatheredParameters as GatheredParameters
    from impl.zero import Init as Init
    from impl.zero import Zero as Zero
    from impl.zero import ZeroError as ZeroError
    from impl.zero import elementwise as elementwise
    from impl.zero import full_state_dict as full_state_dict
    from impl.zero import load_full_state_dict as load_full_state_dict
    from impl.zero import shard as shard
    from report import load as load

    codec, mesh = _parse, _make_mesh
    latest_checkpoint, load_checkpoint, save_checkpoint = _save_load.latest, _save_load.load, _save_load.save

_HOME: Final = {  # for each name, where it is defined: "module", or "module:name"
    # training
    "shard": "impl.zero:shard",
    "Zero": "impl.zero:Zero",
    "Muon": "impl.engine.muon:Muon",
    "hidden_matrices": "impl.engine.muon:hidden_matrices",
    "elementwise": "impl.zero:elementwise",
    "zero": "impl.zero",  # for programs that write deepspeed.zero.Init, after `import zeropp as deepspeed`
    "fsdp2": "impl.adapters.inside_fsdp2:fsdp2",
    "simulate": "impl.simulate:simulate",
    # policies
    "Policy": "impl.policy.policy:Policy",
    "Span": "impl.policy.spans:Span",
    "preset": "impl.policy.presets:preset",
    "MemoryLimits": "impl.policy.policy:MemoryLimits",
    "Offload": "impl.policy.policy:Offload",
    "LossScale": "impl.policy.policy:LossScale",
    "Feedback": "impl.policy.policy:Feedback",
    "BitBudget": "impl.policy.policy:BitBudget",
    "recipe": "impl.deepspeed.config_to_policy:recipe",
    # ranks
    "mesh": "impl.comm.mesh:make_mesh",
    "Mesh": "impl.comm.mesh:Mesh",
    "Topology": "impl.policy.topology:Topology",
    "Wire": "impl.comm.wire:Wire",
    # parameters of a sharded model
    "Init": "impl.zero:Init",
    "GatheredParameters": "impl.zero:GatheredParameters",
    "Weights": "impl.parameters.access:Weights",
    "Gradient": "impl.parameters.access:Gradient",
    "OptimizerState": "impl.parameters.access:OptimizerState",
    "register_external_parameter": "impl.parameters.external:register_external_parameter",
    "register_forward_method": "impl.parameters.external:register_forward_method",
    # state
    "full_state_dict": "impl.zero:full_state_dict",
    "load_full_state_dict": "impl.zero:load_full_state_dict",
    "save_checkpoint": "impl.checkpoint.save_load:save",
    "load_checkpoint": "impl.checkpoint.save_load:load",
    "latest_checkpoint": "impl.checkpoint.save_load:latest",
    "consolidated": "impl.checkpoint.full_state:consolidated",
    "export": "impl.checkpoint.full_state:export",
    # codecs and collectives
    "codec": "impl.codecs.codec:parse",
    "user_codec": "impl.codecs.codec:user_codec",
    "reference": "impl.codecs.reference",
    "Key": "impl.codecs.rounding_noise:Key",
    "quantized_all_gather": "impl.quantized_collectives:quantized_all_gather",
    "quantized_reduce_scatter": "impl.quantized_collectives:quantized_reduce_scatter",
    # methods and strategies of a user's own
    "ReductionMethod": "impl.unit.own_reduction:ReductionMethod",
    "GatherMethod": "impl.unit.own_gather:GatherMethod",
    "method": "impl.policy.own_method:method",
    "Strategy": "harness.strategies:Strategy",
    # records, and what a program sends
    "load": "report:load",
    "audit": "harness.audit.inside:audit",
    # errors
    "ZeroError": "impl.zero:ZeroError",
    "PolicyError": "impl.policy.policy:PolicyError",
    "MethodError": "impl.policy.own_method:MethodError",
    "MeshError": "impl.transport.group:MeshError",
    "WireError": "impl.comm.watchdog:WireError",
    "CodecError": "impl.codecs.codec:CodecError",
    "CheckpointError": "impl.checkpoint.save_load:CheckpointError",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name``, and return the object of this name.

    Python calls this function when ``zeropp.name`` is used for the first time.

    Raises:
        AttributeError: If ``name`` is not in ``__all__``.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'zeropp' has no attribute {name!r}")
    home, _, attribute = _HOME[name].partition(":")
    module = importlib.import_module(home)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
