"""Digests of a trial's input files: the corpus and the source of a user's model.

Both may change while the suite that names them does not, so their digests go on the record, and a record
of other inputs is not reused.  No torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import CorpusError
from harness.workloads import corpus, glyph_images

if TYPE_CHECKING:  # suites need pydantic, which a machine that only tries the laws on its GPU may not have
    from harness.suites.trial import Trial


def see_working_folder() -> None:
    """Add the working folder to ``sys.path``, so that its modules can be imported."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def digests(trial: Trial) -> dict[str, str]:
    """SHA-256 by input, ``corpus`` and, for a ``module:function``, ``model``: its module's file.

    An input that cannot be read is left out; running the trial reports why.
    """
    module, separator, _ = trial.model.name.partition(":")
    found = {"corpus": _corpus_digest(trial.corpus), "model": _module_digest(module) if separator else None}
    return {name: digest for name, digest in found.items() if digest is not None}


@cache
def _corpus_digest(source: str) -> str | None:
    try:
        return glyph_images.load().sha256 if source == glyph_images.GLYPHS else corpus.load(source).sha256
    except CorpusError:
        return None


@cache
def _module_digest(name: str) -> str | None:
    see_working_folder()
    try:
        spec = importlib.util.find_spec(name)
        return hashlib.sha256(Path(spec.origin or "").read_bytes()).hexdigest() if spec else None
    except (Exception, SystemExit):  # finding a module imports the packages that it stands in
        return None
