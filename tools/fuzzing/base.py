"""What the mutations start from, made by qarl's own commands: a model, data, a run, an export and configurations."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzzing.case import Case, execute
from tiny_models import save_tiny_model, tiny_settings

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = [
    {"question": f"{a} + {b}", "problem": f"{a} + {b}", "answer": str(a + b), "solution": str(a + b)}
    for a in range(1, 5)
    for b in range(1, 5)
]
RUN, RESULTS = Path("runs/tiny"), Path("results")  # below a working directory
GENERATE = "generate {} --prompt '2 + 2 =' --max-new-tokens 4"
QUANTIZE = "quantize model out --scheme w4a16 --group-size 32"
COMPARE = "compare --offline model --schemes bf16,w4a16 --group-size 32 --max-tokens 64 --out out"
EVALUATE = "eval model --data minerva=rows.jsonl --samples 2 --max-response-length 4 --max-prompts 3 --out results"
EVALUATE_GREEDILY = "eval {} --data minerva={} --samples 1 --temperature 0 --max-response-length 4 --max-prompts 2"
REWARD = """\
def f(completions, prompts, **columns):
    return [float(len(completion) % 3) for completion in completions]
"""
OBJECTIVE = """\
from qarl.objectives import Surrogate, clamped_exp, ratio_stats


def f(inputs):
    ratio, clamped = clamped_exp(inputs.log_ratio)
    stats = ratio_stats(ratio, clamped, clamped, inputs.counted_tokens)
    return Surrogate(inputs.token_advantages * ratio, stats)
"""
SUMS = {"source": "task:arithmetic", "task": {"size": 4}, "max_prompt_length": 64}


@dataclass(frozen=True)
class Base:
    """Directories that no case writes to.

    Attributes:
        root: The directory of all.
        model: A Hugging Face directory.
        run: A finished run of 3 steps, with model, data and reward beside it.
        export: An export of that run.
        results: The output of `EVALUATE`.
        shipped: The configurations that come with qarl.
    """

    root: Path
    model: Path
    run: Path
    export: Path
    results: Path
    shipped: tuple[Path, ...]

    def config(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """A configuration of the tiny model, as YAML would give it; one step."""
        own = {
            "rollout": {"n": 2, "max_response_length": 6},
            "data": {"task": {"size": 16}},
            "train": {"steps": 1, "prompts_per_step": 2, "minibatch_size": 2, "run_dir": str(RUN)},
            "logging": {"tensorboard": False},
        }
        data = tiny_settings(self.model, **own)
        del data["objective"]
        for name, values in sections.items():
            data[name] = {**data.get(name, {}), **values}
        return data


def make_base(root: Path, command: Callable[[Sequence[str]], object]) -> Base:
    """Make everything below `root`, in forks."""
    model = save_tiny_model(root / "model")
    work = Case("base-0", root / "made")
    work.cwd.mkdir(parents=True)
    made = (work.cwd / RUN, work.cwd / "export", work.cwd / RESULTS)
    base = Base(root, model, *made, tuple(sorted(CONFIGS.rglob("*.yaml"))))
    lay_out(base, work, "model", "data", "reward")
    config = base.config(
        model={"path": "model"},
        objective={"kl_coef": 0.01},
        data={"source": "rows.jsonl", "task": {}, "columns": {"prompt": "question"}},
        reward={"functions": [{"name": "./reward.py:f"}, {"name": "exact", "weight": 0.5}]},
        train={"steps": 3},
        checkpoint={"every": 1, "keep_last": 0},
        evaluation={"samples": 2, "every": 1, "tasks": [{"name": "sums", "data": SUMS, "reward": [{"name": "exact"}]}]},
        diagnostics={"shadow_every": 1, "deployed_every": 1, "crossings_every": 1, "gradients_every": 2},
    )
    (work.cwd / "tiny.yaml").write_text(yaml.safe_dump(config))
    for line in ("train tiny.yaml", f"export {RUN} export", EVALUATE):
        work.argv = shlex.split(line)
        outcome = execute(work, command)
        if outcome.code:
            said = outcome.err.decode(errors="replace")
            raise RuntimeError(f"qarl {line} makes no base: exit code {outcome.code}\n{said}")
    return base


def lay_out(base: Base, case: Case, *parts: str) -> None:
    """Copies of `parts` (run, model, export, results, data, reward, objective, config) for a case."""
    written = {
        "data": ("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        "reward": ("reward.py", REWARD),
        "objective": ("objective.py", OBJECTIVE),
        "config": ("tiny.yaml", yaml.safe_dump(base.config())),
    }
    for part in parts:
        if part in written:
            name, text = written[part]
            (case.cwd / name).write_text(text)
        else:
            shutil.copytree(getattr(base, part), case.cwd / (RUN if part == "run" else part), symlinks=True)
