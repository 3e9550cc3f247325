"""`memra-pp bench`: a model on the stages asked for, measured in a bounded time."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ...config import ModelConfig, WeightBytes, read_weight_bytes
from ...driver.launch.cut import fence_for
from ...driver.launch.launch import PREFILL_CHUNK, model_path
from ...driver.shapes import most_drafts
from ...driver.speculation.drafters import MAX_DRAFTS
from ...errors import ConfigError, InputError, checked_int, require
from ...stage.worker import MAX_SESSIONS
from ..demo import demo_weights
from ..progress import Bar
from ..run import launched, require_writable
from .figures import Bench, Launch, Model
from .machine import machine
from .measure import Asked, measure
from .probes import PROMPT
from .report import page
from .text import tables

LEAST_NEW = 32
"""Rows behind a prompt that a bench needs, beside those of a round's drafts."""


def bench(args: argparse.Namespace) -> None:
    """Measures, and prints tables, or one object; writes the report if one was asked for."""
    if args.report is not None:
        require_writable(Path(args.report), "--report")
    began = datetime.now().astimezone().isoformat(timespec="seconds")
    path = model_path(demo_weights() if args.model is None else args.model)
    cfg = ModelConfig.from_path(path)
    fence_for(cfg, args.stages, args.cuts)
    asked, weights, here = _asked(args, cfg), _weights(path, cfg), machine()
    bar = None if args.json else Bar()
    with launched(path, args) as (pipe, loaded):
        stats = pipe.stats()
        figures = measure(pipe, weights, asked, bar or (lambda text, done, of: None))
    if bar is not None:
        bar.clear()
    found = Bench(
        command=shlex.join(["memra-pp", *args.words]),
        began=began,
        machine=here,
        model=_model(path, cfg, weights),
        launch=_launch(stats, args.backend, loaded),
        figures=figures,
    )
    if args.report is not None:
        Path(args.report).write_text(page(found), encoding="utf-8", errors="backslashreplace")
    print(json.dumps(asdict(found)) if args.json else tables(found))


def _asked(args: argparse.Namespace, cfg: ModelConfig) -> Asked:
    """What to measure, checked before anything is started."""
    sessions = checked_int(InputError, "--sessions", args.sessions, 1, MAX_SESSIONS)
    most = min(MAX_DRAFTS, most_drafts(PREFILL_CHUNK, cfg.n_vocab))
    drafts = checked_int(InputError, "--speculate", args.speculate, 0, most)
    rows = cfg.max_ctx if args.max_ctx is None else args.max_ctx
    least = PROMPT + LEAST_NEW + drafts
    require(rows >= least, InputError, "the context", rows, f"{least} rows or more, to be benched with --speculate {drafts}")
    return Asked(args.seconds, args.prompts, sessions, drafts)


def _weights(path: Path, cfg: ModelConfig) -> WeightBytes | None:
    """What the model's files hold, if their headers tell."""
    try:
        weights = read_weight_bytes(path, cfg)
    except ConfigError:
        return None
    return None if weights.estimated else weights


def _model(path: Path, cfg: ModelConfig, weights: WeightBytes | None) -> Model:
    return Model(
        name=path.name,
        arch=cfg.arch,
        layers=cfg.n_layer,
        n_embd=cfg.n_embd,
        n_vocab=cfg.n_vocab,
        max_ctx=cfg.max_ctx,
        weight_bytes=None if weights is None else weights.whole,
    )


def _launch(stats: dict[str, Any], backend: str, loaded: float) -> Launch:
    return Launch(
        fence=tuple(stats["fence"]),
        cut_by=stats["cut"]["by"],
        backend=backend,
        kv=tuple(stats["kv"]),
        ring=stats["ring"],
        load_s=loaded,
    )
