"""A run's page in a real Chromium: hostile text is inert, nothing is fetched, charts fit, light, dark and narrow."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hand_made_runs import HOSTILE, HOSTILE_SHOWN, add_diagnostics, diagnostics, make_run, step

from qarl.report.run_report import write_report

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@dataclass
class Opened:
    """A page in the browser, and what it did."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, or a skip without one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened_page(browser: Any, file: Path, width: int, scheme: str) -> Iterator[Opened]:
    """`file` in a window of `width` pixels. scheme: light or dark."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened = Opened(context.new_page())
    opened.page.on("console", lambda message: opened.console.append(message.text))
    opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
    opened.page.on("dialog", lambda dialog: opened.console.append(dialog.message))
    opened.page.on("request", lambda asked: opened.requests.append(asked.url))
    opened.page.goto(file.as_uri())
    yield opened
    context.close()


NAME = HOSTILE.replace("\ud800 ", "")  # of a metric: a configuration gives none with a lone surrogate


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [step(i, **{f"reward/{NAME}_mean": 0.1 * i, "reward/b_mean": 0.2, NAME: i}) for i in range(1, 5)]
    completion = HOSTILE + "W" * 3000
    run = make_run(tmp_path_factory.mktemp("run") / "a", rows, completion=completion)
    example = {"text": HOSTILE, "before": HOSTILE, "after": "W" * 300, "kind": "garbled", "advantage": -1.0}
    layers = {f"model.layers.0.mlp.{HOSTILE}": [1, 10]}
    add_diagnostics(run, diagnostics(1, 40), diagnostics(4, 40, error_examples=[example], layers=layers))
    return write_report(run)


WINDOWS = [(1280, "light"), (360, "dark")]


@pytest.fixture(params=WINDOWS, ids=lambda p: f"{p[1]}-{p[0]}", scope="module")
def opened(request, browser, report) -> Iterator[Opened]:
    with opened_page(browser, report, *request.param) as opened:
        yield opened


def test_the_page_loads_silently_fetches_nothing_and_fits(opened, report):
    assert opened.console == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]
    assert opened.page.locator("script, img, iframe, object, embed, [onload], [onerror]").count() == 0
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    boxes = opened.page.locator("figure svg").evaluate_all(
        """all => all.map(svg => { const box = svg.getBoundingClientRect();
           const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
           return [box.width, box.height, Math.min(...texts.map(t => t.left - box.left)),
                   Math.min(...texts.map(t => box.right - t.right)), texts.length]; })"""
    )
    assert len(boxes) >= 15
    for width, height, left, right, labels in boxes:
        assert width >= 250 and height >= 60 and labels >= 4
        assert left >= -1 and right >= -1


def test_hostile_text_stands_there_and_does_nothing(opened):
    page = opened.page
    assert page.title() == "Run a"
    assert page.locator(".completion:not(.excerpt) pre").nth(1).inner_text().startswith(HOSTILE_SHOWN)
    assert page.locator(".excerpt pre mark").inner_text() == HOSTILE_SHOWN
    assert HOSTILE_SHOWN.replace("\\ud800 ", "") in page.locator(".legend li").all_inner_texts()


def test_background_and_curves_take_their_colours_from_the_scheme(opened):
    page = opened.page
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert brightness < 120 if dark else brightness == 3 * 255
    curves = page.locator("figure svg path[style*='var(--curve-0)']")
    strokes = curves.evaluate_all("all => all.map(path => getComputedStyle(path).stroke)")
    assert ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)") in strokes
