"""DeepSpeed's configuration, key by key: what each takes, its default there, and what happens to it here.

Pure data.  :mod:`impl.deepspeed.recipe` reads configurations by it and ``docs/guide/deepspeed.md`` is
generated from it.
Keys and defaults are those of DeepSpeed's ``runtime/zero/config.py`` and ``runtime/config.py``, which differ
from its web pages in places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

Takes = Literal["switch", "count", "number", "text", "list", "anything"]
Fate = Literal["honoured", "without effect", "renamed", "only the default"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        fate: what happens to it; ``only the default`` refuses every other value.
        path: dotted, from the top of the configuration.
        default: DeepSpeed's, also used here; None where there is none.
        text: what its fate means.
        takes: a switch is true or false, a count a whole number, also as ``5e8``.
        means: of a renamed key, the path of the one that it is read as.
    """

    fate: Fate
    path: str
    default: Any
    text: str
    takes: Takes
    means: str = ""


ZERO: Final = "zero_optimization"
OFFLOAD_PARAM: Final = f"{ZERO}.offload_param"
OFFLOAD_OPTIMIZER: Final = f"{ZERO}.offload_optimizer"
LOCO: Final = f"{ZERO}.zeropp_loco_param"
NO_LIMIT: Final = 2**63 - 1  # Python's sys.maxsize on 64 bits, DeepSpeed's default of a limit that is none

SWITCHED: Final = (
    "elasticity", "compression_training", "data_efficiency", "curriculum_learning", "progressive_layer_drop",
    "eigenvalue", "quantize_training",
)  # fmt: skip
"""Tables that are no sections here, and that ``"enabled": false`` switches off there."""
_ELSEWHERE: Final = ("sparse_attention", "pipeline", "tensor_parallel", "sequence_parallel_size")
_RECORDS: Final = (
    "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "flops_profiler", "comms_logger",
    "comms_config",
)  # fmt: skip
_TAKES: Final[dict[type, Takes]] = {
    bool: "switch", int: "count", float: "number", str: "text", tuple: "list", type(None): "anything",
}  # fmt: skip


def _key(fate: Fate, path: str, default: Any, text: str, takes: Takes | None = None) -> Key:
    """A key; what it takes is told by its default where ``takes`` is not given."""
    return Key(fate, path, default, text, takes or _TAKES[type(default)])


_honoured = partial(_key, "honoured")
_idle = partial(_key, "without effect")
_only = partial(_key, "only the default")


def _renamed(path: str, means: str, text: str, takes: Takes = "switch") -> Key:
    return Key("renamed", path, None, text, takes, means)


def _within(section: str, *keys: Key) -> list[Key]:
    return [replace(key, path=f"{section}.{key.path}") for key in keys]


