"""What a GPU is lent with is torch, NumPy, CuPy and pytest: the engine and the GPU's tests need no more.

A machine without a network cannot install what suites and reports need; docs/guide/gpu.md says what is run
there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = [
    *("pydantic", "pydantic_core", "pyroute2", "platformdirs", "submitit", "typer", "rich", "safetensors"),
    *("pandas", "matplotlib", "seaborn", "scipy"),
    "jinja2",  # torch's own dependency: there, but not ours to use
]
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {ABSENT!r}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
TRAINS = """
import importlib, pkgutil
import torch
import torch.distributed as dist
import impl
from impl.comm.mesh import Mesh
from impl.plan.policy import MemoryLimits, preset
from impl.plan.topology import Topology
from impl.zero import shard

needing = []
for module in pkgutil.walk_packages(impl.__path__, "impl."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        needing.append((module.name.removeprefix("impl."), error.name))
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
policy = preset("zeropp", memory=MemoryLimits(max_padding=9))
zero = shard(net, mesh=Mesh.create(Topology(1, 1)), policy=policy)
optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
losses = []
for _ in range(2):
    loss = net(torch.ones(4, 16)).square().mean()
    loss.backward()
    zero.step(optimizer)
    losses.append(loss.item())
dist.destroy_process_group()
print(needing, losses[1] < losses[0])
"""
GPU_TESTS = (
    "tests/impl/cuda",
    "tests/impl/unit/test_host_memory.py",
    "tests/harness/laws/test_laws.py",
    "tests/bench/test_cuda_codecs.py",
)


def without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the modules of ABSENT are not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**kept, "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.long
def test_the_engine_trains_on_a_bare_machine() -> None:
    """All of impl is imported, and trains, without what the harness needs."""
    done = without(TRAINS)
    assert done.stdout.splitlines()[-1:] == ["[] True"], done.stderr


@pytest.mark.long
def test_tests_for_a_gpu_are_collected_on_a_bare_machine() -> None:
    """None of them imports what is not there, and each place has some."""
    options = ("-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = without("import pytest; sys.exit(pytest.main(sys.argv[1:]))", *GPU_TESTS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in GPU_TESTS:
        assert path in done.stdout
