"""`StageSpec`: everything a stage is told at its start. The driver decides it once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..admission import SessionShape
from ..cache import KvPolicy, stage_layers, stage_layout
from ..cache.sizing import Allocation
from ..config import ModelConfig
from ..kernels.devices import kind_of


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline.

    `model` is the path of the weights; `device` names where the stage runs; `share` is the number of stages that divide the
    memory of its machine, or of its GPU; `budget_bytes` is the stage's part of its device's bytes for sessions (None: what is
    free after loading). `threads` of 0: the cores of its machine, shared by the stages there. `node` is
    what the launch calls that machine.
    """

    model: str
    cfg: ModelConfig
    fence: tuple[int, ...]
    stage: int
    policy: KvPolicy
    threads: int
    max_rows: int
    device: str = "cpu"
    share: int = 1
    budget_bytes: int | None = None
    node: str = ""

    @property
    def layers(self) -> range:
        """The layers this stage runs."""
        return stage_layers(self.cfg, self.fence, self.stage)

    @property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.fence) - 1

    @property
    def last(self) -> bool:
        """Whether the head is here."""
        return self.stage == self.stages - 1

    def among(self, neighbours: int, cores: int, node: str) -> StageSpec:
        """This stage on a machine of so many cores, one of `neighbours` stages there."""
        share = neighbours if kind_of(self.device) == "cpu" else self.share
        return replace(self, share=share, threads=self.threads or threads_each(cores, neighbours), node=node)

    def __str__(self) -> str:
        return f"stage {self.stage} (layers {self.layers.start} to {self.layers.stop - 1})"

    @property
    def pool(self) -> str:
        """Whose bytes for sessions these are: stages of one name share them. Each stage of a GPU has its own part of it, since
        what one has reserved there is taken from the others at once."""
        shared = kind_of(self.device) == "cuda" and self.share > 1
        return f"{self.device} (of stage {self.stage})" if shared else self.device

    def layout(self, shape: SessionShape) -> list[Allocation]:
        """Every buffer that a session allocates on this stage."""
        return stage_layout(self.cfg, self.fence, self.stage, shape.ctx, self.policy, **shape.states)


def threads_each(cores: int, stages: int) -> int:
    """The kernel threads of each of so many stages that share a machine's cores."""
    return max(1, cores // stages)
