"""Where, when and how figures were measured: the head of every file of results."""

from __future__ import annotations

import pathlib
import platform
import shlex
import sys
import time
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def provenance(script: str, device: str = "cpu") -> dict[str, Any]:
    """Device, threads, date, torch's version and command, as JSON has them.

    Args:
        script: ``__file__`` of the script that runs; its command is told as from the project's folder.
        device: The device that was measured.
    """
    name = pathlib.Path(script).resolve().relative_to(ROOT)
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "command": shlex.join(["python", str(name), *sys.argv[1:]]),
    }
