"""The simulated pipeline: what can be computed by hand, and laws that hold for any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.simulator import Compute, Driver, Link, Load, Pipeline, Recovery, pace, simulate
from memra_pp.errors import ConfigError

STEP_S, HOP_S = 0.010, 0.001


def alike(stages: int, hop_s: float = 0.0, **more) -> Pipeline:
    return Pipeline((Compute(STEP_S),) * stages, (Link(hop_s),) * (stages + 1), **more)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    ms = st.floats(0.0, 5.0).map(lambda n: n / 1e3)
    computes = st.builds(Compute, fixed_s=st.floats(1.0, 20.0).map(lambda n: n / 1e3), row_s=ms, entry_s=ms)
    stages = draw(st.lists(computes, min_size=1, max_size=6))
    links = draw(st.lists(st.builds(Link, ms, st.floats(1e6, 1e9)), min_size=len(stages) + 1, max_size=len(stages) + 1))
    driver = Driver(draw(ms), draw(ms) / 5)
    jitter = draw(st.sampled_from([0.0, 0.2]))
    return Pipeline(tuple(stages), tuple(links), driver, draw(st.sampled_from([0, 8192])), draw(ms) / 5, jitter)


loads = st.builds(
    Load, sessions=st.integers(1, 20), prompt=st.integers(1, 200), warmup=st.integers(2, 5), tokens=st.integers(4, 12)
)
several = settings(max_examples=50, deadline=None)


@pytest.mark.parametrize("stages", [1, 2, 7])
def test_a_step_of_one_session_takes_every_stage_every_hop_and_the_driver(stages: int) -> None:
    pipeline = alike(stages, HOP_S, driver=Driver(0.002, 0.0005), turnaround_s=0.004)
    seen = simulate(pipeline, Load(1))
    step = stages * STEP_S + (stages + 1) * HOP_S + 0.0025
    assert seen.pace.step_p50_s == pytest.approx(step) == seen.pace.step_p99_s
    assert seen.pace.tokens_per_s == pytest.approx(1 / step)
    assert seen.bubble == pytest.approx([1 - STEP_S / step] * stages)
    assert seen.driver_busy == pytest.approx(0.0025 / step)


def test_the_time_of_rows_and_entries_and_of_their_bytes_counts() -> None:
    """A prompt is one piece here, on one stage; later rows go between two."""
    prompt = simulate(Pipeline((Compute(0.1, 0.001, 0.01),), (Link(0.0),) * 2), Load(1, prompt=50))
    assert prompt.first_s == pytest.approx(0.1 + 50 * 0.001 + 0.01) and prompt.pace.step_p50_s == pytest.approx(0.111)
    link = Link(HOP_S, bytes_per_s=1e6)
    two = simulate(Pipeline((Compute(STEP_S),) * 2, (link,) * 3, row_bytes=2000), Load(1))
    assert two.pace.step_p50_s == pytest.approx(2 * STEP_S + 3 * HOP_S + 0.002)


def test_a_link_carries_one_frame_after_another() -> None:
    link = Link(HOP_S, bytes_per_s=1e6)
    four = Pipeline((Compute(STEP_S),) * 4, (Link(0.0), link, Link(0.0), Link(0.0), Link(0.0)), row_bytes=50_000)
    assert simulate(four, Load(4)).pace.tokens_per_s == pytest.approx(1 / 0.05)


@pytest.mark.parametrize("stages", [1, 2, 4, 16])
@pytest.mark.parametrize("each", [1, 3])
def test_as_many_sessions_as_stages_keep_all_stages_busy(stages: int, each: int) -> None:
    seen = simulate(alike(stages), Load(stages * each))
    assert seen.pace.tokens_per_s == pytest.approx(each / STEP_S)
    assert seen.bubble == pytest.approx([0.0] * stages, abs=1e-6)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_one_session_keeps_one_stage_busy_at_a_time(stages: int) -> None:
    assert sum(1 - bubble for bubble in simulate(alike(stages), Load(1)).bubble) == pytest.approx(1.0)
    assert sum(1 - bubble for bubble in simulate(alike(stages, HOP_S), Load(1)).bubble) < 1.0


@several
@given(pipelines(), loads)
def test_no_pipeline_is_faster_than_its_slowest_stage_or_its_driver_and_time_is_conserved(
    pipeline: Pipeline, load: Load
) -> None:
    pipeline = replace(pipeline, jitter=0.0)
    seen = simulate(pipeline, load)
    rows = seen.pace.tokens_per_s
    in_one_frame = load.sessions
    for stage in pipeline.stages:
        assert rows <= 1.0001 * in_one_frame / stage.step_s(in_one_frame, in_one_frame)
    assert rows * pipeline.driver.entry_s <= 1.0001
    assert all(-1e-9 <= bubble <= 1 for bubble in seen.bubble) and 0 <= seen.driver_busy <= 1 + 1e-9
    alone = sum(stage.step_s(1, 1) for stage in pipeline.stages) + sum(link.latency_s for link in pipeline.links)
    assert seen.pace.step_p50_s >= 0.9999 * alone


@several
@given(pipelines(), st.integers(4, 12))
def test_longer_links_never_make_one_session_or_full_stages_faster(pipeline: Pipeline, tokens: int) -> None:
    pipeline = replace(pipeline, jitter=0.0)
    links = tuple(replace(link, latency_s=2 * link.latency_s) for link in pipeline.links)
    for sessions in (1, len(pipeline.stages)):
        load = Load(sessions, warmup=4, tokens=tokens)
        near, far = (simulate(each, load).pace.tokens_per_s for each in (pipeline, replace(pipeline, links=links)))
        assert far <= 1.0001 * near


@several
@given(pipelines(), loads)
def test_the_same_seed_gives_the_same_and_a_replay_ends(pipeline: Pipeline, load: Load) -> None:
    assert simulate(pipeline, load, seed=3) == simulate(pipeline, load, seed=3)
    replayed = simulate(pipeline, replace(load, replay=True))
    assert replayed.first_s > 0


def test_jitter_costs_a_full_pipeline_and_not_one_session() -> None:
    steady, shaky = alike(8), alike(8, jitter=0.3)
    one = simulate(shaky, Load(1, tokens=400)).pace.tokens_per_s
    assert one == pytest.approx(simulate(steady, Load(1)).pace.tokens_per_s, rel=0.05)
    many = [simulate(pipeline, Load(8, tokens=100)).pace.tokens_per_s for pipeline in (steady, shaky)]
    assert 0.5 * many[0] < many[1] < 0.95 * many[0]


def test_a_prompt_is_fed_in_pieces_that_follow_each_other_through_the_stages() -> None:
    pipeline = Pipeline((Compute(1e-6, 0.001),) * 4, (Link(0.0),) * 5)
    in_pieces = simulate(pipeline, Load(1, prompt=512)).first_s
    assert 0.512 < in_pieces < 0.6 * 4 * 0.512


def test_hundreds_of_stages_scale_like_eight() -> None:
    few, many = (simulate(alike(n, HOP_S), Load(n, warmup=2, tokens=3)) for n in (8, 256))
    assert many.pace.tokens_per_s == pytest.approx(few.pace.tokens_per_s, rel=0.02)
    assert many.pace.step_p50_s == pytest.approx(32 * few.pace.step_p50_s, rel=0.02)


def test_recovery_is_the_sum_of_its_parts() -> None:
    assert Recovery(0.5, 2.0, 3.0, 0.1).until_served_s(10) == pytest.approx(6.5)


def test_pace_counts_the_gaps_of_each_session() -> None:
    seen = pace([[0.0, 1.0, 2.0], [0.5, 1.0]])
    assert seen.tokens_per_s == pytest.approx(1 + 2) and seen.step_p50_s == 1.0


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Pipeline((), (Link(0.0),)), "stages"),
        (lambda: Pipeline((Compute(1.0),), (Link(0.0),)), "links"),
        (lambda: alike(2, hop_s=-1.0), "times"),
        (lambda: Pipeline((Compute(0.0),), (Link(0.0),) * 2), "stages"),
        (lambda: Load(0), "load"),
        (lambda: Load(1, tokens=1), "load"),
    ],
)
def test_what_cannot_be_simulated_is_refused(made, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made()
