"""The saved rollouts of a step, RUN/rollouts/NNNNNN.safetensors: their tensors, reading them, choosing a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qarl.batch.batch import CPU, Batch, own_tokens
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.objectives.segments import Segments
from qarl.storage.names import checkpoint_steps, step_files, step_name
from qarl.storage.tensorfile import read_tensors

_INTEGERS = ("prompt_lengths", "response_lengths", "prompt_tokens", "response_tokens", "groups", "version")
_TOKENS = ("prompt_tokens", "response_tokens")
_FLOATS = ("logp_sampler", "logp_old", "logp", "advantages", "rewards")


@dataclass(frozen=True)
class SavedStep:
    """All R responses of a training step, on the CPU. T is the number of tokens written by the policy.

    Attributes:
        step: The training step.
        version: Policy version that sampled the responses.
        prompts: Prompt token ids per response.
        responses: Response token ids per response.
        groups: Index of the prompt in the step, per response.
        logp_sampler: (T,) float32, log-probs reported by the sampler, concatenated over the responses.
        logp_old: (T,) float32, log-probs of the learner at the rollout's weights.
        logp: (T,) float32, log-probs from the learner's last training forward over each token.
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


def rollout_tensors(
    batch: Batch,
    rewards: list[float],
    versions: list[list[int]] | None = None,
    prompt_ids: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of rollouts/NNNNNN.safetensors: R responses with T tokens in total, concatenated in order.

    Args:
        batch: The batch of the step.
        rewards: Total reward per response.
        versions: Policy version of each token, per response, if earlier versions sampled any of them.
        prompt_ids: `Prompt.id` per response.

    Returns:
        prompt_lengths, response_lengths, groups   (R,) int32
        prompt_ids                                 (R,) int64, if given
        prompt_tokens, response_tokens             (T,) int32; a prompt is repeated for each of its responses
        advantages, rewards                        (R,) float32
        logp_sampler, logp_old, logp               (T,) float32; logp is of the learner's last training forward
        version                                    (1,) int64, policy version at the start of the step
        versions                                   (T,) int64, if `versions` is given
        written                                    (T,) uint8, if the policy did not write all tokens; log-probs
                                                   then cover only the tokens it wrote
        routing                                    (N, L, k) uint8 or int16, if the sampler reported its experts:
                                                   prompt + response - 1 rows per response (`Rollout.routing`)
    """
    whole = batch.whole(CPU)

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    extra = {} if batch.routing is None else {"routing": torch.cat(batch.routing)}
    if batch.written is not None:
        extra["written"] = torch.tensor([flag for response in batch.written for flag in response], dtype=torch.uint8)
    if prompt_ids is not None:
        extra["prompt_ids"] = torch.tensor(list(prompt_ids), dtype=torch.int64)
    if versions is not None:
        extra["versions"] = torch.tensor([version for own in versions for version in own])
    return {
        **extra,
        "prompt_lengths": integers(len(prompt) for prompt in batch.prompts),
        "response_lengths": integers(len(response) for response in batch.responses),
        "prompt_tokens": integers(token for prompt in batch.prompts for token in prompt),
        "response_tokens": integers(token for response in batch.responses for token in response),
        "groups": integers(batch.groups),
        "logp_sampler": whole.logp_sampler,
        "logp_old": whole.logp_old,
        "logp": batch.logp.read(whole),
        "advantages": batch.advantages.float(),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "version": torch.tensor([batch.version]),
    }


def pick_step(run: Path, step: int | None) -> int:
    """Return `step`, or if it is None the last step that has both rollouts and a checkpoint.

    Raises:
        UserError: Rollouts or checkpoint are missing; the message names the key that enables them.
    """
    sampled, saved = rollout_steps(run), checkpoint_steps(run / "checkpoints")
    if not sampled:
        raise UserError(
            f"{run}: holds no rollouts/*.safetensors; train with logging.rollout_tensors: true "
            "(logging.rollouts_every sets how often they are saved)"
        )
    if not saved:
        raise UserError(f"{run}: holds no checkpoint; train for at least checkpoint.every steps, or to the end")
    if step is None:
        both = sorted(set(sampled) & set(saved))
        if not both:
            raise UserError(
                f"{run}: no step has both rollouts ({_listed(sampled)}) and a checkpoint ({_listed(saved)}); "
                "set logging.rollouts_every and checkpoint.every to coincide, and checkpoint.keep_last: 0 to keep "
                "all checkpoints"
            )
        return both[-1]
    if step not in sampled:
        raise UserError(
            f"--step: {run} has no rollouts/{step_name(step)}.safetensors; it has {_listed(sampled)} "
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
        return _parsed(step, str(path), read_tensors(path))
    except Unreadable as error:
        raise UserError(f"{error}; give another --step") from error


def _parsed(step: int, place: str, tensors: dict[str, Tensor]) -> SavedStep:
    """Check the tensors of a file and split them by response. Raises Unreadable with the first fault."""
    require = partial(_require, place)
    for name in (*_INTEGERS, *_FLOATS):
        require(name in tensors, f"holds no tensor {name!r}")
        dtypes = (torch.int32, torch.int64) if name in _INTEGERS else (torch.float32,)
        found = tensors[name]
        require(found.dtype in dtypes, f"{name} is {_name(found.dtype)}, which is not the dtype that a run writes")
        require(found.ndim == 1, f"{name} has shape {list(found.shape)}, expected one dimension")
    prompts, responses = (tensors[f"{name}_lengths"].tolist() for name in ("prompt", "response"))
    require(bool(prompts and responses), "holds no responses")
    require(min(*prompts, *responses) > 0, "holds an empty prompt or response")
    tokens, count = sum(responses), len(responses)

    optional = partial(_optional, place, tensors)
    written = optional("written", (torch.uint8,), responses)
    versions = optional("versions", (torch.int64,), responses)
    prompt_ids = optional("prompt_ids", (torch.int64,), [1] * count)
    routing = optional(
        "routing", (torch.uint8, torch.int16), [p + r - 1 for p, r in zip(prompts, responses, strict=False)], 3
    )
    own = tokens if written is None else int(sum(part.sum() for part in written))
    sizes = {
        **dict.fromkeys(("prompt_lengths", "groups", "advantages", "rewards"), count),
        **dict.fromkeys(("logp_sampler", "logp_old", "logp"), own),
        "prompt_tokens": sum(prompts),
        "response_tokens": tokens,
        "version": 1,
    }
    for name, size in sizes.items():
        require(len(tensors[name]) == size, f"{name} has shape {list(tensors[name].shape)}, not [{size}]")
    for name in (*_FLOATS, *_TOKENS):
        spoiled = (tensors[name].isnan() if name in _FLOATS else tensors[name] < 0).any()
        require(not spoiled, f"{name} holds NaN or a negative token id")
    groups = tensors["groups"].tolist()
    members = groups.count(groups[0])
    in_order = groups == [i // members for i in range(count)]
    require(in_order, "groups does not number the prompts in order, with equal group sizes")
    return SavedStep(
        step,
        int(tensors["version"]),
        [part.tolist() for part in tensors["prompt_tokens"].split(prompts)],
        [part.tolist() for part in tensors["response_tokens"].split(responses)],
        groups,
        routing=routing,
        written=None if written is None else [part.bool().tolist() for part in written],
        versions=None if versions is None else [part.tolist() for part in versions],
        prompt_ids=None if prompt_ids is None else torch.cat(prompt_ids).tolist(),
        **{name: tensors[name] for name in _FLOATS},
    )


def _require(place: str, fine: bool, fault: str) -> None:
    if not fine:
        raise Unreadable(place, fault)


def _optional(
    place: str, tensors: dict[str, Tensor], name: str, dtypes: tuple[torch.dtype, ...], rows: list[int], ndim: int = 1
) -> list[Tensor] | None:
    """Return a tensor split into parts with the given numbers of rows; None if the file does not have it."""
    found = tensors.get(name)
    if found is None:
        return None
    expected = f"{' or '.join(map(_name, dtypes))} [{sum(rows)}{', ...' * (ndim > 1)}]"
    fine = found.dtype in dtypes and found.ndim == ndim and len(found) == sum(rows)
    _require(place, fine, f"{name} is {_name(found.dtype)} {list(found.shape)}, expected {expected}")
    return list(found.split(rows))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(steps: list[int]) -> str:
    few = [str(step) for step in steps[-6:]]
    return ("..., " if len(steps) > 6 else "") + ", ".join(few)
