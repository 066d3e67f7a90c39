"""Schemes: valid and refused arguments, without importing torch."""

import subprocess
import sys

import pytest
from compressed_tensors.utils.match import match_name
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import check_shape, is_ignored


def test_import_takes_no_torch():
    modules = "qarl_formats.scheme, qarl_formats.registry, qarl_formats.compressed"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'compressed_tensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "quant_formats"}).returncode == 0


def test_group_sizes_and_what_is_not_quantized():
    assert make_scheme("w4a16").group_size == 128 and make_scheme("w4a8", -1).num_groups(576) == 1
    assert not make_scheme("bf16").quantized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "w2a16"}, "scheme 'w2a16' is unknown; choose one of bf16, w4a16, "),
        ({"name": "w4a16", "group_size": 48}, "group_size 48: must be 32, 64, 128 or -1"),
        ({"name": "w8a8", "group_size": 64}, "group_size 64: scheme w8a8 has no groups"),
        ({"name": "w4a8", "symmetric": False}, "symmetric False: only scheme w4a16 has zero points"),
        ({"name": "w4a16", "symmetric": False, "grid": "symmetric7"}, "grid symmetric7: is for symmetric w4a16 and"),
        ({"name": "w4a16", "grid": "nf4"}, "grid 'nf4' is unknown"),
        ({"name": "w4a16", "scale_dtype": "float8"}, "scale_dtype 'float8' is unknown; choose one of bfloat16, "),
    ],
)
def test_impossible_scheme_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError) as error:
        make_scheme(**arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_shape_that_does_not_fit_names_the_layer_and_the_group_sizes_that_divide():
    with pytest.raises(ValueError, match=r"^model\.q_proj: group_size 128 does not divide its 576 .* 32 or 64 or -1"):
        check_shape(make_scheme("w4a16", 128), "model.q_proj", 576, 576)
    with pytest.raises(ValueError, match=r"^q_proj: weight \[0, 576\] is empty; add the layer to the ignore list"):
        check_shape(make_scheme("w8a8"), "q_proj", 0, 576)
    for fitting in (make_scheme("w4a16", 64), make_scheme("w4a16", -1), make_scheme("w8a8")):
        check_shape(fitting, "q_proj", 576, 576)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate", "mlp.gate_proj"])
@pytest.mark.parametrize("entry", ["lm_head", "re:.*mlp.gate$", "re:mlp", "gate"])
def test_ignore_follows_the_librarys_matching(name, entry):
    assert is_ignored(name, [entry]) == match_name(name, entry)


def test_any_entry_of_the_ignore_list_is_enough_and_a_broken_one_is_named():
    assert is_ignored("lm_head", ["re:model.*", "lm_head"])
    with pytest.raises(ValueError, match=r"^ignore entry 're:\*' is not a valid regular expression"):
        is_ignored("lm_head", ["re:*"])
