"""Read the saved rollouts of a step, RUN/rollouts/NNNNNN.safetensors, and choose a step to diagnose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.objectives.segments import Segments
from qarl.storage.names import checkpoint_steps, step_files, step_name
from qarl.storage.tensorfile import read_tensors
from qarl.training.batch import own_tokens

_INTEGERS = ("prompt_lengths", "response_lengths", "prompt_tokens", "response_tokens", "groups", "version")
_TOKENS = ("prompt_tokens", "response_tokens")
_FLOATS = ("logp_sampler", "logp_old", "logp", "advantages", "rewards")


@dataclass(frozen=True)
class SavedStep:
    """All R responses of a training step, on the CPU. T is the number of tokens written by the policy.

    Attributes:
        step: The training step.
        version: Policy version that sampled.
        prompts: Prompt token ids per response.
        responses: Response token ids per response.
        groups: Index of the prompt in the step, per response.
        logp_sampler: (T,) float32, packed, as the sampler reported.
        logp_old: (T,) float32, learner at the rollout's weights.
        logp: (T,) float32, the learner's last training forward over the token.
        advantages: (R,) float32.
        rewards: (R,) float32.
        routing: Expert routing per response, see `Rollout.routing`; None if the sampler did not report it.
        written: Whether the policy wrote each response token; None: all tokens.
        versions: Policy version that sampled each response token; None: `version` for all tokens.
        prompt_ids: `Prompt.id` per response; None in runs of earlier versions of qarl.
    """

    step: int
    version: int
    prompts: list[list[int]]
    responses: list[list[int]]
    groups: list[int]
    logp_sampler: Tensor
    logp_old: Tensor
    logp: Tensor
    advantages: Tensor
    rewards: Tensor
    routing: list[Tensor] | None = None
    written: list[list[bool]] | None = None
    versions: list[list[int]] | None = None
    prompt_ids: list[int] | None = None

    @property
    def own_tokens(self) -> list[list[int]]:
        """Token ids of each response that the policy wrote."""
        return own_tokens(self.responses, self.written)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each response that the policy wrote."""
        return [len(tokens) for tokens in self.own_tokens]

    @property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.lengths)

    def __len__(self) -> int:
        return len(self.responses)


def pick_step(run: Path, step: int | None) -> int:
    """Return `step`, or the last step with both rollouts and a checkpoint if it is None.

    Raises:
        UserError: Rollouts or checkpoint are missing; the message names the key that enables them.
    """
    drawn, saved = rollout_steps(run), checkpoint_steps(run / "checkpoints")
    if not drawn:
        raise UserError(
            f"{run}: holds no rollouts/*.safetensors; train with logging.rollout_tensors: true "
            "(logging.rollouts_every sets how often they are saved)"
        )
    if not saved:
        raise UserError(f"{run}: holds no checkpoint; train for at least checkpoint.every steps, or to the end")
    if step is None:
        both = sorted(set(drawn) & set(saved))
        if not both:
            raise UserError(
                f"{run}: no step has both rollouts ({_listed(drawn)}) and a checkpoint ({_listed(saved)}); "
                "set logging.rollouts_every and checkpoint.every to coincide, and checkpoint.keep_last: 0 to keep "
                "all checkpoints"
            )
        return both[-1]
    if step not in drawn:
        raise UserError(
            f"--step: {run} has no rollouts/{step_name(step)}.safetensors; it has {_listed(drawn)} "
            "(logging.rollouts_every)"
        )
    if step not in saved:
        raise UserError(
            f"--step: {run} has no checkpoint of step {step}; it has {_listed(saved)} (checkpoint.every, "
            "checkpoint.keep_last)"
        )
    return step


def rollout_steps(run: Path) -> list[int]:
    """Steps with rollouts saved as tensors, ascending."""
    return list(step_files(run / "rollouts", ".safetensors"))


