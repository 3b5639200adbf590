"""Flags in shared memory are set with release and read with acquire, so no row is read before it is complete."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from impl.cpu import build
from tests.support import needs

LITMUS = Path(__file__).with_name("message_passing.cpp")
INCLUDE = f"-I{build.SOURCE.parent}"


@pytest.mark.needs("c++")
def test_no_row_is_read_before_its_flag(tmp_path: Path) -> None:
    """Of a hundred thousand rows that two threads exchange, no word is stale."""
    compiler, program = next(filter(None, map(needs.program, build.COMPILERS))), tmp_path / "litmus"
    command = [compiler, "-std=c++17", "-O2", "-pthread", INCLUDE, str(LITMUS), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program, "100000"], check=True, capture_output=True, text=True)
    assert done.stdout == "0\n"


def _for_aarch64() -> list[str] | None:
    """Returns a compiler for aarch64, if there is one."""
    for name, target in (("aarch64-linux-gnu-g++", []), ("clang++", ["--target=aarch64-linux-gnu"])):
        if path := needs.program(name):
            return [path, *target]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    return None


def test_on_aarch64_the_instructions_release_and_acquire(tmp_path: Path) -> None:
    """On Grace's processors flags are written with ``stlr`` and read with ``ldar`` or ``ldapr``."""
    if (compiler := _for_aarch64()) is None:
        pytest.skip("no compiler for aarch64: install g++-aarch64-linux-gnu, clang, or pip's ziglang")
    source, assembly = tmp_path / "flags.cpp", tmp_path / "flags.s"
    source.write_text(
        '#include "flags.hpp"\n'
        "void set(std::int64_t* flag, std::int64_t number) { release(flag, number); }\n"
        "std::int64_t get(const unsigned char* flags) { return acquire_least(flags, 2, 64); }\n",
        encoding="utf-8",
    )
    subprocess.run(
        [*compiler, "-std=c++17", "-O2", INCLUDE, "-S", str(source), "-o", str(assembly)], check=True
    )
    text = assembly.read_text(encoding="utf-8")
    assert len(re.findall(r"\bstlr\s+x", text)) == 1
    assert len(re.findall(r"\bldap?r\s+x", text)) >= 2
