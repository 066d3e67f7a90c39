"""Complete a few prompts with a policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from qarl_kernels.logprob import Truncation
from transformers import PreTrainedTokenizerBase

from qarl.config.data import TEMPLATE_OPTION, template_arguments
from qarl.data.conversation import ChatTemplate, encode, require_known_tokens
from qarl.errors import UserError, memory_errors
from qarl.inference.opening import context_of, open_policy
from qarl.inference.target import Target
from qarl.inputs.library_errors import foreign_errors
from qarl.inputs.limits import ITEMS, NAME, SAMPLES, SMALLEST_TEMPERATURE, TEMPERATURE, TOKENS, VOCABULARY
from qarl.policy.load import load_tokenizer
from qarl.policy.load_config import load_architecture
from qarl.storage.saved_state import started_at
from qarl.types import Completion, Prompt


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `complete`.

    Attributes:
        chat: Use the chat template. None: as in training; for a model of unknown training, if its tokenizer has one.
        system: System message. None: the run's.
        n: Samples per prompt.
        temperature: 0 is greedy.
        top_k, top_p, min_p: See `Truncation`; 0, 1 and 0 are off.
        max_new_tokens: Maximum number of tokens per completion.
        seed: Random seed.
        template_kwargs: Arguments of the chat template. None: the run's.
        stop: Strings that end a completion, besides the end-of-sequence tokens. None: the run's.
    """

    chat: bool | None = None
    system: str | None = None
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    stop: tuple[str, ...] | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise UserError for values out of range."""
        check_sampling(self.truncation, self.seed, greedy=True)
        if not 1 <= self.n <= SAMPLES:
            raise UserError(f"--n: {self.n} is not a number of samples; give 1 to {SAMPLES:,}")
        if not 1 <= self.max_new_tokens <= TOKENS:
            raise UserError(f"--max-new-tokens: {self.max_new_tokens} is not a length; give 1 to {TOKENS:,}")
        if len(self.stop or ()) > ITEMS or any(not 1 <= len(text) <= NAME for text in self.stop or ()):
            raise UserError(f"--stop: must be at most {ITEMS:,} texts of 1 to {NAME:,} characters")
        template_arguments(self.template_kwargs or {})
        if self.temperature == 0 and self.n > 1:
            raise UserError(f"--n: {self.n} samples at temperature 0 are all the same; set --temperature, such as 1")
        for name, value, off in (("top-k", self.top_k, 0), ("top-p", self.top_p, 1), ("min-p", self.min_p, 0)):
            if self.temperature == 0 and value != off:
                raise UserError(f"--{name}: {value} does nothing at temperature 0; set --temperature, or leave it out")

    @property
    def truncation(self) -> Truncation:
        """The sampling distribution."""
        return Truncation(self.temperature, self.top_k, self.top_p, self.min_p)


@memory_errors("lower --max-new-tokens or --n, or take a larger machine")
def complete(
    target: Target, texts: list[str], options: GenerateOptions, device: str, say: Callable[[str], None]
) -> list[Completion]:
    """Complete each text `options.n` times.

    Args:
        target: The policy.
        texts: Prompts.
        options: Options.
        device: auto, cpu or cuda.
        say: Called with one-line messages before the weights are read.

    Returns:
        Completions in the order (text, sample).

    Raises:
        UserError: An option is invalid, a prompt exceeds the context, or the target cannot be opened.
    """
    options.check()
    _check_texts(texts)
    tokenizer = load_tokenizer(target.model)
    prompts = render(target, tokenizer, texts, options)
    context = context_of(target)
    for prompt in prompts:
        if len(prompt.token_ids) + options.max_new_tokens > context:
            raise UserError(
                f"--prompt {prompt.id + 1}: its {len(prompt.token_ids)} tokens and {options.max_new_tokens} new ones "
                f"exceed the context of {context}; shorten it, or lower --max-new-tokens"
            )
    prompting = target.prompting
    if prompting is not None and (options.chat, options.system, options.stop, options.template_kwargs) == (None,) * 4:
        say(f"as in training: {prompting.label()}")
    say(f"opening {target.label}")
    opened = open_policy(target, device=device, tokenizer=tokenizer)
    own_stop, stop_ids = ((), ()) if prompting is None else (prompting.stop, prompting.stop_token_ids)
    stop = tuple(own_stop) if options.stop is None else options.stop
    sampling = opened.sampling(
        options.n, options.max_new_tokens, options.truncation, options.seed, stop, tuple(stop_ids)
    )
    rollouts = opened.engine.generate(prompts, sampling, opened.policy.version)
    opened.close()
    return [
        Completion(
            texts[rollout.prompt_id],
            rollout.text,
            rollout.token_ids,
            rollout.logprobs,
            rollout.finish_reason,
            rollout.prompt_id,
            rollout.sample,
            prompts[rollout.prompt_id].token_ids,
        )
        for rollout in rollouts
    ]


def _check_texts(texts: list[str]) -> None:
    """Raise UserError if there is no prompt, or one is empty or not UTF-8 text."""
    if not texts:
        raise UserError("--prompt: no prompt; give --prompt TEXT or --prompt-file FILE")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise UserError(f"--prompt {number}: is empty; give it some text")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"--prompt {number}: is not UTF-8 text; give it as UTF-8")


def render(
    target: Target, tokenizer: PreTrainedTokenizerBase, texts: list[str], options: GenerateOptions
) -> list[Prompt]:
    """Render texts as prompts of the policy.

    Raises:
        UserError: The chat template is missing or fails, an option needs one, or the model lacks a token.
    """
    prompting = target.prompting
    chat = options.chat
    if chat is None:
        chat = prompting.chat_template if prompting is not None else bool(tokenizer.chat_template)
    if chat and not tokenizer.chat_template:
        raise UserError(f"--chat: the tokenizer of {target.name} has no chat template; give --no-chat")
    if options.system is not None and not chat:
        raise UserError("--system: is part of the chat template; leave it out, or give --chat")
    if options.template_kwargs and not chat:
        raise UserError(f"{TEMPLATE_OPTION}: belongs to the chat template; leave it out, or give --chat")
    system = options.system if options.system is not None or prompting is None else prompting.system_prompt
    shown_texts = texts
    if chat:
        own = {} if prompting is None else prompting.chat_template_kwargs
        kwargs = own if options.template_kwargs is None else options.template_kwargs
        template = ChatTemplate(
            tokenizer,
            kwargs,
            started_at(target.checkpoint) or datetime.now(),
            refusal="the chat template refuses the prompt (--no-chat leaves it out)",
            remedy="give --no-chat",
        )
        first = [] if system is None else [{"role": "system", "content": system}]
        conversations = [[*first, {"role": "user", "content": text}] for text in texts]
        shown_texts = template.render(conversations, [f"--prompt {place + 1}" for place in range(len(texts))])
    architecture, prompts = load_architecture(target.model), []
    for place, shown in enumerate(shown_texts):
        with foreign_errors(f"--prompt {place + 1}: the tokenizer of {target.name} cannot read it"):
            (ids,) = encode(tokenizer, [shown], bool(chat))
        if not ids:
            raise UserError(f"--prompt {place + 1}: has no tokens; give more text")
        vocabulary = None if architecture is None else architecture.vocab_size
        require_known_tokens(ids, vocabulary, tokenizer, f"--prompt {place + 1}")
        prompts.append(Prompt(place, ids, shown))
    return prompts


def check_sampling(shape: Truncation, seed: int, greedy: bool) -> None:
    """Raise UserError, naming the option, for values out of range. greedy: Whether temperature 0 is allowed."""
    temperature = shape.temperature
    if not (greedy and shape.greedy) and not SMALLEST_TEMPERATURE <= temperature <= TEMPERATURE:  # also rejects NaN
        valid = f"{'0 (greedy) or ' if greedy else ''}{SMALLEST_TEMPERATURE:g} to {TEMPERATURE:g}"
        raise UserError(f"--temperature: {temperature} is not a temperature; give {valid}")
    if not 0 <= shape.top_k <= VOCABULARY:
        raise UserError(f"--top-k: {shape.top_k} is not a number of tokens; give 0 (off) to {VOCABULARY:,}")
    if not 0 < shape.top_p <= 1:
        raise UserError(f"--top-p: {shape.top_p} is not a probability above 0; give at most 1 (off)")
    if not 0 <= shape.min_p < 1:
        raise UserError(f"--min-p: {shape.min_p} is not a fraction below 1; give 0 (off) or more")
    if not 0 <= seed < 2**31:
        raise UserError(f"--seed: {seed} is not a seed; give 0 to {2**31 - 1:,}")
