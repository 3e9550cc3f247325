"""`memra-pp bench`: what it measures, prints and writes, and bad input answered in one line."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from memra_pp import cli
from memra_pp.admission import CostModel, session_ctx
from memra_pp.cache import KvPolicy
from memra_pp.cli.bench import measure as measuring
from memra_pp.cli.bench.charts import ceiling, short
from memra_pp.cli.bench.figures import (
    Bench,
    Decode,
    Figures,
    Held,
    Hop,
    Launch,
    Machine,
    Model,
    Prefill,
    Rollback,
    Speculation,
    Stage,
    StageTime,
)
from memra_pp.cli.bench.measure import Asked, doubled, measure
from memra_pp.cli.bench.probes import NEW, PROMPT
from memra_pp.cli.bench.report import page
from memra_pp.config import ModelConfig
from memra_pp.errors import StageError

QUICK = ("--backend", "local", "--seconds", "0.2", "--sessions", "3", "--prompts", "16,8,600", "--max-ctx", "500")
HYBRID = Path(__file__).parent / "data" / "hybrid"
VOID = {"meta", "link"}

BENCH = Bench(
    command="memra-pp bench m --stages 2",
    began="2026-01-02T03:04:05+00:00",
    machine=Machine("a cpu", 4, 1 << 34, "a system", 0.5, {"python": "3.11"}),
    model=Model("m", "arch", 6, 64, 256, 1024, 3000),
    launch=Launch((0, 2, 6), "cuts", "ray", ("q8_0/q5_1", "fp8/fp8"), "all", 1.5),
    figures=Figures(
        warm_s=0.5,
        measured_s=3.25,
        held=Held(4, 552, 1.25),
        stages=(Stage(0, (0, 2), "cpu:0 x1", 1000, 512, 512, 4096), Stage(1, (2, 6), "cpu:1 x1", 2000, 1024, 1024, 4096)),
        prefill=(Prefill(64, 3, 0.5, 128.0),),
        decode=(
            Decode(1, 9, 17.0, 55.5, 66.5, (StageTime(1.0, 3.0, 0.0, 0.75), StageTime(2.0, 1.0, 1.0, 0.5))),
            Decode(4, 40, 51.0, 75.5, 88.5, (StageTime(3.0, 1.0, 0.0, 0.25), StageTime(4.0, 0.0, 0.0, 0.0))),
        ),
        hops=(Hop("driver", "stage 0", 9, 11.5, 22.5), Hop("stage 0", "stage 1", 9, 33.5, 44.5)),
        rollback=(Rollback(5, 4, 2, 1.5, 2.5, 3.5),),
        speculation=(Speculation("off", 9, 17.5, 0, 0, 1.0), Speculation("ngram", 9, 35.5, 12, 9, 2.25)),
        left_out=("prefill, 600 rows: too long",),
    ),
)


class Page(HTMLParser):
    """A page's elements and their texts; each that is opened must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", text))

    def all_of(self, tag: str) -> list[str]:
        """The texts of the elements of a kind."""
        return [text for within, text in self.texts if within == tag]

    @property
    def data(self) -> Any:
        """What the page carries in JSON."""
        [text] = self.all_of("script")
        return json.loads(text)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Page]:
    """What a bench of a tiny model has printed, and its report."""
    report, out = tmp_path_factory.mktemp("bench") / "out.html", io.StringIO()
    with patience(math.inf), contextlib.redirect_stdout(out):
        code = cli.main(["bench", str(HYBRID), "--cuts", "3,5", *QUICK, "--json", "--report", str(report)])
    assert code == 0
    return json.loads(out.getvalue()), Page(report.read_text(encoding="utf-8"))


