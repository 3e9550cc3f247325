"""Prompt lookup beside plain decoding: Gemma-3-270M over two Ray stages, the same texts in turn.

For each prompt: tokens a second, beside plain decoding and beside what acceptance allows: the tokens over the sum of
t(1 + drafts) of the rounds, with t(rows) measured in the same run; and how many drafts were accepted. The last two prompts are
sampled, so that there is little or nothing to look up: there speculation can only cost.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence

from _report import Report, parser, say

import memra_pp
from memra_pp.cache import KvPolicy
from memra_pp.cli import demo_weights
from memra_pp.driver.speculation.drafters import NgramDrafter

K, TOKENS, TURNS, TIMINGS = 8, 120, 3, 9
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
WARM = memra_pp.SamplingParams(temperature=1, eos_ids=(), seed=1)
HOT = memra_pp.SamplingParams(temperature=4, eos_ids=(), seed=1)

CODE = "".join(
    f"class {name}:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def get_x(self):\n        return self.x\n\n    def get_y(self):\n        return self.y\n\n\n"
    for name in ("Point", "Circle")
)
TABLE = "| id | name | colour | price |\n|---|---|---|---|\n" + "".join(
    f"| {i} | item {i} | red | 10.00 |\n" for i in range(1, 9)
)
LIST = "Shopping list:\n" + "".join(f"{i}. Buy {what} from the shop\n" for i, what in enumerate(("milk", "bread", "eggs"), 1))
PROMPTS = {
    "code": (CODE, GREEDY),
    "table": (TABLE, GREEDY),
    "list": (LIST, GREEDY),
    "prose": ("The history of the city", WARM),
    "noise": ("The history of the city", HOT),
}


class Recording:
    """A drafter that notes how many drafts each round had."""

    def __init__(self) -> None:
        self._drafter = NgramDrafter()
        self.drafts: Counter[int] = Counter()

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        drafts = self._drafter.propose(tokens, k)
        self.drafts[len(drafts)] += 1
        return drafts


def step_seconds(pipe: memra_pp.Pipeline, prompt: list[int]) -> dict[int, float]:
    """Seconds of a step of 1 to K + 1 rows behind a prompt, medians of turns."""
    times: dict[int, list[float]] = {rows: [] for rows in range(1, K + 2)}
    with pipe.open(prompt, max_new_tokens=(TIMINGS + 1) * sum(times), speculate=K) as session:
        session.prefill(want="argmax")
        for turn in range(TIMINGS + 1):
            for rows, taken in times.items():
                start = time.perf_counter()
                session.verify([818] * rows, want="argmax")
                if turn:
                    taken.append(time.perf_counter() - start)
    return {rows: statistics.median(taken) for rows, taken in times.items()}


def run(
    pipe: memra_pp.Pipeline, prompt: list[int], sampling: memra_pp.SamplingParams, draft: memra_pp.Draft | None
) -> tuple[list[int], float]:
    """The text, and tokens a second after the first."""
    tokens, times = [], []
    for token in pipe.generate(prompt, max_new_tokens=TOKENS, sampling=sampling, draft=draft):
        tokens.append(token)
        times.append(time.perf_counter())
    return tokens, (len(tokens) - 1) / (times[-1] - times[0])


def main() -> None:
    args = parser(__doc__).parse_args()
    prompts = {"table": PROMPTS["table"]} if args.quick else PROMPTS
    report = Report(f"Gemma-3-270M, prompt lookup, k = {K}, two Ray stages")
    with memra_pp.launch(demo_weights(), stages=2, threads=1, policy=KvPolicy()) as pipe:
        encode = pipe.tokenizer.encode
        seconds = step_seconds(pipe, encode(CODE))
        for name, (text, sampling) in prompts.items():
            say(name)
            plain, ours, allowed = [], [], []
            for _ in range(1 if args.quick else TURNS):
                expected, rate = run(pipe, encode(text), sampling, None)
                plain.append(rate)
                before = pipe.stats()
                drafter = Recording()
                tokens, rate = run(pipe, encode(text), sampling, memra_pp.Draft(k=K, by=drafter))
                after = pipe.stats()
                ours.append(rate)
                if tokens != expected:
                    raise SystemExit(f"{name}: the text with drafts is not the text without")
                done = {key: after[key] - before[key] for key in ("rounds", "drafted", "accepted")}
                drafter.drafts[0] += done["rounds"] - sum(drafter.drafts.values())
                allowed.append((TOKENS - 1) / sum(n * seconds[1 + k] for k, n in drafter.drafts.items()))
            rate, without, most = (statistics.median(values) for values in (ours, plain, allowed))
            report.add(name, rate, "tok/s", peer="plain decoding", peer_value=without)
            report.add(name, rate, "tok/s", peer="what acceptance allows", peer_value=most)
            report.add(f"{name}: drafts accepted", done["accepted"], "", peer="drafted", peer_value=done["drafted"])
    for rows, taken in seconds.items():
        report.add(f"a step of {rows} rows", 1e3 * taken, "ms", peer="1 row", peer_value=1e3 * seconds[1])
    report.give_out(args)


if __name__ == "__main__":
    main()
