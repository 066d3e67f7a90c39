"""The fixtures of the learner's tests, also used by the tests of its probe."""

from tiny_runs import llama, one_thread  # noqa: F401 - pytest finds them here
