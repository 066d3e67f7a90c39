"""Which rank of a run this process is, as its launcher says in the environment. Imports no torch.

torchrun and the deepspeed launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `qarl train --nproc`
sets the first three, and QARL_RANKS, a private directory that the ranks meet in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qarl.errors import UserError

MEETING = "QARL_RANKS"

# What launchers tell a rank, and a process that it starts must not take for its own.
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    MEETING,
}
_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Place:
    """A process among those of its run. local: its number on its machine, which is that of its GPU.

    meeting: directory of `qarl train --nproc`, None under another launcher.
    """

    rank: int
    count: int
    local: int
    meeting: Path | None


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place; None where it is the only one. Raises UserError where the environment contradicts itself.

    A launcher of one process is no launcher: WORLD_SIZE=1 is None.
    """
    count = _number("WORLD_SIZE", environment, default=1)
    if count <= 1:
        return None
    if "RANK" not in environment:
        raise UserError(
            f"WORLD_SIZE: is {count}, and RANK is not set; start all ranks by qarl train --nproc, torchrun or "
            "deepspeed, or unset it"
        )
    rank = _number("RANK", environment, default=0)
    if rank >= count:
        raise UserError(f"RANK: {rank} is not below WORLD_SIZE = {count}")
    meeting = environment.get(MEETING)
    return Place(rank, count, _number("LOCAL_RANK", environment, default=0), Path(meeting) if meeting else None)


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that a rank starts and that is none itself."""
    return {
        name: text for name, text in environment.items() if name not in _OF_RANKS and not name.startswith(_PREFIXES)
    }


def rank_of_several() -> bool:
    """Whether this process is one of several ranks."""
    try:
        return place() is not None
    except UserError:
        return False


def own_arguments(argv: list[str] | None) -> list[str]:
    """The command line without the `--local_rank=0` that the deepspeed launcher puts in front of it."""
    own = sys.argv[1:] if argv is None else argv
    launched = "RANK" in os.environ and own and own[0].startswith(("--local_rank=", "--local-rank="))
    return own[1:] if launched else own


def log_name(rank: int) -> str:
    """The file for what a rank prints that is not the first."""
    return f"rank-{rank:03d}.log"


def _number(name: str, environment: Mapping[str, str], default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise UserError(f"{name}: '{text[:40]}' in the environment is no number of a launcher's; unset it")
    return int(text)
