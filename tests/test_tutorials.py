"""The tutorials' commands run as they stand there, and their configurations are DeepSpeed's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp as deepspeed
from harness.cli import main
from harness.suites.model_sizes import GPTShape
from harness.workloads.models import GPT
from impl.comm.mesh import Mesh
from impl.deepspeed.config_to_policy import QGZ, QWZ, recipe
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.harness.train.test_loop import losses
from tests.impl.deepspeed.test_config_to_policy import SNIPPETS, ZERO
from tests.support.params import nightly
from tests.support.ranks import each_rank, on_processes
from tests.support.training import booked, mean_losses, single
from tests.test_readme import torchrun

PAGES = Path(__file__).parents[1] / "docs" / "guide"
FILES = re.compile(r"^cat > (\S+) <<'JSON'\n(.*?)^JSON\n", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["zero.md", "zeropp.md"])
def test_every_command_of_a_tutorial_runs(
    page: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder, in seconds, with a line a step; stages 1 and 2 have equal losses in fp32."""
    monkeypatch.chdir(tmp_path)
    trained: list[list[float]] = []
    for block in blocks(page):
        for name, text in FILES.findall(block):
            (tmp_path / name).write_text(text, encoding="utf-8")
        for line in FILES.sub("", block).replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "zeropp"
            assert main(arguments) == 0, capfd.readouterr().err
            values = losses(capfd.readouterr().out)
            assert len(values) == (2 if arguments[0] == "train" and "--plan" not in arguments else 0)
            trained += [values] if values else []
    # ln 256 and a little.  A loss is over 64 bytes of the sources of whichever Python runs this; 5.23 to 5.58 were
    # seen.
    assert all(abs(loss - 5.55) < 0.6 for values in trained for loss in values)
    if page == "zero.md":
        assert trained[0] == pytest.approx(trained[1], abs=2e-6)


def configurations(page: str) -> list[Any]:
    return [json.loads(text) for block in blocks(page) for _, text in FILES.findall(block)]


def test_the_configurations_are_those_of_deepspeed_s_tutorials() -> None:
    """Key by key and value by value; the last is the one before with a threshold and hpZ's size of a toy."""
    *shown, toy = configurations("zero.md") + configurations("zeropp.md")
    assert shown == [{ZERO: keys} for keys in SNIPPETS.values()]
    changed = {"stage3_param_persistence_threshold": 1000, "zero_hpz_partition_size": 2}
    assert toy == {ZERO: shown[-1][ZERO] | changed}


@each_rank(2, 2)
def test_the_toy_s_blocks_travel_as_int8_and_int4(mesh: Mesh) -> None:
    """Forward gathers send three frames of int8 for each shard, reductions three of int4, on 2 x 2 ranks."""
    table = configurations("zeropp.md")[-1] | {"fp16": {"enabled": True}}
    net, tokens = GPT(GPTShape(layers=2, width=64, heads=2), 128), torch.zeros(1, 128, dtype=torch.int64)
    zero = shard(net, mesh=mesh, policy=recipe(table, topology=mesh.topology).policy)
    zero.scaler.scaled(net(tokens, tokens)).backward()
    cut = [unit.geometry for unit in zero.units if not unit.geometry.persistent]
    assert len(cut) == 3  # the root and two blocks
    for unit in cut:
        for phase, purpose, codec in (("forward", "weights", QWZ), ("backward", "gradients", QGZ)):
            sent = booked(zero, phase=phase, purpose=purpose, unit=unit.name)
            assert sent == 3 * codec.frame_bytes(unit.shard)


TUTORIALS = {
    "1.5b": ["--model-parallel-size", "1", "--num-layers", "48", "--hidden-size", "1600",
             "--num-attention-heads", "16", "--batch-size", "1"],
    "10b": ["--model-parallel-size", "1", "--num-layers", "50", "--hidden-size", "4096",
            "--num-attention-heads", "32", "--batch-size", "1", "--checkpoint-activations"],
    "18b": ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--num-layers", "40",
            "--hidden-size", "6144", "--seq-length", "512", "--num-attention-heads", "32", "--batch-size",
            "1", "--zero-stage", "3", "--deepspeed-activation-checkpointing", "--fp16",
            "--checkpoint-activations"],
}  # fmt: skip
"""The flags of the tutorials' launch lines."""


