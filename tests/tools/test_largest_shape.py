"""`tools/largest_shape.py`: which shapes it runs, what it says of each, and one case of each kind on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_ranks
import bench_step
import largest_shape
import pytest
from largest_shape import OUT_OF_MEMORY, TRAINED, command, expected, outcome, parse, search

SHAPES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("fitting", "training", "ran"),
    [
        ("ab", "ab", "bc"),  # as expected: the largest trains, the next does not
        ("ab", "abcd", "bcd"),  # better than expected
        ("abc", "a", "cba"),  # worse
        ("", "", "a"),
        ("abcd", "abcd", "d"),
    ],
)
def test_it_runs_what_should_fit_and_the_next_one(fitting: str, training: str, ran: str) -> None:
    found: list[str] = []
    search(SHAPES, lambda shape: shape in fitting, lambda shape: found.append(shape) or shape in training)
    assert "".join(found) == ran


def test_the_end_of_a_run_is_said_in_a_few_words() -> None:
    assert outcome(0, "torch.OutOfMemoryError in a log of what went on") == TRAINED
    assert outcome(1, "torch.OutOfMemoryError: CUDA out of memory. Tried ...\nfailed: learn") == OUT_OF_MEMORY
    assert outcome(2, "one\nerror: no such thing\n\n") == "failed with exit code 2: error: no such thing"
    assert outcome(-9, "") == "failed with exit code -9: it printed nothing"


def test_what_is_expected_falls_with_ranks_and_with_what_the_host_keeps() -> None:
    options = parse(["--estimate"])
    found = {
        (gpus, offload): expected(options, "qwen3-8b", gpus, offload)
        for gpus in (1, 2)
        for offload in ("none", "moments", "all")
    }
    gib = 2**30
    for gpus in (1, 2):
        none, moments, everything = (found[gpus, offload] for offload in ("none", "moments", "all"))
        # two moments, float32, but for the buckets that pass
        assert none["expected_gib"] - moments["expected_gib"] == pytest.approx(
            8 * none["parameters"] / gpus / gib, rel=0.1
        )
        assert moments["expected_gib"] > everything["expected_gib"]
        assert everything["host_gib"] == pytest.approx(12 * none["parameters"] / gib, rel=0.01)
    assert found[2, "none"]["expected_gib"] < 0.7 * found[1, "none"]["expected_gib"]


@pytest.mark.parametrize("offload", ["none", "moments", "all"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_commands_are_ones_that_their_tools_take(gpus: int, offload: str, tmp_path: Path) -> None:
    options = parse(["--out", "unused", "--tokens", "16384", "--gpu-memory", "78"])
    tool, *arguments = command(options, "qwen3-14b", gpus, offload, tmp_path / "out.json")
    parsed = {"bench_step.py": bench_step.parse, "bench_ranks.py": bench_ranks.parse}[Path(tool).name](arguments)
    assert (parsed.gpu_memory, parsed.tokens, parsed.iterations) == (78, 16_384, 1)
    if gpus > 1:
        assert (parsed.nproc, parsed.messages_only, parsed.offload or "none") == (2, True, offload)
        return
    assert (parsed.prompts, parsed.responses, parsed.vocabulary) == (7, 2, 151_936)
    assert parsed.set[1] == f"optim.offload={'false' if offload == 'none' else offload}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out is needed, or --estimate"),
        (["--estimate", "--tokens", "3000"], "--tokens takes multiples of 1024"),
        (["--estimate", "--tokens", "1024"], "--tokens takes numbers from 2210"),
        (["--estimate", "--device", "cpu", "--gpu-memory", "9"], "--gpu-memory is of --device cuda"),
        (["--estimate", "--device", "cpu", "--offload", "none", "all"], "a CPU has nothing to offload from"),
        (["--estimate", "--gpus", "0"], "--gpus: '0': must be an integer from 1"),
        (["--estimate", "--host-memory", "0"], "--host-memory: '0': must be a number above 0"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(arguments: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_on_a_cpu_nothing_is_offloaded() -> None:
    assert parse(["--estimate", "--device", "cpu"]).offload == ["none"]
    assert parse(["--estimate"]).offload == ["none", "moments", "all"]


def test_what_the_host_would_not_hold_and_what_is_too_late_are_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(largest_shape, "run", lambda *_: pytest.fail("it ran"))
    sizes = ["--shapes", "qwen3-8b", "qwen3-14b", "--offload", "all", "--out", str(tmp_path / "out.json")]
    largest_shape.measure(parse([*sizes, "--budget", "-1"]), 140.0, 128.0)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(record["shape"], record["outcome"]) for record in report["records"]] == [
        ("qwen3-8b", "not run: no time left")
    ]
    largest_shape.measure(parse(sizes), 140.0, 90.0)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [record["outcome"] for record in report["records"]] == ["not run: the host has 90 GiB"]


TOOL = """
import json, sys
shape, out = sys.argv[1:]
if shape == "qwen3-14b":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
records = [{"what": "micro-batch", "peak_gib": 80.5}, {"what": "update", "peak_gib": 81.5}]
records += [{"what": "capped", "reserved_gib": 77.0, "beside_gib": 0.6}]  # as of a GPU that counts as smaller
open(out, "w").write(json.dumps({"environment": {"packages": {}}, "records": records}))
"""


def test_a_case_is_measured_until_a_shape_runs_out_of_memory(tmp_path: Path, monkeypatch, capsys) -> None:
    tool, out = tmp_path / "tool.py", tmp_path / "out.json"
    tool.write_text(TOOL)
    monkeypatch.setattr(largest_shape, "command", lambda _, shape, gpus, offload, out: [str(tool), shape, str(out)])
    largest_shape.measure(parse(["--gpus", "2", "--offload", "none", "--out", str(out)]), 140.0, 256.0)
    report = json.loads(out.read_text())
    found = [(record["shape"], record["outcome"], record.get("peak_gib")) for record in report["records"]]
    assert found == [("qwen3-8b", TRAINED, 81.5), ("qwen3-14b", OUT_OF_MEMORY, None)]
    assert [report["records"][0][kind] for kind in largest_shape.BESIDE_TORCH] == [77.0, 0.6]
    assert report["environment"] == {"packages": {}} and report["memory_gib"] == 140.0
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first.startswith("2 none qwen3-8b 82") and first.endswith("81.5 trained")
    assert second.endswith(OUT_OF_MEMORY)
