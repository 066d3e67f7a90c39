"""Schemes: what is valid, what is refused, and that knowing it takes no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from compressed_tensors.utils.match import match_name
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import check_shape, is_ignored


@pytest.mark.parametrize("module", ["qarl_formats.scheme", "qarl_formats.registry", "qarl_formats.compressed"])
def test_import_takes_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'compressed_tensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "quant_formats"}).returncode == 0


def test_w4_group_size_defaults_to_128():
    assert make_scheme("w4a16").group_size == 128


def test_group_size_minus_1_is_one_group_a_row():
    assert make_scheme("w4a8", -1).num_groups(576) == 1


def test_bf16_is_not_quantized():
    assert not make_scheme("bf16").quantized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "w2a16"},
            "scheme 'w2a16' is unknown; choose one of bf16, w4a16, w8a8, fp8, w4a8, fp8_block, nvfp4a16",
        ),
        ({"name": "w4a16", "group_size": 48}, "group_size 48 is not supported"),
        ({"name": "w8a8", "group_size": 64}, "group_size 64 does not apply to scheme w8a8"),
        ({"name": "fp8", "group_size": -1}, "group_size -1 does not apply to scheme fp8"),
        ({"name": "bf16", "group_size": 64}, "group_size 64 does not apply to scheme bf16"),
        ({"name": "w4a8", "symmetric": False}, "symmetric false does not apply to scheme w4a8"),
        ({"name": "w8a8", "grid": "symmetric7"}, "grid symmetric7 needs symmetric w4a16 or w4a8, not w8a8"),
        (
            {"name": "w4a16", "symmetric": False, "grid": "symmetric7"},
            "grid symmetric7 needs symmetric w4a16 or w4a8, not w4a16 with symmetric false",
        ),
        ({"name": "w4a16", "grid": "nf4"}, "grid 'nf4' is unknown"),
        ({"name": "w4a16", "scale_dtype": "float8"}, "scale_dtype 'float8' is unknown"),
    ],
)
def test_impossible_scheme_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError) as error:
        make_scheme(**arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_shape_error_names_the_layer_and_the_group_sizes_that_divide():
    with pytest.raises(ValueError) as error:
        check_shape(make_scheme("w4a16", 128), "model.layers.0.self_attn.q_proj", 576, 576)
    assert str(error.value) == (
        "model.layers.0.self_attn.q_proj: group_size 128 does not divide its 576 input features; "
        "use 32 or 64 or -1 (one group a row), or add the layer to the ignore list"
    )


@pytest.mark.parametrize("scheme", [make_scheme("w4a16", 64), make_scheme("w4a16", -1), make_scheme("w8a8")])
def test_shape_that_fits_is_accepted(scheme):
    check_shape(scheme, "q_proj", 576, 576)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "mlp.gate"])
@pytest.mark.parametrize("entry", ["lm_head", "re:.*mlp.gate$", "re:mlp", "re:.*gate", "gate", "re:lm"])
def test_ignore_follows_the_librarys_matching(name, entry):
    assert is_ignored(name, [entry]) == match_name(name, entry)


def test_any_entry_of_the_ignore_list_is_enough():
    assert is_ignored("lm_head", ["re:model.*", "lm_head"])


def test_broken_ignore_regex_is_named():
    with pytest.raises(ValueError, match=r"^ignore entry 're:\*' is not a valid regular expression"):
        is_ignored("lm_head", ["re:*"])
