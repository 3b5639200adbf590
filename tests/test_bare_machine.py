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

from tests.test_readme import python_example

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
IMPORTS = """
import importlib, pkgutil
import impl

for module in pkgutil.walk_packages(impl.__path__, "impl."):
    importlib.import_module(module.name)
"""
ALONE = {  # of the README's loop, for one rank, which sees one batch again and again
    'init_process_group("gloo")': 'init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())',
    "nodes=2, ranks_per_node=2": "nodes=1, ranks_per_node=1",
    "torch.randn(8, 1024)": "torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))",
}
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
    """All of impl is imported, and the README's loop trains, without what the harness needs."""
    loop = python_example("loop.py")
    for ours, alone in ALONE.items():
        assert ours in loop
        loop = loop.replace(ours, alone)
    done = without(IMPORTS + loop)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5, done.stderr
    assert losses[1] < losses[0]


@pytest.mark.long
def test_tests_for_a_gpu_are_collected_on_a_bare_machine() -> None:
    """None of them imports what is not there, and each place has some."""
    options = ("-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = without("import pytest; sys.exit(pytest.main(sys.argv[1:]))", *GPU_TESTS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in GPU_TESTS:
        assert path in done.stdout
