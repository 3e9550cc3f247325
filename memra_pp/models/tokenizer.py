"""Text to token ids and back, for SentencePiece vocabularies: those inside GGUF files, and `tokenizer.model` files."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..config.fields import show
from ..config.gguf_file import GgufArray, open_gguf
from ..errors import ConfigError, InputError

SPACE = "\u2581"
"""What stands for a space inside pieces."""

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
"""Piece types, the same numbers in `sentencepiece_model.proto` and in `tokenizer.ggml.token_type`."""

_TURN_ENDS = ("<end_of_turn>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|end|>")
"""Control tokens that end a model's turn, beside its `eos`."""


@dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece BPE vocabulary: a text, a score and a type for each id, with U+2581 for spaces."""

    source: Path
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unk_id: int
    bos_id: int | None
    eos_ids: frozenset[int]
    dummy_prefix: bool


class Tokenizer:
    """Encodes and decodes text.

    `bos_id` is None for a model that begins without one. `eos_ids` end a turn. Control and user-defined tokens written
    in the text (`<start_of_turn>`) become their ids, as in llama.cpp with `parse_special`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._sp = _processor(vocabulary)
        self.n_vocab = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The ids of `text`, after `bos_id` if the model has one and `add_bos` says so.

        Raises:
            InputError: `text` has a lone surrogate, which no UTF-8 spells.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(
                f"text has the lone surrogate {text[e.start]!r} at {e.start}, which is no character; "
                f"decode the bytes as UTF-8 with errors='replace'"
            ) from e
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        unknown = self._vocabulary.pieces[self._vocabulary.unk_id]
        for i, part in enumerate(text.split(unknown)):
            ids += [self._vocabulary.unk_id] * (i > 0) + self._sp.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with U+FFFD for bytes that are no UTF-8; a leading `bos_id` has none.

        Raises:
            InputError: an id outside the vocabulary.
        """
        stream = self.stream()
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for.

        Raises:
            InputError: an id outside the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise InputError(f"token {token}: this vocabulary has ids 0 to {self.n_vocab - 1}")
        text = self._vocabulary.pieces[token]
        return _byte(text) if self._vocabulary.types[token] == _BYTE else text.replace(SPACE, " ").encode()

    @property
    def dummy_prefix(self) -> bool:
        """Whether `encode` puts a space in front of the text, which `decode` takes away."""
        return self._vocabulary.dummy_prefix


class StreamDecoder:
    """Decodes one id at a time; a character whose bytes have not all come yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._at_text = tokenizer.dummy_prefix

    def push(self, token: int) -> str:
        """What can be shown after one more token; "" while a character is incomplete.

        Raises:
            InputError: an id outside the vocabulary.
        """
        piece = self._tokenizer.piece(token)
        start, self._at_start = self._at_start, False
        if start and token == self._tokenizer.bos_id:
            return ""
        if self._at_text:
            piece, self._at_text = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", True)


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a model: a GGUF file with a SentencePiece vocabulary, or a `tokenizer.model` or its directory.

    Raises:
        ConfigError: there is none, it is of another kind or damaged, or the packages it needs are missing.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return Tokenizer(_from_gguf(path))
    file = path / "tokenizer.model" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{path}: no tokenizer found; supported are a .gguf file with tokenizer.ggml.model=llama and a directory "
            f"with a SentencePiece tokenizer.model; pass token ids instead"
        )
    return Tokenizer(_from_model(file))


