"""fxremat: train the same model in a fraction of the memory.

A ``torch.fx`` compiler pass that decides which values of the forward to keep and which to compute again,
and when, so that the peak of a training step fits a budget in bytes.

    model = torch.compile(model, backend="fxremat", options={"budget": "8GiB"})
"""

from fxremat.allocate import Allocation, allocate
from fxremat.annotate import region
from fxremat.backend import fxremat_backend, partitioner, reports
from fxremat.capture import capture
from fxremat.errors import (
    CaptureError,
    FxrematError,
    GraphError,
    InfeasibleBudgetError,
    InvalidOptionError,
    ModifiedInputError,
    RatesError,
    ScheduleError,
)
from fxremat.graph import JointGraph
from fxremat.memory import MemoryProfile, profile
from fxremat.partition import partition
from fxremat.pipeline import frontier, plan
from fxremat.planners import PLANNERS, Problem, Solution
from fxremat.report import Report
from fxremat.rewrite import rewrite
from fxremat.schedule import Schedule, expand

__version__ = "0.1.0"

__all__ = [
    "PLANNERS",
    "Allocation",
    "CaptureError",
    "FxrematError",
    "GraphError",
    "InfeasibleBudgetError",
    "InvalidOptionError",
    "JointGraph",
    "MemoryProfile",
    "ModifiedInputError",
    "Problem",
    "RatesError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Solution",
    "allocate",
    "capture",
    "expand",
    "frontier",
    "fxremat_backend",
    "partition",
    "partitioner",
    "plan",
    "profile",
    "region",
    "reports",
    "rewrite",
]
