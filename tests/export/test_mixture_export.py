"""Exports of mixtures of experts: names and ignored routers, what each reader takes, codes bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_exports import SCHEMES, save_run
from transformers import AutoModelForCausalLM

from qarl.exporting.verify import verify_export
from qarl.inference.target import resolve_target
from qarl.utils.expert_names import EXPERT_NAMES

pytestmark = pytest.mark.usefixtures("no_vllm")


def exported(tiny_model, directory: Path, family: str, quant: dict) -> tuple[Path, dict[str, dict]]:
    """(the checkpoint, what each reader found)."""
    run = save_run(directory / "run", tiny_model(family), steps=(2,), **quant)
    run.export(directory / "out")
    record = verify_export(resolve_target(str(run.path)), directory / "out", device="cpu", say=lambda line: None)
    return directory / "out", {reader["reader"]: reader for reader in record["readers"]}


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_every_reader_agrees_and_the_router_is_ignored(tiny_model, tmp_path, family):
    out, found = exported(tiny_model, tmp_path, family, SCHEMES["w4a16-g32"])
    assert {name: reader["status"] for name, reader in found.items()} == {
        "codes": "agrees",
        "qarl": "agrees",
        "transformers": "agrees",
        "vllm": "skipped",
    }
    names = EXPERT_NAMES[family]
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    gates = [names.router(), *(["mlp.shared_expert_gate"] if family == "qwen2_moe" else [])]
    assert ignore == ["lm_head", *(f"re:.*{gate}$" for gate in gates)]
    with safe_open(out / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    layer = "model.layers.1"
    assert {f"{layer}.{gate}.weight" for gate in gates} <= stored
    for leaf in (names.gate, names.up, names.down):
        assert f"{layer}.{names.expert(3, leaf)}.weight_packed" in stored
        assert (f"{layer}.mlp.shared_expert.{leaf}.weight_packed" in stored) == (family == "qwen2_moe")


@pytest.mark.parametrize(
    ("scheme", "ignored", "reason"),
    [
        ("nvfp4a16", "lm_head", "experts in nvfp4-pack-quantized (strategy tensor_group)"),
        # transformers would leave them at random values
        ("w4a16-g32", r"re:.*layers\.1\.", "the unquantized experts of model.layers.1.block_sparse_moe.experts.w1"),
        ("fp8", r"re:.*\.2\.w1", "the unquantized experts of model.layers.0.block_sparse_moe.experts.w1"),
    ],
)
def test_what_transformers_cannot_read_is_said(tiny_model, tmp_path, scheme, ignored, reason):
    out, found = exported(tiny_model, tmp_path, "mixtral", SCHEMES[scheme] | {"ignore": ["lm_head", ignored]})
    assert (found["codes"]["status"], found["qarl"]["status"]) == ("agrees", "agrees")
    assert found["transformers"]["status"] == "skipped"
    assert found["transformers"]["reason"].endswith(reason)
    assert f"{reason}.\n" in (out / "README.md").read_text()


@pytest.mark.parametrize(("scheme", "ignored"), [("fp8", r"re:model\.layers\.1\."), ("w4a16-g32", "re:.*self_attn")])
def test_transformers_reads_other_layers_unquantized(tiny_model, tmp_path, scheme, ignored):
    _, found = exported(tiny_model, tmp_path, "mixtral", SCHEMES[scheme] | {"ignore": ["lm_head", ignored]})
    assert found["transformers"]["status"] == "agrees", found["transformers"]


def test_transformers_has_the_dequantized_experts(tiny_model, tmp_path):
    run = save_run(tmp_path / "run", tiny_model("mixtral"), steps=(2,), **SCHEMES["fp8"])
    run.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    weights = run.snapshots[2].weights
    for index, layer in enumerate(model.model.layers):
        expert = f"model.layers.{index}.block_sparse_moe.experts.2"
        gate, up = (weights[f"{expert}.{leaf}"].dequantize(torch.bfloat16) for leaf in ("w1", "w3"))
        assert torch.equal(layer.mlp.experts.gate_up_proj[2], torch.cat((gate, up)))
