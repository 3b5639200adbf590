"""Libraries are built once and are complete when found; a failure is one line."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from impl.cpu import build
from tests.support import needs


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.needs("c++")
def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    """Of four processes that need the library at the same time, one builds it, and leaves nothing else."""
    real, log = next(filter(None, map(needs.program, build.COMPILERS))), tmp_path / "log"
    whole = build.library(build.user_folder())  # which takes no time to copy
    copies = f'for last; do :; done; exec cp {whole} "$last"'
    command = script(
        tmp_path / "cxx",
        f'case "$*" in *-shared*) echo built >> {log}; sleep 0.3; {copies};; esac; exec {real} "$@"',
    )
    code = (
        "import sys; from pathlib import Path; from impl.cpu import build; "
        "print(build.library(Path(sys.argv[1]), sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "cache"), command]
    root = Path(build.__file__).parents[2]
    ranks = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(4)]
    printed = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert len(printed) == 1
    assert Path(printed.pop()).exists()
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".so", ".lock"}
    assert log.read_text(encoding="utf-8").count("built") == 1


@pytest.mark.parametrize(
    ("named", "folder"), [("/caches", "/caches"), ("caches", "/home/me/.cache"), (None, "/home/me/.cache")]
)
def test_libraries_belong_to_the_users_caches(
    monkeypatch: pytest.MonkeyPatch, named: str | None, folder: str
) -> None:
    """Libraries are in XDG_CACHE_HOME if that is absolute, else in ``~/.cache``."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert build.user_folder() == Path(folder, "zeropp-bench", "kernels")


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the compilers that would do."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        build.BuildError, match=r"no C\+\+ compiler is installed: install one of c\+\+, g\+\+"
    ):
        build.library(tmp_path)


COMPLAINS = (
    'case "$*" in *--version*) echo 1;; *) echo "note: hm" >&2; echo "error: no such flag" >&2; exit 3;; esac'
)
ELSEWHERE = "set XDG_CACHE_HOME to a folder that can be written"


@pytest.mark.parametrize(
    ("body", "folder", "message"),
    [
        (COMPLAINS, "cache", "cxx failed with status 3: error: no such flag; update or repair this compiler"),
        (
            "exit 0",
            "cache",
            f"cannot keep compiled kernels in .*/cache: No such file or directory; {ELSEWHERE}",
        ),
        (None, "cache", "cxx does not run: .*; check that this compiler works"),
        (
            COMPLAINS,
            "file/kernels",
            f"cannot keep compiled kernels in .*file/kernels: Not a directory; {ELSEWHERE}",
        ),
    ],
    ids=["fails", "writes nothing", "is no program", "has no folder"],
)
def test_a_library_that_cannot_be_built_is_one_line(
    tmp_path: Path, body: str | None, folder: str, message: str
) -> None:
    """The error names the command, its status and first error, or the folder; no library is left."""
    (tmp_path / "file").touch()
    command = str(tmp_path / "cxx") if body is None else script(tmp_path / "cxx", body)
    with pytest.raises(build.BuildError, match=f"^.*{message}$"):
        build.library(tmp_path / folder, command)
    assert {path.suffix for path in tmp_path.glob("cache/*")} <= {".lock"}


def test_the_name_changes_with_what_makes_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler, other flags, another processor or another source make another library."""
    first, second = (script(tmp_path / name, f"echo {name}") for name in ("one", "two"))
    source = tmp_path / "kernels.cpp"
    source.write_text("other", encoding="utf-8")
    keys = {build._key(first, build.FLAGS), build._key(second, build.FLAGS)}
    others = {"FLAGS": ("-O1",), "_processor": lambda: "another", "SOURCE": source, "HEADERS": (source,)}
    for name, value in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            keys.add(build._key(first, build.FLAGS))
    assert len(keys) == 6
