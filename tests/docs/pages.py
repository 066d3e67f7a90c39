"""The pages of the documentation (Markdown at the top, in docs/ and in benchmarks/), and what is written in them."""

import importlib.util
import re
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [page for folder in ("docs", "benchmarks") for page in sorted((ROOT / folder).glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [text for found, text in _FENCED.findall(page.read_text()) if found == language]


def shell_lines(page: Path) -> list[str]:
    """Return the lines of indented blocks, which a reader types; lines that end with a backslash are joined."""
    plain = re.sub(r"\s*\\\n\s*", " ", _FENCED.sub("", page.read_text()))
    return [line.strip() for line in plain.splitlines() if line.startswith("    ") and line.strip()]


def spans(page: Path) -> list[str]:
    """Return the inline code outside of blocks; code that spans two lines is joined."""
    plain = _FENCED.sub("", page.read_text())
    prose = "\n".join(line for line in plain.splitlines() if not line.startswith("    "))
    return [" ".join(text.split()) for text in _SPAN.findall(prose)]


def without_code(page: Path) -> str:
    """Return the text of a page without its blocks and inline code."""
    return _SPAN.sub("", _FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors that links to a page can use: its headings as GitHub spells them."""
    heads = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def keywords(text: str) -> str:
    """Return a YAML block without the indentation that it has in the page."""
    return textwrap.dedent(text)


@cache
def config_reference() -> ModuleType:
    """tools/config_reference.py."""
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools" / "config_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def known_keys() -> frozenset[str]:
    """Return every key and section of the configuration; lists of sections have no index."""
    from qarl.config import Config

    return frozenset(config_reference().keys(Config.model_json_schema()))
