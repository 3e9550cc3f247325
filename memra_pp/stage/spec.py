"""`StageSpec`: everything a stage is told at its start, and `SessionShape`: what it is told of a session. The driver decides
both once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from ..cache import KvPolicy, stage_layers, stage_layout
from ..cache.sizing import Allocation, Recurrent, state_copies
from ..config import ModelConfig
from ..errors import InputError, checked_int, require

MAX_SNAPSHOTS = 32


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline.

    `model` is the path of the weights; `share` is the number of stages that divide this machine's memory; `budget_bytes`
    bounds the stage's cache (None: what is free after loading).
    """

    model: str
    cfg: ModelConfig
    fence: tuple[int, ...]
    stage: int
    policy: KvPolicy
    threads: int
    max_rows: int
    share: int = 1
    budget_bytes: int | None = None

    @property
    def layers(self) -> range:
        """The layers this stage runs."""
        return stage_layers(self.cfg, self.fence, self.stage)

    @property
    def last(self) -> bool:
        """Whether the head is here."""
        return self.stage == len(self.fence) - 2

    def __str__(self) -> str:
        return f"stage {self.stage} (layers {self.layers.start} to {self.layers.stop - 1})"

    def layout(self, shape: SessionShape) -> list[Allocation]:
        """Every buffer that a session allocates on this stage."""
        return stage_layout(self.cfg, self.fence, self.stage, shape.ctx, self.policy, **shape.states)


@dataclass(frozen=True)
class SessionShape:
    """What a session is opened for: rows of context, snapshots that may be live at once, how recurrent state rolls back, and
    the most drafts of a round."""

    ctx: int
    snapshots: int
    recurrent: Recurrent
    speculate: int

    @classmethod
    def checked(cls, given: Any, spec: StageSpec) -> SessionShape:
        """A shape out of a frame's note.

        Raises:
            InputError: a field is missing, or out of the bounds of this stage.
        """
        of = f"{spec}: a session with "
        require(isinstance(given, dict), InputError, of + "args", given, "a map of its shape")
        recurrent: Any = given.get("recurrent")
        require(recurrent in get_args(Recurrent), InputError, of + "recurrent", recurrent, "replay or states")
        bounds = {"ctx": (1, spec.cfg.max_ctx), "snapshots": (0, MAX_SNAPSHOTS), "speculate": (0, spec.max_rows)}
        number = {name: checked_int(InputError, of + name, given.get(name), *between) for name, between in bounds.items()}
        return cls(recurrent=recurrent, **number)

    @property
    def states(self) -> dict[str, Any]:
        """The fields that say how many copies of the recurrent state there are."""
        return {name: value for name, value in asdict(self).items() if name != "ctx"}

    @property
    def slots(self) -> int:
        """Copies of the recurrent state: the user's snapshots, then the states that a verify keeps."""
        return state_copies(**self.states)
