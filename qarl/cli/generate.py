"""`qarl generate`: complete a few prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from qarl import api
from qarl.cli import options
from qarl.cli.arguments import option, stream_of, template_object
from qarl.errors import UserError
from qarl.inputs.files import Unreadable, read_text
from qarl.inputs.limits import SAMPLES, TOKENS
from qarl.types import Completion

PROMPT_BYTES = 2**24  # size limit of a prompt file


def generate(
    target: options.Policy,
    prompt: Annotated[list[str] | None, option("--prompt", "TEXT", "A prompt. Repeatable.")] = None,
    prompt_file: Annotated[Path | None, option("--prompt-file", "FILE", "UTF-8 file with a prompt.", stream_of)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Wrap prompts in the chat template. Default: as in training for a run or its export, and for other "
            "models if they have one.",
        ),
    ] = None,
    system: Annotated[
        str | None, option("--system", "TEXT", "System message. Default: the run's data.system_prompt.")
    ] = None,
    chat_template_kwargs: options.TemplateKwargs = None,
    stop: Annotated[
        list[str] | None,
        option(
            "--stop", "TEXT", "Text that ends a completion. Repeatable. Default: the run's rollout.stop; '' for none."
        ),
    ] = None,
    n: Annotated[int, typer.Option(min=1, max=SAMPLES, help="Number of samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=TOKENS, help="Maximum tokens per completion.")] = 128,
    scheme: options.Scheme = None,
    group_size: options.GroupSize = None,
    kv_cache_dtype: options.KVCache = None,
    step: options.Step = None,
    model: options.MovedModel = None,
    verify_digests: options.VerifyDigests = True,
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per completion, with token ids and log-probs.")
    ] = False,
) -> None:
    """Complete prompts with a policy on the quantized tensors that it is served with.

    Prompts are used as given: a run's data.prompt_template is not applied.
    """
    from qarl.terminal.run_console import RunConsole

    texts = [*(prompt or []), *([] if prompt_file is None else [_read(prompt_file)])]
    console, notes = RunConsole("plain"), RunConsole("plain", stream=sys.stderr)
    completions = api.generate(
        target,
        texts,
        chat=chat,
        system=system,
        chat_template_kwargs=template_object(chat_template_kwargs),
        stop=[text for text in stop if text] if stop else None,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        scheme=scheme,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        step=step,
        model=model,
        verify_digests=verify_digests,
        device=device,
        seed=seed,
        say=notes.message,
    )
    for number, completion in enumerate(completions):
        if as_json:
            console.message(_as_json(completion))
            continue
        if number:
            console.message("")
        console.message(_heading(completion))
        for line in completion.text.split("\n"):  # other control characters are escaped
            console.message(line)


def _read(file: Path) -> str:
    try:
        text = read_text(file, PROMPT_BYTES, stream=True)
    except Unreadable as error:
        raise UserError(f"--prompt-file: {file}: {error.reason}") from error
    if not text.strip():
        raise UserError(f"--prompt-file: {file}: is empty; give it some text")
    return text


def _as_json(completion: Completion) -> str:
    """Return one line of ASCII."""
    return json.dumps(
        {
            "prompt": completion.prompt,
            "prompt_index": completion.prompt_index,
            "sample": completion.sample,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "mean_logprob": fmean(completion.logprobs),
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "prompt_token_ids": completion.prompt_token_ids,
        }
    )


def _heading(completion: Completion) -> str:
    end = "stopped" if completion.finish_reason == "stop" else "cut at --max-new-tokens"
    return (
        f"prompt {completion.prompt_index + 1}, sample {completion.sample + 1}: {len(completion.token_ids)} tokens, "
        f"{end}, mean log-prob {fmean(completion.logprobs):.3f}"
    )