def _from_gguf(path: Path) -> Vocabulary:
    meta = open_gguf(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind != "llama":
        raise ConfigError(
            f"{path}: tokenizer.ggml.model={show(kind)}; only llama (SentencePiece) is read; pass token ids instead"
        )
    tokens, scores, types = (_array(path, meta, name) for name in ("tokens", "scores", "token_type"))
    n = len(tokens)
    if not n or len(scores) != n or len(types) != n:
        raise ConfigError(f"{path}: {n} tokens, {len(scores)} scores and {len(types)} types; there must be one of each a token")

    def token_id(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < n):
            raise ConfigError(f"{path}: tokenizer.ggml.{name}_token_id={show(value)} is not one of the {n} tokens")
        return value

    unk = token_id("unknown")
    return Vocabulary(
        source=path,
        pieces=[t.replace(" ", SPACE) if kind == _USER else t for t, kind in zip(tokens, types, strict=True)],
        scores=scores,
        types=types,
        unk_id=(list(types).index(_UNKNOWN) if _UNKNOWN in types else 0) if unk is None else unk,
        bos_id=token_id("bos") if meta.get("tokenizer.ggml.add_bos_token", True) else None,
        eos_ids=_ends([token_id(name) for name in ("eos", "eot", "eom")], tokens, types),
        dummy_prefix=bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
    )


def _array(path: Path, meta: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, GgufArray):
        raise ConfigError(f"{path}: tokenizer.ggml.{name}={show(value)} is not an array; fetch the file again")
    return value.values


def _from_model(path: Path) -> Vocabulary:
    _, pb, message = _sentencepiece(path)
    proto = pb.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except (OSError, message.DecodeError) as e:
        raise ConfigError(f"{path}: not a SentencePiece model ({e}); fetch the file again") from e
    trainer = proto.trainer_spec
    if trainer.model_type != trainer.BPE or not proto.pieces:
        raise ConfigError(f"{path}: not a SentencePiece model of type BPE; pass token ids instead")
    pieces, types = [p.piece for p in proto.pieces], [p.type for p in proto.pieces]
    return Vocabulary(
        source=path,
        pieces=pieces,
        scores=[p.score for p in proto.pieces],
        types=types,
        unk_id=types.index(_UNKNOWN) if _UNKNOWN in types else 0,
        bos_id=trainer.bos_id if 0 <= trainer.bos_id < len(pieces) else None,
        eos_ids=_ends([trainer.eos_id if 0 <= trainer.eos_id < len(pieces) else None], pieces, types),
        dummy_prefix=proto.normalizer_spec.add_dummy_prefix,
    )


def _ends(ids: Iterable[int | None], pieces: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """The given ids, and control tokens that are known to end a turn."""
    named = (i for i, kind in enumerate(types) if kind in (_CONTROL, _USER) and pieces[i] in _TURN_ENDS)
    return frozenset([*(i for i in ids if i is not None), *named])


def _processor(v: Vocabulary) -> Any:
    """A SentencePiece processor that finds control tokens in text too, which its own control type never does."""
    sentencepiece, pb, _ = _sentencepiece(v.source)
    proto = pb.ModelProto()
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = _BYTE in v.types
    trainer.unk_id, trainer.unk_piece = v.unk_id, v.pieces[v.unk_id]
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = v.dummy_prefix
    normalizer.remove_extra_whitespaces = False
    try:
        for piece, score, kind in zip(v.pieces, v.scores, v.types, strict=True):
            proto.pieces.add(piece=piece, score=score, type=_USER if kind == _CONTROL else kind)
        proto.pieces[v.unk_id].type = _UNKNOWN
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    except (RuntimeError, TypeError, ValueError) as e:
        raise ConfigError(f"{v.source}: its vocabulary does not load ({e}); fetch the file again") from e


def _sentencepiece(source: Path) -> tuple[Any, Any, Any]:
    try:
        import sentencepiece
        from google.protobuf import message
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as e:
        raise ConfigError(
            f"{source}: its tokenizer needs the sentencepiece and protobuf packages; pip install 'memra-pp[gguf]'"
        ) from e
    return sentencepiece, sentencepiece_model_pb2, message


def _byte(piece: str) -> bytes:
    """The byte that a piece such as `<0x0A>` stands for."""
    return bytes([int(piece[3:5], 16)])
