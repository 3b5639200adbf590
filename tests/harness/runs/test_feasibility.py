"""Predictions add up, cover models that do not fit here, and say which trials cannot run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.runs.feasibility import Forecast, Host, forecast
from harness.runs.predict import per_node_bytes
from harness.suites.parse_quantity import CANONICAL
from harness.suites.peers import PEERS
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Generate, Model, Optimizer, PolicyChanges, Trial
from harness.workloads.preset_parameters import parameters_of_trial
from impl.plan import traffic, unit_plan
from impl.plan.owners import owners_of
from impl.policy.policy import PolicyError
from impl.policy.presets import PRESETS, preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology

GIB = 2**30
FOLDER = Path(__file__).resolve().parents[3] / "suites"
HERE = Host(memory=24 * GIB, gpus=(), namespaces=lambda: None)
GPUS = Cluster(device="cuda", transport="nccl")
SHAPED = Cluster(rate="50 Mbit/s")  # type: ignore[arg-type]


def forecast_of(host: Host = HERE, **fields: Any) -> Forecast:
    return forecast([Trial(**{"model": Model(name="gpt-small")} | fields)], host)[0]


@settings(deadline=None)
@given(
    name=st.sampled_from(list(PRESETS)),
    gather=st.sampled_from(["flat", "hierarchical"]),
    reduce=st.sampled_from(["ring", "one_hop", "two_hop"]),
    topology=st.builds(Topology, st.integers(1, 4), st.integers(1, 4)),
    accumulation=st.integers(1, 4),
    clip=st.booleans(),
)
def test_nodes_send_alike(
    *, name: str, gather: str, reduce: str, topology: Topology, accumulation: int, clip: bool
) -> None:
    """All ranks together send what node 0 sends times the number of nodes, for every policy and topology; norms are
    sent only if gradients are clipped.
    """
    try:
        policy = preset(name, gather=gather, reduce=reduce)
        policy.check(topology)
    except PolicyError:
        return
    units = [
        lay_out(
            f"u{i}", [ParameterSpec("w", (size,))], grain=policy.grain, world=topology.world, max_padding=9e9
        )
        for i, size in enumerate((70_000, 3, 150_000))
    ]
    load = traffic.passes(policy, micro_batches=accumulation, norms=int(clip))
    total = {"inter": 0, "intra": 0}
    for rank in range(topology.world):
        for key, sent in traffic.predict(policy, topology, units, rank, load).sent.items():
            total[key.link] += sent.bytes
    trial = Trial(accumulation=accumulation, clip=1.0 if clip else None)
    inter, intra = per_node_bytes(policy, topology, units, trial)
    assert (inter * topology.nodes, intra * topology.nodes) == (total["inter"], total["intra"])


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (2, 4), (4, 2)])
def test_the_papers_baseline_sends_three_flat_rings(nodes: int, ranks: int) -> None:
    """Two gathers and one reduction are rings over all ranks: one rank per node sends W - 1 shards of 16 bits out of
    it.
    """
    cluster = Cluster(nodes=nodes, ranks_per_node=ranks)
    flat = forecast_of(strategy="zero3-flat", cluster=cluster, policy=PolicyChanges(max_reuse=0))
    world = nodes * ranks
    assert flat.inter == 3 * nodes * (world - 1) * 2 * flat.padded // world
    assert flat.intra == 3 * (world - nodes) * (world - 1) * 2 * flat.padded // world


MUON = Optimizer(name="Muon", arguments={"lr": 0.02, "adamw": {"lr": 1e-3}})


@pytest.mark.parametrize("strategy", ["zero3", "mics", "zero1"])
def test_muons_bytes_and_memory_are_planned(strategy: str) -> None:
    """A plan adds both exchanges with owners, means over nodes, and needs less optimizer state than AdamW's."""
    cluster = Cluster(nodes=3, ranks_per_node=2)
    plain, muon = (
        forecast_of(
            strategy=strategy, cluster=cluster, optimizer=optimizer, policy=PolicyChanges(max_padding=1.0)
        )
        for optimizer in (Optimizer(), MUON)
    )
    assert muon.problems == plain.problems == ()
    assert plain.inter is not None
    assert muon.inter is not None
    assert plain.memory is not None
    assert muon.memory is not None
    assert muon.padded == plain.padded
    trial = muon.trial
    policy, topology = trial.resolved_policy(), trial.topology()
    assert policy is not None
    units = unit_plan.plan_units(*parameters_of_trial(trial), topology, policy)
    owners = owners_of(policy, topology, units)
    sent = {"inter": 0, "intra": 0}
    for rank in range(topology.world):
        for key, each in traffic.predict(policy, topology, units, rank, ["step"], owners=owners).sent.items():
            sent[key.link] += each.bytes
    assert muon.inter - plain.inter == sent["inter"] // 3 * 3
    assert sent["inter"] > 0 or strategy == "mics"
    assert muon.memory["optimizer"] < plain.memory["optimizer"]
    assert muon.memory["owned"] > 0
    assert plain.step is not None
    assert muon.step is not None
    assert (plain.step.owners, muon.step.owners) == (None, owners)


