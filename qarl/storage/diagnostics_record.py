"""Schema of RUN/diagnostics/NNNNNN.json, for writers and readers. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from qarl.inputs.schema import Count, Number, Record, Step

FORMAT_VERSION = 1  # increased if an entry of the record changes its name or meaning

Column = list[Number | None]


class _Band(Record):
    level: str
    low: Number
    high: Number | None
    neg_high: Number | None


class _Tokens(Record):
    logp_sampler: Column
    logp_old: Column
    logp: Column
    logp_shadow: Column | None
    log_ratio: Column
    weight: Column | None
    advantage: Column
    outside: list[bool] | None = None
    phantom: list[bool] | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> _Tokens:
        if len({len(values) for _, values in self if values is not None}) != 1:
            raise ValueError("must be columns of one length")
        return self


class _Decile(Record):
    low: Number
    high: Number
    delta_abs_mean: Number | None


class _Row(Record):
    low: Number
    high: Number | None
    count: Count
    delta_abs_mean: Number | None


class _Backward(Record):
    worst: str
    layers: dict[str, Annotated[list[Number | None], Field(min_length=2, max_length=2)]]


class _Routing(Record):
    load_max: list[Number]
    load_min: list[Number]
    entropy: list[Number | None]
    disagreement: list[Number] | None = None


class _Example(Record):
    text: str = ""
    before: str = ""
    after: str = ""
    kind: str = ""
    start: Count | None = None
    stop: Count | None = None
    advantage: Number | None = None


class DiagnosticsRecord(Record):
    """The entries of a record that the plots read."""

    format_version: int
    step: Step
    band: _Band | None
    tokens: _Tokens
    token_count: Count
    deciles: list[_Decile]
    positions: list[_Row] = Field([])
    lengths: list[_Row] = Field([])
    tail: list[_Row] = Field([])
    layers: dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]] | None
    backward: _Backward | None = None
    routing: _Routing | None = None
    error_examples: list[_Example]
