"""The documentation site: a link that leads nowhere fails its build."""

from __future__ import annotations

from pathlib import Path

import build_site
import pytest
import yaml

VALIDATION = yaml.safe_load((build_site.ROOT / "docs/mkdocs.yml").read_text())["validation"]


@pytest.mark.parametrize(("link", "code"), [("#here", 0), ("#nowhere", 1), ("nowhere.md", 1)])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str, code: int) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Here\n\n[a link]({link})\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(yaml.safe_dump({"site_name": "a", "plugins": [], "validation": VALIDATION}))
    assert build_site.build(config) == code


def test_links_to_the_readme_lead_to_the_first_page() -> None:
    page = build_site.ROOT / "docs/configuration.md"
    text = build_site.without_code_links(page, {page, build_site.ROOT / "README.md"})
    assert "../index.md#start" in text and "README.md" not in text