def test_a_plan_without_torch_groups_parameters_as_the_engine_does() -> None:
    """The hidden matrices of a preset's list are those that hidden_matrices() finds in its module."""
    from harness.workloads.models import build, unfilled
    from impl.engine.muon import hidden_matrices

    for name in ("gpt-tiny", "bert-tiny", "vit-tiny"):
        trial = Trial.model_validate({"model": {"name": name}, "optimizer": {"name": "Muon"}, "sequence": 64})
        with unfilled():
            module = build(trial.model, 64)
        chosen = hidden_matrices(module)
        found = {key: chosen(key, parameter) for key, parameter in module.named_parameters()}
        assert {place.spec.name: place.spec.group for place in parameters_of_trial(trial)[0]} == found
        assert 0 < sum(found.values()) < len(found)


def test_muon_on_a_vector_cannot_run() -> None:
    """A pattern that names vectors, with shards or whole matrices, and arguments that torch refuses, are one line."""
    vectors = MUON.model_copy(update={"matrices": "blocks.*"})
    for strategy in ("zero3", "single", "ddp"):
        (problem,) = forecast_of(strategy=strategy, optimizer=vectors).problems
        assert re.fullmatch(
            r"optimizer\.matrices = 'blocks\.\*' also names 'blocks\.0\..*' of shape \(\d+,\), and Muon .* remove .*",
            problem,
        )
    for arguments, message in (
        ({"momentum": -1.0}, "momentum should be >= 0"),
        ({"lr": 0.1, "adamw": 3.0}, "expected a table of AdamW's arguments"),
        ({"lr": 0.1, "adamw": {"rate": 3.0}}, "rate"),
        ({"ns_steps": 1000.0}, "Number of steps must be less than 100"),
    ):
        forecast_ = forecast_of(strategy="zero3", optimizer=Optimizer(name="Muon", arguments=arguments))  # type: ignore[arg-type]
        (problem,) = forecast_.problems
        assert message in problem
        assert "\n" not in problem


@pytest.mark.parametrize("strategy", ["zero3", "single"])
def test_muon_without_a_matrix_cannot_run(strategy: str) -> None:
    """A pattern that fits no parameter is a problem of the plan, not an error of each rank after the start."""
    optimizer = MUON.model_copy(update={"matrices": "nothing.*"})
    cluster = {"nodes": 1, "ranks_per_node": 1} if strategy == "single" else {}
    (problem,) = forecast_of(
        strategy=strategy, optimizer=optimizer, **({"cluster": cluster} if cluster else {})
    ).problems
    assert "no trained parameter of the model has a name like optimizer.matrices = 'nothing.*'" in problem
    assert "choose another optimizer" in problem


