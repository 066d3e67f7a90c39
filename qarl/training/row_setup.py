"""From `model.path` to a policy and its updates on several ranks, none of which ever holds all masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from qarl_formats.scheme import Scheme
from torch import Tensor
from transformers import PreTrainedModel

from qarl.config import Config
from qarl.config.quant import scheme_of
from qarl.distributed.codes import gather_codes
from qarl.distributed.exchange import Exchange
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan, row_unit, stacked_experts
from qarl.inference.masters import plain_config
from qarl.policy.device import DTYPES, use_kernels
from qarl.policy.load_config import load_generation_config, load_model_config
from qarl.policy.load_rows import load_rows
from qarl.policy.policy import Policy
from qarl.policy.skeleton import check_shapes, replace_meta, schemes_of, skeleton
from qarl.policy.source import locate
from qarl.training.optim import round_masters
from qarl.training.row_updates import RowUpdates, rounded_values

VECTOR = 64  # elements of which processors update whole runs; one that is cut may round otherwise


def plan_of(shapes: Mapping[str, Sequence[int]], of: Callable[[str], Scheme | None], count: int) -> RowPlan:
    """Which rows of each master a rank holds. shapes: by name. of: what a parameter is quantized in."""
    stacks = stacked_experts(shapes, of)
    return RowPlan(shapes, lambda name: row_unit(of(name)) if len(shapes[name]) > 1 else VECTOR, count, stacks)


def build_rows(
    config: Config, device: torch.device, max_length: int | None, exchange: Exchange, ranks: Ranks
) -> tuple[Policy, RowUpdates]:
    """The policy that a run of `config` starts from, as `build_policy` makes it of the whole model, and its updates.

    Raises UserError for what does not fit the model.
    """
    model = bare_model(config)

    def read(plan: RowPlan) -> dict[str, Tensor]:
        return load_rows(config.model, plan, ranks)

    return from_rows(config, model, read, device, max_length, exchange, ranks)


def bare_model(config: Config) -> PreTrainedModel:
    """The skeleton of `model.path`, which says where it is of. Raises UserError as `load_model_config`."""
    model = skeleton(plain_config(load_model_config(config.model)))
    model.generation_config = load_generation_config(config.model)
    model.name_or_path = model.config.name_or_path = locate(config.model).name
    return model


def from_rows(
    config: Config,
    model: PreTrainedModel,
    read: Callable[[RowPlan], dict[str, Tensor]],
    device: torch.device,
    max_length: int | None,
    exchange: Exchange,
    ranks: Ranks,
) -> tuple[Policy, RowUpdates]:
    """`build_rows` of a skeleton. read: gives this rank's rows of each master, float32, by name."""
    policy, rows, plan = policy_of_rows(config, model, read, device, max_length, exchange, ranks.count)
    return policy, RowUpdates(policy, rows, plan, exchange, ranks, config)


def policy_of_rows(
    config: Config,
    model: PreTrainedModel,
    read: Callable[[RowPlan], dict[str, Tensor]],
    device: torch.device,
    max_length: int | None,
    exchange: Exchange,
    count: int,
) -> tuple[Policy, dict[str, Tensor], RowPlan]:
    """(a policy whose masters are placeholders, the rows of them on the device, how they are cut).

    model, read: of `from_rows`. count: of parts.
    """
    scheme, dtype = scheme_of(config.quant), DTYPES[config.model.dtype]
    check_shapes(model, scheme, config.quant.ignore)
    of = schemes_of(model, scheme, config.quant.ignore)
    plan = plan_of({name: parameter.shape for name, parameter in model.named_parameters()}, of, count)
    rows = read(plan)
    round_masters(rows.values(), DTYPES[config.optim.master_dtype])
    rows = _placed(rows, plan, device)
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


def _placed(rows: dict[str, Tensor], plan: RowPlan, device: torch.device) -> dict[str, Tensor]:
    """Move the rows to the device, those of a stack concatenated, and take them out of `rows`."""
    found: dict[str, Tensor] = {}
    for block in plan.blocks:
        own = [rows.pop(name) for name in block]
        together = own[0] if len(own) == 1 else torch.cat(own)
        found |= zip(block, together.to(device).split(list(map(len, own))), strict=True)
    return {name: found[name] for name in plan.shapes}
