"""Capture and restore the state of a run in checkpoints."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from qarl_formats.compressed import from_state_dict
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.distributed.together import together
from qarl.errors import UserError
from qarl.policy.kept import saved_versions
from qarl.policy.model_identity import changed_inputs
from qarl.policy.policy import Policy
from qarl.rollout.asynchronous.engine import AsyncEngine
from qarl.rollout.asynchronous.saved_groups import changed_key
from qarl.storage.checkpoint import Checkpoint
from qarl.storage.loading import StoredTensors
from qarl.storage.pieces import ROLLOUTS, Piece
from qarl.storage.saved_state import DataPosition, SavedState, saved_state
from qarl.training.local_engine import ReplayEngine
from qarl.training.setup import Run
from qarl.weight_sync.fingerprints import METADATA
from qarl.weight_sync.snapshot import Snapshot, build_snapshot


def capture(run: Run, data: dict[str, Any]) -> tuple[list[Piece], dict[str, Any]]:
    """Collect the contents of a checkpoint. A collective.

    No random state is saved, because every sample and shuffle depends only on the seed and the step.

    Args:
        run: The run, after a finished step.
        data: `PromptStream.state()` after that step. Asynchronous runs save the current state instead, because an
            interrupted later step may have moved prompts from the stream into the queue.

    Returns:
        This rank's pieces of master weights, optimizer state and asynchronous rollouts; and the rest as JSON-able data.

    Raises:
        RuntimeError: This rank holds other codes than rank 0.
    """
    pieces, optimizer_meta = run.updates.pieces()
    ranks, digest = run.learner.ranks, run.policy.current.manifest().digest()
    first = ranks.gather(digest)[0]

    def same_codes() -> None:
        if digest != first:
            raise RuntimeError(f"rank {ranks.rank} on {socket.gethostname()} holds other codes than rank 0")

    together(ranks, same_codes)
    state = {
        "version": run.policy.version,
        "started": run.started,
        "data": data,
        "optimizer": optimizer_meta,
        "skipped_in_a_row": run.learner.skipped_in_a_row,
        "loss_scale": run.updates.scale.state(),
        "snapshot_sha256": digest,
        "inputs": run.inputs.digests,
        "model_files": run.inputs.files,
    }
    tensors: dict[str, Tensor] = {}
    if isinstance(run.source, AsyncEngine):
        tensors, state["rollouts"] = run.source.state()
        state["data"] = run.stream.state()
    elif isinstance(run.source, ReplayEngine):
        tensors = run.source.state()
    flat = ((name, tensor.detach().contiguous()) for name, tensor in tensors.items())
    pieces += [Piece(ROLLOUTS, name, tuple(tensor.shape), 0, tensor.view(-1)) for name, tensor in flat]
    return pieces, state


@torch.no_grad()
def restore(run: Run, checkpoint: Checkpoint, allowed: Collection[str] = ()) -> list[str]:
    """Restore a checkpoint, which may be from another number of ranks, and quantize its masters. A collective.

    Args:
        run: The run, before its first step.
        checkpoint: The checkpoint.
        allowed: `checkpoint.allow_changed`.

    Returns:
        One warning per allowed input that changed, and one if the number of ranks changed.

    Raises:
        UserError: The checkpoint is damaged or of another model, an input changed that `allowed` does not name, or the
            masters quantize to different codes.
    """
    ranks, path = run.learner.ranks, checkpoint.path
    state, changed = together(ranks, lambda: _fitting(run, checkpoint, allowed))
    try:
        run.updates.load(checkpoint.read, state.optimizer.model_dump(), state.version)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    run.learner.skipped_in_a_row = state.skipped_in_a_row
    run.updates.scale.load(None if state.loss_scale is None else state.loss_scale.model_dump())

    def require_codes() -> None:
        if run.policy.current.manifest().digest() != state.snapshot_sha256:
            raise UserError(
                f"{path}: its masters quantize to other codes than they did when it was saved; "
                "resume with that run's quant section and the package versions in its environment.json, "
                "or choose another train.run_dir"
            )

    together(ranks, require_codes)
    together(ranks, lambda: _load_rollouts(run, checkpoint, state))
    lines = [f"{what} changed since the checkpoint of step {checkpoint.step}" for what in changed]
    if checkpoint.ranks != ranks.count:
        lines.append(
            f"the number of ranks changed since the checkpoint of step {checkpoint.step} from {checkpoint.ranks} to "
            f"{ranks.count}: from here on sums are added in another order"
        )
    return lines


def _load_rollouts(run: Run, checkpoint: Checkpoint, state: SavedState) -> None:
    """Restore asynchronous rollouts: unused responses, and the weights of earlier versions. A replay needs the latter.

    Raises:
        UserError: The checkpoint has unused responses, but the run is not asynchronous or its sampling settings
            changed; or the rollouts are damaged.
    """
    saved, path, source = state.rollouts, checkpoint.path, run.source
    stored = checkpoint.tensors.get(ROLLOUTS, StoredTensors({}, {}))
    tensors = {name: stored[name] for name in stored}

    def kept() -> Iterator[Snapshot]:
        for version, own in saved_versions(tensors).items():
            yield stored_snapshot(run.policy, version, own)

    if saved is None:
        if isinstance(source, ReplayEngine):
            source.load(kept())
        return
    waiting = len(saved["groups"])
    key = changed_key(source.config, saved) if isinstance(source, AsyncEngine) else "rollout.async as it was"
    if key and waiting:
        raise UserError(
            f"{path}: {waiting} prompts were sampled ahead of the learner with another configuration than this run's; "
            f"set {key}, or choose another checkpoint.resume"
        )
    if key or not isinstance(source, AsyncEngine):
        return
    try:
        source.load(tensors, saved, kept())
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its asynchronous rollouts are damaged ({error!r}); set checkpoint.resume to another checkpoint"
        ) from error


def stored_snapshot(policy: Policy, version: int, tensors: Mapping[str, Tensor]) -> Snapshot:
    """Build the snapshot of an earlier version of a policy.

    Args:
        policy: The policy.
        version: The earlier version.
        tensors: Published tensors of that version by name, on any device.

    Raises:
        KeyError: A tensor is missing.
        ValueError: A tensor does not fit its scheme.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        there = tensor if name.endswith(METADATA) else tensor.to(policy.device)
        modules.setdefault(name.rpartition(".")[0], {})[name] = there

    def parameters() -> Iterator[tuple[str, LowBitWeight | Tensor]]:
        for name, master in policy.named_parameters():
            scheme, module = policy.scheme_of(name), name.rpartition(".")[0]
            if scheme is None:
                yield name, modules[module][name]
            else:
                yield name, from_state_dict(module, modules[module], scheme, (master.shape[0], master.shape[1]))

    return build_snapshot(version, parameters())


