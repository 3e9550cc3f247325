"""`memra-pp export` and `import`: a text that begins by some stages and goes on by others."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..driver.sampling import SamplingParams
from ..driver.session import Session
from .demo import demo_weights
from .run import emit, launched, require_writable
from .words import Decoder, decoding, read_words, tokenizer_of


def export(args: argparse.Namespace) -> None:
    """Continues a text, and writes the session to a file."""
    model = demo_weights() if args.model is None else Path(args.model)
    require_writable(Path(args.out), "--out")
    words = read_words(model, args)
    with launched(model, args) as (pipe, _):
        emit(words.shown, args.json)
        with pipe.open(words.ids, max_new_tokens=args.max_new + args.room) as session:
            report = _continued(session, words.decoder, words.greedy, args)
            session.export(args.out)
    size = os.path.getsize(args.out)
    _say(report | {"file": args.out, "bytes": size}, f"{args.out}: {report['rows']} rows, {size:,} bytes", args)


def import_(args: argparse.Namespace) -> None:
    """Continues the text of an exported session."""
    model = demo_weights() if args.model is None else Path(args.model)
    decoder, greedy = decoding(None if args.ids else tokenizer_of(model, "--ids"))
    with launched(model, args) as (pipe, _), pipe.import_session(args.file) as session:
        report = _continued(session, decoder, greedy, args)
    _say(report, f"{len(report['tokens'])} tokens, {report['rows']} rows", args)


def _continued(session: Session, decoder: Decoder, greedy: SamplingParams, args: argparse.Namespace) -> dict[str, Any]:
    """Streams what follows, greedily."""
    text, tokens = "", []
    try:
        for token in session.generate(args.max_new, greedy):
            tokens.append(token)
            text += emit(decoder.push(token), args.json)
        text += emit(decoder.flush(), args.json)
    finally:
        emit("\n", args.json)
    return {"text": text, "tokens": tokens, "rows": session.pos}


def _say(report: dict[str, Any], summary: str, args: argparse.Namespace) -> None:
    print(json.dumps(report) if args.json else summary)