def test_quickstart_ratio() -> None:
    """ZeRO++ is predicted to send 0.25 of ZeRO-3's bytes between two nodes of two ranks.

    The share is 0.28 if ZeRO-3 keeps the weights that backward needs first, which ZeRO++ has in hpZ's copy anyway.
    The time on the wire is a node's bytes over the rate, and unknown without a rate.
    """
    zero3, zeropp = (forecast_of(strategy=name, cluster=SHAPED) for name in ("zero3", "zeropp"))
    bare = forecast_of(strategy="zero3", cluster=SHAPED, policy=PolicyChanges(max_reuse=0))
    assert 0.25 < zeropp.inter / bare.inter < 0.26
    assert 0.28 < zeropp.inter / zero3.inter < 0.29
    assert zero3.problems == zeropp.problems == ()
    assert zero3.inter == 2 * (zero3.egress or 0)
    assert zero3.wire_seconds == pytest.approx(zero3.inter / 2 * 8 / 50e6)
    assert forecast_of(strategy="zero3").wire_seconds is None


def test_repeats_share() -> None:
    """Repeats and seeds of a trial share one prediction."""
    trials = [Trial(seed=seed, repeat=repeat) for seed in (0, 1) for repeat in (0, 1)]
    forecasts = forecast(trials, HERE)
    assert [repeat.trial for repeat in forecasts] == trials
    assert len({repeat.inter for repeat in forecasts}) == 1


