import json
import math

import torch

from qarl.diagnostics.record import StepTokens, diagnostics_record
from qarl.inputs.schema import checked
from qarl.objectives.base import Band
from qarl.objectives.segments import Segments
from qarl.storage.diagnostics_record import FORMAT_VERSION, DiagnosticsRecord


def tokens(band: Band | None = None, shadow: bool = True, count: int = 6) -> StepTokens:
    sampler = torch.linspace(-2.0, -0.1, count)
    logp = sampler + 0.1
    return StepTokens(
        sampler,
        sampler + 0.05,
        logp,
        sampler.clone() if shadow else None,
        logp - sampler,
        torch.ones(count),
        torch.tensor([1.0, -1.0]),
        Segments.from_lengths([count // 2, count - count // 2]),
        band,
    )


def test_it_is_strict_json_and_says_what_it_holds():
    step = tokens()
    step.logp[1], step.logp_old[2] = -math.inf, math.nan
    record = diagnostics_record(7, {"a": 1.0, "b": math.nan}, step, {"m": (1, 4)}, [{"text": "x"}], 100, 0)
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again == record
    assert (record["format_version"], record["step"], record["token_count"]) == (FORMAT_VERSION, 7, 6)
    assert record["metrics"] == {"a": 1.0, "b": None} and record["layers"] == {"m": [1, 4]}
    assert record["tokens"]["logp"][1] is None and record["tokens"]["logp_old"][2] is None
    assert record["tokens"]["advantage"] == [1.0] * 3 + [-1.0] * 3
    assert sum(row["count"] for row in record["deciles"]) == 6 and len(record["deciles"]) == 10


def test_what_the_band_clips_is_marked_token_by_token():
    record = diagnostics_record(1, {}, tokens(Band("token", 1.05, 0.9)), None, [], 100, 0)
    assert record["band"] == {"level": "token", "high": 1.05, "low": 0.9, "neg_high": None}
    assert record["tokens"]["outside"] == [True] * 3 + [False] * 3
    assert record["tokens"]["phantom"] == [True] * 3 + [False] * 3  # the shadow has not moved at all
    assert record["tokens"]["phantom_either_side"] == [True] * 6


def test_an_fp8_backward_is_there_by_layer_with_the_worst_by_name():
    modules = {"a": (0.999, 0.04), "b": (0.99, 0.1)}
    record = diagnostics_record(1, {}, tokens(), None, [], 100, 0, modules)
    assert record["backward"] == {"worst": "b", "layers": {"a": [0.999, 0.04], "b": [0.99, 0.1]}}
    record = diagnostics_record(1, {}, tokens(), None, [], 100, 0, {"c": (-1.0, 2.0), "d": (math.nan, math.inf)})
    assert record["backward"] == {"worst": "d", "layers": {"c": [-1.0, 2.0], "d": [None, None]}}
    for nothing in (None, {}):
        assert diagnostics_record(1, {}, tokens(), None, [], 100, 0, nothing)["backward"] is None


def test_the_sample_is_of_seed_and_step_alone_and_keeps_the_order():
    def kept(step: int, seed: int) -> list[float]:
        return diagnostics_record(step, {}, tokens(count=1000), None, [], 50, seed)["tokens"]["logp_sampler"]

    first = kept(3, 0)
    assert len(first) == 50 and first == sorted(first)
    assert kept(3, 0) == first and kept(4, 0) != first and kept(3, 1) != first
    record = diagnostics_record(3, {}, tokens(count=1000), None, [], 50, 0)
    assert record["token_count"] == 1000 and sum(row["count"] for row in record["deciles"]) == 1000


def test_a_layers_experts_are_one_row_and_of_a_backward_the_worst_of_them():
    name = "model.layers.2.mlp.experts.{}.up_proj"
    layers = {name.format(i): (i, 8) for i in range(3)}
    modules = {name.format(i): (0.9 - i % 2, 0.1) for i in range(3)}
    routing = {"load_max": [1.5], "load_min": [0.5], "entropy": [1.2], "disagreement": [0.25]}
    record = diagnostics_record(1, {}, tokens(), layers, [], 100, 0, modules, routing)
    assert record["layers"] == {"model.layers.2.mlp.experts.up_proj": [3, 24]} and record["routing"] == routing
    assert record["backward"] == {"worst": name.format(1), "layers": {name.format(1): [0.9 - 1, 0.1]}}
    checked(DiagnosticsRecord, record, "a record")
