"""What an own object is made of: each file that changes what it is changes its digests, and no other does."""

from __future__ import annotations

import hashlib
import itertools
import zipfile
from pathlib import Path

import pytest

from harness.suites.trial import Cluster, Model, Optimizer, Trial
from harness.workloads import own_sources
from harness.workloads.input_digests import digests

NET = "def build(sequence): ...\n"
# By what imports: the sources, the file that is edited, and whether that edit counts.
CASES: dict[str, tuple[dict[str, str], str, bool]] = {
    "a module": ({"mine.py": "import helper"}, "helper.py", True),
    "under another name": ({"mine.py": "import helper as h"}, "helper.py", True),
    "a member": ({"mine.py": "from helper import WIDTH"}, "helper.py", True),
    "all members": ({"mine.py": "from helper import *"}, "helper.py", True),
    "transitively": ({"mine.py": "import a", "a.py": "import b", "b.py": "import helper"}, "helper.py", True),
    "in a circle": ({"mine.py": "import a", "a.py": "import mine, helper"}, "helper.py", True),
    "in a function": ({"mine.py": "def f():\n    import helper"}, "helper.py", True),
    "in a method of a class": (
        {"mine.py": "class C:\n    def f(self):\n        from helper import x"},
        "helper.py",
        True,
    ),
    "if there is one": (
        {"mine.py": "try:\n    import helper\nexcept ImportError:\n    helper = None"},
        "helper.py",
        True,
    ),
    "a submodule": ({"mine.py": "import lib.part", "lib/__init__.py": ""}, "lib/part.py", True),
    "a submodule as a member": (
        {"mine.py": "from lib import part", "lib/__init__.py": ""},
        "lib/part.py",
        True,
    ),
    "the package of a submodule": (
        {"mine.py": "import lib.part", "lib/part.py": ""},
        "lib/__init__.py",
        True,
    ),
    "another submodule": (
        {"mine.py": "import lib.part", "lib/__init__.py": "", "lib/part.py": ""},
        "lib/b.py",
        False,
    ),
    "a namespace's": ({"mine.py": "import lib.part"}, "lib/part.py", True),
    "a nested namespace's": ({"mine.py": "from lib.deep import part"}, "lib/deep/part.py", True),
    "by __all__": (
        {"mine.py": "from lib import *", "lib/__init__.py": "__all__ = ['part']"},
        "lib/part.py",
        True,
    ),
    "relative": (
        {"mine.py": "from lib import a", "lib/__init__.py": "", "lib/a.py": "from . import b"},
        "lib/b.py",
        True,
    ),
    "relative, a member": (
        {"mine.py": "from lib import a", "lib/__init__.py": "", "lib/a.py": "from .b import x"},
        "lib/b.py",
        True,
    ),
    "relative, above": (
        {"mine.py": "import lib.in_.a", "lib/__init__.py": "", "lib/in_/a.py": "from .. import b"},
        "lib/b.py",
        True,
    ),
    "importlib": ({"mine.py": "import importlib\nh = importlib.import_module('helper')"}, "helper.py", True),
    "importlib, by another name": (
        {"mine.py": "from importlib import import_module as get\nh = get('helper')"},
        "helper.py",
        True,
    ),
    "importlib, relative": (
        {
            "mine.py": "import lib",
            "lib/__init__.py": "import importlib\nb = importlib.import_module('.b', __name__)",
        },
        "lib/b.py",
        True,
    ),
    "importlib, by a list": (
        {"mine.py": "import importlib\nall_ = [importlib.import_module(n) for n in ['helper', 'os']]"},
        "helper.py",
        True,
    ),
    "importlib, a computed part": (
        {
            "mine.py": "import importlib\ndef f(n): return importlib.import_module(f'lib.{n}')",
            "lib/__init__.py": "",
        },
        "lib/part.py",
        True,
    ),
    "all of a package": (
        {"mine.py": "import lib", "lib/__init__.py": "import pkgutil\nx = [*pkgutil.iter_modules(__path__)]"},
        "lib/part.py",
        True,
    ),
    "__import__": ({"mine.py": "h = __import__('helper')"}, "helper.py", True),
    "by a file's name": (
        {
            "mine.py": "from importlib.util import spec_from_file_location\nf = HERE / 'odd/h.py'",
            "odd/h.py": "import helper",
        },
        "helper.py",
        True,
    ),
    "that file itself": (
        {"mine.py": "from runpy import run_path\nh = run_path('odd/h.py')"},
        "odd/h.py",
        True,
    ),
    "from a folder put into sys.path": (
        {"mine.py": "import sys\nsys.path.append(os.path.join(HERE, 'odd'))\nimport deep"},
        "odd/deep.py",
        True,
    ),
    "data": ({"mine.py": "words = open(HERE / 'words.txt').read()"}, "words.txt", True),
    "data in a folder": (
        {"mine.py": "import os\nx = os.path.join(HERE, 'data', 'words.txt')"},
        "data/words.txt",
        True,
    ),
    "data by a path": (
        {"mine.py": "F = Path(__file__).parent / 'data' / 'words.txt'"},
        "data/words.txt",
        True,
    ),
    "data of a folder named before": (
        {"mine.py": "DATA = Path(__file__).parent / 'data'\nx = (DATA / 'words.txt').read_text()"},
        "data/words.txt",
        True,
    ),
    "data without an ending": ({"mine.py": "x = open('words').read()"}, "words", True),
    "data by its own name": ({"mine.py": "x = Path(__file__).with_suffix('.json')"}, "mine.json", True),
    "data by an f-string": ({"mine.py": "def f(n): return open(f'data/{n}.txt')"}, "data/a.txt", True),
    "data by a sum": ({"mine.py": "x = open('data/' + 'words' + '.txt')"}, "data/words.txt", True),
    "data by a pattern": ({"mine.py": "x = glob.glob('data/*.txt')"}, "data/a.txt", True),
    "data by a pattern in a folder": (
        {"mine.py": "DATA = HERE / 'data'\nx = [*DATA.glob('*.txt')]"},
        "data/a.txt",
        True,
    ),
    "another kind than a pattern's": ({"mine.py": "x = glob.glob('data/*.txt')"}, "data/a.log", False),
    "an ending alone": ({"mine.py": "x = name.endswith('.toml')"}, "mine.toml", False),
    "what it writes by an f-string": ({"mine.py": "def f(n): open(f'{n}.txt', 'w')"}, "a.txt", False),
    "a header of a kernel": (
        {"mine.py": "load(name='k', sources=['k.cu'])", "k.cu": '#include "k.cuh"'},
        "k.cuh",
        True,
    ),
    "data of a helper": ({"mine.py": "import helper", "helper.py": "W = 'words.txt'"}, "words.txt", True),
    "a compiled module": ({"mine.py": "import fast"}, "fast.cpython-311-x86_64-linux-gnu.so", True),
    "a kernel's source": ({"mine.py": "load(name='k', sources=['k.cu'])"}, "k.cu", True),
    "what it writes": ({"mine.py": "open('log.txt', 'a')"}, "log.txt", False),
    "what it writes by a name": (
        {"mine.py": "LOG = 'log.txt'\ndef f(): open(LOG, mode='w')"},
        "log.txt",
        False,
    ),
    "what it saves": ({"mine.py": "torch.save(x, 'weights.pt')"}, "weights.pt", False),
    "what documentation names": ({"mine.py": "'''words.txt'''"}, "words.txt", False),
    "nothing": ({"mine.py": "WIDTH = 64"}, "helper.py", False),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def of_model(name: str = "mine:build", **arguments: str) -> dict[str, str]:
    return digests(Trial(corpus="none", model=Model(name=name, arguments=dict(arguments))))


@pytest.mark.parametrize(("files", "edited", "counts"), CASES.values(), ids=CASES)
def test_an_edit_of_what_it_is_made_of_changes_its_digests(
    folder: Path, files: dict[str, str], edited: str, *, counts: bool
) -> None:
    """However it is imported or named; reading the same files again gives the same digests."""
    write(folder, {edited: "WIDTH = 64", **files})
    if edited not in files:
        write(folder, {edited: "WIDTH = 64"})
    before = of_model()
    assert of_model() == before
    with (folder / edited).open("a") as file:
        file.write("# edited\n")
    assert (of_model() != before) == counts


def test_without_helpers_a_record_has_what_it_had(folder: Path) -> None:
    """The digest of its module alone, by its role; libraries and this project add none."""
    source = "import json, torch, numpy.linalg\nfrom harness.workloads.models import GPT\n" + NET
    (folder / "mine.py").write_text(source)
    assert of_model() == {"model": hashlib.sha256(source.encode()).hexdigest()}


def test_names(folder: Path) -> None:
    """A helper has its own SHA-256, a package that of its list of files; files are called as sources do."""
    write(
        folder,
        {"mine.py": "import one, lib.a, lib.b\nW = 'w.txt'", "one.py": "x", "lib/a.py": "", "lib/b.py": ""},
    )
    write(folder, {"w.txt": "word"})
    found = of_model()
    assert found.keys() == {"model", "module one", "module lib", "file w.txt of mine"}
    assert found["module one"] == hashlib.sha256(b"x\n").hexdigest()
    assert found["file w.txt of mine"] == hashlib.sha256(b"word\n").hexdigest()


def test_the_order_does_not_matter(folder: Path) -> None:
    """Of imports in a source, of what this process has imported, and of named objects."""
    for number, names in enumerate(itertools.permutations(("a", "b", "sys"))):
        write(
            folder,
            {
                f"m{number}.py": f"import {', '.join(names)}",
                "a.py": "import b, c",
                "b.py": "",
                "c.py": "import a",
            },
        )
    helpers = [{k: v for k, v in of_model(f"m{number}:f").items() if k != "model"} for number in range(6)]
    assert helpers == [helpers[0]] * 6
    assert len(helpers[0]) == 3
    both = [
        digests(Trial(corpus="none", model=Model(name=f"{x}:f"), optimizer=Optimizer(name=f"{y}:f")))
        for x, y in (("a", "b"), ("b", "a"))
    ]
    assert [{*found} for found in both] == [{"model", "optimizer", "module c"}] * 2


def test_an_editable_install_counts_and_an_installed_library_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By where the file is: in site-packages, or where packages were installed, it is a library's."""
    places = {"src": True, "lib/site-packages": False, "target": False}
    write(folder, {"target/other-1.0.dist-info/METADATA": ""})
    for number, (place, counts) in enumerate(places.items()):
        write(folder, {f"{place}/installed{number}.py": "", f"m{number}.py": f"import installed{number}"})
        monkeypatch.syspath_prepend(str(folder / place))
        assert (f"module installed{number}" in of_model(f"m{number}:f")) == counts


def test_arguments_and_transports_name_sources_too(folder: Path) -> None:
    """``model.arguments`` a module or a file, ``cluster.transport`` a backend's module."""
    write(folder, {"mine.py": NET, "attention.py": "", "vocab.txt": "", "wires/own.py": ""})
    assert of_model(kind="attention:Flash", vocab="vocab.txt", activation="gelu").keys() == {
        "model", "module attention", "file vocab.txt",
    }  # fmt: skip
    cluster = Cluster(transport="wires.own", link="none")
    assert digests(Trial(corpus="none", cluster=cluster)).keys() == {"transport"}


def test_what_cannot_be_parsed_or_read_is_no_error(folder: Path) -> None:
    """Neither are imports of what does not exist, nor archives and files of other kinds."""
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr("zipped.py", "")
    write(
        folder,
        {"mine.py": "import broken, missing.part, latin, zipped\nfrom ...... import far\nX = '/proc/uptime'"},
    )
    write(folder, {"broken.py": "def ("})
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    assert of_model().keys() == {"model", "module broken", "module latin"}
    assert own_sources.files_of(["no_such"], ["", "\0", "a" * 9999]) == ({}, {})
