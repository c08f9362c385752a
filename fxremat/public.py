"""Public: the names that users import, each from the module that answers it.

What is in ``__all__`` is kept from version to version (``docs/versions.md``). ``fxremat`` itself loads this
module when the first of them is asked for: PyTorch's compiler, which they need, takes seconds to import.
"""

from fxremat.arena.allocate import Allocation, allocate
from fxremat.driver.ahead import survey
from fxremat.driver.backend import fxremat_backend
from fxremat.driver.capture import capture
from fxremat.driver.journal import reports, steps
from fxremat.driver.partitioner import partitioner
from fxremat.driver.pipeline import frontier, make_plan, plan
from fxremat.driver.reach import backend, enabled, install, uninstall
from fxremat.emit.partition import partition
from fxremat.emit.rewrite import rewrite
from fxremat.errors import (
    CaptureError,
    FxrematError,
    GraphError,
    InfeasibleBudgetError,
    InvalidOptionError,
    ModifiedInputError,
    PlanFileError,
    PlanMismatchError,
    RatesError,
    ScheduleError,
    VerificationError,
)
from fxremat.fitting.fit import Fit
from fxremat.fitting.fitting import fit
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.region import region
from fxremat.graph.schedule import Schedule
from fxremat.memory.liveness import MemoryProfile
from fxremat.options.settings import configure, settings
from fxremat.planfile.contents import PlanFile
from fxremat.planfile.diff import diff_plans
from fxremat.planfile.text import load_plan, save_plan
from fxremat.planners import PLANNERS
from fxremat.predict.models import profile
from fxremat.predict.problem import Problem, Solution
from fxremat.report.report import Report
from fxremat.report.step_report import StepReport
from fxremat.report.verification import Verification

__all__ = [
    "PLANNERS",
    "Allocation",
    "CaptureError",
    "Fit",
    "FxrematError",
    "GraphError",
    "InfeasibleBudgetError",
    "InvalidOptionError",
    "JointGraph",
    "MemoryProfile",
    "ModifiedInputError",
    "PlanFile",
    "PlanFileError",
    "PlanMismatchError",
    "Problem",
    "RatesError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Solution",
    "StepReport",
    "Verification",
    "VerificationError",
    "allocate",
    "backend",
    "capture",
    "configure",
    "diff_plans",
    "enabled",
    "expand",
    "fit",
    "frontier",
    "fxremat_backend",
    "install",
    "load_plan",
    "make_plan",
    "partition",
    "partitioner",
    "plan",
    "profile",
    "region",
    "reports",
    "rewrite",
    "save_plan",
    "settings",
    "steps",
    "survey",
    "uninstall",
]
