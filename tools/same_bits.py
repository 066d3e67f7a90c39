"""Check that two checkouts compute the same bits: tiny runs on the CPU, whose results are digested and compared.

    python tools/same_bits.py --before ../old
    python tools/same_bits.py --before ../old --quick --only 'scheme/*' moe/fp8

A case is a `qarl train`, by its overrides of a tiny configuration; some resume, export or have two ranks. Compared are
the metrics (without times and memory), the recorded responses, the digest of the published version, and each tensor of
the last checkpoint and of the export. The exit code is 1 if anything differs or a case fails. The same packages and
CPU are needed on both sides.
"""

import argparse
import fnmatch
import gc
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import yaml
from tiny_models import save_tiny_model, tiny_settings

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900  # for one case
UNREPEATABLE = ("time/", "throughput/", "memory/")
Digests = dict[str, dict[str, str]]  # case -> what -> its digest or value


CUSTOM = ROOT / "examples" / "custom_objective.py"


class Case(NamedTuple):
    """One case: a model, overrides of `tiny_settings`, and what to run beside `qarl train`."""

    overrides: str = ""
    model: str = "llama"  # the family, and a number of layers if not 2: "qwen3 1"; or the YAML file of a checkout
    quick: bool = False
    ranks: int = 1
    resume: bool = False  # run one step first, then the same command again for all steps
    export: bool = False
    interpreted: bool = False  # Triton kernels, in the interpreter


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
KERNELS = ("bf16", "w4a16", "w4a16_asymmetric", "w4a8", "w8a8", "fp8", "fp8_block", "nvfp4a16")
QUICK = {"bf16", "w4a16", "fp8", "tbpo", "gspo", "reinforce", "qwen3_moe"}
MISMATCH = "quant.learner=full_precision"  # so that no ratio is 1
QUICKSTART = "train.steps=2 train.prompts_per_step=4 objective.advantage=reinforce evaluation.samples=1"
SMALL = "train.prompts_per_step=1 train.minibatch_size=4 train.steps=1 objective.name=reinforce train.seed=1"
VLLM = "rollout.engine=vllm rollout.max_num_seqs=4 rollout.kv_cache_tokens=4096"
FAST = "rollout.numerics=fast rollout.linear_kernels=vllm"
DEEPSPEED = "distributed.engine=deepspeed"
EVERY = " ".join(f"diagnostics.{key}_every=1" for key in ("shadow", "deployed", "crossings", "gradients"))

