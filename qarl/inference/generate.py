"""A quick look at a policy: completions of a few prompts, for a terminal or as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import jinja2
from qarl_kernels.logprob import Truncation
from transformers import PreTrainedTokenizerBase

from qarl.errors import UserError
from qarl.inference.context import context_of
from qarl.inference.opening import open_policy
from qarl.inference.target import Target
from qarl.policy.load import load_tokenizer
from qarl.types import Prompt, Rollout


@dataclass(frozen=True)
class Look:
    """How to complete.

    chat: wrap prompts in the chat template; None does what the run did, and for a model uses the template that its
    tokenizer has. system: system message, None for the run's own. n: samples per prompt. temperature: 0 is greedy.
    """

    chat: bool | None = None
    system: str | None = None
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for values that mean nothing."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature: {self.temperature} is no temperature; give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p: {self.top_p} is no probability above 0; give up to 1 (off)")
        if self.temperature == 0 and self.n > 1:
            raise UserError(f"--n: {self.n} samples at temperature 0 are all the same; set --temperature, such as 1")
        if self.temperature == 0 and self.top_p < 1:
            raise UserError(f"--top-p: {self.top_p} does nothing at temperature 0; set --temperature, or leave it out")


@dataclass(frozen=True)
class Completed:
    """A prompt as given, as the policy saw it, and one completion of it."""

    given: str
    prompt: Prompt
    rollout: Rollout

    def as_json(self) -> str:
        """One line of ASCII. Log-probs are natural logs, after temperature and top-p (greedy: at temperature 1)."""
        rollout = self.rollout
        return json.dumps({
            "prompt": self.given, "prompt_index": self.prompt.id, "sample": rollout.sample,
            "completion": rollout.text, "finish_reason": rollout.finish_reason,
            "mean_logprob": fmean(rollout.logprobs), "token_ids": rollout.token_ids, "logprobs": rollout.logprobs,
            "prompt_token_ids": self.prompt.token_ids,
        })  # fmt: skip

    def head(self) -> str:
        """One line that describes the completion."""
        end = "stopped" if self.rollout.finish_reason == "stop" else "cut at --max-new-tokens"
        return (
            f"prompt {self.prompt.id + 1}, sample {self.rollout.sample + 1}: {len(self.rollout.token_ids)} tokens, "
            f"{end}, mean log-prob {fmean(self.rollout.logprobs):.3f}"
        )


def gather_texts(prompts: list[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then the whole of `file` as one more.

    Raises UserError: no prompt, an empty one, a file that cannot be read.
    """
    named = [(f"--prompt {number}", text) for number, text in enumerate(prompts, 1)]
    if file is not None:
        try:
            named.append((f"--prompt-file: {file}", file.expanduser().read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise UserError(f"--prompt-file: {file}: is not UTF-8 text; convert it") from error
        except OSError as error:
            raise UserError(f"--prompt-file: {file}: cannot be read ({error.strerror or error})") from error
    if not named:
        raise UserError("--prompt: there is none; give --prompt TEXT or --prompt-file FILE")
    for place, text in named:
        if not text.strip():
            raise UserError(f"{place}: is empty; give it some text")
    return [text for _, text in named]


def complete(target: Target, texts: list[str], look: Look, device: str, say: Callable[[str], None]) -> list[Completed]:
    """Complete each text, `look.n` times, in the order (text, sample).

    device: auto, cpu or cuda. say: shows one line before the weights are read.
    Raises UserError: an option that means nothing here, a prompt that does not fit the context, whatever cannot be
    opened.
    """
    look.check()
    prompts = render(target, load_tokenizer(target.model), texts, look)
    context = context_of(target)
    for prompt in prompts:
        if len(prompt.token_ids) + look.max_new_tokens > context:
            raise UserError(
                f"--prompt {prompt.id + 1}: its {len(prompt.token_ids)} tokens and {look.max_new_tokens} new ones "
                f"exceed the context of {context}; shorten it, or lower --max-new-tokens"
            )
    say(f"opening {target.label}")
    opened = open_policy(target, device=device)
    sampling = opened.sampling(look.n, look.max_new_tokens, Truncation(look.temperature, top_p=look.top_p), look.seed)
    rollouts = opened.engine.generate(prompts, sampling, opened.policy.version)
    opened.close()
    return [
        Completed(text, prompt, rollout)
        for text, prompt, rollout in zip(
            [text for text in texts for _ in range(look.n)],
            [prompt for prompt in prompts for _ in range(look.n)],
            rollouts,
            strict=True,
        )
    ]


def render(target: Target, tokenizer: PreTrainedTokenizerBase, texts: list[str], look: Look) -> list[Prompt]:
    """Texts as the policy sees them. Raises UserError: no chat template, one that refuses, a system message without."""
    run = target.run
    chat = look.chat
    if chat is None:
        chat = run.data.chat_template if run else bool(tokenizer.chat_template)
    if chat and not tokenizer.chat_template:
        raise UserError(f"--chat: the tokenizer of {target.name} has no chat template; give --no-chat")
    if look.system is not None and not chat:
        raise UserError("--system: is part of the chat template; leave it out, or give --chat")
    system = look.system if look.system is not None or run is None else run.data.system_prompt
    prompts = []
    for place, text in enumerate(texts):
        shown = _templated(tokenizer, text, system) if chat else text
        ids = list(tokenizer(shown, add_special_tokens=not chat, verbose=False)["input_ids"])
        prompts.append(Prompt(place, ids, shown))
    return prompts


def _templated(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None) -> str:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise UserError(f"--chat: the chat template refuses the prompt: {error}; give --no-chat") from error
