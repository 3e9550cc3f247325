"""`Drafting`: the drafters of a pipeline's generations, and the models that draft, which are loaded once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import ModelConfig
from ...kernels.cpu import available_bytes
from .drafters import CallableDrafter, Draft, Drafter, NgramDrafter
from .model_drafter import ModelDrafter

if TYPE_CHECKING:
    from ..pipeline import Pipeline

DRAFTERS_PART = 8
"""A drafting model's sessions may take this part, an eighth, of the memory that is free when it is loaded."""


class Drafting:
    """Drafting models, each a pipeline of one stage in this process, for a vocabulary of `n_vocab` tokens."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._loaded: dict[Path, Pipeline] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def drafter(self, draft: Draft, ctx: int) -> Iterator[Drafter]:
        """See `Pipeline.drafter`."""
        if isinstance(draft.by, str) and draft.by == "ngram":
            yield NgramDrafter()
        elif isinstance(draft.by, str | PathLike):
            drafter = ModelDrafter(self._model(draft.by), self._n_vocab, ctx)
            try:
                yield drafter
            finally:
                drafter.close()
        elif hasattr(draft.by, "propose"):
            yield draft.by
        else:
            yield CallableDrafter(draft.by)

    def close(self) -> None:
        """Ends every drafting model."""
        for pipe in self._loaded.values():
            pipe.close()

    def _model(self, by: str | PathLike[str]) -> Pipeline:
        from ..launch.launch import launch, model_path

        model = model_path(by)
        with self._lock:
            if model not in self._loaded:
                ModelDrafter.check(ModelConfig.from_path(model), self._n_vocab)
                budget = available_bytes() // DRAFTERS_PART
                self._loaded[model] = launch(model, stages=1, backend="local", mtp=False, budget_bytes=budget)
            return self._loaded[model]