def read_rollouts(run: Path, step: int) -> SavedStep:
    """Read the rollouts of one step. Raises UserError if the file is damaged."""
    path = run / "rollouts" / f"{step_name(step)}.safetensors"
    try:
        tensors = read_tensors(path)
    except Unreadable as error:
        raise UserError(f"{error}; give another --step") from error
    missing = [name for name in (*_INTEGERS, *_FLOATS) if name not in tensors]
    if missing:
        raise UserError(f"{path}: holds no tensor {missing[0]!r}; give another --step")
    wrong = [name for name in _INTEGERS if tensors[name].dtype not in (torch.int32, torch.int64)]
    wrong += [name for name in _FLOATS if tensors[name].dtype != torch.float32]
    if wrong:
        raise UserError(
            f"{path}: {wrong[0]} is {str(tensors[wrong[0]].dtype).removeprefix('torch.')}, which is not "
            "the dtype that a run writes; give another --step"
        )
    flat = [name for name in (*_INTEGERS, *_FLOATS) if tensors[name].ndim != 1]
    if flat:
        raise UserError(
            f"{path}: {flat[0]} has shape {list(tensors[flat[0]].shape)}, expected one dimension; give another --step"
        )
    lengths = {name: tensors[name].tolist() for name in ("prompt_lengths", "response_lengths")}
    if not all(lengths.values()) or min(map(min, lengths.values())) < 1:
        raise UserError(f"{path}: holds an empty prompt or response, or no responses; give another --step")
    tokens, responses = sum(lengths["response_lengths"]), len(lengths["response_lengths"])
    written = _written(path, tensors.get("written"), lengths["response_lengths"])
    own = tokens if written is None else sum(map(sum, written))
    expected = {
        "prompt_lengths": responses,
        "prompt_tokens": sum(lengths["prompt_lengths"]),
        "groups": responses,
        "response_tokens": tokens,
        "logp_sampler": own,
        "logp_old": own,
        "logp": own,
        "advantages": responses,
        "rewards": responses,
    }
    for name, size in expected.items():
        if tensors[name].shape != (size,):
            raise UserError(f"{path}: {name} has shape {list(tensors[name].shape)}, not [{size}]; give another --step")
    if tensors["version"].numel() != 1:
        raise UserError(f"{path}: version has shape {list(tensors['version'].shape)}, not [1]; give another --step")
    spoiled = [n for n in _FLOATS if tensors[n].isnan().any()] + [n for n in _TOKENS if (tensors[n] < 0).any()]
    if spoiled:
        raise UserError(f"{path}: {spoiled[0]} holds NaN or a negative token id; give another --step")
    groups = tensors["groups"].tolist()
    members = groups.count(groups[0])
    if groups != [i // members for i in range(responses)]:
        raise UserError(
            f"{path}: groups does not number the prompts in order, with equal group sizes; give another --step"
        )
    parts = {
        name: [part.tolist() for part in tensors[f"{name}_tokens"].split(lengths[f"{name}_lengths"])]
        for name in ("prompt", "response")
    }
    columns = {name: tensors[name] for name in _FLOATS}
    routing = _routing(path, tensors.get("routing"), [p + r - 1 for p, r in zip(*lengths.values(), strict=True)])
    version = int(tensors["version"])
    versions = _versions(path, tensors.get("versions"), lengths["response_lengths"])
    ids = tensors.get("prompt_ids")
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != (responses,)):
        raise UserError(f"{path}: prompt_ids is not int64 [{responses}]; give another --step")
    return SavedStep(
        step,
        version,
        parts["prompt"],
        parts["response"],
        groups,
        routing=routing,
        written=written,
        versions=versions,
        prompt_ids=None if ids is None else ids.tolist(),
        **columns,
    )


def _versions(path: Path, found: Tensor | None, lengths: list[int]) -> list[list[int]] | None:
    """Policy versions per response. Raises UserError if dtype or shape is wrong."""
    if found is None:
        return None
    if found.dtype != torch.int64 or found.shape != (sum(lengths),):
        raise UserError(f"{path}: versions is not int64 [{sum(lengths)}]; give another --step")
    return [part.tolist() for part in found.split(lengths)]


def _written(path: Path, found: Tensor | None, lengths: list[int]) -> list[list[bool]] | None:
    """Mask of the policy's own tokens per response. Raises UserError if dtype or shape is wrong."""
    if found is None:
        return None
    if found.dtype != torch.uint8 or found.shape != (sum(lengths),):
        what = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise UserError(f"{path}: written is {what}, expected uint8 [{sum(lengths)}]; give another --step")
    return [part.bool().tolist() for part in found.split(lengths)]


def _routing(path: Path, found: Tensor | None, rows: list[int]) -> list[Tensor] | None:
    """Routing per response, with the given number of rows each. Raises UserError if dtype or shape is wrong."""
    if found is None:
        return None
    if found.dtype not in (torch.uint8, torch.int16) or found.ndim != 3 or len(found) != sum(rows):
        what = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise UserError(
            f"{path}: routing is {what}, expected uint8 or int16 [{sum(rows)}, layers, experts]; give another --step"
        )
    return list(found.split(rows))


def _listed(steps: list[int]) -> str:
    few = [str(step) for step in steps[-6:]]
    return ("..., " if len(steps) > 6 else "") + ", ".join(few)
