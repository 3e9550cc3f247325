"""What goes into a model and what comes out of it as a person reads it: a text, or the token ids themselves."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..config import ModelConfig
from ..driver.launch.cut import fence_for
from ..driver.launch.launch import model_path
from ..driver.sampling import SamplingParams
from ..driver.tokens import checked_prompt
from ..errors import ConfigError, InputError
from ..models import load_tokenizer, stage_model_for
from ..models.tokenizer import Tokenizer


class Decoder(Protocol):
    """Shows tokens as they come; `flush` what was held back."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Ids:
    """A `Decoder` for a model whose tokenizer is not at hand: each token is its number."""

    def push(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Words:
    """A prompt's `ids` and how it is `shown`, how what follows is, and when that ends."""

    ids: list[int]
    shown: str
    decoder: Decoder
    greedy: SamplingParams


def read_words(model: Path, args: argparse.Namespace) -> Words:
    """What `--prompt` or `--tokens` says. It, the model and the cuts are checked before anything is started.

    Raises:
        ConfigError: the model cannot be run, cut so or given text.
        InputError: the prompt is empty, of no tokens of the model, or longer than the context.
    """
    if args.prompt == "":
        raise InputError("the prompt is empty: give --prompt some text")
    cfg = ModelConfig.from_path(model_path(model))
    fence_for(cfg, args.stages, args.cuts)
    stage_model_for(cfg)
    max_ctx = cfg.max_ctx if args.max_ctx is None else args.max_ctx
    if args.tokens is not None:
        ids = checked_prompt(args.tokens, cfg.n_vocab, max_ctx)
        return Words(ids, " ".join(map(str, ids)), *decoding(None))
    tokenizer = tokenizer_of(model, "--tokens")
    return Words(checked_prompt(tokenizer.encode(args.prompt), cfg.n_vocab, max_ctx), args.prompt, *decoding(tokenizer))


def tokenizer_of(model: Path, option: str) -> Tokenizer:
    """A model's tokenizer. Raises ConfigError, which names the option that does without, if there is none that can be read."""
    try:
        return load_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(f"{error} ({option})") from error


def decoding(tokenizer: Tokenizer | None) -> tuple[Decoder, SamplingParams]:
    """How tokens are shown, and that the likeliest are taken until the turn ends."""
    if tokenizer is None:
        return Ids(), SamplingParams(temperature=0)
    return tokenizer.stream(), SamplingParams(temperature=0, eos_ids=tuple(tokenizer.eos_ids))
