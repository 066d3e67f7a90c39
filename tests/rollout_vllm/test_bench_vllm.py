"""The parts of `tools/bench_vllm.py` that need no vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qarl.errors import UserError

CPU = torch.device("cpu")


def options(*arguments: str):
    import bench_vllm

    return bench_vllm.parse([*arguments, "--out", "unused.json"])


def policies(scheme: str, lr: float):
    """A tiny policy before and after a simulated step."""
    from model_sizes import SHAPES
    from vllm_bench import models

    before = models.random_masters(0, CPU)
    quant = models.quant_of(scheme, 64)
    return [
        models.policy_of(SHAPES["tiny"].config(), quant, masters, 0, CPU, 64)
        for masters in (before, models.stepped(before, lr, 0, CPU))
    ]


def test_random_masters_are_the_same_whenever_they_are_read():
    from vllm_bench.models import STD, random_masters

    read = random_masters(3, CPU)
    weight = read("a.weight", (512, 64))
    assert torch.equal(weight, random_masters(3, CPU)("a.weight", (512, 64)))
    assert not torch.equal(weight, read("b.weight", (512, 64)))
    assert weight.std().item() == pytest.approx(STD, rel=0.02)
    assert torch.equal(read("norm.weight", (5,)), torch.ones(5))


def test_a_simulated_step_moves_every_master_by_the_learning_rate():
    from vllm_bench.models import random_masters, stepped

    masters = random_masters(0, CPU)
    moved = stepped(masters, 1e-3, 0, CPU)("a.weight", (64, 64)) - masters("a.weight", (64, 64))
    torch.testing.assert_close(moved.abs(), torch.full((64, 64), 1e-3), rtol=1e-4, atol=0)
    assert abs((moved > 0).double().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_a_small_step_changes_few_published_words(scheme: str):
    from qarl.weight_sync.update import delta

    before, after = (policy.current for policy in policies(scheme, 1e-6))
    sent = delta(after.published, after.fingerprints, before.published, before.fingerprints)
    assert 0 < sum(t.nbytes for t in sent.values()) < 0.2 * sum(t.nbytes for t in after.published.values())


def test_a_policy_can_be_published_again_as_a_new_version():
    from vllm_bench.models import as_new_version

    policy, _ = policies("w4a16", 1e-6)
    first = policy.current
    second = as_new_version(policy, 7)
    policy.sampler.install(second)
    assert (second.version, policy.version) == (7, 7)
    assert second.fingerprints is not first.fingerprints
    assert second.fingerprints == first.fingerprints


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("kernels", ["vllm", "qarl"])
def test_the_configuration_of_every_case_is_a_valid_one(scheme: str, kernels: str, tmp_path: Path):
    from vllm_bench.case import Case, engine_config, with_vllm
    from vllm_bench.models import quant_of

    case = Case(scheme, kernels, torch.device("cuda"), tmp_path)
    config = engine_config(case, quant_of(scheme, 64), options(), "delta")
    assert config.rollout.max_num_seqs == 256
    changed = with_vllm(config, publish="full", sleep_level=2)
    assert (changed.rollout.vllm.publish, changed.rollout.vllm.sleep_level) == ("full", 2)
    assert config.rollout.vllm.publish == "delta"


def test_a_failed_case_keeps_what_was_measured_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture):
    import bench_vllm
    from vllm_bench.case import Case

    def records() -> Iterator[dict]:
        yield {"what": "start", "seconds": 1.0}
        raise UserError("rollout.vllm: vLLM did not start")

    (tmp_path / "sampler.log").write_text("what vLLM said\n")
    report = bench_vllm.Report(tmp_path / "new" / "out.json", {})
    case = Case("fp8", "qarl", CPU, tmp_path)
    bench_vllm.collect(records(), {"shape": "tiny", **case.labels()}, case, report)
    kept = json.loads((tmp_path / "new" / "out.json").read_text())["records"]
    assert [record.get("what", record.get("error")) for record in kept] == [
        "start",
        "rollout.vllm: vLLM did not start",
    ]
    assert "what vLLM said" in capsys.readouterr().err


def test_the_table_has_a_line_for_everything():
    from vllm_bench.summary import table

    labels = {"shape": "tiny", "scheme": "fp8", "kernels": "qarl"}
    canary = {"canary_mean": 0.01, "canary_max": 0.1}
    parts = {f"{part}_s": 0.1 for part in ("receive", "load", "check", "score")}
    engine = [
        {"what": "start", "seconds": 20.0, "gib": 1.0, "proved_frac": 1.0, **canary},
        {"what": "publish_full", "seconds": 0.5, "sent_frac": 1.0, "sent_mib": 1024.0, **parts, **canary},
        {
            "what": "generate",
            "seconds": 2.0,
            "batch": 8,
            "tokens_per_s": 1e3,
            "first_token_s": 0.1,
            "later_token_s": 1e-2,
        },
        {"what": "sleep_2", "seconds": 0.3, "freed_gib": 30.0, "wake_s": 0.2, "wake_and_publish_s": 0.9},
    ]
    failed = {**labels, "error": "no memory"}
    environment = {"packages": {"torch": "2", "vllm": "0.24"}, "gpus": ["H100"], "git_revision": "abc"}
    text = table([{"records": [*(labels | record for record in engine), failed], "environment": environment}])
    assert text.startswith("H100, torch 2, vllm 0.24, revision abc")
    for expected in (
        "proved 1.000",
        "sent 100.00%",
        "batch 8: 1000 tokens/s",
        "freed 30.00 GiB",
        "failed: tiny fp8 qarl: no memory",
    ):
        assert expected in text


def test_tokens_per_second_are_of_the_median_generation_after_a_warm_up(monkeypatch):
    from vllm_bench import engine_part

    clock, asked = [0.0], []
    monkeypatch.setattr(engine_part.time, "perf_counter", lambda: clock[0])

    def draw(prompts: list[list[int]], new_tokens: int, seed: int) -> list[int]:
        asked.append((len(prompts), len(prompts[0]), new_tokens, seed))
        clock[0] += (100.0 if seed == 0 else 1.0) * (new_tokens + seed)
        return [new_tokens] * len(prompts)

    given = options("--prompt-tokens", "5", "--new-tokens", "9", "--generations", "3")
    found = engine_part.generate_record(draw, 2, 64, torch.Generator().manual_seed(0), given)
    assert asked == [(2, 5, new, seed) for new in (1, 9) for seed in range(4)]
    assert (found["seconds"], found["first_token_s"]) == (11.0, 3.0) and found["all_seconds"] == [10.0, 11.0, 12.0]
    assert found["tokens_per_s"] == pytest.approx(2 * 9 / 11) and found["later_token_s"] == 1.0
    with pytest.raises(AssertionError, match="nothing ends a response early"):
        engine_part.generate_record(lambda prompts, *_: [3] * len(prompts), 2, 64, torch.Generator(), given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--batch", "0"], "argument --batch: '0': must be an integer from 1"),
        (["--new-tokens", "-3"], "argument --new-tokens: '-3': must be an integer from 1"),
        (["--memory-frac", "3"], "--memory-frac takes a share of the GPU, at most 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(given, said, capsys) -> None:
    with pytest.raises(SystemExit):
        options(*given)
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_a_gpu_that_is_not_there_is_a_line(monkeypatch, tmp_path) -> None:
    import bench_vllm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["bench_vllm.py", "--device", "cuda", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"^error: model\.device: cuda asked for"):
        bench_vllm.main()
    assert not any(tmp_path.iterdir())
