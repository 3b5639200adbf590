"""Runs this process's command line on other hosts through ssh, as their supervisors, told as by torchrun."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.cluster.control_channel import Place
from harness.cluster.port import address_towards
from harness.errors import Refusal

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_END_SECONDS = 5.0


def place_of(hosts: Sequence[str]) -> Place:
    """This machine's place as the first of ``hosts``; a Refusal if the second one cannot be reached."""
    address = "127.0.0.1" if len(hosts) == 1 else address_towards(_resolved(hosts[1]))
    return Place(0, len(hosts), address, 0, serves=True, job=secrets.token_hex(8))


@contextlib.contextmanager
def supervisors(hosts: Sequence[str], place: Place) -> Iterator[Callable[[], None]]:
    """Start those of all hosts but the first, in this folder with this Python; what it yields raises a
    Refusal once one has ended.
    """
    told = {
        "TORCHELASTIC_RUN_ID": "hosts", "TORCHELASTIC_RESTART_COUNT": place.job, "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port),
    }  # fmt: skip
    started = []
    with contextlib.ExitStack() as stack:
        for node, host in enumerate(hosts[1:], 1):
            variables = [f"{name}={value}" for name, value in (told | {"GROUP_RANK": str(node)}).items()]
            remote = ["env", *variables, sys.executable, "-m", "harness.cli", *sys.argv[1:]]
            # What ssh is given goes through a shell on the other host: quoted, word for word.
            line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(remote)}"
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [*_SSH, host, line],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the sweep alone
            )
            stack.callback(_end, process)
            started.append((host, process, output))

        def check() -> None:
            for host, process, output in started:
                if process.poll() is not None:
                    output.seek(0)
                    said = output.read().decode(errors="replace").strip().splitlines()
                    raise Refusal(
                        f"host {host}: its supervisor ended with status {process.returncode}: "
                        f"{said[-1] if said else 'it said nothing'}"
                    )

        yield check


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_SECONDS)
    process.kill()
    process.wait()


def _resolved(host: str) -> str:
    """What ssh's configuration makes of a name."""
    done = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, check=False)
    named = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return named[0] if named else host.rpartition("@")[2]
