"""`ModelDrafter`: a smaller model, run in the driver, that decodes drafts greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...config import ModelConfig
from ...errors import AdmissionError, ConfigError

if TYPE_CHECKING:
    from ..calls import SessionSnapshot
    from ..pipeline import Pipeline
    from ..session import Session


class ModelDrafter:
    """A `Drafter` over a pipeline of its own. Its session keeps what it shares with the text, and forgets the rest.

    Raises:
        ConfigError: the model's vocabulary is not of `n_vocab` tokens.
    """

    def __init__(self, pipe: Pipeline, n_vocab: int, ctx: int) -> None:
        self.check(pipe.cfg, n_vocab)
        self._pipe, self._ctx = pipe, min(ctx, pipe.max_ctx)
        self._session: Session | None = None
        self._base: SessionSnapshot | None = None

    @staticmethod
    def check(cfg: ModelConfig, n_vocab: int) -> None:
        """Raises ConfigError unless the model can draft for one with a vocabulary of `n_vocab` tokens."""
        if cfg.n_vocab != n_vocab:
            raise ConfigError(
                f"a drafter with a vocabulary of {cfg.n_vocab} tokens for a model with {n_vocab}: take one of its family"
            )

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """`k` tokens, greedily; fewer where the drafter's own context ends."""
        room = self._ctx - len(tokens) + 1
        if min(k, room) < 1:
            return []
        try:
            session, fresh = self._at(tokens)
        except AdmissionError:  # no room for a drafter is no reason to end a text
            return []
        best = session.extend(fresh, want="argmax") if session.pos else session.prefill(want="argmax")
        drafts = [int(best)]
        self._base = session.snapshot()
        while len(drafts) < min(k, room):
            drafts.append(int(session.decode(drafts[-1], want="argmax")))
        return drafts

    def close(self) -> None:
        """Closes the drafter's session; its pipeline stays."""
        if self._session is not None:
            self._session.close()
            self._session = self._base = None

    def _at(self, tokens: Sequence[int]) -> tuple[Session, Sequence[int]]:
        """The session, standing on a beginning of `tokens`, and the tokens after it, one at least."""
        session, base = self._session, self._base
        if session is not None and base is not None:
            fed = session.tokens
            shared = next((i for i, (a, b) in enumerate(zip(fed, tokens, strict=False)) if a != b), min(len(fed), len(tokens)))
            shared = min(shared, len(tokens) - 1)
            if shared >= base.pos:
                session.rollback(base, shared - base.pos)
                base.close()
                return session, tokens[shared:]
        self.close()
        self._session = self._pipe.open(tokens, max_new_tokens=self._ctx - len(tokens))
        return self._session, tokens
