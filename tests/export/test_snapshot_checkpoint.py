"""A snapshot on disk: its tensors bit for bit, and the same documents as an export of the policy."""

import json
from pathlib import Path

import pytest
import torch
from policy_models import make_policy
from tiny_exports import SCHEMES, entries, same_bytes, save_run, stored_tensors
from transformers import AutoTokenizer

from qarl.config import ModelConfig
from qarl.policy.load import load_tokenizer
from qarl.policy.policy import Policy
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint


def write(policy: Policy, model: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    write_snapshot_checkpoint(directory, policy.current, policy.sampler.layout, tokenizer)


@pytest.mark.parametrize(
    "quant", [{"scheme": "bf16"}, SCHEMES["asymmetric"], SCHEMES["fp8"]], ids=["bf16", "asymmetric", "fp8"]
)
def test_the_files_hold_the_snapshots_tensors(quant, tiny_model, tmp_path):
    model = tiny_model("qwen2")  # biases beside quantized weights
    policy = make_policy(model, dtype=torch.bfloat16, **quant)
    write(policy, model, tmp_path / "out")
    stored, published = stored_tensors(tmp_path / "out"), policy.current.tensors
    assert stored.keys() == published.keys()
    assert [name for name in stored if not same_bytes(stored[name], published[name])] == []


@pytest.mark.parametrize("name", ["w4a16-g32", "fp8"])
def test_the_documents_are_those_of_an_export(name, tiny_model, tmp_path):
    model = tiny_model()
    save_run(tmp_path / "run", model, **SCHEMES[name]).export(tmp_path / "export")
    write(make_policy(model, dtype=torch.bfloat16, **SCHEMES[name]), model, tmp_path / "out")
    assert entries(tmp_path / "out") == [
        entry for entry in entries(tmp_path / "export") if entry not in ("README.md", "qarl_export.json")
    ]
    for document in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / place / document).read_text()) for place in ("out", "export"))
        assert ours == theirs
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / place) for place in ("out", "export"))
    assert ours.chat_template == theirs.chat_template and ours("12 + 3").input_ids == theirs("12 + 3").input_ids
