"""`Pipeline`: a launched model. Opens sessions, generates, tells how its stages fare, and closes everything."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from ..admission import Ledger, session_ctx
from ..cache.sizing import Recurrent
from ..config import KvPlan, ModelConfig
from ..errors import AdmissionError, InputError, StageError, checked_int, require
from ..models.tokenizer import Tokenizer, load_tokenizer
from ..stage.frames import CLOSE, MAX_BODY_BYTES, OPEN, TOPK, Entry
from ..stage.spec import MAX_SNAPSHOTS, SessionShape, StageSpec
from .chain import Chain
from .drafters import CallableDrafter, Draft, Drafter, NgramDrafter
from .locks import OwnedLock
from .model_drafter import ModelDrafter
from .sampling import SamplingParams
from .session import Session
from .tokens import checked_prompt

MAX_NEW_TOKENS = 1 << 40


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
        self._ending: set[int] = set()
        self._gate = OwnedLock()
        self._drafters: dict[Path, Pipeline] = {}
        self._counters = dict.fromkeys(("rounds", "drafted", "accepted", "rebuilds"), 0)
        self._counting, self._loading = threading.Lock(), threading.Lock()

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
        recurrent: Recurrent = "replay",
        snapshots: int = 1,
    ) -> Session:
        """Opens a session for a prompt of token ids: every stage allocates its share, or none does.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: rows to allow for after the prompt; the context is clamped to `max_ctx`.
            speculate: most drafts of a round; a `verify` takes one token more.
            recurrent: how a rollback finds recurrent state: `replay` or `states`.
            snapshots: most live snapshots at a time.

        Raises:
            InputError: a bad prompt or argument, or a prompt longer than the context.
            AdmissionError: a stage's device cannot hold its share; the message names it and the bytes.
            StageError: a stage failed.
        """
        tokens = checked_prompt(prompt, self.cfg.n_vocab, self.max_ctx)
        most = min(self.prefill_chunk, MAX_BODY_BYTES // (TOPK.itemsize * self.cfg.n_vocab)) - 1
        max_new_tokens = checked_int(InputError, "max_new_tokens", max_new_tokens, 0, MAX_NEW_TOKENS)
        speculate = checked_int(InputError, "speculate", speculate, 0, most)
        snapshots = checked_int(InputError, "snapshots", snapshots, 0, MAX_SNAPSHOTS)
        known = isinstance(recurrent, str) and recurrent in get_args(Recurrent)
        require(known, InputError, "recurrent", recurrent, "replay or states")
        ctx = session_ctx(len(tokens), max_new_tokens, speculate, self.max_ctx)
        session = Session(self, next(self._ids), tokens, SessionShape(ctx, snapshots, recurrent, speculate))
        if self._gate.mine or self.chain.in_step:
            raise StageError("a session was opened in the middle of a step of this thread, by a signal handler or a finalizer")
        self._alone(lambda: self._open(session))
        return session

    def generate(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        draft: Draft | None = None,
    ) -> Iterator[int]:
        """Tokens after a prompt, one by one, until `max_new_tokens`, the context's end, a text of `sampling.stop` (its last
        token is given out) or one of `sampling.eos_ids` (default: the model's own), which is not.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to give out.
            sampling: how tokens are picked (None: greedily).
            draft: how to speculate (None: not at all). It changes the time a text takes, never the text.

        Raises:
            InputError, AdmissionError, ConfigError, StageError: as `open`, and for a drafter that cannot be used, when the
                first token is asked for.
        """
        asked: dict[str, Any] = {"speculate": draft.k, "recurrent": draft.recurrent} if isinstance(draft, Draft) else {}
        with self.open(prompt, max_new_tokens=max_new_tokens, **asked) as session:
            yield from session.generate(max_new_tokens, sampling, draft)

    @contextlib.contextmanager
    def drafter(self, draft: Draft, ctx: int) -> Iterator[Drafter]:
        """The drafter of one generation of at most `ctx` rows. A drafting model is loaded once, and stays with the pipeline.

        Raises:
            ConfigError: the drafting model cannot be used.
        """
        if isinstance(draft.by, str) and draft.by == "ngram":
            yield NgramDrafter()
        elif isinstance(draft.by, str | PathLike):
            drafter = ModelDrafter(self._drafting(draft.by), self.cfg.n_vocab, ctx)
            try:
                yield drafter
            finally:
                drafter.close()
        elif hasattr(draft.by, "propose"):
            yield draft.by
        else:
            yield CallableDrafter(draft.by)

    def _drafting(self, by: str | PathLike[str]) -> Pipeline:
        from .launch import launch, model_path

        model = model_path(by)
        with self._loading:
            if model not in self._drafters:
                ModelDrafter.check(ModelConfig.from_path(model), self.cfg.n_vocab)
                self._drafters[model] = launch(model, stages=1, backend="local", mtp=False)
            return self._drafters[model]

    def count(self, **more: int) -> None:
        """Adds to the counters of `stats()`."""
        with self._counting:
            for name, value in more.items():
                self._counters[name] += value

    def stats(self) -> dict[str, Any]:
        """What the pipeline and each stage have done, and the bytes planned for the live sessions beside those allocated.

        `traversals` counts frames through the chain, of which `rounds` were rounds, with `drafted` drafts and `accepted` of
        them; `rebuilds` counts sessions whose tokens were replayed because a stage's device had failed.

        Raises:
            StageError: the pipeline is closed, or a stage does not answer.
        """
        self._finish_ending()
        stages = [
            {**stage, "planned_bytes": planned}
            for stage, planned in zip(self.chain.stats(), self._ledger.reserved, strict=True)
        ]
        return {
            "fence": list(self.fence),
            "kv": list(dict.fromkeys("/".join(self.policy.formats(p)) for p in self.cfg.layers if isinstance(p, KvPlan))),
            "ring": self.policy.ring,
            "sessions": len(self._sessions),
            "traversals": self.chain.traversals,
            **self._counters,
            "stages": stages,
        }

    def close(self) -> None:
        """Ends every session and stage; closing twice is fine."""
        for session in list(self._sessions.values()):
            session.abandon()
        self._sessions.clear()
        for drafting in self._drafters.values():
            drafting.close()
        self.chain.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def release(self, session: Session) -> None:
        """Closes a session on every stage and gives its bytes back.

        Cut short, or begun by a finalizer in the middle of a step, it goes on at the next open, close or `stats()`.
        """
        self._ending.add(session.id)
        self._sessions.pop(session.id, None)
        self._finish_ending()

    def _finish_ending(self) -> None:
        if self._ending and not (self._gate.mine or self.chain.in_step):
            self._alone(self._end_all)

    def _alone(self, action: Callable[[], None]) -> None:
        """Opens and closes are done one at a time: none ends what another is about to open."""
        try:
            if not self._gate.acquire(self.step_timeout):
                raise StageError(f"the pipeline was busy for {self.step_timeout:.0f} s with other threads' opens and closes")
            action()
        finally:
            self._gate.release_if_mine()

    def _end_all(self) -> None:
        """Closes the sessions that are ending, on the stages that hold them, and only then in the ledger."""
        for number in list(self._ending):
            self.chain.roundtrip(Entry(CLOSE, number, 0, self.chain.epoch), [], self.step_timeout)
            self._ledger.release(number)
            self._ending.discard(number)

    def _open(self, session: Session) -> None:
        self._end_all()
        shape = session.shape
        charges = [sum(a.bytes for a in spec.layout(shape)) for spec in self._specs]
        self._ending.add(session.id)  # until every stage has said that it is open
        try:
            self._ledger.reserve(session.id, charges)
        except AdmissionError:
            self._ending.discard(session.id)
            raise
        entry = Entry(OPEN, session.id, 0, self.chain.epoch)
        reply = self.chain.roundtrip(entry, [], self.step_timeout, {"args": asdict(shape), "bytes": []})
        fault, allocated = reply.fault(0), reply.notes[0]["bytes"]
        if fault is None and allocated == charges:
            self._sessions[session.id] = session
            self._ending.discard(session.id)
            return
        self._end_all()
        if fault is None:
            raise StageError(f"planned {charges} bytes a stage and {allocated} were allocated: this is a bug")
        stage, kind, message = fault
        raise (AdmissionError if kind == "CapacityExceeded" else StageError)(f"stage {stage}: {message}")