@pytest.mark.parametrize(
    ("flags", "snippet"),
    [
        ("1.5b", "zero_tutorial stage 1"),
        ("10b", "zero_tutorial stage 2"),
        ("1.5b", "zero_tutorial stage 3 offload"),
        *nightly(("10b", "zero_tutorial stage 3 offload")),
        ("18b", "zeropp_tutorial"),
    ],
)
def test_the_tutorials_flags_and_files_are_planned_as_typed(
    flags: str, snippet: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the tutorials' sizes, from a file called ``.config``: a finding for each key, and the table."""
    file = tmp_path / "ds.config"
    file.write_text(json.dumps({ZERO: SNIPPETS[snippet]}), encoding="utf-8")
    arguments = [*TUTORIALS[flags], "--deepspeed_config", str(file), "--ranks-per-node", "8"]
    assert main(["train", "--plan", *arguments]) == 0, capfd.readouterr().err
    out = capfd.readouterr().out
    for key in SNIPPETS[snippet]:
        assert f"{ZERO}.{key} = " in out
    assert f" {SNIPPETS[snippet]['stage']} <" in out
    if "stage 3" in snippet:  # of 6,000,000 elements that may be live, fewer than one layer's
        found = r"stage3_max_live_parameters = 6000000: changed: unit '\S+' cannot be cut, so its [\d,]+ elements are"
        assert re.search(found, out)


# The Python that the tutorials show, of Megatron's names


class RowParallelLinear(nn.Module):
    """Hands its bias back, as Megatron's linear layers do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), self.bias


class ParallelMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense_h_to_4h = RowParallelLinear(width, 4 * width)
        self.dense_4h_to_h = RowParallelLinear(4 * width, width)
        if self.dense_h_to_4h.bias is not None:
            deepspeed.zero.register_external_parameter(self, self.dense_h_to_4h.bias)

    def forward(self, hidden_states: Tensor) -> Any:
        intermediate_parallel, bias_parallel = self.dense_h_to_4h(hidden_states)
        return self.dense_4h_to_h(F.gelu(intermediate_parallel + bias_parallel))


class ParallelTransformerLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.attention = nn.LayerNorm(width), nn.Module()
        self.attention.dense = RowParallelLinear(width, width)
        self.mlp = ParallelMLP(width)
        if self.attention.dense.bias is not None:
            deepspeed.zero.register_external_parameter(self, self.attention.dense.bias)
        if self.mlp.dense_4h_to_h.bias is not None:
            deepspeed.zero.register_external_parameter(self, self.mlp.dense_4h_to_h.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        attention_output, attention_bias = self.attention.dense(self.input_layernorm(hidden_states))
        layernorm_input = hidden_states + attention_output + attention_bias
        mlp_output, mlp_bias = self.mlp(layernorm_input)
        return layernorm_input + mlp_output + mlp_bias  # type: ignore[no-any-return]


class GPT2Model(nn.Module):
    def __init__(self, num_tokentypes: int = 0, *, parallel_output: bool = True) -> None:
        super().__init__()
        del num_tokentypes, parallel_output
        self.word_embeddings = nn.Embedding(24, 16)
        self.position_embeddings = nn.Embedding(8, 16)
        with deepspeed.zero.GatheredParameters(self.position_embeddings.weight, modifier_rank=0):
            nn.init.normal_(self.position_embeddings.weight)
        self.layers = nn.ModuleList(ParallelTransformerLayer(16) for _ in range(2))
        deepspeed.zero.register_external_parameter(self, self.word_embeddings.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x[:, :-1], self.word_embeddings.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_loss(net: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return net(torch.randint(24, (2, 8), generator=generator))  # type: ignore[no-any-return]


def _megatron(mesh: Mesh, remote_device: str | None, zero_stage: int) -> Any:
    """What the tutorial types, in two data parallel groups; Megatron's helpers are stood in for."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mpu = SimpleNamespace(get_data_parallel_group=lambda: groups[mesh.rank % 2])
    get_args = lambda: SimpleNamespace(remote_device=remote_device, zero_stage=zero_stage)  # noqa: E731
    torch.manual_seed(0)
    init = deepspeed.zero.Init(data_parallel_group=mpu.get_data_parallel_group(),
                             remote_device=get_args().remote_device,
                             enabled=get_args().zero_stage==3)  # fmt: skip
    with init:
        model = GPT2Model(num_tokentypes=0, parallel_output=True)
    policy = preset("exact", stage=zero_stage, memory=MemoryLimits(max_padding=99.0))
    zero = shard(model, mesh=init.mesh, policy=policy)
    optimizer, losses = torch.optim.AdamW(zero.param_groups(), lr=1e-2), []
    for step in range(3):
        loss = tokens_loss(model, step, init.mesh.rank)
        loss.backward()
        zero.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tuple(value.shape) for name, value in zero.full_state_dict().items()}


@pytest.mark.parametrize(
    ("remote_device", "zero_stage"), [("cpu", 3), *nightly(("none", 3), (None, 3), ("cpu", 1), ("meta", 2))]
)
def test_the_tutorial_s_python_trains_as_one_process(remote_device: str | None, zero_stage: int) -> None:
    """Init by a data parallel group, GatheredParameters in a constructor, three external parameters."""
    found = on_processes(Topology(1, 4), _megatron, remote_device, zero_stage)
    torch.manual_seed(0)
    net = GPT2Model()
    wanted = single(net, 2, 3, loss_of=tokens_loss)
    for first in (0, 1):
        assert mean_losses([found[first], found[first + 2]]) == pytest.approx(wanted, rel=1e-5)
    assert found[0][1] == {name: tuple(value.shape) for name, value in net.state_dict().items()}


@pytest.mark.long
def test_the_script_of_the_zero_tutorial_runs_under_torchrun(tmp_path: Path) -> None:
    """As it stands there, on two ranks."""
    text = (PAGES / "zero.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# own\.py.*?)```", text, re.DOTALL)
    (tmp_path / "own.py").write_text(script, encoding="utf-8")
    (tmp_path / "ds_zero_stage_1.json").write_text(json.dumps(configurations("zero.md")[0]), encoding="utf-8")
    output = "\n".join(torchrun(tmp_path / "own.py", 2))
    first, second = map(float, re.findall(r"^step \d: loss ([\d.]+)$", output, re.MULTILINE))
    assert second < first
