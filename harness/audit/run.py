"""Runs the audited program, and prepares the folder into which the program's processes record their calls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.audit import witness
from harness.audit.calls import CSV, PAGE
from harness.errors import Refusal

MARK: Final = "audit.json"  # the file by which a folder is known to hold an audit
RANKS: Final = "ranks"  # the folder of the witnesses' files
_SITE: Final = "site"  # the folder on PYTHONPATH
_BUFFER: Final = "TORCH_FR_BUFFER_SIZE"
_OLD_BUFFER: Final = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # former name of this variable; torch warns if it is set


def prepare(folder: Path, options: Mapping[str, Any]) -> None:
    """Make the folder of an audit, and write the witness and its ``options`` into the folder.

    The witness is the module that each process of the program loads, and that records the process's calls
    (:mod:`harness.audit.witness`).  The files of an earlier audit in this folder are removed.

    Raises:
        Refusal: If ``folder`` is a file, or has files but no earlier audit.
    """
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"--out {folder}: this is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            raise Refusal(f"--out {folder}: the folder holds files but no earlier audit; name another folder")
        for name in (RANKS, _SITE):
            shutil.rmtree(folder / name, ignore_errors=True)
        # If this audit has nothing to report, it writes no report, and the former report must not pass for its own.
        for name in (CSV, PAGE):
            (folder / name).unlink(missing_ok=True)
    for name in (RANKS, _SITE):
        (folder / name).mkdir(parents=True)
    here = Path(witness.__file__).parent
    shutil.copyfile(here / "on_path.py", folder / _SITE / "sitecustomize.py")
    shutil.copyfile(witness.__file__, folder / _SITE / "witness.py")
    site = {**options, "folder": str((folder / RANKS).resolve())}
    (folder / _SITE / "options.json").write_text(json.dumps(site), encoding="utf-8")
    (folder / MARK).write_text("{}\n", encoding="utf-8")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that the audit sets for the program: PYTHONPATH, and the size of torch's flight recorder."""
    paths = [str((folder / _SITE).resolve()), os.environ.get("PYTHONPATH", "")]
    added = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sizes = [os.environ.get(name, "") for name in (_BUFFER, _OLD_BUFFER)]
    added[_BUFFER] = str(max([witness.RING, *(int(size) for size in sizes if size.isdigit())]))
    return added


def run(command: Sequence[str], folder: Path) -> int:
    """Run the audited program with this process's standard streams, and return the program's exit status.

    If signal N ended the program, the status is 128 + N.  While the program runs, this process ignores Ctrl-C, since
    the terminal sends Ctrl-C to the program as well.  It passes SIGTERM on to the program.

    Raises:
        Refusal: If the program cannot be started.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    # A shell starts a background command with Ctrl-C ignored.  If this process was started so, so is the program.
    at_start = None if before[0] is signal.SIG_IGN else _default_interrupt
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **environment(folder)}, preexec_fn=at_start  # noqa: PLW1509
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        status = process.wait()
    except FileNotFoundError as error:
        raise not_started(command[0], exists=False) from error
    except PermissionError as error:
        raise not_started(command[0], exists=True) from error
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    return 128 - status if status < 0 else status


def not_started(program: str, *, exists: bool) -> Refusal:
    """Return the error about a program that cannot be started; ``exists`` says whether there is a file of this name."""
    if exists:
        return Refusal(f"{program}: is not executable; put its interpreter before it, as in python train.py")
    return Refusal(f"{program!r}: there is no such program; give the command as you type it in a shell")


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def count_parameters(name: str) -> int:
    """Return the number of elements of all parameters of the model that the user has named.

    ``name`` has the form ``module:function``.  The function makes the model; it is called on the device ``meta``, where
    tensors take no memory.  Instead of a function, the name may also refer to a torch.nn.Module.

    Raises:
        Refusal: If ``name`` has another form, or if the function cannot be imported, raises an error, or does not
            return a torch.nn.Module.
    """
    import torch

    from impl import named_object
    from impl.errors import raising

    if not named_object.is_name(name):
        raise Refusal(f"--model {name}: expected module:function, such as train:build_model")
    with raising(Refusal, f"--model {name}:"):
        make = named_object.import_object(name)
        with torch.device("meta"):
            model = make() if not isinstance(make, torch.nn.Module) else make
    if not isinstance(model, torch.nn.Module):
        raise Refusal(
            f"--model {name}: returned {type(model).__name__}, but expected a torch.nn.Module; name a function that "
            "returns the model"
        )
    return sum(parameter.numel() for parameter in model.parameters())


def why_nothing(processes: int, command: Sequence[str]) -> str:
    """Return the message that explains why an audit has nothing to report: it saw no process group.

    ``processes`` is the number of Python processes that loaded the audit, and ``command`` the program as it was given.
    """
    if processes:
        return (
            f"{counted(processes)} ran, but none made a process group of torch.distributed: nothing to report"
        )
    return (
        f"{command[0]}: no Python process of the program loaded the audit: the program may run no Python, run in a "
        "container that does not see the audit's folder (mount it, or run zeropp audit in the container), or start "
        f"Python with -S, -I or -E (leave them out); this Python is {sys.executable}"
    )


def counted(processes: int) -> str:
    """Return a number of Python processes as text, such as ``2 Python processes``."""
    return f"{processes} Python process{'es' if processes != 1 else ''}"
