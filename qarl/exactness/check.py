"""`qarl verify-exact`: opens a target and checks it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from qarl.errors import UserError, memory_errors
from qarl.exactness.engines import VLLM, Engine, Native, tight
from qarl.exactness.request import Request, rounds, sizes_of
from qarl.exactness.verify import Check
from qarl.inference.generate import GenerateOptions, render
from qarl.inference.opening import context_of, open_policy
from qarl.inference.target import Target
from qarl.inputs.files import Unreadable, read_text
from qarl.inputs.paths import AnyPath, user_path
from qarl.policy.device import pick_device
from qarl.policy.load import load_tokenizer
from qarl.terminal.noise import quiet_libraries
from qarl.types import Exactness

EngineName = Literal["native", "vllm"]


@memory_errors("lower --sequences or --longest, or take a larger machine")
def check_exactness(
    target: Target,
    request: Request,
    engine: EngineName,
    prompts: AnyPath | Sequence[str] | None,
    device: str,
    say: Callable[[str], None],
) -> Exactness:
    """Sample tokens with the engine, recompute them with the learner's forward, and trace the first difference.

    prompts: Texts, or a file with one text per line, used without a template; None: random tokens. say: Called with one
    line before slow work. Raises UserError for invalid options, a prompt that does not fit, or an unreadable target.
    """
    request.check()
    where = pick_device(device)
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries(say))
        tokenizer = load_tokenizer(target.model)
        texts = [] if prompts is None else _texts(prompts)
        given = [prompt.token_ids for prompt in render(target, tokenizer, texts, GenerateOptions(chat=False))]
        sizes = sizes_of(request, given, context_of(target), where.type)
        say(f"opening {target.label}")
        rollout = tight(sizes)
        opened = open_policy(target, device=where.type, rollout=rollout, tokenizer=tokenizer, max_length=sizes.longest)
        sampler: Engine
        if engine == "native":
            sampler = Native(opened)
        else:
            directory = stack.enter_context(_log_directory())
            say("starting vLLM")
            sampler = VLLM(opened, sizes, rollout, directory, say)
        stack.callback(sampler.close)
        check = Check(opened.policy, sampler, target.name, engine)
        all_rounds = rounds(request, given, sizes, opened.policy.config.vocab_size, lambda: check.found.tokens)
        for number, one in enumerate(all_rounds):
            say(f"round {number + 1}: {check.found.tokens:,} of {sizes.tokens:,} tokens so far")
            check.take(one)
            if check.found.tokens >= sizes.tokens:
                break
        if check.first is not None:
            say("tracing the first difference")
            check.trace()
        return check.found


@contextmanager
def _log_directory() -> Iterator[Path]:
    """Create a directory for vLLM's log. It is kept if an error message refers to it."""
    from qarl.rollout.vllm.process import SamplerError

    directory = Path(tempfile.mkdtemp(prefix="qarl-verify-exact-"))
    try:
        yield directory
    except SamplerError:
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def _texts(prompts: AnyPath | Sequence[str]) -> list[str]:
    """Return the prompts; from a file one per line, without blank lines. Raises UserError if there are none."""
    place = "--prompts"
    if isinstance(prompts, str | os.PathLike):
        place = f"--prompts: {prompts}"
        try:
            prompts = read_text(user_path(prompts, "--prompts")).splitlines()
        except Unreadable as error:
            raise UserError(f"{place}: {error.reason}") from error
    found = [text for text in prompts if text.strip()]
    if not found:
        raise UserError(f"{place}: holds no prompt; give one per line")
    return found
