"""Fixtures of the tests of training."""

from tiny_runs import llama, one_thread  # noqa: F401 - pytest finds them here
