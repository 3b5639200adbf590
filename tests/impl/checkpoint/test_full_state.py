"""Whole state dicts are read from checkpoints and exported."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from impl.checkpoint.full_state import consolidated, export
from impl.checkpoint.save_load import CheckpointError, save
from impl.comm.mesh import Mesh
from impl.engine.narrowing import dtype_of
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.impl.checkpoint.checkpointed import ODD, same
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import model

ZEROPP = preset("zeropp", memory=ROOMY)
TIED = model(tied=True)


def _saved(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module) -> dict[str, Tensor]:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=policy)
    save(folder, zero)
    return zero.full_state_dict()


@pytest.mark.parametrize("net", [TIED, ODD], ids=["tied", "odd"])
def test_a_checkpoint_is_a_plain_state_dict(tmp_path: Path, net: nn.Module) -> None:
    """Without ranks or the model, the state dict equals the unsharded model's, with tied weights under both names."""
    state, *_ = on_threads(Topology(2, 2), _saved, tmp_path, ZEROPP, net)
    loaded = consolidated(tmp_path)
    assert list(loaded) == list(net.state_dict())
    assert same(loaded, state)
    assert same(loaded, net.state_dict())


@pytest.mark.parametrize("name", [torch.float32, torch.bfloat16, torch.float16, "bf16", "fp16"])
def test_an_export_is_the_state_in_one_file(tmp_path: Path, name: torch.dtype | str) -> None:
    """Parameters have the requested type, buffers their own; engines load the file, 16 bits as fp32 masters."""
    on_threads(Topology(1, 3), _saved, tmp_path, ZEROPP, TIED)
    out, dtype = tmp_path / "out", dtype_of(name)
    assert export(tmp_path, out, dtype=name) == ()
    wanted = {name: value.to(dtype) for name, value in TIED.state_dict().items()} | {"scale": TIED.scale}
    assert same(load_file(out), wanted)

    def loads(mesh: Mesh) -> None:
        zero = shard(model(tied=True), mesh=mesh, policy=ZEROPP)
        zero.load_full_state_dict(load_file(out))
        assert same(zero.full_state_dict(), {name: value.float() for name, value in wanted.items()})

    on_threads(Topology(2, 2), loads)


def test_an_export_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """An existing file, a missing folder and a folder without checkpoints are refused; nothing is left behind."""
    on_threads(Topology(1, 1), _saved, tmp_path / "run", ZEROPP, TIED)
    (tmp_path / "there").touch()
    for folder, path, message in [
        ("run", "there", "there: exists already"),
        ("run", "no/out", "No such file"),
        (".", "out", "no checkpoint in it"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / folder, tmp_path / path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


@pytest.mark.parametrize("dtype", ["fp16", torch.float8_e5m2, torch.float8_e4m3fn])
def test_an_export_of_values_that_overflow_is_refused(tmp_path: Path, dtype: torch.dtype | str) -> None:
    """The refusal has name, count and largest value, and no file is left; if allowed, they are written and reported."""
    net = copy.deepcopy(TIED)
    with torch.no_grad():
        net.head.weight[0, :3] = torch.tensor([1e5, -3e6, torch.nan])
        net.blocks[0].up.bias.fill_(1e-30)
    on_threads(Topology(2, 1), _saved, tmp_path / "run", ZEROPP, net)
    out = tmp_path / "out"
    with pytest.raises(
        CheckpointError, match=r"overflow .*: 'embed.weight' \(2 of 256, largest -3e\+06\); ex"
    ):
        export(tmp_path / "run", out, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    overflow, vanished, not_finite = export(tmp_path / "run", out, dtype=dtype, allow_overflow=True)
    assert "'embed.weight' (2 of 256, largest -3e+06)" in overflow
    assert "became 0 in " in vanished
    assert "'blocks.0.up.bias' (40 of 40)" in vanished
    assert "NaN, as they were before the cast: 'embed.weight' (1 of 256)" in not_finite
    written, wanted = load_file(out)["head.weight"], net.head.weight.detach().to(dtype_of(dtype))
    assert torch.equal(written.float().nan_to_num(), wanted.float().nan_to_num())
    for name in ("bf16", "fp32"):
        (said,) = export(tmp_path / "run", tmp_path / name, dtype=name)
        assert "'embed.weight' (1 of 256)" in said


def test_an_export_in_no_type_for_weights_is_refused(tmp_path: Path) -> None:
    """A type that weights cannot have is refused, by name or as torch's; nothing is written."""
    on_threads(Topology(1, 1), _saved, tmp_path / "run", ZEROPP, TIED)
    for dtype in ("half", torch.int8):
        with pytest.raises(CheckpointError, match=r"dtype=.*: expected one of 'fp32', 'bf16', 'fp16', torch"):
            export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
