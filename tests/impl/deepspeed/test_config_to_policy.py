"""DeepSpeed's configurations are read: the tutorials' snippets as they are, and the meaning of each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from impl.codecs import reference
from impl.codecs.codec import BF16, FP16, FP32, IntCodec
from impl.deepspeed.config_to_policy import QGZ, QWZ, AdamOptions, Finding, Recipe, laid_out, recipe
from impl.deepspeed.keys import KEYS, SECTIONS, ZERO, DeepSpeedError, load
from impl.engine.unit_planning import find_blocks, plan_units
from impl.policy.policy import Feedback, LossScale, MemoryLimits, Offload, Policy
from impl.policy.topology import Topology
from impl.zero import ZeroError
from tests.support.history import history_of
from tests.support.ranks import on_threads
from tests.support.training import batch, mean_losses, model, single, train

FOUR: Final = Topology(2, 2)

# Of DeepSpeed's tutorials, section ``zero_optimization``.
SNIPPETS: Final[dict[str, dict[str, Any]]] = {
    "zero_tutorial stage 1": {"stage": 1, "reduce_bucket_size": 5e8},
    "zero_tutorial stage 2": {
        "stage": 2, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True,
        "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8,
    },
    "zero_tutorial stage 3 offload": {
        "stage": 3, "cpu_offload": True, "cpu_offload_params": True, "overlap_comm": True,
        "contiguous_gradients": True, "stage3_max_live_parameters": 6_000_000,
        "stage3_max_reuse_distance": 100_000_000, "stage3_prefetch_bucket_size": 200_000,
        "stage3_param_persitance_threshold": 100_000, "reduce_bucket_size": 3_000_000, "sub_group_size": 1e6,
    },
    "zeropp_tutorial": {
        "stage": 3, "reduce_bucket_size": 10_000_000, "reduce_scatter": True,
        "zero_quantized_weights": True, "zero_hpz_partition_size": 16, "zero_quantized_gradients": True,
        "contiguous_gradients": True, "overlap_comm": True,
    },
}  # fmt: skip


def finding_of(read: Recipe, name: str) -> Finding:
    (finding,) = [finding for finding in read.findings if finding.key == f"{ZERO}.{name}"]
    return finding


def zero(**keys: Any) -> dict[str, Any]:
    return {ZERO: {"stage": 3, **keys}}


def warmed(**parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupLR", "params": parameters}}


def policy_of(**keys: Any) -> Policy:
    """Returns the policy of keys under ``zero_optimization``, on 2x2 ranks."""
    policy = recipe(zero(**keys), topology=FOUR).policy
    return replace(policy, memory=replace(policy.memory, max_padding=1e9))


def follows(policy: Policy, net: nn.Module, steps: int, tolerance: float = 1e-5) -> None:
    """Assert that training in shards on 2x2 ranks gives the losses of one process."""
    results = on_threads(FOUR, train, net, policy, steps)
    assert mean_losses(results) == pytest.approx(single(net, 4, steps), rel=tolerance)


BUCKET: Final = MemoryLimits(reduce_bucket=500_000_000)
PLAIN: Final[dict[str, Any]] = {"weights": FP32, "gradients": (FP32, FP32)}  # as DeepSpeed without 16 bits


@pytest.mark.parametrize(
    ("name", "policy", "idle", "renamed"),
    [
        ("zero_tutorial stage 1", Policy(stage=1, memory=BUCKET, **PLAIN), [], {}),
        ("zero_tutorial stage 2", Policy(stage=2, memory=BUCKET, **PLAIN),
         ["contiguous_gradients", "allgather_bucket_size"], {}),
        ("zero_tutorial stage 3 offload",
         Policy(stage=3, offload=Offload(optimizer=1.0, weights=1.0), **PLAIN, memory=MemoryLimits(
             prefetch=200_000, max_live=6_000_000, max_reuse=100_000_000, persist_below=100_001,
             reduce_bucket=3_000_000, largest_unit=6_000_000)), [],
         {"cpu_offload": "offload_optimizer.device", "cpu_offload_params": "offload_param.device",
          "stage3_param_persitance_threshold": "stage3_param_persistence_threshold"}),
    ],
)  # fmt: skip
def test_zero_tutorial(name: str, policy: Policy, idle: list[str], renamed: dict[str, str]) -> None:
    """Each snippet gives this policy; idle, deprecated and misspelt keys are understood and reported."""
    read = recipe({ZERO: SNIPPETS[name]}, topology=Topology(2, 16))
    assert read.policy == policy
    assert (read.clip, read.accumulation, read.micro_batch, read.optimizer) == (None, 1, None, None)
    assert all(finding_of(read, key).kind == "without effect" for key in idle)
    for key, means in renamed.items():
        assert (finding_of(read, key).kind, means in finding_of(read, key).text) == ("renamed", True)


def test_zeropp_tutorial() -> None:
    """All three techniques; hpZ groups have 16 ranks on 4 nodes of 16, all if there are fewer, none for one."""
    on_64, on_4, on_a_node, alone = (
        recipe({ZERO: SNIPPETS["zeropp_tutorial"]}, topology=Topology(*shape))
        for shape in ((4, 16), (2, 2), (1, 4), (1, 1))
    )
    policy = on_64.policy
    assert (policy.stage, policy.weights, policy.gradients, policy.secondary) == (3, QWZ, (QGZ, QGZ), 16)
    assert policy.memory.reduce_bucket == 10_000_000
    assert finding_of(on_64, "zero_hpz_partition_size").kind == "honoured"
    assert (on_4.policy.secondary, alone.policy.secondary) == (4, 0)
    text = "the hpZ group is all 4 ranks, which span 2 nodes, so hpZ saves no traffic between nodes"
    assert finding_of(on_4, key := "zero_hpz_partition_size") == Finding(f"{ZERO}.{key}", 16, "changed", text)
    assert finding_of(on_a_node, "zero_hpz_partition_size").text == "the hpZ group is all 4 ranks"


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_is_one_recipe_as_text_table_and_file(name: str, tmp_path: Path) -> None:
    """A snippet gives the same recipe as text, as a mapping and as a file."""
    table, file = {ZERO: SNIPPETS[name]}, tmp_path / "ds.config"
    file.write_text(text := json.dumps(table, indent=2), encoding="utf-8")
    wanted = recipe(text, topology=FOUR)
    assert recipe(table, topology=FOUR) == wanted
    assert recipe(file, topology=FOUR) == recipe(str(file), topology=FOUR) == wanted


@pytest.mark.parametrize("name", SNIPPETS)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_model_trains_with_a_snippet(name: str, persistent: bool) -> None:
    """With or without persistent units, losses follow one process: within 1e-5 in fp32, within 2 % if quantised."""
    keys = dict(SNIPPETS[name])
    if not persistent and keys["stage"] == 3:
        keys.pop("stage3_param_persitance_threshold", None)
        keys["stage3_param_persistence_threshold"] = 0
    policy = policy_of(**keys)
    follows(policy, model(), 3, 0.02 if policy.weights == QWZ else 1e-5)


# Any configuration

VALUES: Final = {
    "switch": st.booleans(),
    "count": st.one_of(st.integers(0, 64), st.sampled_from([5e8, 1e6, 2**63 - 1])),
    "number": st.one_of(st.integers(-1, 16), st.floats(0, 4)),
    "text": st.sampled_from(["none", "cpu", "nvme", "fp32", "fp16", "bfp16", "Adam", "AdamW", "Lamb"]),
    "list": st.sampled_from([[0.9, 0.95], [0.9], []]),
    "anything": st.sampled_from([{"enabled": False}, {"enabled": True}, 1, "x"]),
}
WRONG: Final = st.sampled_from([None, "auto", -1, 0.5, [], {}, True, "yes", 1e400, 10**400])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested configuration from dotted keys."""
    table: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        reduce(lambda place, section: place.setdefault(section, {}), sections, table)[name] = value
    return table


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw some of the known keys with values of their type, often the default, sometimes nonsense."""
    flat = {}
    for key in draw(st.lists(st.sampled_from(list(KEYS.values())), max_size=8, unique=True)):
        right = st.just(key.default) | VALUES[key.takes]
        flat[key.path] = draw(st.one_of(right, right, right, WRONG))
    return flat


@given(flat=configurations(), topology=st.sampled_from([Topology(1, 1), FOUR, Topology(2, 3)]))
def test_known_keys_make_a_recipe_or_one_line(flat: dict[str, Any], topology: Topology) -> None:
    """Known keys raise no other error than a DeepSpeedError; findings name every key exactly once."""
    outcome: Recipe | str
    try:
        outcome = recipe(nested(flat), topology=topology)
    except DeepSpeedError as error:
        outcome = str(error)
    if isinstance(outcome, str):
        assert "\n" not in outcome
    else:
        outcome.policy.check(topology)
        assert sorted(finding.key for finding in outcome.findings) == sorted(flat)


PRESENT: Final = (
    f"{ZERO}.zeropp_loco_param",
    "optimizer",
    "scheduler",
)  # their presence alone asks for something


@pytest.mark.parametrize(
    "path", [key.path for key in KEYS.values() if not key.means and not key.path.startswith(PRESENT)]
)
def test_giving_a_default_changes_nothing(path: str) -> None:
    """The defaults in the table are those that are used for missing keys."""
    table = nested({f"{ZERO}.stage": 3, path: 3 if path == f"{ZERO}.stage" else KEYS[path].default})
    explicit, plain = recipe(table, topology=FOUR), recipe(zero(), topology=FOUR)
    assert replace(explicit, findings=()) == replace(plain, findings=())


@given(name=st.text("abcdefgz_0", min_size=1, max_size=30), section=st.sampled_from(["", *sorted(SECTIONS)]))
def test_unknown_keys_are_refused_by_name(name: str, section: str) -> None:
    """An unknown key is refused wherever it is."""
    path = f"{section}.{name}" if section else name
    if path in KEYS or path in SECTIONS:
        return
    with pytest.raises(DeepSpeedError, match=f"unknown key '{path}'"):
        recipe(nested({path: 1}), topology=FOUR)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("zero_optimization.stage3_max_live_paramaters", "zero_optimization.stage3_max_live_parameters"),
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.zero_hpz_partion_size", "zero_optimization.zero_hpz_partition_size"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
        ("stage3_prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    ],
)
def test_a_misspelt_key_names_the_nearest(written: str, nearest: str) -> None:
    """The nearest known key is named, also if it is in another section."""
    with pytest.raises(DeepSpeedError, match=f"'{written}'; did you mean '{nearest}'"):
        recipe(nested({written: 1}), topology=FOUR)


# Honoured keys


HALF: Final[dict[str, Any]] = {"compute": "fp16", "weights": FP16, "gradients": (FP16, FP16)}
BFLOAT: Final[dict[str, Any]] = {"compute": "bf16", "weights": BF16, "gradients": (BF16, BF16)}
DYNAMIC: Final = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 20}


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        (zero(zero_quantized_weights=True), {"weights": QWZ}),
        (zero(zero_quantized_gradients=True), {"gradients": (QGZ, QGZ)}),
        (zero(zero_hpz_partition_size=2), {"secondary": 2}),
        (zero(zero_quantized_nontrainable_weights=True), {"frozen": QWZ}),
        (zero(mics_shard_size=2), {"group": 2}),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), {"offload": Offload(optimizer=0.3)}),
        (zero(zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.7, "reset_T": 512}),
         {"gradients": (QGZ, QGZ), "feedback": Feedback(decay=0.7, reset=512, hops="all")}),
        (zero() | {"bf16": {"enabled": True}}, BFLOAT),
        (zero() | {"bfloat16": {"enabled": True}}, BFLOAT),
        (zero() | {"fp16": {"enabled": True}}, HALF | {"loss_scale": LossScale()}),
        (zero() | {"fp16": DYNAMIC}, HALF | {"loss_scale": LossScale(initial=256.0, window=20)}),
        (zero() | {"fp16": {"enabled": True, "loss_scale": 128}},
         HALF | {"loss_scale": LossScale(initial=128.0, window=0)}),
        (zero() | {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
         BFLOAT | {"gradients": (FP32, FP32)}),
    ],
)  # fmt: skip
def test_each_key_is_its_own_part_of_the_policy(table: dict[str, Any], changes: dict[str, Any]) -> None:
    """Each technique; an offloaded share; LoCo for both hops; types of computation and of messages."""
    plain, changed = (recipe(t, topology=FOUR).policy for t in (zero(), table))
    assert changed == replace(plain, **changes)


@pytest.mark.parametrize(("codec", "bits"), [(QWZ, 8), (QGZ, 4)])
def test_scales_are_deepspeeds(codec: IntCodec, bits: int) -> None:
    """DeepSpeed's kernels send q = clamp(rne(x * 2^b / (2 absmax))), and decode to q * 2 absmax / 2^b."""
    assert codec.bits == bits
    x = torch.randn(8, codec.block, generator=torch.Generator().manual_seed(0))
    x[:4] *= x[:4].gather(1, x[:4].abs().argmax(1, keepdim=True)).sign()  # half have a positive top: cut
    frame = torch.zeros(codec.frame_bytes(x.numel()), dtype=torch.uint8)
    decoded = torch.empty(x.numel())
    reference.encode(codec, x.flatten(), frame)
    reference.decode(codec, frame, decoded)
    scale = 2 * x.double().abs().amax(1, keepdim=True) / 2**bits
    wanted = (x.double() / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
    assert torch.allclose(decoded.view_as(x).double(), wanted, rtol=1e-6, atol=0)
    assert (decoded.view_as(x)[:4].amax(1) < x[:4].amax(1) * (1 - 0.9 / 2 ** (bits - 1))).all()


def test_the_first_overflow_halves_the_scale_which_is_reported() -> None:
    """The scale halves at the first overflow whatever the hysteresis, and the finding says so."""
    read = recipe({"fp16": {**DYNAMIC, "hysteresis": 2}}, topology=FOUR)
    assert [finding.kind for finding in read.findings if finding.key == "fp16.hysteresis"] == ["changed"]


SIZES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@given(
    micro=st.integers(1, 8),
    steps=st.integers(1, 8),
    topology=st.builds(Topology, st.integers(1, 3), st.integers(1, 3)),
    given_names=st.sets(st.integers(0, 2), min_size=2),
)
def test_two_sizes_of_batches_give_the_third(
    micro: int, steps: int, topology: Topology, given_names: set[int]
) -> None:
    """Any two of the three sizes determine the third; all three may be given."""
    sizes = list(zip(SIZES, (micro * steps * topology.world, micro, steps), strict=True))
    read = recipe(dict(sizes[index] for index in given_names), topology=topology)
    assert (read.micro_batch, read.accumulation) == (micro, steps)


ADAM: Final = AdamOptions(type="AdamW", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
GIVEN: Final = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("kind", "params", "changes"),
    [
        ("Adam", {}, {}),
        ("Adam", GIVEN, GIVEN | {"betas": (0.9, 0.95)}),
        ("Adam", {"adam_w_mode": False}, {"type": "Adam"}),
        ("AdamW", {"torch_adam": True}, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "weight_decay": 0.0}, {}),
        ("Adam", {"torch_adam": True, "weight_decay": "auto"}, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, {"type": "Adam"}),
    ],
)
def test_adam_is_adamw_unless_it_says_otherwise(
    kind: str, params: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Adam is AdamW by default; with torch_adam it is torch's AdamW, whose default weight_decay is 0.01."""
    read = recipe({"optimizer": {"type": kind, "params": params}}, topology=FOUR)
    assert read.optimizer == replace(ADAM, **changes)
    if read.optimizer.type != kind:
        assert read.findings[0].kind == "changed"  # a finding


def test_what_huggingface_writes() -> None:
    """The value "auto" counts as missing, and is reported."""
    table = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        ZERO: {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    }  # fmt: skip
    read = recipe(table, topology=FOUR)
    assert read.policy == recipe(zero(), topology=FOUR).policy
    assert read.micro_batch is None
    assert {finding.kind for finding in read.findings if finding.value == "auto"} == {"changed"}


def test_weights_are_offloaded_where_there_is_something_to_offload() -> None:
    """offload_param alone moves no trained weight, and its finding says so."""
    cpu, part = {"device": "cpu"}, {"device": "cpu", "ratio": 0.5}
    for table, kind in (
        (zero(offload_param=cpu), "changed"),
        (zero(offload_param=cpu, offload_optimizer=part), "changed"),
        (zero(offload_param=cpu, offload_optimizer=cpu), "honoured"),
        (zero(offload_param=cpu, zero_hpz_partition_size=2), "honoured"),
        (zero(offload_param={"device": "none"}), "honoured"),
    ):
        assert finding_of(recipe(table, topology=FOUR), "offload_param.device").kind == kind


def test_empty_tables_are_reported() -> None:
    """LoCo's empty table means LoCo with its defaults; other empty tables mean nothing."""
    read = recipe(zero(zero_quantized_gradients=True, zeropp_loco_param={}) | {"fp16": {}}, topology=FOUR)
    assert read.policy.feedback == Feedback(decay=0.8, reset=1024, hops="all")
    assert finding_of(read, "zeropp_loco_param").kind == "honoured"
    assert [str(finding) for finding in read.findings][-1] == "fp16 = {}: without effect: an empty table"


def test_keys_of_shards_are_reported_if_every_parameter_persists() -> None:
    """If all parameters persist, keys of shards have no effect; "auto" and "off" keep their findings."""
    idle = {"zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    idle |= {"zeropp_loco_param": {"err_beta": 0.5}, "stage3_prefetch_bucket_size": 5}
    others = {"zero_quantized_weights": "auto", "stage3_max_reuse_distance": 0}
    for threshold in (100_000, 16):
        keys = {**idle, **others, "stage3_param_persistence_threshold": threshold}
        read = recipe(zero(**keys), topology=FOUR)
        noted = laid_out(read, plan_units(model(), FOUR, policy_of(**keys)))
        named = {f.key.split(".")[1]: f for f in noted.findings if "all parameters persist" in f.text}
        assert named.keys() == (idle.keys() if threshold == 100_000 else set())
        for f in named.values():
            assert (f.kind, "_threshold = 100,000" in f.text) == ("without effect", True)


# Refusals


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (zero(stage=2, zero_hpz_partition_size=2), "hpz_partition_size = 2: needs stage 3, but .*stage = 2"),
        (zero(stage=4), "stage = 4: expected one of 0, 1, 2, 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled.*bf16.enabled"),
        (zero(zero_quantized_gradients=True, reduce_scatter=False), "reduce_scatter = false"),
        (zero(mics_shard_size=2, zero_hpz_partition_size=2), "mics_shard_size = 2.*zero_hpz_partition_size"),
        (zero(offload_param={"device": "nvme"}), 'offload_param.device = "nvme"'),
        (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio = 0.5: .*stage = 2"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e6}}, "^loss scale 65536 .* and least 1e"),
        (zero(zeropp_loco_param={"err_beta": 0.8}), "zeropp_loco_param.*zero_quantized_gradients"),
        (zero(zero_hpz_partition_size=3), "3 ranks does not fit 2 nodes x 2 ranks"),
        (zero(cpu_offload=True, offload_optimizer={"device": "none"}), "cpu_offload = true"),
        (zero(zero_quantized_gradients=True) | {"gradient_predivide_factor": 2.0}, "2.0: expected 1"),
        (
            dict.fromkeys(SIZES, 2),
            "train_batch_size = 2: contradicts train_micro_batch_size.* = 2.* 4 ranks, which make 16",
        ),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type = "Lamb": expected one of Adam, AdamW'),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.*one of WarmupLR, "),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "WarmupDecayLR needs a number of steps: set scheduler.params.total",
        ),
        (warmed(warmup_min_lr=0.5, warmup_max_lr=0.1), "0.5: expected 0 to 0.1, the learning rate"),
        (warmed(warmup_type="cubic"), 'warmup_type = "cubic": expected one of log, linear'),
        ({"zero_optimization": True}, "zero_optimization = true: expected a table"),
        ({"scheduler": {"type": "WarmupLR", "enabled": False}}, "unknown key 'scheduler.enabled'"),
        ({"elasticity": {"enabled": True}}, "elasticity.*not supported"),
        ('{"gradient_clipping": NaN}', "gradient_clipping = NaN: expected a number"),
        (zero(stage3_max_live_parameters=0), "stage3_max_live_parameters = 0: expected 1 or more"),
    ],
)
def test_contradictions_are_refused_by_name(table: dict[str, Any] | str, message: str) -> None:
    """A contradiction is refused in one line that names the keys and their values."""
    with pytest.raises(DeepSpeedError, match=message) as caught:
        recipe(table, topology=FOUR)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 3,}', "cannot be read as JSON"),
        ('{"bf16": {enabled: true, enabled: false}}', "cannot be read as JSON: key 'enabled' occurs twice"),
        ("[1, 2]", "expected a table|cannot be read"),
        (
            '{"steps_per_print": 4, "steps_per_print": 8}',
            "cannot be read as JSON: key 'steps_per_print' occurs twice",
        ),
        ('{"gradient_clipping": ' + "[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_what_is_no_configuration_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    """A file that is no configuration is refused in one line with the file's name."""
    file = tmp_path / "broken.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DeepSpeedError, match=message) as caught:
        recipe(file, topology=FOUR)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


# Units that are cut


@pytest.mark.parametrize("most", [700, 1400, 10_000])
def test_no_unit_is_larger_than_asked_and_the_model_trains(most: int) -> None:
    """Blocks of 1344 elements that do not fit are cut into their linear layers; losses stay the same."""
    policy = policy_of(stage3_max_live_parameters=most, stage3_param_persistence_threshold=0)
    units = plan_units(model(), FOUR, policy)
    assert max(unit.numel for unit in units) <= most
    names = [slot.spec.name for unit in units for slot in unit.slots]
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())
    follows(policy, model(), 2)


