"""Checks during an exact run that sampler and learner log-probs of the sampled tokens are bit-identical."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict

import torch
from qarl_kernels.truncation import Truncation

from qarl.batch.batch import CPU, Batch
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.diagnostics.mismatch import log_prob_gap
from qarl.policy.policy import Policy
from qarl.rollout.engine import truncation_of
from qarl.utils.threads import one_thread


class Agreement(Observer):
    """Warns once per run, at the first step in which sampler and learner log-probs differ in an exact run.

    A run is exact if the learner is aligned and the engine computes with the learner's own operations.
    """

    def __init__(self, config: Config, policy: Policy, warn: Callable[[str], None]) -> None:
        self._config, self._warn = config, warn
        self._watching = promised(config, policy)

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        if not self._watching:
            return
        with one_thread():
            whole = batch.whole(CPU)
            gap = log_prob_gap(whole.logp_old.double(), whole.logp_sampler.double())[0].abs()
            differing = gap.ne(0.0).nonzero()[:, 0]  # NaN differs
        if not len(differing):
            return
        self._watching = False
        lengths = torch.tensor([len(tokens) for tokens in batch.own_tokens])
        ends = lengths.cumsum(0)
        first = int(differing[0])
        response = int(torch.searchsorted(ends, first, right=True))
        token = first - int(ends[response] - lengths[response])
        self._warn(
            f"policy version {batch.version}: sampler and learner should agree bit for bit, but {len(differing):,} of "
            f"{gap.numel():,} tokens differ, by up to {float(gap.max()):.3g} nats; the first is token {token + 1} of "
            f"response {response + 1}. To find the operation that differs, run {command(self._config)}"
        )


def command(config: Config) -> str:
    """The `qarl verify-exact` command for a run's model, scheme, engine and sampling distribution."""
    quant, rollout = config.quant, config.rollout
    group = "" if quant.group_size is None else f" --group-size {quant.group_size}"
    cache = "" if quant.kv_cache_dtype == "auto" else f" --kv-cache-dtype {quant.kv_cache_dtype}"
    engine = "" if rollout.engine == "native" else f" --engine {rollout.engine}"
    shaped, plain = asdict(truncation_of(config)), Truncation()
    sampling = [f" --{k.replace('_', '-')} {v!r}" for k, v in shaped.items() if v != getattr(plain, k)]
    model = shlex.quote(config.model.path)
    return f"qarl verify-exact {model} --scheme {quant.scheme}{group}{cache}{engine}{''.join(sampling)}"


def promised(config: Config, policy: Policy) -> bool:
    """Whether the run is exact: an aligned learner, and a sampler that computes with the learner's operations."""
    asynchronous = config.rollout.asynchronous
    if asynchronous is not None and not asynchronous.exact:
        return False
    return policy.aligned and (policy.kernels or policy.device.type == "cpu") and config.rollout.exact
