"""The rank of a process, from its launcher, and configurations that several ranks cannot run."""

import json
import os
import socket
from pathlib import Path

import pytest
from test_ranks_launch import CONFIG, MODEL

from qarl import cli
from qarl.checks.check_ranks import several_ranks_faults
from qarl.config import load_config
from qarl.distributed.fault import Fault, OtherRankFailed, fault_of, forget_fault, write_fault
from qarl.distributed.key_value_store import DirectoryStore
from qarl.distributed.rank_info import own_arguments
from qarl.errors import UserError
from qarl.storage.config_difference import config_difference
from qarl.utils.signals import Interrupted


def test_the_argument_that_the_deepspeed_launcher_prepends_is_dropped_for_a_rank(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert own_arguments(["--local_rank=0", "train", "x"]) == ["--local_rank=0", "train", "x"]
    monkeypatch.setenv("RANK", "0")
    for given in ("--local_rank=0", "--local-rank=1"):
        assert own_arguments([given, "train", "x"]) == ["train", "x"]
    assert own_arguments(["train", "--local_rank=0"]) == ["train", "--local_rank=0"]
    assert own_arguments([]) == []


def test_a_key_of_a_store_is_claimed_once(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.read("a") is None
    assert store.claim("a", "first") == "first" and store.claim("a", "second") == "first"
    store.post("a", "third")
    assert store.read("a") == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_run_that_has_begun_records_its_first_fault(tmp_path: Path) -> None:
    fault = Fault(1, "h", 137, "was ended by SIGKILL")
    write_fault(tmp_path, fault)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").touch()
    write_fault(tmp_path, fault)
    write_fault(tmp_path, Fault(2, "h", 75, "later"))
    assert '"rank": 1' in (tmp_path / "fault.json").read_text()
    forget_fault(tmp_path)
    assert not (tmp_path / "fault.json").exists()


def test_a_fault_has_the_exit_code_of_the_command_line() -> None:
    other = OtherRankFailed(Fault(1, "h", 2, "x"))
    errors = [UserError("x"), KeyError("x"), other, KeyboardInterrupt(), Interrupted(15)]
    assert [fault_of(0, error).code for error in errors] == [2, 70, 75, 130, 143]
    for early in (SystemExit(0), SystemExit(3), SystemExit(), GeneratorExit()):
        assert fault_of(0, early).code == 2
    assert fault_of(0, KeyError("x")) == Fault(0, socket.gethostname(), 70, "KeyError: 'x'")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.replace("MODEL", "model"))
    return path


VLLM = "rollout.engine=vllm"
# Ranks, GPUs of this machine (None: unknown), overrides -> the key that is refused, and words of the error.
REFUSED = [
    (3, 2, [], "model.device", "3 ranks, but this machine has 2 visible GPUs (0 to 1); start at most one rank per GPU"),
    (2, 1, [], "model.device", "2 ranks, but this machine has one visible GPU; start at most one rank per GPU"),
    (2, 4, ["diagnostics.gradients_every=1"], "diagnostics.gradients_every", "with 2 ranks; must be 0"),
    (2, 4, [VLLM, "rollout.vllm={process: inline}"], "rollout.vllm.process", "use separate"),
    (2, 4, [VLLM, "rollout.vllm={device: 1}"], "rollout.vllm.device", "must be 2 or more, or null"),
    (2, 4, [VLLM, "rollout.vllm={device: 3}"], "rollout.vllm.device", "GPUs 3 to 4, but this machine has 4"),
    (2, 4, [VLLM, "rollout.vllm={device: 2, tensor_parallel: 2}"], "rollout.vllm.device", "use GPUs 2 to 5"),
    (1, None, [VLLM, "rollout.vllm={data_parallel: 2}"], "rollout.vllm.data_parallel", "there are only 1"),
    (2, 2, [VLLM, "rollout.vllm={data_parallel: 3}"], "rollout.vllm.data_parallel", "there are only 2"),
    (4, 4, [VLLM, "rollout.vllm={tensor_parallel: 2, data_parallel: 3}"], "rollout.vllm.data_parallel", "needs 2"),
    (3, 3, [VLLM, "rollout.vllm={tensor_parallel: 2}"], "rollout.vllm.tensor_parallel", "vLLM of rank 2 would use GPU"),
    (2, 3, ["rollout.async={}"], "rollout.async", "each rank has a sampler, on GPUs 2 to 3, but this machine has 3"),
    (2, 4, ["rollout.async={device: 3}"], "rollout.async", "on GPUs 3 to 4, but this machine has 4 visible"),
    (2, 4, ["rollout.async={device: 1}"], "rollout.async.device", "is a learner's GPU: 2 ranks"),
]
ACCEPTED = [
    (2, 2, []),
    (2, 4, ["quant.learner=full_precision"]),
    (2, 4, ["rollout.async={}"]),
    (2, 4, ["rollout.async={device: 2}"]),
    (2, None, ["rollout.async={}"]),
    (2, 4, [VLLM]),
    (1, 1, [VLLM, "rollout.vllm={data_parallel: 1}"]),
    (1, 2, [VLLM, "rollout.vllm={device: 1}"]),
    (2, 4, [VLLM, "rollout.vllm={device: 2}"]),
    (6, 8, [VLLM, "rollout.vllm={device: 6, data_parallel: 2}"]),
    (2, 2, [VLLM, "rollout.vllm={tensor_parallel: 2}"]),
    (3, 4, [VLLM, "rollout.vllm={tensor_parallel: 2}"]),
    (4, 4, [VLLM, "rollout.vllm={tensor_parallel: 2, data_parallel: 1}"]),
]


def test_settings_that_several_ranks_cannot_run_are_refused_by_name(config: Path) -> None:
    for count, gpus, overrides, key, text in [*REFUSED, *((*one, None, "") for one in ACCEPTED)]:
        found = list(several_ranks_faults(load_config(config, ["model.device=auto", *overrides]), count, gpus))
        assert [".".join(fault.key) for fault in found] == ([] if key is None else [key]), (count, gpus, overrides)
        assert all(text in fault.text for fault in found), (text, found)


def test_check_and_train_refuse_before_anything_starts(config: Path, capsys) -> None:
    for command in ("check", "train"):
        with pytest.raises(SystemExit) as caught:
            cli.main(
                [command, "--nproc", "2", str(config), "diagnostics.gradients_every=2", f"model.path={_model(config)}"]
            )
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: command line: diagnostics.gradients_every = ") and "with 2 ranks" in said
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--nproc", "2", "/dev/null"])
    assert caught.value.code == 2 and "is not a file" in capsys.readouterr().err


def _model(config: Path) -> Path:
    folder = config.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def test_ranks_that_a_launcher_started_are_not_started_again(config: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    ended = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code))
    with pytest.raises(SystemExit):
        cli.main(["train", "--nproc", "3", str(config)])
    assert ended == [2]
    assert "a launcher has started 2 ranks already" in capsys.readouterr().err


def test_a_run_resumes_with_another_engine() -> None:
    theirs = {"distributed": {"engine": "rows", "timeout_s": 600.0}, "train": {"seed": 0}}
    ours = {"distributed": {"engine": "deepspeed", "timeout_s": 60.0}, "train": {"seed": 0}}
    assert config_difference(theirs, ours) == []
