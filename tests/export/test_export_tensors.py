"""Exported tensors: the run's, bit for bit, for our reader, for compressed-tensors and for transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from qarl_kernels.logprob import Truncation
from tiny_exports import SCHEMES, TinyRun, entries, same_bytes, save_run, stored_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qarl.errors import UserError
from qarl.exporting import writer
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.types import Prompt


@pytest.fixture(scope="module", params=SCHEMES)
def exported(request, tiny_model, tmp_path_factory) -> tuple[TinyRun, Path]:
    """A run in each scheme, and its export. qwen3: untied, q/k norms, a head size of its own."""
    directory = tmp_path_factory.mktemp(request.param)
    run = save_run(directory / "run", tiny_model("qwen3"), **SCHEMES[request.param])
    run.export(directory / "out")
    return run, directory / "out"


def test_the_files_hold_the_tensors_of_the_runs_snapshot(exported):
    run, out = exported
    stored, published = stored_tensors(out), run.snapshots[4].tensors
    assert stored.keys() == published.keys()
    assert [name for name in stored if not same_bytes(stored[name], published[name])] == []


def test_the_librarys_reader_gives_back_the_codes(exported):
    run, out = exported
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored, weights = stored_tensors(out), run.snapshots[4].weights
    assert len(weights) == 14
    for module, weight in weights.items():
        own = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")}
        if "weight_shape" in own:
            codes = unpack_from_int32(own["weight_packed"], 4, torch.Size(own["weight_shape"].tolist()))
            assert torch.equal(codes, weight.codes()), module
        elif weight.scheme.packed:
            codes = unpack_fp4_from_uint8(own["weight_packed"], *weight.shape, torch.float32)
            assert torch.equal(codes, weight.codes().float()), module
        decompressed = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(decompressed, weight.dequantize(decompressed.dtype)), module


def test_the_export_generates_what_the_run_generates(exported):
    run, out = exported
    answers = []
    for place in (run.path, out):
        opened = open_policy(resolve_target(str(place)))
        sampling = opened.sampling(1, 12, Truncation(temperature=0.0), ignore_eos=True)
        prompts = [Prompt(i, [5 + i, 70, 90 + i, 40][: i + 2], "", {}) for i in range(3)]
        rollouts = opened.engine.generate(prompts, sampling, opened.policy.version)
        answers.append(([r.token_ids for r in rollouts], torch.tensor([r.logprobs for r in rollouts])))
        opened.close()
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


def test_the_provenance_names_run_step_scheme_and_every_tensor(exported):
    run, out = exported
    provenance = json.loads((out / "qarl_export.json").read_text())
    manifest = run.snapshots[4].manifest()
    assert (provenance["run"], provenance["step"]) == (run.path.name, 4)
    assert provenance["quant"]["scheme"] == run.snapshots[4].weights["model.layers.0.mlp.up_proj"].scheme.name
    assert provenance["snapshot_sha256"] == provenance["run_snapshot_sha256"] == manifest.digest()
    assert provenance["codes_are_the_runs"]
    assert {n: r["sha256"] for n, r in provenance["tensors"].items()} == {
        n: r.sha256 for n, r in manifest.records.items()
    }


@pytest.mark.parametrize("name", ["asymmetric", "w8a8", "fp8", "fp8_block", "nvfp4a16"])
def test_transformers_loads_the_dequantized_weights(name, tiny_model, tmp_path):
    # compressed-tensors dequantizes whole blocks only, and not those of a single column of blocks
    sizes = {"hidden_size": 256, "intermediate_size": 512} if name == "fp8_block" else {}
    run = save_run(tmp_path / "run", tiny_model(**sizes), **SCHEMES[name])
    run.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits  # the first forward decompresses
    assert model.dtype == torch.bfloat16 and logits.isfinite().all()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"  # of transformers 4
    assert model.lm_head.weight is model.model.embed_tokens.weight
    published = run.snapshots[4]
    for module, weight in published.weights.items():
        assert torch.equal(model.get_submodule(module).weight, weight.dequantize(torch.bfloat16)), module
    for parameter in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(model.get_parameter(parameter), published.tensors[parameter])


def test_unpacked_int4_codes_are_the_same_codes(tiny_model, tmp_path):
    run = save_run(tmp_path / "run", tiny_model(), **SCHEMES["w4a8"])
    assert run.export(tmp_path / "out", unpacked=True).same_as_run
    stored = stored_tensors(tmp_path / "out")
    for module, weight in run.snapshots[4].weights.items():
        assert torch.equal(stored[f"{module}.weight"], weight.codes()), module
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["format"] == "int-quantized"


def test_shards_read_back_in_transformers_and_here(tiny_model, tmp_path):
    run = save_run(tmp_path / "run", tiny_model("qwen3"))
    report = run.export(tmp_path / "out", max_shard_bytes=20_000)
    files = [name for name in report.files if name.endswith(".safetensors")]
    assert len(files) > 3
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.tensor_bytes
    assert sorted(set(index["weight_map"].values())) == sorted(files)
    stored, published = stored_tensors(tmp_path / "out"), run.snapshots[4].tensors
    assert stored.keys() == published.keys() == index["weight_map"].keys()
    assert all(same_bytes(stored[name], published[name]) for name in published)
    opened = open_policy(resolve_target(str(tmp_path / "out")))
    assert opened.policy.current.manifest().digest() == run.snapshots[4].manifest().digest()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor([[5, 6, 7]]))


def test_tokenizer_template_and_generation_config_come_along(tiny_model, tmp_path):
    model = tiny_model()
    run = save_run(tmp_path / "run", model)
    run.export(tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (tmp_path / "out", model))
    assert ours.chat_template == theirs.chat_template
    assert ours("12 + 3 =").input_ids == theirs("12 + 3 =").input_ids
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.bos_token_id) == (1, 0)


def test_other_codes_than_the_runs_are_refused_and_leave_nothing(tiny_model, tmp_path):
    run = save_run(tmp_path / "run", tiny_model())
    target = resolve_target(str(run.path))
    other = replace(open_masters(target), digest="0" * 64)
    with pytest.raises(UserError, match="quantize to other codes than they did in the run"):
        writer.export_checkpoint(target, other, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=10**9, card="")
    assert entries(tmp_path) == ["run"]


def test_bytes_that_the_disk_changed_are_refused_and_leave_nothing(tiny_model, tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", tiny_model())

    def write(self, name, tensor):
        real(self, name, tensor + 1 if name == "model.norm.weight" else tensor)

    real = writer.TensorFile.write
    monkeypatch.setattr(writer.TensorFile, "write", write)
    with pytest.raises(UserError, match=r"model\.norm\.weight came back from model\.safetensors with other bytes"):
        run.export(tmp_path / "out")
    assert entries(tmp_path) == ["run"]
