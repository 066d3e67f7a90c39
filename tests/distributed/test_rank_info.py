"""Which rank a process is, as its launcher says, and configurations that several ranks cannot run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from test_ranks_launch import CONFIG, MODEL

from qarl import cli
from qarl.config import load_config
from qarl.config.distributed import several_ranks_faults
from qarl.distributed.fault import Fault, OtherRankFailed, fault_of, forget_fault, write_fault
from qarl.distributed.key_value_store import DirectoryStore
from qarl.distributed.launch import Launched
from qarl.distributed.rank_info import RankInfo, child_environment, own_arguments, rank_info
from qarl.errors import UserError
from qarl.storage.config_difference import config_difference
from qarl.utils.signals import Interrupted

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}


def test_a_launcher_says_the_place() -> None:
    assert rank_info(TORCHRUN) == RankInfo(3, 4, 1, None, ("h", 1))
    assert rank_info({**TORCHRUN, "QARL_RANKS": "/"}) == RankInfo(3, 4, 1, Path("/"))


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "5"}, {"MASTER_PORT": "junk"}]
)
def test_one_process_has_none(environment: dict[str, str]) -> None:
    assert rank_info(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE: is 4, and RANK is not set"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "RANK: 4 is not below WORLD_SIZE = 4"),
        ({"WORLD_SIZE": "4", "RANK": "one"}, "RANK: 'one' in the environment is not a number"),
        ({"WORLD_SIZE": "-2", "RANK": "0"}, "WORLD_SIZE: '-2' in the environment is not a number"),
    ],
)
def test_a_place_that_cannot_be_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        rank_info(environment)


def test_what_a_rank_starts_is_no_rank() -> None:
    assert child_environment({**TORCHRUN, "QARL_RANKS": "/d", "PATH": "p", "LOCAL_MODELS": "m"}) == {
        "PATH": "p",
        "LOCAL_MODELS": "m",
    }


def test_the_argument_that_deepspeed_puts_in_front_is_dropped_for_a_rank(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert own_arguments(["--local_rank=0", "train", "x"]) == ["--local_rank=0", "train", "x"]
    monkeypatch.setenv("RANK", "0")
    for given in ("--local_rank=0", "--local-rank=1"):
        assert own_arguments([given, "train", "x"]) == ["train", "x"]
    assert own_arguments(["train", "--local_rank=0"]) == ["train", "--local_rank=0"]
    assert own_arguments([]) == []


def test_a_store_is_claimed_once(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.read("a") is None
    assert store.claim("a", "first") == "first" and store.claim("a", "second") == "first"
    store.post("a", "third")
    assert store.read("a") == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_first_fault_stands_in_a_run_that_has_begun(tmp_path: Path) -> None:
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


VLLM = ["rollout.engine=vllm"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (VLLM, []),
        (["quant.learner=full_precision"], []),
        (["diagnostics.gradients_every=1"], [("diagnostics", "gradients_every")]),
        ([*VLLM, "rollout.vllm.process=inline"], [("rollout", "vllm", "process")]),
        ([*VLLM, "model.device=auto", "rollout.vllm.device=1"], [("rollout", "vllm", "device")]),
    ],
)
def test_what_several_ranks_cannot_run_is_refused_by_name(config: Path, overrides: list[str], keys: list) -> None:
    loaded = load_config(config, overrides)
    assert [fault.key for fault in several_ranks_faults(loaded, 2, gpus=4)] == keys


def test_there_is_a_gpu_for_each_rank(config: Path) -> None:
    loaded = load_config(config)
    assert [fault.key for fault in several_ranks_faults(loaded, 3, gpus=2)] == [("model", "device")]
    assert list(several_ranks_faults(loaded, 2, gpus=2)) == []


@pytest.mark.parametrize(
    ("ahead", "gpus", "text"),
    [
        ("{}", 3, "each rank has a sampler, on GPUs 2 to 3, but this machine shows 3, from 0"),
        ("{device: 3}", 4, "each rank has a sampler, on GPUs 3 to 4, but this machine shows 4, from 0"),
        ("{device: 1}", 4, "is a learner's GPU with 2 ranks"),
        ("{}", 4, None),
        ("{device: 2}", 4, None),
        ("{}", None, None),
    ],
)
def test_there_is_a_gpu_for_the_sampler_of_each_rank(config: Path, ahead: str, gpus: int, text: str | None) -> None:
    loaded = load_config(config, [f"rollout.async={ahead}", "model.device=auto"])
    found = [fault.text for fault in several_ranks_faults(loaded, 2, gpus=gpus)]
    assert len(found) == (text is not None) and all(text in one for one in found)


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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["distributed.zero_stage=2"], "distributed.zero_stage = 2: is only for DeepSpeed"),
        (["distributed.config={wall_clock_breakdown: true}"], "is only for DeepSpeed"),
        (["distributed={engine: deepspeed, config: {optimizer: {}}}"], "config.optimizer = {}: is decided elsewhere"),
        (
            ["distributed={engine: deepspeed, config: {zero_optimization: {stage: 1}}}"],
            "set distributed.zero_stage",
        ),
        (["distributed.timeout_s=0"], "distributed.timeout_s = 0"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(config: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("{", r"\{").replace("}", r"\}")):
        load_config(config, overrides)


def test_the_stage_of_deepspeed_is_three_unless_another_is_given(config: Path) -> None:
    assert load_config(config).distributed.zero_stage is None
    assert load_config(config, ["distributed.engine=deepspeed"]).distributed.zero_stage == 3
    assert load_config(config, ["distributed={engine: deepspeed, zero_stage: 0}"]).distributed.zero_stage == 0


def test_a_run_goes_on_with_another_engine() -> None:
    theirs = {"distributed": {"engine": "rows", "timeout_s": 600.0}, "train": {"seed": 0}}
    ours = {"distributed": {"engine": "deepspeed", "timeout_s": 60.0}, "train": {"seed": 0}}
    assert config_difference(theirs, ours) == []


def test_a_real_time_signal_without_a_name_is_reported_by_its_number(tmp_path: Path) -> None:
    launched = Launched([], 0, tmp_path, tmp_path)
    launched._ended(0, -40)
    assert launched.codes == {0: 168}
    assert launched.faults[0].line == "was ended by signal 40"
