"""Token sequences for the calibration of GPTQ and AWQ: `quant.calibration`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qarl.config.quant import PROMPTS, PYTHON_DOCS, CalibrationConfig
from qarl.errors import UserError
from qarl.inputs.files import read_text
from qarl.inputs.paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qarl.types import Prompt

TEXT_BYTES = 16 * 2**20
KEY = "quant.calibration.source"


def calibration_sequences(
    config: CalibrationConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    prompts: Sequence[Prompt] = (),
    place: str = KEY,
) -> list[list[int]]:
    """Return the token ids of the calibration text, one list per window or prompt.

    Args:
        config: The `quant.calibration` section.
        tokenizer: The model's tokenizer.
        context: Maximum sequence length of the model in tokens.
        prompts: The run's prompts, for `source: prompts`.
        place: Configuration key or option that names the source, for errors.

    Raises:
        UserError: The text cannot be read, or has no tokens.
    """
    length = min(config.length, context)
    if config.source == PROMPTS:
        if not prompts:
            raise UserError(f"{place}: {PROMPTS}: there is no run here; give a UTF-8 file")
        sequences = [prompt.token_ids[:length] for prompt in prompts]
    else:
        ids = tokenizer(_text(config.source, place), add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise UserError(f"{place}: {config.source}: has no tokens; give a longer text")
        # A text shorter than one window is one window; of a longer text, an incomplete last window is dropped.
        sequences = [ids[start : start + length] for start in range(0, max(1, len(ids) - length + 1), length)]
    chosen = random.Random(config.seed).sample(range(len(sequences)), min(config.samples, len(sequences)))
    return [sequences[index] for index in chosen]


def _text(source: str, place: str) -> str:
    """Python's language reference, or the contents of a file."""
    if source != PYTHON_DOCS:
        text = read_text(user_path(source, place), TEXT_BYTES)
        if not text.strip():
            raise UserError(f"{place}: {source}: is empty; give a text")
        return text
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        raise UserError(f"{place}: this Python has no pydoc_data.topics; give a UTF-8 file") from None
    return "\n\n".join(topics[name] for name in sorted(topics))
