"""The page of `memra-pp bench` as a browser shows it: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:  # whoever tests without a browser collects this module too
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.cluster

NAME = "<img src=x onerror=document.title=1>"
"""A model's directory may be called so."""

WIDE, NARROW = 1280, 375
VIEWS = [(width, scheme) for width in (WIDE, NARROW) for scheme in ("light", "dark")]

SPILLED = """() => [...document.querySelectorAll("svg *, p, h1, h2, dt, dd, code, li")]
    .filter(e => !e.closest("title, .scroll, details") && e.getBoundingClientRect().width > 0)
    .filter(e => e.getBoundingClientRect().left < 0 || e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.outerHTML.slice(0, 200))"""
"""What lies beside the window, other than in a table that scrolls."""

OVERLAPS = """() => [...document.querySelectorAll("svg")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()])
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4
    ).map(([b]) => [a, b]))})"""
"""Texts of a picture that lie on each other."""


class Bench(NamedTuple):
    """A report, and what the command printed beside it."""

    file: Path
    found: dict[str, Any]


class Shown(NamedTuple):
    """A page that has been opened, what it asked for and what the console said."""

    page: Page
    asked: list[str]
    said: list[str]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Of a tiny model on two stages."""
    place = tmp_path_factory.mktemp("report")
    model, file = place / NAME, place / "out.html"
    shutil.copytree(Path(__file__).parents[1] / "data" / "hybrid", model)
    options = ["--stages", "2", "--backend", "local", "--seconds", "1", "--sessions", "4", "--prompts", "16,64,20000"]
    command = [sys.executable, "-m", "memra_pp.cli", "bench", str(model), *options, "--json", "--report", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return Bench(file, json.loads(done.stdout))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.fail("there is no chromium to show the page in: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, bench: Bench) -> Iterator[Any]:
    """Opens the report in a window of some width and colours, as if there were no network."""
    contexts: list[BrowserContext] = []

    def shown(width: int, scheme: Any) -> Shown:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page, asked, said = context.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(bench.file.as_uri())
        return Shown(page, asked, said)

    yield shown
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_is_quiet_alone_and_in_bounds(show: Any, bench: Bench, width: int, scheme: str) -> None:
    page, asked, said = show(width, scheme)
    assert (asked, said) == ([bench.file.as_uri()], [])
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(SPILLED) == [] == page.evaluate(OVERLAPS)


def test_the_scheme_decides_the_colours(show: Any) -> None:
    light, dark = (
        [_luminance(show(WIDE, scheme).page, what) for what in ("color", "background-color")] for scheme in ("light", "dark")
    )
    assert light[0] < 0.2 < 0.8 < light[1] and dark[1] < 0.2 < 0.8 < dark[0]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_is_accessible(show: Any, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page, *_ = show(width, scheme)
    page.locator("summary").click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_all_figures_are_in_the_page(show: Any, bench: Bench) -> None:
    page, *_ = show(WIDE, "light")
    assert json.loads(page.locator("script#figures").text_content()) == bench.found
    page.locator("summary").click()
    rows = page.locator(".all tbody tr")
    shown = dict(
        row.split("\t")
        for row in rows.evaluate_all("rows => rows.map(row => [...row.cells].map(c => c.textContent).join('\\t'))")
    )
    assert shown == {name: str(value) for name, value in _leaves("", bench.found)}
    assert rows.first.is_visible() and page.locator("pre code").text_content() == bench.found["command"]


def test_pictures_show_what_was_measured(show: Any, bench: Bench) -> None:
    page, *_ = show(WIDE, "light")
    figures = bench.found["figures"]
    pictures = page.locator("svg[role=img]")
    assert pictures.count() > 10
    for picture in pictures.all():
        box = picture.bounding_box()
        assert picture.is_visible() and box is not None and box["width"] > 100
        assert picture.get_attribute("aria-label") == picture.locator("> title").text_content() != ""
    points = page.locator("section", has=page.get_by_role("heading", name="Decode")).locator("circle")
    assert points.count() == 3 * len(figures["decode"])
    for name, sizes in (
        ("cache", [stage["allocated_bytes"] for stage in figures["stages"]]),
        ("weights", [stage["weight_bytes"] for stage in figures["stages"]]),
        ("work", [times["busy_s"] for times in figures["decode"][-1]["stages"]]),
    ):
        strip = page.get_by_role("img", name=re.compile(f"^{name}: "))
        whole, parts = strip.bounding_box(), [part.bounding_box() for part in strip.locator("rect").all()]
        edges = [whole["x"] + whole["width"] * sum(sizes[:i]) / sum(sizes) for i in range(len(sizes) + 1)]
        assert [part["x"] for part in parts] == pytest.approx(edges[:-1], abs=1.5)
        assert [part["x"] + part["width"] for part in parts] == pytest.approx(edges[1:], abs=1.5)


def test_a_model_s_name_is_a_text(show: Any) -> None:
    page, *_ = show(WIDE, "light")
    assert page.title() == f"memra-pp bench: {NAME}" == page.locator("h1").text_content()
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1


def test_what_was_left_out_is_told(show: Any, bench: Bench) -> None:
    page, *_ = show(NARROW, "dark")
    section = page.locator("section", has=page.get_by_role("heading", name="Left out"))
    assert section.locator("li").all_text_contents() == bench.found["figures"]["left_out"]
    assert any("20,000" in why for why in bench.found["figures"]["left_out"])


def _luminance(page: Page, what: str) -> float:
    """How bright the body's colour is, from 0 to 1."""
    colour = page.evaluate(f"getComputedStyle(document.body).getPropertyValue('{what}')")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for key, inner in value.items():
                yield from _leaves(f"{name}.{key}" if name else key, inner)
        case list():
            for i, inner in enumerate(value):
                yield from _leaves(f"{name}[{i}]", inner)
        case _:
            yield name, value
