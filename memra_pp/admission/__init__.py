"""Who may open a session: bytes per stage and device, known beforehand. Pure arithmetic."""

from .admission import Admission, Request, Ticket
from .arena import Arena
from .balance import WorkTimes, best_fence, fence_by_time
from .cost import CostModel
from .ledger import Device, Ledger, Shortage, pooled
from .planner import CutPlan, Plan, StagePlan, plan
from .shape import MAX_SNAPSHOTS, SessionShape, checked_recurrent, session_ctx
from .verdicts import Admit, Defer, Refuse, Verdict

__all__ = [
    "MAX_SNAPSHOTS",
    "Admission",
    "Admit",
    "Arena",
    "CostModel",
    "CutPlan",
    "Defer",
    "Device",
    "Ledger",
    "Plan",
    "Refuse",
    "Request",
    "SessionShape",
    "Shortage",
    "StagePlan",
    "Ticket",
    "Verdict",
    "WorkTimes",
    "best_fence",
    "checked_recurrent",
    "fence_by_time",
    "plan",
    "pooled",
    "session_ctx",
]
