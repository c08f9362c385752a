"""``fxremat diff FIRST SECOND``: what differs between two plan files.

Exit status, as of ``diff``: 0 where both have the same schedules for the same graphs, whatever was predicted
for them; 1 where not; 2 where a file can't be read.
"""

from __future__ import annotations

import argparse

from fxremat.planfile.diff import diff_plans
from fxremat.planfile.text import load_plan

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; the result is the exit status."""
    found = diff_plans(load_plan(arguments.first), load_plan(arguments.second))
    print(found)
    return 0 if found.is_same else 1
