"""state.json of a run's checkpoint: what is no tensor, with its types. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.schema import Record, Sha256, checked

Count = Annotated[int, Field(ge=0, lt=2**53)]
Digests = dict[str, dict[str, Sha256]]  # what a run is made from: model, reward -> part -> digest


class DataPosition(Record):
    """`PromptStream.state()`. columns_fingerprint: None of a checkpoint from before there was one."""

    epoch: Count
    position: Count
    fingerprint: Sha256
    columns_fingerprint: Sha256 | None = None


class OptimizerMeta(Record):
    """As `Optimizer.state_tensors` gives it. optimizer: its kind. tensors: their names, sorted."""

    optimizer: str
    tensors: list[str]


class PolicyState(Record):
    """What is said of the policy. version: its own. snapshot_sha256: of what the masters quantize to."""

    version: Count
    snapshot_sha256: Sha256


class SavedState(PolicyState):
    """What a run goes on from. inputs: empty of a checkpoint from before they were kept."""

    data: DataPosition
    optimizer: OptimizerMeta
    skipped_in_a_row: Count
    inputs: Digests = Field({})


S = TypeVar("S", bound=PolicyState)


def saved_state(model: type[S], state: dict[str, Any], place: str) -> S:
    """The state of a checkpoint that is a run's, or what `model` has of it. place: the checkpoint, for the message.

    Raises UserError.
    """
    try:
        return checked(model, state, place)
    except Unreadable as error:
        raise UserError(f"{place}: state.json is not of a run: {error.reason}; give another checkpoint") from None
