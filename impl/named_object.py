"""Imports objects that a user names as ``module:object``: models, corpora, tokenizers, optimizers, codecs.

Modules are searched on ``sys.path``, in the working folder, and in the folders that :func:`see` adds.  This file
imports no torch, so that a suite (a TOML file that defines training runs) can be checked on a machine without torch.

Importing a user's module runs the user's code.  Commands that only read suites and results do their work inside
:func:`forbidden`, where no module that a suite names is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from impl.errors import raising

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_seen: Final[list[Path]] = []  # the folders that :func:`see` added
_allowed = True  # whether users' modules may be imported


class NamedObjectError(ValueError):
    """Raised when an object named as ``module:object`` cannot be imported; the message says why in one line."""


def is_name(text: str) -> bool:
    """Return whether ``text`` has the form ``module:object``."""
    return _NAME.fullmatch(text) is not None


def allowed() -> bool:
    """Return whether users' modules may be imported; False inside :func:`forbidden`."""
    return _allowed


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Forbid, inside the ``with`` body, the import of users' modules: :func:`import_object` raises a NamedObjectError.

    The body thus runs no code of the user.

    Objects of this project can still be imported.  :func:`see` does nothing inside the body, so ``sys.path`` stays as
    it is.
    """
    global _allowed  # noqa: PLW0603  # state of the process, like sys.path
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def see(folder: Path) -> None:
    """Add a folder to ``sys.path``, so that its modules can be imported; does nothing inside :func:`forbidden`."""
    if not _allowed:  # otherwise a module in the folder could be imported in place of a missing library
        return
    absolute = folder.resolve()
    if absolute not in _seen:
        _seen.append(absolute)
    if str(absolute) not in sys.path:
        sys.path.append(str(absolute))


def import_object(text: str, *, ours: bool = False) -> Any:
    """Import and return the object that ``text`` names.

    Args:
        text: The name, in the form ``module:object``.
        ours: Whether the object belongs to this project.  Only such an object can be imported inside :func:`forbidden`.

    Raises:
        NamedObjectError: in each of these cases:

            - the call is inside :func:`forbidden`, and ``ours`` is False;
            - the import of the module raises an error;
            - the module does not have the object;
            - a folder that :func:`see` added has the module, but Python finds another module of the same name first.
    """
    if not (ours or _allowed):
        raise NamedObjectError(
            f"{text}: this command imports no module that a suite names, since that would run the module's code: use "
            "zeropp run"
        )
    name, _, path = text.partition(":")
    see(Path.cwd())
    with raising(NamedObjectError, f"{text}: cannot import {name!r}:"):
        module: Any = importlib.import_module(name)
    first, file = name.partition(".")[0], getattr(module, "__file__", None)
    holders = [f for f in _seen if (f / f"{first}.py").exists() or (f / first / "__init__.py").exists()]
    if holders and not (file and any(Path(file).resolve().is_relative_to(f) for f in _seen)):
        found = file or "a module without a file"  # such as a built-in module
        raise NamedObjectError(
            f"{text}: import {name} finds {found}, which hides the module of that name in {holders[0]}: "
            "rename your module"
        )
    with raising(NamedObjectError, f"{text}: {name} has no {path!r}:"):
        return operator.attrgetter(path)(module)
