"""Check that two checkouts compute the same bits: tiny runs on the CPU with both, and compare digests of the results.

    python tools/same_bits.py --before ../old
    python tools/same_bits.py --before ../old --only 'scheme/*' moe/fp8

A case is a `qarl train` with overrides of a tiny configuration; some cases resume, export or have two ranks. Compared
are the metrics (without times and memory), the recorded responses, the digest of the published weights, and each tensor
of the last checkpoint and of the export. The exit code is 1 if anything differs or a case fails. Both sides run with
the packages of this interpreter.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml
from tiny_models import save_tiny_model, tiny_settings

ROOT = Path(__file__).resolve().parents[1]
CUSTOM = ROOT / "examples" / "custom_objective.py"
LIMIT_S = 900  # per command
UNREPEATABLE = ("time/", "throughput/", "memory/")  # prefixes of metrics that are not compared
Digests = dict[str, str]  # name of a result -> its digest or value


class Case(NamedTuple):
    """One case: a model, overrides of `tiny_settings`, and what to run besides `qarl train`."""

    overrides: str = ""
    model: str = "llama"  # a model family, or a configuration file of the checkout, which is used instead
    ranks: int = 1
    resume: bool = False  # run one step first, then the same command again for all steps
    export: bool = False


NO_GROUPS = "quant.group_size=null"
SCHEMES = {
    "bf16": f"quant.scheme=bf16 {NO_GROUPS}",
    "w4a16": "",
    "w4a16_asymmetric": "quant.symmetric=false",
    "w4a16_symmetric7": "quant.grid=symmetric7",
    "w4a16_g64": "quant.group_size=64",
    "w4a16_channel": "quant.group_size=-1",
    "w4a16_float32_scales": "quant.scale_dtype=float32",
    "w4a8": "quant.scheme=w4a8",
    "w8a8": f"quant.scheme=w8a8 {NO_GROUPS}",
    "fp8": f"quant.scheme=fp8 {NO_GROUPS}",
    "fp8_block": f"quant.scheme=fp8_block {NO_GROUPS}",
    "nvfp4a16": f"quant.scheme=nvfp4a16 {NO_GROUPS}",
}
OBJECTIVES = ("tbpo", "grpo", "dapo", "dual_clip_grpo", "gspo", "mis_gspo", "sapo", "positive_only", "reinforce")
FAMILIES = ("mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
MISMATCH = "quant.learner=full_precision"  # so that no ratio is 1
QUICKSTART = "train.steps=2 train.prompts_per_step=4 objective.advantage=reinforce evaluation.samples=1"
VLLM = "rollout.engine=vllm rollout.max_num_seqs=4 rollout.kv_cache_tokens=4096"
FAST = "rollout.numerics=fast rollout.linear_kernels=vllm"
DEEPSPEED = "distributed.engine=deepspeed"
EVERY = " ".join(f"diagnostics.{key}_every=1" for key in ("shadow", "deployed", "crossings", "gradients"))

CASES: dict[str, Case] = {
    **{f"scheme/{name}": Case(text, export=True) for name, text in SCHEMES.items()},
    **{f"objective/{name}": Case(f"{MISMATCH} objective.name={name}") for name in OBJECTIVES},
    "objective/on_policy": Case(f"{MISMATCH} objective.name=on_policy train.minibatch_size=16"),
    "objective/custom": Case(f"{MISMATCH} objective.name=custom objective.path={CUSTOM}:cispo"),
    **{f"family/{name}": Case(model=name, export=True) for name in FAMILIES},
    "correction/tis": Case(f"{MISMATCH} correction.preset=tis"),
    "correction/icepop": Case(f"{MISMATCH} correction.preset=icepop"),
    "correction/bypass_k3_rs": Case(f"{MISMATCH} correction.preset=bypass_k3_rs"),
    "learner/fake_quant": Case("quant.learner=fake_quant"),
    "learner/full_precision": Case("quant.learner=full_precision"),
    "learner/dequantized_input": Case(f"quant.scheme=w8a8 {NO_GROUPS} quant.ste_input=dequantized"),
    "dtype/float16": Case("model.dtype=float16"),
    "quant/ignore": Case("quant.ignore=[lm_head,model.layers.0.mlp.down_proj]", "qwen2", export=True),
    "optim/muon": Case("optim.name=muon"),
    "optim/bfloat16_masters": Case("optim.master_dtype=bfloat16 optim.schedule=cosine optim.warmup_steps=1"),
    "kv_cache/fp8": Case("quant.kv_cache_dtype=fp8"),
    "rollout/truncated": Case("rollout.top_k=40 rollout.top_p=0.9 objective.truncation_set=replay"),
    "rollout/pruned": Case("objective.name=tbpo objective.dvp_rho=0.001 rollout.kv_cache_tokens=256"),
    "objective/regularized": Case("objective.kl_coef=0.1 objective.entropy_coef=0.01 train.epochs=2"),
    "moe/replay": Case("model.routing=replay objective.router_aux_coef=0.1", "olmoe"),
    "moe/fp8": Case(f"quant.scheme=fp8 {NO_GROUPS}", "mixtral", export=True),
    "diagnostics": Case(f"{EVERY} {MISMATCH}"),
    "resume": Case("optim.schedule=linear train.steps=2", resume=True),
    "ranks/rows": Case("", "qwen3", ranks=2, export=True),
    "ranks/rows_fp8_resume": Case(f"quant.scheme=fp8 {NO_GROUPS}", ranks=2, resume=True),
    "ranks/deepspeed_3": Case(f"{DEEPSPEED} distributed.zero_stage=3", "qwen3", ranks=2),
    "quickstart": Case(QUICKSTART, "configs/quickstart.yaml"),
    "vllm/fast": Case(f"{VLLM} {FAST}", "qwen3"),
    "vllm/exact": Case(f"{VLLM} rollout.numerics=exact rollout.vllm.process=inline", "qwen3"),
}


def qarl(checkout: Path, *argv: str) -> None:
    """Run a `qarl` command of a checkout. Raises RuntimeError with the last lines of its output if it fails."""
    paths = [checkout / part for part in (".", "kernels", "quant_formats")]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "qarl.cli", *argv]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, env=os.environ | variables, cwd=checkout, timeout=LIMIT_S, **how)
    if done.returncode:
        raise RuntimeError("\n".join(done.stdout.splitlines()[-12:]))


def write_config(case: Case, folder: Path) -> Path:
    """Make a case's model in `folder`, and return the path of its configuration, absolute or relative to a checkout."""
    if case.model.endswith(".yaml"):
        return Path(case.model)
    model, config = folder / "model", folder / "config.yaml"
    save_tiny_model(model, case.model)
    config.write_text(yaml.safe_dump(tiny_settings(model, checkpoint={"keep_last": 1})))
    return config


