"""Digests of a trial's input files: the corpus, and the sources of a user's own objects.  No torch."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import CorpusError
from harness.suites import folder
from harness.workloads import corpus, glyph_images
from impl.named_object import see

if TYPE_CHECKING:  # suites need pydantic, which a machine that only tries the laws on its GPU may not have
    from harness.suites.trial import Trial


def digests(trial: Trial) -> dict[str, str]:
    """SHA-256 of the ``corpus``, and of the file of each ``module:object``, where they can be read."""
    by_name = {"corpus": _corpus_digest(trial.corpus, trial.tokenizer, folder.current())}
    by_name |= {name: _module_digest(text.partition(":")[0]) for name, text in own_objects(trial).items()}
    return {name: digest for name, digest in by_name.items() if digest is not None}


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


@cache
def _module_digest(name: str) -> str | None:
    see(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
        return hashlib.sha256(Path(spec.origin or "").read_bytes()).hexdigest() if spec else None
    except (Exception, SystemExit):  # finding a module imports the packages that it stands in
        return None