CASES: dict[str, Case] = {
    **{f"scheme/{name}": Case(text, quick=name in QUICK, export=True) for name, text in SCHEMES.items()},
    **{f"objective/{name}": Case(f"{MISMATCH} objective.name={name}", quick=name in QUICK) for name in OBJECTIVES},
    "objective/rloo": Case(f"{MISMATCH} objective.name=rloo"),
    "objective/on_policy": Case(f"{MISMATCH} objective.name=on_policy train.minibatch_size=16"),
    "objective/custom": Case(f"{MISMATCH} objective.name=custom objective.path={CUSTOM}:cispo"),
    **{f"family/{name}": Case(model=name, quick=name in QUICK, export=True) for name in FAMILIES},
    "correction/tis": Case(f"{MISMATCH} correction.preset=tis"),
    "correction/icepop": Case(f"{MISMATCH} correction.preset=icepop"),
    "correction/bypass_k3_rs": Case(f"{MISMATCH} correction.preset=bypass_k3_rs"),
    "learner/fake_quant": Case("quant.learner=fake_quant"),
    "learner/full_precision": Case("quant.learner=full_precision"),
    "learner/dequantized_input": Case(f"quant.scheme=w8a8 {NO_GROUPS} quant.ste_input=dequantized"),
    "learner/float32": Case("model.learner_dtype=float32 quant.learner=full_precision"),
    "dtype/float16": Case("model.dtype=float16"),
    "dtype/float32": Case("model.dtype=float32", "qwen3"),
    "quant/ignore": Case("quant.ignore=[lm_head,model.layers.0.mlp.down_proj]", "qwen2", export=True),
    "optim/muon": Case("optim.name=muon"),
    "optim/bfloat16_masters": Case("optim.master_dtype=bfloat16 optim.schedule=cosine optim.warmup_steps=1"),
    "kv_cache/fp8": Case("quant.kv_cache_dtype=fp8"),
    "rollout/truncated": Case(
        "rollout.top_k=40 rollout.top_p=0.9 rollout.temperature=0.8 objective.truncation_set=replay"
    ),
    "rollout/pruned": Case("objective.name=tbpo objective.dvp_rho=0.001 rollout.kv_cache_tokens=256"),
    "objective/regularized": Case(
        "objective.kl_coef=0.1 objective.entropy_coef=0.01 train.recompute=layer train.epochs=2"
    ),
    "moe/replay": Case(
        "model.routing=replay objective.router_aux_coef=0.1 objective.router_z_coef=0.01", "olmoe", quick=True
    ),
    "moe/fp8": Case(f"quant.scheme=fp8 {NO_GROUPS}", "mixtral", export=True),
    "moe/w4a8": Case("quant.scheme=w4a8", "qwen2_moe"),
    "diagnostics": Case(f"{EVERY} {MISMATCH}"),
    "diagnostics/moe": Case(EVERY, "qwen3_moe"),
    "resume": Case("optim.schedule=linear train.steps=2", resume=True, quick=True),
    "resume/muon_moe": Case("optim.name=muon", "qwen3_moe", resume=True),
    "ranks/rows": Case("", "qwen3", ranks=2, export=True),
    "ranks/rows_moe_muon": Case("optim.name=muon", "qwen3_moe", ranks=2),
    "ranks/rows_fp8_resume": Case(f"quant.scheme=fp8 {NO_GROUPS}", ranks=2, resume=True),
    "ranks/deepspeed_0": Case(f"{DEEPSPEED} distributed.zero_stage=0", ranks=2),
    "ranks/deepspeed_3": Case(f"{DEEPSPEED} distributed.zero_stage=3", "qwen3", ranks=2),
    "kernels/w4a16_quick": Case(SMALL, "qwen3 1", True, interpreted=True),
    **{f"kernels/{name}": Case(f"{SMALL} {SCHEMES[name]}", "llama 1", interpreted=True) for name in KERNELS},
    "kernels/moe_w4a16": Case(SMALL, "olmoe 1", interpreted=True),
    "kernels/moe_fp8": Case(f"{SMALL} {SCHEMES['fp8']}", "qwen2_moe 1", interpreted=True),
    "kernels/kv_cache_fp8": Case(f"{SMALL} quant.kv_cache_dtype=fp8", "qwen2 1", interpreted=True),
    "quickstart": Case(QUICKSTART, "configs/quickstart.yaml"),
    "vllm/fast": Case(f"{VLLM} {FAST}", "qwen3"),
    "vllm/fast_delta": Case(f"{VLLM} {FAST} rollout.vllm.process=inline rollout.vllm.publish=delta", "qwen3"),
    "vllm/exact": Case(f"{VLLM} rollout.numerics=exact rollout.vllm.process=inline", "qwen3"),
}


# --- in a process that has the checkout's modules imported


def serve(checkout: Path, names: list[str], work: Path, settings: list[str], out: Path) -> None:
    """Run each case in a fork, so that imports are paid for once; write the digests of all to `out`."""
    import torch.utils.tensorboard  # noqa: F401 - imported for the forks, as are the next

    import qarl
    import qarl.cli
    import qarl.exporting.verify
    import qarl.training.loop

    assert Path(qarl.__file__).is_relative_to(checkout), f"{qarl.__file__} is not in {checkout}"
    if CASES[names[0]].interpreted:
        _use_kernels()
    gc.freeze()
    found: Digests = {}
    for name in names:
        folder = work / name.replace("/", "-")
        folder.mkdir()
        try:
            run_case(CASES[name], checkout, folder, settings)
            found[name] = dict(digests(folder / "run"))
        except RuntimeError as error:
            found[name] = {"error": str(error)}
        print(f"{name}: {'failed' if 'error' in found[name] else len(found[name])}", flush=True)
        shutil.rmtree(folder)
    out.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # taking down what was imported takes a second, and some of it prints pages


def _use_kernels() -> None:
    """Let policies on the CPU use Triton kernels, wherever the choice was imported to."""
    import interpreting

    interpreting.prepare()
    modules = [m for name, m in sys.modules.items() if name.startswith("qarl.") and hasattr(m, "use_kernels")]
    assert modules, "no module has use_kernels, which chooses the kernels; adapt this script"
    for module in modules:
        module.use_kernels = lambda *_: True  # type: ignore[attr-defined]


