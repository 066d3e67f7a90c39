"""Edits of a model's small files change its recorded values exactly if they change what the model computes.

transformers decides what an edit changes: the logits of a model with the edited configuration and the same weights.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from qarl.config import ModelConfig
from qarl.errors import UserError
from qarl.policy.load_config import load_model_config
from qarl.policy.model_identity import config_values, generation_values, model_digests, value_differences

TOKENS = torch.arange(40).reshape(1, 40) * 5 % 250 + 3
# More values than any one family reads: a key that a family does not have changes nothing.
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
EDITS: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    {"rope_theta": 500000.0, "rope_parameters": None},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": None},  # the same weights in other heads
    {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},  # of qwen3, whose heads have 32
    WINDOW,
    {"sliding_window": 8},
    {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    {"hidden_act": "gelu"},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [1]},
    {"attention_bias": True},
    {"mlp_bias": True},
]
IRRELEVANT: list[dict[str, Any]] = [
    {"transformers_version": "4.40.0"},
    {"dtype": None, "torch_dtype": "float32"},
    {"architectures": None},
    {"use_cache": False},
    {"attention_dropout": 0.1},
    {"pretraining_tp": 2},
    {"id2label": {"0": "a"}, "label2id": {"a": 0}},
    {"a_trainers_own_note": "merged on Monday"},
    {"router_aux_loss_coef": 0.5},
]


def other_values(contents: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each number and each switch of a config.json, the file with another value there."""
    for key, value in contents.items():
        if isinstance(value, bool):
            yield {key: not value}
        elif isinstance(value, int | float):
            yield {key: value * 2}
        elif isinstance(value, dict):
            yield from ({key: value | changed} for changed in other_values(value))


class Model:
    """A tiny model of one family, and what its directory says after an edit of config.json."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = save_tiny_model(directory, family)
        self.file = directory / "config.json"
        self.written = json.loads(self.file.read_text())
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        self.values, self.logits = config_values(self.config()), self.forward({})

    def config(self, **edit: Any) -> Any:
        """As qarl reads it. Raises UserError for an edit that qarl refuses in any case."""
        contents = {key: value for key, value in (self.written | edit).items() if key not in edit or value is not None}
        self.file.write_text(json.dumps(contents))
        return load_model_config(ModelConfig(path=str(self.directory)))

    @torch.no_grad()
    def forward(self, edit: dict[str, Any]) -> torch.Tensor | None:
        """Logits of transformers with the same weights; None if they do not fit the edited configuration."""
        config = self.config(**edit)
        changed = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        weights = self.model.state_dict()
        if changed.state_dict().keys() - weights.keys():
            return None
        try:
            changed.load_state_dict(weights, strict=False)
        except RuntimeError:  # other shapes, which loading refuses
            return None
        return changed.eval()(TOKENS).logits


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("fingerprints") / request.param, request.param)


def test_an_edit_that_changes_the_forward_changes_a_recorded_value_by_its_name(model: Model) -> None:
    changing = 0
    for edit in [*EDITS, *other_values(model.written)]:
        try:
            logits = model.forward(edit)
            values = config_values(model.config(**edit))
        except UserError:  # refused when the model is opened
            continue
        differences = value_differences(model.values, values)
        if logits is None or not torch.equal(logits, model.logits):
            changing += 1
            names = [key.removeprefix("rope_") for key in edit]
            assert any(name in difference for difference in differences for name in names), (edit, differences)
    assert changing >= 10


def test_an_edit_that_changes_nothing_is_accepted(model: Model) -> None:
    for edit in IRRELEVANT:
        assert torch.equal(model.forward(edit), model.logits), edit
        assert config_values(model.config(**edit)) == model.values, edit


# --- tokenizer


def parts_edit(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(parts: dict[str, Any]) -> None:
        *owners, key = path
        for owner in owners:
            parts = parts[owner]
        parts[key] = value

    return edit


def added(token: str, special: bool) -> Callable[[dict[str, Any]], None]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return lambda parts: parts["added_tokens"].append({"id": 100, "content": token, **flags})


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
# Edits of tokenizer.json, and the part that an error names.
TOKENIZER: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "merges": (parts_edit("model", "merges", value=[["a", "b"]]), "tokenizer"),
    "vocabulary": (lambda p: p["model"]["vocab"].update({"a": p["model"]["vocab"]["b"], "b": 900}), "vocabulary"),
    "normalizer": (parts_edit("normalizer", value={"type": "Lowercase"}), "tokenizer"),
    "pre-tokenizer": (parts_edit("pre_tokenizer", value=BYTES), "tokenizer"),
    "decoder": (parts_edit("decoder", value={"type": "Fuse"}), "tokenizer"),
    "added token": (added("th", special=False), "tokenizer"),
}


PLAIN = ModelConfig(path="model")


def digests(directory: Path) -> dict[str, str]:
    return model_digests(PLAIN, None, AutoTokenizer.from_pretrained(directory))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["vocab"]["ab"] = 900  # for a merge
    path.write_text(json.dumps(contents))
    return tmp_path


@pytest.mark.parametrize("name", TOKENIZER)
def test_an_edit_of_a_tokenizer_changes_the_digest_of_that_part(saved: Path, name: str) -> None:
    before, (edit, part) = digests(saved), TOKENIZER[name]
    contents = json.loads((saved / "tokenizer.json").read_text())
    edit(contents)
    (saved / "tokenizer.json").write_text(json.dumps(contents))
    after = digests(saved)
    assert after[part] != before[part] and after["chat template"] == before["chat template"]


def test_special_tokens_and_the_template_change_their_digests_alone(saved: Path) -> None:
    before = digests(saved)
    template = saved / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = digests(saved)
    assert {part for part in before if before[part] != after[part]} == {"chat template"}
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    (saved / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<pad>"}))
    assert {part for part in after if after[part] != digests(saved)[part]} == {"stop tokens", "tokenizer"}


def test_a_tokenizer_is_the_same_in_another_layout_at_another_place_and_after_use(saved: Path, tmp_path: Path) -> None:
    before = digests(saved)
    contents = json.loads((saved / "tokenizer.json").read_text())
    padding = {"direction": "Right", "pad_id": 2, "pad_token": "<pad>", "pad_type_id": 0, "pad_to_multiple_of": None}
    contents |= {
        "padding": {"strategy": "BatchLongest", **padding},
        "truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0},
    }
    other = tmp_path / "moved"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert model_digests(PLAIN, None, tokenizer) == before
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(dict(reversed(contents.items())), indent=3))
    assert digests(other) == before


# --- generation config


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        ({"eos_token_id": [1, 70]}, "eos_token_id"),
        ({"temperature": 0.6, "do_sample": True}, "temperature"),
        ({"use_cache": False, "transformers_version": "4.40.0", "output_scores": True}, None),
    ],
)
def test_a_generation_config_is_known_by_the_values_that_are_set(edit: dict[str, Any], key: str | None) -> None:
    written = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    before, after = (generation_values(GenerationConfig.from_dict(values)) for values in (written, written | edit))
    differences = value_differences(before, after)
    assert bool(differences) == (key is not None)
    assert key is None or any(line.startswith(f"{key} (now ") for line in differences)
