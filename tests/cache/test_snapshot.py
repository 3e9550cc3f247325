"""Snapshots and rollback: real copies, refreshed in place, restored often, bounded by what rings still hold."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from toy import F32, FLAT, RECURRENT, RINGED, SHARED, feed, image, model, states

from memra_pp.cache import Cache, CachePlan, KvPolicy
from memra_pp.config import KvPlan
from memra_pp.errors import CacheError, CapacityExceeded, RingLapped, SnapshotPinned
from memra_pp.kernels import CpuDev

HYBRID = model(RINGED, RECURRENT, FLAT, RECURRENT, SHARED)
CTX = 20_000
ROWS = 32 + 4096 + 31


@pytest.fixture
def cache():
    dev = CpuDev(1 << 40)
    with Cache.new(dev, HYBRID, CTX, policy=F32) as opened:
        yield opened
    assert dev.allocated_bytes == 0


def lens(cache):
    return [layer.len for layer in cache.kv if layer is not None]


def allocated(cache):
    return cache.kv[0].dev.allocated_bytes


def buffers(snap):
    return [id(buffer) for copy in snap.states.values() for buffer in (copy.conv, copy.ssm)]


def fails_and_changes_nothing(cache, error, action, match=None):
    before = image(cache)
    with pytest.raises(CacheError, match=match) as raised:
        action()
    assert type(raised.value) is error
    assert image(cache) == before
    return str(raised.value)


@pytest.mark.parametrize("between", [1, 2, 5])
def test_both_conv_and_ssm_state_are_real_copies(cache, between):
    feed(cache, np.arange(7))
    before = states(cache)
    snap = cache.snapshot()
    for layer in (cache.recur[1], cache.recur[3]):
        copies = [snap.states[il].conv for il in (1, 3)] + [snap.states[il].ssm for il in (1, 3)]
        assert not any(np.shares_memory(a, b) for a in copies for b in layer.buffers())
    feed(cache, np.arange(100, 100 + between))
    assert all(now != then for now, then in zip(states(cache), before, strict=True))
    cache.rollback(snap, 0)
    assert states(cache) == before and cache.pos == 7


def test_a_restored_state_is_written_to_the_buffers_that_are_there(cache):
    feed(cache, np.arange(3))
    snap = cache.snapshot()
    own = {id(b) for layer in cache.recur if layer is not None for b in layer.buffers()}
    bytes_held = allocated(cache)
    feed(cache, np.arange(4))
    cache.rollback(snap, 2)
    assert {id(b) for layer in cache.recur if layer is not None for b in layer.buffers()} == own
    assert allocated(cache) == bytes_held


def test_rollback_sets_len_to_saved_plus_accept_and_pos_to_the_snapshot_s(cache):
    feed(cache, np.arange(10))
    snap = cache.snapshot()
    feed(cache, np.arange(6))
    for accept in (6, 0, 3):
        cache.rollback(snap, accept)
        assert (cache.pos, lens(cache)) == (10, [10 + accept] * 2)
        assert [int(layer.len_d[0]) for layer in cache.kv if layer is not None] == lens(cache)
        feed(cache, np.arange(6))
        assert (cache.pos, lens(cache)) == (16, [16] * 2)


@pytest.mark.parametrize("accept", [0, 1, 4])
def test_after_the_replay_a_session_stands_where_one_does_that_only_fed_the_accepted_rows(cache, accept):
    draft = np.arange(50, 54)
    with Cache.new(CpuDev(1 << 40), HYBRID, CTX, policy=F32) as plain:
        feed(plain, np.arange(9))
        feed(plain, draft[:accept])
        feed(plain, np.arange(70, 75))
        feed(cache, np.arange(9))
        snap = cache.snapshot()
        feed(cache, draft)
        cache.rollback(snap, accept)
        feed(cache, draft[:accept])
        feed(cache, np.arange(70, 75))
        assert states(cache) == states(plain) and lens(cache) == lens(plain) and cache.pos == plain.pos
        for layer, other in ((cache.kv[il], plain.kv[il]) for il in (0, 2)):
            assert layer.k.tobytes() == other.k.tobytes() and layer.v.tobytes() == other.v.tobytes()


def test_a_snapshot_restores_any_number_of_times(cache):
    feed(cache, np.arange(5))
    before = states(cache)
    snap = cache.snapshot()
    for turn in range(4):
        feed(cache, np.arange(turn, turn + 3))
        assert cache.can_rollback(snap, 3)
        cache.rollback(snap, 0)
        assert (states(cache), cache.pos, lens(cache)) == (before, 5, [5, 5])


def test_snapshot_into_refreshes_in_place(cache):
    snap = cache.snapshot()
    bytes_held, same = allocated(cache), buffers(snap)
    for turn in range(3):
        feed(cache, np.arange(turn, turn + 4))
        cache.snapshot_into(snap)
        assert (allocated(cache), buffers(snap), snap.pos) == (bytes_held, same, cache.pos)
    before = states(cache)
    feed(cache, np.arange(3))
    cache.rollback(snap, 1)
    assert (states(cache), cache.pos, lens(cache)) == (before, 12, [13, 13])


def test_snapshot_into_moves_the_pin(cache):
    snap = cache.snapshot()
    feed(cache, np.arange(4000))
    assert cache.plan.rows_possible() == ROWS - 4000
    cache.snapshot_into(snap)
    assert cache.plan.rows_possible() >= 4097
    assert len(cache.plan.live) == 1


def test_restoring_an_older_snapshot_ends_the_newer_ones_and_leaves_the_older(cache):
    first, second, third = (feed(cache, np.arange(3)) or cache.snapshot() for _ in range(3))
    feed(cache, np.arange(3))
    cache.rollback(second, 1)
    assert not cache.can_rollback(third, 0)
    fails_and_changes_nothing(cache, CacheError, lambda: cache.rollback(third, 0), match="ended")
    feed(cache, np.arange(2))
    cache.rollback(second, 2)
    cache.rollback(first, 0)
    assert not cache.can_rollback(second, 0) and cache.pos == 3


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_snapshots_are_dropped_in_any_order(cache, order):
    bytes_held = allocated(cache)
    snaps = [feed(cache, np.arange(100)) or cache.snapshot() for _ in range(3)]
    feed(cache, np.arange(3))
    open_ = {0, 1, 2}
    for i in order:
        snaps[i].close()
        open_.remove(i)
        assert [m.pos for m in cache.plan.live] == [100 * (j + 1) for j in sorted(open_)]
        assert [cache.can_rollback(snaps[j], 0) for j in range(3)] == [j in open_ for j in range(3)]
        fails_and_changes_nothing(cache, CacheError, lambda i=i: cache.rollback(snaps[i], 0), match="ended")
    assert allocated(cache) == bytes_held
    assert cache.plan.rows_possible() == ROWS - (303 - 256)


@pytest.mark.parametrize("accept", [-1, 5])
def test_accept_is_0_to_the_rows_fed_since(cache, accept):
    feed(cache, np.arange(9))
    snap = cache.snapshot()
    feed(cache, np.arange(4))
    assert not cache.can_rollback(snap, accept)
    fails_and_changes_nothing(cache, CacheError, lambda: cache.rollback(snap, accept), match=f"{accept}.*0 to 4")
    assert cache.can_rollback(snap, 0) and cache.can_rollback(snap, 4)


def test_a_pinned_window_is_not_lapped(cache):
    feed(cache, np.arange(100))
    snap = cache.snapshot()
    possible = cache.plan.rows_possible()
    assert possible == ROWS - (100 - 64)
    message = fails_and_changes_nothing(cache, SnapshotPinned, lambda: cache.plan.check_append(possible + 1))
    assert snap.mark.name in message and "row 100" in message and str(possible) in message
    fails_and_changes_nothing(cache, CacheError, lambda: feed(cache, np.arange(possible + 1)))
    feed(cache, np.arange(possible))
    fails_and_changes_nothing(cache, SnapshotPinned, lambda: cache.plan.check_append(1), match="at most 0")
    fails_and_changes_nothing(cache, CacheError, lambda: feed(cache, np.arange(1)))
    cache.rollback(snap, possible)
    feed(cache, np.arange(possible))
    snap.drop()
    cache.plan.check_append(4096)
    feed(cache, np.arange(4096))
    assert cache.pos == 100 + possible + 4096 and cache.kv[0].base > 0


def test_the_oldest_pin_binds(cache):
    feed(cache, np.arange(100))
    old = cache.snapshot()
    feed(cache, np.arange(1000))
    new = cache.snapshot()
    message = fails_and_changes_nothing(cache, SnapshotPinned, lambda: cache.plan.check_append(4000))
    assert old.mark.name in message and new.mark.name not in message
    old.close()
    cache.plan.check_append(4000)


def test_an_unpinned_snapshot_holds_nothing_back_and_once_lapped_cannot_be_restored(cache):
    feed(cache, np.arange(200))
    snap = cache.snapshot(pin=False)
    feed(cache, np.arange(3000))
    assert cache.can_rollback(snap, 3000)
    feed(cache, np.arange(3000))
    assert cache.kv[0].base > 160 and not cache.can_rollback(snap, 0)
    fails_and_changes_nothing(cache, RingLapped, lambda: cache.rollback(snap, 0), match="re-prime")
    feed(cache, np.arange(10))
    snap.close()
    feed(cache, np.arange(10))
    assert cache.pos == 6220


def test_an_unpinned_snapshot_restores_until_it_is_lapped(cache):
    feed(cache, np.arange(4100))
    early = cache.snapshot(pin=False)
    feed(cache, np.arange(100))
    assert cache.kv[0].base == early.pos - 31 & ~31
    cache.rollback(early, 40)
    feed(cache, np.arange(40))
    assert cache.pos == 4140


def test_a_snapshot_is_lapped_by_the_loss_of_the_first_row_of_its_view(cache):
    feed(cache, np.arange(4100))
    snap = cache.snapshot(pin=False)
    feed(cache, np.arange(40))
    feed(cache, np.arange(20))
    assert 4064 < cache.kv[0].base == 4096 < snap.pos, "its own row is still there, the start of its view is not"
    fails_and_changes_nothing(cache, RingLapped, lambda: cache.rollback(snap, 0))


def test_a_snapshot_not_taken_yet_cannot_be_restored(cache):
    snap = cache.new_snapshot()
    assert not cache.can_rollback(snap, 0)
    fails_and_changes_nothing(cache, CacheError, lambda: cache.rollback(snap, 0))
    assert cache.plan.live == ()


def test_a_closed_snapshot_cannot_be_taken_anew(cache):
    snap = cache.snapshot()
    snap.close()
    snap.close()
    fails_and_changes_nothing(cache, CacheError, lambda: cache.snapshot_into(snap), match="closed")
    assert cache.plan.live == ()


def test_a_snapshot_is_good_for_its_own_cache_only(cache):
    with Cache.new(CpuDev(1 << 40), HYBRID, CTX, policy=F32) as other:
        snap = other.snapshot()
        assert not cache.can_rollback(snap, 0)
        fails_and_changes_nothing(cache, CacheError, lambda: cache.rollback(snap, 0))
        fails_and_changes_nothing(cache, CacheError, lambda: cache.snapshot_into(snap))
        assert other.can_rollback(snap, 0)


def test_a_snapshot_gives_its_bytes_back_at_the_end_of_with(cache):
    bytes_held = allocated(cache)
    with cache.snapshot():
        assert allocated(cache) == bytes_held + 2 * 4 * (6 * 3 + 20)
    assert allocated(cache) == bytes_held and cache.plan.live == ()


WINDOW_512 = model(KvPlan(1, 32, 32, window=512, ring="step"))


def test_after_a_snapshot_4097_to_4128_more_rows_fit_at_window_512_and_at_most_542_are_kept():
    plan = CachePlan.of(WINDOW_512, 10**6, KvPolicy(ring="step"))
    plan.append(4000)
    seen = set()
    for _ in range(64):
        plan.append(1)
        mark = plan.snapshot()
        possible = plan.rows_possible()
        seen.add((4639 - possible, possible))
        plan.check_append(possible)
        with pytest.raises(SnapshotPinned, match=f"{mark.name}.* {possible} rows"):
            plan.check_append(possible + 1)
        plan.drop(mark)
    assert seen == {(kept, 4639 - kept) for kept in range(511, 543)}
    assert {possible for _, possible in seen} == set(range(4097, 4129))


def test_chunks_count_together_against_a_pin():
    plan = CachePlan.of(WINDOW_512, 10**6, KvPolicy(ring="step"))
    plan.append(4096)
    plan.check_append(50_000, chunk=4096)
    mark = plan.snapshot()
    with pytest.raises(SnapshotPinned):
        plan.check_append(8192, chunk=4096)
    with pytest.raises(CapacityExceeded):
        plan.check_append(10**6, chunk=4096)
    plan.drop(mark)
    with pytest.raises(CacheError, match="append at most"):
        plan.check_append(50_000)
