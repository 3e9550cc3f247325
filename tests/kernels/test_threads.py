"""`Threads`: every unit is done once, by at most n threads, and a failure reaches the caller."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memra_pp.errors import ConfigError
from memra_pp.kernels.threads import Threads


class Record:
    """Notes the parts it is called with and the threads they ran on."""

    def __init__(self):
        self.parts, self.threads, self.lock = [], set(), threading.Lock()

    def __call__(self, tag, lo, hi):
        with self.lock:
            self.parts.append((lo, hi))
            self.threads.add(threading.get_ident())


@pytest.fixture(scope="module")
def pools():
    opened = {n: Threads(n) for n in (1, 2, 3, 5)}
    yield opened
    for threads in opened.values():
        threads.close()


@given(n=st.sampled_from([1, 2, 3, 5]), total=st.integers(0, 100), grain=st.integers(0, 20))
def test_parts_cover_the_units_once(pools, n, total, grain):
    record = Record()
    pools[n].run(record, total, grain, "tag")
    parts = sorted(record.parts)
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert len(parts) <= n
    assert len(parts) == 1 or min(hi - lo for lo, hi in parts) >= grain


def test_the_callers_thread_works_too(pools):
    record = Record()
    pools[1].run(record, 10, 1, "tag")
    assert record.threads == {threading.get_ident()}
    started, arrived = threading.Barrier(2, timeout=10), []

    def meet(lo, hi):
        started.wait()
        arrived.append(threading.get_ident())

    pools[2].run(meet, 2, 1)
    assert threading.get_ident() in arrived
    assert len(set(arrived)) == 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_part_raises_is_raised_after_all_have_ended(pools, failing):
    done = []

    def work(lo, hi):
        done.append(lo)
        if lo == failing:
            raise ZeroDivisionError(lo)

    with pytest.raises(ZeroDivisionError):
        pools[3].run(work, 3, 1)
    assert sorted(done) == [0, 1, 2]
    pools[3].run(Record(), 3, 1, "still usable")


def test_closed_pool_works_on_the_callers_thread():
    with Threads(2) as threads:
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("memra-kernel")]
    threads.close()
    assert not any(worker.is_alive() for worker in workers[-1:])
    record = Record()
    threads.run(record, 10, 1, "tag")
    assert record.threads == {threading.get_ident()}


def test_at_least_one_thread():
    with pytest.raises(ConfigError, match="n=0"):
        Threads(0)
