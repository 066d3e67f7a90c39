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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path

import yaml
from same_bits_cases import CASES, Case
from tiny_models import save_tiny_model, tiny_settings

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900  # for one case
UNREPEATABLE = ("time/", "throughput/", "memory/")
Digests = dict[str, dict[str, str]]  # case -> what -> its digest or value


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
    run, config = folder / "run", checkout / case.model
    if not case.model.endswith(".yaml"):
        family, _, layers = case.model.partition(" ")
        model = folder.parents[1] / "models" / case.model.replace(" ", "-")
        if not model.exists():
            save_tiny_model(model, family, num_hidden_layers=int(layers or 2))
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(tiny_settings(model, checkpoint={"keep_last": 1})))
    argv = ["train", str(config), *shlex.split(case.overrides), *settings, f"train.run_dir={run}"]
    if case.resume:
        _qarl([*argv, "train.steps=1"], case.ranks, folder)
    _qarl(argv, case.ranks, folder)
    if case.export:
        _qarl(["export", str(run), str(run / "export"), "--no-vllm"], 1, folder)


def _qarl(argv: list[str], ranks: int, folder: Path) -> None:
    """Run a `qarl` command line on each rank, in forks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    log, forks = folder / "log", get_context("fork")
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    given = [group | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [forks.Process(target=_rank, args=(argv, own if ranks > 1 else {}, log)) for own in given]
    for one in started:
        one.start()
    for one in started:
        one.join(LIMIT_S)
        one.kill()
        one.join()
    if any(one.exitcode for one in started):
        raise RuntimeError("\n".join(log.read_text(errors="replace").split("\n")[-12:]))


def _rank(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """In a fork: the command line, whose output is appended to `log`."""
    from qarl import cli

    os.environ |= environment
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
