"""`memra-pp status`: the pipelines that run on this machine, or one of them as it fares, live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ..driver.figures.registry import Registered, entries
from ..driver.figures.status import ask
from ..errors import InputError, StageError
from .status_text import listed, shown

REDRAW_S = 1.0
BETWEEN_S = 0.5
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def status(args: argparse.Namespace) -> None:
    """Shows the pipeline that is meant; lists them, if several are."""
    found = _found(args.pipeline)
    if args.json:
        print(json.dumps(list(found.values())))
    elif len(found) > 1:
        print("\n".join(listed(list(found.values()))))
    elif args.once or not sys.stdout.isatty():
        _once(*found.items())
    else:
        _watch(*found)


def _found(which: str | None) -> dict[Registered, dict[str, Any]]:
    """What the pipelines of a process answer, or the one of a name, or all.

    Raises:
        InputError: there are none.
    """
    meant = [entry for entry in entries() if which is None or which in (str(entry.pid), entry.name)]
    found = {entry: answer for entry in meant if (answer := _answer(entry)) is not None}
    if not found:
        of, hint = ("", "") if which is None else (f" {which}", ": memra-pp status without a PID shows those that do")
        raise InputError(f"no pipeline{of} of yours runs on this machine{hint}")
    return found


def _answer(entry: Registered) -> dict[str, Any] | None:
    """What a pipeline answers, or that it does not; None if it has ended."""
    try:
        return ask(entry)
    except StageError as error:
        return {"name": entry.name, "pid": entry.pid, "health": None, "stats": None, "why": str(error)}


def _once(known: tuple[Registered, dict[str, Any]]) -> None:
    """Shows a pipeline, and what it does a second, as two answers tell."""
    entry, before = known
    time.sleep(BETWEEN_S)
    now = _answer(entry)
    print("\n".join(shown(before) if now is None else shown(now, before)))


def _watch(entry: Registered) -> None:
    """Shows a pipeline every second, until it ends, or Ctrl-C."""
    before = None
    try:
        while (now := _answer(entry)) is not None:
            lines = "".join(f"{line}{REST_OF_LINE}\n" for line in shown(now, before))
            print(f"{HOME}{lines}{REST_OF_SCREEN}", end="", flush=True)
            before = now
            time.sleep(REDRAW_S)
        print(f"pipeline {entry.name} has ended")
    except KeyboardInterrupt:
        pass