def run_case(case: Case, checkout: Path, config: Path, run: Path) -> Digests:
    """Run a case's commands with run directory `run`, and return the digests, or `error` -> message."""
    argv = ["train", str(config), *shlex.split(case.overrides), f"train.run_dir={run}"]
    argv += ["--nproc", str(case.ranks)] if case.ranks > 1 else []
    try:
        if case.resume:
            qarl(checkout, *argv, "train.steps=1")
        qarl(checkout, *argv)
        if case.export:
            qarl(checkout, "export", str(run), str(run / "export"), "--no-vllm")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    return dict(digests(run))


def digests(run: Path) -> Iterator[tuple[str, str]]:
    """Yield names and values of a run's results: metrics as text; responses, weights and tensors as SHA-256."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if not key.startswith(UNREPEATABLE):
                yield f"step {record['step']} {key}", repr(value)
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"rollouts/{path.name}:{number}", hashlib.sha256(line.encode()).hexdigest()
    state = max((run / "checkpoints").glob("0*/state.json"))
    yield "version", json.loads(state.read_text())["snapshot_sha256"]
    for folder in (run / "rollouts", state.parent, run / "export"):
        for path in sorted(folder.glob("**/*.safetensors")):
            yield from ((f"{path.relative_to(run)} {name}", digest) for name, digest in tensor_digests(path))
    if (config := run / "export" / "config.json").exists():
        yield "export/config.json", hashlib.sha256(config.read_bytes()).hexdigest()


def tensor_digests(path: Path) -> Iterator[tuple[str, str]]:
    import torch
    from safetensors.torch import load_file

    for name, tensor in sorted(load_file(path).items()):
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        yield name, digest.hexdigest()


def compare(name: str, old: Digests, new: Digests) -> bool:
    """Print a case with its first difference, and return whether both sides ran and are equal."""
    differences = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    errors = [f"{side}: {found['error']}" for side, found in (("before", old), ("after", new)) if "error" in found]
    if errors:
        print(f"FAILED     {name}", *errors, sep="\n", flush=True)
    elif differences:
        key, more = differences[0], len(differences) - 1
        values = " -> ".join(found.get(key, "missing") for found in (old, new))
        print(f"DIFFERENT  {name}: {key}: {values}, and {more} more of {len(old)}", flush=True)
    else:
        print(f"equal      {name} ({len(old)} values)", flush=True)
    return not errors and not differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare this one with")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases, e.g. scheme/* moe/fp8")
    options = parser.parse_args()
    names = list(dict.fromkeys(name for pattern in options.only for name in fnmatch.filter(CASES, pattern)))
    equal = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="same-bits-") as folder, ThreadPoolExecutor() as pool:
            case, config = CASES[name], write_config(CASES[name], Path(folder))
            sides = enumerate((options.before.resolve(), ROOT))  # at once, because imports take most of the time
            found = [pool.submit(run_case, case, side, config, Path(folder, f"run{i}")) for i, side in sides]
            equal += compare(name, *(one.result() for one in found))
    print(f"{equal} of {len(names)} cases are equal")
    return int(equal < len(names))


if __name__ == "__main__":
    sys.exit(main())
