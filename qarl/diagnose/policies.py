"""Load a run's policy at a checkpoint and run the forwards of learner and sampler."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.batch.batch import CPU, Batch
from qarl.batch.columns import Column
from qarl.batch.saved import SavedStep
from qarl.config import Config
from qarl.diagnostics.gradient_passes import Passes
from qarl.errors import UserError
from qarl.inference.masters import open_masters
from qarl.inference.opening import context_of, require_codes
from qarl.inference.target import Target
from qarl.memory.sizes import decide_sizes
from qarl.objectives.objective import build_objective
from qarl.policy.device import pick_device
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.policy.routes import Routes, numbers_of
from qarl.storage.loading import CheckpointDamaged
from qarl.training.setup import build_policy, build_sampling, set_determinism
from qarl.weight_sync.snapshot import Snapshot


class RunPolicy:
    """The policy of a run, with the run's learner. `load` sets its weights to those of a checkpoint.

    Raises:
        UserError: The model cannot be read, or was moved.
    """

    def __init__(self, target: Target, device: str) -> None:
        assert target.run is not None and target.run_dir is not None, "the policy of a run"
        # A run records its sizes; a handwritten configuration may leave them null.
        self.config: Config = decide_sizes(target.run, "cuda" if pick_device(device).type == "cuda" else "cpu")
        self._target, self._checkpoints = target, target.run_dir / "checkpoints"
        set_determinism(self.config)
        config = self.config
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(target.model)
        model = load_model(target.model, config.quant)
        self.policy: Policy = build_policy(config, model, pick_device(device), context_of(target))
        self.policy.decoder.recompute = config.train.recompute
        sampling = build_sampling(config, self.policy, self.tokenizer)
        self.truncation: Truncation = sampling.truncation
        self.stop_token_ids = sampling.stop_token_ids

    @torch.no_grad()
    def load(self, step: int) -> Snapshot:
        """Load the masters after `step`, quantize them, and verify the codes against the digest that the run recorded.

        Raises:
            UserError: The checkpoint is damaged or of another model, or its weights quantize to other codes.
        """
        path = self._checkpoints / f"{step:06d}"
        if not path.exists():
            raise UserError(
                f"{path}: the resumed run has removed it (checkpoint.keep_last); rerun qarl diagnose for a later step, "
                "or after the run has ended"
            )
        target = replace(self._target, checkpoint=path)
        try:
            masters = open_masters(target, self.tokenizer)
        except CheckpointDamaged as error:
            raise UserError(f"{error}; restore it from a copy, or give another --step") from error
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(masters.read(name))
        assert masters.version is not None, "masters of a run"
        snapshot = self.policy.refresh(masters.version)
        require_codes(target, masters, snapshot.manifest().digest())
        return snapshot

    def check_tokens(self, saved: SavedStep) -> None:
        """Raise UserError if the step contains token ids outside the model's vocabulary."""
        largest, vocabulary = max(map(max, saved.prompts + saved.responses)), self.policy.head_master.shape[0]
        if largest >= vocabulary:
            path = self._checkpoints.parent / "rollouts" / f"{saved.step:06d}.safetensors"
            raise UserError(
                f"{path}: holds token {largest}, and the model has {vocabulary:,} tokens; give another --step, or "
                "the model that the run started from with --model"
            )

        self._check_routing(saved)

    def _check_routing(self, saved: SavedStep) -> None:
        """Raise UserError if the run replays expert routing that is missing or does not match the model."""
        path = self._checkpoints.parent / "rollouts" / f"{saved.step:06d}.safetensors"
        if saved.routing is None:
            if self._replays:
                raise UserError(f"{path}: holds no routing, which the run replays (model.routing); give another --step")
            return
        numbers, layers = numbers_of(torch.cat(saved.routing)), self.policy.experts
        expected = [len(layers), layers[0].per_token] if layers else None
        known = numbers[numbers[:, 0, 0] >= 0] if numbers.numel() else numbers
        if list(numbers.shape[1:]) != expected or (known.numel() and not _valid(known, layers[0].count)):
            raise UserError(f"{path}: its routing does not match the model's experts; give another --step")

    @property
    def _replays(self) -> bool:
        return self.config.model.routing == "replay"

    def logprobs(self, saved: SavedStep) -> Tensor:
        """The learner's log-probs of all responses, (T,) float32 on the CPU."""
        return self._packed(saved, partial(self.policy.frozen_logprobs, self.policy.weights))

    def shadow_logprobs(self, saved: SavedStep) -> Tensor:
        """Log-probs in the sampler's arithmetic at the same weights, (T,) float32 on the CPU."""
        return self._packed(saved, partial(self.policy.frozen_logprobs, self.policy.shadow))

    def argmax_flips(self, saved: SavedStep) -> Tensor:
        """(T,) bool: positions where learner and sampler arithmetic differ in the most probable token."""

        def flips(
            prompts: list[list[int]],
            responses: list[list[int]],
            _: Truncation,
            chunk: int,
            routes: Routes,
            written: list[list[bool]] | None,
        ) -> Tensor:
            how = prompts, responses, chunk, routes
            learner = self.policy.top_tokens(*how, written=written)
            return learner != self.policy.top_tokens(*how, self.policy.shadow, written)

        return self._packed(saved, flips)

    def gradient_gram(self, saved: SavedStep) -> Tensor:
        """Return `Passes.gram` over the first minibatch of the step: (6, 6) float64, or (4, 4) without a band."""
        config = self.config
        minibatch = self._batch(saved).minibatches(config.minibatch_size, config.train.seed, saved.step - 1, epoch=0)[0]
        band = build_objective(config.objective, config.correction).band
        return Passes.of_run(config, self.policy, minibatch, self.truncation, band).gram()

    def _packed(self, saved: SavedStep, forward: Callable[..., Tensor]) -> Tensor:
        batch, chunk = self._batch(saved), self.config.train.logprob_chunk
        found = Column.empty(len(batch))
        for part in batch.whole().micro_batches(self.config.train.micro_batch_tokens):
            how = part.prompts, part.responses, self.truncation, chunk
            found.fill(part, forward(*how, routes=part.routes, written=part.written))
        return found.read(batch.whole(CPU))

    def _batch(self, saved: SavedStep) -> Batch:
        """The responses of the step as a batch on the policy's device."""
        return Batch(
            version=saved.version,
            device=self.policy.device,
            prompts=saved.prompts,
            responses=saved.responses,
            groups=saved.groups,
            advantages=saved.advantages,
            logp_sampler=Column(saved.logp_sampler.split(saved.lengths)),
            written=saved.written,
            routing=saved.routing,
            replays=self._replays,
        )


def _valid(numbers: Tensor, experts: int) -> bool:
    """Whether all numbers are valid experts, with the smallest first in each layer."""
    return bool((numbers >= 0).all() and (numbers < experts).all() and (numbers.diff(dim=-1) > 0).all())
