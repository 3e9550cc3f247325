"""A model of your own on pipeline stages: a `StageModel`, run on one stage in this process and on two Ray actors. Same bits.

    python examples/custom_stage.py

The model is small, but one: three attention layers of one head each, whose weights are written by hand to do what trained
models were found to do, continue what has come before (Olsson et al., "In-context learning and induction heads", 2022):

    layer 0   looks one position back, and notes the token there
    layer 1   looks two positions back, and notes the token there
    layer 2   looks for where the current token and the one before it were last noted, and says what token followed

Its residual rows are `token | one back | two back | next | position`, its logits the `next` part.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import memra_pp
from memra_pp.cache import Cache
from memra_pp.kernels import append
from memra_pp.kernels.attention import attention
from memra_pp.kernels.shapes import AttentionSpec
from memra_pp.models import StepBatch

F32 = NDArray[np.float32]
LETTERS = " abcdefghijklmnopqrstuvwxyz.,:;!"
N_VOCAB, HEAD_DIM, CONTEXT, NEW = len(LETTERS), 64, 256, 64
TOKEN, BACK_1, BACK_2, NEXT = (slice(at, at + N_VOCAB) for at in range(0, 4 * N_VOCAB, N_VOCAB))
POSITION = slice(4 * N_VOCAB, 4 * N_VOCAB + HEAD_DIM)
N_EMBD = POSITION.stop
SPEC = AttentionSpec(n_head_kv=1, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, window=None, scale=1.0)


class Induction:
    """What one stage holds and computes: a `memra_pp.models.StageModel`."""

    @classmethod
    def load(cls, path: str, layers: range, device: Any) -> Induction:
        """Reads the tensors of `layers`; the embeddings on the first stage, the head on the last."""
        stage = cls()
        stage.cfg = memra_pp.ModelConfig.from_path(path)
        stage.layers, stage.device, stage.ops = layers, device, device.backend
        with np.load(Path(path) / "weights.npz") as tensors:  # reads what is asked for

            def matrix(name: str) -> Any:
                weights = tensors[name]
                return stage.ops.pack(*weights.shape, [weights])

            stage.weights = {il: {name: matrix(f"{il}.{name}") for name in "qkvo"} for il in layers}
            stage.tokens, stage.positions = (tensors["tokens"], tensors["positions"]) if layers.start == 0 else (None, None)
            stage.head = matrix("head") if layers.stop == stage.cfg.n_layer else None
        return stage

    def workspace_bytes(self, max_rows: int) -> int:
        """f32 rows of x, q, k, v, what is mixed of them, what is added to x, and logits."""
        return 4 * max_rows * (2 * N_EMBD + 4 * HEAD_DIM + N_VOCAB)

    def forward(self, batch: StepBatch, x: NDArray[Any], caches: Sequence[Cache]) -> F32:
        """Rows of any number of sessions, one session after the other. A row's bits do not depend on who else is there: those
        of `ops.matmul` and `attention` do not, those of NumPy's `@` would."""
        if self.tokens is not None:
            x = self.tokens[x] + self.positions[batch.positions]
        for il in self.layers:
            weights = self.weights[il]
            q, k, v = (self.ops.matmul(x, weights[name]) for name in "qkv")
            mixed = np.empty_like(v)
            for segment, rows, cache in zip(batch.segments, batch.slices, caches, strict=True):
                kv = cache.kv[il]
                append(kv, segment.pos, k[rows], v[rows], cache.retain_from(kv))  # quantises
                formats = kv.layout.k_fmt, kv.layout.v_fmt
                heads = q[rows].reshape(-1, 1, HEAD_DIM)
                mixed[rows] = attention(heads, kv.k, kv.v, formats, SPEC, segment.pos, kv.base, self.device.threads)
            x = x + self.ops.matmul(mixed, weights["o"])
        return x if self.head is None else self.ops.matmul(x[batch.logit_rows], self.head)


