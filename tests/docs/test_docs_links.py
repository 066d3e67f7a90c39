"""Every link of the documentation leads somewhere, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import IDS, PAGES, ROOT, anchors, spans, without_code

NAMED = re.compile(r"(?:configs|docs|examples|tools|tests|benchmarks|qarl|kernels|quant_formats)/[\w./-]*")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_relative_link_resolves(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_of_the_project_that_is_named_is_there(page: Path):
    for span in spans(page):
        if NAMED.fullmatch(span):
            assert (ROOT / span).exists(), span
        if span.endswith(".json") and "_" in span and "/" not in span and span != "qarl_export.json":
            assert list((ROOT / "benchmarks/results").glob(span.replace("...", "*"))) or span == "diagnosis.json", span


def test_every_page_is_reached_from_the_readme():
    text = (ROOT / "README.md").read_text()
    pages = [page for page in PAGES if page.parent != ROOT]
    assert all(f"({page.relative_to(ROOT)})" in text for page in pages)


def test_every_example_is_named_in_the_page_about_python():
    text = (ROOT / "docs/python.md").read_text()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"example_model.py"}
    assert scripts and all(f"(../examples/{name})" in text for name in scripts)


def test_the_architecture_names_what_is_there():
    rooms = {"quant_formats/qarl_formats/": ROOT / "quant_formats/qarl_formats", "qarl/": ROOT / "qarl"}
    rooms |= {"kernels/qarl_kernels/": ROOT / "kernels/qarl_kernels"}
    below, seen = ROOT, 0
    text = (ROOT / "docs/architecture.md").read_text()
    tree = [line for line in text.splitlines() if line.startswith("    ")]
    for line in tree:
        names = re.match(r" {4}(?: {2})?((?:[\w.]+/?[\w]*/? ?)+?)(?: {2,}|$)", line)
        if names is None or line.startswith(" " * 20):
            continue
        if not line.startswith(" " * 6):
            below = rooms.get(names[1].split()[0], ROOT)
            if below != ROOT:
                continue
        for name in names[1].split():
            assert (below / name).exists(), f"{below.name}: {name}"
            seen += 1
    assert seen > 40
    listed = set(re.findall(r"[\w.]+(?=/)", "\n".join(tree)))
    inside = {path.name for path in (ROOT / "qarl").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert inside <= listed, inside - listed
