"""`tools/bench_rollout.py` without its runs: cases, random policies, vLLM's configuration, and refusals."""

from pathlib import Path
from typing import Any

import bench_rollout
import pytest
import torch
from model_sizes import quant_section, shape_of

from qarl.config import QuantConfig

CPU = torch.device("cpu")


def options(*arguments: str) -> Any:
    return bench_rollout.parse(["--shape", "tiny", "--vocabulary", "512", *arguments, "--out", "unused.json"])


def test_vllm_starts_once_for_all_batches_and_other_engines_once_per_batch() -> None:
    given = options("--native", "w4a16", "--hf", "fp32", "--vllm", "fp8", "--numerics", "exact", "--batch", "2", "4")
    found = [(case["engine"], case["variant"], case["batch"]) for case in bench_rollout.cases(given)]
    engines = [("native", "w4a16"), ("hf", "fp32")]
    assert found == [(*engine, [batch]) for engine in engines for batch in (2, 4)] + [("vllm", "fp8", [2, 4])]


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_a_policy_of_random_weights_is_the_same_whenever_it_is_made(scheme: str) -> None:
    first, second = (bench_rollout.policy_of(options(), shape_of("tiny", None, 512), scheme) for _ in range(2))
    assert first.current.fingerprints == second.current.fingerprints


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "fp8"])
@pytest.mark.parametrize("numerics", bench_rollout.NUMERICS)
def test_the_configuration_of_every_start_of_vllm_is_a_valid_one(scheme: str, numerics: str, tmp_path: Path) -> None:
    case = {"batch": [8, 256], "numerics": numerics}
    quant = QuantConfig(**quant_section(scheme, 64))
    config = bench_rollout.vllm_config(options("--device", "cuda"), case, quant, tmp_path)
    assert (config.rollout.max_num_seqs, config.quant.scheme) == (256, scheme)
    assert config.rollout.numerics == ("exact" if numerics == "exact" else "fast")
