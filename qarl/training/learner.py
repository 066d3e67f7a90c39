"""The learner: log-probs on the policy's own low-bit tensors, gradients to the FP32 masters, one quantization a step.

`qarl.training.step` calls it in the order of the method.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from qarl_kernels.logprob import Truncation
from qarl_kernels.moe.balance import choices
from qarl_kernels.truncation import Recording
from torch import Tensor

from qarl.config import Config
from qarl.distributed.ranks import Ranks, total
from qarl.errors import UserError
from qarl.objectives import Constants, TokenLogProbs, build_objective
from qarl.policy.policy import Policy
from qarl.policy.routes import Balance, Routes
from qarl.training.batch import Batch, Column, Part, rounds
from qarl.training.decisions import too_many_skipped, update_is_taken
from qarl.training.observer import Observer
from qarl.training.optim import lr_at
from qarl.training.totals import LearnerTotals
from qarl.training.updates import Updates


class Learner:
    """Forwards over parts of a batch, and updates of the policy.

    updates: what adds up gradients and changes the masters. ranks: those that run one `learn` together, each on parts
    of its own. totals: of the training step that `begin` began. skipped_in_a_row: optimizer steps skipped for a
    non-finite gradient since the last good one; past `train.max_skipped_steps` the run stops with a UserError.
    """

    def __init__(self, policy: Policy, updates: Updates, config: Config, truncation: Truncation, ranks: Ranks) -> None:
        self.policy, self.updates, self.config, self.truncation, self.ranks = policy, updates, config, truncation, ranks
        self.objective = build_objective(config.objective, config.correction)
        self.totals = LearnerTotals()
        self.skipped_in_a_row = 0

    def begin(self, step: int) -> None:
        """Begin training step `step`, counted from 0."""
        self.totals = LearnerTotals()
        self.updates.clear()
        self._lr_factor = lr_at(step, self.config.train.steps, self.config.optim)
        self.updates.set_lr(self._lr_factor)

    def forwards(self, responses: int) -> int:
        """Responses that `learn` reports for a batch of this many: once an epoch, and for `logp_old` but the first
        part. Forwards of shadow and reference, and those for a minibatch's constants, go with them."""
        return responses * (self.config.train.epochs + 1) - min(self.config.minibatch_size, responses)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """The learner's metrics of the step, after its last update."""
        minibatches = self.config.train.epochs * math.ceil(len(batch) / self.config.minibatch_size)
        return {
            **self.totals.metrics(minibatches),
            "policy/zero_advantage_frac": float((batch.advantages == 0).float().mean()),
            "policy/version": float(self.policy.version),
            "optim/lr": self._lr_factor * self.config.optim.lr,
        }

    # --- forwards ----------------------------------------------------------------------------------------------

    def micro_batches(self, minibatch: Part) -> tuple[list[Part], list[Part]]:
        """What one forward runs at a time: (those that need no backward, those that need one).

        A response with advantage 0 gives, in most objectives, exactly no gradient: it then needs no backward.
        """
        skips = self.objective.zero_advantage_is_idle
        idle = minibatch.where(lambda advantage: skips and advantage == 0)
        live = minibatch.where(lambda advantage: not (skips and advantage == 0))
        return self.cut(idle), self.cut(live)

    def cut(self, part: Part) -> list[Part]:
        """Micro-batches of `train.micro_batch_tokens`."""
        return part.micro_batches(self.config.train.micro_batch_tokens, self.ranks.count)

    def logprobs(self, part: Part, routes: Routes | None = None) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropy, (T,) each.

        The first forward over a response is at the rollout's snapshot: it gives `logp_old`, and the kept sets that
        later forwards replay if `Batch.kept` asks for them.

        Args:
            part: Responses.
            routes: Experts of its tokens; None: those of the part.
        """
        batch, totals = part.batch, self.totals
        totals.forward_tokens += part.forward_tokens
        first, chunk = not batch.logp_old.known(part), self.config.train.logprob_chunk
        retained = totals.retained if first else None
        routes = routes or part.routes
        if first and batch.routing is not None:
            routes = replace(routes, own={}, rows=part.rows)
        recording = Recording.of(self.truncation) if first and batch.kept is not None else None
        truncation = recording or part.truncation(self.truncation)
        logp, entropy = self.policy.logprobs(part.prompts, part.responses, truncation, chunk, retained, routes)
        if recording is not None and batch.kept is not None:
            batch.kept.fill(part, recording.into)
        if first:
            assert self.at_snapshot(batch), "logp_old after an update"
            batch.logp_old.fill(part, logp)
            totals.add_snapshot(entropy)
            if part.routing is not None:
                totals.routing.add_choices(part.routing[part.counted], routes.recorded()[part.counted])
        return logp, entropy

    def at_snapshot(self, batch: Batch) -> bool:
        """Whether the weights are still those that the batch was drawn from."""
        return self.policy.at(batch.version)

    def shadow(self, part: Part, logp: Tensor) -> Tensor:
        """(T,) the sampler's arithmetic at the current weights: an aligned learner's own log-probs, `logp`."""
        if self.policy.aligned:
            return logp.detach()
        self.totals.forward_tokens += part.forward_tokens
        chunk = self.config.train.logprob_chunk
        truncation = part.truncation(self.truncation)
        return self.policy.shadow_logprobs(part.prompts, part.responses, truncation, chunk, part.routes)

    def reference(self, part: Part) -> Tensor:
        """(T,) the reference's log-probs, which no update changes: one forward over each response in a step."""
        column = part.batch.logp_ref
        if not column.known(part):
            self.totals.forward_tokens += part.forward_tokens
            chunk = self.config.train.logprob_chunk
            arguments = part.prompts, part.responses, part.truncation(self.truncation), chunk, part.routes
            column.fill(part, self.policy.reference_logprobs(*arguments))
        return column.read(part)

    def token_logprobs(self, part: Part, rows: int, slots: Tensor | None = None) -> TokenLogProbs:
        """Everything that the objective needs of a training forward over `part`.

        Args:
            part: A micro-batch.
            rows: Number of rows that all parts of its minibatch with a backward count. Router losses are means over
                them: a part's own losses have its share of the rows as their weight. Their gradient comes with that of
                this forward.
            slots: As `of_all` returns them.
        """
        needs = self.objective.needs
        routes = part.routes
        if self.policy.experts:
            balance, section = None, self.config.objective
            if torch.is_grad_enabled() and part.counted_rows and (section.router_aux_coef or section.router_z_coef):
                scale = self.config.loss_scale * part.counted_rows / rows
                aux, z = section.router_aux_coef * scale, section.router_z_coef * scale
                balance = Balance(aux, z, part.counted, len(self.policy.experts), slots)
            loads: dict[int, Tensor] | None = {} if part.counted_rows else None
            routes = replace(routes, rows=part.rows, repeated=part.repeated, loads=loads, balance=balance)
        logp, entropy = self.logprobs(part, routes)
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
        )

    @torch.no_grad()
    def of_all(self, minibatch: Part, watch: Observer) -> tuple[Constants, Tensor | None]:
        """What micro-batches need to know of their whole minibatch, from a pass over it before its first backward.

        Packed in the minibatch's order, the constants do not depend on how it is cut. While the weights are the
        snapshot's, a known `logp_old` replaces that pass; slots need no forward if all choices are replayed.

        Returns:
            The objective's constants, and for the load-balancing loss the mean number of slots per token and layer that
            each expert has, (E,) float32. There is no pass if neither is needed, and slots are None if the minibatch is
            one micro-batch, whose forward counts them itself.
        """
        needs, batch, cut, experts = self.objective.needs, minibatch.batch, self.cut(minibatch), self.policy.experts
        balanced = bool(experts and self.config.objective.router_aux_coef and len(cut) > 1)
        if not needs.minibatch and not balanced:
            return Constants(), None
        known = self.at_snapshot(batch) and batch.logp_old.known(minibatch)
        logp, shadow = Column.empty(len(batch)), Column.empty(len(batch))
        counts = torch.zeros(len(experts), experts[0].count, dtype=torch.int64) if balanced else None
        for round_ in rounds(cut, self.ranks.count):
            if (part := round_[self.ranks.rank]) is not None:
                found = part.logp_old if known else None
                if counts is not None:
                    told, more = self._choices(part, forward=needs.minibatch and not known)
                    found, counts = told if found is None else found, counts + more
                elif found is None:
                    found = self.logprobs(part)[0]
                if needs.minibatch:
                    assert found is not None
                    logp.fill(part, found)
                    if needs.shadow:
                        shadow.fill(part, self.shadow(part, found))
            watch.progress(0)
        slots = None if counts is None else self._slots(counts)
        if not needs.minibatch:
            return Constants(), slots
        for column in (logp, shadow):
            column.share(self.ranks)
        batch.share_old(self.ranks)
        logps = TokenLogProbs(
            logp.read(minibatch),
            minibatch.logp_old,
            minibatch.logp_sampler,
            shadow.read(minibatch) if needs.shadow else None,
        )
        return self.objective.constants(logps, minibatch.advantages, minibatch.segments), slots

    def _choices(self, part: Part, forward: bool) -> tuple[Tensor | None, Tensor]:
        """The log-probs of a part, and how often its counted rows go through each expert: (L, E) int64 on the host.

        forward: whether log-probs are asked for; else None where no forward has to tell the choices.
        """
        routing = part.routing if part.batch.replays else None
        if not forward and routing is not None and not bool((routing < 0).any()):
            return None, choices(routing[part.counted], self.policy.experts[0].count).cpu()
        loads: dict[int, Tensor] = {}
        routes = replace(part.routes, rows=part.rows, repeated=part.repeated, loads=loads)
        logp = self.logprobs(part, routes)[0]
        return logp, torch.stack([loads[layer][0, :-1] for layer in sorted(loads)]).long().cpu()

    def _slots(self, counts: Tensor) -> Tensor:
        """(E,) float32 on the device: mean number of slots per token and layer, of counts (L, E) on all ranks."""
        every = torch.tensor(total(self.ranks, counts.flatten().tolist()), dtype=torch.float64).view(counts.shape)
        return (self.policy.experts[0].per_token * every.sum(0) / every.sum()).to(self.policy.device, torch.float32)

    # --- gradients ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | None) -> None:
        """Add the gradient of a micro-batch's loss; None on a rank that has no part in this round."""
        self.updates.backward(loss)

    def update(self) -> float:
        """Step the optimizer and quantize the masters once, or skip a gradient that is not finite.

        Returns the gradient's norm before clipping, by which all ranks decide the same.
        """
        norm = self.updates.norm()
        if update_is_taken(norm):
            self.skipped_in_a_row = 0
            self.totals.grad_norms.append(norm)
            self.updates.step(norm)
        else:
            self.updates.clear()
            self._skip()
        return norm

    def _skip(self) -> None:
        self.totals.skipped += 1
        self.skipped_in_a_row += 1
        if too_many_skipped(self.skipped_in_a_row, self.config.train.max_skipped_steps):
            raise UserError(
                f"learner: the gradient was not finite in {self.skipped_in_a_row} optimizer steps in a row "
                "(train.max_skipped_steps); lower optim.lr, or look at the last rollouts and rewards"
            )