def test_peers() -> None:
    """A peer has memory and parameters but no predicted bytes, since it sends its own messages."""
    peers = {name: forecast_of(strategy=name) for name in ("single", "ddp", "fsdp2")}
    assert all(peer.inter is None and peer.padded is None for peer in peers.values())
    sizes = {name: sum((peer.memory or {}).values()) for name, peer in peers.items()}
    assert sizes["single"] == sizes["ddp"] == 16 * (peers["ddp"].parameters or 0)
    assert sizes["fsdp2"] == sizes["ddp"] // 4
    for stage, shares in ((0, 4 + 4 + 8), (1, 4 + 4 + 8 / 4), (2, 4 + 4 / 4 + 8 / 4), (3, 4)):
        config = json.dumps({"zero_optimization": {"stage": stage}})
        by_deepspeed = forecast_of(strategy="deepspeed", deepspeed_config=config)
        size = sum((by_deepspeed.memory or {}).values())
        assert size == pytest.approx(shares * (peers["ddp"].parameters or 0), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": Model(name="gpt-18b")}, "too big for memory: 4 ranks x"),
        ({"model": Model(name="gpt-18b"), "strategy": "ddp"}, "too big for memory: 4 ranks x"),
        ({"cluster": Cluster(nodes=64, ranks_per_node=2)}, "128 ranks are more than this machine can hold"),
        ({"corpus": "/no/such/corpus"}, "no such file or folder"),
        ({"policy": PolicyChanges(align=100_000)}, "would be padding"),
        ({"model": Model(name="gpt-tiny", arguments={"layer": 1})}, "did you mean 'layers'?"),
        ({"model": Model(name="no_such_module_at_all:model")}, "cannot import 'no_such_module_at_all'"),
        (
            {"model": Model(name="tests.harness.runs.test_feasibility:broken")},
            "cannot be built: RuntimeError: two",
        ),
        (
            {"model": Model(name="tests.harness.runs.test_feasibility:broken", arguments={"a": 1})},
            "cannot be built: TypeError: broken() got an unexpected keyword argument 'a'",
        ),
        ({"optimizer": Optimizer(name="Adamw")}, "torch.optim has no such optimizer; did you mean 'AdamW'?"),
        ({"optimizer": Optimizer(name="LBFGS")}, "not elementwise"),
        (
            {"optimizer": Optimizer(arguments={"momentum": 0.9})},
            "optimizer.arguments of AdamW: 'momentum' is no argument of AdamW: use one of lr, betas,",
        ),
        ({"optimizer": Optimizer(arguments={"lr": -1.0})}, "Invalid learning rate"),
        ({"optimizer": Optimizer(arguments={"betas": [0.9]})}, "optimizer.arguments of AdamW: IndexError"),
        ({"optimizer": Optimizer(arguments={"betas": [0.9, 0.9, 0.9]})}, "arguments of AdamW: ValueError"),
        ({"model": Model(name="tests.harness.runs.test_feasibility:leaving")}, "SystemExit: 3"),
        ({"tokens_per_rank": 128 * 10**9}, "too big for memory"),
        ({"cluster": Cluster(link="real")}, "set cluster.launcher to 'torchrun'"),
        (
            {"cluster": SHAPED.model_copy(update={"link": "shaped"})},
            "link = 'shaped': needs 2 machines for 2 nodes",
        ),
        ({"cluster": Cluster(launcher="hosts", hosts=("a",))}, "1 name; expected one for each of 2 nodes"),
        ({"cluster": GPUS}, "4 ranks need a GPU each, but this machine has 0"),
        ({"cluster": GPUS, "strategy": "single"}, "no GPU"),
        (
            {"strategy": "ddp", "cluster": SHAPED.model_copy(update={"link": "paced"})},
            "delays only our own engine's messages",
        ),
        ({"model": Model(name="vit-small"), "sequence": 64}, "reads images"),
        (
            {"model": Model(name="vit-small"), "corpus": "glyphs"},
            "cannot cut an image into 128 square patches",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_problems(fields: dict[str, Any], message: str) -> None:
    """The reason why a trial cannot run is one line with the numbers."""
    problems = forecast_of(**fields).problems
    assert any(message in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_memory_with_an_optimizer_that_is_not_there(strategy: str) -> None:
    """The size of an unknown optimizer's state is unknown, so that no memory is predicted."""
    assert forecast_of(strategy=strategy, optimizer=Optimizer(name="Adamw")).memory is None


def broken(sequence: int) -> None:
    """A user's model that cannot be built."""
    raise RuntimeError("two\nlines")


def leaving(sequence: int) -> None:
    """A user's model that ends the process."""
    raise SystemExit(3)


def test_huge_accumulation() -> None:
    """A million micro-batches are planned as quickly as one, and send a million times as much."""
    first, few, many = (forecast_of(strategy="hpz", accumulation=n).inter or 0 for n in (1, 2, 1_000_000))
    assert many == first + 999_999 * (few - first) > 0


@pytest.mark.parametrize(
    ("optimizer", "per_element"),
    [
        (Optimizer(), 8),
        (Optimizer(name="SGD", arguments={"lr": 0.1}), 0),
        (Optimizer(name="SGD", arguments={"lr": 0.1, "momentum": 0.9}), 4),
        (Optimizer(name="RMSprop", arguments={"lr": 0.1}), 4),
        (Optimizer(name="Adam", arguments={"lr": 0.1, "amsgrad": True}), 12),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_optimizer_state(strategy: str, optimizer: Optimizer, per_element: int) -> None:
    """The predicted bytes of the optimizer are those that it holds after one step."""
    memory = forecast_of(strategy=strategy, optimizer=optimizer).memory or {}
    assert memory["optimizer"] == per_element * memory["masters"] // 4


def test_frozen_root_is_gathered_around_the_rest() -> None:
    """Both units of the root, trained and frozen, are gathered together with the largest other unit."""
    frozen = forecast_of(
        model=Model(name="tests.harness.runs.test_feasibility:half_frozen"),
        strategy="exact",
        policy=PolicyChanges(max_padding=9.0),
        sequence=32,
        tokens_per_rank=32,
    )
    assert frozen.memory["gathered"] == 4 * (64 * 128 + 64 * 256 + 64 * 64)
    assert frozen.parameters == 64 * 128 + 64 * 256 + 2 * 64 * 64
    assert frozen.problems == ()


def half_frozen(sequence: int) -> Any:
    """A user's model with a frozen and a trained part around its blocks."""
    from torch import nn

    model = nn.Module()
    model.frozen = nn.Linear(64, 128, bias=False).requires_grad_(False)
    model.trained = nn.Linear(64, 256, bias=False)
    model.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    return model


def test_no_namespaces() -> None:
    """On a machine without namespaces, trials that need them are refused with the reason, and others are not."""
    host = Host(memory=24 * GIB, gpus=(), namespaces=lambda: "forbidden here")
    cluster = SHAPED.model_copy(update={"link": "namespaces"})
    assert forecast_of(host, cluster=cluster).problems == ("cluster.link = 'namespaces': forbidden here",)
    assert "forbidden here" in forecast_of(host, strategy="fsdp2", cluster=SHAPED).problems[0]
    for fields in ({"cluster": SHAPED}, {"strategy": "single", "cluster": SHAPED}, {"strategy": "ddp"}):
        assert forecast_of(host, **fields).problems == ()


def test_ranks_may_share_a_gpu() -> None:
    """Staged ranks need one GPU, whose memory they share; without a GPU they cannot run."""
    cluster = {"device": "cuda", "transport": "staged"}
    for gpus, message in (((), "no GPU"), ((16 * GIB,), ""), ((2**20,), "4 ranks that share a GPU need")):
        host = Host(24 * GIB, gpus, lambda: None)
        problems = forecast_of(host, strategy="zeropp", cluster=cluster).problems
        assert message in "; ".join(problems)
        assert bool(problems) == bool(message)


def test_nccl_is_not_paced_by_a_machine_without_namespaces() -> None:
    """Link auto with a rate is refused for NCCL in one line, with the reason and the ways out; staged is not."""
    host = Host(24 * GIB, (16 * GIB,) * 4, lambda: "forbidden here")
    shaped = {"device": "cuda", "rate": "1 Gbit/s"}
    (problem,) = forecast_of(host, cluster=shaped | {"transport": "nccl"}).problems
    assert "cluster.link = 'auto' would be 'paced' here (forbidden here)" in problem
    assert "cluster.transport = 'staged'" in problem
    assert "\n" not in problem
    assert forecast_of(host, cluster=shaped | {"transport": "staged"}).problems == ()
    assert forecast_of(host, cluster={"device": "cuda", "transport": "nccl"}).problems == ()


def test_gpus() -> None:
    """On GPUs a rank must fit its device, and every rank needs one."""
    host = Host(memory=24 * GIB, gpus=(16 * GIB,) * 4, namespaces=lambda: None)
    assert forecast_of(host, cluster=GPUS).problems == ()
    (problem,) = forecast_of(host, cluster=GPUS, model=Model(name="gpt-18b")).problems
    assert "a GPU here has 16.00 GiB" in problem


@pytest.mark.parametrize("transport", ["nccl", "staged", "gloo", "shm"])
def test_only_over_nccl_small_blocks_are_predicted_in_pairs(transport: Any) -> None:
    """The step that is simulated has the small units that the engine gathers in pairs, and none where it does not."""
    device: Any = "cuda" if transport in ("nccl", "staged") else "cpu"
    step = forecast_of(cluster=Cluster(device=device, transport=transport)).step
    assert step is not None
    blocks = frozenset(index for index, unit in enumerate(step.units) if not unit.outer)
    assert step.small == (blocks if transport == "nccl" else frozenset())


def test_generations_are_planned() -> None:
    """Decoding sends one gather per token or, with hpZ, only one between nodes in all, and nothing for training."""
    decode = {"workload": "generate", "generate": Generate(prompt=8, tokens=10), "cluster": SHAPED}
    zero3, hpz, ddp = (forecast_of(strategy=name, **decode) for name in ("zero3", "hpz", "ddp"))
    assert zero3.inter == 10 * (hpz.inter or 0)
    for decoding in (zero3, hpz, ddp):
        assert decoding.memory["masters"] > 0
        assert not {"gradients", "optimizer"} & set(decoding.memory)


@pytest.mark.parametrize("name", ["bert-small", "vit-small"])
def test_other_models_are_planned(name: str) -> None:
    """An encoder and a vision model fit ZeRO++'s blocks on two nodes of two ranks, each with its own data."""
    images = {"corpus": "glyphs", "sequence": 64} if name == "vit-small" else {}
    model = forecast_of(model=Model(name=name), cluster=SHAPED, **images)
    assert model.problems == ()
    assert 3.2e6 < model.parameters < 3.4e6


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_limit_is_exact(strategy: str) -> None:
    """A trial fits a limit of exactly the bytes that it holds; with one byte less it is recorded as failed, which is
    no problem of the machine.
    """
    held = sum((forecast_of(strategy=strategy).memory or {}).values())
    assert forecast_of(strategy=strategy, memory_limit=f"{held / 2**20:.9f} MiB").failure is None
    trial = Trial(strategy=strategy, model=Model(name="gpt-small"))
    (limited,) = forecast([trial.model_copy(update={"memory_limit": held - 1})], HERE)
    assert limited.failure.kind == "memory"
    assert f"holds {held:,} bytes" in limited.failure.message
    assert f"memory_limit is {held - 1:,}" in limited.failure.message
    assert limited.problems == ()


def test_what_is_offloaded_is_foreseen_and_not_the_devices() -> None:
    """Offloaded parts are counted apart from the device's and do not count towards its limit; copies of a step are
    predicted.
    """
    shares = PolicyChanges(offload_optimizer=1.0, offload_weights=1.0, max_reuse=0)
    plain, moved = (
        forecast([Trial(strategy="zeropp", policy=policy)], HERE)[0]
        for policy in (PolicyChanges(max_reuse=0), shares)
    )
    for part in ("masters", "optimizer", "secondary"):
        assert (moved.memory[part], moved.memory[f"host_{part}"]) == (0, plain.memory[part])
    assert plain.copied == 0
    # gradients in fp32; the frame once, int8; the secondary of two ranks out and in
    assert (
        moved.copied
        == plain.memory["gradients"] + moved.memory["host_frames"] + 2 * plain.memory["secondary"]
    )
    device = sum(size for part, size in moved.memory.items() if not part.startswith("host_"))
    limited = Trial(strategy="zeropp", policy=shares, memory_limit=f"{device / 2**20 + 1} MiB")  # type: ignore[arg-type]
    assert forecast([limited], HERE)[0].failure is None


GPU_LINE = re.compile(r"^# With (\d+) GPUs, set in \[defaults.cluster\]: (.+)\.$", re.MULTILINE)


def _on_gpus(suite: Path, folder: Path) -> tuple[int, list[Trial]]:
    """Return the number of GPUs in a suite's header, and the trials with the fields of the header in the cluster
    table.
    """
    text = suite.read_text()
    header = GPU_LINE.search(text)
    assert header, "its header does not say what its cluster block has on GPUs"
    fields = dict(field.split(" = ") for field in header[2].split(", "))
    before, mark, block = text.partition("[defaults.cluster]\n")
    block, rest, after = block.partition("\n[")
    kept = [line for line in block.splitlines() if line.partition(" = ")[0] not in fields]
    written = [f"{name} = {value}" for name, value in fields.items()]
    path = folder / suite.name
    for removed in re.findall(r"^# Then remove (\S+) from \[matrix\]\.$", text, re.MULTILINE):
        after = re.sub(rf"^{re.escape(removed)} = .*\n?", "", after, flags=re.MULTILINE)
    path.write_text(before + mark + "\n".join([*written, *kept]) + rest + after)
    return int(header[1]), list(load(path).trials)


NO_HEADER = (
    "engine", "inner_rate", "kept_weights", "ladder", "lossless", "methods", "muon", "paper_scale", "peers",
    "peers_hook", "peers_search", "quickstart_loss", "ranks", "signs", "slow_node", "tutorial_zeropp",
)  # fmt: skip


@pytest.mark.parametrize(
    "suite",
    [
        path
        for path in sorted(FOLDER.glob("*.toml"))
        if path.stem not in NO_HEADER and not path.stem.startswith("scale_")
    ],
    ids=lambda path: path.stem,
)
def test_suites_run_on_as_many_gpus_as_their_headers_say(suite: Path, tmp_path: Path) -> None:
    """With the fields of its header, ``plan`` accepts all trials of a suite on the stated number of GPUs of 80 GiB;
    with one GPU less it refuses the trials that need all.
    """
    gpus, trials = _on_gpus(suite, tmp_path)
    for count in (gpus, gpus - 1):
        host = Host(2**39, (80 * 2**30,) * count, lambda: None)
        for planned in forecast(trials, host):
            needs = 1 if planned.trial.strategy == "single" else planned.trial.topology().world
            assert bool(planned.problems) == (needs > count), planned.problems


@pytest.mark.parametrize(("suite", "gpus", "gib"), [("gpu_node", 8, 80), ("tutorial_zeropp", 16, 32)])
def test_suites_for_clusters_run_on_nodes_as_their_headers_say(suite: str, gpus: int, gib: int) -> None:
    """All trials fit nodes with the number and size of GPUs in the header; none fits nodes with one GPU less."""
    trials = load(FOLDER / f"{suite}.toml").trials
    for count in (gpus, gpus - 1):
        host = Host(2**40, (gib * 2**30,) * count, lambda: "no namespaces")
        for planned in forecast(trials, host):
            assert bool(planned.problems) == (gpus > count), planned.problems


@pytest.mark.parametrize("suite", ["quickstart", "nodes", "models"])
def test_a_rate_across_hosts_wants_a_link_that_holds_it(suite: str, tmp_path: Path) -> None:
    """With two hosts of eight GPUs under torchrun, a rate is refused on a real link and accepted on a shaped one."""
    _, trials = _on_gpus(FOLDER / f"{suite}.toml", tmp_path)
    host = Host(2**39, (80 * 2**30,) * 8, lambda: "no namespaces")
    for link, rate in (("real", None), ("real", 100.0), ("shaped", 100.0)):
        changes = {"link": link, "launcher": "torchrun", "rate": rate, "latency": None}
        across = [
            trial.model_copy(update={"cluster": trial.cluster.model_copy(update=changes)})
            for trial in trials
            if trial.strategy not in PEERS
        ]
        for planned in forecast(across, host):
            assert bool(planned.problems) == (link == "real" and rate is not None), planned.problems


@pytest.mark.parametrize(
    ("fields", "paced"),
    [
        ({"rate": 50.0}, True),
        ({}, False),
        ({"rate": 50.0, "nodes": 1}, False),
        ({"rate": 50.0, "link": "paced"}, False),
    ],
)
def test_a_link_that_becomes_paced_is_foretold(fields: dict[str, Any], *, paced: bool) -> None:
    """If link ``auto`` with a rate cannot use namespaces, the prediction has the reason."""
    without = replace(HERE, namespaces=lambda: "pyroute2 is not installed")
    trial = Trial(cluster=Cluster.model_validate(fields, context=CANONICAL))
    (prediction,) = forecast([trial], without)
    assert prediction.paced == ("pyroute2 is not installed" if paced else None)
    assert forecast([trial], HERE)[0].paced is None


@pytest.mark.parametrize(
    "fields", [{"slow": 0.5, "nodes": 3, "rate": 50.0}, {"inner_rate": 9.0, "rate": 50.0}, {"latency": 1.0}]
)
def test_what_only_namespaces_can_is_a_problem_without_them(fields: dict[str, Any]) -> None:
    """Fields that need namespaces are refused without them, also for link ``auto``."""
    without = replace(HERE, namespaces=lambda: "no kernel")
    trial = Trial(cluster=Cluster.model_validate(fields, context=CANONICAL))
    assert any("needs network namespaces: no kernel" in p for p in forecast([trial], without)[0].problems)
