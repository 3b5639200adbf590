"""Digests of a trial's input files: the corpus, and the sources of a user's own objects.  No torch."""

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

if TYPE_CHECKING:  # suites need pydantic, which a machine that only tries the laws on its GPU may not have
    from harness.suites.trial import Trial


def digests(trial: Trial) -> dict[str, str]:
    """SHA-256 of the ``corpus``, of the file of each ``module:object``, and of what these are made of, where
    files can be read.

    ``module helper`` is what they import: of one file its own digest, of several of one package the digest of
    their list.  ``file words.txt of mine`` is a file that the source of ``mine`` names.
    """
    see(Path.cwd())
    modules = {name: text.partition(":")[0] for name, text in own_objects(trial).items()}
    if "." in trial.cluster.transport:
        modules["transport"] = trial.cluster.transport
    by_name = {"corpus": _corpus_digest(trial.corpus, trial.tokenizer, folder.current())}
    by_name |= {name: _module_digest(module) for name, module in modules.items()}
    by_name |= _beside(modules.values(), trial)
    return {name: digest for name, digest in by_name.items() if digest is not None}


def _beside(modules: Iterable[str], trial: Trial) -> dict[str, str | None]:
    """Digests of the files that own objects are made of, beside the modules that define them."""
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
    """The digest of a single file, or of the list of several."""
    if len(files) == 1:
        return next(iter(files.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def own_objects(trial: Trial) -> dict[str, str]:
    """Every ``module:object`` of the trial by its role: model, optimizer, tokenizer or codec."""
    named = {"model": trial.model.name, "optimizer": trial.optimizer.name, "tokenizer": trial.tokenizer or ""}
    policy = trial.resolved_policy()
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
    except (Exception, SystemExit):  # finding a module imports the packages that it stands in
        return None


@cache
def _file_digest(file: Path, _time: int, _size: int) -> str | None:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None
