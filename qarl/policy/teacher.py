"""The teacher of a distillation, and the comparison of one forward of the learner with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_kernels.backward import SumOf
from qarl_kernels.divergence import Divergence, token_divergence
from torch import Tensor

from qarl.errors import UserError
from qarl.policy.linear import WeightSet
from qarl.policy.parts import PolicyParts


@dataclass(frozen=True)
class Teacher:
    """A frozen policy and the divergence that the learner minimizes.

    Attributes:
        policy: The teacher. Its forward is the learner's decoder, usually in bf16.
        divergence: Kind, temperature and top-k.
        sha256: Digest of its published tensors, which identifies it.
    """

    policy: PolicyParts
    divergence: Divergence
    sha256: str

    def require_fits(self, student: PolicyParts) -> None:
        """Raise UserError if the two models cannot be compared, or the teacher's context is too short."""
        mine, its = student.config.vocab_size, self.policy.config.vocab_size
        if mine != its:
            raise UserError(
                f"objective.teacher.path: the teacher has {its:,} tokens and the student {mine:,}; give another teacher"
            )
        if self.policy.max_length < student.max_length:
            raise UserError(
                f"objective.teacher.path: the teacher has {self.policy.max_length:,} positions and the student uses "
                f"{student.max_length:,}; set model.max_length"
            )


@dataclass
class Comparison:
    """One forward of the learner beside the teacher's; `Policy.logprobs` fills `value` and `agrees`.

    Attributes:
        value: Divergence (T,) float32, with the learner's gradient.
        agrees: (T,) bool, whether both have the same most likely token.
    """

    teacher: Teacher
    value: Tensor | None = None
    agrees: Tensor | None = None

    def run(
        self,
        student: PolicyParts,
        weights: WeightSet,
        hidden: Tensor,
        prompts: list[list[int]],
        responses: list[list[int]],
        written: list[list[bool]] | None,
        chunk: int,
        sum_of: SumOf | None,
    ) -> None:
        """Run the teacher over the same tokens and compare. hidden: (T, H), the learner's states."""
        its = self.teacher.policy
        with torch.no_grad():
            states = its.predicting_states(prompts, responses, weights=its.weights, written=written)
        self.value, self.agrees = token_divergence(
            hidden,
            student.head_master,
            weights.head,
            states,
            its.weights.head,
            self.teacher.divergence,
            chunk,
            student.kernels,
            sum_of,
        )
