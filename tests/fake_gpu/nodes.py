"""``python -m tests.fake_gpu.nodes ARGUMENT ...``: torchrun of ``zeropp ARGUMENT ...`` as two nodes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence

NODES = 2


def main(arguments: Sequence[str]) -> int:
    """Start torchrun once for each node, and wait for both; returns 0 if both succeed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = ("torch.distributed.run", f"--nnodes={NODES}", "--nproc-per-node=1", "--master-addr=127.0.0.1")
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", *torchrun, f"--master-port={port}", f"--node-rank={node}"),
                *("-m", "harness.cli", *arguments),
            ]
        )
        for node in range(NODES)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
