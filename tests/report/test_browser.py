"""Pages in a real Chromium: nothing hostile runs, nothing is fetched, and they can be read, light, dark and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hand_made_runs import HOSTILE, HOSTILE_SHOWN, make_run, step

from qarl.report.run_report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on the PATH"),
    pytest.mark.slow,
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

# The contrast of an element's text with what is behind it, as WCAG 2 defines it.
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


@dataclass
class Opened:
    """A page in the browser, and what it did."""

    page: object
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [step(i, **{f"reward/{HOSTILE}_mean": 0.1 * i, "reward/b_mean": 0.2, HOSTILE: i}) for i in range(1, 5)]
    completion = HOSTILE + "W" * 3000
    return write_report(make_run(tmp_path_factory.mktemp("run") / "a", rows, completion=completion))


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


WINDOWS = [(1280, "light"), (1280, "dark"), (360, "light")]


@pytest.fixture(params=WINDOWS, ids=lambda p: f"{p[1]}-{p[0]}", scope="module")
def opened(request, browser, report) -> Iterator[Opened]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened = Opened(context.new_page())
    opened.page.on("console", lambda message: opened.console.append(message.text))
    opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
    opened.page.on("dialog", lambda dialog: opened.console.append(dialog.message))
    opened.page.on("request", lambda asked: opened.requests.append(asked.url))
    opened.page.goto(report.as_uri())
    yield opened
    context.close()


def test_it_loads_silently_and_fetches_nothing_but_itself(opened, report):
    assert opened.console == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]


def test_hostile_text_stands_there_and_does_nothing(opened):
    page = opened.page
    assert page.title() == "Run a"
    assert page.locator("script, img, iframe, object, embed, [onload], [onerror]").count() == 0
    assert page.locator(".completion pre").nth(1).inner_text().startswith(HOSTILE_SHOWN)
    assert HOSTILE_SHOWN in page.locator(".legend li").all_inner_texts()


def test_the_page_never_scrolls_sideways(opened):
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_every_chart_has_room_and_its_labels_stay_inside(opened):
    boxes = opened.page.locator("figure svg").evaluate_all(
        """all => all.map(svg => { const box = svg.getBoundingClientRect();
           const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
           return [box.width, box.height, Math.min(...texts.map(t => t.left - box.left)),
                   Math.min(...texts.map(t => box.right - t.right)), texts.length]; })"""
    )
    assert len(boxes) >= 8
    for width, height, left, right, labels in boxes:
        assert width >= 250 and height >= 80 and labels >= 4
        assert left >= -1 and right >= -1


def test_text_and_chart_labels_have_contrast(opened):
    for selector in ("body", "p", "dt", "dd", "figcaption", "figure svg text", ".completion pre", "nav a", "summary"):
        elements = opened.page.locator(selector)
        assert elements.count(), selector
        for ratio in elements.evaluate_all(f"all => all.map({CONTRAST})"):
            assert ratio >= 4.5, selector


def test_dark_is_dark_and_light_is_light(opened):
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert brightness < 120 if dark else brightness == 3 * 255


def test_a_curve_takes_its_colour_from_the_scheme(opened):
    page = opened.page
    strokes = page.locator("figure svg path[style*='var(--curve-0)']").evaluate_all(
        "all => all.map(path => getComputedStyle(path).stroke)"
    )
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)") in strokes
