"""Names, shapes and config.json against the compressed-tensors library."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from qarl_formats.compressed import from_state_dict, parse_quantization_config, quantization_config, to_state_dict
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight

N, K = 20, 64
SCHEMES = {
    "W4A16": make_scheme("w4a16", 128),
    "W4A16_ASYM": make_scheme("w4a16", 128, symmetric=False),
    "W4A8": make_scheme("w4a8", 128),
    "W8A8": make_scheme("w8a8"),
    "FP8_DYNAMIC": make_scheme("fp8"),
    "FP8_BLOCK": make_scheme("fp8_block"),
    "NVFP4A16": make_scheme("nvfp4a16"),
}
STORED = [
    make_scheme("w4a16", 32),
    make_scheme("w4a16", -1),
    make_scheme("w4a16", 32, symmetric=False, scale_dtype="float16"),
    make_scheme("w4a16", -1, symmetric=False),
    make_scheme("w8a8", scale_dtype="float32"),
    make_scheme("fp8"),
    make_scheme("w4a8", 32),
    make_scheme("fp8_block"),
    make_scheme("fp8_block", scale_dtype="float32"),
    make_scheme("nvfp4a16"),
]


@pytest.mark.parametrize("preset", SCHEMES)
def test_config_is_the_librarys_preset(preset):
    group = quantization_config(SCHEMES[preset], ["lm_head"])["config_groups"]["group_0"]
    expected = preset_name_to_scheme(preset, ["Linear"])
    assert QuantizationScheme.model_validate({**group, "format": None}) == expected


@pytest.mark.parametrize("order", ["static", "weight"])
def test_gptq_with_static_activation_ordering_is_read(order):
    """The default of llm-compressor's GPTQModifier; its files have no weight_g_idx."""
    config = quantization_config(make_scheme("w4a16", 32), ["lm_head"])
    config["config_groups"]["group_0"]["weights"]["actorder"] = order
    QuantizationConfig.model_validate(config)
    assert parse_quantization_config(config) == (make_scheme("w4a16", 32), ["lm_head"])


@pytest.mark.parametrize(("unpacked", "stored"), [(False, "pack-quantized"), (True, "int-quantized")])
@pytest.mark.parametrize("name", ["w4a16", "w4a8"])
def test_int4_config_says_how_codes_are_packed(name, unpacked, stored):
    config = quantization_config(make_scheme(name, 32), [], unpacked=unpacked)
    assert config["format"] == config["config_groups"]["group_0"]["format"] == stored


@pytest.mark.parametrize("scheme", STORED)
def test_specs_describe_the_tensors_that_quantizing_stores(scheme):
    tensors = quantize_weight(torch.randn(N, K), scheme, "w").tensors
    stored = {s: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes) for s, t in tensors.items()}
    specs = scheme.tensor_specs(N, K)
    assert {suffix: (spec.shape, spec.dtype, spec.nbytes) for suffix, spec in specs.items()} == stored


@pytest.mark.parametrize("scheme", STORED)
def test_state_dict_gives_back_the_same_tensors_and_a_missing_one_is_named(scheme):
    quantized = quantize_weight(torch.randn(N, K), scheme, "w")
    tensors = to_state_dict("q_proj", quantized)
    assert list(tensors) == [f"q_proj.{suffix}" for suffix in quantized.tensors]
    loaded = from_state_dict("q_proj", tensors, scheme, (N, K))
    assert loaded.shape == (N, K)
    assert all(loaded.tensors[suffix] is tensor for suffix, tensor in quantized.tensors.items())
    for name in tensors:
        with pytest.raises(ValueError, match=rf"^{name}: missing"):
            from_state_dict("q_proj", {key: tensors[key] for key in tensors if key != name}, scheme, (N, K))


def test_a_tensor_of_another_dtype_or_shape_is_named():
    scheme = make_scheme("w4a16", 32)
    tensors = to_state_dict("q_proj", quantize_weight(torch.randn(N, K), scheme, "w"))
    for bad, got in ((torch.zeros(N, 2), r"float32 \[20, 2\]"), (torch.zeros(N, 1).bfloat16(), r"bfloat16 \[20, 1\]")):
        with pytest.raises(ValueError, match=rf"q_proj\.weight_scale: {got}, but .* w4a16 stores bfloat16 \[20, 2\]"):
            from_state_dict("q_proj", {**tensors, "q_proj.weight_scale": bad}, scheme, (N, K))


@pytest.mark.parametrize("scheme", [make_scheme("w4a8", 32), make_scheme("w4a8", -1), make_scheme("w4a16", 32)])
def test_unpacked_int4_gives_back_the_same_codes_and_refuses_others(scheme):
    quantized = quantize_weight(torch.randn(N, K), scheme, "w")
    stored = to_state_dict("q_proj", quantized, unpacked=True)
    specs = scheme.tensor_specs(N, K, unpacked=True)
    assert {f"q_proj.{suffix}" for suffix in specs} == stored.keys()
    assert stored["q_proj.weight"].dtype == torch.int8 and tuple(stored["q_proj.weight"].shape) == (N, K)
    loaded = from_state_dict("q_proj", stored, scheme, (N, K))
    assert loaded.shape == (N, K)
    assert all(torch.equal(loaded.tensors[suffix], tensor) for suffix, tensor in quantized.tensors.items())
    stored["q_proj.weight"][3, 5] = 8
    with pytest.raises(ValueError, match=r"q_proj\.weight: not int4 codes"):
        from_state_dict("q_proj", stored, scheme, (N, K))


@pytest.mark.parametrize("scheme", [*STORED, make_scheme("w4a8", -1), make_scheme("w4a16", 64)])
def test_config_parses_back_to_its_scheme(scheme):
    parsed, ignore = parse_quantization_config(quantization_config(scheme, ["lm_head", "re:.*gate$"]))
    assert ignore == ["lm_head", "re:.*gate$"]
    assert parsed == make_scheme(
        scheme.name, (scheme.group_size or -1) if scheme.group_sizes else None, scheme.symmetric
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "method 'gptq'"),
        ({"config_groups": {}}, "one group"),
        ({"weights": {"num_bits": 3}}, "3-bit int weights with unquantized activations"),
        ({"weights": {"strategy": "tensor"}}, "weight strategy 'tensor'"),
        ({"weights": {"actorder": "group"}}, "actorder group"),
        ({"input_activations": {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}}, "per token"),
    ],
)
def test_config_that_no_scheme_stands_for_is_refused(change, message):
    config = quantization_config(make_scheme("w4a16", 32), ["lm_head"])
    group = config["config_groups"]["group_0"]
    for key, value in change.items():
        if key == "weights":
            group["weights"] |= value
        elif key == "input_activations":
            group[key] = value
        else:
            config[key] = value
    with pytest.raises(ValueError, match=message):
        parse_quantization_config(config)
