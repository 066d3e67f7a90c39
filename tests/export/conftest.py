"""Verify exports without vLLM, which other tests use on models that it supports."""

import pytest

from qarl.exporting import verify
from qarl.exporting.readers import Unsupported


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM refuse all exports, and shorten texts to four tokens."""

    def unsupported(*arguments: object) -> None:
        raise Unsupported("not in this test")

    monkeypatch.setattr(verify, "read_vllm", unsupported)
    monkeypatch.setattr(verify, "MAX_TOKENS", 4)
