"""`qarl verify-exact`: check that sampler and learner agree bit for bit on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from qarl import api
from qarl.cli import options
from qarl.cli.arguments import option, path_of
from qarl.inputs.json import strict
from qarl.inputs.limits import SEQUENCES, TOKENS
from qarl.storage.disk import require_output, write_together
from qarl.types import Difference, Exactness


def verify_exact(
    target: options.Policy,
    scheme: options.Scheme = None,
    group_size: options.GroupSize = None,
    kv_cache_dtype: options.KVCache = None,
    engine: Annotated[
        Literal["native", "vllm"], typer.Option(help="Rollout engine; vllm runs with rollout.numerics exact.")
    ] = "native",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=TOKENS, help="Minimum number of tokens to sample. Default: 1,024 on a CPU, 32,768 on CUDA."
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            min=2, max=TOKENS, help="Longest prompt plus response, in tokens. Default: 192 on a CPU, 1,024 on CUDA."
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, max=SEQUENCES, help="Maximum concurrent sequences. Default: 6 on a CPU, 48 on CUDA."),
    ] = None,
    prompts: Annotated[
        Path | None,
        option(
            "--prompts", "FILE", "UTF-8 file with one prompt per line, used as given. Default: random tokens.", path_of
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed of prompts and sampling.")] = 0,
    step: options.Step = None,
    model: options.MovedModel = None,
    verify_digests: options.VerifyDigests = True,
    device: options.Device = "auto",
    out: Annotated[Path | None, option("--json", "FILE", "Also write the result to FILE as JSON.", path_of)] = None,
) -> None:
    """Check that the engine's log-probs equal the learner's, bit for bit, for this model on this machine.

    Samples tokens, recomputes their log-probs with the learner's forward, and compares the bits. If they differ, it
    names the first token, and the layer and operation at which the forwards diverge. Exit code: 0 if all agree, 1
    otherwise.
    """
    if out is not None:
        require_output(out, "--json")
    found = api.verify_exact(
        target,
        scheme=scheme,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        engine=engine,
        tokens=tokens,
        longest=longest,
        sequences=sequences,
        prompts=prompts,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        step=step,
        model=model,
        verify_digests=verify_digests,
        device=device,
        say=lambda line: typer.echo(f"{line} ...", err=True),
    )
    for line in lines(found):
        typer.echo(line)
    if out is not None:
        contents = {"format_version": 1, "exact": found.exact, **asdict(found)}
        write_together({out: (json.dumps(strict(contents), indent=1) + "\n").encode()}, "--json")
    if not found.exact:
        raise typer.Exit(1)


def lines(found: Exactness) -> list[str]:
    """Format the result as text lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    cache = ", FP8 KV cache" if found.kv_cache_dtype == "fp8" else ""
    preempted = "" if found.preemptions is None else f", {found.preemptions:,} preemptions"
    shown = [
        f"{found.target}, {found.scheme}{cache}, engine {found.engine}, {found.device} ({versions})",
        f"{found.tokens:,} tokens of {found.responses:,} responses, sequences of up to {found.longest:,} "
        f"tokens{preempted}",
        f"sampled at {found.drawn_per_s:,.0f} tokens/s, recomputed at {found.recomputed_per_s:,.0f}",
    ]
    first = found.first
    if first is None:
        return [*shown, "exact: sampler and learner agree bit for bit"]
    return [
        *shown,
        f"not exact: {found.differing:,} tokens differ, by at most {found.largest:.3g} nats",
        f"first: round {first.round + 1}, prompt {first.prompt + 1}, sample {first.sample + 1}, token "
        f"{first.token + 1} of the response (position {first.position}): sampler {first.sampler!r}, learner "
        f"{first.learner!r}",
        *([] if first.place is None else [f"the forwards diverge at {first.place}{_values(first)}"]),
        *([first.note] if first.note else []),
    ]


def _values(first: Difference) -> str:
    if not first.values_differing:
        return ""
    return f": {first.values_differing:,} of {first.values:,} values differ, by {first.values_largest:.3g} at most"
