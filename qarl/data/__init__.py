"""Loads datasets, files and task generators, tokenizes prompts, and serves them as an endless, resumable stream."""

from qarl.data.prompts import DropReport, build_prompts
from qarl.data.stream import PromptStream

__all__ = ["DropReport", "PromptStream", "build_prompts"]