def run_case(case: Case, checkout: Path, folder: Path, settings: list[str]) -> None:
    """Run a case's commands in `folder`. Raises RuntimeError, with the end of what it printed, if one fails."""
    run, config, log = folder / "run", checkout / case.model, folder / "log"
    if not case.model.endswith(".yaml"):
        family, _, layers = case.model.partition(" ")
        model = folder.parents[1] / "models" / case.model.replace(" ", "-")
        if not model.exists():
            save_tiny_model(model, family, num_hidden_layers=int(layers or 2))
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(tiny_settings(model, checkpoint={"keep_last": 1})))
    argv = ["train", str(config), *shlex.split(case.overrides), *settings, f"train.run_dir={run}"]
    argv += ["--nproc", str(case.ranks)] if case.ranks > 1 else []
    if case.resume:
        _qarl([*argv, "train.steps=1"], log)
    _qarl(argv, log)
    if case.export:
        _qarl(["export", str(run), str(run / "export"), "--no-vllm"], log)


def _qarl(argv: list[str], log: Path) -> None:
    """Run a `qarl` command line in a fork."""
    fork = get_context("fork").Process(target=_command, args=(argv, log))
    fork.start()
    fork.join(LIMIT_S)
    fork.kill()
    fork.join()
    if fork.exitcode:
        raise RuntimeError("\n".join(log.read_text(errors="replace").split("\n")[-12:]))


def _command(argv: list[str], log: Path) -> None:
    """In a fork: the command line, whose output is appended to `log`."""
    from qarl import cli

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    cli.main(argv)


def digests(run: Path) -> Iterator[tuple[str, str]]:
    """What a run computed: metrics as text; responses, the published version and tensors as SHA-256."""
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
            yield from ((f"{path.relative_to(run)} {name}", digest) for name, digest in _tensors(path))
    if (config := run / "export" / "config.json").exists():
        yield "export/config.json", hashlib.sha256(config.read_bytes()).hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
            yield name, digest.hexdigest()


# --- in the process that was started


def run(checkout: Path, names: list[str], work: Path, settings: list[str]) -> Digests:
    """The digests of cases in a checkout. Its modules come first, the script and its models are this checkout's."""
    paths = [*(checkout / part for part in (".", "kernels", "quant_formats")), ROOT / "tools", ROOT / "tests"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found: Digests = {}
    for interpreted in (False, True):
        chosen = [name for name in names if CASES[name].interpreted == interpreted]
        with tempfile.TemporaryDirectory(dir=work) as folder:
            out = Path(folder) / "out"
            order = [str(checkout), json.dumps(chosen), folder, json.dumps(settings), str(out)]
            more = {"TRITON_INTERPRET": "1"} if interpreted else {}
            if chosen:
                command = [sys.executable, __file__, "--serve", *order]
                subprocess.run(command, env={**os.environ, **variables, **more}, cwd=folder, check=True)
                found |= json.loads(out.read_text())
    return found


def compare(before: Digests, after: Digests, names: list[str]) -> int:
    """Print each case with its first difference; returns the exit code."""
    unequal = 0
    for name in names:
        old, new = before[name], after[name]
        differences = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        errors = [f"{side}: {found['error']}" for side, found in (("before", old), ("after", new)) if "error" in found]
        if errors:
            print(f"FAILED     {name}", *errors, sep="\n")
        elif differences:
            key, more = differences[0], len(differences) - 1
            print(f"DIFFERENT  {name}: {key}: {_short(old, key)} -> {_short(new, key)}, and {more} more of {len(old)}")
        else:
            print(f"equal      {name} ({len(old)} values)")
        unequal += bool(errors or differences)
    print(f"{len(names) - unequal} of {len(names)} cases are equal")
    return 1 if unequal else 0


def _short(found: Mapping[str, str], key: str) -> str:
    text = found.get(key, "missing")
    return text[:12] if len(text) == 64 else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="checkout to run; default this one")
    parser.add_argument("--quick", action="store_true", help="a few cases, in two minutes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases by name: scheme/* moe/fp8")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for all cases")
    options = parser.parse_args()
    chosen = {name for pattern in options.only for name in fnmatch.filter(CASES, pattern)}
    names = [name for name, case in CASES.items() if name in chosen and (case.quick or not options.quick)]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        (Path(folder) / "models").mkdir()
        sides = (options.before.resolve(), options.after.resolve())
        before, after = (run(checkout, names, Path(folder), options.set) for checkout in sides)
    return compare(before, after, names)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        checkout, names, folder, settings, out = sys.argv[2:]
        serve(Path(checkout), json.loads(names), Path(folder), json.loads(settings), Path(out))
    else:
        sys.exit(main())
