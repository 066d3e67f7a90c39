"""benchmarks/mutants.yaml follows the code: every fault can be planted, and its tests exist."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_every_fault_is_in_the_code_once_and_names_tests_that_exist():
    for mutant in yaml.safe_load((ROOT / "benchmarks/mutants.yaml").read_text()):
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant
        for test in mutant["tests"].split():
            path, _, name = test.partition("::")
            assert (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text()), mutant
