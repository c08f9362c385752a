"""Capacity: how much memory a device has for training, and how much of it is free.

A part of all that a device has is *reserved*: it is left to what no prediction counts, which is the
workspaces of libraries, the code of kernels, CUDA's own context, and what an allocator loses between its
blocks. That part is ``RESERVED``, a choice and not a measurement.
"""

from __future__ import annotations

import os

import torch

__all__ = ["RESERVED", "capacity_bytes", "free_bytes", "reserved_bytes"]

RESERVED = 0.05  # of all memory of a device


def reserved_bytes(memory_bytes: int) -> int:
    """What is left to others of so much memory.

    >>> reserved_bytes(80 * 10**9)
    4000000000
    """
    return int(RESERVED * memory_bytes)


def capacity_bytes(device: torch.device) -> int:
    """All memory of a device that is there."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int | None:
    """What this process can still allocate on a device; None for a CPU, which others use as well.

    On a CUDA device that is what the driver has free, and what torch's allocator has reserved from it and
    does not use.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
