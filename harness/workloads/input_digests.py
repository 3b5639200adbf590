"""Computes digests of a trial's inputs: its corpus, and the sources of a user's own objects.

Records keep these digests, so that one can see whether an input has changed since the trial ran.  This module does not
import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import CorpusError
from harness.suites import folder
from harness.workloads import corpus, glyph_images
from harness.workloads.own_sources import files_of, stamp
from impl.named_object import see

if TYPE_CHECKING:  # trials import pydantic, which may be missing where only laws are tested, on a GPU
    from harness.suites.trial import Trial


def digests(trial: Trial) -> dict[str, str]:
    """Return the SHA-256 digests of a trial's inputs, by name.  Inputs that cannot be read are left out.

    The names, and what their digests are made from:

    - ``corpus``: all tokens or arrays of the corpus, or the fonts of the data set ``glyphs``;
    - ``model``, ``optimizer``, ``tokenizer``, ``method``, ``gather_method``, ``strategy``, ``transport`` or
      ``codec <text>``: the file of the user's module that defines the trial's model, optimizer and so on;
    - ``module helper``: the file of a module ``helper`` that these modules import.  If ``helper`` is a package of
      several files, the digest is made from the list of the digests of these files;
    - ``file words.txt of mine``: a file ``words.txt`` that the source of module ``mine`` names.
    """
    see(Path.cwd())
    modules = {name: text.partition(":")[0] for name, text in own_objects(trial).items()}
    if "." in trial.cluster.transport:
        modules["transport"] = trial.cluster.transport
    by_name = {"corpus": _corpus_digest(trial.corpus, trial.tokenizer, folder.current())}
    by_name |= {name: _module_digest(module) for name, module in modules.items()}
    by_name |= _digests_of_parts(modules.values(), trial)
    return {name: digest for name, digest in by_name.items() if digest is not None}


def _digests_of_parts(modules: Iterable[str], trial: Trial) -> dict[str, str | None]:
    """Return the digests of what the user's modules use: the modules that they import, and files such as data files.

    Args:
        modules: Dotted names of the user's modules, whose own digests are not in the result.
        trial: The trial, whose ``model.arguments`` may name further modules and files.

    Returns:
        The digests by name; see :func:`digests`.  For example, ``module helper`` is a module that one of ``modules``
        imports, and ``file words.txt of mine`` is a file that the source of the module ``mine`` names.  A digest is
        None if the file cannot be read.
    """
    if not (names := sorted(set(modules))):
        return {}
    texts = [value for value in trial.model.arguments.values() if isinstance(value, str)]
    imported, named = files_of(names, texts, (folder.current(), Path.cwd()))
    packages = defaultdict[str, dict[str, str | None]](dict)
    for name in imported.keys() - names:
        packages[name.partition(".")[0]][name] = _file_digest(imported[name], *stamp(imported[name]))
    digests = {f"module {name}": _joint_digest(files) for name, files in packages.items()}
    return digests | {f"file {name}": _file_digest(file, *stamp(file)) for name, file in named.items()}


def _joint_digest(files: dict[str, str | None]) -> str | None:
    """Return one digest for several files, from their digests by name.

    If there is only one file, its digest is returned.  Otherwise the digest of a list of names and digests is returned.
    """
    if len(files) == 1:
        return next(iter(files.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def own_objects(trial: Trial) -> dict[str, str]:
    """Return the names ``module:object`` of the user's objects in a trial, by role: ``model``, ``optimizer`` and so on.

    Roles whose object is not the user's are left out.
    """
    named = {"model": trial.model.name, "optimizer": trial.optimizer.name, "tokenizer": trial.tokenizer or ""}
    policy = trial.resolved_policy()
    named |= {} if trial.own_method is None else {"method": trial.own_method.name}
    named |= {} if trial.own_gather is None else {"gather_method": trial.own_gather.name}
    named |= {"strategy": trial.strategy} if trial.own_strategy else {}
    named |= {f"codec {codec}": str(codec) for codec in (() if policy is None else policy.own_codecs)}
    return {name: text for name, text in named.items() if ":" in text}


@cache
def _corpus_digest(source: str, tokenizer: str | None, _: Path) -> str | None:
    try:
        if source == glyph_images.GLYPHS:
            return glyph_images.load().sha256
        return corpus.load(source, tokenizer).sha256
    except CorpusError:
        return None


def _module_digest(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
        file = Path(spec.origin or "") if spec else None
        return None if file is None else _file_digest(file, *stamp(file))
    except (Exception, SystemExit):  # find_spec() imports the packages around a module, which may do anything
        return None


@cache
def _file_digest(file: Path, _time: int, _size: int) -> str | None:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None
