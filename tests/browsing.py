"""Pages in a real Chromium: opening one, and what must hold of every page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@dataclass
class Opened:
    """A page in the browser, and what it did."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser; skips where there is none."""
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


def assert_silent(opened: Opened, file: Path) -> None:
    """Nothing was said or run, and nothing was fetched but the page itself."""
    assert opened.console == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]
    assert opened.page.locator("script, img, iframe, object, embed, [onload], [onerror]").count() == 0


def assert_fits(opened: Opened, charts: int) -> None:
    """The page never scrolls sideways; at least `charts` charts have room, and their labels stay inside."""
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    boxes = opened.page.locator("figure svg").evaluate_all(
        """all => all.map(svg => { const box = svg.getBoundingClientRect();
           const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
           return [box.width, box.height, Math.min(...texts.map(t => t.left - box.left)),
                   Math.min(...texts.map(t => box.right - t.right)), texts.length]; })"""
    )
    assert len(boxes) >= charts
    for width, height, left, right, labels in boxes:
        assert width >= 250 and height >= 60 and labels >= 4
        assert left >= -1 and right >= -1
