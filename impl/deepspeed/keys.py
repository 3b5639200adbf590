"""DeepSpeed's configuration, key by key: what each takes, its default there, and what happens to it here.

Pure data.  :mod:`impl.deepspeed.recipe` reads configurations by it and ``docs/guide/deepspeed.md`` is
generated from it.
Keys and defaults are those of DeepSpeed's ``runtime/zero/config.py`` and ``runtime/config.py``, which differ
from its web pages in places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Takes = Literal["switch", "count", "number", "text", "list", "anything"]
Fate = Literal["honoured", "without effect", "renamed", "only the default"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        path: dotted, from the top of the configuration.
        takes: what its value is: a switch is true or false, a count a whole number, also as ``5e8``.
        default: DeepSpeed's, also used here; None where there is none.
        fate: what happens to it; ``only the default`` refuses every other value.
        text: what that means.
        means: of a renamed key, the path of the one that it is read as.
    """

    path: str
    takes: Takes
    default: Any
    fate: Fate
    text: str
    means: str = ""


ZERO: Final = "zero_optimization"
OFFLOAD_PARAM: Final = f"{ZERO}.offload_param"
OFFLOAD_OPTIMIZER: Final = f"{ZERO}.offload_optimizer"
LOCO: Final = f"{ZERO}.zeropp_loco_param"
NO_LIMIT: Final = 2**63 - 1  # Python's sys.maxsize on 64 bits, DeepSpeed's default of a limit that is none


def _honoured(path: str, takes: Takes, default: Any, text: str) -> Key:
    return Key(path, takes, default, "honoured", text)


def _idle(path: str, takes: Takes, default: Any, text: str) -> Key:
    return Key(path, takes, default, "without effect", text)


def _only(path: str, takes: Takes, default: Any, text: str) -> Key:
    return Key(path, takes, default, "only the default", text)


def _renamed(path: str, takes: Takes, means: str, text: str) -> Key:
    return Key(path, takes, None, "renamed", text, means)


_BATCH = (
    _honoured("train_batch_size", "count", None, "micro-batch x accumulation x ranks; must agree with them"),
    _honoured("train_micro_batch_size_per_gpu", "count", None, "sequences of one rank in a micro-batch"),
    _honoured("gradient_accumulation_steps", "count", None, "micro-batches in a step"),
    _honoured(
        "gradient_clipping", "number", 0.0, "largest global norm of the mean gradient; 0 does not clip"
    ),
)

_OPTIMIZER = (
    _honoured("optimizer.type", "text", None, "Adam or AdamW; any other is refused"),
    _honoured("optimizer.params.lr", "number", 1e-3, "learning rate"),
    _honoured("optimizer.params.betas", "list", (0.9, 0.999), "decay of the two moments"),
    _honoured("optimizer.params.eps", "number", 1e-8, "added to the root of the second moment"),
    _honoured("optimizer.params.weight_decay", "number", 0.0, "weight decay"),
    _honoured("optimizer.params.adam_w_mode", "switch", True, "Adam with decoupled decay is AdamW"),
    _only("optimizer.params.bias_correction", "switch", True, "torch's optimizers always correct"),
    _only("optimizer.params.amsgrad", "switch", False, "no policy has the third state"),
    _idle(
        "optimizer.params.torch_adam",
        "switch",
        False,
        "optimizers are always torch's; true makes AdamW's weight_decay torch's 0.01 where it is not given",
    ),
    _idle("optimizer.params.fused", "switch", None, "the optimizer is made by the caller"),
    _only("optimizer.legacy_fusion", "switch", False, "masters are stepped as torch does"),
    _only(
        "scheduler",
        "anything",
        None,
        "a schedule of learning rates is the caller's: torch.optim.lr_scheduler",
    ),
    _idle("zero_allow_untested_optimizer", "switch", False, "any elementwise optimizer may be used"),
    _idle("zero_force_ds_cpu_optimizer", "switch", True, "the optimizer is made by the caller"),
)

