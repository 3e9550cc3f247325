"""The trace: valid JSON on one clock, slices that do not overlap, frames linked from stage to stage, and hops in numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from memra_pp.driver.figures.trace import FRAMES_TRACK, SEND_TRACK, chrome_trace
from memra_pp.errors import StageError
from memra_pp.stage.spans import BLOCKED, COMPUTE, FIELDS, KINDS, RECV, SEND

NAMES = ["stage 0 (layers 0 to 1)", "stage 1 (layers 2 to 3)"]
START = 5_000_000_000
"""When the first frame was sent, by the driver's clock."""

AHEAD = 777_000_000_000
"""How far the second stage's clock is."""


def packed(*spans):
    return np.array(spans, np.int64).reshape(-1, len(FIELDS)).tobytes()


def journey(frame, at):
    """The spans of a frame on the driver and two stages: it is sent at `at`, in microseconds, and has a hop of 10 to the first
    stage, one of 20, and one of 30 back."""

    def span(kind, began, ended):
        return frame, kind, START + 1000 * (at + began), START + 1000 * (at + ended), 3, 2

    driver = [span(SEND, 0, 5), span(RECV, 0, 260)]
    first = [span(RECV, -50, 10), span(COMPUTE, 10, 110), span(BLOCKED, 110, 115), span(SEND, 115, 118)]
    second = [span(RECV, 0, 130), span(COMPUTE, 130, 230), span(SEND, 230, 235)]
    return driver, first, [(f, k, b + AHEAD, e + AHEAD, *rest) for f, k, b, e, *rest in second]


def trace_of(*journeys):
    driver, first, second = ([span for way in journeys for span in way[who]] for who in range(3))
    return chrome_trace(NAMES, [packed(*first), packed(*second)], [0, AHEAD], packed(*driver))


@pytest.fixture
def trace():
    return json.loads(json.dumps(trace_of(journey(1, 0), journey(2, 400), journey(3, 800))))


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_span_is_a_slice_on_one_clock(trace):
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] == "ms"
    slices = events(trace, "X")
    assert len(slices) == 3 * (2 + 4 + 3) and min(event["ts"] for event in slices) == 0
    computed = [event for event in slices if event["name"] == "compute" and event["args"]["frame"] == 2]
    assert [(event["pid"], event["ts"], event["dur"]) for event in computed] == [(1, 460, 100), (2, 580, 100)]
    assert all(event["args"] == {"frame": 2, "rows": 3, "entries": 2} for event in computed)
    assert {event["name"] for event in slices} == set(KINDS)


def test_slices_of_a_track_come_in_order_and_do_not_overlap(trace):
    tracks = defaultdict(list)
    for event in events(trace, "X"):
        if event["pid"]:
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) == {(pid, tid) for pid in (1, 2) for tid in (FRAMES_TRACK, SEND_TRACK)}
    for spans in tracks.values():
        assert spans == sorted(spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_processes_and_tracks_have_names(trace):
    named = {(event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events(trace, "M")}
    assert [named["process_name", pid, 0] for pid in range(3)] == ["driver", *NAMES]
    assert all(named["thread_name", pid, tid] for pid in range(3) for tid in (FRAMES_TRACK, SEND_TRACK))


def test_a_frame_is_linked_over_every_hop_by_flows_that_lie_in_its_slices(trace):
    starts, ends = ({event["id"]: event for event in events(trace, phase)} for phase in "sf")
    assert len(starts) == len(ends) == 9 and starts.keys() == ends.keys()
    slices = events(trace, "X")

    def frame_at(event):
        within = [
            s["args"]["frame"]
            for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        ]
        assert len(within) == 1
        return within[0]

    ways = [(frame_at(starts[i]), starts[i]["pid"], ends[i]["pid"]) for i in sorted(starts)]
    assert sorted(ways) == [(frame, pid, (pid + 1) % 3) for frame in (1, 2, 3) for pid in range(3)]
    for i, start in starts.items():
        assert frame_at(ends[i]) == frame_at(start) and start["ts"] < ends[i]["ts"] and ends[i]["bp"] == "e"


def test_hops_are_told_in_numbers(trace):
    ends = [("driver", "stage 0", 10), ("stage 0", "stage 1", 20), ("stage 1", "driver", 30)]
    assert trace["otherData"]["hops"] == [
        {"from": source, "to": target, "frames": 3, "median_us": took, "p99_us": took} for source, target, took in ends
    ]


def test_frames_whose_spans_are_not_all_there_have_no_hop_there():
    (driver, first, _), (_, _, second) = journey(1, 0), journey(2, 400)
    hops = trace_of((driver, first, []), ([], [], second))["otherData"]["hops"]
    assert [(hop["from"], hop["frames"]) for hop in hops] == [("driver", 1)]


def test_a_trace_without_spans_has_names_only():
    trace = trace_of(([], [], []))
    assert trace["otherData"]["hops"] == [] and {event["ph"] for event in trace["traceEvents"]} == {"M"}


@pytest.mark.parametrize("bad", [None, 7, "", [], b"1", bytes(47), packed((1, 4, 0, 1, 1, 1)), packed((1, -1, 0, 1, 1, 1))])
def test_what_is_no_list_of_spans_is_refused_and_its_stage_named(bad):
    with pytest.raises(StageError, match=r"stage 1 \(layers 2 to 3\) gave"):
        chrome_trace(NAMES, [b"", bad], [0, 0], b"")
