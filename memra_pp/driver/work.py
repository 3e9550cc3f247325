"""`Work`: one entry on its way through the stages, and the `Reply` that comes back for it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..admission.outcome import Outcome
from ..errors import StageError
from ..models.protocol import Array
from ..stage.frames import STEP, Entry, Frame, Note

T = TypeVar("T")
Steps: TypeAlias = Generator[Outcome[Any], None, T]
"""What a call does: it yields each outcome that it must wait for, and returns its result. Whoever runs it says how to wait: a
thread by blocking, a task by awaiting (see `waits`)."""

NO_NOTE: Note = {}


class Rewired(StageError):
    """What was sent, or waited to be, is lost: the stages were wired anew, and this session is open on all of them and empty.

    `on_its_way` says whether it was at the stages when one was lost, and `by_itself` whether nothing else was.
    """

    def __init__(self, on_its_way: bool = False, by_itself: bool = False) -> None:
        super().__init__("this step was lost when the stages were wired anew")
        self.on_its_way, self.by_itself = on_its_way, by_itself


class Reply(NamedTuple):
    """What came back for an entry.

    `fault` is `[stage, kind, message]` if a stage could not apply it, `answers` its answer rows if it asked for some, `note`
    what the stages had to say, and `taps` the tapped rows with the slots that they hold.
    """

    fault: Sequence[Any] | None
    answers: Array | None
    note: Note
    taps: Sequence[tuple[Array, list[int]]] = ()


class Work(Outcome[Reply]):
    """An entry to be sent, with its arrays and its note, and the outcome: what came back.

    Attributes:
        prefill: its rows are a piece of a longer text, for which no decode should wait long.
        alone: nothing else is on its way with it, so that what fails is its own fault.
        n_bytes: most bytes that its rows, answers or taps take of a frame on any lane.
        passed: whether a piece of a prefill went before it.
        timeout: seconds after which a frame that has not come back is an error.
    """

    __slots__ = ("alone", "arrays", "entry", "n_bytes", "note", "passed", "prefill", "timeout")

    def __init__(
        self,
        entry: Entry,
        arrays: list[Array],
        timeout: float,
        note: Note | None = None,
        *,
        prefill: bool = False,
        alone: bool = False,
        n_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.entry, self.arrays, self.timeout, self.note = entry, arrays, timeout, note
        self.prefill, self.alone, self.n_bytes = prefill, alone, n_bytes
        self.passed = False


def replies(frame: Frame) -> list[Reply]:
    """What came back for each entry of a frame. Its arrays are the answers in the order of their entries, then the taps."""
    answered = [e.op == STEP and e.logits > 0 and frame.fault(i) is None for i, e in enumerate(frame.entries)]
    n_answers = sum(answered)
    out, at = [], 0
    for i, answers in enumerate(answered):
        note = frame.notes.get(i, NO_NOTE)
        fault = note.get("fault")
        if "array" in note:
            out.append(Reply(fault, frame.arrays[note["array"]], note))
            continue
        parts = note["taps"]["parts"] if "taps" in note and fault is None else ()
        taps = [(frame.arrays[n_answers + array], slots) for array, slots in parts]
        out.append(Reply(fault, frame.arrays[at] if answers else None, note, taps))
        at += answers
    return out
