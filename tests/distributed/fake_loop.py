"""Run the command line with a fake training loop: ranks only exchange signals until one of them fails.

    python fake_loop.py train --nproc 3 CONFIG        as qarl
    python -m torch.distributed.run ... fake_loop.py train CONFIG

Environment variables: FAULT (e.g. `exit 1`): what a rank does in the third round. FORKED: ranks are forks.
"""

import os
import signal
import sys
import time
import types
from functools import partial
from pathlib import Path

ROUNDS = 1000


def install() -> None:
    """Replace the training loop of `qarl.api.train`."""
    module = types.ModuleType("qarl.training.loop")
    module.train = train
    sys.modules["qarl.training.loop"] = module


def train(config) -> int:
    from qarl.distributed.group import connect
    from qarl.policy.device import rank_device
    from qarl.training.interrupt import InterruptGuard
    from qarl.utils.signals import Interrupted

    say = partial(print, flush=True)
    with InterruptGuard(say) as guard, connect(config, rank_device(config.model.device)) as ranks:
        guard.defer()
        if ranks.first:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / "config.yaml").write_text(config.to_yaml())
        ranks.barrier()
        ranks.log_in(config.run_dir)
        (config.run_dir / f"pid-{ranks.rank}").write_text(str(os.getpid()))
        print(f"rank {ranks.rank} of {ranks.count} has begun", flush=True)
        fault, _, rank = os.environ.get("FAULT", "").partition(" ")
        for turn in range(ROUNDS):
            if signum := ranks.signal(guard.signum):
                return Interrupted(signum).exit_code
            if turn == 3 and fault == "end":
                return 0
            if fault == "agree":
                from qarl.errors import UserError

                ranks.all_agree(UserError("all know of it") if turn == 3 and int(rank) == ranks.rank else None)
            elif turn == 3 and rank and int(rank) == ranks.rank:
                FAULTS[fault](ranks)
            if fault in ("tensors", "late"):
                import torch
                import torch.distributed as dist

                dist.all_reduce(sums := torch.ones(4, device=ranks.device), group=ranks.tensors)
                assert sums.tolist() == [ranks.count] * 4  # waits for the device
            time.sleep(0.02)
    raise AssertionError("nothing ended this run")


def _user_error() -> None:
    from qarl.errors import UserError

    raise UserError("reward.functions: `x.py:f`: is broken\ndata.source: too")


def _bug() -> None:
    raise KeyError("nobody foresaw")


def _die_unseen() -> None:
    """Die while the launcher is stopped."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def _deaf(heard: Path) -> None:
    """Ignore signals. heard: File, made now and written to when a signal arrives."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: heard.write_text("one came"))
    heard.touch()
    time.sleep(1000)


FAULTS = {
    "exit": lambda ranks: os._exit(0),
    "unseen": lambda ranks: _die_unseen(),
    "stop": lambda ranks: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda ranks: time.sleep(1000),
    "user": lambda ranks: _user_error(),
    "bug": lambda ranks: _bug(),
    "tensors": lambda ranks: os.kill(os.getpid(), signal.SIGKILL),
    "late": lambda ranks: time.sleep(1000),
    "deaf": lambda ranks: _deaf(Path(f"heard-{ranks.rank}")),
}

if __name__ == "__main__":
    sys.modules["fake_loop"] = sys.modules["__main__"]
    install()
    from qarl.cli import launch, main

    launch._BOOT = launch._BOOT.replace("from qarl", "import fake_loop; fake_loop.install(); from qarl", 1)
    sys.path.append(str(Path(__file__).parent))
    if os.environ.get("FORKED"):
        import forked_popen

        forked_popen.install(launch)
        launch.STOP_S = 1.0
    main(sys.argv[1:])