_TYPES = (
    _honoured("fp16.enabled", "switch", False, "weights and gradients in fp16, with a loss scale"),
    _honoured("fp16.loss_scale", "number", 0, "a fixed loss scale; 0 for a dynamic one"),
    _honoured("fp16.initial_scale_power", "count", 16, "the first dynamic scale is 2 to this power"),
    _honoured(
        "fp16.loss_scale_window", "count", 1000, "steps without overflow after which the scale doubles"
    ),
    _honoured("fp16.min_loss_scale", "number", 1, "the scale does not fall below it"),
    _idle(
        "fp16.hysteresis", "count", 2, "the scale halves at the first overflow, not at the one of this number"
    ),
    _idle("fp16.consecutive_hysteresis", "switch", False, "there is no hysteresis"),
    _idle(
        "fp16.auto_cast", "switch", False, "floating-point inputs are cast to the type that is computed in"
    ),
    _only("fp16.fp16_master_weights_and_grads", "switch", False, "masters are held in fp32"),
    _honoured("bf16.enabled", "switch", False, "weights and gradients in bf16"),
    _idle(
        "bf16.immediate_grad_update", "switch", True, "gradients go to their fp32 means when they are reduced"
    ),
    _idle("bf16.check_grad_overflow", "switch", False, "without a loss scale no step is skipped"),
    _only("bf16.bf16_master_weights_and_grads", "switch", False, "masters are held in fp32"),
    _only("bf16.bf16_optimizer_states", "switch", False, "states have the masters' type, fp32"),
    _renamed("bfloat16.enabled", "switch", "bf16.enabled", "older spelling"),
    _only("amp.enabled", "switch", False, "Apex: use fp16 or bf16"),
    _idle("amp.opt_level", "text", None, "of Apex"),
    _only("torch_autocast.enabled", "switch", False, "autocast: use fp16 or bf16"),
    _only("data_types.grad_accum_dtype", "text", "fp32", "mean gradients are accumulated in fp32"),
    _honoured(
        "communication_data_type",
        "text",
        None,
        "fp32, fp16 or bf16 (also bfp16): type of gradients on the wire; by default the type computed in",
    ),
    _idle("seq_parallel_communication_data_type", "text", "fp32", "there is no sequence parallelism"),
    _idle("prescale_gradients", "switch", False, "sums are of fp32 and divided last: the result is the mean"),
    _honoured(
        "gradient_predivide_factor",
        "number",
        1.0,
        "changes nothing, the result is the mean; refused beside zero_quantized_gradients unless 1",
    ),
    _only("sparse_gradients", "switch", False, "gradients are dense"),
    _idle("disable_allgather", "switch", False, "weights are gathered"),
    _idle("fp32_allreduce", "switch", False, "sums are of fp32"),
)

