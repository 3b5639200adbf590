"""Tests of the module that users import: its names, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import impl
import zeropp

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "zeropp" / "__init__.py"
HEAVY = (
    "pandas",
    "matplotlib",
    "cupy",
    "pydantic",
    "typer",
)  # only reports, GPUs and the command line need these


def in_python(code: str, *, arguments: tuple[str | Path, ...] = ("-c",)) -> str:
    """Run ``code`` in a new interpreter, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments, code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted(zeropp.__all__))
def test_every_name_is_the_object_where_it_is_defined(name: str) -> None:
    """A name of zeropp is the same object as in the module that defines it, so old imports go on working."""
    home, _, attribute = zeropp._HOME[name].partition(":")
    module = importlib.import_module(home)
    assert getattr(zeropp, name) is (getattr(module, attribute) if attribute else module)
    assert name in dir(zeropp)


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers give each name that is imported when it is used."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = set()
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname or alias.name for alias in node.names}
        else:
            assert isinstance(node, ast.Assign)
            seen |= {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
    assert {name for name in seen if not name.startswith("_")} == {*zeropp.__all__}


def test_a_name_that_does_not_exist_is_an_attribute_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names the attribute, and a package that a module needs and that is missing is named itself."""
    with pytest.raises(AttributeError, match="module 'zeropp' has no attribute 'sard'"):
        _ = zeropp.sard
    (tmp_path / "needing.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(zeropp._HOME, "planned", "needing")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        _ = zeropp.planned
    assert zeropp.__version__ == impl.__version__


def test_importing_zeropp_imports_nothing_else() -> None:
    """``import zeropp`` alone does not even import torch."""
    found = in_python(
        "import sys, zeropp; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert found == "[]"


def test_training_imports_no_packages_of_reports_and_commands() -> None:
    """After ``zeropp.shard``, neither pandas, matplotlib, CuPy, pydantic nor typer is imported."""
    code = f"import sys, zeropp; zeropp.shard, zeropp.mesh; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert in_python(code) == "[]"


def test_the_program_and_the_module_of_one_name_do_not_disturb_one_another(tmp_path: Path) -> None:
    """The script ``zeropp``, whose folder Python searches first, finds the package zeropp, as ``-c`` and ``-m`` do."""
    script = tmp_path / "zeropp"
    script.write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom harness.cli import main\nimport zeropp\n"
        "print(zeropp.__file__)\nsys.exit(main())\n",
        encoding="utf-8",
    )
    module, *text = in_python("--help", arguments=(script,)).splitlines()
    assert module == str(SOURCE)
    assert any("Usage: zeropp" in line for line in text)
    assert in_python("import zeropp; print(zeropp.__file__)") == str(SOURCE)
