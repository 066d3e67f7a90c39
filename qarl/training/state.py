"""What a checkpoint of a run holds, and putting it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.storage.checkpoint import Checkpoint
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
    }
    return {"masters": masters, "optimizer": optimizer}, state


@torch.no_grad()
def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Put a checkpoint back and quantize its masters again. Raises UserError if the codes are not those of the run."""
    masters = checkpoint.tensors["masters"]
    parameters = dict(run.policy.named_parameters())
    if masters.keys() != parameters.keys():
        odd = sorted(masters.keys() ^ parameters.keys())[0]
        raise UserError(f"{checkpoint.path}: made for another model ('{odd}' is in one of the two only)")
    for name, parameter in parameters.items():
        if masters[name].shape != parameter.shape:
            raise UserError(f"{checkpoint.path}: made for another model ('{name}' has shape "
                            f"{list(masters[name].shape)} there, {list(parameter.shape)} here)")  # fmt: skip
    run.stream.load_state(checkpoint.state["data"])
    for name, parameter in parameters.items():
        parameter.copy_(masters[name])
    try:
        run.optimizer.load_state_tensors(checkpoint.tensors.get("optimizer", {}), checkpoint.state["optimizer"])
    except ValueError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    run.learner.skipped_in_a_row = checkpoint.state["skipped_in_a_row"]
    run.policy.refresh(checkpoint.state["version"])
    if run.policy.current.manifest().digest() != checkpoint.state["snapshot_sha256"]:
        raise UserError(f"{checkpoint.path}: its masters quantize to other codes than they did when it was saved; "
                        "resume with that run's quant section and the package versions in its environment.json, "
                        "or choose another train.run_dir")  # fmt: skip