def test_what_cannot_be_cut_is_refused_with_its_size() -> None:
    """A linear layer of 680 elements is refused if only 600 may be live."""
    policy = policy_of(stage3_max_live_parameters=600, stage3_param_persistence_threshold=0)
    with pytest.raises(ZeroError, match=r"'blocks.0.up' is one Linear and has 680 elements, .* = 600"):
        plan_units(model(), FOUR, policy)


class Mixed(nn.Module):
    """A block with a parameter of its own, a list that is never called, and a part used without a call."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(nn.init.ones_(nn.Linear(16, 1).weight.detach()))
        self.one = nn.Linear(16, 16).requires_grad_(not frozen)
        self.parts = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x * self.gain, self.one.weight) + self.parts[0](x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_cut_block_may_have_parameters_of_its_own_and_use_a_part_without_calling_it(frozen: bool) -> None:
    """Its own parameters join the root's unit, used parts are gathered, and modules never called are no units."""
    net = model()
    net.blocks = nn.ModuleList([Mixed(frozen=frozen), Mixed(frozen=frozen)])
    assert not any(isinstance(block, nn.ModuleList) for block in find_blocks(net, most=300))
    policy = policy_of(stage3_max_live_parameters=300, stage3_param_persistence_threshold=0)
    units = {unit.name: unit for unit in plan_units(net, FOUR, policy)}
    assert "blocks.0.gain" in [slot.spec.name for slot in units["root"].slots]
    assert "blocks.0.parts.0" in units
    evaluated = on_threads(FOUR, history_of, net, policy, ["evaluate"] * 2)[0].seen
    with torch.no_grad():
        assert evaluated == pytest.approx([net(batch(0, 0)).item(), net(batch(1, 0)).item()], rel=1e-6)
    follows(policy, net, 3)


