"""Who may open a session: bytes per stage, known beforehand. Pure arithmetic."""

from .ledger import Ledger
from .shape import session_ctx

__all__ = ["Ledger", "session_ctx"]
