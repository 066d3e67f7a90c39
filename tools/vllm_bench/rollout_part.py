"""Generation alone: vLLM on weights that it makes up itself, for models of which no second copy would fit.

Nothing is published and no file of weights is written: vLLM reads a directory with `config.json` and tokenizer, and
fills its layers (`load_format: dummy`), floating-point ones with small random numbers, in FP8 mostly zeros, and codes
with whatever memory held. What it draws means nothing. How long that takes depends on values in two ways: small random
routers spread a mixture's tokens about evenly over its experts, and products of zeros draw less power.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from model_sizes import SHAPES
from tiny_models import byte_tokenizer

from qarl.config.quant import scheme_of
from qarl.errors import UserError
from qarl.rollout.engine import SamplingParams, ignore_progress
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.launch import sampler_settings
from qarl.rollout.vllm.process import Sampler, SamplerProcess
from qarl.rollout.vllm.settings import Request, SamplerSettings, request_seed
from qarl.storage.model_directory import config_document
from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.snapshot import ModelLayout
from vllm_bench.case import Case, Record, engine_config, environment
from vllm_bench.generation import generate_record
from vllm_bench.models import DTYPE, quant_of

NORM = "model.norm.weight"  # every shape has one; what vLLM is told that it holds


def dummy_settings(case: Case, shape: str, options: argparse.Namespace) -> tuple[SamplerSettings, ModelLayout]:
    """How vLLM starts on a new directory of `case.place`, which has no weights."""
    quant = quant_of(case.scheme, SHAPES[shape].group_size, kv_cache_dtype=options.kv_cache_dtype)
    context = options.prompt_tokens + options.new_tokens
    config = engine_config(
        case,
        quant,
        options,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        max_seqs=max(options.batch),
        publish="full",
    )
    layout = ModelLayout(SHAPES[shape].config(), None, scheme_of(quant), quant.ignore, DTYPE, case.device, context)
    directory = case.place / "model"
    directory.mkdir()
    byte_tokenizer(chat_template=False).save_pretrained(directory)
    write_config(directory, layout)
    settings = sampler_settings(config, layout, directory)
    arguments = {**settings.args, "load_format": "dummy"}
    return replace(settings, sleep=False, staging=False, args=arguments), layout


def write_config(directory: Path, layout: ModelLayout) -> None:
    document = config_document(layout.config, layout.dtype, layout.scheme, layout.ignore)
    (directory / "config.json").write_text(json.dumps(document, indent=1) + "\n")


def rollout_records(case: Case, shape: str, options: argparse.Namespace) -> Iterator[Record]:
    """A record of the start and one of each batch. vLLM ends with the iteration, however that does."""
    labels = {"part": "rollout", "shape": shape, **case.labels(), "kv_cache_dtype": options.kv_cache_dtype}
    settings, layout = dummy_settings(case, shape, options)
    held = fingerprints([(NORM, torch.ones(layout.config.hidden_size, dtype=DTYPE))])
    log, random = case.place / "sampler.log", torch.Generator().manual_seed(options.seed)
    begin = time.perf_counter()
    with environment(case):
        if case.process == "inline":
            sampler: Sampler = InlineSampler(log)
        else:
            sampler = SamplerProcess(case.device, None, settings.numerics, settings.threads, log, timeout_s=600.0)

    def draw(prompts: list[list[int]], new_tokens: int, seed: int) -> list[int]:
        sampling = SamplingParams(n=1, seed=seed, max_response_length=new_tokens)
        requests = [Request(ids, request_seed(seed, place, 0)) for place, ids in enumerate(prompts)]
        responses = sampler.call("generate", (requests, sampling), ignore_progress)
        if not all(math.isfinite(logprob) for response in responses for logprob in response.logprobs):
            raise UserError("vLLM: log-probs that are not finite; these made-up weights measure nothing")
        return [len(response.token_ids) for response in responses]

    try:
        sampler.start(settings, held, ignore_progress)
        seconds = time.perf_counter() - begin
        yield labels | {"what": "start", "seconds": seconds, "phases": sampler.capabilities["phases"]}
        for batch in options.batch:
            found = generate_record(draw, batch, layout.config.vocab_size, random, options)
            yield labels | {"what": "generate"} | found
    except SamplerFault as fault:
        raise UserError(f"vLLM: {fault}") from fault
    finally:
        sampler.close()
