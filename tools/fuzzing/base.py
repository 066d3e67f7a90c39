"""The base: a working directory made by qarl's own commands, which mutations start from, and configurations for it.

It contains `model`; the finished run `runs/tiny` of 3 steps; its `export`; `results` of an evaluation; `rows.jsonl`,
`reward.py`, `objective.py`; and `tiny.yaml`, whose run directory is `runs/new`. Cases get copies.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import yaml
from fuzzing.case import Case, Command, execute
from tiny_models import save_tiny_model, tiny_settings

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
ROWS = [
    {"question": f"{a} + {b}", "problem": f"{a} + {b}", "answer": str(a + b), "solution": str(a + b)}
    for a in range(1, 5)
    for b in range(1, 5)
]
RUN = Path("runs/tiny")
GENERATE = "generate {} --prompt '2 + 2 =' --max-new-tokens 4"
QUANTIZE = "quantize model out --scheme w4a16 --group-size 32"
COMPARE = "compare --offline model --schemes bf16,w4a16 --group-size 32 --max-tokens 64 --out out"
EVALUATE = "eval model --data minerva=rows.jsonl --samples 2 --max-response-length 4 --max-prompts 3 --out results"
EVALUATE_GREEDILY = "eval model --data minerva={} --samples 1 --temperature 0 --max-response-length 4 --max-prompts 2"
REWARD = """\
def f(completions, prompts, **columns):
    return [float(len(completion) % 3) for completion in completions]
"""
SUMS = {"source": "task:arithmetic", "task": {"size": 4}, "max_prompt_length": 64}
FILE_DATA = {"source": "rows.jsonl", "task": {}, "columns": {"prompt": "question"}}


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of one step on the tiny model, as parsed YAML. sections: Keys to add or replace."""
    own = {
        "rollout": {"n": 2, "max_response_length": 6},
        "data": {"task": {"size": 16}},
        "train": {"steps": 1, "prompts_per_step": 2, "minibatch_size": 2, "run_dir": "runs/new"},
        "logging": {"tensorboard": False},
    }
    data = tiny_settings(Path("model"), **own)
    del data["objective"]
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return data


def write_inputs(work: Path) -> None:
    """Write the files of a base that no command creates."""
    texts = {
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
        "reward.py": REWARD,
        "objective.py": (ROOT / "examples/custom_objective.py").read_text(),
        "tiny.yaml": yaml.safe_dump(config()),
    }
    for name, text in texts.items():
        (work / name).write_text(text)


def make_base(root: Path, command: Command) -> Path:
    """Make a base below `root`, in forks, and return its directory."""
    work = Case("base-0", root)
    work.cwd.mkdir(parents=True)
    save_tiny_model(work.cwd / "model")
    write_inputs(work.cwd)
    run = config(
        objective={"kl_coef": 0.01},
        data=FILE_DATA,
        reward={"functions": [{"name": "./reward.py:f"}, {"name": "exact", "weight": 0.5}]},
        train={"steps": 3, "run_dir": str(RUN)},
        checkpoint={"every": 1, "keep_last": 0},
        evaluation={"samples": 2, "every": 1, "tasks": [{"name": "sums", "data": SUMS, "reward": [{"name": "exact"}]}]},
        diagnostics={"shadow_every": 1, "deployed_every": 1, "crossings_every": 1, "gradients_every": 2},
    )
    (work.cwd / "run.yaml").write_text(yaml.safe_dump(run))
    for line in ("train run.yaml", f"export {RUN} export", EVALUATE):
        work.argv = shlex.split(line)
        outcome = execute(work, command)
        if outcome.code:
            said = outcome.err.decode(errors="replace")
            raise RuntimeError(f"qarl {line} failed while making the base: exit code {outcome.code}\n{said}")
    return work.cwd


def lay_out(base: Path, case: Case, *names: str) -> None:
    """Copy entries of the base into the case's working directory. names: Default: all entries."""
    for name in names or (path.name for path in base.iterdir()):
        if (base / name).is_dir():
            shutil.copytree(base / name, case.cwd / name, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(base / name, case.cwd / name)
