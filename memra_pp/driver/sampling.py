"""`SamplingParams`, the `Sampler` that picks tokens, and `judge`, which accepts drafts without changing what is sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, StageError, checked_int, require

F64 = NDArray[np.float64]

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are picked. `temperature=0` is greedy: the best token, the lowest id of equals.

    `top_k` keeps the best `top_k` tokens (0: all), then `top_p` the smallest set of best ones whose mass, of what `top_k`
    left, reaches `top_p`. `seed` fixes the text. Generation ends at any of the texts `stop` or of the tokens `eos_ids`
    (None: the model's own).

    Raises:
        InputError: a value outside its bounds; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        temperature = _checked_float("temperature", self.temperature, "a finite number >= 0 (0: greedy)")
        require(0 <= temperature < math.inf, InputError, "temperature", temperature, "a finite number >= 0 (0: greedy)")
        top_p = _checked_float("top_p", self.top_p, "a number > 0 and <= 1 (1: all)")
        require(0 < top_p <= 1, InputError, "top_p", top_p, "a number > 0 and <= 1 (1: all)")
        stop = _checked_tuple("stop", self.stop, "a list of texts")
        for text in stop:
            require(isinstance(text, str) and text != "", InputError, "stop", text, "a list of texts, none of them empty")
        eos_ids = None if self.eos_ids is None else _checked_tuple("eos_ids", self.eos_ids, "a list of token ids, or None")
        plain = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": checked_int(InputError, "top_k", self.top_k, 0, MAX_TOKEN_ID),
            "seed": checked_int(InputError, "seed", self.seed, 0, 2**64 - 1),
            "stop": stop,
            "eos_ids": eos_ids and tuple(checked_int(InputError, "eos_ids", t, 0, MAX_TOKEN_ID) for t in eos_ids),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


class Sampler:
    """Picks tokens by `SamplingParams` (None: greedy). It keeps no state: a pick is a function of the answer and its position.

    Each position has one uniform number of its own, from Philox keyed by the seed and counted by the position (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so that equal distributions give equal tokens whatever else
    was picked before, and in whatever batches.

    `want` is what the last stage is to answer: `argmax`, `topk:n` or `logits`.
    """

    def __init__(self, params: SamplingParams | None = None) -> None:
        require(params is None or isinstance(params, SamplingParams), InputError, "sampling", params, "SamplingParams, or None")
        self.params = SamplingParams(temperature=0.0) if params is None else params
        if self.params.temperature == 0:
            self.want = "argmax"
        else:
            self.want = f"topk:{self.params.top_k}" if self.params.top_k else "logits"

    def pick(self, answer: Any, position: int) -> int:
        """The token to stand at the absolute `position`, from one answer row to `want`.

        The row is i32 `[]` for `argmax`; `[n]` of fields `id` (i4) and `logit` (f4), best first and equals by id, for
        `topk:n`; f32 `[n_vocab]` for `logits`. Softmax and inverse CDF are f64, summed in the row's order.

        Raises:
            StageError: the largest logit is not finite.
        """
        if self.want == "argmax":
            return int(answer)
        logits = answer["logit"] if self.params.top_k else answer
        weights = self._weights(logits, position)
        cdf = np.cumsum(weights)
        uniform = np.random.Generator(np.random.Philox(key=self.params.seed, counter=position)).random()
        at = int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))
        return int(answer["id"][at]) if self.params.top_k else at

    def _weights(self, logits: NDArray[np.float32], position: int) -> F64:
        """Unnormalised probabilities, f64 of the same shape; zero for what `top_p` cuts off."""
        weights = logits.astype(np.float64)
        peak = weights.max()
        if not math.isfinite(peak):
            raise StageError(f"the largest logit for position {position} is {peak}: check the model's weights and its numbers")
        weights -= peak
        with np.errstate(over="ignore"):
            weights /= self.params.temperature
        np.exp(weights, out=weights)
        return weights if self.params.top_p == 1 else _nucleus(weights, self.params.top_p)


def judge(sampler: Sampler, answers: Any, drafts: Sequence[int], position: int) -> tuple[int, int]:
    """How many of `drafts` stand, and the token after those: `(accepted, next)`.

    `answers` is `[1 + len(drafts), ...]`: row `i` is the answer to `sampler.want` for the token at `position + i`, given
    that the drafts before it stand. The token is picked at each position in turn; the first one that is not the draft is
    `next`, and with all drafts accepted `next` is picked from the last row.

    This is speculative rejection sampling (Leviathan et al., "Fast inference from transformers via speculative decoding",
    2023). There a draft `d` from a proposal `q` is accepted with probability `min(1, p(d) / q(d))`, otherwise a token is
    drawn from `max(0, p - q)`, normalised. A drafter that proposes `d` for sure has `q(d) = 1`: accept with probability
    `p(d)`, otherwise draw from `p` without `d`, normalised. Picking from `p` and accepting if the pick is `d` does just
    that: it is `d` with probability `p(d)`, and given that it is not, it is spread as `p` without `d`. So what comes out
    is spread as in plain sampling, whatever the drafts; and since a position's uniform number is its own, the very text
    is that of plain sampling with the same seed, if the rows are.

    Raises:
        InputError: `answers` has not one row more than there are drafts.
        StageError: as `Sampler.pick`.
    """
    require(len(answers) == 1 + len(drafts), InputError, "len(answers)", len(answers), f"1 + the {len(drafts)} drafts")
    for accepted, draft in enumerate(drafts):
        if (token := sampler.pick(answers[accepted], position + accepted)) != draft:
            return accepted, token
    return len(drafts), sampler.pick(answers[-1], position + len(drafts))


def _nucleus(weights: F64, top_p: float) -> F64:
    """`weights` with zeros outside the smallest set of largest ones that holds `top_p` of their sum; equals by lower index."""
    total = weights.sum()
    likely = weights[weights >= (1 - top_p) * total / weights.size]  # the others hold less than 1 - top_p together
    best = np.sort(likely)[::-1]
    count = min(int(np.searchsorted(np.cumsum(best), top_p * total)) + 1, best.size)
    least = best[count - 1]
    kept = weights > least
    kept[np.flatnonzero(weights == least)[: np.count_nonzero(best[:count] == least)]] = True
    return np.where(kept, weights, 0.0)


def _checked_float(name: str, value: Any, allowed: str) -> float:
    require(isinstance(value, Real) and not isinstance(value, bool), InputError, name, value, allowed)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _checked_tuple(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes), InputError, name, value, allowed)
    return tuple(value)