def test_everything_is_measured(ran: tuple[dict[str, Any], Page]) -> None:
    found, _ = ran
    figures, launched = found["figures"], found["launch"]
    assert found["command"].startswith("memra-pp bench ") and "--cuts 3,5" in found["command"]
    assert found["model"]["name"] == "hybrid" and found["machine"]["versions"]["numpy"]
    assert (launched["fence"], launched["cut_by"], launched["backend"]) == ([0, 3, 5, 8], "cuts", "local")
    assert launched["load_s"] > 0 and figures["warm_s"] > 0 and figures["measured_s"] > 0
    assert [stage["layers"] for stage in figures["stages"]] == [[0, 3], [3, 5], [5, 8]]
    assert sum(stage["weight_bytes"] for stage in figures["stages"]) == found["model"]["weight_bytes"]
    assert figures["held"]["sessions"] == 3 and figures["held"]["ctx"] == 500
    assert [point["rows"] for point in figures["prefill"]] == [8, 16]
    assert [why for why in figures["left_out"] if "600" in why and "500" in why] == figures["left_out"] != []
    assert [(hop["source"], hop["target"]) for hop in figures["hops"]] == [
        ("driver", "stage 0"), ("stage 0", "stage 1"), ("stage 1", "stage 2"), ("stage 2", "driver"),
    ]  # fmt: skip
    assert figures["rollback"][0]["drafts"] == 4 and figures["rollback"][0]["accepted"] == 2
    assert [way["drafter"] for way in figures["speculation"]] == ["off", "ngram"]
    assert figures["speculation"][0]["tokens_per_traversal"] == 1.0 and figures["speculation"][0]["drafted"] == 0


def test_planned_bytes_are_allocated_bytes(ran: tuple[dict[str, Any], Page]) -> None:
    for stage in ran[0]["figures"]["stages"]:
        assert 0 < stage["planned_bytes"] == stage["allocated_bytes"] < stage["arena_bytes"]


def test_rates_and_times_agree(ran: tuple[dict[str, Any], Page]) -> None:
    figures = ran[0]["figures"]
    for point in figures["prefill"]:
        assert point["runs"] > 0 and point["tokens_per_s"] == pytest.approx(point["rows"] / point["seconds"])
    assert [point["sessions"] for point in figures["decode"]] == [1, 2, 3]
    for point in figures["decode"]:
        assert 0 < point["p50_ms"] <= point["p99_ms"] and point["steps"] >= 2 * point["sessions"] and point["tokens_per_s"] > 0
        for times in point["stages"]:
            waited = times["wait_in_s"] + times["wait_out_s"]
            assert times["busy_s"] > 0 and times["bubble"] == pytest.approx(waited / (waited + times["busy_s"]))


def test_the_report_is_well_formed_and_carries_the_figures(ran: tuple[dict[str, Any], Page]) -> None:
    found, report = ran
    assert report.data == found
    assert report.all_of("h1") == ["memra-pp bench: hybrid"]
    assert report.all_of("h2") == [
        "The fence", "Decode", "Where each stage's time goes", "Prefill", "Bytes by stage", "Hops", "Rounds", "Left out",
        "How it was made",
    ]  # fmt: skip
    assert report.all_of("code")[0] == found["command"]


def test_the_tables_have_every_part(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(hybrid), "--stages", "2", *QUICK, "--speculate", "0"]) == 0
    out, err = capsys.readouterr()
    blocks = [block.split() for block in out.split("\n\n")]
    assert [block[0] for block in blocks] == ["prompt", "sessions", "stage", "hop", "left", "hybrid:"]
    assert "rollback" not in out and "speculation" not in out
    assert out.splitlines()[-1].startswith("hybrid: 2 stages, cut: even, K/V q8_0/q5_1, loaded in")
    assert any("decode, 3 at a time" in line for line in err.splitlines())
    assert all(line.startswith("[") for line in err.splitlines())


