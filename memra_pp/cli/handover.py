"""`memra-pp export` and `import`: a text that begins by some stages and goes on by others."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..driver.sampling import SamplingParams
from ..driver.session import Session
from ..models import load_tokenizer
from ..models.tokenizer import Tokenizer
from .demo import demo_weights
from .run import emit, encoded, launched, require_writable


def export(args: argparse.Namespace) -> None:
    """Continues a text, and writes the session to a file."""
    model = demo_weights() if args.model is None else Path(args.model)
    require_writable(Path(args.out), "--out")
    ids, tokenizer = encoded(model, args)
    with launched(model, args) as (pipe, _):
        emit(args.prompt, args.json)
        with pipe.open(ids, max_new_tokens=args.max_new + args.room) as session:
            report = _continued(session, tokenizer, args)
            session.export(args.out)
    size = os.path.getsize(args.out)
    _say(report | {"file": args.out, "bytes": size}, f"{args.out}: {report['rows']} rows, {size:,} bytes", args)


def import_(args: argparse.Namespace) -> None:
    """Continues the text of an exported session."""
    model = demo_weights() if args.model is None else Path(args.model)
    tokenizer = load_tokenizer(model)
    with launched(model, args) as (pipe, _), pipe.import_session(args.file) as session:
        report = _continued(session, tokenizer, args)
    _say(report, f"{len(report['tokens'])} tokens, {report['rows']} rows", args)


def _continued(session: Session, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """Streams what follows, greedily."""
    stream, text, tokens = tokenizer.stream(), "", []
    greedy = SamplingParams(temperature=0, eos_ids=tuple(tokenizer.eos_ids))
    try:
        for token in session.generate(args.max_new, greedy):
            tokens.append(token)
            text += emit(stream.push(token), args.json)
        text += emit(stream.flush(), args.json)
    finally:
        emit("\n", args.json)
    return {"text": text, "tokens": tokens, "rows": session.pos}


def _say(report: dict[str, Any], summary: str, args: argparse.Namespace) -> None:
    print(json.dumps(report) if args.json else summary)