def test_small_parameters_persist_up_to_their_limit() -> None:
    """Parameters that would exceed stage3_model_persistence_threshold stay with their block."""
    policy = policy_of(stage3_param_persistence_threshold=16, stage3_model_persistence_threshold=40)
    (persistent,) = [unit for unit in plan_units(model(), FOUR, policy) if unit.persistent]
    assert 0 < persistent.numel <= 40


HJSON = {
    "a trailing comma": '{"zero_optimization": {"stage": 3,},}',
    "comments": '// ours\n{"zero_optimization": /* all */ {"stage": 3} # sharded\n}',
    "keys without quotes": "{zero_optimization: {stage: 3}}",
    "lines without commas": '{"zero_optimization": {\n"stage": 3\n}\n}',
    "no outer braces": "zero_optimization: {\n  stage: 3\n}\n",
    "a byte order mark": '\ufeff{"zero_optimization": {"stage": 3}}',
    "text on lines of its own": (
        "{\n  zero_optimization: {stage: 3}\n  communication_data_type:\n    '''\n    fp16\n    '''\n}"
    ),
}


@pytest.mark.parametrize("text", HJSON.values(), ids=HJSON)
def test_what_deepspeed_reads_as_hjson_is_read(text: str, tmp_path: Path) -> None:
    """HJSON is read from a file, and as text if that begins with a brace."""
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    ways = [str(file), file, *([text] if text.startswith("{") else [])]
    for way in ways:
        assert load(way)["zero_optimization"] == {"stage": 3}
        assert recipe(way, topology=FOUR).policy.stage == 3
    assert load(file).get("communication_data_type", "fp16") == "fp16"
