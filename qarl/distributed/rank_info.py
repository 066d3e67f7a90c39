"""Rank, number of ranks and store address of this process, from the launcher's environment. Imports no torch.

torchrun and the deepspeed launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `qarl train --nproc`
sets the first three, and QARL_RANKS, a private directory in which the ranks find each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qarl.errors import UserError
from qarl.inputs.paths import shown_path

RANKS_VARIABLE = "QARL_RANKS"
MOST_RANKS = 65_536  # above this WORLD_SIZE is a mistake, and lists with one entry per rank would exhaust memory

_FIX = "start the ranks with qarl train --nproc, torchrun or deepspeed"

# Variables that launchers set for a rank. Its child processes must not inherit them.
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    RANKS_VARIABLE,
}
_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_")


@dataclass(frozen=True)
class RankInfo:
    """The position of one process among the ranks of a run.

    Attributes:
        rank: Number of this process, 0 to count - 1.
        count: Number of ranks.
        local: Number of this process on its machine; the index of its GPU.
        directory: Directory of `qarl train --nproc`; None under another launcher.
        address: Host and port of torch's store; None under `qarl train --nproc`.
    """

    rank: int
    count: int
    local: int
    directory: Path | None
    address: tuple[str, int] | None = None


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Read the rank and number of ranks of this process from the environment. An empty variable counts as unset.

    Returns:
        The rank info, or None if WORLD_SIZE is unset or 1: the process is the only one of its run.

    Raises:
        UserError: A variable is missing, is not a number, is out of range, or contradicts another one.
    """
    if not environment.get("WORLD_SIZE"):
        return None
    count = _number("WORLD_SIZE", environment)
    if not 1 <= count <= MOST_RANKS:
        raise UserError(f"WORLD_SIZE: {count} in the environment must be between 1 and {MOST_RANKS:,}; {_FIX}")
    if count > 1 and not environment.get("RANK"):
        raise UserError(f"WORLD_SIZE: is {count}, and RANK is not set; {_FIX}")
    rank = _number("RANK", environment)
    if rank >= count:
        raise UserError(f"RANK: {rank} is not below WORLD_SIZE = {count}; {_FIX}")
    if count == 1:
        return None
    local = _number("LOCAL_RANK", environment)
    if local >= count:
        raise UserError(f"LOCAL_RANK: {local} is not below WORLD_SIZE = {count}; {_FIX}")
    if directory := environment.get(RANKS_VARIABLE):
        if not Path(directory).is_dir():
            raise UserError(
                f"{RANKS_VARIABLE}: '{shown_path(directory)}' in the environment is not a directory; unset it"
            )
        return RankInfo(rank, count, local, Path(directory))
    return RankInfo(rank, count, local, None, _address(environment))


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. Raises UserError if one is missing, or cannot be a host name or a port."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(f"{name}: is not set, and WORLD_SIZE is {environment['WORLD_SIZE']}; {_FIX}")
    host = environment["MASTER_ADDR"]
    try:
        host.encode("idna")
        known = host == "".join(host.split()) and "/" not in host
    except UnicodeError:
        known = False
    if not known:
        raise UserError(f"MASTER_ADDR: {host[:80]!r} in the environment is not a host name or an address; {_FIX}")
    port = _number("MASTER_PORT", environment)
    if not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT: {port} in the environment must be between 1 and 65535; {_FIX}")
    return host, port


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a child process that is not a rank."""
    return {
        name: text for name, text in environment.items() if name not in _OF_RANKS and not name.startswith(_PREFIXES)
    }


def rank_of_several() -> bool:
    """Whether this process is one of several ranks."""
    try:
        return rank_info() is not None
    except UserError:
        return False


def own_arguments(argv: list[str] | None) -> list[str]:
    """Return the command line without the `--local_rank=0` that the deepspeed launcher prepends."""
    own = sys.argv[1:] if argv is None else argv
    launched = "RANK" in os.environ and own and own[0].startswith(("--local_rank=", "--local-rank="))
    return own[1:] if launched else own


def log_name(rank: int) -> str:
    """Return the log file name of a rank other than the first."""
    return f"rank-{rank:03d}.log"


def _number(name: str, environment: Mapping[str, str]) -> int:
    """The integer in an environment variable, 0 if it is unset or empty. Raises UserError for any other text."""
    text = environment.get(name) or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise UserError(f"{name}: {text[:40]!r} in the environment is not a number; unset it, or {_FIX}")
    return int(text)
