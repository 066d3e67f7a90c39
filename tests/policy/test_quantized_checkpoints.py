"""Quantized checkpoints as the start of a policy: their values, their codes in version 0, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from plain_settings import plain_config
from qarl_formats.checkpoints import CompressedTensors, checkpoint_format
from qarl_formats.checkpoints.mxfp4 import dequantize_mxfp4
from qarl_formats.weight import LowBitWeight, groups_changed
from quantized_models import FORMATS, SAME, compressed, save_format, save_quantized
from safetensors.torch import load_file, save_file

from qarl import quantize
from qarl.config import ModelConfig, QuantConfig
from qarl.config.architecture import read_config_json
from qarl.config.quant import scheme_of
from qarl.config.weight_files import check_weights
from qarl.errors import UserError
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model, model_weights
from qarl.policy.policy import Policy
from qarl.training.quantized_start import compare_start

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # whole blocks of 128 x 128


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """saved(name) -> (directory, values) of one of `FORMATS`."""
    made = {}

    def make(name: str):
        if name not in made:
            source = tiny_model("qwen3", **WIDE) if "fp8" in name else tiny_model("llama")
            directory = tmp_path_factory.mktemp("quantized") / "model"
            made[name] = directory, save_format(source, directory, name)
        return made[name]

    return make


def policy_of(directory: Path, quant: QuantConfig) -> Policy:
    model = load_model(ModelConfig(path=str(directory)), quant)
    return Policy(model, scheme_of(quant), quant, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", FORMATS)
def test_masters_are_the_dequantized_values(saved, name):
    directory, values = saved(name)
    model = ModelConfig(path=str(directory))
    check_weights(model, read_config_json(directory / "config.json"))
    loaded = dict(load_model(model).named_parameters())
    for parameter, master in loaded.items():
        assert master.dtype == torch.float32
        want = values[parameter]
        # compressed-tensors dequantizes in the dtype of the scales
        close = 0.0 if not name.startswith("compressed") else 2.0**-8
        torch.testing.assert_close(master.detach(), want, rtol=close, atol=0)
    assert loaded.keys() == values.keys() - {"lm_head.weight"} | (loaded.keys() & {"lm_head.weight"})


@pytest.mark.parametrize("name", SAME)
def test_version_0_has_the_codes_and_scales_of_the_file(saved, name):
    directory, values = saved(name)
    quant = QuantConfig(**SAME[name])
    snapshot, weights = policy_of(directory, quant).current, model_weights(ModelConfig(path=str(directory)))
    held = load_file(directory / "model.safetensors")
    changed = groups = 0
    for module in weights.quantized:
        stored = weights.stored(f"{module}.weight")
        assert isinstance(stored, LowBitWeight)
        if name.startswith("compressed"):  # what the reader made scheme tensors of is what the file holds
            own = {suffix: held[f"{module}.{suffix}"] for suffix in stored.tensors}
            assert all(torch.equal(own[suffix].float(), tensor.float()) for suffix, tensor in stored.tensors.items())
        if name != "fine-grained fp8":
            dequantized = stored.dequantize(torch.float32)
            torch.testing.assert_close(dequantized, values[f"{module}.weight"], rtol=2.0**-8, atol=0)
        differ, count = groups_changed(stored, snapshot.weight(module))
        changed, groups = changed + differ, groups + count
        if not differ:
            for suffix, tensor in stored.tensors.items():
                now = snapshot.weight(module).tensors[suffix]
                assert torch.equal(
                    now.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
                )
    if name == "fine-grained fp8":  # scales are 1 / (448 / absmax): about one in nine is not absmax / 448 of any master
        assert 0 < changed < 0.3 * groups
    else:
        assert changed == 0


@pytest.mark.parametrize("name", ["compressed-tensors nvfp4a16", "gptq", "fine-grained fp8"])
def test_rows_are_those_of_the_whole_weight(saved, name):
    directory, _ = saved(name)
    for quant in (QuantConfig(**SAME[name]), QuantConfig(scheme="w8a8")):
        weights = model_weights(ModelConfig(path=str(directory)), quant)
        for module in list(weights.quantized)[:3]:
            whole = weights.read(f"{module}.weight")
            n = len(whole)
            for rows in (range(0, 8), range(8, n), range(3, 5), range(n, n), range(0, n)):
                assert torch.equal(weights.read(f"{module}.weight", rows), whole[rows.start : rows.stop])


def test_another_scheme_starts_from_the_dequantized_values(saved):
    directory, _ = saved("compressed-tensors w4a16")
    model = dict(load_model(ModelConfig(path=str(directory)), QuantConfig(scheme="w8a8")).named_parameters())
    plain = dict(load_model(ModelConfig(path=str(directory))).named_parameters())
    assert all(torch.equal(model[name], plain[name]) for name in plain)
    moved = dict(
        load_model(ModelConfig(path=str(directory)), QuantConfig(**SAME["compressed-tensors w4a16"])).named_parameters()
    )
    assert not torch.equal(moved["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("name", ["compressed-tensors w4a8", "awq", "fine-grained fp8"])
def test_a_checkpoint_opens_in_its_own_scheme_with_its_own_tensors(saved, name):
    directory, _ = saved(name)
    target = resolve_target(str(directory))
    assert target.kind == "export"
    wanted = QuantConfig(**SAME[name])
    assert scheme_of(target.quant) == scheme_of(wanted)
    opened = open_policy(target, device="cpu")
    weights = model_weights(ModelConfig(path=str(directory)))
    for module in weights.quantized:
        assert groups_changed(weights.stored(f"{module}.weight"), opened.policy.current.weight(module))[0] == 0
    opened.close()


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_quantize_converts_a_checkpoint_without_changing_its_codes(saved, tmp_path, name):
    directory, _ = saved(name)
    quantize(directory, tmp_path / "out", "w4a16", group_size=32, symmetric=name == "gptq")
    ours, theirs = (model_weights(ModelConfig(path=str(path))) for path in (tmp_path / "out", directory))
    assert isinstance(ours.format, CompressedTensors)
    for module in theirs.quantized:
        assert groups_changed(theirs.stored(f"{module}.weight"), ours.stored(f"{module}.weight"))[0] == 0


@pytest.mark.parametrize("name", ["gptq activation order", "mxfp4"])
def test_a_checkpoint_without_a_scheme_opens_as_values(saved, name):
    directory, values = saved(name)
    target = resolve_target(str(directory))
    assert (target.kind, target.quant.scheme) == ("model", "bf16")
    opened = open_policy(target, device="cpu")
    module = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(opened.policy.current.tensors[module], values[module].bfloat16())
    opened.close()


def test_activation_order_needs_a_scheme_to_open(saved):
    directory, _ = saved("compressed-tensors activation order")
    with pytest.raises(UserError, match=r"no scheme supports its groups \(activation order\); pass --scheme"):
        open_policy(resolve_target(str(directory)), device="cpu")
    opened = open_policy(resolve_target(str(directory), quant={"scheme": "w8a8"}), device="cpu")
    assert opened.policy.current.weights
    opened.close()


# --- the line at the start of a run ---


def _line(directory: Path, **quant) -> str | None:
    config = plain_config(model={"path": str(directory)}, quant=quant)
    return compare_start(config, policy_of(directory, config.quant).current)


def test_the_start_says_how_version_0_compares(saved, tiny_model):
    directory, _ = saved("gptq")
    assert _line(directory, **SAME["gptq"]) == (
        "version 0 has the codes and scales of the quantized checkpoint (gptq, 14 layers)"
    )
    assert _line(directory, scheme="w8a8") == (
        "the model is quantized (gptq); master weights are its dequantized values; to start from its codes, set quant: "
        "{scheme: w4a16, group_size: 32, scale_dtype: float16}"
    )
    assert _line(saved("mxfp4")[0], scheme="w8a8").endswith("; master weights are its dequantized values")
    assert "symmetric: false, scale_dtype: float16}" in _line(saved("awq")[0], scheme="w4a16", group_size=32)
    assert _line(tiny_model("llama"), scheme="w8a8") is None


# --- refusals ---

REFUSED = {
    "method": (
        {"quant_method": "hqq"},
        "quant_method 'hqq' cannot be read; only compressed-tensors, fp8, awq, gptq, mxfp4",
    ),
    "static": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        "activation_scheme 'static' cannot be read; only 'dynamic' can",
    ),
    "bits": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits 3 cannot be read; only 2 or 4 or 8 can"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_cannot_be_read_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_format(config)


def _changed(saved_model: Path, tmp_path: Path, change) -> ModelConfig:
    directory = shutil.copytree(saved_model, tmp_path / "changed")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return ModelConfig(path=str(directory))


UP = "model.layers.0.mlp.up_proj"
DAMAGED = {
    "missing scales": ("gptq", lambda t: t.pop(f"{UP}.scales"), rf"1 missing \({UP}.scales\)"),
    "another type": ("gptq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].float()}), "must be int32"),
}


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_wrong_tensors_are_refused_before_anything_is_read(saved, tmp_path, name, change, message):
    model = _changed(saved(name)[0], tmp_path, change)
    for check in (
        lambda: check_weights(model, read_config_json(Path(model.path) / "config.json")),
        lambda: load_model(model),
    ):
        with pytest.raises(UserError, match=message) as error:
            check()
        assert model.path in str(error.value) and "\n" not in str(error.value)


def test_a_group_that_does_not_exist_is_refused(saved, tmp_path):
    tensor = f"{UP}.g_idx"
    model = _changed(saved("gptq")[0], tmp_path, lambda tensors: tensors[tensor].fill_(99))
    with pytest.raises(UserError, match=f"model.safetensors: {tensor} .*; restore it"):
        load_model(model)


def test_static_activation_order_is_column_order(tiny_model, tmp_path):
    """-1 in weight_g_idx means that the groups are in the order of the columns."""
    writer, config = compressed("w4a16")

    def with_order(module, weight, partners):
        stored, values = writer(module, weight, partners)
        return stored | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, values

    config["config_groups"]["g"]["weights"]["actorder"] = "static"
    save_quantized(tiny_model("llama"), tmp_path / "model", with_order, config)
    assert "14 layers" in _line(tmp_path / "model", **SAME["compressed-tensors w4a16"])


def test_mxfp4_of_experts_is_what_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), generator=generator, dtype=torch.uint8)
    library = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    values = dequantize_mxfp4(blocks, scales)
    assert values.shape == (3, 8, 64)
    assert torch.equal(values, library if library.shape == values.shape else library.transpose(1, 2))
    scales[0, 0, 0] = 255
    assert dequantize_mxfp4(blocks, scales).isnan().sum() == 32


def test_a_model_with_experts_reads_each_of_them(tiny_model, tmp_path):
    values = save_format(tiny_model("qwen3_moe", hidden_size=64), tmp_path / "model", "gptq")
    loaded = dict(load_model(ModelConfig(path=str(tmp_path / "model"))).named_parameters())
    experts = [name for name in loaded if ".experts." in name]
    assert experts
    assert all(torch.equal(loaded[name], values[name]) for name in loaded)
