"""Apply the time limit of rewards only to calls that should exceed it, so that busy machines fail no test."""

from collections.abc import Collection
from typing import Any

import pytest

from qarl.rewards.process import Task, Worker


def limit_only(monkeypatch: pytest.MonkeyPatch, hanging: Collection[str]) -> None:
    """Apply `reward.timeout_s` only to calls with one of these completions; retry until all had their call."""
    send = Worker.send

    def patient(worker: Worker, task: Task, arguments: dict[str, Any], limit_s: float) -> None:
        hangs = not set(hanging).isdisjoint(arguments["completions"])
        send(worker, task, arguments, limit_s if hangs else 300.0)

    monkeypatch.setattr(Worker, "send", patient)
    monkeypatch.setattr("qarl.rewards.batch.RETRY_LOADS", 1000)
