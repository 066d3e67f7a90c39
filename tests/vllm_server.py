"""Programs in forks of a process that has vLLM imported, which takes longer than most of them.

Orders are {argv, cwd, before, program}: a `qarl` command line, or the arguments of a program, a path or a module.
`before` is Python to run first. Samplers that `qarl` starts are forks too.
"""

import os
import sys
from pathlib import Path

from forks import run_program, serve

from qarl import cli
from qarl.rollout.vllm.settings import ENVIRONMENT

os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
sys.path.extend(str(Path(__file__).parent / folder) for folder in ("training", "rollout_vllm", "../tools"))

import forked_worker
import tiny_runs  # noqa: F401 - imported for the forks, as are the next
import torch.utils.tensorboard  # noqa: F401
import vllm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker

import qarl.training.loop  # noqa: F401


def run(argv: list[str], cwd: str = ".", before: str = "", program: str = "qarl") -> None:
    os.chdir(cwd)
    sys.argv = [program, *argv]
    exec(before, {})
    if program == "qarl":
        forked_worker.install()
        cli.main(argv)
    else:
        run_program(program, argv)


if __name__ == "__main__":
    vllm.LLM  # noqa: B018 - imported when it is asked for
    serve(run)
