"""A profiled step: its trace, its page, that results stay the same, and configurations that are rejected."""

import gzip
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from run_faults import repeatable
from tiny_runs import settings, write_config

from qarl.training.flops import forward_flops
from qarl.training.profile_page import PARTS, on_device, page


def kernel(name: str, ts: float, dur: float, correlation: int, moved: int | None = None) -> dict:
    arguments = {"correlation": correlation} | ({} if moved is None else {"bytes": moved})
    cat = "kernel" if moved is None else "gpu_memcpy"
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": arguments}


def launch(ts: float, correlation: int, cat: str = "cuda_runtime", tid: int = 1) -> dict:
    return {"cat": cat, "name": "launch", "ts": ts, "dur": 1, "tid": tid, "args": {"correlation": correlation}}


def span(name: str, ts: float, dur: float) -> dict:
    return {"cat": "user_annotation", "name": f"qarl/{name}", "ts": ts, "dur": dur, "args": {}}


# A forward of 10 us and a backward of 20 us; the kernel that the forward launches runs in the backward's time, and the
# backward's launch comes from autograd's own thread.
EVENTS = [
    span("learner", 0, 100),
    span("forward", 10, 10),
    span("backward", 20, 20),
    span("publish", 100, 50),
    span("forward", 21, 5) | {"cat": "gpu_user_annotation"},
    launch(12, 1),
    kernel("gemm", 21, 5, 1),
    launch(30, 2, "cuda_driver", tid=2),
    kernel("gemm", 31, 15, 2),
    launch(60, 3),
    kernel("other", 61, 2, 3),
    launch(120, 4),
    kernel("Memcpy DtoD", 121, 4, 4, moved=8000),
]


def test_device_time_belongs_to_where_it_was_launched():
    found = on_device(EVENTS)
    seconds = {name: round(share.seconds * 1e6) for name, share in found.phases.items()}
    assert seconds == {"forward": 5, "backward": 15, "learner": 22, "publish": 4}
    assert {name: (round(s.seconds * 1e6), s.calls) for name, s in found.kernels.items()} == {
        "gemm": (20, 2),
        "other": (2, 1),
        "Memcpy DtoD": (4, 1),
    }


def test_the_page_says_rates_of_wall_and_device_time():
    seconds = {"rollout": 2e-4, "reward": 1e-6, "learner": 1e-4, "publish": 5e-5}
    text = page(EVENTS, 3, "H1", seconds, {"forward": 1e7, "rollout": 4e8}, {"publish": 8000.0})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    table = {row[0]: row[1:] for row in rows}
    assert table["rollout"] == ["0.000", "", "", "0.0004", "2", "", ""]
    assert table["- forward"][3:6] == ["1e-05", "1", "2"]  # 10 MFLOP in 10 us of wall, 5 us of device time
    assert table["publish"][-1] == "2" and table["`Memcpy DtoD`"][-1] == "2"  # 8 kB in 4 us
    assert table["`gemm`"] == ["0.02", "76.9%", "2", ""]
    assert f"- {PARTS['snapshot']}" not in table


def test_flops_count_what_a_forward_multiplies():
    shape = SimpleNamespace(
        multiplied_parameters=1000, vocab_size=10, hidden_size=4, num_layers=2, num_heads=3, head_dim=5
    )
    # The prompt once, of each response all tokens but the last: 3 + 1 + 2 run, 5 are predicted.
    pairs = (1 + 2 + 3) + 4 + (4 + 5)
    expected = 2 * 1000 * 6 + 2 * 10 * 4 * 5 + 4 * 2 * 3 * 5 * pairs
    assert forward_flops(shape, [[1, 2, 3]] * 2, [[4, 5], [6, 7, 8]]) == expected
    apart = forward_flops(shape, [[1, 2, 3], [1, 2, 9]], [[4, 5], [6, 7, 8]])
    assert apart == expected + 2 * 1000 * 3 + 4 * 2 * 3 * 5 * 6

    asked, shape.num_layers = ([[1, 2, 3]] * 2, [[4, 5], [6, 7, 8]]), 3
    positions = (0, 1, 2, 3, 3, 4)  # of the queries: the prompt's, and two responses'
    windows = (None, 1, 3)  # a window hides keys
    pairs = sum(min(position + 1, window or 9) for position in positions for window in windows)
    assert forward_flops(shape, *asked, windows) == 2 * 1000 * 6 + 2 * 10 * 4 * 5 + 4 * 3 * 5 * pairs
    assert forward_flops(shape, *asked, [9] * 3) == forward_flops(shape, *asked)


@pytest.mark.slow
def test_a_profiled_run_has_the_same_bits_and_leaves_trace_and_page(qarl, tiny_model, tmp_path):
    sections = {"train": {"steps": 3, "minibatch_size": 8, "micro_batch_tokens": 64}}
    config = write_config(tmp_path / "c.yaml", settings(tiny_model("llama"), **sections))
    for name, extra in (("plain", []), ("profiled", ["train.profile.step=2"])):
        done = qarl.run("train", config, f"train.run_dir={name}", *extra, cwd=tmp_path)
        assert done.code == 0, done.err
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert repeatable(plain) == repeatable(profiled)
    assert not (plain / "profile").exists()
    assert {path.name for path in (profiled / "profile").iterdir()} == {"step_000002.json.gz", "step_000002.md"}

    trace = json.loads(gzip.decompress((profiled / "profile/step_000002.json.gz").read_bytes()))
    host = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    ours = [event for event in host if event["name"].startswith("qarl/")]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("qarl/")) for event in ours)
    phases = [entry for entry in spans if entry[2] not in PARTS]
    assert [name for *_, name in phases] == ["rollout", "reward", "learner", "publish"]
    assert all(a[1] <= b[0] + 1 for a, b in pairwise(phases))  # microseconds: the first two are of another clock
    parts = [entry for entry in spans if entry[2] in PARTS]
    assert all(a[1] <= b[0] for a, b in pairwise(parts))
    names = [name for *_, name in parts]
    assert names[0] == "snapshot" and names.count("optimizer") == 2 and names[-1] == "optimizer"
    assert names.count("forward") == names.count("backward") > 2

    text = (profiled / "profile/step_000002.md").read_text()
    assert text.startswith("# Profile of step 2") and "`aten::mm`" in text
    seconds = {
        cells[1].strip(): float(cells[2])
        for cells in (line.split("|") for line in text.split("| operation")[0].splitlines())
        if len(cells) > 3 and cells[2].strip()[:1].isdigit()
    }
    parts_of_learner = [value for name, value in seconds.items() if name.startswith("- ")]
    assert sum(parts_of_learner) == pytest.approx(seconds["learner"], abs=0.004)  # rounded to milliseconds
