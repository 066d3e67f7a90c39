"""`tools/bench_step.py` on a CPU: all parts except TRL's on a tiny model, the table, and failures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_step
import pytest
import torch
import trl_peer
from model_sizes import SHAPES, questions, shape_of
from tiny_runs import Finished

CPU = torch.device("cpu")
TOOLS = Path(__file__).parents[2] / "tools"
TINY = ["--shape", "tiny", "--device", "cpu", "--tokens", "48", "--out", "unused"]


def options(*arguments: str, scheme: str = "w4a16") -> Any:
    """Return the options that the process of a case gets."""
    parsed = bench_step.parse([*TINY, *arguments])
    parsed.shape, parsed.scheme, parsed.device = "tiny", scheme, "cpu"
    return parsed


def tiny():
    return shape_of("tiny", None, None)


def test_options_are_checked_and_only_parts_with_schemes_run_once_per_scheme(capsys):
    assert bench_step.parse(["--out", "x"]).part == ["step"]
    for wrong in ([], ["--out", "x", "--tokens", "0"], ["--out", "x", "--part", "trl", "--device-batch", "7"]):
        with pytest.raises(SystemExit):
            bench_step.parse(wrong)
    capsys.readouterr()
    given = bench_step.parse([*TINY, "--part", "step", "trl", "--scheme", "bf16", "fp8"])
    found = [tuple(case.values()) for case in bench_step.cases(given)]
    assert found == [("step", "tiny", "bf16"), ("step", "tiny", "fp8"), ("trl", "tiny")]


def test_shapes_are_those_of_their_models():
    # Parameters by the models' own pages, with the vocabularies of their tokenizers.
    billions = {"0.6b": 0.596, "1.7b": 1.72, "4b": 4.02, "8b": 8.19, "14b": 14.77, "32b": 32.76, "30b-a3b": 30.53}
    for name, expected in billions.items():
        parameters = shape_of(f"qwen3-{name}", None, 151_936).architecture().parameters
        assert parameters / 1e9 == pytest.approx(expected, rel=0.01), name
    assert shape_of("smollm2", None, None).architecture().parameters / 1e9 == pytest.approx(0.1345, rel=0.01)
    assert shape_of("qwen3-8b", 4, None).architecture().num_layers == 4
    assert shape_of("qwen3-8b", None, None).vocabulary == 49_152 < SHAPES["qwen3-8b"].vocabulary
    assert len(set(questions(200))) == 200


def test_trl_is_asked_for_one_optimizer_step_on_all_responses(tmp_path):
    given = options("--prompts", "32", "--responses", "8")
    found = trl_peer.grpo_arguments(given, tmp_path, "vllm")
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 256
    assert found["max_completion_length"] == 1024 and found["generation_kwargs"] == {"ignore_eos": True}
    assert found["model_init_kwargs"]["dtype"] == "float32"
    own = trl_peer.grpo_arguments(options("--new-tokens", "7"), tmp_path, "transformers")
    assert "use_vllm" not in own and own["generation_kwargs"] == {"min_new_tokens": 7} and not own["bf16"]


@pytest.mark.slow
def test_trl_trains(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl", reason="TRL is not installed")
    out = tmp_path / "out.json"
    sizes = ["--steps", "2", "--prompts", "4", "--responses", "2", "--new-tokens", "6", "--prompt-tokens", "400"]
    given = [*sizes, "--device-batch", "2", "--model-dir", str(tmp_path)]
    assert run_tool(monkeypatch, *TINY[:-1], str(out), "--part", "trl", *given) == 0, capsys.readouterr().err
    *each, whole = json.loads(out.read_text())["records"]
    assert [row["step"] for row in each] == [1, 2] and {row["engine"] for row in each} == {"transformers"}
    assert whole["generate_s"] <= whole["rollout_s"] < whole["step_s"] == each[1]["step_s"]


def test_time_within_functions_of_trl_is_counted():
    class Owner:
        def inner(self) -> str:
            return "done"

    owner, spent = Owner(), trl_peer.Spent(CPU)
    spent.within(owner, "inner", "inner_s")
    assert owner.inner() == owner.inner() == "done"
    assert set(spent.read()) == {"inner_s"} and spent.read() == {}


def test_a_steps_record_has_its_phases_over_ranks_and_what_proves_its_publish():
    def metrics(step: int, publish: float, **more: float) -> dict[str, Any]:
        times = {"time/step_s": 2.0, "time/publish_s": publish, "time/publish_load_s": 0.25}
        several = {f"time/publish_s_{how}": publish + more for how, more in (("min", 0.0), ("max", 1.0), ("mean", 0.5))}
        rates = {"throughput/rollout_tokens_per_s": 1.0, "throughput/learner_tokens_per_s": 2.0}
        rest = {"step": step, "response/length_mean": 8, "memory/peak_gib": 3.0, "policy/zero_advantage_frac": 0.0}
        return times | several | rates | rest | more

    proved = {"publish/proved_frac": 1.0, "publish/sent_mib": 4.0}
    first, second, whole = bench_step.records_of([metrics(1, 9.0), metrics(2, 1.0, **proved)], 8, "vllm", 30.0)
    assert (first["publish_s"], first["publish_s_max"], first["publish_load_s"]) == (9.0, 10.0, 0.25)
    assert (second["publish/proved_frac"], second["publish/sent_mib"]) == (1.0, 4.0)
    assert (whole["publish_s"], whole["publish_s_mean"], whole["publish_s_max"]) == (1.0, 1.5, 2.0)


def report(*records: dict[str, Any]) -> dict[str, Any]:
    common = {"shape": "s", "layers": 2, "vocabulary": 9, "peak_gib": 1.0}
    environment = {"gpus": ["H1"], "packages": {"torch": "2"}, "git_revision": "abc"}
    return {"environment": environment, "records": [common | record for record in records]}


def test_the_table_compares_with_the_peer_of_another_report():
    step = {"what": "step", "prompts": 2, "responses": 2, "new_tokens": 8, "engine": "vllm", "ranks": 1}
    ranks = {"ranks": 2, "learner_s": 0.5}
    ours = report(
        {"part": "step", "scheme": "w4a16", "error": "no memory"},
        step | {"part": "step", "scheme": "fp8", "seconds": 4.0, "step_s": 4.0, "learner_s": 1.0},
        step | {"part": "step", "scheme": "fp8", "engine": "native", "seconds": 3.0, "step_s": 3.0, **ranks},
    )
    peer = report(step | {"part": "trl", "seconds": 10.0, "step_s": 10.0})
    lines = [" ".join(line.split()) for line in bench_step.table([ours, peer]).splitlines()]
    assert "H1, torch 2, revision abc" in lines
    assert "s 2 layers fp8 vllm 2 x 2 x 8 1 ranks 4.00 1.00 1.00 2.50" in lines
    # On two ranks there is no peer.
    assert "s 2 layers fp8 native 2 x 2 x 8 2 ranks 3.00 0.50 1.00" in lines
    assert "failed: step s w4a16: no memory" in lines


def run_tool(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The tool as a command: its exit code."""
    monkeypatch.setattr(sys, "argv", [bench_step.__file__, *arguments])
    return bench_step.main()


