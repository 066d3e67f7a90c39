"""What a checkpoint of a run holds, and putting it back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.storage.checkpoint import Checkpoint
from qarl.storage.saved_state import DataPosition, SavedState, saved_state
from qarl.training.setup import Run


def capture(run: Run, data: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Masters, optimizer and positions -> (tensors by group, JSON-able state). data: `PromptStream.state()`.

    No random state is among them: every draw and shuffle is counted from the seed and the step.
    """
    optimizer, optimizer_meta = run.optimizer.state_tensors()
    masters = {name: parameter.detach() for name, parameter in run.policy.named_parameters()}
    state = {
        "version": run.policy.version,
        "data": data,
        "optimizer": optimizer_meta,
        "skipped_in_a_row": run.learner.skipped_in_a_row,
        "snapshot_sha256": run.policy.current.manifest().digest(),
        "inputs": run.inputs,
    }
    return {"masters": masters, "optimizer": optimizer}, state


@torch.no_grad()
def restore(run: Run, checkpoint: Checkpoint, allowed: Collection[str] = ()) -> list[str]:
    """Put a checkpoint back and quantize its masters again.

    allowed: `checkpoint.allow_changed`. Returns what has changed of that, a line each. Raises UserError for a
    checkpoint of another model, for inputs that changed and may not, and if the codes are not those of the run.
    """
    state = saved_state(SavedState, checkpoint.state, str(checkpoint.path))
    masters = _masters(run, checkpoint)
    changed = _changed_inputs(run, state)
    for kind, what in changed:
        if kind not in allowed:
            raise UserError(
                f"{checkpoint.path}: {what} changed since it was saved; restore that, choose another "
                f"train.run_dir, or set checkpoint.allow_changed: [{kind}]"
            )
    _load_position(run, state.data)
    for name, parameter in run.policy.named_parameters():
        parameter.copy_(masters[name])
    try:
        run.optimizer.load_state_tensors(checkpoint.tensors.get("optimizer", {}), state.optimizer.model_dump())
    except ValueError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    run.learner.skipped_in_a_row = state.skipped_in_a_row
    run.policy.refresh(state.version)
    if run.policy.current.manifest().digest() != state.snapshot_sha256:
        raise UserError(
            f"{checkpoint.path}: its masters quantize to other codes than they did when it was saved; "
            "resume with that run's quant section and the package versions in its environment.json, "
            "or choose another train.run_dir"
        )
    return [f"{what} changed since the checkpoint of step {checkpoint.step}" for _, what in changed]


def _masters(run: Run, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The checkpoint's masters, which fit the policy's."""
    masters = checkpoint.tensors.get("masters", {})
    parameters = dict(run.policy.named_parameters())
    if masters.keys() != parameters.keys():
        odd = sorted(masters.keys() ^ parameters.keys())[0]
        raise UserError(f"{checkpoint.path}: made for another model ('{odd}' is in one of the two only)")
    for name, parameter in parameters.items():
        for what in ("shape", "dtype"):
            there, here = getattr(masters[name], what), getattr(parameter, what)
            if there != here:
                shown = [list(x) if what == "shape" else str(x).removeprefix("torch.") for x in (there, here)]
                raise UserError(
                    f"{checkpoint.path}: made for another model ('{name}' has {what} {shown[0]} there, {shown[1]} here)"
                )
    return masters


def _changed_inputs(run: Run, state: SavedState) -> list[tuple[str, str]]:
    """(kind in `checkpoint.allow_changed`, what) of each input that is not what the checkpoint's run had; what an older
    checkpoint does not say is taken as it is."""
    changed: list[tuple[str, str]] = []
    if state.data.fingerprint != run.stream.fingerprint:
        changed.append(("data", "the prompts (the data, or how model.path writes them as tokens)"))
    elif state.data.columns_fingerprint not in (None, run.stream.columns_fingerprint):
        changed.append(("data", "the columns beside the prompts (answers)"))
    for kind, parts in state.inputs.items():
        named = {
            "model": "model.path: its {}",
            "reward": "reward.functions: the source of `{}`",
            "objective": "objective.path: the source of `{}`",
        }.get(kind, kind)
        here = run.inputs.get(kind, {})
        different = [part for part in {**parts, **here} if parts.get(part) != here.get(part)]
        changed += [(kind, named.format(part)) for part in different]
    return changed


def _load_position(run: Run, data: DataPosition) -> None:
    """In changed data the place is kept; behind its end a new epoch begins."""
    if data.fingerprint == run.stream.fingerprint and data.position > len(run.stream):
        raise UserError(f"data: the checkpoint is at prompt {data.position} of {len(run.stream)}; give another one")
    run.stream.load_state(
        {
            "epoch": data.epoch,
            "position": min(data.position, len(run.stream)),
            "fingerprint": run.stream.fingerprint,
            "columns_fingerprint": run.stream.columns_fingerprint,
        }
    )
