"""`memra-pp plan`: the table, its numbers, what it advises, and bad input answered in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memra_pp import cli
from memra_pp.admission import Device, plan, session_ctx
from memra_pp.cache import KvPolicy
from memra_pp.cli.advice import _orders
from memra_pp.cli.options import positive, size, sizes, spelled, spelled_devices
from memra_pp.cli.table import beside, columns, human
from memra_pp.config import ModelConfig, read_weight_bytes
from memra_pp.driver.launch.launch import launch

GIB = 1 << 30


@pytest.fixture
def configs(data: Path) -> Path:
    return data / "configs"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    """What the command prints."""

    def run(model: Path, *args: str) -> str:
        assert cli.main(["plan", str(model), *args]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def answer(say):
    """The object it prints with `--json`."""
    return lambda *args: json.loads(say(*args, "--json"))


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]):
    """The exit code of a refused command, and its one line."""

    def run(model: Path, *args: str) -> tuple[int, str]:
        try:
            code = cli.main(["plan", str(model), *args])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert not out and err.startswith("memra-pp: error: ") and err.count("\n") == 1
        return code, err

    return run


def change_of(report: dict, change: str) -> dict:
    (found,) = [a for a in report["alternatives"] if a["change"] == change]
    return found


QWEN = "--devices", "80GiB,80GiB,48GiB", "--ctx", "32768"


def test_the_object_is_the_plan(configs, answer):
    report = answer(configs / "qwen3_5-27b.json", *QWEN, "--speculate", "4", "--recurrent", "states", "--snapshots", "2")
    cfg = ModelConfig.from_hf(configs / "qwen3_5-27b.json")
    devices = [Device(f"device {s}", n * GIB) for s, n in enumerate((80, 80, 48))]
    expected = plan(cfg, devices, 32768, None, KvPolicy(), speculate=4, recurrent="states", snapshots=2)
    for name, cut in (("even", expected.even), ("best", expected.best)):
        assert report[name]["cuts"] == list(cut.fence[1:-1])
        assert (report[name]["sessions"], report[name]["binding_stage"]) == (cut.sessions, cut.binding)
        for got, stage in zip(report[name]["stages"], cut.stages, strict=True):
            assert got.pop("layers") == [stage.layers.start, stage.layers.stop]
            assert got == {key: getattr(stage, key) for key in got} and len(got) == 16
    assert report["weights"]["estimated"] and report["session"]["speculate"] == 4
    assert (report["given"], report["sessions_asked"], report["mtp_layers"]) == (None, None, 1)


def test_a_plan_says_whether_there_is_a_forward_to_run_it_with(configs, say, answer):
    for name, runs in (("qwen3_5-27b", True), ("llama3_1-70b", False)):
        options = (configs / f"{name}.json", "--devices", "8x80GiB", "--ctx", "8k")
        assert ("there is no reference forward for it" in say(*options)) is not runs
        assert answer(*options)["reference_forward"] is runs


def test_the_table_shows_both_cuts_their_stages_and_what_binds(configs, say, answer):
    text, report = say(configs / "qwen3_5-27b.json", *QWEN), answer(configs / "qwen3_5-27b.json", *QWEN)
    even, best = report["even"], report["best"]
    lines = text.splitlines()
    assert (
        "64 + 1 MTP layers" in lines[0] and "32,768 rows: prompt, new tokens and 8 of slack (72 when speculating)" in lines[1]
    )
    assert lines[2] == "K/V q8_0/q5_1; rings off" and lines[3].startswith("~ weights estimated: bf16, 27.3 B parameters")
    assert lines[5] == f"{best['sessions']} fit with --cuts 27,52; the even cut holds {even['sessions']}"
    assert f"even cut: {even['sessions']} fit" in text and f"best cut: {best['sessions']} fit" in text
    stages = [line for line in lines if "GiB" in line and "~" in line][:3]
    for s, line in enumerate(stages):
        cells = line.replace(" GiB", "GiB").replace(" MiB", "MiB").replace(" *", "*").split()
        marks = ["*" if cut["binding_stage"] == s else "" for cut in (even, best)]
        assert cells[0] == str(s) and cells[1] in ("80.0GiB", "48.0GiB")
        for cut, at, mark in ((even, 2, marks[0]), (best, 6, marks[1])):
            lo, hi = cut["stages"][s]["layers"]
            assert cells[at] == f"{lo}-{hi - 1}"
            assert cells[at + 1] == "~" + human(cut["stages"][s]["weight_bytes"]).replace(" ", "")
            assert cells[at + 2] == human(cut["stages"][s]["session_bytes"]).replace(" ", "")
            assert cells[at + 3] == f"{cut['stages'][s]['sessions']}{mark}"
    assert f"--cuts {','.join(map(str, best['cuts']))}" in text


def test_one_cut_where_the_even_one_is_the_best(say, tiny):
    text = say(tiny, "--devices", "2x2GiB", "--ctx", "1000")
    assert "no cut lets more fit" in text and "best cut:" not in text and "~" not in text


@pytest.mark.parametrize(
    "args",
    [
        ("qwen3_5-27b", "--devices", "8x80GiB", "--ctx", "262144", "--sessions", "900", "--speculate", "8"),
        ("llama3_1-70b", "--devices", "16x1.5TiB", "--ctx", "131072"),
        ("llama3_1-70b", "--devices", "80x24GiB", "--ctx", "131072", "--sessions", "123456789"),
        ("llama3_1-70b", "--devices", "1GiB,200GiB", "--ctx", "8192"),
        ("gemma4-e4b", "--devices", "3x1GiB", "--ctx", "131072", "--cuts", "3,5"),
    ],
)  # fmt: skip
def test_it_fits_100_columns(configs, say, args):
    text = say(configs / f"{args[0]}.json", *args[1:])
    assert max(map(len, text.splitlines())) <= 100


def test_bars_are_filled_to_scale(configs, say, answer):
    args = configs / "llama3_1-70b.json", "--devices", "80GiB,160GiB", "--ctx", "8192", "--cuts", "30", "--sessions", "50"
    bars = [line.split()[1] for line in say(*args).splitlines() if "#" in line and "w" * 9 in line]
    stages = answer(*args)["given"]["stages"]
    assert len(bars) == 2
    for bar, stage in zip(bars, stages, strict=True):
        assert len(bar) == 36 and bar == "".join(sorted(bar, key="wr#.".index))
        for mark, nbytes in (("w", stage["weight_bytes"]), ("#", 50 * stage["session_bytes"]), (".", stage["free_bytes"])):
            assert abs(bar.count(mark) - 36 * nbytes / stage["memory_bytes"]) <= 1


def test_sessions_that_do_not_fit_are_an_answer(configs, say, answer):
    args = configs / "qwen3_5-27b.json", *QWEN, "--sessions"
    report = answer(*args, "64")
    short = -min(stage["free_bytes"] for stage in report["even"]["stages"])
    assert report["sessions_asked"] == 64 and short > 0
    assert f"({short:,} bytes) short on stage 2; best cut has room" in " ".join(say(*args, "64").split())
    assert f"64 fit with --cuts 27,52 (at most {report['best']['sessions']}); the even cut holds 51" in say(*args, "64")
    assert "short" not in say(*args, "51")


def test_weights_that_do_not_fit_are_said_to(configs, say):
    text = " ".join(say(configs / "llama3_1-70b.json", "--devices", "80GiB", "--ctx", "8192").split())
    assert "one stage: 0 fit" in text and "short on stage 0" in text
    assert "Stage 0 binds, by its weights: of 80.0 GiB, weights take 131 GiB" in text and "more than there is" in text


def test_what_is_advised_is_planned_and_gives_more(configs, answer):
    model = configs / "qwen3_5-27b.json"
    args = "--devices", "80GiB,80GiB,48GiB", "--speculate", "8"
    states = "--ctx", "32768", "--recurrent", "states", "--snapshots", "3"
    report = answer(model, *args, *states)
    now = report["even"]["sessions"], report["best"]["sessions"]
    changes = {
        "--kv-k fp8 --kv-v q4_0": [*states, "--kv-k", "fp8", "--kv-v", "q4_0"],
        "--recurrent replay": ["--ctx", "32768", "--recurrent", "replay", "--snapshots", "3"],
        "--snapshots 1": ["--ctx", "32768", "--recurrent", "states", "--snapshots", "1"],
        "--ctx 16384": ["--ctx", "16384", *states[2:]],
    }
    for change, changed in changes.items():
        told, other = change_of(report, change), answer(model, *args, *changed)
        assert (told["even_sessions"], told["best_sessions"]) == (other["even"]["sessions"], other["best"]["sessions"])
        assert told["best_cuts"] == other["best"]["cuts"]
    more = answer(model, "--devices", "80GiB,80GiB,48GiB,48GiB", "--speculate", "8", *states)
    assert change_of(report, "one more device of 48GiB, last")["best_sessions"] == more["best"]["sessions"]
    for told in report["alternatives"]:
        assert told["even_sessions"] > now[0] or told["best_sessions"] > now[1]
    assert not [a for a in report["alternatives"] if "--ring" in a["change"] or a["change"] == "--kv-k fp8 --kv-v fp8"]


def test_a_ring_is_advised_where_a_model_has_windows_and_the_context_is_longer(configs, answer):
    model, devices = configs / "gemma3-270m.json", ("--devices", "8GiB", "--ctx")
    ringed = answer(model, *devices, "32768", "--ring", "all")
    assert change_of(answer(model, *devices, "32768"), "--ring all")["best_sessions"] == ringed["best"]["sessions"]
    for report in (ringed, answer(model, *devices, "4096")):
        assert not [a for a in report["alternatives"] if "--ring" in a["change"]]


def test_closing_the_doors_is_advised_where_they_make_rows_larger(configs, answer, monkeypatch):
    model, devices = configs / "gemma4-e4b.json", ("--devices", "2x24GiB", "--ctx", "8192")
    told = change_of(answer(model, *devices), "MEMRA_GEMMA_GKV=0 MEMRA_GEMMA_WKV=0")
    monkeypatch.setenv("MEMRA_GEMMA_GKV", "0")
    monkeypatch.setenv("MEMRA_GEMMA_WKV", "0")
    assert answer(model, *devices)["best"]["sessions"] == told["best_sessions"]


def test_formats_and_rings_come_from_options_before_the_environment(configs, answer, monkeypatch):
    model, args = configs / "gemma3-270m.json", ("--devices", "8GiB", "--ctx", "8192")
    monkeypatch.setenv("MEMRA_KV_V", "q4_0")
    monkeypatch.setenv("MEMRA_SWA_RING", "all")
    policy = answer(model, *args)["policy"]
    assert (policy["k"], policy["v"], policy["ring"]) == ("q8_0", "q4_0", "all")
    policy = answer(model, *args, "--kv-v", "fp8", "--kv-k", "fp8", "--ring", "off")["policy"]
    assert (policy["k"], policy["v"], policy["ring"]) == ("fp8", "fp8", "off")


def test_a_cut_of_ones_own_is_compared(configs, say, answer):
    args = configs / "qwen3_5-27b.json", *QWEN, "--cuts", "10,20"
    report = answer(*args)
    assert report["given"]["cuts"] == [10, 20] and report["even"]["cuts"] == [21, 42]
    assert f"your cut: {report['given']['sessions']} fit" in say(*args)
    assert change_of(report, "one more device of 48GiB, last")["given_sessions"] is None
    assert change_of(report, "--ctx 16384")["given_sessions"] > report["given"]["sessions"]


def test_the_recommended_cut_is_the_one_that_is_drawn_and_explained(configs, say):
    text = say(configs / "qwen3_5-27b.json", *QWEN)
    assert "stage  best cut, 108 sessions" in text and "\nStage 0 binds, by its cache" in text
    text = say(configs / "qwen3_5-27b.json", *QWEN, "--cuts", "10,20", "--sessions", "2")
    assert "\n2 fit with --cuts 10,20 (at most 12); --cuts 27,52 holds 108\n" in text
    assert "stage  your cut, 2 sessions" in text and "\nStage 2 binds" in text


def test_the_header_says_which_layers_are_ringed_and_in_which_formats(configs, say, monkeypatch):
    args = "--devices", "2x80GiB", "--ctx", "8192", "--kv-v", "q4_0", "--ring", "step"
    lines = say(configs / "gemma4-26b-a4b.json", *args).splitlines()
    assert lines[2] == "K/V fp8/fp8 by MEMRA_GEMMA_GKV, MEMRA_GEMMA_WKV; rings step: 0 of 30 layers"
    assert " ".join(lines[3:5]).endswith("gemma4-26b-a4b.json; tied head, held on both ends")
    monkeypatch.setenv("MEMRA_GEMMA_WKV", "0")
    lines = say(configs / "gemma4-26b-a4b.json", *args).splitlines()
    assert lines[2].startswith("K/V q8_0/q4_0 on 25 layers, fp8/fp8 by MEMRA_GEMMA_GKV on 5 layers")
    lines = say(configs / "gemma3-270m.json", "--devices", "8GiB", "--ctx", "8192", "--ring", "all").splitlines()
    assert lines[2] == "K/V q8_0/q5_1; rings all: 15 of 18 layers" and "tied" not in lines[3]


def test_a_plan_is_what_opening_a_session_charges(hybrid, answer):
    ctx = session_ctx(8, 1004, 0, 1 << 14)
    report = answer(hybrid, "--devices", "2x4GiB", "--ctx", str(ctx))
    with launch(hybrid, stages=2, backend="local") as pipe, pipe.open([1] * 8, max_new_tokens=1004):
        charged = [stage["planned_bytes"] for stage in pipe.stats()["stages"]]
    assert ctx == 1020 and charged == [stage["session_bytes"] for stage in report["even"]["stages"]]


def test_weights_may_be_given(configs, say, answer, error):
    args = "--devices", "2x80GiB", "--ctx", "8k"
    for model in ("qwen3_next-80b-a3b", "step3p5-flash"):
        code, line = error(configs / f"{model}.json", *args)
        assert code == 1 and "--weights 40GiB" in line
        assert error(configs / f"{model}.json", *args, "--weights", "4bpw")[0] == 1
        text = say(configs / f"{model}.json", *args, "--weights", "40GiB")
        assert "~ weights given: 40.0 GiB, evenly over layers" in text and "~20.0 GiB" in text
    llama = configs / "llama3_1-70b.json", *args
    now, fewer = answer(*llama), answer(*llama, "--weights", "4.5bpw")
    told = change_of(now, "--weights 4.5bpw")
    assert told["best_sessions"] == fewer["best"]["sessions"] > now["best"]["sessions"]
    assert "4.5 bits for each of 70.6 B parameters" in fewer["weights"]["source"]
    assert not [a for a in fewer["alternatives"] if "--weights" in a["change"]]


def test_how_many_devices_would_do_where_too_little_fits(configs, say, answer):
    args = configs / "llama3_1-70b.json", "--ctx", "8192", "--devices"
    text, needed = say(*args, "24GiB,24GiB"), answer(*args, "24GiB,24GiB")["devices_needed"]
    assert needed == 6 and "the fewest devices of 24GiB that hold 1 session: --devices 6x24GiB\n" in text
    assert answer(*args, "6x24GiB")["best"]["sessions"] > 0 == answer(*args, "5x24GiB")["best"]["sessions"]
    assert answer(*args, "6x24GiB")["devices_needed"] is None and "fewest" not in say(*args, "6x24GiB")
    text = say(*args, "24GiB,24GiB", "--sessions", "2000000")
    assert "no number of devices of 24GiB holds 2,000,000 sessions" in text and "0 fit with --cuts 40, the least short" in text
    text = say(configs / "llama3_1-70b.json", "--ctx", "8192", "--devices", "24GiB", "--weights", "1bpw", "--sessions", "64")
    assert "\n64 do not fit: 12 do\nthe fewest devices of 24GiB that hold 64 sessions: --devices 4x24GiB\n" in text


def test_nothing_else_helps_where_nothing_does(configs, say):
    text = say(
        configs / "llama3_1-70b.json", "--ctx", "8192", "--devices", "1GiB,200GiB", "--cuts", "40", "--weights", "131GiB"
    )
    assert "least short: 0 fit" in text and text.endswith("nothing else helps\n")


def test_another_order_of_the_devices_is_advised_where_it_gives_more(configs, answer):
    model, ctx = configs / "qwen3_5-27b.json", ("--ctx", "8192")
    now, other = (answer(model, "--devices", order, *ctx) for order in ("24GiB,48GiB", "48GiB,24GiB"))
    assert change_of(now, "--devices 48GiB,24GiB")["best_sessions"] == other["best"]["sessions"] > now["best"]["sessions"]
    for report in (other, answer(model, "--devices", "2x48GiB", *ctx)):
        assert not [a for a in report["alternatives"] if "--devices" in a["change"]]


def test_orders_of_devices():
    memory = [(n, 1) for n in (3, 1, 2, 1)]
    assert len(_orders(memory)) == 12 == len({*_orders(memory)})
    assert _orders([(n, 1) for n in (5, 3, 1, 2, 4)]) == [
        tuple((n, 1) for n in order) for order in ((1, 2, 3, 4, 5), (5, 4, 3, 2, 1))
    ]
    assert len(_orders([(1, 1)] * 23 + [(2, 1)])) == 24 and len(_orders([(1, 1)] * 40 + [(2, 1)])) == 2


def test_snapshots_are_given_up_at_a_price_and_not_when_speculating(configs, answer):
    plain, drafting = (answer(configs / "qwen3_5-27b.json", *QWEN, "--speculate", k) for k in ("0", "4"))
    assert change_of(plain, "--snapshots 0 (no rollback, no drafts)")
    assert not [a for a in drafting["alternatives"] if "snapshots" in a["change"]]


def test_stages_that_are_alike_are_one_row_and_an_overfull_bar_ends_in_an_arrow(configs, say):
    text = say(configs / "llama3_1-70b.json", "--devices", "16x24GiB", "--ctx", "8192", "--sessions", "500")
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit() and "GiB" in line]
    assert [row[0] for row in rows if row[1] != "fit"] == ["0", "1-14", "15"] * 2
    assert [row[3] for row in rows[:3]] == ["0-4", "5-74", "75-79"]
    bars = [line for line in text.splitlines() if "www" in line]
    assert all(line.split()[1].endswith("#>") == ("-" in line.split()[-2]) for line in bars) and "#>" in bars[-1]


def test_mtp_blocks_may_be_left_out(configs, answer):
    with_mtp, without = (answer(configs / "qwen3_5-27b.json", *QWEN, *more)["even"]["stages"] for more in ((), ("--no-mtp",)))
    assert [with_mtp[2]["layers"], without[2]["layers"]] == [[42, 65], [42, 64]]
    assert with_mtp[2]["session_bytes"] > without[2]["session_bytes"]
    assert [stage["session_bytes"] for stage in with_mtp[:2]] == [stage["session_bytes"] for stage in without[:2]]


def test_the_reserve_is_an_option(configs, answer):
    one, two = (answer(configs / "qwen3_5-27b.json", *QWEN, *more)["even"]["stages"] for more in ((), ("--reserve", "1.5GiB")))
    assert [stage["reserve_bytes"] for stage in one + two] == [GIB] * 3 + [3 * GIB // 2] * 3
    assert two[2]["sessions"] < one[2]["sessions"]


def test_directories_and_gguf_files_have_their_weights_counted(hybrid, gemma, answer):
    for model in (hybrid, gemma):
        cfg = ModelConfig.from_path(model)
        report = answer(model, "--devices", "2x4GiB", "--ctx", "2048")
        weights = read_weight_bytes(model, cfg)
        assert not report["weights"]["estimated"] and "headers" in report["weights"]["source"]
        both = [stage["weight_bytes"] for stage in report["even"]["stages"]]
        half = cfg.n_trunk // 2
        assert both == [weights.of_stage(range(half), True, False), weights.of_stage(range(half, cfg.n_layer), False, True)]


@pytest.mark.parametrize(
    ("code", "args", "says"),
    [
        (2, ["--devices", "80Gj", "--ctx", "9"], "a size such as 80GiB"),
        (2, ["--devices", "80", "--ctx", "9"], "80 bytes: did you mean 80GiB?"),
        (2, ["--devices", "80GiB,8x48", "--ctx", "9"], "48 bytes: did you mean 48GiB?"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--weights", "40"], "40 bytes: did you mean 40GiB, or 40bpw?"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--weights", "0bpw"], "at most 64 bits"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--weights", "q4"], "bits such as 4.5bpw"),
        (2, ["--devices", "80GiB", "--ctx", "32m"], "a number from 1"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--sessions", "-3"], "'-3': a number from 1"),
        (1, ["--devices", "80GiB", "--ctx", "9", "--speculate", "2", "--snapshots", "0"], "drafts are rolled back"),
        (2, ["--devices", "", "--ctx", "9"], "a size such as 80GiB"),
        (2, ["--devices", "0x80GiB", "--ctx", "9"], "1 to 4096 devices"),
        (2, ["--devices", "80GiB,0", "--ctx", "9"], "1 to 4096 devices"),
        (2, ["--devices", "999999999x80GiB", "--ctx", "9"], "1 to 4096 devices"),
        (2, ["--ctx", "9"], "--devices"),
        (2, ["--devices", "80GiB"], "--ctx"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--reserve", "-1"], "reserve"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--ring", "on"], "step"),
        (1, ["--devices", "65x80GiB", "--ctx", "9"], "choose from 1 to 64"),
        (2, ["--devices", "80GiB", "--ctx", "0"], "'0': a number from 1"),
        (1, ["--devices", "80GiB", "--ctx", "262145"], "262144"),
        (2, ["--devices", "80GiB", "--ctx", "9", "--sessions", "0"], "'0': a number from 1"),
        (1, ["--devices", "80GiB", "--ctx", "9", "--snapshots", "33"], "32"),
        (1, ["--devices", "80GiB", "--ctx", "9", "--cuts", "9,5"], "rise"),
        (1, ["--devices", "80GiB", "--ctx", "9", "--cuts", "9"], "one a stage"),
    ],
)
def test_bad_options_are_one_line(configs, error, code, args, says):
    got, line = error(configs / "qwen3_5-27b.json", *args)
    assert got == code and says in line


def test_bad_models_are_one_line(configs, error, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model, says in (
        (tmp_path / "none.json", "none.json"),
        (tmp_path / "model.gguf", "model.gguf"),
        (tmp_path, "config.json"),
    ):
        code, line = error(model, "--devices", "1GiB", "--ctx", "9")
        assert code == 1 and says in line


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 * GIB),
        ("79.6GiB", 796 * GIB // 10),
        ("80gb", 80 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500 * 10**6),
        ("2TiB", 2 << 40),
        ("80G", 80 * 10**9),
        ("80Gi", 80 * GIB),
        ("512mi", 512 << 20),
        ("123", 123),
        ("123 bytes", 123),
        ("0.000000001GB", 1),
        ("0", 0),
    ],
)
def test_sizes_are_exact(text, nbytes):
    assert size(text) == nbytes


def test_counts_may_be_in_thousands_of_1024():
    assert [positive(text) for text in ("1", "32k", "128K", "32768")] == [1, 32768, 131072, 32768]


@pytest.mark.parametrize("text", ["80GiB", "80GB", "79.5GiB", "1.5TiB", "500MB", "79.6GiB", "1234567891"])
def test_sizes_are_spelled_as_they_are_read(text):
    assert spelled(size(text)) == text
    assert spelled_devices([1 << 30, size(text), size(text)]) == f"1GiB,2x{text}"


def test_devices_are_listed_or_multiplied():
    assert sizes("80GiB, 48GiB") == [80 * GIB, 48 * GIB]
    assert sizes("2x80GiB,1.5GB") == [80 * GIB, 80 * GIB, 1_500_000_000]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1023 << 20, "1.00 GiB"),
        (80 * GIB, "80.0 GiB"),
        (417 << 20, "417 MiB"),
        (-55 * GIB, "-55.0 GiB"),
        (99_960 << 20, "97.6 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_bytes_are_shown_to_three_digits(nbytes, text):
    assert human(nbytes) == text


def test_columns_line_up():
    assert columns(("a", "bb"), ("ccc", "d")) == ["  a  bb", "ccc   d"]
    assert columns(("a", "bb"), ("ccc", "d"), left=(0,)) == ["a    bb", "ccc   d"]
    assert beside(["a", "bbb"], ["c", "d"]) == ["a     c", "bbb   d"]


def test_a_name_that_the_terminal_cannot_show_is_shown_escaped(configs, tmp_path):
    model = tmp_path / "d\u00e9.json"
    model.write_text((configs / "gemma3-270m.json").read_text())
    args = [sys.executable, "-m", "memra_pp.cli", "plan", str(model), "--devices", "2GiB", "--ctx", "100"]
    run = subprocess.run(args, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0 and "d\\xe9.json" in run.stdout and not run.stderr


def test_an_option_with_a_line_break_is_refused_in_one_line(configs, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", str(configs / "gemma3-270m.json"), "--devices", "2GiB", "--ctx", "100", "--x\ny"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_pipe_is_no_config(tmp_path, error):
    os.mkfifo(tmp_path / "config.json")
    assert "not a file" in error(tmp_path, "--devices", "2GiB", "--ctx", "100")[1]


def test_the_command_runs_as_a_module(configs):
    command = [sys.executable, "-m", "memra_pp.cli", "plan", str(configs / "qwen3_5-27b.json"), *QWEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("qwen3_5_text")
