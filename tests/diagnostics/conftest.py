"""Fixtures of the learner's tests, for those of its probe."""

from tiny_runs import llama, one_thread  # noqa: F401 - pytest finds them here