_ZERO = (
    _honoured(f"{ZERO}.stage", "count", 0, "0 to 3: what is sharded"),
    _honoured(f"{ZERO}.reduce_bucket_size", "count", 500_000_000, "elements of gradients under way at once"),
    _honoured(f"{ZERO}.reduce_scatter", "switch", True, "false would send an all-reduce and is refused"),
    _idle(f"{ZERO}.contiguous_gradients", "switch", True, "a unit's gradients always lie in one buffer"),
    _idle(f"{ZERO}.overlap_comm", "switch", None, "reductions are always under way during the backward pass"),
    _idle(f"{ZERO}.use_multi_rank_bucket_allreduce", "switch", True, "nothing is all-reduced"),
    _idle(
        f"{ZERO}.allgather_partitions", "switch", True, "weights are always gathered, never broadcast in turn"
    ),
    _idle(f"{ZERO}.allgather_bucket_size", "count", 500_000_000, "a unit's weights travel in one message"),
    _idle(f"{ZERO}.load_from_fp32_weights", "switch", True, "checkpoints hold the fp32 masters"),
    _idle(f"{ZERO}.elastic_checkpoint", "switch", False, "any world loads any checkpoint"),
    _idle(f"{ZERO}.sub_group_size", "count", 1_000_000_000, "the optimizer is torch's and steps all masters"),
    _idle(f"{ZERO}.ignore_unused_parameters", "switch", True, "what no loss reached has a gradient of zero"),
    _idle(f"{ZERO}.round_robin_gradients", "switch", False, "a unit's gradient is shared by all ranks"),
    _only(f"{ZERO}.legacy_stage1", "switch", False, "there is one stage 1"),
    _honoured(
        f"{ZERO}.stage3_prefetch_bucket_size", "count", 50_000_000, "elements gathered ahead of their use"
    ),
    _honoured(
        f"{ZERO}.stage3_param_persistence_threshold",
        "count",
        100_000,
        "parameters of at most as many elements stay gathered (here: fewer than one more)",
    ),
    _honoured(
        f"{ZERO}.stage3_model_persistence_threshold", "count", NO_LIMIT, "elements that stay gathered in all"
    ),
    _honoured(
        f"{ZERO}.stage3_max_live_parameters",
        "count",
        1_000_000_000,
        "elements of a unit at most, larger ones are cut; nothing is gathered ahead or kept beyond it; a "
        "unit in use, what lies outside all blocks and what persists may together be more",
    ),
    _honoured(
        f"{ZERO}.stage3_max_reuse_distance",
        "count",
        1_000_000_000,
        "blocks stay gathered until backward if fewer elements run in between",
    ),
    _honoured(f"{ZERO}.stage3_allgather_sequential", "switch", False, "nothing is gathered ahead"),
    _idle(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "switch",
        False,
        "saving is asked for where it is done",
    ),
    _renamed(
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
        "switch",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "older spelling",
    ),
    _renamed(
        f"{ZERO}.stage3_param_persitance_threshold",
        "count",
        f"{ZERO}.stage3_param_persistence_threshold",
        "as the ZeRO tutorial spells it",
    ),
    _idle(f"{ZERO}.stage3_module_granularity_threshold", "count", 0, "units are the blocks of the model"),
    _only(f"{ZERO}.stage3_use_all_reduce_for_fetch_params", "switch", False, "weights are gathered"),
    _honoured(
        f"{ZERO}.zero_hpz_partition_size",
        "count",
        1,
        "hpZ: ranks that share one secondary copy, at most all; 0 and 1 are none",
    ),
    _honoured(
        f"{ZERO}.zero_quantized_weights",
        "switch",
        False,
        "qwZ: int8 in blocks of 2048 (there: up to 8000 elements, and a block may straddle parameters)",
    ),
    _honoured(
        f"{ZERO}.zero_quantized_nontrainable_weights",
        "switch",
        False,
        "weights that are not trained are held and sent as int8 in blocks of 2048",
    ),
    _honoured(
        f"{ZERO}.zero_quantized_gradients",
        "switch",
        False,
        "qgZ: int4 in blocks of 256, two hops, also on one node (there: not quantised on one node)",
    ),
    _honoured(
        f"{LOCO}.err_beta", "number", 0.8, "LoCo: share of the old error that stays; kept in fp32, not INT8"
    ),
    _honoured(f"{LOCO}.reset_T", "count", 1024, "LoCo: steps after which the error is forgotten"),
    _honoured(
        f"{ZERO}.mics_shard_size", "number", -1, "MiCS: ranks that share one copy of all states; -1: all"
    ),
    _idle(f"{ZERO}.mics_hierarchical_params_gather", "switch", False, "weights are always gathered by hops"),
    _idle(f"{ZERO}.memory_efficient_linear", "switch", True, "saved weights are always let go"),
    _idle(f"{ZERO}.pipeline_loading_checkpoint", "switch", False, "a checkpoint is read by ranges"),
    _idle(f"{ZERO}.override_module_apply", "switch", True, "no class of torch is changed"),
    _idle(f"{ZERO}.log_trace_cache_warnings", "switch", False, "an order that changed is not an event"),
    _idle(f"{ZERO}.enable_sanity_checks", "switch", False, "the order of messages is always checked"),
    _idle(
        f"{ZERO}.save_muon_momentum_buffer_in_memory", "switch", False, "Muon is not elementwise and refused"
    ),
    _only(f"{ZERO}.leaf_module", "anything", None, "units are named in code: shard(blocks=...)"),
    _only(f"{ZERO}.zenflow", "anything", None, "no such offload"),
)

