"""A transfer as the network sees it: bytes over each link per byte of payload, and what it costs beside that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective or copy laid on the topology.

    It first takes `latency_s` without loading any link, then moves `payload_bytes` at a rate that the shared
    links allow: at payload rate r (bytes/s) it loads link l with r * usage[l]. `max_rate` caps r even on idle
    links (protocol, copy kernels). `algorithm` is for reports ("ring/simple").
    """

    payload_bytes: float
    usage: Mapping[str, float]
    latency_s: float
    max_rate: float = float("inf")
    algorithm: str = ""
