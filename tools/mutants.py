"""Mutation testing: apply one small fault at a time, and run the tests that should fail.

    python tools/mutants.py benchmarks/mutants.yaml --out mutants.json [--only kernels/]

The YAML list has one entry per fault (mutant): `file`, `old` (text that occurs exactly once in the file), `new`, and
`tests` (arguments of pytest). Use a clean checkout: files are rewritten in place and restored afterwards. The exit code
is 1 unless every mutant is killed, which means that its tests fail.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT, ROOT / "kernels", ROOT / "quant_formats")
TIMEOUT_S = 900


def apply(mutant: dict) -> dict:
    """Run the tests of one mutant, restore the file, and return the entry with `result` and `seconds`."""
    path = ROOT / mutant["file"]
    original = path.read_text()
    if original.count(mutant["old"]) != 1:
        return mutant | {"result": f"'old' occurs {original.count(mutant['old'])} times"}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant["tests"].split()]
    began = time.monotonic()
    try:
        path.write_text(original.replace(mutant["old"], mutant["new"]))
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        code = 1
    finally:
        path.write_text(original)
    # 2: the mutant breaks an import at collection, which also counts. Any other code is an error in the list.
    result = {0: "survived", 1: "killed", 2: "killed"}.get(code, f"pytest ended with {code}")
    return mutant | {"result": result, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="prefix of the files to mutate")
    options = parser.parse_args()
    results = []
    for mutant in yaml.safe_load(options.list.read_text()):
        if mutant["file"].startswith(options.only):
            results.append(apply(mutant))
            print(f"{results[-1]['result']:10} {mutant['file']}: {mutant['old'].strip()[:60]!r}", flush=True)
    killed = sum(result["result"] == "killed" for result in results)
    print(f"{killed} of {len(results)} killed")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main())
