"""A lent GPU comes with torch, NumPy, CuPy and pytest: the engine and the GPU's tests need no more.

Without a network the packages of suites and reports cannot be installed; docs/guide/gpu.md lists what runs.
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
    "jinja2",  # torch's dependency, not ours
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
ALONE = {  # changes of the README's loop for one rank, which sees one batch every time
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
    """Run ``code`` without the modules of ABSENT."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**inherited, "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.long
def test_the_engine_trains_on_a_bare_machine() -> None:
    """All of impl is imported, and the README's loop trains, without the packages of the harness."""
    loop = python_example("loop.py")
    for line, replacement in ALONE.items():
        assert line in loop
        loop = loop.replace(line, replacement)
    process = without(IMPORTS + loop)
    losses = [float(line.split()[1]) for line in process.stdout.splitlines()]
    assert len(losses) == 5, process.stderr
    assert losses[1] < losses[0]


@pytest.mark.long
def test_tests_for_a_gpu_are_collected_on_a_bare_machine() -> None:
    """None of them imports an absent module, and each path has some."""
    options = ("-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    process = without("import pytest; sys.exit(pytest.main(sys.argv[1:]))", *GPU_TESTS, *options)
    assert process.returncode == 0, process.stdout + process.stderr
    for path in GPU_TESTS:
        assert path in process.stdout
