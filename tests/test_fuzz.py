"""Every reader of bytes from outside, on inputs that were changed here and there: an error that says so, or none, and not much
memory. `make fuzz` does the same for longer, guided by coverage."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import SEEDS, TARGETS

MOST_BYTES = 8 << 20
NUMBERS = [0, 1, 2, 7, 8, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
PIECES = st.binary(min_size=1, max_size=12) | st.builds(
    lambda number, width: (number % 256**width).to_bytes(width, "little"),
    st.sampled_from(NUMBERS),
    st.sampled_from([1, 2, 4, 8]),
)
CHANGES = st.lists(st.tuples(st.sampled_from(["put", "insert", "cut", "repeat"]), st.floats(0, 1), PIECES), max_size=6)


def changed(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for how, where, piece in changes:
        at = int(where * len(data))
        match how:
            case "put":
                data = data[:at] + piece + data[at + len(piece) :]
            case "insert":
                data = data[:at] + piece + data[at:]
            case "cut":
                data = data[:at] + data[at + len(piece) :]
            case "repeat":
                data = data[:at] + data[at : at + 64] * len(piece) + data[at:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in_is_taken_or_refused(name: str) -> None:
    seeds = SEEDS[name]()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300) | st.builds(changed, st.sampled_from(seeds), CHANGES))
    def check(data: bytes) -> None:
        TARGETS[name](data)

    tracemalloc.start()
    try:
        check()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES + 100 * max(map(len, seeds))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    """So that what is changed is close to what is right."""
    for seed in SEEDS[name]():
        TARGETS[name](seed)
