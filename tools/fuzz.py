"""Fuzz the command line with mutated input. A case is accepted, refused with a one-line error, or bad.

    python tools/fuzz.py                            # the series of the day
    python tools/fuzz.py --seed 1 --count 1000 --json benchmarks/results/fuzz.json
    python tools/fuzz.py --seed 1 --only run-17

Bad cases: a traceback (also for exceeding the memory limit), a hang, death by a signal, an unexpected exit code, an
error message that is missing or controls the terminal, and exit code 0 after damage that must be refused. The cases of
a seed do not depend on the count. The exit code is 1 if any case is bad.
"""

import argparse
import datetime
import gc
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with a thread pool must not fork
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from fuzzing.base import make_base
from fuzzing.series import names, run_case
from fuzzing.verdict import Result, Tally, describe
from harness import command_line, out_file

# Modules that commands import lazily: imported once here, not in every case.
WARM = """
torch transformers matplotlib.pyplot rich.table psutil safetensors.torch compressed_tensors pyarrow.parquet
qarl.training.loop qarl.evaluation.evaluate qarl.exporting.job qarl.exporting.verify qarl.inference.generate
qarl.comparison.offline.compare_offline qarl.comparison.compare qarl.diagnose.run qarl.report.run_report
transformers.models.llama.modeling_llama
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add, train = parser.add_argument, "first train N configurations that `qarl check` accepts, two steps each"
    add("--seed", default=datetime.date.today().isoformat(), help="seed of the series, any text; default %(default)s")
    add("--count", type=int, default=300, help="number of cases; default %(default)s")
    add("--accepted-train", type=int, default=0, metavar="N", help=train)
    add("--only", metavar="KIND-N", help="run only this case, and keep its directory")
    add("--json", type=out_file, metavar="OUT", help="write counts and bad cases to this file")
    return parser.parse_args(arguments)


def results(options: argparse.Namespace, base: Path, root: Path) -> Iterator[Result]:
    """Yield the result of each case."""
    from qarl.cli import main as command

    left, number = options.accepted_train, 0
    while left:
        result = run_case(options.seed, f"valid-{number}", base, root, command)
        left -= result.case.command == "train"
        number += 1
        yield result
    for name in names(options.seed, options.count):
        yield run_case(options.seed, name, base, root, command)


def main() -> int:
    options = parse()
    begin = time.perf_counter()
    for name in WARM.split():
        import_module(name)
    import_module("transformers").utils.logging.disable_progress_bar()
    from qarl.cli import main as command

    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    base = make_base(root / "base", command)
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork does not touch, and thereby copy, these objects
    if options.only is not None:
        result = run_case(options.seed, options.only, base, root, command, keep=True)
        print(describe(options.seed, result, lines=200), f"directory: {result.case.directory}", sep="\n")
        return int(result.verdict.status == "bad")
    tally = Tally(options.seed)
    for result in results(options, base, root):
        tally.add(result)
        if result.verdict.status == "bad":
            print(tally.bad[-1], flush=True)
    shutil.rmtree(root)
    print(tally.table())
    if options.json is not None:
        record = tally.record(shlex.join(sys.argv), time.perf_counter() - begin)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(tally.bad))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # normal interpreter exit takes a second, and some libraries print at exit
