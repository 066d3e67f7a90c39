"""Exports read by transformers 4: its configuration fields, and the library itself in a separate environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl import api
from qarl.storage.model_directory import name_older_class, save_tokenizer

OLDER = Path(os.environ.get("QARL_TRANSFORMERS4") or Path(sys.prefix) / "transformers4")
TOKENS = [3 + (17 * i) % 256 for i in range(60)]
TEXT = "hello <s> wörld</s>"


@pytest.mark.parametrize("base_class", ["TokenizersBackend", "Qwen2Tokenizer", "NoSuchClass"])
def test_the_tokenizer_has_a_class_that_transformers_4_knows(base_class, tiny_model, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>", "<y>"]})
    save_tokenizer(tokenizer, tmp_path)
    name_older_class(tokenizer, tmp_path, base_class)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] in ("PreTrainedTokenizerFast", base_class)
    assert written["tokenizer_class"] != "TokenizersBackend" and "extra_special_tokens" not in written
    assert written["model_input_names"] == ["input_ids", "attention_mask"]  # its generate refuses token_type_ids
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert again.all_special_tokens == tokenizer.all_special_tokens


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
THETA = {"rope_type": "default", "rope_theta": 500_000.0}
READ = {  # family, rope parameters, scheme
    "llama3": ("llama", LLAMA3, "w4a16"),
    "fp8": ("qwen2", THETA, "fp8"),
    "experts": ("qwen3_moe", THETA, "w4a16"),
}
READER = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

ids = torch.tensor([json.loads(sys.argv[1])])
found = {"version": transformers.__version__}
for name, path in json.loads(sys.argv[3]).items():
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits.float(), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    found[name] = [rows.tolist(), AutoTokenizer.from_pretrained(path)(sys.argv[2])["input_ids"]]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason=f"transformers 4 is not installed in {OLDER}; make test puts it there")
def test_transformers_4_reads_the_same_model(tmp_path) -> None:
    """Log-probs and tokens of each export, read by transformers 4.57 and by the installed version."""
    paths = {}
    for name, (family, rope, scheme) in READ.items():
        base = save_tiny_model(tmp_path / f"{name}-base", family, rope_parameters=rope, hidden_size=128)
        paths[name] = str(tmp_path / name)
        size = {"group_size": 32} if scheme == "w4a16" else {}
        api.quantize(base, paths[name], scheme, **size)
    command = [sys.executable, "-c", READER, json.dumps(TOKENS), TEXT, json.dumps(paths)]
    environment = os.environ | {"PYTHONPATH": str(OLDER), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    older = json.loads(run.stdout.splitlines()[-1])
    assert older["version"].startswith("4.57")
    ids = torch.tensor([TOKENS])
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        torch.nn.Module.float(model)
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits.float(), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        logprobs, tokens = older[name]
        # The experts of transformers 5 stay in bfloat16 until they are cast here.
        torch.testing.assert_close(rows, torch.tensor(logprobs), rtol=0, atol=0.02 if name == "experts" else 1e-5)
        assert AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"] == tokens
