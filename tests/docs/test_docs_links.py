"""Every link of the documentation leads somewhere, and every file it names is there."""

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


def test_every_page_and_every_example_is_reached_from_the_pages_about_them():
    text = (ROOT / "README.md").read_text()
    pages = [page for page in PAGES if page.parent != ROOT]
    assert all(f"({page.relative_to(ROOT)})" in text for page in pages)
    text = (ROOT / "docs/python.md").read_text()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"example_model.py"}
    assert scripts and all(f"(../examples/{name})" in text for name in scripts)


def test_the_architecture_names_what_is_there():
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [ROOT / name for name in ("kernels/qarl_kernels", "quant_formats/qarl_formats", "qarl")]
    for room in rooms:
        rows = text.partition(f"## {room.relative_to(ROOT)}\n")[2].partition("\n## ")[0]
        table = "".join(re.findall(r"(?m)^\|.*", rows))
        places = re.findall(r"`([\w/]+(?:\.py|/))`", table)
        missing = [name for name in places if not (room / name).exists() and not any(room.rglob(name.rstrip("/")))]
        assert len(places) > 10 and not missing, f"{room.name}: {missing}"
        inside = {f"{path.name}/" for path in room.iterdir() if (path / "__init__.py").exists()}
        assert inside <= set(places), inside - set(places)
