"""Whole runs on two ranks with sharded masters, beside the same run in one process."""

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import run_ranks
from run_faults import recorded, repeatable
from safetensors.torch import load_file, save_file
from tiny_runs import settings, write_config

pytestmark = pytest.mark.slow

TASK = {
    "name": "short",
    "data": {"source": "task:arithmetic", "task": {"size": 3, "seed": 7}, "max_prompt_length": 64},
    "reward": [{"name": "length", "options": {"target": 4}}],
}
EVALUATION = {"tasks": [TASK], "every": 2, "samples": 2, "max_response_length": 6, "temperature": 0.7}
JUDGE = """
import os
calls = []
def judge(completions, prompts, **columns):
    calls.append(1)
    if len(calls) > 2 and os.environ.get("QARL_TEST_RANK") == "1":
        raise ValueError("out of order")
    return [float(len(c) % 5) for c in completions]
"""


def train(group: Any, config: str, overrides: list[str], printed: str, interrupt: int | None, before: str) -> Any:
    """One rank's `train`, which joins the group that is there: its exit code, or what it raises.

    before: Python to run first.
    interrupt: the rank that a SIGTERM comes to once a step is recorded.
    """
    import torch

    from qarl.config import load_config
    from qarl.training import loop

    torch.set_num_threads(1)
    os.environ["QARL_TEST_RANK"] = str(group.rank)  # for JUDGE: reward workers do not inherit RANK
    exec(before, {})
    loop.connect = lambda config, device: group
    loaded = load_config(config, overrides)
    if group.rank == interrupt:
        threading.Thread(target=end_after_a_step, args=(loaded.run_dir / "metrics.jsonl",), daemon=True).start()
    with Path(f"{printed}-{group.rank}").open("w") as out, contextlib.redirect_stdout(out):
        try:
            return loop.train(loaded)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def end_after_a_step(metrics: Path) -> None:
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def on_two(
    config: Path, run: Path, *overrides: str, interrupt: int | None = None, before: str = "", timeout_s: float = 30
) -> tuple[list[Any], list[str]]:
    """(the result of `train` on each of two ranks, what each printed). timeout_s: of their collectives."""
    printed = run.with_name(f"{run.name}.printed")
    arguments = {
        "config": str(config),
        "overrides": [f"train.run_dir={run}", *overrides],
        "printed": str(printed),
        "interrupt": interrupt,
        "before": before,
    }
    found = run_ranks(2, f"{__file__}:train", arguments, timeout_s=timeout_s)
    return found, [Path(f"{printed}-{rank}").read_text() for rank in range(2)]


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Runs:
    """One configuration: `one`, in this process's fork server, and `two`, on two ranks."""

    def __init__(self, qarl: Any, model: Path, folder: Path) -> None:
        self.qarl, self.folder, self.one, self.two = qarl, folder, folder / "one", folder / "two"
        data = settings(
            model,
            train={"steps": 2, "prompts_per_step": 5, "minibatch_size": 10, "threads": 1},
            model={"dtype": "float32"},
            logging={"tensorboard": False},
            diagnostics={"shadow_every": 1, "deployed_every": 2},
            checkpoint={"every": 1},
        )
        self.config = write_config(folder / "c.yaml", {**data, "evaluation": EVALUATION})
        self.plain = write_config(folder / "plain.yaml", data)
        judge = folder / "judges.py"
        judge.write_text(JUDGE)
        reward = {"functions": [{"name": f"{judge}:judge"}], "workers": 1, "max_failed_frac": 0.0}
        self.judged = write_config(folder / "judged.yaml", {**data, "reward": reward, "checkpoint": {"every": 9}})
        done = qarl.run("train", self.config, f"train.run_dir={self.one}")
        assert done.code == 0, done.err
        codes, self.printed = on_two(self.config, self.two)
        assert codes == [0, 0]


@pytest.fixture(scope="module")
def runs(qarl, tiny_model, tmp_path_factory) -> Runs:
    return Runs(qarl, tiny_model("llama"), tmp_path_factory.mktemp("train_ranks"))


def test_the_first_step_is_that_of_one_rank(runs):
    one, two = repeatable(runs.one), repeatable(runs.two)
    assert [r.keys() for r in one] == [r.keys() for r in two]
    first, same = one[0], two[0]
    for name in first:
        if name.startswith(("reward/", "response/", "mismatch/", "error_tokens/")):
            assert first[name] == same[name], name
    assert same["policy/grad_norm"] == pytest.approx(first["policy/grad_norm"], rel=1e-6)
    assert same == pytest.approx(first, rel=1e-4, abs=1e-7)
    assert two[1] == pytest.approx(one[1], rel=0.05, abs=1e-2)
    name = "rollouts/000001.jsonl"
    assert (runs.two / name).read_bytes() == (runs.one / name).read_bytes()