_OFFLOAD = (
    _honoured(
        f"{OFFLOAD_PARAM}.device", "text", "none", "cpu: frames of weights in host memory; nvme is refused"
    ),
    _only(f"{OFFLOAD_PARAM}.nvme_path", "text", None, "nothing is offloaded to NVMe"),
    _idle(f"{OFFLOAD_PARAM}.buffer_count", "count", 5, "of NVMe"),
    _idle(f"{OFFLOAD_PARAM}.buffer_size", "count", 100_000_000, "of NVMe"),
    _idle(f"{OFFLOAD_PARAM}.max_in_cpu", "count", 1_000_000_000, "of NVMe"),
    _idle(
        f"{OFFLOAD_PARAM}.pin_memory", "switch", True, "pinned on CUDA, and not where the device is the host"
    ),
    _honoured(
        f"{OFFLOAD_OPTIMIZER}.device",
        "text",
        "none",
        "cpu: masters and states in host memory; nvme is refused",
    ),
    _honoured(
        f"{OFFLOAD_OPTIMIZER}.ratio", "number", 1.0, "share that is offloaded; below 1 of stage 3 only"
    ),
    _only(f"{OFFLOAD_OPTIMIZER}.nvme_path", "text", None, "nothing is offloaded to NVMe"),
    _idle(f"{OFFLOAD_OPTIMIZER}.buffer_count", "count", 4, "of NVMe"),
    _idle(
        f"{OFFLOAD_OPTIMIZER}.pin_memory",
        "switch",
        True,
        "pinned on CUDA, and not where the device is the host",
    ),
    _idle(f"{OFFLOAD_OPTIMIZER}.pipeline_read", "switch", False, "of NVMe"),
    _idle(f"{OFFLOAD_OPTIMIZER}.pipeline_write", "switch", False, "of NVMe"),
    _idle(f"{OFFLOAD_OPTIMIZER}.fast_init", "switch", False, "of NVMe"),
    _only(f"{OFFLOAD_OPTIMIZER}.super_offload", "switch", False, "no such offload"),
    _idle(f"{OFFLOAD_OPTIMIZER}.cpuadam_cores_perc", "number", 0.8, "of another offload"),
    _renamed(f"{ZERO}.cpu_offload", "switch", f"{OFFLOAD_OPTIMIZER}.device", "deprecated; true is cpu"),
    _renamed(f"{ZERO}.cpu_offload_param", "switch", f"{OFFLOAD_PARAM}.device", "deprecated; true is cpu"),
    _renamed(
        f"{ZERO}.cpu_offload_params",
        "switch",
        f"{OFFLOAD_PARAM}.device",
        "as the ZeRO tutorial spells it; true is cpu",
    ),
    _idle(f"{ZERO}.cpu_offload_use_pin_memory", "switch", None, "deprecated; pinned on CUDA"),
)

_RECOMPUTED: Final = "activation_checkpointing"
_AROUND = (
    _idle(f"{_RECOMPUTED}.partition_activations", "switch", False, "there is no model parallelism"),
    _only(f"{_RECOMPUTED}.cpu_checkpointing", "switch", False, "activations stay on the device"),
    _idle(f"{_RECOMPUTED}.contiguous_memory_optimization", "switch", False, "torch's allocator places them"),
    _idle(f"{_RECOMPUTED}.number_checkpoints", "count", None, "what is recomputed is the model's choice"),
    _idle(f"{_RECOMPUTED}.synchronize_checkpoint_boundary", "switch", False, "nothing is synchronised there"),
    _idle(f"{_RECOMPUTED}.profile", "switch", False, "times are in the records"),
    _idle("steps_per_print", "count", 10, "every step is logged"),
    _idle("wall_clock_breakdown", "switch", False, "times are always split"),
    _idle("memory_breakdown", "switch", False, "memory is always split"),
    _idle("dump_state", "switch", False, "the recipe is printed as findings"),
    _idle("dataloader_drop_last", "switch", False, "data are the caller's"),
    *(
        _idle(name, "anything", None, "this project's own records take its place")
        for name in (
            "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "flops_profiler",
            "comms_logger", "comms_config",
        )
    ),
    _idle("aio", "anything", None, "of NVMe"),
    _idle("checkpoint", "anything", None, "checkpoints are asked for where they are made"),
    _idle("nebula", "anything", None, "checkpoints are asked for where they are made"),
    _idle("compile", "anything", None, "compiling is the caller's"),
    _idle("hybrid_engine", "anything", None, "a sharded model generates as it is"),
    _idle("autotuning", "anything", None, "suites take its place"),
    *(
        _only(name, "anything", None, "no such technique here")
        for name in (
            "elasticity", "compression_training", "data_efficiency", "curriculum_learning",
            "progressive_layer_drop", "eigenvalue", "quantize_training", "sparse_attention", "pipeline",
            "tensor_parallel", "sequence_parallel_size",
        )
    ),
)  # fmt: skip

SWITCHED: Final = frozenset(
    {
        "elasticity", "compression_training", "data_efficiency", "curriculum_learning",
        "progressive_layer_drop", "eigenvalue", "quantize_training",
    }
)  # fmt: skip
"""Tables that are no sections here, and that ``"enabled": false`` switches off there."""

KEYS: Final[dict[str, Key]] = {
    key.path: key for key in (*_BATCH, *_OPTIMIZER, *_TYPES, *_ZERO, *_OFFLOAD, *_AROUND)
}
"""Every key by its path."""

SECTIONS: Final = frozenset(
    path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
)
"""Paths of the tables that hold keys."""
