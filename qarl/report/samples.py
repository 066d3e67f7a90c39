"""Sample completions of a run by reward, from rollouts/NNNNNN.jsonl."""

import json
import math
from pathlib import Path
from typing import Any

from qarl.report.blocks import Block, Completion, Completions, Section, Text
from qarl.report.formatting import number
from qarl.storage.names import step_files
from qarl.storage.runs import read_records


def samples_section(run: Path) -> Section:
    """Show the responses with the lowest, median and highest reward in the latest and in the first recorded step."""
    files = list(step_files(run / "rollouts", ".jsonl").values())
    if not files:
        return Section("Samples", [Text("No rollouts are recorded yet; see logging.rollouts_every.", "note")])
    blocks: list[Block] = []
    ends = [("Latest", files[-1])] + ([("First", files[0])] if len(files) > 1 else [])
    for which, path in ends:
        records, damaged = read_records(path)
        step = int(path.stem)
        if damaged:
            lines = f"{damaged} line{'s' * (damaged > 1)}"
            blocks.append(Text(f"{path.name}: {lines} cannot be read and are omitted.", "warning"))
        if records:
            note = f"{which} recorded step, {step}: {len(records)} responses on record"
            blocks.append(Completions([_completion(row, label) for label, row in _by_reward(records)], note))
    return Section("Samples", blocks, "Responses with the lowest, the median and the highest reward.")


def _by_reward(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return (label, row) of the lowest, median and highest reward, or of the first three if all rewards are equal."""
    scored = sorted((row for row in rows if _reward(row) is not None), key=lambda row: _reward(row) or 0.0)
    if not scored:
        return [("reward not finite", rows[0])]
    if _reward(scored[0]) == _reward(scored[-1]):
        return [(f"all {len(scored)} have this reward", row) for row in scored[:3]]
    if len(scored) == 2:
        return [("lowest", scored[0]), ("highest", scored[1])]
    return [("lowest", scored[0]), ("median", scored[len(scored) // 2]), ("highest", scored[-1])]


def _reward(row: dict[str, Any]) -> float | None:
    value = row.get("reward")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _completion(row: dict[str, Any], label: str) -> Completion:
    details = [label, f"prompt {row.get('prompt_id')}, sample {row.get('sample')}"]
    if isinstance(row.get("tokens"), int):
        details.append(f"{row['tokens']} tokens")
    if row.get("finish_reason"):
        details.append(f"ended by {row['finish_reason']}")
    if isinstance(row.get("advantage"), float):
        details.append(f"advantage {number(row['advantage'])}")
    parts = row.get("rewards")
    if isinstance(parts, dict) and len(parts) > 1:
        details.append(", ".join(f"{name} {_score(value)}" for name, value in parts.items()))
    prompt, completion = (_text(row.get(key, "")) for key in ("prompt", "completion"))
    return Completion(prompt, completion, _reward(row), " · ".join(details))


def _text(value: Any) -> str:
    if isinstance(value, (int, float)):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)


def _score(value: Any) -> str:
    return "skipped" if value is None else _text(value)
