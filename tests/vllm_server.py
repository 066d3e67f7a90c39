"""As `fork_server`, with vLLM imported, which takes longer than most of its runs. Samplers of `qarl` have it too."""

import os

import fork_server

from qarl.rollout.vllm.settings import ENVIRONMENT

os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})

import tiny_runs  # noqa: F401 - imported for the forks, as are the next
import vllm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker

vllm.LLM  # noqa: B018 - imported when it is asked for


def run(argv: list[str], cwd: str = ".", before: str = "", program: str = "qarl") -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if program == "qarl":
        before += "\nimport forked_worker; forked_worker.install()"
    fork_server.run(argv, cwd, before, program)
