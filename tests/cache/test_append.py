"""`kernels.append`: one call plans, moves, writes and commits, or changes nothing at all."""

from __future__ import annotations

import numpy as np
import pytest
from toy import F32, FLAT, PACKED, RINGED, image, model, rows_of, write

from memra_pp.cache import Cache, KvPolicy
from memra_pp.config import KvPlan
from memra_pp.errors import CacheError, CapacityExceeded, InputError, RingLapped
from memra_pp.kernels import CpuDev, append, blocks

POLICIES = [F32, PACKED, KvPolicy(fp8_ordinary=True, ring="all"), KvPolicy(v="q4_0", ring="all")]
RING_ROWS = 32 + 4096 + 31


@pytest.fixture(params=POLICIES, ids=lambda policy: f"{policy.k} {policy.v} fp8={policy.fp8_ordinary}")
def cache(request):
    with Cache.new_ppn_slice(CpuDev(1 << 40), 1, 3, model(FLAT, RINGED, FLAT), 5000, policy=request.param) as opened:
        yield opened


@pytest.fixture
def ringed(cache):
    return cache.kv[1]


@pytest.fixture
def flat(cache):
    return cache.kv[2]


def assert_holds(layer, start, serials):
    """The rows from `start` on are those of `serials`, packed in the layer's formats."""
    rows = layer.physical_rows(start, start + len(serials))
    for plane, fmt, size, x in (
        (layer.k, layer.layout.k_fmt, layer.k_tok_bytes, rows_of(serials, layer.kv_dim_k)),
        (layer.v, layer.layout.v_fmt, layer.v_tok_bytes, rows_of(-serials, layer.kv_dim_v)),
    ):
        assert plane[rows.start * size : rows.stop * size].tobytes() == blocks.quantize(fmt, x).tobytes()


def fails_and_changes_nothing(cache, error, *args):
    before = image(cache)
    with pytest.raises(error) as raised:
        append(*args)
    assert image(cache) == before
    return str(raised.value)


def test_rows_go_to_their_position_and_are_packed_as_blocks(ringed, flat):
    for layer in (ringed, flat):
        write(layer, 0, np.arange(5), 0)
        write(layer, 5, np.arange(5, 12), 0)
        assert_holds(layer, 0, np.arange(12))
        assert (layer.len, int(layer.len_d[0])) == (12, 12)


def test_a_rewrite_goes_to_its_position_and_len_is_the_high_water(ringed, flat):
    for layer in (ringed, flat):
        write(layer, 0, np.arange(20), 0)
        write(layer, 8, np.arange(50, 54), 0)
        assert_holds(layer, 0, np.array([*range(8), 50, 51, 52, 53, *range(12, 20)]))
        assert (layer.len, int(layer.len_d[0])) == (20, 20)
        write(layer, 18, np.arange(5), 0)
        assert (layer.len, int(layer.len_d[0])) == (23, 23)


def test_the_pad_behind_the_last_row_is_not_written(flat):
    write(flat, 0, np.arange(5000), 0)
    for plane, size in ((flat.k, flat.k_tok_bytes), (flat.v, flat.v_tok_bytes)):
        assert plane.size == 5000 * size + 8 and not plane[-8:].any()


def test_a_ring_that_is_full_keeps_the_rows_asked_for_and_commits_its_base(ringed):
    write(ringed, 0, np.arange(RING_ROWS), 0)
    assert ringed.base == 0
    write(ringed, RING_ROWS, np.arange(RING_ROWS, RING_ROWS + 3), 4096)
    assert (ringed.base, ringed.len) == (4096, RING_ROWS + 3)
    assert_holds(ringed, 4096, np.arange(4096, RING_ROWS + 3))
    with pytest.raises(CacheError):
        ringed.physical_rows(4095, 4096)


def test_kept_rows_may_overlap_where_they_move_to(ringed):
    write(ringed, 0, np.arange(RING_ROWS), 0)
    write(ringed, RING_ROWS, np.arange(RING_ROWS, RING_ROWS + 20), 32)
    assert ringed.base == 32
    assert_holds(ringed, 32, np.arange(32, RING_ROWS + 20))


