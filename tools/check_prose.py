"""Report phrases that the style rules exclude, in pages, configurations, docstrings, comments and messages.

    python tools/check_prose.py

Exits with 1 and one line per match if there are any. Add a pattern once the tree has no more matches.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("qarl", "kernels", "quant_formats", "tools", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/*.md", "configs/**/*.yaml")
EVERYWHERE = {  # pattern -> what to write
    r"\bunder one another\b": "concatenated along dimension 0",
    r"\bbut for\b": "except for",
    r"\bof which there (?:is|are)\b": "a full sentence",
    r"\bthat (?:is|are) there\b": "existing",
    r"\bbears (?:a|the|this)\b": "supports",
    r"\bshall\b": "must or will",
    r"\b(?:response|token|step|rank|layer|function|prompt|call) a (?:step|line|call|rank|row)\b": "per",
    r"\b(?:scale|value|number|step|byte|bytes|GB|ms) a (?:row|token|rank|parameter|layer|group|response)\b": "per",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a page or configuration, or of every string and comment of a source file."""
    content = path.read_text()
    if path.suffix != ".py":
        yield 1, content
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    files += [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = 0
    for path in files:
        if path == Path(__file__).resolve():
            continue
        for line, text in texts(path):
            for pattern, instead in EVERYWHERE.items():
                for match in re.finditer(pattern, text):
                    at = line + text[: match.start()].count("\n")
                    print(f"{path.relative_to(ROOT)}:{at}: '{match[0]}': write '{instead}'")
                    found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
