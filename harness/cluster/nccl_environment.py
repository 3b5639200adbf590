"""What NCCL is told by variables: through which interface or InfiniBand adapters it sends.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cluster.port import Port
from harness.errors import LinkError


def nccl_variables(port: Port) -> dict[str, str]:
    """What NCCL is told, so that it sends through a node's network namespace, shaped interface or adapters.

    Between namespaces of one machine it would else use peer access and shared memory, which no queue shapes:
    it tells hosts apart by their names (NCCL user guide, Environment Variables).  Between hosts it could use
    InfiniBand, a plugin's network or NVLink instead, and where named adapters do not work, sockets; with
    ``NCCL_NET`` it fails there.
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


def nccl_in_words(ports: Sequence[Port]) -> str:
    """What NCCL is told on every node, for the record; once where nodes do not differ."""
    told = [", ".join(f"{name}={value}" for name, value in nccl_variables(port).items()) for port in ports]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"node {node}: {words}" for node, words in enumerate(told))


def choose_hcas(asked: int | tuple[str, ...], there: Sequence[str], node: int) -> str:
    """The adapters that a node's NCCL may use: the first of those ``there``, or those named."""
    chosen, said = (there[:asked], asked) if isinstance(asked, int) else (asked, ", ".join(asked))
    if not set(chosen) <= set(there) or (isinstance(asked, int) and len(chosen) < asked):
        has = f"{len(there)} InfiniBand adapters with an active port ({', '.join(there) or 'none'})"
        raise LinkError(f"cluster.hcas = {said}: node {node} has {has}")
    return ",".join(chosen)