def test_evaluations_are_shared_by_all_ranks_and_equal_those_of_one(runs):
    (before, after), (other, _) = (
        [{k: v for k, v in r.items() if k != "time/eval_s"} for r in jsonl(run / "evaluations.jsonl")]
        for run in (runs.one, runs.two)
    )
    assert before == other and before["step"] == 0 and after["step"] == 2
    name = "evaluations/000000.jsonl"
    assert (runs.two / name).read_bytes() == (runs.one / name).read_bytes()


def test_the_first_rank_prints_and_writes_with_times_of_all(runs):
    assert "step 2/2" in runs.printed[0] and runs.printed[1] == "" == (runs.two / "rank-001.log").read_text()
    kept = {"rank-001"} | {p.name for p in runs.one.iterdir()}
    assert {p.name for p in runs.two.iterdir()} - {"rank-001.log"} == kept
    for record in recorded(runs.two):
        for name in ("time/learner_s", "time/rollout_s", "memory/peak_gib", "time/gather_s"):
            assert 0 <= record[f"{name}_min"] <= record[f"{name}_mean"] <= record[f"{name}_max"]
            assert record[f"{name}_min"] <= record[name] <= record[f"{name}_max"]
    assert not any(name.endswith("_s_min") for record in recorded(runs.one) for name in record)


def test_a_run_resumes_with_another_number_of_ranks(runs, tmp_path):
    to_one, to_two = tmp_path / "to_one", tmp_path / "to_two"
    shutil.copytree(runs.two, to_one, symlinks=True)
    shutil.copytree(runs.one, to_two, symlinks=True)
    done = runs.qarl.run("train", runs.config, f"train.run_dir={to_one}", "train.steps=3")
    assert done.code == 0 and "resumed from" in done.out, done.err
    codes, (printed, _) = on_two(runs.config, to_two, "train.steps=3")
    assert codes == [0, 0] and "resumed from" in printed
    for run, before in ((to_one, runs.two), (to_two, runs.one)):
        records = repeatable(run)
        assert [r["step"] for r in records] == [1, 2, 3] and records[:2] == repeatable(before)
    one, two = (repeatable(run)[2] for run in (to_one, to_two))
    assert one == pytest.approx(two, rel=0.05, abs=1e-2)


ELSEWHERE = "import os\nos.chdir({folders!r}[int(os.environ['RANK'])])"


def test_ranks_with_other_weights_or_rewards_at_the_same_paths_end_before_a_step(runs, llama, tmp_path):
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        shutil.copytree(llama, folder / "model")
        (folder / "judge.py").write_text(JUDGE)
    data = yaml.safe_load(runs.judged.read_text())
    data["model"]["path"], data["reward"]["functions"] = "model", [{"name": "judge.py:judge"}]
    config = write_config(tmp_path / "c.yaml", data)
    before = ELSEWHERE.format(folders=[str(folder) for folder in folders])
    tensors = load_file(folders[1] / "model" / "model.safetensors")
    tensors["model.norm.weight"][-1] += 2.0**-12
    save_file(tensors, folders[1] / "model" / "model.safetensors", {"format": "pt"})
    said, _ = on_two(config, tmp_path / "run", before=before)
    (folders[1] / "judge.py").write_text(JUDGE.replace("% 5", "% 7"))
    said += on_two(config, tmp_path / "run", before=before)[0]
    name = {0: r"its weights \(model\.norm\.weight\)", 2: "reward.functions: the source of `judge`"}
    for index, line in enumerate(said):
        what = name[index // 2 * 2]
        pattern = rf"UserError: distributed: different between ranks: .*{what}: rank 0 has .{{12}}, rank 1 has .{{12}};"
        assert re.match(pattern, line), line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(runs, tmp_path):
    run = tmp_path / "run"
    codes, (printed, _) = on_two(runs.plain, run, "train.steps=500", interrupt=1)
    assert codes == [143, 143]
    last = len(recorded(run))
    assert f"stopped after step {last}, saved" in printed
    assert (run / "checkpoints" / "latest").resolve().name == f"{last:06d}"


def test_a_reward_that_fails_on_one_rank_ends_all_and_no_step_is_lost(runs, tmp_path):
    run = tmp_path / "run"
    (first, second), (printed, _) = on_two(runs.judged, run, "train.steps=5")
    assert first.startswith("OtherRankFailed: rank 1") and "reward `judge`: failed on" in first
    assert second.startswith("UserError: reward `judge`: failed on 1 of 20 completions")
    last = len(recorded(run))
    assert last and (run / "checkpoints" / "latest").resolve().name == f"{last:06d}"
    assert f"step {last} is saved" in printed