def write_model(folder: Path) -> None:
    """The weights, and a `config.json`, out of which every stage's bytes are sized."""
    config = {
        "model_type": "llama",  # one whose layers keep what ours do: K and V of every position
        "num_hidden_layers": 3,
        "hidden_size": N_EMBD,
        "num_attention_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": N_VOCAB,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    speeds = np.random.default_rng(1).uniform(0, np.pi, HEAD_DIM // 2)
    angles = np.outer(np.arange(CONTEXT), speeds)
    token, position = np.eye(N_VOCAB), np.eye(HEAD_DIM)
    first, second = slice(0, N_VOCAB), slice(N_VOCAB, 2 * N_VOCAB)
    tensors = {
        "tokens": matrix(N_VOCAB, N_EMBD, (slice(None), TOKEN, token)),
        "positions": matrix(CONTEXT, N_EMBD, (slice(None), POSITION, np.hstack([np.cos(angles), np.sin(angles)]))),
        "head": matrix(N_VOCAB, N_EMBD, (slice(None), NEXT, token)),
        "2.q": matrix(HEAD_DIM, N_EMBD, (first, TOKEN, 16 * token), (second, BACK_1, 16 * token)),
        "2.k": matrix(HEAD_DIM, N_EMBD, (first, BACK_1, token), (second, BACK_2, token)),
        "2.v": matrix(HEAD_DIM, N_EMBD, (first, TOKEN, token)),
        "2.o": matrix(N_EMBD, HEAD_DIM, (NEXT, first, token)),
    }
    for il, note in ((0, BACK_1), (1, BACK_2)):
        cos, sin = np.diag(np.cos(speeds * (il + 1))), np.diag(np.sin(speeds * (il + 1)))
        turned = np.block([[cos, sin], [-sin, cos]])  # of a position, to the one `il + 1` before it
        tensors[f"{il}.q"] = matrix(HEAD_DIM, N_EMBD, (slice(None), POSITION, turned))
        tensors[f"{il}.k"] = matrix(HEAD_DIM, N_EMBD, (slice(None), POSITION, position))
        tensors[f"{il}.v"] = matrix(HEAD_DIM, N_EMBD, (first, TOKEN, token))
        tensors[f"{il}.o"] = matrix(N_EMBD, HEAD_DIM, (note, first, token))
    np.savez(folder / "weights.npz", **tensors)


def matrix(rows: int, columns: int, *blocks: tuple[slice, slice, NDArray[Any]]) -> F32:
    """Zeros but for some blocks."""
    made = np.zeros((rows, columns), np.float32)
    for across, down, block in blocks:
        made[across, down] = block
    return made


def run(model: Path, text: str, **options: Any) -> tuple[F32, str]:
    """The logits after every letter of a text, and how it goes on."""
    ids = [LETTERS.index(letter) for letter in text]
    with memra_pp.launch(model, stage_model=Induction, **options) as pipe:
        with pipe.open(ids, max_new_tokens=NEW) as session:
            rows = session.prefill(all_logits=True)
            for stage in pipe.stats()["stages"]:
                layers = ", ".join(map(str, range(*stage["layers"])))
                print(f"  process {stage['pid']} has layers {layers}: {stage['allocated_bytes']:,} bytes of cache")
        tokens = list(pipe.generate(ids, max_new_tokens=NEW))
        before = pipe.stats()["traversals"]
        drafted = list(pipe.generate(ids, max_new_tokens=NEW, draft=memra_pp.Draft(k=8)))
        taken = pipe.stats()["traversals"] - before
    if drafted != tokens:
        raise SystemExit("drafts have changed the text")
    said = "".join([LETTERS[token] for token in tokens])
    print(f"  {said!r}, and with drafts the same in {taken} traversals")
    return rows, said


def main() -> None:
    period = "one stage, and then more; "
    text = period + period[:5]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        print(f"{text!r} goes on, by one stage in this process:")
        alone = run(model, text, backend="local", stages=1)
        print("by two stages, each a Ray actor:")
        apart = run(model, text, stages=2)
    if not np.array_equal(alone[0], apart[0]) or alone[1] != apart[1]:
        raise SystemExit("the logits differ")
    print(f"{len(text)} rows of {N_VOCAB} logits and {NEW} tokens: the same bits")


if __name__ == "__main__":
    main()
