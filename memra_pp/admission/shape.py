"""What a session is opened for, and the context that a request is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from ..cache.sizing import Recurrent, state_copies
from ..errors import InputError, checked_int, require

SLACK_ROWS = 8
SPECULATION_ROWS = 64
MAX_SNAPSHOTS = 32


@dataclass(frozen=True)
class SessionShape:
    """What a session is opened for: rows of context, snapshots that may be live at once, how recurrent state rolls back, and
    the most drafts of a round."""

    ctx: int
    snapshots: int = 1
    recurrent: Recurrent = "replay"
    speculate: int = 0

    @classmethod
    def checked(cls, given: Any, of: str, max_ctx: int, max_speculate: int) -> SessionShape:
        """A shape out of a map from elsewhere; `of` names its owner in errors.

        Raises:
            InputError: a field is missing, or out of its bounds.
        """
        require(isinstance(given, dict), InputError, of + "args", given, "a map of its shape")
        bounds = {"ctx": (1, max_ctx), "snapshots": (0, MAX_SNAPSHOTS), "speculate": (0, max_speculate)}
        number = {name: checked_int(InputError, of + name, given.get(name), *between) for name, between in bounds.items()}
        return cls(recurrent=checked_recurrent(given.get("recurrent"), of), **number)

    @property
    def states(self) -> dict[str, Any]:
        """The fields that say how many copies of the recurrent state there are."""
        return {name: value for name, value in asdict(self).items() if name != "ctx"}

    @property
    def slots(self) -> int:
        """Copies of the recurrent state: the user's snapshots, then the states that a verify keeps."""
        return state_copies(self.snapshots, self.recurrent, self.speculate)


def checked_recurrent(given: Any, of: str = "") -> Recurrent:
    """`replay` or `states`; InputError for anything else."""
    require(isinstance(given, str) and given in get_args(Recurrent), InputError, of + "recurrent", given, "replay or states")
    chosen: Recurrent = given
    return chosen


def slack_rows(speculate: int) -> int:
    """Rows charged beyond the prompt and the new tokens: a few, and what rounds may overshoot by."""
    return SLACK_ROWS + (SPECULATION_ROWS if speculate else 0)


def session_ctx(prompt: int, max_new_tokens: int, speculate: int, limit: int) -> int:
    """Rows charged and allocated for a request: prompt, new tokens and slack (more when speculating), at most `limit`."""
    return min(limit, prompt + max_new_tokens + slack_rows(speculate))


def longest_ctx(fits: Callable[[int], bool], limit: int) -> int:
    """The most rows up to `limit` for which `fits` holds, 0 for none. What does not fit does not fit with more rows either."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
