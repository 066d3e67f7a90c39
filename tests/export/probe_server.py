"""Runs `qarl.exporting.vllm_probe`, with vLLM imported, which takes longer than a probe: orders are {argv}."""

from __future__ import annotations

import os
import runpy
import sys

from forks import serve

from qarl.exporting.vllm_probe import ENVIRONMENT

os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})

import vllm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker


def run(argv: list[str]) -> None:
    sys.argv = ["vllm_probe", *argv]
    runpy.run_module("qarl.exporting.vllm_probe", run_name="__main__")


if __name__ == "__main__":
    vllm.LLM  # noqa: B018 - imported when it is asked for
    serve(run)