@pytest.mark.cluster
def test_ray_is_the_default_backend(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option for option in QUICK if option not in ("--backend", "local")]
    assert cli.main(["bench", str(hybrid), "--stages", "2", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["launch"]["backend"] == "ray"
    assert [len(point["stages"]) for point in found["figures"]["decode"]] == [2, 2, 2]
    assert all(hop["frames"] > 0 and hop["median_us"] <= hop["p99_us"] for hop in found["figures"]["hops"])


def test_a_page_shows_every_figure() -> None:
    report = Page(page(BENCH))
    assert report.data == json.loads(json.dumps(asdict(BENCH)))
    shown = report.all_of("td") + report.all_of("dd") + report.all_of("text") + report.all_of("span")
    for figure in (
        "17.0",
        "51.0",
        "75.50",
        "88.50",
        "128.0",
        "33.5",
        "44.5",
        "1,024",
        "2.25",
        "3.5 ms",
        "75 % busy",
        "100 % busy",
    ):
        assert figure in shown
    drawings = [attributes for tag, attributes in report.elements if tag == "svg"]
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    assert len(report.all_of("title")) > len(drawings) > 10


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    text = page(BENCH)
    report = Page(text)
    for tag, attributes in report.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") or name in ("src", "srcset") for name in attributes)
        assert tag != "script" or attributes["type"] == "application/json"
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in text and "@import" not in text


@pytest.mark.parametrize(
    "evil", ["</script><script>x</script>", "<img src=x onerror=y>", "a\" onload='y", "<!-- ", "]]>&lt;", "\udcff"]
)
def test_what_is_from_outside_is_escaped(evil: str) -> None:
    figures = BENCH.figures
    stages = tuple(replace(stage, device=evil) for stage in figures.stages)
    hostile = replace(
        BENCH,
        command=evil,
        model=replace(BENCH.model, name=evil, arch=evil),
        machine=replace(BENCH.machine, cpu=evil, system=evil, versions={evil: evil}),
        launch=replace(BENCH.launch, kv=(evil, evil), cut_by=evil),
        figures=replace(figures, stages=stages, left_out=(evil,)),
    )
    plain, report = Page(page(BENCH)), Page(page(hostile))
    assert report.data == json.loads(json.dumps(asdict(hostile)))
    assert [tag for tag, _ in report.elements] == [tag for tag, _ in plain.elements]
    assert [list(attributes) for _, attributes in report.elements] == [list(attributes) for _, attributes in plain.elements]
    assert report.all_of("h1") == [f"memra-pp bench: {evil}"]
    assert report.all_of("li")[-1] == evil and report.all_of("code")[0] == evil


def test_parts_without_figures_have_no_section() -> None:
    bare = replace(
        BENCH.figures, prefill=(), hops=(), rollback=(), speculation=(), left_out=(), decode=BENCH.figures.decode[:1]
    )
    report = Page(page(replace(BENCH, figures=bare, model=replace(BENCH.model, weight_bytes=None))))
    assert report.all_of("h2") == [
        "The fence", "Decode", "Where each stage's time goes", "Bytes by stage", "How it was made"
    ]  # fmt: skip


def test_every_stage_is_named_however_many_there_are() -> None:
    stages = tuple(replace(BENCH.figures.stages[0], stage=s, layers=(s, s + 1), device=f"cpu:{s}") for s in range(20))
    report = Page(page(replace(BENCH, figures=replace(BENCH.figures, stages=stages, left_out=()))))
    assert [text for text in report.all_of("li") if text.startswith("stage ")] == [
        f"stage {s}: layer {s}, cpu:{s}" for s in range(20)
    ]  # fmt: skip


def test_more_sessions_than_fit_are_left_out(hybrid: Path) -> None:
    with one_stage(hybrid, sessions=2) as pipe:
        found = measure(pipe, None, Asked(0.1, (8,), 4, 0), lambda text, done, of: None)
    assert found.held.sessions == 2 and [point.sessions for point in found.decode] == [1, 2]
    [why] = found.left_out
    assert why.startswith("more than 2 at a time: ") and "bytes" in why
    assert found.rollback == found.speculation == ()


def test_a_part_whose_session_does_not_fit_is_left_out(hybrid: Path) -> None:
    with patience(math.inf), one_stage(hybrid, sessions=1) as pipe:
        found = measure(pipe, None, Asked(0.1, (8, 2000), 1, 4), lambda text, done, of: None)
    assert [point.rows for point in found.prefill] == [8]
    assert [why.split(":")[0] for why in found.left_out] == [
        "prefill, 2,000 rows", "rollback", "no speculation", "speculation, ngram",
    ]  # fmt: skip


def test_a_prompt_that_would_take_too_long_is_left_out(hybrid: Path) -> None:
    with patience(0), one_stage(hybrid, sessions=1) as pipe:
        found = measure(pipe, None, Asked(0.1, (8, 16), 1, 0), lambda text, done, of: None)
    assert [point.rows for point in found.prefill] == [8]
    assert "--seconds" in found.left_out[0]


def test_progress_never_ends_before_the_bench(hybrid: Path) -> None:
    told: list[tuple[int, int]] = []
    with one_stage(hybrid, sessions=3) as pipe:
        measure(pipe, None, Asked(0.1, (8,), 3, 2), lambda text, done, of: told.append((done, of)))
    assert told == [(i, len(told)) for i in range(len(told))]


def test_times_of_a_stage_that_was_replaced_are_no_figures(hybrid: Path) -> None:
    with one_stage(hybrid, sessions=1) as pipe:
        pipe.chain.recoveries = 1
        with pytest.raises(StageError, match="bench again"):
            measure(pipe, None, Asked(0.1, (8,), 1, 0), lambda text, done, of: None)


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])])
def test_sessions_are_doubled_up_to_the_most(most: int, counts: list[int]) -> None:
    assert doubled(most) == counts


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.003, 0.004), (1, 1), (1.1, 2), (3, 4), (6.5, 8), (8.1, 10), (502, 600), (99_999, 100_000)]
)
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert ceiling(value) == pytest.approx(top)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.1234, "0.123"), (9.996, "10"), (12.34, "12.3"), (12345.6, "12,346")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seconds", "0"], "seconds"),
        (["--seconds", "nan"], "seconds"),
        (["--seconds", "1e9"], "3,600"),
        (["--seconds", "long"], "'long'"),
        (["--sessions", "0"], "--sessions"),
        (["--prompts", "64,"], "--prompts"),
        (["--prompts", "0"], "--prompts"),
        (["--speculate", "-1"], "--speculate"),
        (["--backend", "cloud"], "--backend"),
        (["--max-new", "3"], "--max-new"),
    ],
)
def test_bad_options_are_one_line_of_usage(
    hybrid: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", str(hybrid), *options])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("memra-pp: error: ") and says in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stages", "9"], "9"),
        (["--cuts", "5,3"], "cuts"),
        (["--sessions", "1000000"], "65536"),
        (["--speculate", "300"], "--speculate"),
        (["--max-ctx", "60"], "68 rows"),
        (["--report", "/"], "--report / cannot be written"),
        (["--report", "/nowhere/out.html"], "No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_starts(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    monkeypatch.setattr("memra_pp.cli.run.launch", lambda *args, **more: pytest.fail("it was started"))
    assert cli.main(["bench", str(hybrid), *options]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("memra-pp: error: ") and says in line


@contextlib.contextmanager
def patience(times: float) -> Iterator[None]:
    """So many times its share of the seconds may a prompt take: what is left out does not hang on this machine's pace then."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measuring, "PATIENCE", times)
        yield


@contextlib.contextmanager
def one_stage(model: Path, sessions: int) -> Iterator[memra_pp.Pipeline]:
    """A pipeline in which so many of a bench's plain sessions fit, and not one more."""
    cfg = ModelConfig.from_path(model)
    charge = CostModel(cfg, (0, cfg.n_trunk), KvPolicy()).charge(0, session_ctx(PROMPT, NEW, 0, cfg.max_ctx))
    with memra_pp.launch(model, backend="local", policy=KvPolicy(), budget_bytes=sessions * charge) as pipe:
        yield pipe
