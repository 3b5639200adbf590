"""Starts the witness in a Python process of an audited program, then runs the program's own ``sitecustomize``.

The witness records the process's collectives.  ``zeropp audit`` copies this file as ``sitecustomize.py``, next to a
copy of :mod:`harness.audit.witness`, into a folder that is first on PYTHONPATH.  Python therefore imports it before the
program.  It needs nothing but the standard library of Python 3.8 or later.  No exception of the audit leaves this file.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # imports of pathlib cost milliseconds


def _start() -> None:
    """Remove this file's folder from ``sys.path``, and start the witness, which records the process's collectives.

    The witness's module gets a name that no program uses.
    """
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]  # noqa: PTH100
    path = os.path.join(_HERE, "witness.py")  # noqa: PTH118
    spec = importlib.util.spec_from_file_location("_zeropp_audit_witness", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["_zeropp_audit_witness"] = module
    spec.loader.exec_module(module)
    module.start_from(_HERE)


def _continue() -> None:
    """Run the ``sitecustomize`` that Python would have found without this file; Python reports any error in it."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    with contextlib.suppress(Exception):
        _start()
    _continue()
