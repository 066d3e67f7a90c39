"""Calibrated master weights (`quant.init: gptq` or `awq`), for `qarl quantize` and `qarl compare --offline`."""

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from qarl.data.calibration import calibration_sequences
from qarl.inference.masters import Masters
from qarl.inference.opening import context_of, open_policy
from qarl.inference.target import Target
from qarl.policy.load import load_tokenizer
from qarl.policy.starting_codes import starting_masters

PLACE = "--calibration"


def calibrated(target: Target, masters: Masters, device: str = "auto", say: Callable[[str], None] = print) -> Masters:
    """Return the masters from which version 0 of a run with `target.quant` would start.

    Args:
        target: A run or a model; `quant.init` names the method.
        masters: Masters of the target.
        device: auto, cpu or cuda.
        say: Called with one line of progress.

    Raises:
        UserError: The calibration text cannot be read, or the model cannot be calibrated.
    """
    init = target.quant.init
    if init == "rtn":
        return masters
    tokenizer = load_tokenizer(target.model)
    sequences = sequences_of(target, tokenizer)
    opened = open_policy(target, device=device, masters=masters, tokenizer=tokenizer)
    say(f"{init}: calibrating with {sum(map(len, sequences))} tokens")
    found = starting_masters(opened.policy, init, sequences, masters.read)
    opened.close()
    # Without a digest: these masters are not those that a run saved.
    return replace(masters, read=lambda name: found[name].cpu() if name in found else masters.read(name), digest=None)


def sequences_of(target: Target, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of a target's calibration text. For errors see `calibration_sequences`."""
    return calibration_sequences(target.quant.calibration, tokenizer, context_of(target), place=PLACE)
