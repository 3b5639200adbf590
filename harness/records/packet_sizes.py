"""Sizes in bytes of the TCP packets that carry messages.  Imports nothing."""

from __future__ import annotations

from typing import Final

# Headers of a TCP packet, as an interface counts them: Ethernet 14, IPv4 20, TCP 32 with timestamps.
HEADER_BYTES: Final = 66
SEGMENT_BYTES: Final = 1448  # payload of one packet of a real network with an MTU of 1500
