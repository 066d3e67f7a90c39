"""What a user has DeepSpeed log is printed by the first rank, and nothing of it otherwise."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from row_runs import CPU, Case, loss_of

from qarl.training.zero_updates import build_zero

pytest.importorskip("deepspeed")

TOLD = {"comms_logger": {"enabled": True, "verbose": True}, "dump_state": True}
QUIET = {"comms_logger": {"enabled": False, "verbose": False}, "dump_state": False}


def logged(group: Any, case: dict[str, Any]) -> str:
    """What is printed in one optimizer step and at the end."""
    import deepspeed.utils  # noqa: F401 - its logger has a handler from here on

    printed = io.StringIO()
    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setStream(printed)
    with contextlib.redirect_stdout(printed):
        policy, updates = build_zero(Case(**case).config, CPU, None, group)
        updates.set_lr(1.0)
        updates.clear()
        updates.backward(loss_of(policy, [group.rank]))
        updates.step(updates.norm())
        if isinstance(keys := updates.config.distributed.config, str):
            Path(keys).unlink(missing_ok=True)
        updates.finish()
    return printed.getvalue()


@pytest.mark.parametrize("keys", [TOLD, QUIET], ids=["asked for", "not asked for"])
def test_the_first_rank_tells_what_was_asked_for(tiny_model, keys: dict[str, Any]) -> None:
    case = Case(
        str(tiny_model("llama")), {"distributed": {"engine": "deepspeed", "zero_stage": 2, "config": keys}}, steps=1
    )
    first, second = run_ranks(2, f"{__file__}:logged", {"case": asdict(case)}, limit_s=120)
    for text in ("Comm. Op", "comm op: all_reduce", "DeepSpeedEngine"):
        assert (text in first) == (keys is TOLD), text
        assert text not in second


def test_a_file_of_keys_is_read_at_the_start_alone(tiny_model, tmp_path: Path) -> None:
    keys = tmp_path / "deepspeed.json"
    keys.write_text(json.dumps(TOLD))
    section = {"engine": "deepspeed", "zero_stage": 2, "config": str(keys)}
    case = Case(str(tiny_model("llama")), {"distributed": section}, steps=1)
    first, _ = run_ranks(2, f"{__file__}:logged", {"case": asdict(case)}, limit_s=120)
    assert "Comm. Op" in first and not keys.exists()
