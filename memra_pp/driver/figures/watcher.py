"""`Watcher`: who looks at a pipeline from beside it, and has no part in what it does."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Ends with its pipeline in two steps, so that what it is in the middle of holds nobody up."""

    def stop(self) -> None:
        """Begins nothing more, and lets go of what is not the pipeline's; twice is fine. What it has asked of the stages may
        still be under way."""

    def join(self) -> None:
        """Waits for the end of that: the pipeline is closed, and tells so whoever asks."""
