"""Decisions that all ranks of a run take together, each in one function.

A rank that skipped an update, stopped or saved alone would leave the others waiting, or with other weights. So these
functions decide from what is the same on all of them (the whole batch, the norm of the whole gradient, the step), and
their callers call them at the same points whatever a rank has of its own. The fifth, whether a signal stops the run
here, is `qarl.training.interrupt.InterruptGuard.check`.
"""

from __future__ import annotations

import math

from qarl.config.checkpoint import CheckpointConfig
from qarl.objectives import Totals
from qarl.training.batch import Part


def minibatch_totals(minibatch: Part, max_response_length: int) -> Totals:
    """The sizes that losses are divided by: of the whole minibatch, wherever its responses are."""
    return Totals(len(minibatch), minibatch.tokens, max_response_length)


def update_is_taken(grad_norm: float) -> bool:
    """Whether the optimizer steps on this gradient. grad_norm: of all masters; one that is not finite is skipped."""
    return math.isfinite(grad_norm)


def too_many_skipped(in_a_row: int, allowed: int) -> bool:
    """Whether the run ends after so many skipped updates (`train.max_skipped_steps`)."""
    return in_a_row > allowed


def save_is_due(step: int, config: CheckpointConfig) -> bool:
    """Whether a checkpoint is written after training step `step`, counted from 1."""
    return step % config.every == 0
