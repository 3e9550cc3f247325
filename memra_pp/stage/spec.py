"""`StageSpec`: everything a stage is told at its start. Decided once by the driver."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache import KvPolicy, stage_layers
from ..config import ModelConfig


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
