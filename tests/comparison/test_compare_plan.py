"""The members of a comparison, refusals before anything starts, and reuse of finished runs."""

from pathlib import Path

import pytest
from comparisons import record_of, settings_of, write_config, write_model
from qarl_formats.registry import scheme_names

from qarl.comparison.plan import Axes, find_finished, parse_axes, plan
from qarl.config import Config
from qarl.errors import UserError


def test_members_are_schemes_by_learners_by_seeds_in_directories_of_their_own(tmp_path):
    axes = parse_axes("w4a16, fp8", "aligned,full_precision", "0,7")
    members = plan(str(write_config(tmp_path)), [], axes, tmp_path / "out")
    assert [member.name for member in members] == [
        f"{scheme}-{learner}-seed{seed}"
        for scheme in ("w4a16", "fp8")
        for learner in ("aligned", "full_precision")
        for seed in (0, 7)
    ]
    for member in members:
        quant, train = member.config.quant, member.config.train
        assert (quant.scheme, quant.learner, train.seed) == (member.scheme, member.learner, member.seed)
        assert Path(train.run_dir) == member.run_dir == tmp_path / "out/runs" / member.name


def test_settings_that_only_another_scheme_supports_are_dropped(tmp_path):
    config = write_config(tmp_path, quant={"scheme": "w4a16", "symmetric": False, "scale_dtype": "float32"})
    schemes = ["w4a16", "w4a8", "w8a8", "bf16"]
    w4a16, w4a8, w8a8, bf16 = (m.config.quant for m in plan(str(config), [], Axes(schemes), tmp_path / "out"))
    assert (w4a16.group_size, w4a16.symmetric) == (32, False)
    assert (w4a8.group_size, w4a8.symmetric) == (32, True)
    assert (w8a8.group_size, w8a8.symmetric) == (bf16.group_size, bf16.symmetric) == (None, True)
    assert {w4a16.scale_dtype, w4a8.scale_dtype, w8a8.scale_dtype, bf16.scale_dtype} == {"float32"}


DEQUANTIZED = {"scheme": "w8a8", "group_size": None, "ste_input": "dequantized"}


@pytest.mark.parametrize(
    ("given", "scheme", "learner", "kept"),
    [
        (DEQUANTIZED, "fp8", "aligned", {"ste_input"}),
        (DEQUANTIZED, "w8a8", "full_precision", set()),
        ({"scheme": "w4a16", "grid": "symmetric7"}, "w4a8", "aligned", {"grid"}),
    ],
)
def test_a_setting_is_kept_if_the_member_supports_it(tmp_path, given, scheme, learner, kept):
    config = write_config(tmp_path, quant=given)
    write_model(tmp_path / "model", hidden_size=128)  # so that the default group fits
    (member,) = plan(str(config), [], Axes([scheme], [learner]), tmp_path / "out")
    of = member.config.quant
    assert {key for key in ("ste_input", "grid") if key in given and getattr(of, key) == given[key]} == kept


def test_members_that_cannot_run_are_skipped_or_refused_with_the_reason(tmp_path):
    axes = Axes(["bf16", "w4a16"], ["fake_quant"])
    skipped, other = plan(str(write_config(tmp_path)), [], axes, tmp_path / "out")
    assert (skipped.state, skipped.config) == ("skipped", None) and "nothing to quantize" in skipped.reason
    assert other.state == "waiting"
    with pytest.raises(UserError, match="bf16 has nothing to quantize"):
        plan(str(write_config(tmp_path)), [], Axes(["bf16"], ["fake_quant"]), tmp_path / "out")
    members = plan(str(write_config(tmp_path)), ["quant.group_size=128"], Axes(["w8a8", "w4a16"]), tmp_path / "out")
    assert [member.state for member in members] == ["waiting", "refused"]
    assert "group_size 128 does not divide" in members[1].reason
    config = write_config(tmp_path, train={"stepz": 3})
    line = r"^\S+small\.yaml: train\.stepz = 3: unknown key; did you mean train\.steps\?$"
    with pytest.raises(UserError, match=line):
        plan(str(config), [], Axes(["w8a8", "w4a16"], None, [0, 1]), tmp_path / "out")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((None, None, None), "nothing to vary"),
        (("w4a16,w3a3", None, None), f"--schemes: 'w3a3' is unknown; choose from {', '.join(scheme_names())}"),
        (("bf16,,fp8", None, None), "--schemes: 'bf16,,fp8' has an empty entry"),
        (("fp8,fp8", None, None), "--schemes: fp8 is given twice"),
        ((None, None, "0,-1"), "--seeds: '-1' is not a valid seed"),
    ],
)
def test_a_bad_axis_is_one_line(axes, message):
    with pytest.raises(UserError) as caught:
        parse_axes(*axes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "steps", "reused"),
    [
        ({}, 4, True),
        ({"logging": {"samples": 1}}, 4, True),  # changes no number
        ({}, 3, False),  # stopped
        ({"optim": {"lr": 1e-3}}, 4, False),
        ({"train": {"steps": 3}}, 3, False),  # finished, of fewer steps
    ],
)
def test_a_run_is_reused_if_it_is_finished_and_has_the_same_configuration(tmp_path, changes, steps, reused):
    members = plan(str(write_config(tmp_path)), [], Axes(["w4a16"]), tmp_path / "out")
    there = Config.model_validate(settings_of(write_model(tmp_path / "model"), **changes))
    find_finished(members, [record_of(there, tmp_path / "elsewhere", steps)])
    assert members[0].reused == reused
    assert members[0].state == ("finished" if reused else "waiting")
    assert (members[0].run_dir == tmp_path / "elsewhere") == reused
