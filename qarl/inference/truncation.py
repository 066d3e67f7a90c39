"""What a user may ask tokens to be drawn from, on the command line."""

from __future__ import annotations

from qarl.config.limits import VOCABULARY
from qarl.errors import UserError


def check_truncation(top_k: int, top_p: float, min_p: float) -> None:
    """Raise UserError, by the option's name, for values that mean nothing; see `qarl_kernels.truncation.Truncation`."""
    if not 0 <= top_k <= VOCABULARY:
        raise UserError(f"--top-k: {top_k} is no number of tokens; give 0 (off) to {VOCABULARY:,}")
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p: {top_p} is no probability above 0; give up to 1 (off)")
    if not 0 <= min_p < 1:
        raise UserError(f"--min-p: {min_p} is no fraction below 1; give 0 (off) or more")
