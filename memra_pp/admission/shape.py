"""The context a request is given."""

SLACK_ROWS = 8
SPECULATION_ROWS = 64


def session_ctx(prompt: int, max_new_tokens: int, speculate: int, limit: int) -> int:
    """Rows charged and allocated for a request: prompt, new tokens and slack (more when speculating), at most `limit`."""
    slack = SLACK_ROWS + (SPECULATION_ROWS if speculate else 0)
    return min(limit, prompt + max_new_tokens + slack)
