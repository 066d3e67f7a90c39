"""Fork `qarl` command lines and other programs. Comparison members and sampler processes are forked too."""

import os
import sys

import forked_popen
import torch.utils.tensorboard  # noqa: F401 - imported for the forks
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from forks import run_program
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import qarl.exporting.verify
import qarl.report.run_report
import qarl.training.loop  # noqa: F401
from qarl import cli
from qarl.comparison import start_members
from qarl.rollout.vllm import process

get_checkpoint_conversion_mapping("llama")  # it compiles hundreds of patterns, once per process


def run(argv: list[str], cwd: str = ".", before: str = "", program: str = "qarl") -> None:
    """Run a program in this process. before: Python code to run first. program: `qarl`, a Python file, or `-m`."""
    os.chdir(cwd)
    sys.argv = [program, *argv]
    for module in (start_members, process):
        forked_popen.install(module)
    exec(before, {})
    if program == "qarl":
        cli.main(argv)
    else:
        run_program([program, *argv])
