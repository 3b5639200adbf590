"""Chooses NCCL's environment variables: which interface or adapters it uses, and what it records.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cluster.port import Port
from harness.errors import LinkError


def nccl_variables(port: Port) -> dict[str, str]:
    """Return environment variables that make NCCL use the interface or adapters of ``port`` between nodes.

    There are three cases in which NCCL might send in another way without such variables:

    - Nodes are network namespaces of one machine.  NCCL tells hosts apart by their names (NCCL user guide, Environment
      Variables), and would take all namespaces for one host.  It would then use peer access and shared memory, which no
      queue limits.
    - The rate of the host's interface is limited.  NCCL might avoid this interface and use InfiniBand, a plugin's
      network or NVLink.  ``NCCL_NET`` makes NCCL fail instead.
    - The suite asks for InfiniBand or RoCE adapters (``cluster.hcas``).  If they did not work, NCCL would use sockets.
      ``NCCL_NET`` makes NCCL fail instead.

    In all other cases, the result is empty.
    """
    if port.hcas:
        adapters = {"NCCL_IB_HCA": f"={port.hcas}", "NCCL_IB_DISABLE": "0"}
        return adapters | {"NCCL_NET": "IB", "NCCL_MNNVL_ENABLE": "0"}
    if port.interface is None or (port.shaped_mbit is None and port.holder is None):
        return {}
    sockets = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": f"={port.interface}"}
    if port.shaped_mbit is not None:
        return sockets | {"NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
    return dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1") | sockets


def flight_recorder(traces: str) -> dict[str, str]:
    """Return environment variables that make torch record NCCL's latest calls, and save them after a time-out.

    The path of each rank's file is ``traces`` followed by the rank's number; ``python -m
    torch.distributed.flight_recorder.fr_trace`` reads the files (torch docs, torch_nccl_environment_variables).
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": traces,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def nccl_in_words(ports: Sequence[Port]) -> str:
    """Return the environment variables that NCCL gets on every node, as text for records.

    If all nodes have the same variables, the text names them once.
    """
    texts = [", ".join(f"{name}={value}" for name, value in nccl_variables(port).items()) for port in ports]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"node {node}: {text}" for node, text in enumerate(texts))


def choose_hcas(requested: int | tuple[str, ...], present: Sequence[str], node: int) -> str:
    """Return the InfiniBand or RoCE adapters that a node's NCCL may use, separated by commas.

    Args:
        requested: The number of adapters, or the names of the adapters.
        present: The node's adapters with an active port.
        node: Number of the node, for the error message.

    Raises:
        LinkError: If the node lacks some of the requested adapters.
    """
    chosen = present[:requested] if isinstance(requested, int) else requested
    if not set(chosen) <= set(present) or (isinstance(requested, int) and len(chosen) < requested):
        text = requested if isinstance(requested, int) else ", ".join(requested)
        adapters = f"these InfiniBand or RoCE adapters with an active port: {', '.join(present) or 'none'}"
        raise LinkError(
            f"cluster.hcas = {text}: node {node} has {adapters}; name adapters that every node has, or a smaller number"
        )
    return ",".join(chosen)