_TRAINING = (
    _honoured("train_batch_size", None, "micro-batch x accumulation x ranks; must agree with them", "count"),
    _honoured("train_micro_batch_size_per_gpu", None, "sequences of one rank in a micro-batch", "count"),
    _honoured("gradient_accumulation_steps", None, "micro-batches in a step", "count"),
    _honoured("gradient_clipping", 0.0, "largest global norm of the mean gradient; 0 does not clip"),
    *_within(
        "optimizer",
        _honoured("type", None, "Adam or AdamW; any other is refused", "text"),
        _honoured("params.lr", 0.001, "learning rate"),
        _honoured("params.betas", (0.9, 0.999), "decay of the two moments"),
        _honoured("params.eps", 1e-08, "added to the root of the second moment"),
        _honoured("params.weight_decay", 0.0, "weight decay"),
        _honoured("params.adam_w_mode", True, "Adam with decoupled decay is AdamW"),
        _only("params.bias_correction", True, "torch's optimizers always correct"),
        _only("params.amsgrad", False, "no policy has the third state"),
        _idle(
            "params.torch_adam",
            False,
            "optimizers are always torch's; true makes AdamW's weight_decay torch's 0.01 unless given",
        ),
        _idle("params.fused", None, "the optimizer is made by the caller", "switch"),
        _only("legacy_fusion", False, "masters are stepped as torch does"),
    ),
    *_within(
        "scheduler",
        _honoured("type", None, "WarmupLR, WarmupDecayLR or WarmupCosineLR; any other is refused", "text"),
        _honoured("params.warmup_min_lr", 0.0, "learning rate that the warm-up begins at"),
        _honoured("params.warmup_max_lr", None, "learning rate that it ends at", "number"),
        _honoured("params.warmup_num_steps", 1000, "steps of the warm-up"),
        _honoured("params.warmup_type", "log", "log or linear"),
        _honoured("params.total_num_steps", None, "steps in which it decays; else those of the run", "count"),
        _honoured("params.warmup_min_ratio", 0.0, "of WarmupCosineLR: share that the warm-up begins at"),
        _honoured("params.cos_min_ratio", 0.0001, "of WarmupCosineLR: share that is left at the end"),
        _idle("params.last_batch_iteration", -1, "a run begins at its first step"),
    ),
    _idle("zero_allow_untested_optimizer", False, "any elementwise optimizer may be used"),
    _idle("zero_force_ds_cpu_optimizer", True, "the optimizer is made by the caller"),
    *_within(
        "fp16",
        _honoured("enabled", False, "weights and gradients in fp16, with a loss scale"),
        _honoured("loss_scale", 0, "a fixed loss scale; 0 for a dynamic one", "number"),
        _honoured("initial_scale_power", 16, "the first dynamic scale is 2 to this power"),
        _honoured("loss_scale_window", 1000, "steps without overflow after which the scale doubles"),
        _honoured("min_loss_scale", 1, "the scale does not fall below it", "number"),
        _idle("hysteresis", 2, "the scale halves at the first overflow, not at the one of this number"),
        _idle("consecutive_hysteresis", False, "there is no hysteresis"),
        _idle("auto_cast", False, "floating-point inputs are cast to the type that is computed in"),
        _only("fp16_master_weights_and_grads", False, "masters are held in fp32"),
    ),
    *_within(
        "bf16",
        _honoured("enabled", False, "weights and gradients in bf16"),
        _idle("immediate_grad_update", True, "gradients go to their fp32 means when they are reduced"),
        _idle("check_grad_overflow", False, "without a loss scale no step is skipped"),
        _only("bf16_master_weights_and_grads", False, "masters are held in fp32"),
        _only("bf16_optimizer_states", False, "states have the masters' type, fp32"),
    ),
    _renamed("bfloat16.enabled", "bf16.enabled", "older spelling"),
    _only("amp.enabled", False, "Apex: use fp16 or bf16"),
    _idle("amp.opt_level", None, "of Apex", "text"),
    _only("torch_autocast.enabled", False, "autocast: use fp16 or bf16"),
    _only("data_types.grad_accum_dtype", "fp32", "mean gradients are accumulated in fp32"),
    _honoured(
        "communication_data_type",
        None,
        "fp32, fp16 or bf16 (also bfp16): type of gradients on the wire; by default the type computed in",
        "text",
    ),
    _idle("seq_parallel_communication_data_type", "fp32", "there is no sequence parallelism"),
    _idle("prescale_gradients", False, "sums are of fp32 and divided last: the result is the mean"),
    _honoured(
        "gradient_predivide_factor",
        1.0,
        "changes nothing, the result is the mean; refused beside zero_quantized_gradients unless 1",
    ),
    _only("sparse_gradients", False, "gradients are dense"),
    _idle("disable_allgather", False, "weights are gathered"),
    _idle("fp32_allreduce", False, "sums are of fp32"),
)
_ZERO = _within(
    ZERO,
    _honoured("stage", 0, "0 to 3: what is sharded"),
    _honoured("reduce_bucket_size", 500_000_000, "elements of gradients under way at once"),
    _honoured("reduce_scatter", True, "false would send an all-reduce and is refused"),
    _idle("contiguous_gradients", True, "a unit's gradients always lie in one buffer"),
    _idle("overlap_comm", None, "reductions are always under way during the backward pass", "switch"),
    _idle("use_multi_rank_bucket_allreduce", True, "nothing is all-reduced"),
    _idle("allgather_partitions", True, "weights are always gathered, never broadcast in turn"),
    _idle("allgather_bucket_size", 500_000_000, "a unit's weights travel in one message"),
    _idle("load_from_fp32_weights", True, "checkpoints hold the fp32 masters"),
    _idle("elastic_checkpoint", False, "any world loads any checkpoint"),
    _idle("sub_group_size", 10**9, "the optimizer is torch's and steps all masters"),
    _idle("ignore_unused_parameters", True, "what no loss reached has a gradient of zero"),
    _idle("round_robin_gradients", False, "a unit's gradient is shared by all ranks"),
    _only("legacy_stage1", False, "there is one stage 1"),
    _honoured("stage3_prefetch_bucket_size", 50_000_000, "elements gathered ahead of their use"),
    _honoured(
        "stage3_param_persistence_threshold",
        10**5,
        "parameters of at most as many elements stay gathered (here: fewer than one more)",
    ),
    _honoured("stage3_model_persistence_threshold", NO_LIMIT, "elements that stay gathered in all"),
    _honoured(
        "stage3_max_live_parameters",
        10**9,
        "elements of a unit at most, larger ones are cut; nothing is gathered ahead or kept beyond it; a "
        "unit in use, what lies outside all blocks and what persists may together be more",
    ),
    _honoured(
        "stage3_max_reuse_distance",
        10**9,
        "blocks stay gathered until backward if fewer elements run in between",
    ),
    _honoured("stage3_allgather_sequential", False, "nothing is gathered ahead"),
    _idle("stage3_gather_16bit_weights_on_model_save", False, "saving is asked for where it is done"),
    _renamed(
        "stage3_gather_fp16_weights_on_model_save",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "older spelling",
    ),
    _renamed(
        "stage3_param_persitance_threshold",
        f"{ZERO}.stage3_param_persistence_threshold",
        "as the ZeRO tutorial spells it",
        "count",
    ),
    _idle("stage3_module_granularity_threshold", 0, "units are the blocks of the model"),
    _only("stage3_use_all_reduce_for_fetch_params", False, "weights are gathered"),
    _honoured(
        "zero_hpz_partition_size",
        1,
        "hpZ: ranks that share one secondary copy, at most all; 0 and 1 are none",
    ),
    _honoured(
        "zero_quantized_weights",
        False,
        "qwZ: int8 with DeepSpeed's scales, in blocks of 2048, none over two parameters (DeepSpeed's have up "
        "to 8000 elements, and may be)",
    ),
    _honoured(
        "zero_quantized_nontrainable_weights",
        False,
        "weights that are not trained are held and sent as qwZ's int8 in blocks of 2048",
    ),
    _honoured(
        "zero_quantized_gradients",
        False,
        "qgZ: int4 with DeepSpeed's scales, in blocks of 256, two hops, on one node too, where DeepSpeed "
        "does not quantise",
    ),
    _honoured(
        "zeropp_loco_param.err_beta",
        0.8,
        "LoCo: share of the old error that stays; kept in fp32, not INT8",
    ),
    _honoured("zeropp_loco_param.reset_T", 1024, "LoCo: steps after which the error is forgotten"),
    _honoured("mics_shard_size", -1, "MiCS: ranks that share one copy of all states; -1: all", "number"),
    _idle("mics_hierarchical_params_gather", False, "weights are always gathered by hops"),
    _idle("memory_efficient_linear", True, "saved weights are always let go"),
    _idle("pipeline_loading_checkpoint", False, "a checkpoint is read by ranges"),
    _idle("override_module_apply", True, "no class of torch is changed"),
    _idle("log_trace_cache_warnings", False, "an order that changed is not an event"),
    _idle("enable_sanity_checks", False, "the order of messages is always checked"),
    _idle("save_muon_momentum_buffer_in_memory", False, "Muon is not elementwise and refused"),
    _only("leaf_module", None, "units are named in code: shard(blocks=...)"),
    _only("zenflow", None, "no such offload"),
    _honoured("offload_param.device", "none", "cpu: frames of weights in host memory; nvme is refused"),
    _only("offload_param.nvme_path", None, "nothing is offloaded to NVMe", "text"),
    _idle("offload_param.buffer_count", 5, "of NVMe"),
    _idle("offload_param.buffer_size", 100_000_000, "of NVMe"),
    _idle("offload_param.max_in_cpu", 10**9, "of NVMe"),
    _idle("offload_param.pin_memory", True, "pinned on CUDA, and not where the device is the host"),
    _honoured("offload_optimizer.device", "none", "cpu: masters and states in host memory; nvme is refused"),
    _honoured("offload_optimizer.ratio", 1.0, "share that is offloaded; below 1 of stage 3 only"),
    _only("offload_optimizer.nvme_path", None, "nothing is offloaded to NVMe", "text"),
    _idle("offload_optimizer.buffer_count", 4, "of NVMe"),
    _idle("offload_optimizer.pin_memory", True, "pinned on CUDA, and not where the device is the host"),
    _idle("offload_optimizer.pipeline_read", False, "of NVMe"),
    _idle("offload_optimizer.pipeline_write", False, "of NVMe"),
    _idle("offload_optimizer.fast_init", False, "of NVMe"),
    _only("offload_optimizer.super_offload", False, "no such offload"),
    _idle("offload_optimizer.cpuadam_cores_perc", 0.8, "of another offload"),
    _renamed("cpu_offload", f"{OFFLOAD_OPTIMIZER}.device", "deprecated; true is cpu"),
    _renamed("cpu_offload_param", f"{OFFLOAD_PARAM}.device", "deprecated; true is cpu"),
    _renamed("cpu_offload_params", f"{OFFLOAD_PARAM}.device", "as the ZeRO tutorial spells it; true is cpu"),
    _idle("cpu_offload_use_pin_memory", None, "deprecated; pinned on CUDA", "switch"),
)
_AROUND = (
    *_within(
        "activation_checkpointing",
        _idle("partition_activations", False, "there is no model parallelism"),
        _only("cpu_checkpointing", False, "activations stay on the device"),
        _idle("contiguous_memory_optimization", False, "torch's allocator places them"),
        _idle("number_checkpoints", None, "what is recomputed is the model's choice", "count"),
        _idle("synchronize_checkpoint_boundary", False, "nothing is synchronised there"),
        _idle("profile", False, "times are in the records"),
    ),
    _idle("steps_per_print", 10, "every step is logged"),
    _idle("wall_clock_breakdown", False, "times are always split"),
    _idle("memory_breakdown", False, "memory is always split"),
    _idle("dump_state", False, "the recipe is printed as findings"),
    _idle("dataloader_drop_last", False, "data are the caller's"),
    *(_idle(name, None, "this project's own records take its place") for name in _RECORDS),
    _idle("aio", None, "of NVMe"),
    _idle("checkpoint", None, "checkpoints are asked for where they are made"),
    _idle("nebula", None, "checkpoints are asked for where they are made"),
    _idle("compile", None, "compiling is the caller's"),
    _idle("hybrid_engine", None, "a sharded model generates as it is"),
    _idle("autotuning", None, "suites take its place"),
    *(_only(name, None, "no such technique here") for name in (*SWITCHED, *_ELSEWHERE)),
)

KEYS: Final[dict[str, Key]] = {key.path: key for key in (*_TRAINING, *_ZERO, *_AROUND)}
"""Every key by its path."""

SECTIONS: Final = frozenset(
    path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
)
"""Paths of the tables that hold keys."""
