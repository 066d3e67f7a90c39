"""Schema of state.json, the part of a checkpoint that is not tensors. Imports no torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from qarl.config import Config
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.schema import Count, Record, Sha256, checked
from qarl.storage.names import checkpoint_steps, step_name

if TYPE_CHECKING:
    from qarl.distributed.ranks import Ranks

Digests = dict[str, dict[str, Sha256]]  # inputs of a run: model, reward, objective -> part -> SHA-256
ModelFiles = dict[str, dict[str, Any]]  # config.json, generation_config.json -> dotted field -> resolved value


class DataPosition(Record):
    """`PromptStream.state()`. columns_fingerprint: None in checkpoints of versions that did not record it."""

    epoch: Count
    position: Count
    fingerprint: Sha256
    columns_fingerprint: Sha256 | None = None
    pass_rates: list[Annotated[tuple[int, float], Field(strict=False)]] = Field([])


class OptimizerMeta(Record):
    """Metadata of `Optimizer.state_tensors`. optimizer: its kind. tensors: their names, sorted."""

    optimizer: str
    tensors: list[str]


class PolicyState(Record):
    """Policy and base model of a checkpoint.

    version: optimizer steps taken. snapshot_sha256: digest of the tensors that the masters quantize to. started: see
    `started_at`; None if the chat template does not use the time. inputs, model_files: see `Inputs`; empty in
    checkpoints of versions that did not record them.
    """

    version: Count
    snapshot_sha256: Sha256
    started: str | None = None
    inputs: Digests = Field({})
    model_files: ModelFiles = Field({})


class LossScaleState(Record):
    """Result of `LossScale.state`."""

    value: Annotated[float, Field(gt=0)]
    dynamic: bool
    good: Count
    settled: bool


class SavedState(PolicyState):
    """State that a run resumes from.

    loss_scale: None in checkpoints of versions that did not record it. rollouts: See `AsyncEngine.state`; None if
    rollouts are not asynchronous.
    """

    data: DataPosition
    optimizer: OptimizerMeta
    skipped_in_a_row: Count
    loss_scale: LossScaleState | None = None
    rollouts: dict[str, Any] | None = None


def started_at(checkpoint: Path | None) -> datetime | None:
    """Return the local time of the run's first start, which its chat template sees on every later start too.

    Otherwise a template that inserts the date would render different prompts after midnight.

    Args:
        checkpoint: Its directory.

    Returns:
        None if there is no checkpoint, if its state.json cannot be read, which loading it reports, or if it does not
        record the time.
    """
    if checkpoint is None:
        return None
    try:
        return datetime.fromisoformat(read_json_object(checkpoint / "state.json", nonfinite=True)["started"])
    except (Unreadable, LookupError, TypeError, ValueError):
        return None


def first_start(config: Config, ranks: Ranks) -> datetime:
    """Return the local time of the run's first start, which its chat templates use as the current time. A collective.

    Every checkpoint of a run records the same time, so a damaged one is read too. A run without a checkpoint takes the
    current time of rank 0.
    """
    resume, folder = config.checkpoint.resume, config.run_dir / "checkpoints"
    found = [folder / step_name(step) for step in reversed(checkpoint_steps(folder))] if resume == "auto" else []
    if resume not in ("auto", "never"):
        found = [Path(resume).expanduser()]
    times = (started_at(checkpoint) for checkpoint in found if ranks.first)
    recorded = next((time for time in times if time is not None), None)
    first = ranks.gather((recorded or datetime.now()).isoformat())[0]
    return datetime.fromisoformat(first)


class Inputs(NamedTuple):
    """Inputs of a run, except its prompts.

    digests: SHA-256 by kind and part. files: Relevant values of the base model's configuration files; with values, an
    error can name the field that changed.
    """

    digests: Digests
    files: ModelFiles

    def with_weights(self, digest: str) -> Inputs:
        """Return a copy with the digest of the base model's weights."""
        return Inputs(self.digests | {"model": {"weights": digest, **self.digests["model"]}}, self.files)

    def with_teacher(self, digest: str) -> Inputs:
        """Return a copy with the digest of the teacher's tensors."""
        objective = {**self.digests.get("objective", {}), "teacher": digest}
        return Inputs({**self.digests, "objective": objective}, self.files)

    def record(self) -> dict[str, Any]:
        """Return `inputs` of environment.json."""
        return {**self.digests, **self.files}


S = TypeVar("S", bound=PolicyState)


def saved_state(model: type[S], state: dict[str, Any], place: str) -> S:
    """Validate the state of a checkpoint, or those of its fields that `model` has. Raises UserError.

    place: Name of the checkpoint, for the message.
    """
    try:
        return checked(model, state, place)
    except Unreadable as error:
        raise UserError(f"{place}: state.json is not of a run: {error.reason}; give another checkpoint") from None
