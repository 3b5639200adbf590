"""Imports a user's objects, named ``module:object``: models, corpora, tokenizers, optimizers, codecs.

Modules are searched in the working folder, and in those that :func:`see` adds.  No torch.
"""

from __future__ import annotations

import importlib
import operator
import re
import sys
from pathlib import Path
from typing import Any, Final

from impl.errors import raising

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_seen: Final[list[Path]] = []  # folders that :func:`see` added


class NamedObjectError(ValueError):
    """A named object cannot be imported; one line says why."""


def is_name(text: str) -> bool:
    """Whether ``text`` has the form ``module:object``."""
    return _NAME.fullmatch(text) is not None


def see(folder: Path) -> None:
    """Add a folder to ``sys.path``, so that its modules can be imported."""
    absolute = folder.resolve()
    if absolute not in _seen:
        _seen.append(absolute)
    if str(absolute) not in sys.path:
        sys.path.append(str(absolute))


def import_object(text: str) -> Any:
    """The object of ``module:object``; a NamedObjectError if missing, hidden, or its import raises."""
    name, _, path = text.partition(":")
    see(Path.cwd())
    with raising(NamedObjectError, f"{text}: cannot import {name!r}:"):
        module: Any = importlib.import_module(name)
    first, file = name.partition(".")[0], getattr(module, "__file__", None)
    holders = [f for f in _seen if (f / f"{first}.py").exists() or (f / first / "__init__.py").exists()]
    if holders and not (file and any(Path(file).resolve().is_relative_to(f) for f in _seen)):
        raise NamedObjectError(
            f"{text}: {name} is that of {file}, which hides the one in {holders[0]}; rename it"
        )
    with raising(NamedObjectError, f"{text}: {name} has no {path!r}:"):
        return operator.attrgetter(path)(module)
