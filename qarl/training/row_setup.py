"""Build a policy and its sharded optimizer engine; no rank ever holds all master weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl.config import Config
from qarl.config.quant import scheme_of
from qarl.distributed.exchange import Exchange
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan, plan_of
from qarl.policy.device import DTYPES, use_kernels
from qarl.policy.load_config import load_generation_config, load_model_config, plain_config
from qarl.policy.load_rows import load_rows
from qarl.policy.policy import Policy
from qarl.policy.skeleton import check_shapes, replace_meta, schemes_of, skeleton
from qarl.policy.source import locate
from qarl.training.optim import round_masters
from qarl.training.row_updates import RowUpdates, rounded_values
from qarl.weight_sync.codes import gather_codes


def build_rows(
    config: Config, device: torch.device, max_length: int | None, exchange: Exchange, ranks: Ranks
) -> tuple[Policy, RowUpdates]:
    """Build the initial policy of a run, with the same bits as `build_policy`, and its optimizer engine. A collective.

    Args:
        config: Configuration of the run.
        device: Device of this rank.
        max_length: Longest sequence in tokens, if limited.
        exchange: Moves rows between ranks.
        ranks: All ranks of the run.

    Raises:
        UserError: The configuration does not fit the model.
    """

    def read(plan: RowPlan) -> dict[str, Tensor]:
        return load_rows(config.model, plan, ranks, config.quant)

    policy, rows, plan = policy_of_rows(config, read, device, max_length, exchange, ranks.count)
    return policy, RowUpdates(policy, rows, plan, exchange, ranks, config)


def policy_of_rows(
    config: Config,
    read: Callable[[RowPlan], dict[str, Tensor]],
    device: torch.device,
    max_length: int | None,
    exchange: Exchange,
    count: int,
) -> tuple[Policy, dict[str, Tensor], RowPlan]:
    """Build a policy from sharded master weights.

    Args:
        config: Configuration of the run.
        read: Returns this rank's rows (rows, ...) of each master weight, float32, by name.
        device: Device of this rank.
        max_length: Longest sequence in tokens, if limited.
        exchange: Gathers the quantized rows.
        count: Number of ranks that the rows are divided among.

    Returns:
        A policy with placeholders as master weights; this rank's rows by name, float32 on the device; and the
        assignment of rows to ranks.
    """
    model = _bare_model(config)
    scheme, dtype = scheme_of(config.quant), DTYPES[config.model.dtype]
    check_shapes(model, scheme, config.quant.ignore)
    of = schemes_of(model, scheme, config.quant.ignore)
    plan = plan_of({name: parameter.shape for name, parameter in model.named_parameters()}, of, count)
    rows = read(plan)
    round_masters(rows.values(), DTYPES[config.optim.master_dtype])
    rows = _to_device(rows, plan, device)
    kernels = use_kernels(config.quant, scheme, dtype, device)
    snapshot = gather_codes(rows, plan, exchange, of, dtype, 0, kernels)
    replace_meta(model, device)
    learner_dtype = DTYPES[config.learner_dtype]
    aligned = config.quant.learner == "aligned"
    values = None if aligned else rounded_values(rows, plan, exchange, learner_dtype)
    policy = Policy(
        model, scheme, config.quant, dtype, device, max_length, snapshot, learner_dtype=learner_dtype, values=values
    )
    return policy, rows, plan


def _bare_model(config: Config) -> PreTrainedModel:
    """Return the model of `model.path` without weights. Its name is the location of the model.

    Raises:
        UserError: See `load_model_config`.
    """
    model = skeleton(plain_config(load_model_config(config.model)))
    model.generation_config = load_generation_config(config.model)
    model.name_or_path = model.config.name_or_path = locate(config.model).name
    return model


def _to_device(rows: dict[str, Tensor], plan: RowPlan, device: torch.device) -> dict[str, Tensor]:
    """Move the rows to the device, and empty `rows`. Rows of one block become views of one tensor."""
    found: dict[str, Tensor] = {}
    for block in plan.blocks:
        own = [rows.pop(name) for name in block]
        block_rows = own[0] if len(own) == 1 else torch.cat(own)
        found |= zip(block, block_rows.to(device).split(list(map(len, own))), strict=True)
    return {name: found[name] for name in plan.shapes}
