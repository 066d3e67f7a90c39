"""Ranks with other files at the same paths fail before their first step; the error names the input and the ranks."""

import contextlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thread_ranks import as_threads
from tiny_runs import ROOT, settings, write_config
from whole_pieces import whole_pieces

from qarl.config import ModelConfig, load_config
from qarl.data import PromptStream, build_prompts
from qarl.distributed import group
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import rank_difference, require_same
from qarl.errors import UserError
from qarl.policy.load import load_model, load_tokenizer
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import load_checkpoint
from qarl.training.periodic_evaluation import load_training_tasks
from qarl.training.run_identity import SAME_FILES, input_digests, named_inputs, shared_tensors_digest, tensors_digest

JUDGE = "import helper\ndef judge(completions, prompts, **columns):\n    return [helper.SCALE for c in completions]\n"
TASK = {
    "name": "held-out",
    "data": {"source": "held_out.jsonl", "max_prompt_length": 64},
    "reward": [{"name": "judge.py:judge"}],
}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's files: everything that a configuration can name by a relative path."""
    place = tmp_path_factory.mktemp("same_inputs") / "rank-0"
    shutil.copytree(tiny_model("llama"), place / "model")
    shutil.copy(ROOT / "examples" / "custom_objective.py", place / "own.py")
    (place / "judge.py").write_text(JUDGE)
    (place / "helper.py").write_text("SCALE = 1.0\n")
    for name in ("rows", "held_out"):
        rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = settings(Path("model"), reward={"functions": [{"name": "judge.py:judge"}]})
    data["data"] = {"source": "rows.jsonl", "max_prompt_length": 64}
    data["objective"] = {"name": "custom", "path": "own.py:cispo", "kwargs": {"clip_ratio_high": 0.01}}
    (place / "zero.json").write_text('{"dump_state": false}')
    data["distributed"] = {"engine": "deepspeed", "config": "zero.json"}
    write_config(place / "c.yaml", {**data, "evaluation": {"tasks": [TASK], "every": 2}})
    return place


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new))

    return change


def rewrite(name: str, **values: Any) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        (place / name).write_text(json.dumps(json.loads((place / name).read_text()) | values))

    return change


