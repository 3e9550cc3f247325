"""The transformers library's logits and greedy tokens, kept beside the tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import memra_pp
from memra_pp.cache import KvPolicy


def assert_logits_and_greedy_tokens(model: Path, policy: KvPolicy) -> None:
    """Three stages in this process give them, within the tolerance kept for the policy's formats."""
    golden, pair = np.load(model / "golden.npz"), f"{policy.k}_{policy.v}"
    ids, greedy = golden["input_ids"].tolist(), golden[f"greedy_{pair}"].tolist()
    with (
        memra_pp.launch(model, stages=3, backend="local", policy=policy) as pipe,
        pipe.open(ids, max_new_tokens=len(greedy)) as session,
    ):
        logits = session.prefill(all_logits=True)
        error = np.abs(logits - golden[f"logits_{pair}"])
        mean, most = golden[f"tol_{pair}"]
        assert error.mean() < mean
        assert error.max() < most
        out, last = [], logits[-1]
        for _ in greedy:
            out.append(int(last.argmax()))
            last = session.decode(out[-1])
    assert out == greedy
