"""Pages in a real Chromium: hostile text is inert, nothing is fetched, text is readable in light, dark and narrow."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Opened, assert_fits, assert_silent, opened_page
from hand_made_runs import HOSTILE, HOSTILE_SHOWN, add_diagnostics, diagnostics, make_run, step

from qarl.report.run_report import write_report

pytestmark = pytest.mark.slow

# Contrast of an element's text with its background, as WCAG 2 defines it.
CONTRAST = """element => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  while ((parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const style = getComputedStyle(element);
  const text = luminance(parse(element.namespaceURI.endsWith('svg') ? style.fill : style.color));
  const background = luminance(parse(getComputedStyle(behind).backgroundColor));
  return (Math.max(text, background) + 0.05) / (Math.min(text, background) + 0.05);
}"""


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
    assert_silent(opened, report)
    assert_fits(opened, charts=15)


def test_hostile_text_stands_there_and_does_nothing(opened):
    page = opened.page
    assert page.title() == "Run a"
    assert page.locator(".completion:not(.excerpt) pre").nth(1).inner_text().startswith(HOSTILE_SHOWN)
    assert page.locator(".excerpt pre mark").inner_text() == HOSTILE_SHOWN
    assert HOSTILE_SHOWN.replace("\\ud800 ", "") in page.locator(".legend li").all_inner_texts()


def test_text_and_chart_labels_have_contrast(opened):
    selectors = [
        "body",
        "p",
        "dt",
        "dd",
        "figcaption",
        "figure svg text",
        ".completion pre",
        "mark",
        "nav a",
        "summary",
    ]
    for selector in selectors:
        elements = opened.page.locator(selector)
        assert elements.count(), selector
        for ratio in elements.evaluate_all(f"all => all.map({CONTRAST})"):
            assert ratio >= 4.5, selector


def test_background_and_curves_take_their_colours_from_the_scheme(opened):
    page = opened.page
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert brightness < 120 if dark else brightness == 3 * 255
    curves = page.locator("figure svg path[style*='var(--curve-0)']")
    strokes = curves.evaluate_all("all => all.map(path => getComputedStyle(path).stroke)")
    assert ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)") in strokes