def test_more_rows_than_fit_change_nothing(cache, ringed, flat):
    def rows(layer, n):
        return rows_of(np.arange(n), layer.kv_dim_k), rows_of(np.arange(n), layer.kv_dim_v)

    write(flat, 0, np.arange(4990), 0)
    fails_and_changes_nothing(cache, CapacityExceeded, flat, 4990, *rows(flat, 11), 0)
    write(flat, 4990, np.arange(10), 0)
    write(ringed, 0, np.arange(4100), 0)
    fails_and_changes_nothing(cache, CacheError, ringed, 4100, *rows(ringed, 4129), 4064)
    fails_and_changes_nothing(cache, RingLapped, ringed, 4100, *rows(ringed, 1), 4101)
    write(ringed, 4100, np.arange(4100, 4160), 4064)
    fails_and_changes_nothing(cache, RingLapped, ringed, 4160, *rows(ringed, 1), 4063)
    assert_holds(ringed, 4064, np.arange(4064, 4160))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("plane", ["K", "V"])
def test_what_a_format_cannot_keep_names_layer_and_position_and_changes_nothing(cache, ringed, plane, value):
    write(ringed, 0, np.arange(4100), 0)
    k, v = rows_of(np.arange(100), ringed.kv_dim_k), rows_of(np.arange(100), ringed.kv_dim_v)
    (k if plane == "K" else v)[37, 5] = value
    fmt = ringed.layout.k_fmt if plane == "K" else ringed.layout.v_fmt
    if np.isinf(value) and fmt in ("fp8", "f32"):  # e4m3 saturates, f32 keeps it
        append(ringed, 4100, k, v, 4064)
        assert ringed.base == 4064
    else:
        message = fails_and_changes_nothing(cache, CacheError, ringed, 4100, k, v, 4064)
        assert "layer 1" in message and "position 4137" in message and plane in message


def test_rows_of_another_shape_dtype_or_order_change_nothing(cache, ringed):
    write(ringed, 0, np.arange(4100), 0)
    k, v = rows_of(np.arange(60), ringed.kv_dim_k), rows_of(np.arange(60), ringed.kv_dim_v)
    bad = [
        (k[:, :31], v),
        (k, v[:, :32]),
        (k[:5], v),
        (k, v[:5]),
        (k[0], v[0]),
        (np.float32(1), v),
        (k.reshape(60, 1, -1), v),
        (k.astype(np.float64), v),
        (k, v.astype(np.float16)),
        (np.asfortranarray(k), v),
        (k, np.asfortranarray(v)),
        (k[::2], v[::2]),
    ]
    for pair in bad:
        fails_and_changes_nothing(cache, InputError, ringed, 4100, *pair, 4064)
    append(ringed, 4100, k, v, 4064)
    assert ringed.base == 4064


@pytest.mark.parametrize("pos", [-1, -60])
def test_a_position_before_the_first_row_changes_nothing(cache, ringed, flat, pos):
    for layer in (ringed, flat):
        k, v = rows_of(np.arange(30), layer.kv_dim_k), rows_of(np.arange(30), layer.kv_dim_v)
        fails_and_changes_nothing(cache, InputError, layer, pos, k, v, 0)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (4999, 5001)])
def test_rows_outside_a_flat_layer_are_an_error(flat, start, end):
    assert flat.physical_rows(0, 5000) == range(5000)
    with pytest.raises(CacheError):
        flat.physical_rows(start, end)


@pytest.mark.parametrize(("fmt", "largest"), [("q8_0", 127 * 65504.0), ("q5_1", 65504.0), ("q4_0", 8 * 65504.0)])
def test_the_largest_value_a_format_keeps_reads_back_finite_and_a_larger_one_is_refused(fmt: str, largest: float) -> None:
    with Cache.new(CpuDev(), model(KvPlan(1, 32, 32)), 4, policy=KvPolicy(k=fmt, v=fmt)) as cache:
        layer = cache.kv[0]
        assert layer is not None
        k, v = (np.zeros((1, width), np.float32) for width in (layer.kv_dim_k, layer.kv_dim_v))
        k[0, 3], v[0, 5] = largest, -largest
        append(layer, 0, k, v, 0)
        assert np.isfinite(blocks.dequantize(fmt, layer.k[: layer.k_tok_bytes])).all()
        assert np.isfinite(blocks.dequantize(fmt, layer.v[: layer.v_tok_bytes])).all()
        k[0, 3] = np.nextafter(np.float32(largest), np.float32(np.inf))
        with pytest.raises(CacheError, match=f"layer 0: K .*{fmt} cannot keep"):
            append(layer, 1, k, v, 0)
