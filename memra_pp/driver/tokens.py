"""Token ids from outside, as plain integers in the vocabulary."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ..errors import InputError


def checked_prompt(prompt: Iterable[int], n_vocab: int, max_ctx: int) -> list[int]:
    """A prompt's ids as plain integers.

    Raises:
        InputError: as `checked_tokens`, or it is longer than the context.
    """
    tokens = checked_tokens(prompt, n_vocab, "the prompt")
    if len(tokens) > max_ctx:
        raise InputError(f"a prompt of {len(tokens)} tokens: the context is {max_ctx}; shorten the prompt")
    return tokens


def checked_tokens(tokens: Iterable[int], n_vocab: int, name: str) -> list[int]:
    """Token ids as plain integers.

    Raises:
        InputError: none, not integers, or outside `[0, n_vocab)`.
    """
    try:
        ids = [operator.index(t) for t in tokens]
    except TypeError:
        raise InputError(f"{name} must be token ids, integers from the tokenizer") from None
    if not ids:
        raise InputError(f"{name} is empty: pass at least one token")
    bad = next((t for t in ids if not 0 <= t < n_vocab), None)
    if bad is not None:
        raise InputError(f"{name}: there is no token {bad}; the model's vocabulary is 0 to {n_vocab - 1}")
    return ids


def chunks(tokens: list[int], size: int) -> list[list[int]]:
    """The tokens in parts of at most `size`."""
    return [tokens[at : at + size] for at in range(0, len(tokens), size)]
