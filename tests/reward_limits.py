"""Time limits of rewards for the calls alone that are to run out of them, however busy the machine is."""

from collections.abc import Collection
from typing import Any

import pytest

from qarl.rewards.process import Task, Worker


def limit_only(monkeypatch: pytest.MonkeyPatch, hanging: Collection[str]) -> None:
    """Let `reward.timeout_s` hold for calls with one of these completions; retries go on until all had theirs."""
    send = Worker.send

    def patient(worker: Worker, task: Task, arguments: dict[str, Any], limit_s: float) -> None:
        hangs = not set(hanging).isdisjoint(arguments["completions"])
        send(worker, task, arguments, limit_s if hangs else 300.0)

    monkeypatch.setattr(Worker, "send", patient)
    monkeypatch.setattr("qarl.rewards.batch.RETRY_LOADS", 1000)
