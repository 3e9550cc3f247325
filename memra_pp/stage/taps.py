"""Taps over stages: each stage writes the residual after its own tapped layers, and the frame carries them to the driver."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache import DflashTapSink
from ..errors import StageError
from ..models.protocol import Array
from .frames import Entry, Note
from .session import StageSession
from .spec import StageSpec

MAX_TAPS = 256


def own_layers(spec: StageSpec, entry: Entry, note: Note) -> tuple[int, ...]:
    """The layers of this stage that the note's `taps` ask for.

    Raises:
        StageError: the note is not one of taps.
    """
    taps = note.get("taps")
    if taps is None:
        return ()
    layers, rows, parts = map(taps.get, ("layers", "rows", "parts")) if isinstance(taps, dict) else (None, None, None)
    named = isinstance(layers, list) and len(layers) <= MAX_TAPS and all(type(il) is int for il in layers)
    if not named or not isinstance(parts, list) or type(rows) is not int or not 0 < rows <= entry.rows:
        raise StageError(f"{spec}: the taps {taps!r:.200}: they must name layers, rows of the step and a list of parts")
    return tuple(il for il in layers or () if il in spec.layers)


def arm(session: StageSession, layers: tuple[int, ...], rows: int) -> None:
    """Arms a sink for a step of `rows` rows, if any layer is tapped."""
    if layers:
        cache = session.cache
        cache.dflash_taps = DflashTapSink.armed(layers, cache.cfg.n_embd, rows)


def collect(session: StageSession, note: Note, arrays: list[Array]) -> None:
    """Disarms the sink, if there is one, and adds what it holds of the tapped rows to `arrays` and to the note."""
    sink, session.cache.dflash_taps = session.cache.dflash_taps, None
    if sink is None:
        return
    taps: dict[str, Any] = note["taps"]
    slots = [slot for slot, il in enumerate(taps["layers"]) if il in sink.layer_ids]
    taps["parts"].append([len(arrays), slots])
    arrays.append(np.ascontiguousarray(sink.buf[-taps["rows"] :]))
