"""One layer of every session of a batch, as its kernels take it: `KvBatch` and `StateBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cache import KvLayer, RecurLayer
from ..cache.cache import StateCopy
from ..errors import InputError
from ._arrays import I64Array
from .addresses import address_of, layer_row
from .spans import Spans

CONV, STATE, NEXT = range(3)
"""Columns of `StateBatch.table`: the addresses of a session's conv state, its current and its other SSM state."""
CAPTURE_SESSION, CAPTURE_ROWS, CAPTURE_CONV, CAPTURE_STATE = range(4)
"""Columns of `StateBatch.captures`: after so many rows of a session, its states are copied to these addresses."""


NO_CAPTURES: I64Array = np.empty((0, 4), np.int64)


@dataclass(slots=True)
class KvBatch:
    """An attention layer of every session. `planes` are the sessions' `addresses.layer_row`, i64 `[sessions, 4]`.

    Raises:
        InputError: the sessions' layers are not of one shape.
    """

    layers: Sequence[KvLayer]
    planes: I64Array
    spans: Spans

    def __post_init__(self) -> None:
        plan = self.layers[0].plan
        for layer in self.layers:
            if layer.plan is not plan and layer.plan != plan:
                raise InputError(f"layer {layer.index} is {layer.plan} in one session and {plan} in another of the batch")

    @classmethod
    def of(cls, layers: Sequence[KvLayer], spans: Spans) -> KvBatch:
        """The batch of layers whose addresses are not known yet.

        Raises:
            InputError: planes do not hold the rows that their layout says.
        """
        return cls(layers, np.array([layer_row(layer) for layer in layers], np.int64), spans)


@dataclass(slots=True)
class StateBatch:
    """A recurrent layer of every session. `table` are the sessions' `addresses.state_row`, i64 `[sessions, 3]`; `captures` the
    copies to take on the way, i64 `[captures, 4]`."""

    states: Sequence[RecurLayer]
    table: I64Array
    spans: Spans
    captures: I64Array


def capture_table(captures: Sequence[tuple[int, int, StateCopy]], states: Sequence[RecurLayer], spans: Spans) -> I64Array:
    """`StateBatch.captures` of `(session, rows, copy)`: after its first `rows` rows the session's state goes into the copy.

    Raises:
        InputError: a session has not so many rows, or none are asked for, or a copy is not of its state's sizes.
    """
    table = []
    for session, rows, copy in captures:
        state = states[session]
        if not 1 <= rows <= spans.rows[session]:
            raise InputError(
                f"a copy of the state after {rows} rows of {spans.rows[session]}: ask for 1 to as many as there are"
            )
        if copy.conv.shape != state.conv_state.shape or copy.ssm.shape != state.ssm_state.shape:
            raise InputError(
                f"a copy of {copy.conv.shape} and {copy.ssm.shape} for a state of {state.conv_state.shape} and "
                f"{state.ssm_state.shape}: take a snapshot of this very cache"
            )
        at = [address_of(name, buffer, np.float32) for name, buffer in (("copy.conv", copy.conv), ("copy.ssm", copy.ssm))]
        table.append((session, rows, *at))
    return np.array(table, np.int64) if table else NO_CAPTURES
