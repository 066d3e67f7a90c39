"""The learner: log-probs with the policy's low-bit weights, gradients of the FP32 masters, one quantization per step.

`qarl.training.step` calls it. With several ranks, all of them take the same decisions (how to split a minibatch,
whether to update, when to stop the run), because they depend only on values that are the same on every rank: the whole
batch, the norm of the whole gradient, the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from qarl_kernels.logprob import Truncation
from qarl_kernels.truncation import Recording
from torch import Tensor

from qarl.batch.batch import Batch, Part, rounds
from qarl.batch.columns import Column, KeptColumn, RoutingColumn
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.objectives.common import Constants, TokenLogProbs
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Totals
from qarl.policy.linear import WeightSet
from qarl.policy.policy import Policy
from qarl.policy.routes import RouterScores, Routes
from qarl.policy.teacher import Comparison, Teacher
from qarl.training.optim import lr_at
from qarl.training.routing import SlotCounts, training_routes
from qarl.training.totals import LearnerTotals
from qarl.training.updates import Updates


@dataclass(frozen=True)
class Round:
    """Micro-batches that run at the same time, one per rank."""

    part: Part | None  # this rank's micro-batch; None if it has none in this round
    responses: int  # number of responses, over all ranks
    gradient: bool = False  # whether the micro-batches have a backward


@dataclass(frozen=True)
class Plan:
    """How a minibatch is run, and the numbers of the whole minibatch that each micro-batch needs."""

    rounds: list[Round]
    rows: int  # rows that router losses average over: `Part.counted_rows` of all micro-batches with a backward
    totals: Totals  # divisors of the loss
    constants: Constants  # constants of the objective
    slots: Tensor | None  # (E,) float32, `SlotCounts.mean`; None: each forward counts its own

    @property
    def updates(self) -> bool:
        """Whether any micro-batch has a gradient."""
        return any(round_.gradient for round_ in self.rounds)


class Learner:
    """Runs forwards over parts of a batch, and updates the policy.

    Args:
        policy: The policy.
        updates: Optimizer engine of the policy.
        config: Configuration of the run.
        truncation: Truncation of the sampling distribution, which the learner's log-probs reproduce.
        ranks: All ranks of the run.
        teacher: Teacher of `objective.teacher`; None if there is none.

    Attributes:
        totals: Statistics of the current training step.
        skipped_in_a_row: Number of optimizer steps skipped for a non-finite gradient since the last finite one. More
            than `train.max_skipped_steps` stop the run.
        before_last_update: Called before the last optimizer step of a training step if memory use cannot grow any more:
            the optimizer's state is allocated, and no forward or backward follows.
    """

    def __init__(
        self,
        policy: Policy,
        updates: Updates,
        config: Config,
        truncation: Truncation,
        ranks: Ranks,
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.policy, self.updates, self.config, self.truncation, self.ranks = policy, updates, config, truncation, ranks
        self.objective = build_objective(config.objective, config.correction)
        self.totals = LearnerTotals()
        self.skipped_in_a_row = 0
        self.before_last_update: Callable[[], None] | None = None

    def begin(self, step: int, batch: Batch) -> None:
        """Begin training step `step`, counted from 0."""
        if self.config.objective.truncation_set == "replay":
            batch.kept = KeptColumn(len(batch))
        if self.config.model.routing == "replay_learner":
            batch.chosen = RoutingColumn(len(batch))
        if self.objective.needs.router_shift:
            batch.router = Column.empty(len(batch))
        self.totals = LearnerTotals()
        self._minibatches = self._left = self.config.train.epochs * math.ceil(len(batch) / self.config.minibatch_size)
        # The first optimizer step allocates the optimizer's state. The diagnostic "deployed" runs a forward after the
        # last one.
        self._wakes_early = self.updates.begun > 0 and "deployed" not in self.config.diagnostics.due(step + 1)
        self.updates.clear()
        self._lr_factor = lr_at(step, self.config.train.steps, self.config.optim)
        self.updates.set_lr(self._lr_factor)

    def minibatches(self, batch: Batch, step: int, epoch: int) -> list[Part]:
        """Return the minibatches of an epoch; see `Batch.minibatches`."""
        return batch.minibatches(self.config.minibatch_size, self.config.train.seed, step, epoch)

    def forwards(self, batch: Batch, step: int) -> int:
        """Return the number of responses that `learn` reports as progress.

        Each response is reported once per epoch and once per forward in advance (`Batch.in_advance`). Forwards of
        shadow and reference, and those for a minibatch's constants, are not reported.
        """
        in_advance = batch.in_advance(self.minibatches(batch, step, epoch=0))
        return len(batch) * self.config.train.epochs + sum(len(part) for _, part in in_advance)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the learner's metrics of the step, after its last update."""
        return {
            **self.totals.metrics(self._minibatches),
            "policy/zero_advantage_frac": float((batch.advantages == 0).float().mean()),
            "policy/version": float(self.policy.version),
            "optim/lr": self._lr_factor * self.config.optim.lr,
            **({"optim/loss_scale": self.updates.scale.value} if self.updates.scale.dynamic else {}),
        }

    # --- micro-batches -----------------------------------------------------------------------------------------

    def rounds(self, part: Part, gradient: bool = False, counted: Part | None = None) -> list[Round]:
        """Assign the micro-batches of a part to the ranks. counted: see `Part.micro_batches`."""
        ranks = self.ranks
        return [
            Round(parts[ranks.rank], sum(len(part) for part in parts if part is not None), gradient)
            for parts in rounds(self.micro_batches(part, counted), ranks.count)
        ]

    def micro_batches(self, part: Part, counted: Part | None = None) -> list[Part]:
        """Split a part into micro-batches of `train.micro_batch_tokens`."""
        return part.micro_batches(self.config.train.micro_batch_tokens, self.ranks.count, counted)

    def split(self, minibatch: Part) -> tuple[Part, Part]:
        """Return the responses of a minibatch that need no backward, and those that do.

        In most objectives the gradient of a response with advantage 0 is exactly 0, so it needs no backward.
        """
        skips = self.objective.zero_advantage_is_idle
        idle = minibatch.where(lambda advantage: skips and advantage == 0)
        return idle, minibatch.where(lambda advantage: not (skips and advantage == 0))

    def plan(self, minibatch: Part, watch: Observer) -> Plan:
        """Plan the micro-batches of a minibatch: first those without a backward, then those with one."""
        constants, slots = self._constants(minibatch, watch)
        idle, live = self.split(minibatch)
        return Plan(
            self.rounds(idle) + self.rounds(live, gradient=True, counted=idle),
            sum(part.counted_rows for part in self.micro_batches(live, idle)),
            Totals(len(minibatch), minibatch.tokens, self.config.rollout.max_response_length),
            constants,
            slots,
        )

    # --- forwards ----------------------------------------------------------------------------------------------

    def logprobs(
        self,
        part: Part,
        routes: Routes | None = None,
        version: int | None = None,
        comparison: Comparison | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropy.

        The first forward over a response is at the rollout's weights. It fills `logp_old`, and `Batch.kept`,
        `Batch.chosen` and `Batch.router` if the run uses them. Later forwards read them.

        Args:
            part: Responses.
            routes: Routing of the forward. None: routing of the part.
            version: Policy version to run. The forward then fills `logp_old` only at the tokens that this version
                sampled. None: the current version, and all tokens.
            comparison: Receives the divergence from the teacher.

        Returns:
            Log-probs and entropies in nats, (T,) float32 each, on the policy's device.
        """
        batch, totals = part.batch, self.totals
        totals.forward_tokens += part.forward_tokens
        first = version is not None or not batch.logp_old.known(part)
        weights = None if version in (None, batch.version) else self.policy.kept.weights(version)
        retained: list[Tensor] | None = [] if first else None
        routes = routes or part.routes
        if first and (batch.routing is not None or batch.chosen is not None):
            routes = replace(routes, own={}, rows=part.rows)
        scores = None
        if batch.router is not None:
            old = None if first else batch.router.read(part)
            scores = RouterScores(None if old is None else self._experts_of(old))
            routes = replace(routes, scores=scores)
        recording = Recording.of(self.truncation) if first and batch.kept is not None else None
        truncation = recording or part.truncation(self.truncation)
        inputs = part.prompts, part.responses, truncation, self.config.train.logprob_chunk, retained, routes
        logp, entropy = self.policy.logprobs(*inputs, weights=weights, written=part.written, comparison=comparison)
        if recording is not None and batch.kept is not None:
            batch.kept.fill(part, recording.into)
        if scores is not None and batch.router is not None:
            if old is None:
                batch.router.fill(part, old := scores.packed())
            batch.router_shift.fill(part, scores.shift(old))
        if first:
            assert batch.given or self.at_snapshot(batch), "logp_old must be computed before the first update"
            mask = None if version is None else part.sampled_at(version)
            batch.logp_old.fill(part, logp, mask)
            own = slice(None) if mask is None else mask
            totals.add_snapshot(entropy[own])
            totals.retained += [mass[own] for mass in retained or ()]
            if batch.chosen is not None:
                batch.chosen.fill(part, routes.recorded())
            if part.routing is not None:
                totals.routing.add_choices(part.routing[part.counted], routes.recorded()[part.counted])
        return logp, entropy

    def _experts_of(self, scores: Tensor) -> Tensor:
        """Return the experts, (T, L, k) int64, of scores packed by `RouterScores.packed`, (T, 2 L k)."""
        layers = self.policy.experts
        return scores[:, : scores.shape[1] // 2].unflatten(1, (len(layers), layers[0].per_token)).long()

    def at_snapshot(self, batch: Batch) -> bool:
        """Return whether the weights are still those at the beginning of the step."""
        return self.policy.version == batch.version

    def shadow(self, part: Part, logp: Tensor) -> Tensor:
        """Return log-probs in the sampler's arithmetic at the current weights, (T,); for an aligned learner `logp`."""
        if self.policy.aligned:
            return logp.detach()
        self.totals.forward_tokens += part.forward_tokens
        return self._frozen(self.policy.shadow, part.served)

    def reference(self, part: Part) -> Tensor:
        """Return log-probs of the reference policy, (T,). Runs one forward per response and step, and caches it."""
        column = part.batch.logp_ref
        if not column.known(part):
            assert self.policy.reference is not None, "no reference was kept"
            self.totals.forward_tokens += part.forward_tokens
            column.fill(part, self._frozen(self.policy.reference, part))
        return column.read(part)

    def _frozen(self, weights: WeightSet, part: Part) -> Tensor:
        inputs = part.prompts, part.responses, part.truncation(self.truncation), self.config.train.logprob_chunk
        return self.policy.frozen_logprobs(weights, *inputs, part.routes, part.written)

    def token_logprobs(self, part: Part, plan: Plan) -> TokenLogProbs:
        """Run a training forward over a micro-batch, and return the log-probs that the objective needs.

        The backward of this forward also adds the gradient of the router losses.
        """
        needs = self.objective.needs
        routes = training_routes(self.config, self.policy, part, plan.rows, plan.slots, self.updates.scale.value)
        comparison = Comparison(self.teacher) if self.teacher is not None else None
        logp, entropy = self.logprobs(part, routes, comparison=comparison)
        if routes.loads:
            self.totals.routing.add_loads(routes.measured(), part.counted_rows)
        part.batch.logp.fill(part, logp)
        return TokenLogProbs(
            logp,
            part.logp_old,
            part.logp_sampler,
            self.shadow(part, logp) if needs.shadow else None,
            self.reference(part) if needs.reference else None,
            entropy if needs.entropy else None,
            part.batch.router_shift.read(part) if needs.router_shift else None,
            *((None, None) if comparison is None else (comparison.value, comparison.agrees)),
        )

    @torch.no_grad()
    def _constants(self, minibatch: Part, watch: Observer) -> tuple[Constants, Tensor | None]:
        """Return the objective's constants, and `SlotCounts.mean` if the load-balancing loss needs it.

        Both may need forwards over the whole minibatch before its first backward. The constants are computed in the
        minibatch's order, so they do not depend on the split into micro-batches. They need no forward while the weights
        are the rollout's and `logp_old` is known. Slots need none if all choices are recorded and replayed.
        """
        needs, batch, parts = self.objective.needs, minibatch.batch, self.micro_batches(minibatch)
        slots = SlotCounts.needed(self.config, self.policy, self.ranks, parts)
        if not needs.minibatch and slots is None:
            return Constants(), None
        known = self.at_snapshot(batch) and batch.logp_old.known(minibatch) and not minibatch.stale
        logp, shadow = Column.empty(len(batch)), Column.empty(len(batch))
        for round_ in self.rounds(minibatch):
            if (part := round_.part) is not None:
                found = part.logp_old if known else None
                if slots is not None and ((needs.minibatch and not known) or not slots.add_recorded(part)):
                    routes = slots.routes(part)
                    new = self.logprobs(part, routes)[0]
                    slots.add(routes)
                    found = new if found is None else found
                elif slots is None and found is None:
                    found = self.logprobs(part)[0]
                if needs.minibatch:
                    assert found is not None, "log-probs are known or have been computed"
                    logp.fill(part, found)
                    if needs.shadow:
                        shadow.fill(part, self.shadow(part, found))
            watch.progress(0)
        means = None if slots is None else slots.mean()
        if not needs.minibatch:
            return Constants(), means
        for column in (logp, shadow):
            column.share(self.ranks)
        batch.share_old(self.ranks)
        shift = None
        if needs.router_shift:
            batch.router_shift.share(self.ranks)
            shift = torch.zeros_like(minibatch.logp_old) if known else batch.router_shift.read(minibatch)
        logps = TokenLogProbs(
            logp.read(minibatch),
            minibatch.logp_old,
            minibatch.logp_sampler,
            shadow.read(minibatch) if needs.shadow else None,
            router_shift=shift,
        )
        return self.objective.constants(logps, minibatch.advantages, minibatch.segments), means

    # --- gradients ---------------------------------------------------------------------------------------------

    def end_minibatch(self) -> None:
        """End the forwards and backwards of a minibatch."""
        self._left -= 1
        if self._left == 0 and self._wakes_early and self.before_last_update is not None:
            self.before_last_update()
        self.totals.end_minibatch()

    def update(self) -> float:
        """Step the optimizer and quantize the masters once, or skip a gradient that is not finite.

        Returns:
            The norm of the whole gradient before clipping, the same on all ranks.

        Raises:
            UserError: More than `train.max_skipped_steps` optimizer steps in a row were skipped. Skips that search
                for the first dynamic loss scale do not count.
        """
        norm, scale = self.updates.norm(), self.updates.scale
        used, searching = scale.value, scale.searching
        scale.update(math.isfinite(norm))
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.totals.grad_norms.append(norm)
            self.updates.step(norm)
            return norm
        self.updates.clear()
        self.totals.skipped += 1
        self.skipped_in_a_row += not searching
        if self.skipped_in_a_row > self.config.train.max_skipped_steps:
            lower = f" or optim.loss_scale ({used:g}{' now' if scale.dynamic else ''})" if used != 1.0 else ""
            raise UserError(
                f"learner: the gradient was not finite in {self.skipped_in_a_row} optimizer steps in a row "
                f"(train.max_skipped_steps); lower optim.lr{lower}, or look at the last rollouts and rewards"
            )
        return norm
