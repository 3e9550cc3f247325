"""The context that a request is charged for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memra_pp.admission import session_ctx

SIZES = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "speculate", "limit", "ctx"),
    [
        (100, 64, 0, 32768, 100 + 64 + 8),
        (100, 64, 1, 32768, 100 + 64 + 8 + 64),
        (100, 64, 8, 32768, 100 + 64 + 8 + 64),
        (1, 0, 0, 32768, 9),
        (100, 64, 0, 172, 172),
        (100, 64, 0, 171, 171),
        (100, 64, 4, 200, 200),
    ],
)
def test_prompt_new_tokens_and_slack_at_most_the_model_s_context(prompt, max_new_tokens, speculate, limit, ctx):
    assert session_ctx(prompt, max_new_tokens, speculate, limit) == ctx


@given(SIZES, SIZES, st.integers(0, 64), st.integers(1, 10**6))
def test_it_is_never_past_the_limit_and_never_less_for_more(prompt, max_new_tokens, speculate, limit):
    ctx = session_ctx(prompt, max_new_tokens, speculate, limit)
    assert min(prompt + max_new_tokens, limit) <= ctx <= limit
    assert ctx <= session_ctx(prompt + 1, max_new_tokens, speculate, limit)
    assert ctx <= session_ctx(prompt, max_new_tokens, speculate + 1, limit)
