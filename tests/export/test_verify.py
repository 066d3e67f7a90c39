"""`--verify`: a good export agrees, and one with a wrong scale, code or value does not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_exports import SCHEMES, TinyRun, save_run

from qarl.exporting import verify
from qarl.exporting.readers import Reading
from qarl.inference.target import resolve_target

pytestmark = pytest.mark.usefixtures("no_vllm")


def exported(tiny_model, directory: Path, name: str) -> tuple[TinyRun, Path]:
    run = save_run(directory / "run", tiny_model(), steps=(2,), **SCHEMES[name])
    run.export(directory / "out")
    return run, directory / "out"


def verified(run: TinyRun, out: Path) -> tuple[bool, dict[str, dict]]:
    lines: list[str] = []
    record = verify.verify_export(resolve_target(str(run.path)), out, device="cpu", say=lines.append)
    assert len(lines) == 4 and json.loads((out / "verification.json").read_text()) == record
    return record["ok"], {agreement["reader"]: agreement for agreement in record["readers"]}


@pytest.mark.parametrize("name", ["asymmetric", "nvfp4a16"])
def test_a_good_export_agrees_bit_for_bit_in_qarl(tiny_model, tmp_path, name):
    ok, found = verified(*exported(tiny_model, tmp_path, name))
    assert ok
    assert found["codes"]["status"] == "agrees"
    assert found["qarl"]["status"] == "agrees" and found["qarl"]["delta_abs_max"] == 0.0
    assert found["qarl"]["same_text"] == found["qarl"]["prompts"] == 4
    assert found["transformers"]["status"] == "agrees" and found["transformers"]["tokens"] == found["qarl"]["tokens"]
    assert found["vllm"] == found["vllm"] | {"status": "skipped", "reason": "not in this test"}


def test_an_export_in_parts_of_blocks_agrees_and_transformers_does_not_read_it(tiny_model, tmp_path):
    ok, found = verified(*exported(tiny_model, tmp_path, "fp8_block"))
    assert ok and found["codes"]["status"] == "agrees"
    assert found["qarl"]["status"] == "agrees" and found["qarl"]["delta_abs_max"] == 0.0
    assert found["transformers"]["status"] == "skipped"
    assert "does not dequantize [32, 64] in blocks of 128" in found["transformers"]["reason"]


def test_one_changed_value_in_one_layer_is_found(tiny_model, tmp_path):
    run, out = exported(tiny_model, tmp_path, "w4a16-g32")
    for suffix, factor in (("weight_scale", 2), ("weight_packed", -1)):
        tensors = load_file(out / "model.safetensors")
        changed = tensors[f"model.layers.1.mlp.down_proj.{suffix}"].clone()
        changed.view(-1)[3] *= factor
        written = tensors | {f"model.layers.1.mlp.down_proj.{suffix}": changed}
        save_file(written, out / "model.safetensors", metadata={"format": "pt"})
        ok, found = verified(run, out)
        assert not ok
        assert found["codes"]["status"] == "differs" and "model.layers.1.mlp.down_proj" in found["codes"]["reason"]
        assert found["qarl"]["status"] == "differs"
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def test_an_edited_configuration_is_found_even_if_log_probs_stay_and_a_changed_norm(tiny_model, tmp_path):
    run, out = exported(tiny_model, tmp_path, "w8a8")
    plain = (out / "generation_config.json").read_text()
    (out / "generation_config.json").write_text(json.dumps(json.loads(plain) | {"max_length": 7}))
    ok, found = verified(run, out)
    assert not ok and "generation_config.json: max_length is 7, and was absent" in found["codes"]["reason"]
    assert found["qarl"]["status"] == "agrees"
    (out / "generation_config.json").write_text(plain)
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    ok, found = verified(run, out)
    assert not ok and "model.norm.weight" in found["codes"]["reason"]


def test_an_unreadable_export_is_a_reader_that_failed(tiny_model, tmp_path):
    run, out = exported(tiny_model, tmp_path, "fp8")
    stored = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stored | {"hidden_size": 65}))
    ok, found = verified(run, out)
    assert not ok and found["qarl"]["status"] == "failed" and "\n" not in found["qarl"]["reason"]


REFERENCE = Reading([[1, 2, 3], [4, 5]], [[-1.0, -2.0, -3.0], [-1.0, -2.0]])


def test_agreement_counts_the_mean_over_all_tokens_and_neither_nan_nor_another_text_agrees():
    near = Reading([[1, 2], [4, 6]], [[-1.1, -2.0, -3.0], [-1.0, -2.4]])
    found = verify.compare("x", REFERENCE, near, bound=0.1)
    assert (found.status, found.same_text, found.tokens) == ("agrees", 1, 5)  # [1, 2] lacks the last token only
    assert found.delta_abs_mean == pytest.approx(0.1) and found.delta_abs_max == pytest.approx(0.4)
    assert verify.compare("x", REFERENCE, near, bound=0.09).status == "differs"
    broken = Reading(REFERENCE.token_ids, [[float("nan"), -2.0, -3.0], [-1.0, -2.0]])
    assert verify.compare("x", REFERENCE, broken, bound=10.0).status == "differs"
    shorter = verify.compare("x", REFERENCE, Reading([[1, 2, 3], [4]], [[-1.0, -2.0, -3.0], [-1.0]]), bound=10.0)
    assert (shorter.status, shorter.reason) == ("differs", "responses of other lengths")
    other = Reading([[1, 2, 3], [4, 6]], REFERENCE.logprobs)  # bound 0: bits are promised
    assert verify.compare("qarl", REFERENCE, other, bound=0.0).status == "differs"


def test_bf16_export_is_compared_with_the_masters_in_bf16(tiny_model, tmp_path):
    run, _ = exported(tiny_model, tmp_path, "w4a16-g32")
    target = resolve_target(str(run.path), quant={"scheme": "bf16"})
    run.export(tmp_path / "bf16", target, dtype=torch.bfloat16)
    ok, found = verified(run, tmp_path / "bf16")
    assert ok and found["qarl"]["delta_abs_max"] == 0.0
