"""Pages as text: escaping and contents."""

import re
from html.parser import HTMLParser

import pytest
from hand_made_runs import HOSTILE, HOSTILE_SHOWN

from qarl.errors import UserError
from qarl.report.blocks import (
    Bar,
    BarChart,
    Code,
    Column,
    Completion,
    Completions,
    Facts,
    Histogram,
    LineChart,
    Section,
    Series,
    Table,
    Text,
)
from qarl.report.page import SHOWN_CHARACTERS, render_page, write_page

SERIES = [Series(HOSTILE, [1, 2], [0.1, 0.2]), Series("b", [1, 2], [0.2, None])]
BLOCKS = {
    "line": LineChart(HOSTILE, HOSTILE, HOSTILE, SERIES, note=HOSTILE),
    "bar": BarChart(HOSTILE, HOSTILE, [Bar(HOSTILE, 1.0)], note=HOSTILE),
    "histogram": Histogram(HOSTILE, HOSTILE, HOSTILE, [1.0, 2.0], note=HOSTILE),
    "table": Table([Column(HOSTILE, "right", HOSTILE)], [[HOSTILE]], HOSTILE, HOSTILE),
    "facts": Facts([(HOSTILE, HOSTILE)]),
    "text": Text(HOSTILE, "warning"),
    "code": Code(HOSTILE, HOSTILE),
    "completions": Completions([Completion(HOSTILE, HOSTILE, 0.5, HOSTILE)], HOSTILE),
}


class Tags(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", BLOCKS)
def test_hostile_text_in_any_block_is_text(name):
    section = Section(HOSTILE, [BLOCKS[name]], HOSTILE)
    html = render_page(HOSTILE, HOSTILE, [section])
    page = Tags(html)
    assert not {"script", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [attribute for attribute in page.attributes if attribute.startswith("on")]
    assert HOSTILE_SHOWN in page.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u200b\u202a-\u202e\ud800-\udfff]", html)


def test_the_policy_forbids_scripts_and_the_network_and_pages_repeat_with_unique_ids():
    html = render_page("t", "", [Section("s", [BLOCKS["line"]])])
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    allowed = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")
    assert set(re.findall(r"https?://[^\"'<> ]*", html)) <= set(allowed)
    html = render_page("t", "", [Section(f"s{i}", [BLOCKS["line"], BLOCKS["bar"]]) for i in range(2)])
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', html)) | set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    sections = [Section("s", list(BLOCKS.values()))]
    assert render_page("t", "u", sections) == render_page("t", "u", sections)


def test_long_completions_are_cut_and_empty_charts_and_sections_noted_or_omitted():
    long = Completion("p", "x" * 10 * SHOWN_CHARACTERS, 1.0)
    html = render_page("t", "", [Section("s", [Completions([Completion("p", "\n\n a\r\nb\tc", None), long])])])
    assert "<pre>\n\n\n a\\r\nb   c</pre>" in html
    assert len(html) < 3 * SHOWN_CHARACTERS and f"{9 * SHOWN_CHARACTERS:,} more characters" in html
    empty = Section("s", [LineChart("empty", "x", "y", [])])
    html = render_page("t", "", [empty, Section("nothing here", []), Section("intro alone", [], "some words")])
    assert "No data." in html and "<svg" not in html
    assert "nothing here" not in html and "intro alone" in html


def test_a_page_that_cannot_be_written_is_a_user_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / "file" / "page.html", "t", "", [])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
