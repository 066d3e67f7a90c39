"""Reward modules that misbehave: while they are loaded, in what they return, and in what they do to their process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from fuzzing.base import RUN, Base
from fuzzing.case import Case
from fuzzing.paths import OVERRIDE, make_traps
from fuzzing.reward_sources import BODIES, FUNCTION, HEADS, OBJECTS, OWN_SCALE, PRELUDE, SCORES_NOTHING

LOG_LIMIT = 64 * 2**20  # bytes of rewards.log
STEPS = 2


def mutate_reward(rng: random.Random, base: Base, case: Case) -> None:
    """Two steps of training with such a module."""
    make_traps(case.cwd)
    body, head, tail = "honest", "", ""
    roll = rng.random()
    if roll < 0.65:
        body = rng.choice(list(BODIES))
        what = f"body {body}"
    elif roll < 0.85:
        name = rng.choice(list(HEADS))
        head, what = HEADS[name], f"head {name}"
    else:
        name = rng.choice(list(OBJECTS))
        tail, what = f"\ndel f\n{OBJECTS[name]}\n", f"object {name}"
    function_source = f"{FUNCTION}    {BODIES[body]}\n"
    source = f"{PRELUDE}{head}\n{function_source}{tail}"
    data = source.encode("utf-8", "surrogatepass")
    if rng.random() < 0.06:
        odd, data = rng.choice(
            (
                ("invalid UTF-8", data + b"\n# \xff"),
                ("UTF-16", source.encode("utf-16")),
                ("empty", b""),
                ("BOM", b"\xef\xbb\xbf" + data),
                ("noise", rng.randbytes(500)),
            )
        )
        what = f"{what}, file {odd}"
    else:
        odd = ""
    (case.cwd / "reward.py").write_bytes(data)
    function: dict[str, Any] = {"name": "./reward.py:f", "weight": rng.choice((1.0, 1.0, 0.0, -1.0, 0.5))}
    if rng.random() < 0.1:
        function["options"] = rng.choice(
            ({"completions": 1}, {"prompts": []}, {"self": 1}, {"a b": 1}, {OVERRIDE: 1}, {"x": [[[]]] * 100})
        )
        what = f"{what}, options {function['options']!a:.40}"
    functions = [function, {"name": "length", "options": {"target": 4}}] if rng.random() < 0.3 else [function]
    reward = {
        "functions": functions,
        "timeout_s": 1.0,
        "max_failed_frac": rng.choice((0.5, 1.0, 1.0)),
        "workers": rng.choice((1, 1, 2)),
    }
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(base.config(reward=reward, train={"steps": STEPS})))
    case.argv = ["train", "c.yaml"]
    case.mutation = f"reward {what}"
    plain = not (head or tail or odd)
    case.examine = _Examine(body if plain else "")


class _Examine:
    """What is wrong with an accepted run of the body of that name; "" for whatever is not told by the name."""

    def __init__(self, body: str) -> None:
        self._body = body

    def __call__(self, cwd: Path) -> str | None:
        run = cwd / RUN
        log = run / "rewards.log"
        if log.exists() and log.stat().st_size > LOG_LIMIT:
            return "rewards.log has no bound"
        if not self._body or not (run / "metrics.jsonl").exists():  # told by nothing, or refused
            return None
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            failed = record["reward/failed"]
            if self._body in SCORES_NOTHING and not failed:
                return f"`{self._body}` was scored, and not counted as failed"
            if any(value is None for name, value in record.items() if name.startswith("reward/")):
                return f"`{self._body}` made the reward no finite number"
        for path in sorted((run / "rollouts").glob("*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                score = row["rewards"]["f"]
                if self._body not in OWN_SCALE and score not in (0.0, float(len(row["completion"]))):
                    return f"`{self._body}` has a score of another completion"
        return None