# A case is a fork of the tool's process, which is one of a server with torch and qarl.
FORKED = f"""
import sys
sys.path[:0] = [{str(TOOLS)!r}, {str(Path(__file__).parents[1])!r}]
import forked_popen, process_tree
forked_popen.install(process_tree)
"""


@pytest.fixture
def run_forked(qarl) -> Callable[..., Finished]:
    """run_forked(*arguments): The tool as a command."""
    return lambda *arguments: qarl.run(*arguments, program=TOOLS / "bench_step.py", before=FORKED)


@pytest.mark.slow
def test_whole_steps_run_with_exactly_so_many_tokens(tmp_path, run_forked):
    out = tmp_path / "out.json"
    sizes = ["--steps", "2", "--prompts", "2", "--responses", "2", "--new-tokens", "6", "--prompt-tokens", "400"]
    arguments = [*TINY[:-1], str(out), "--part", "step", "--scheme", "w4a16", *sizes, "--model-dir", str(tmp_path)]
    done = run_forked(*arguments)
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    first, second, whole = found["records"]
    assert (first["step"], second["step"], whole["what"], whole["new_tokens"]) == (1, 2, "step", 6)
    assert whole["seconds"] == second["step_s"] and first["policy/zero_advantage_frac"] == 0
    assert found["environment"]["packages"]["torch"] and "host" not in found["environment"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tiny-2-512-bytes-0"]
    assert "2 x 2 x 6 1 ranks" in done.out


def test_a_case_that_takes_too_long_is_ended_and_the_next_one_starts(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    arguments = [*TINY[:-1], str(out), "--scheme", "bf16", "fp8", "--timeout", "0.01"]
    assert run_tool(monkeypatch, *arguments) == 1
    found = [(row["scheme"], row["error"]) for row in json.loads(out.read_text())["records"]]
    assert found == [("bf16", "took more than 0.01 s"), ("fp8", "took more than 0.01 s")]
    capsys.readouterr()


def test_a_failed_case_records_its_error(tmp_path: Path, run_forked) -> None:
    out = tmp_path / "out.json"
    arguments = [*TINY[:-1], str(out), "--scheme", "bf16", "--set", "train.none=1"]
    done = run_forked(*arguments)
    assert done.code == 1
    (failed,) = json.loads(out.read_text())["records"]
    assert failed["part"] == "step" and failed["error"].startswith("exit 1") and "train.none" in failed["error"]
    assert "failed: step tiny bf16" in done.out
    assert "train.none" in out.with_suffix(".log").read_text()