def _fitting(run: Run, checkpoint: Checkpoint, allowed: Collection[str]) -> tuple[SavedState, list[str]]:
    """Check that a checkpoint fits the run, and move the data to its position.

    Returns:
        State of the checkpoint, and descriptions of the allowed inputs that changed.
    """
    state = saved_state(SavedState, checkpoint.state, str(checkpoint.path))
    _require_masters(run, checkpoint)
    changed = _changed_inputs(run, state)
    if refused := [what for kind, what in changed if kind not in allowed]:
        kinds = ", ".join(sorted({kind for kind, _ in changed} | set(allowed)))
        raise UserError(
            f"{checkpoint.path}: {' and '.join(refused)} changed since it was saved; restore that, choose another "
            f"train.run_dir, or set checkpoint.allow_changed: [{kinds}]"
        )
    _require_optimizer(checkpoint, state)
    _load_position(run, state.data)
    return state, [what for _, what in changed]


def _require_masters(run: Run, checkpoint: Checkpoint) -> None:
    """Raise UserError unless the checkpoint's masters have the policy's names, shapes and dtypes."""
    masters = checkpoint.tensors.get("masters", StoredTensors({}, {}))
    parameters = dict(run.policy.named_parameters())
    if masters.keys() != parameters.keys():
        odd = sorted(masters.keys() ^ parameters.keys())[0]
        raise UserError(f"{checkpoint.path}: made for another model ('{odd}' is only in one of the two)")
    for name, parameter in parameters.items():
        for what, there, here in (
            ("shape", list(masters.shape(name)), list(parameter.shape)),
            ("dtype", *(str(x).removeprefix("torch.") for x in (masters.dtype(name), parameter.dtype))),
        ):
            if there != here:
                raise UserError(
                    f"{checkpoint.path}: made for another model ('{name}' has {what} {there} there, {here} here)"
                )


def _require_optimizer(checkpoint: Checkpoint, state: SavedState) -> None:
    """Raise UserError unless the optimizer's tensors are those of its list, with the shapes of their master weights."""
    stored = checkpoint.tensors.get("optimizer", StoredTensors({}, {}))
    masters = checkpoint.tensors["masters"]
    if odd := sorted(stored.keys() ^ set(state.optimizer.tensors)):
        raise UserError(
            f"{checkpoint.path}: optimizer state is incomplete: {odd[0]} is not in both the tensors and their list"
        )
    for name in stored:
        parameter, _, key = name.rpartition("/")
        expected = () if key == "step" else masters.shape(parameter) if parameter in masters else None
        if expected is None:
            raise UserError(
                f"{checkpoint.path}: optimizer state {name} belongs to a parameter that the model does not have"
            )
        for there, here in ((list(stored.shape(name)), list(expected)), (stored.dtype(name), torch.float32)):
            if there != here:
                raise UserError(f"{checkpoint.path}: optimizer state {name} is {there}, not {here}")


def _changed_inputs(run: Run, state: SavedState) -> list[tuple[str, str]]:
    """Return the inputs that differ from the checkpoint's run, causes before effects.

    Inputs that an older qarl did not record in the checkpoint are not compared.

    Returns:
        Pairs of a kind, as in `checkpoint.allow_changed`, and a description.
    """
    changed = changed_inputs(state, run.inputs)
    if state.data.fingerprint != run.stream.fingerprint:
        changed.append(("data", "the prompts (the data, or how model.path writes them as tokens)"))
    elif state.data.columns_fingerprint not in (None, run.stream.columns_fingerprint):
        changed.append(("data", "the columns beside the prompts (answers)"))
    return changed


def _load_position(run: Run, data: DataPosition) -> None:
    """Move the prompt stream to the position of a checkpoint.

    If the data changed, the position is kept too. If it is past the end of the new data, the next epoch begins.
    """
    if data.fingerprint == run.stream.fingerprint and data.position > len(run.stream):
        raise UserError(
            f"data: the checkpoint is at prompt {data.position} of {len(run.stream)}; set checkpoint.resume to another "
            "checkpoint"
        )
    run.stream.load_state(
        {
            "epoch": data.epoch,
            "position": min(data.position, len(run.stream)),
            "fingerprint": run.stream.fingerprint,
            "columns_fingerprint": run.stream.columns_fingerprint,
            "pass_rates": data.pass_rates if data.fingerprint == run.stream.fingerprint else [],
        }
    )
