"""From a dataset, a file or a task generator to tokenized prompts, and to an endless, resumable stream of them."""

from qarl.data.prompts import DropReport, build_prompts
from qarl.data.stream import PromptStream

__all__ = ["DropReport", "PromptStream", "build_prompts"]
