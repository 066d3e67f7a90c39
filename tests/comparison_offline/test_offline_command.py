"""`compare_offline`: its outputs, what it reuses, and what it refuses."""

import json
import os
import shutil

import pytest
from qarl_formats.registry import scheme_names

from qarl.comparison.offline import members
from qarl.comparison.offline.offline_page import comparison_charts
from qarl.errors import UserError

ALL = list(scheme_names())


def result_in(out):
    return json.loads((out / "comparison.json").read_text())


def test_all_schemes_give_a_table_a_page_and_plots(tiny_model, tmp_path, compare, capsys):
    code, _ = compare(tiny_model(), ALL)
    out = tmp_path / "out"
    result = result_in(out)
    assert code == 0
    assert (result["format_version"], result["kind"]) == (1, "offline")
    assert [(m["name"], m["state"]) for m in result["members"]] == [(name, "finished") for name in ALL]
    bf16, w4a16 = result["members"][:2]
    assert bf16["kl"]["max"] == 0.0
    assert bf16["perplexity_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert w4a16["kl"]["mean"] > 0
    assert w4a16["checkpoint_ratio"] < 1
    page = (out / "comparison.html").read_text()
    assert all(name in page for name in ALL)
    plots = {file.name for file in (out / "plots").iterdir()}
    assert plots >= {"kl.png", "perplexity.png", "size.png", "decode.png", "weights_w4a16.png"}
    assert "w4a16 g32" in capsys.readouterr().out


def test_measured_schemes_are_reused_unless_damaged_and_others_join_them(tiny_model, tmp_path, compare, monkeypatch):
    compare(tiny_model(), ["bf16", "fp8"])
    before = result_in(tmp_path / "out")["members"]
    with monkeypatch.context() as patch:
        patch.setattr(members, "open_policy", None)
        code, lines = compare(tiny_model(), ["bf16", "fp8"])
    assert code == 0
    assert [line for line in lines if "before" in line] == ["bf16: measured before", "fp8: measured before"]
    assert result_in(tmp_path / "out")["members"] == before
    with pytest.raises(UserError, match=r"holds another comparison \(max_tokens was 192, is 96\)"):
        compare(tiny_model(), ["fp8"], max_tokens=96)
    (tmp_path / "out" / "members" / "bf16.json").write_text("{")
    code, lines = compare(tiny_model(), ["bf16", "fp8", "w8a8"])
    assert code == 0 and any(line.startswith("w8a8: KL") for line in lines)
    assert "fp8: measured before" in lines and "bf16: measured before" not in lines


def test_an_interrupted_comparison_goes_on_with_what_is_missing(tiny_model, tmp_path, compare, monkeypatch):
    speed = members.engine_speed

    def interrupt(opened, *arguments):
        if opened.target.quant.scheme == "fp8":
            raise KeyboardInterrupt
        return speed(opened, *arguments)

    monkeypatch.setattr(members, "engine_speed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny_model(), ["w8a8", "fp8"])
    states = [(m["name"], m["state"]) for m in result_in(tmp_path / "out")["members"]]
    assert states == [("w8a8", "finished"), ("fp8", "pending")]
    monkeypatch.setattr(members, "engine_speed", speed)
    code, lines = compare(tiny_model(), ["w8a8", "fp8"])
    assert code == 0
    assert "w8a8: measured before" in lines
    assert not [line for line in lines if line.startswith("bf16: the reference")]  # kept as well


def test_a_scheme_that_does_not_fit_is_a_row_with_the_reason(tiny_model, tmp_path, compare, capsys):
    path = tiny_model(hidden_size=96, num_attention_heads=4)
    code, _ = compare(path, ["w4a16", "fp8"], group_size=64)
    w4a16, fp8 = result_in(tmp_path / "out")["members"]
    assert code == 1 and (w4a16["state"], fp8["state"]) == ("failed", "finished")
    assert "--group-size: model.layers.0" in w4a16["reason"] and "use 32 or -1" in w4a16["reason"]
    assert w4a16["reason"] in " ".join(capsys.readouterr().out.split())
    assert w4a16["reason"] in (tmp_path / "out" / "comparison.html").read_text()
    code, lines = compare(path, ["w4a16", "fp8"], group_size=64)
    assert code == 1 and any(line.startswith("w4a16: failed") for line in lines)  # tried again
    assert comparison_charts([w4a16]) == {}


def test_a_changed_model_file_is_noticed_and_a_touched_one_is_accepted(tiny_model, tmp_path, compare):
    """The file's size and time stay, so only a digest notices the change."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    compare(model, ["fp8"])
    edits = {"tokenizer.json": (b"\n", b" "), "model.safetensors": (b"0", b"\1")}
    for name, (old, new) in edits.items():
        file = model / name
        content, status = file.read_bytes(), file.stat()
        place = content.rindex(old)
        edited = content[:place] + new + content[place + len(old) :]
        assert edited != content and len(edited) == len(content)
        file.write_bytes(edited)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(UserError, match="holds another comparison \\(weights was"):
            compare(model, ["fp8"])
        file.write_bytes(content)
    assert "fp8: measured before" in compare(model, ["fp8"])[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n\t", "is empty"), (b"too short", "has 9 tokens, less than one window of 48"), (None, "no such file")],
)
def test_a_text_that_cannot_be_used_is_refused(tiny_model, tmp_path, compare, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        compare(tiny_model(), ["w4a16"], text=file)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
