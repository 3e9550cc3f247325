"""`Pipeline`: a launched model. Opens sessions, generates, tells how its stages fare, and closes everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from ..admission import Ledger, session_ctx
from ..cache import stage_layout
from ..errors import AdmissionError, InputError, StageError
from ..models.tokenizer import Tokenizer, load_tokenizer
from ..stage.frames import CLOSE, MAX_BODY_BYTES, OPEN, Entry
from ..stage.spec import StageSpec
from .chain import Chain
from .session import Session, SessionShape, checked_prompt


class Pipeline:
    """Stages that are loaded and wired. `with memra_pp.launch(...) as pipe:` leaves nothing running behind it."""

    def __init__(
        self,
        model: Path,
        specs: Sequence[StageSpec],
        chain: Chain,
        max_ctx: int,
        prefill_chunk: int,
        step_timeout: float,
    ) -> None:
        self.cfg = specs[0].cfg
        self.fence = specs[0].fence
        self.policy = specs[0].policy
        self.max_ctx = max_ctx
        self.prefill_chunk = prefill_chunk
        self.step_timeout = step_timeout
        self.chain = chain
        self._model = model
        self._specs = list(specs)
        self._ledger = Ledger(chain.budgets)
        self._ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model's files hold none that can be read.
        """
        return load_tokenizer(self._model)

    def open(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int,
        speculate: int = 0,
        recurrent: str = "replay",
        snapshots: int = 1,
    ) -> Session:
        """Opens a session for a prompt of token ids: every stage allocates its share, or none does.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: rows to allow for after the prompt; the context is clamped to `max_ctx`.
            speculate: most draft tokens in one `verify`.
            recurrent: how a rollback finds recurrent state: `replay` or `states`.
            snapshots: most live snapshots at a time.

        Raises:
            InputError: a bad prompt or argument, or a prompt longer than the context.
            AdmissionError: a stage's device cannot hold its share; the message names it and the bytes.
            StageError: a stage failed.
        """
        tokens = checked_prompt(prompt, self.cfg.n_vocab, self.max_ctx)
        _require(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "0 or more")
        most = min(self.prefill_chunk, MAX_BODY_BYTES // (4 * self.cfg.n_vocab)) - 1
        _require(0 <= speculate <= most, "speculate", speculate, f"0 to {most}")
        _require(recurrent in ("replay", "states"), "recurrent", recurrent, "replay or states")
        _require(0 <= snapshots <= 64, "snapshots", snapshots, "0 to 64")
        ctx = session_ctx(len(tokens), max_new_tokens, speculate, self.max_ctx)
        shape = SessionShape(ctx, speculate, recurrent, snapshots)  # type: ignore[arg-type]
        session = Session(self, next(self._ids), tokens, shape)
        self._open(session)
        return session

    def generate(self, prompt: Iterable[int], *, max_new_tokens: int, eos_ids: Iterable[int] | None = None) -> Iterator[int]:
        """Greedy tokens after a prompt, one by one, until `max_new_tokens`, the context's end or one of `eos_ids`
        (default: the model's own), which is not given out.

        Raises:
            InputError, AdmissionError, StageError: as `open`.
        """
        with self.open(prompt, max_new_tokens=max_new_tokens) as session:
            yield from session.generate(max_new_tokens, eos_ids)

    def stats(self) -> dict[str, Any]:
        """What the pipeline and each stage have done, and the bytes planned for the live sessions beside those allocated."""
        stages = [
            {**stage, "planned_bytes": planned}
            for stage, planned in zip(self.chain.stats(), self._ledger.reserved, strict=True)
        ]
        return {
            "fence": list(self.fence),
            "kv": [self.policy.k, self.policy.v],
            "ring": self.policy.ring,
            "sessions": len(self._sessions),
            "traversals": self.chain.traversals,
            "stages": stages,
        }

    def close(self) -> None:
        """Ends every session and stage; closing twice is fine."""
        for session in list(self._sessions.values()):
            session.abandon()
        self._sessions.clear()
        self.chain.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def release(self, session: Session) -> None:
        """Closes a session on every stage and gives its bytes back."""
        try:
            self.chain.roundtrip(self._entry(CLOSE, session), [], self.step_timeout)
        finally:
            self._ledger.release(session.id)
            self._sessions.pop(session.id, None)

    def _open(self, session: Session) -> None:
        shape = session.shape
        charges = [self._charge(spec.stage, shape) for spec in self._specs]
        self._ledger.reserve(session.id, charges)
        note = {"args": asdict(shape), "bytes": []}
        try:
            reply = self.chain.roundtrip(self._entry(OPEN, session), [], self.step_timeout, note)
        except BaseException:
            self._ledger.release(session.id)
            raise
        fault, allocated = reply.fault(0), reply.notes[0]["bytes"]
        if fault is not None or allocated != charges:
            self.release(session)
            if fault is None:
                raise StageError(f"planned {charges} bytes a stage and {allocated} were allocated: this is a bug")
            stage, kind, message = fault
            raise (AdmissionError if kind == "CapacityExceeded" else StageError)(f"stage {stage}: {message}")
        self._sessions[session.id] = session

    def _charge(self, stage: int, shape: SessionShape) -> int:
        layout = stage_layout(
            self.cfg,
            self.fence,
            stage,
            shape.ctx,
            self.policy,
            snapshots=shape.snapshots,
            recurrent=shape.recurrent,
            speculate=shape.speculate,
        )
        return sum(a.bytes for a in layout)

    def _entry(self, op: int, session: Session) -> Entry:
        return Entry(op, session.id, 0, self.chain.epoch)


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InputError(f"{name}={value!r}: it must be {allowed}")
