"""Starts the sampler's process as a fork of the learner's, so that it need not import anything again."""

import sys
from functools import partial
from typing import Any

import forked_popen

from qarl.rollout import child
from qarl.rollout import vllm_worker as worker
from qarl.rollout.vllm import process
from qarl.rollout.vllm.host import Host


def _serve(host: type, command: list[str]) -> None:
    """Run `python -m qarl.rollout.child` with another class of host."""
    sys.argv = command[3:]
    worker.Host = host
    worker.import_ahead = getattr(host, "import_ahead", worker.import_ahead)
    child.main()


def install(host: type = Host, replace: Any = setattr) -> None:
    """Make `SamplerProcess` start forks that run a `host`. replace: `monkeypatch.setattr` in a test."""
    popen = partial(forked_popen.ForkedPopen, body=partial(_serve, host))
    forked_popen.install(process, popen, replace)
