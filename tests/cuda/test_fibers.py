"""`fibers.h` gives kernels what CUDA promises them, in every order of turns, and says when one waits forever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from on_cpu import KernelError, Kernels, build, kernel_names, sanitizer_environment

LIBRARY = os.environ.get("FIBERS_LIBRARY")
"""Set in a process under a sanitizer: what to test there, instead of building it."""
ORDERS = (0, 1, 2)
GARBAGE = 0xCDCDCDCD
FULL = 0xFFFFFFFF

SOURCES = Path(__file__).parent / "fiber_kernels"


def i4(value: int) -> np.int32:
    return np.int32(value)


def u4(value: int) -> np.uint32:
    return np.uint32(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module", params=["given"] if LIBRARY else ["assembly", "ucontext"])
def kernels(request, built):
    return Kernels(Path(LIBRARY) if LIBRARY else build(SOURCES, built, ucontext=request.param == "ucontext"))


# ---- Turns and indices


def turns(kernels, order, blocks=3, threads=80):
    count, turns = np.zeros(1, np.int32), np.empty(blocks * threads, np.int32)
    kernels.launch("record_turns", blocks, threads, [count, turns], order=order)
    return turns.reshape(blocks, threads)


def test_orders_of_turns(kernels):
    ascending = np.arange(240).reshape(3, 80)
    assert np.array_equal(turns(kernels, 0), ascending)
    assert np.array_equal(turns(kernels, 1), ascending[::-1, ::-1])
    shuffled = turns(kernels, 2)
    assert np.array_equal(np.sort(shuffled, axis=None), np.arange(240))
    assert np.array_equal(shuffled, turns(kernels, 2))
    within = shuffled % 80
    assert not np.array_equal(within[0], within[1])
    assert not np.array_equal(within[0], np.sort(within[0]))
    blocks = turns(kernels, 2, blocks=50, threads=1).ravel()
    assert not np.array_equal(blocks, np.sort(blocks))


@pytest.mark.parametrize("order", ORDERS)
def test_indices(kernels, order):
    grid, block = (2, 3, 4), (5, 2, 3)
    out = np.zeros((4, 3, 2, 3, 2, 5, 4), np.uint32)
    kernels.launch("record_indices", grid, block, [out], order=order)
    bz, by, bx, tz, ty, tx = np.indices(out.shape[:-1])
    assert np.array_equal(out, np.stack([tx, ty, tz, bx + 10 * by + 100 * bz], -1))


# ---- Warp primitives


def shuffled_lanes(kind, by, width):
    """The lane that each of the 32 lanes reads, as the CUDA C++ guide has it."""
    lane = np.arange(32)
    first, last = lane & ~(width - 1), lane | (width - 1)
    if kind == 0:
        return first + (by & (width - 1))
    if kind == 1:
        return np.where((lane ^ by) > last, lane, lane ^ by)
    if kind == 2:
        return np.where(lane - by < first, lane, lane - by)
    return np.where(lane + by > last, lane, lane + by)


@pytest.mark.parametrize("order", ORDERS)
def test_shuffles(kernels, order):
    values = np.random.default_rng(0).integers(0, 2**32, 64, np.uint32)
    for kind in range(4):
        for width in (1, 2, 4, 8, 16, 32):
            for by in (0, 1, 2, 5, 16, 31):
                out = np.zeros(64, np.uint32)
                kernels.launch("shuffle", 1, 64, [i4(kind), i4(by), i4(width), values, out], order=order)
                lanes = shuffled_lanes(kind, by, width)
                assert np.array_equal(out, values.reshape(2, 32)[:, lanes].ravel()), (kind, width, by)


@pytest.mark.parametrize("order", ORDERS)
def test_shuffles_of_every_size(kernels, order):
    wrong = np.zeros(1, np.int32)
    kernels.launch("shuffle_types", 1, 96, [wrong], order=order)
    assert wrong[0] == 0


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_a_warp_call_apart(kernels, order):
    out = np.zeros(32, np.uint32)
    kernels.launch("shuffle_groups", 1, 32, [out], order=order)
    lane = np.arange(32)
    half, in_quarter = np.where(lane < 16, 103, 220), lane % 16 < 4
    assert np.array_equal(out, half + in_quarter * 1000 * (lane & 16) + 500000)


def test_a_lane_outside_the_mask_gives_garbage(kernels):
    out = np.zeros(8, np.uint32)
    kernels.launch("shuffle_from_outside", 1, 32, [out])
    assert np.array_equal(out, [4, 5, 6, 7, *[GARBAGE] * 4])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", [FULL, 0x0F0F00F0, 0x80000000])
def test_votes(kernels, order, mask):
    for yes in (0, FULL, 0x10F00010):
        out = np.full((3, 32), 7, np.uint32)
        kernels.launch("vote", 1, 32, [u4(mask), u4(yes), out], order=order)
        called = (mask >> np.arange(32) & 1).astype(bool)
        assert (out[0, called] == yes & mask).all()
        assert (out[1, called] == ((yes & mask) != 0)).all()
        assert (out[2, called] == ((yes & mask) == mask)).all()
        assert (out[:, ~called] == 7).all()


# ---- Barriers and memory


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stay", [1, 33, 100])
def test_exited_threads_count_as_arrived(kernels, order, stay):
    for yes in (0, 1, stay):
        out = np.zeros((100, 3), np.int32)
        kernels.launch("count_at_barrier", 1, 100, [u4(stay), u4(yes), out], order=order)
        assert (out[:stay] == [yes, yes > 0, yes == stay]).all()
        assert not out[stay:].any()


def sums(kernels, order, barriers):
    numbers = np.random.default_rng(1).integers(0, 100, (5, 256)).astype(np.float32)
    found = np.zeros(5, np.float32)
    kernels.launch("block_sums", 5, 256, [numbers, found, i4(barriers)], shared=1024, order=order)
    return np.array_equal(found, numbers.sum(1))


def moved(kernels, order, barriers):
    numbers = np.arange(5000, dtype=np.int32)
    kernels.launch("move_down", 1, 256, [numbers, i4(4900), i4(100), i4(barriers)], order=order)
    return np.array_equal(numbers[:4900], np.arange(100, 5000))


@pytest.mark.parametrize("run", [sums, moved])
def test_a_missing_barrier_shows_in_some_order(kernels, run):
    assert [run(kernels, order, True) for order in ORDERS] == [True] * 3
    assert not all(run(kernels, order, False) for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_read_again_after_a_barrier(kernels, order):
    at, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
    kernels.launch("read_again", 1, 64, [at, out], order=order)
    assert (out == 1).all()


def test_every_block_begins_with_garbage(kernels):
    out = np.zeros((3, 3), np.uint32)
    kernels.launch("read_unwritten", 3, 1, [out], shared=12)
    assert (out == [GARBAGE, GARBAGE, 0xCD]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_atomics(kernels, order):
    i, u, q, f = (np.zeros(1, kind) for kind in (np.int32, np.uint32, np.uint64, np.float32))
    i[:], u[:] = -(2**31), 2**32 - 1
    kernels.launch("add_atomically", 10, 100, [i, u, q, f], order=order)
    assert (i[0], u[0], q[0], f[0]) == (2**31 - 1000, 2999, 1000 << 32, 500)
    i, u, old = np.zeros(3, np.int32), np.array([0, FULL, 0, 1000], np.uint32), np.empty(100, np.uint32)
    s, q = np.zeros(2, np.int64), np.array([0, 2**64 - 1], np.uint64)
    kernels.launch("other_atomics", 1, 100, [i, u, s, q, old], order=order)
    assert i[:2].tolist() == [99, -99]
    assert u[:3].tolist() == [2**31 + 99, 2**31, FULL]
    assert s.tolist() == [94, -94]
    assert q.tolist() == [2**63 + 99, 2**63]
    assert i[2] == {0: 100, 1: 1}.get(order, i[2])
    assert sorted([*old, u[3]]) == [*range(100), 1000]


# ---- Numbers


def in_blocks(count):
    return -(-count // 256), 256


def test_all_halves_as_floats(kernels):
    bits, out = np.arange(2**16, dtype=np.uint16), np.empty(2**16, np.float32)
    kernels.launch("to_floats", *in_blocks(len(bits)), [bits, out, i4(len(bits))])
    expected = bits.view(np.float16).astype(np.float32)
    expected.view(np.uint32)[np.isnan(expected)] = 0x7FFFFFFF
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_floats_as_halves(kernels):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    numbers = np.concatenate(
        [halves.astype(np.float32), ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9e9))]
    )
    limits = np.array([65519.996, 65520, 65536, 1e30, np.inf, np.nan, 2**-25, 2**-26, 1e-45], np.float32)
    random = np.random.default_rng(2).integers(0, 2**32, 300_000, np.uint32).view(np.float32)
    numbers = np.concatenate([numbers, -numbers, limits, -limits, random])
    out = np.empty(len(numbers), np.uint16)
    kernels.launch("to_halves", *in_blocks(len(numbers)), [numbers, out, i4(len(numbers))])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(np.float16).view(np.uint16)
    assert np.array_equal(out, np.where(np.isnan(numbers), 0x7FFF, expected))


def test_conversions_to_int_saturate(kernels):
    below = np.nextafter(np.float32(2**31), np.float32(0))
    numbers = [0, -0.0, 0.5, 1.5, 2.5, 2.7, 1e-45, below, 2**31, 1e30, np.inf, 8388607.5]
    numbers = np.array([*numbers, *(-n for n in numbers), np.nan, -np.nan], np.float32)
    toward_zero, nearest = np.empty((2, len(numbers)), np.int32)
    kernels.launch("to_ints", 1, len(numbers), [numbers, toward_zero, nearest])

    def clipped(exact):
        return np.nan_to_num(np.clip(exact.astype(np.float64), -(2**31), 2**31 - 1)).astype(np.int32)

    assert np.array_equal(toward_zero, clipped(np.trunc(numbers)))
    assert np.array_equal(nearest, clipped(np.rint(numbers)))


def test_functions(kernels):
    bits, floats, doubles = np.empty(8, np.int32), np.empty(6, np.float32), np.empty(3)
    kernels.launch("functions", 1, 1, [bits, floats, doubles])
    assert bits.tolist() == [8, 0, 4, 32, 31, -(2**31), 1, 1]
    f = np.float32
    tenth, fused = f(0.1), f(np.float64(f(0.1)) * np.float64(f(0.1)) - np.float64(f(0.01)))
    assert floats.tolist() == [2, 3, tenth * tenth + f(1) - f(1) / f(3), fused, np.sqrt(f(2)), 3.5]
    assert doubles[0] == 0.1 * 0.1 - 0.01
    assert doubles[1] == pytest.approx(8.8e-19, rel=0.05)
    assert doubles[2] == np.nextafter(3.0, 4)


def test_constants(kernels):
    out = np.zeros(4, np.int32)
    kernels.launch("read_constants", 1, 4, [out])
    assert out.tolist() == [2, 3, 5, 7]


# ---- Failures


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        (
            "wait_apart",
            [],
            "of 32 threads 16 wait at __syncthreads, 16 at a warp primitive and 0 have exited; lane 16 of warp 0",
        ),
        ("wait_for_the_gone", [], "0x00000000 wait elsewhere and 0x00000008 are gone"),
        ("disagree_on_mask", [], "lane 0 of warp 0 gave mask 0x7fffffff: of it lanes 0x7ffffffe wait elsewhere"),
        ("disagree_on_primitive", [], "lanes 0xaaaaaaaa wait elsewhere"),
        ("leave_itself_out", [], "lane 0 of warp 0 is not in its mask 0xfffffffe"),
        ("shuffle_width", [i4(12)], "a shuffle of width 12"),
    ],
)
def test_a_wrong_wait_is_an_error_and_the_next_launch_works(kernels, name, args, said):
    for order in ORDERS:
        with pytest.raises(KernelError) as raised:
            kernels.launch(name, (2, 2), 32, args, order=order)
        if order == 0:
            assert str(raised.value).startswith(f"{name}: block (0, 0, 0): ")
            assert said in str(raised.value)
        assert sums(kernels, order, True)


def test_a_full_mask_in_a_block_of_half_a_warp_names_lanes_that_are_not_there(kernels):
    with pytest.raises(KernelError, match="0xffff0000 are gone"):
        kernels.launch("shuffle_width", 1, 16, [i4(32)])


@pytest.mark.parametrize(
    ("grid", "block", "order", "said"),
    [
        (0, 1, 0, "no threads"),
        (1, (32, 0), 0, "no threads"),
        ((1, 65536), 1, 0, "65535"),
        (1, 1025, 0, "1024 threads"),
        (1, (1, 1, 65), 0, "at most 64"),
        (1, 1, 3, "0, 1 or 2"),
    ],
)
def test_impossible_launches(kernels, grid, block, order, said):
    with pytest.raises(KernelError, match=said):
        kernels.launch("wait_apart", grid, block, [], order=order)


def test_launches_from_other_threads(kernels):
    assert sums(kernels, 0, True)
    found = []
    with pytest.raises(KernelError):
        kernels.launch("wait_apart", 1, 32, [])
    other = threading.Thread(target=lambda: found.extend(sums(kernels, order, True) for order in ORDERS))
    other.start()
    other.join()
    assert found == [True] * 3
    assert sums(kernels, 0, True)


# ---- Arguments and builds


def test_arguments_of_all_types(kernels):
    out = np.zeros(9)
    values = [True, -8, 2**16 - 1, -(2**31), 2**32 - 1, -(2**40), 2**40, 0.5, 0.1]
    kinds = "?bHiIqLfd"
    args = [np.dtype(kind).type(value) for kind, value in zip(kinds, values, strict=True)]
    kernels.launch("take_all_types", 1, 1, [*args, np.uint64(out.ctypes.data)])
    assert out.tolist() == values


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("nothing_like_it", [], "no kernel nothing_like_it"),
        ("write_at", [np.zeros(1, np.int32)], "takes 2 arguments, not 1"),
        ("write_at", [np.zeros(1, np.int32), np.int64(0)], "of type int32"),
        ("write_at", [np.zeros(1, np.int32), 0], "of type int32"),
        ("write_at", [np.zeros(1, np.int32), np.zeros(1, np.int32)], "of type int32"),
        ("write_at", [np.int64(0), i4(0)], "of type uint64"),
        ("write_at", [np.zeros((4, 4), np.int32)[:, 0], i4(0)], "not contiguous"),
    ],
)
def test_wrong_arguments(kernels, name, args, said):
    with pytest.raises(KernelError, match=said):
        kernels.launch(name, 1, 1, args)


def test_a_build_is_kept_until_its_sources_change(tmp_path):
    source = tmp_path / "part.cuh"
    source.write_text('#ifdef TWICE\nextern "C" __global__ void second() {}\n#endif\n/* __global__ void gone() {} */\n')
    (tmp_path / "kernels.cu").write_text('#include "part.cuh"\nextern "C" __global__ void __launch_bounds__(9) first(int*) {}')
    assert kernel_names(tmp_path) == ["first"]
    assert kernel_names(tmp_path, ["TWICE"]) == ["second", "first"]
    library = build(tmp_path, tmp_path)
    stamp = library.stat().st_mtime_ns
    Kernels(library).launch("first", 1, 1, [np.uint64(0)])
    assert build(tmp_path, tmp_path) == library
    assert library.stat().st_mtime_ns == stamp
    source.write_text("int wrong = ;")
    with pytest.raises(KernelError, match="expected primary-expression"):
        build(tmp_path, tmp_path)


# ---- Sanitizers


@pytest.fixture(scope="module")
def sanitized(built):
    """Runs Python with a library built for a sanitizer: arguments of the interpreter to the process that ended."""

    def run(sanitize, *arguments):
        library = build(SOURCES, built, sanitize=sanitize)
        environment = {**sanitizer_environment(sanitize), "FIBERS_LIBRARY": str(library)}
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.skipif(LIBRARY is not None, reason="runs in the process that builds")
@pytest.mark.parametrize("sanitize", ["address", "undefined"])
def test_everything_under_a_sanitizer(sanitized, sanitize):
    ran = sanitized(sanitize, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-k", "given", __file__)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(LIBRARY is not None, reason="runs in the process that builds")
@pytest.mark.parametrize(
    ("sanitize", "name", "args", "said"),
    [
        ("address", "write_at", "np.zeros(8, np.int32), np.int32(8)", "heap-buffer-overflow"),
        ("address", "write_shared", "np.int32(100),", "heap-buffer-overflow"),
        ("address", "write_fixed", "np.int32(8), np.zeros(1, np.int32)", "global-buffer-overflow"),
        ("address", "write_stack", "np.int32(8), np.zeros(8, np.int32)", "overflows this variable"),
        ("undefined", "write_fixed", "np.int32(8), np.zeros(1, np.int32)", "out of bounds"),
        ("undefined", "read_wide", "np.zeros(9, np.int32)[1:], np.zeros(4, np.int32)", "misaligned address"),
        ("undefined", "cast", "np.float32(1e30), np.zeros(4, np.int32)", "outside the range"),
    ],
)
def test_a_sanitizer_finds(sanitized, sanitize, name, args, said):
    launch = f'Kernels(os.environ["FIBERS_LIBRARY"]).launch("{name}", 1, 8, [{args}], shared=100)'
    ran = sanitized(sanitize, "-c", f"import os, numpy as np\nfrom on_cpu import Kernels\n{launch}")
    assert ran.returncode != 0
    assert said in ran.stderr
    assert name in ran.stderr
