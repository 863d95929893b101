"""The path over an RDMA device."""

from __future__ import annotations


def why_not() -> str | None:
    """Why this process cannot use an RDMA device; None where it can."""
    return "ibverbs is planned"
