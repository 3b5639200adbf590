"""Starts supervisors on other hosts through ssh.

A supervisor is the process that starts and watches the ranks of a node.  The started supervisors get the command line
of this process, and the environment variables that torchrun sets.
"""

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
from harness.cluster.run_token import VARIABLE
from harness.errors import Refusal

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_WITH_TOKEN = f'IFS= read -r {VARIABLE} && export {VARIABLE} && exec "$@" </dev/null'
_END_SECONDS = 5.0


def place_of(hosts: Sequence[str]) -> Place:
    """Return this machine's place in a run on ``hosts``: it is node 0, and all supervisors meet at its address.

    A supervisor is the process that starts and watches the ranks of a node.

    Raises:
        Refusal: If the second host cannot be reached.
    """
    address = "127.0.0.1" if len(hosts) == 1 else address_towards(_resolved(hosts[1]))
    return Place(0, len(hosts), address, 0, serves=True, job=secrets.token_hex(8))


@contextlib.contextmanager
def supervisors(hosts: Sequence[str], place: Place, token: str) -> Iterator[Callable[[], None]]:
    """Start a supervisor through ssh on each host but the first, in the same folder and with the same Python as here.

    A supervisor is the process that starts and watches the ranks of a node.  The supervisors get the run's ``token``
    through standard input, because other users can read command lines.  They meet at the address in ``place``.  At the
    end of the ``with`` block, the ssh processes are ended.

    Yields:
        A function that raises a Refusal if one of these supervisors has ended.  The message has the last line of the
        supervisor's output.
    """
    common = {
        "TORCHELASTIC_RUN_ID": "hosts", "TORCHELASTIC_RESTART_COUNT": place.job, "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port),
    }  # fmt: skip
    started = []
    with contextlib.ExitStack() as stack:
        for node, host in enumerate(hosts[1:], 1):
            variables = [f"{name}={value}" for name, value in (common | {"GROUP_RANK": str(node)}).items()]
            remote = ["env", *variables, sys.executable, "-m", "harness.cli", *sys.argv[1:]]
            # The line is quoted, since a shell on the other host reads it.
            shell = ["sh", "-c", _WITH_TOKEN, "sh", *remote]
            line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(shell)}"
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [*_SSH, host, line],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal must reach only the sweep
            )
            stack.callback(_end, process)
            with contextlib.suppress(BrokenPipeError), process.stdin as given:  # type: ignore[union-attr]
                given.write(f"{token}\n".encode())
            started.append((host, process, output))

        def check() -> None:
            for host, process, output in started:
                if process.poll() is not None:
                    output.seek(0)
                    lines = output.read().decode(errors="replace").strip().splitlines()
                    raise Refusal(
                        f"host {host}: the supervisor that ssh started there ended with status {process.returncode}: "
                        f"{lines[-1] if lines else 'without output'}; correct the cause there, and run again"
                    )

        yield check


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_SECONDS)
    process.kill()
    process.wait()


def _resolved(host: str) -> str:
    """Return the host name or address that ssh connects to for ``host``, according to ssh's configuration.

    If ssh prints none, this is ``host`` without the user's name: ``b`` for ``me@b``.
    """
    done = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, check=False)
    names = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]
