"""Build the documentation site in build/site: the Markdown pages of the repository, and an API reference.

    python tools/build_site.py

Warnings, such as a broken link, fail the build. Modules are parsed, not imported.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build/site_pages"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
REFERENCE = {  # page -> title and modules, most important first
    "api": ("Python API", ["qarl.api", "qarl.types", "qarl.errors"]),
    "objectives": (
        "Objectives and corrections",
        [f"qarl.objectives.{name}" for name in ("tbpo", "grpo", "gspo", "common", "segments", "correction", "base")],
    ),
    "formats": ("Quantization formats", ["qarl_formats.scheme", "qarl_formats.weight", "qarl_formats.registry"]),
    "kernels": (
        "Kernels",
        [f"qarl_kernels.{name}" for name in ("gemm", "w4a16", "w4a8", "fp8_block", "attention", "logprob", "quantize")],
    ),
}


def collect() -> None:
    """Copy the pages with their relative paths, so that links between them stay valid."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += [page for folder in ("docs", "benchmarks") for page in sorted((ROOT / folder).glob("*.md"))]
    for page in pages:
        to = PAGES / page.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.with_name(to.name.replace("README", "index")).write_text(without_code_links(page, set(pages)))
    shutil.copytree(ROOT / "docs/images", PAGES / "docs/images")
    for name, (title, modules) in REFERENCE.items():
        (PAGES / "reference").mkdir(exist_ok=True)
        text = "\n".join([f"# {title}\n", *(f"::: {module}\n" for module in modules)])
        (PAGES / f"reference/{name}.md").write_text(text)


def without_code_links(page: Path, pages: set[Path]) -> str:
    """Return the text of a page. Links to files that are not pages of the site become code, README.md index.md."""

    def kept(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        local = target and not target.startswith("http")
        if local and (page.parent / target).resolve() not in pages:
            return f"`{match[1].strip('`')}`"
        return match[0].replace("README.md", "index.md")

    return LINK.sub(kept, page.read_text())


def build(config: Path) -> int:
    """Build a site and return the exit code. Without `--quiet`, because `--strict` would then ignore warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    collect()
    sys.exit(build(ROOT / "docs/mkdocs.yml"))
