"""Comparison of rounding to nearest, GPTQ and AWQ, and `qarl quantize --method`."""

import json

import pytest
from qarl_formats.registry import make_scheme
from safetensors.torch import load_file

from qarl import api, cli
from qarl.comparison.offline.offline_page import comparison_charts
from qarl.data.calibration import calibration_sequences
from qarl.errors import UserError
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_tokenizer
from qarl.policy.starting_codes import starting_masters

TEXT = "".join(f"{n} times {n + 1} is {n * (n + 1)}. The next one is harder: try it.\n" for n in range(60))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


def members_in(out):
    return {member["name"]: member for member in json.loads((out / "comparison.json").read_text())["members"]}


def test_each_scheme_has_a_row_per_method_it_supports(tiny_model, tmp_path, compare, text, capsys):
    given = {"methods": ["rtn", "gptq", "awq"], "calibration": text}
    code, _ = compare(tiny_model(), ["bf16", "w4a16", "w8a8"], **given)
    rows = members_in(tmp_path / "out")
    assert code == 0 and list(rows) == ["bf16", "w4a16", "w4a16-gptq", "w4a16-awq", "w8a8", "w8a8-gptq"]
    assert all(row["state"] == "finished" for row in rows.values())
    assert rows["w4a16-gptq"]["kl"]["mean"] != rows["w4a16"]["kl"]["mean"] != rows["w4a16-awq"]["kl"]["mean"]
    assert "weights_w4a16-gptq" in comparison_charts(list(rows.values()))
    assert "w4a16-gptq g32" in (tmp_path / "out" / "comparison.html").read_text()
    assert "w4a16-awq g32" in capsys.readouterr().out
    # GPTQ minimizes the error of outputs, so its weights are further off. AWQ's errors are of the scaled weights.
    rtn, gptq, awq = (rows[name]["weight_error"][0]["relative"] for name in ("w4a16", "w4a16-gptq", "w4a16-awq"))
    assert rtn < gptq < 2 * rtn and 0.5 * rtn < awq < 2 * rtn


def test_another_calibration_text_is_another_comparison(tiny_model, compare, text):
    given = {"methods": ["gptq"], "calibration": text}
    compare(tiny_model(), ["w4a16"], **given)
    text.write_text(TEXT[::-1])
    with pytest.raises(UserError, match=r"holds another comparison \(calibration_sha256 was"):
        compare(tiny_model(), ["w4a16"], **given)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantized_model_has_the_codes_with_which_a_run_starts(tiny_model, tmp_path, text, method):
    given = {"group_size": 32, "method": method, "calibration": text, "calibration_samples": 6}
    out = api.quantize(tiny_model(), tmp_path / "out", "w4a16", **given).path
    written = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert {"gptq": "with GPTQ", "awq": "with AWQ"}[method] in (out / "README.md").read_text()

    target = resolve_target(str(tiny_model()), quant={"scheme": "w4a16", "group_size": 32})
    masters, scheme = open_masters(target), make_scheme("w4a16", 32)
    calibration = target.quant.calibration.model_copy(update={"source": str(text), "samples": 6})
    sequences = calibration_sequences(calibration, load_tokenizer(target.model), 512)
    found = starting_masters(open_policy(target, device="cpu").policy, method, sequences, masters.read)
    for name in (f"model.layers.1.{leaf}" for leaf in ("self_attn.q_proj", "mlp.down_proj")):
        expected, _ = scheme.quantize(found[f"{name}.weight"])
        assert (written[f"{name}.weight_packed"] == expected["weight_packed"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "fp8", "--method", "gptq"], "is for w4a16, w8a8, w4a8, nvfp4a16, not fp8; use rtn"),
        (["--scheme", "w4a16", "--calibration", "README.md"], "--calibration: rounding to nearest does not calibrate"),
        (["--scheme", "w4a16", "--group-size", "32", "--method", "gptq", "--calibration", "none.txt"], "none.txt"),
    ],
)
def test_quantize_refuses_in_one_line(tiny_model, tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["quantize", str(tiny_model()), str(tmp_path / "out"), *options])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and not (tmp_path / "out").exists()


def test_a_mixture_of_experts_cannot_be_calibrated(tiny_model, tmp_path, text):
    with pytest.raises(UserError, match="use rtn for a mixture of experts"):
        api.quantize(tiny_model("olmoe"), tmp_path / "out", "w4a16", group_size=32, method="gptq", calibration=text)
