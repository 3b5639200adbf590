"""Imports objects that a user names as ``module:object``: models, corpora, tokenizers, optimizers, codecs.

Modules are searched on ``sys.path``, in the working folder, and in the folders that :func:`see` adds.  This
file imports no torch, so that a suite can be checked without it.
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
_seen: Final[list[Path]] = []  # the folders that :func:`see` added


class NamedObjectError(ValueError):
    """A named object cannot be imported; the message says why in one line."""


def is_name(text: str) -> bool:
    """Return whether ``text`` has the form ``module:object``."""
    return _NAME.fullmatch(text) is not None


def see(folder: Path) -> None:
    """Add a folder to ``sys.path``, so that its modules can be imported."""
    absolute = folder.resolve()
    if absolute not in _seen:
        _seen.append(absolute)
    if str(absolute) not in sys.path:
        sys.path.append(str(absolute))


def import_object(text: str) -> Any:
    """Import and return the object that ``text``, ``module:object``, names.

    Raises:
        NamedObjectError: if the import of the module raises, if the module has no such object, or if the
            import finds a module of the same name elsewhere, which hides the one in the user's folder.
    """
    name, _, path = text.partition(":")
    see(Path.cwd())
    with raising(NamedObjectError, f"{text}: cannot import {name!r}:"):
        module: Any = importlib.import_module(name)
    first, file = name.partition(".")[0], getattr(module, "__file__", None)
    holders = [f for f in _seen if (f / f"{first}.py").exists() or (f / first / "__init__.py").exists()]
    if holders and not (file and any(Path(file).resolve().is_relative_to(f) for f in _seen)):
        raise NamedObjectError(
            f"{text}: import {name} finds {file}, which hides the module of that name in {holders[0]}: "
            "rename your module"
        )
    with raising(NamedObjectError, f"{text}: {name} has no {path!r}:"):
        return operator.attrgetter(path)(module)