ROPE = {"rope_type": "default", "rope_theta": 500000.0}
# What differs on one rank, and what the error names first.
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "reward": (replace("judge.py", "helper.SCALE", "-helper.SCALE"), "reward.functions: the source of `judge`"),
    "objective": (replace("own.py", "clip_ratio_high", "clip_ratio_top"), "objective.path: the source of `cispo`"),
    "prompts": (replace("rows.jsonl", "3 + 3", "3 + 4"), "data: the prompts"),
    "answers": (replace("rows.jsonl", '"answer": "6"', '"answer": "7"'), "data: the columns beside the prompts"),
    "normalizer": (replace("model/tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'), "tokenizer"),
    "chat template": (replace("model/chat_template.jinja", "<|assistant|>", "<|answer|>"), "model.path: its chat temp"),
    "stop tokens": (rewrite("model/generation_config.json", eos_token_id=[1, 70]), "generation_config.json: eos_token"),
    "rotary base": (rewrite("model/config.json", rope_parameters=ROPE), "config.json: rope_parameters.rope_theta"),
    "DeepSpeed's keys": (rewrite("zero.json", dump_state=True), "distributed.config"),
    "evaluation": (replace("held_out.jsonl", "1 + 1", "1 + 7"), "evaluation.tasks: held-out"),
}


def inputs_of(place: Path) -> dict[str, Any]:
    """The digests of a rank's inputs before it reads the weights, by name."""
    with contextlib.chdir(place):
        config = load_config("c.yaml", [])
        tokenizer = load_tokenizer(config.model)
        prompts, _ = build_prompts(config.data, tokenizer, 512, config.rollout.max_response_length)
        tasks = load_training_tasks(config, tokenizer, 512)
        return named_inputs(config, input_digests(config, tokenizer), PromptStream(prompts, 0, True), tasks)


@pytest.fixture(scope="module")
def here(folder: Path) -> dict[str, Any]:
    return inputs_of(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_differs_on_one_rank_is_named_on_all(folder: Path, here, kind: str, tmp_path: Path) -> None:
    change, named = KINDS[kind]
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    change(other)
    there = inputs_of(other)
    odd = random.Random(kind).randrange(3)
    said = as_threads(3, lambda ranks: require_same(ranks, there if ranks.rank == odd else here, SAME_FILES))
    assert all(isinstance(error, UserError) for error in said) and len({str(error) for error in said}) == 1, said
    line = str(said[0])
    assert line.startswith("distributed: different between ranks: ") and "\n" not in line
    assert named in line and f"rank {odd} has" in line and line.endswith("; give every rank the same files"), line


def test_ranks_with_other_configurations_are_refused_at_the_rendezvous(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    configs = [load_config("c.yaml", [f"train.seed={seed}"]) for seed in (1, 2, 1)]

    def meet(ranks: Any) -> None:
        ranks.device = torch.device("cpu")
        group._require_same(ranks, configs[ranks.rank])

    said = as_threads(3, meet)
    pattern = (
        r"distributed: different between ranks: configuration: ranks 0, 2 have \w{12}, rank 1 has \w{12}; start all"
    )
    assert all(isinstance(error, UserError) and re.match(pattern, str(error)) for error in said), said


# --- weights


def as_ranks(places: list[Path], shapes: dict[str, tuple[int, ...]], own_code: bool = False) -> list[Any]:
    """`shared_tensors_digest` of ranks that each have their own model directory. own_code: each loads it whole."""

    def digest(ranks: Ranks) -> str:
        config = ModelConfig(path=str(places[ranks.rank]), trust_remote_code=own_code)
        return shared_tensors_digest(config, shapes, ranks)

    return as_threads(len(places), digest)


def test_one_differing_weight_on_any_rank_is_found(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Ranks in any grouping: on one machine with the same files, or each with a copy of its own."""
    tensors = load_file(folder / "model" / "model.safetensors")
    model = load_model(ModelConfig(path=str(folder / "model")))
    expected = tensors_digest(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    copy, other, waits = tmp_path / "copy", tmp_path / "other", list[float]()
    shutil.copytree(folder / "model", copy)
    monkeypatch.setattr(Ranks, "wait_for_all", lambda ranks, longer_s: waits.append(longer_s))
    assert as_ranks([folder / "model", copy, folder / "model"], shapes) == [expected] * 3
    assert len(waits) == 3 and min(waits) >= 3600  # one rank may hash the whole model while another waits
    assert as_ranks([folder / "model", copy, folder / "model"], shapes, own_code=True) == [expected] * 3
    shutil.copytree(copy, other)
    rng = random.Random(0)
    for number in range(6):
        count = rng.randrange(2, 5)
        places = [rng.choice([folder / "model", copy]) for _ in range(count)]
        odd, name = rng.randrange(count), rng.choice(sorted(tensors))
        changed = tensors[name].clone()
        changed.view(-1).view(torch.int32)[rng.randrange(changed.numel())] ^= 1  # the last bit of one float32
        save_file({**tensors, name: changed}, other / "model.safetensors", {"format": "pt"})
        places[odd] = other
        said = as_ranks(places, shapes, own_code=number < 2)
        for error in said:
            assert isinstance(error, UserError), said
            assert re.search(rf"model\.path: its weights \({re.escape(name)}\): .*rank {odd} has", str(error)), error


# --- the line


def test_the_line_names_the_first_value_that_differs_and_each_rank_once() -> None:
    same, one, other = {"a": 1, "b": [1, 2]}, {"a": 1, "b": "x" * 63 + "y"}, {"a": 1, "c": None}
    assert rank_difference([same, same], "fix it") is None
    line = rank_difference([same, one, same, other], "fix it")
    assert line.startswith("distributed: different between ranks: b: ranks 0, 2 have [1, 2], rank 1 has ")
    assert "\n" not in line and "rank 3 has " in line and line.endswith("; fix it")


# --- checkpoints


def test_ranks_that_see_other_checkpoints_verify_all_of_their_files_and_must_find_the_same(tmp_path: Path) -> None:
    tensors = {"masters": {f"t{index}": torch.arange(8.0) + index for index in range(4)}}
    for place, state in (("here", {"n": 1}), ("copy", {"n": 1}), ("other", {"n": 2}), ("damaged", {"n": 1})):
        CheckpointStore(tmp_path / place, 0).save(5, whole_pieces(tensors), state)
    file = tmp_path / "damaged" / "000005" / "masters.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)

    def load(*places: str) -> list[Any]:
        paths = [tmp_path / place / "000005" for place in places]
        return as_threads(len(places), lambda ranks: load_checkpoint(paths[ranks.rank], ranks=ranks))

    assert [found.state for found in load("here", "here", "copy")] == [{"n": 1}] * 3
    for places, words in (
        (("here", "other", "here"), r"distributed: different between ranks: checkpoint 000005: .*, rank 1 has "),
        (("here", "here", "damaged"), r"masters\.safetensors"),
        (("damaged", "here", "here"), r"masters\.safetensors"),
    ):
        said = load(*places)
        assert all(isinstance(error, UserError) and re.search(words, str(error)) for error in said), said
