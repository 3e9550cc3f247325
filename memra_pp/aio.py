"""`memra_pp` for tasks: `async with memra_pp.aio.launch(...) as pipe`, and the same names, awaited. See `driver.aio`."""

from __future__ import annotations

from .driver.aio import Opening, Pipeline, Session, launch

__all__ = ["Opening", "Pipeline", "Session", "launch"]
