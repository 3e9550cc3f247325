"""A bar on stderr while something takes its time."""

from __future__ import annotations

import sys

BAR_WIDTH = 24


class Bar:
    """One line a step, redrawn in place on a terminal. It is a `driver.chain.Progress`."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()

    def __call__(self, text: str, done: int, of: int) -> None:
        filled = BAR_WIDTH * done // of
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}"
        print(f"\r{bar:<72}" if self._tty else bar, end="" if self._tty else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes it off the terminal."""
        if self._tty:
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr, flush=True)
