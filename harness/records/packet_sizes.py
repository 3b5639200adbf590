"""Sizes of the TCP packets that carry messages, in bytes.  Imports nothing."""

from __future__ import annotations

from typing import Final

HEADER_BYTES: Final = 66  # a TCP packet's on the interface: Ethernet 14, IPv4 20, TCP 20 + 12 of timestamps
SEGMENT_BYTES: Final = 1448  # of payload that a real network carries in one packet: an MTU of 1500
