"""The sampler in the learner's process, which restores everything that it changes."""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from qarl.rollout.vllm import inline
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.inline import InlineSampler
from qarl.weight_sync.sender import SamplerFault


@pytest.fixture(autouse=True)
def _modes_and_environment():
    """Restore torch's modes and the environment, which samplers of later tests in this process inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)


def modes() -> tuple[bool, bool, bool]:
    import torch._inductor.config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        inductor.deterministic,
    )


class RecordingHost:
    """Replaces vLLM: records torch's modes at the start and when it wakes. Sleeping raises an error."""

    seen: ClassVar[list[tuple[bool, bool, bool]]] = []
    execute = Host.execute

    def __init__(self, settings: Any, expected: Any) -> None:
        self.seen.append(modes())

    def capabilities(self) -> dict[str, Any]:
        return {"host": "recording"}

    def wake(self) -> None:
        self.seen.append(modes())

    def sleep(self, level: int) -> None:
        raise RuntimeError(f"no sleep of level {level}")


def test_vllm_runs_without_the_learners_deterministic_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "Host", RecordingHost)
    monkeypatch.setattr(RecordingHost, "seen", [])
    torch.use_deterministic_algorithms(True, warn_only=True)
    sampler = InlineSampler(tmp_path / "sampler.log")
    sampler.start(None, {}, lambda responses, tokens: None)
    assert sampler.capabilities == {"host": "recording"} and modes() == (True, True, True)
    sampler.call("wake", None, lambda responses, tokens: None)
    with pytest.raises(SamplerFault, match="no sleep of level 2"):
        sampler.call("sleep", 2, lambda responses, tokens: None)
    assert modes() == (True, True, True)
    assert RecordingHost.seen == [(False, False, False)] * 2
    assert "no sleep of level 2" in (tmp_path / "sampler.log").read_text()
