"""An endless, shuffled, resumable sequence of prompts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from qarl.errors import UserError
from qarl.rewards.frames import pack
from qarl.types import Prompt


class PromptStream:
    """Yields the prompts epoch after epoch, in a different order per epoch.

    The order of an epoch depends on (seed, epoch) alone, so the position is two integers and resuming is exact.

    Args:
        prompts: The prompts, at least one.
        seed: Seed of the order.
        shuffle: Whether epochs are shuffled; otherwise all have the order of `prompts`.
        pass_rate: Inclusive bounds. Prompts whose last responses have a mean reward outside of them are skipped. None:
            none are skipped.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, pass_rate: tuple[float, float] | None = None
    ) -> None:
        assert prompts, "a stream needs at least one prompt"
        self._bounds, self._rates = pass_rate, dict[int, float]()
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self.fingerprint = _fingerprint(prompts)
        self.columns_fingerprint = _columns_fingerprint(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts. A prompt may appear twice across an epoch's end; if n > len(prompts) some do.

        After len(prompts) skips in a row, prompts outside the bounds are returned too, so that the stream never ends.
        """
        found: list[Prompt] = []
        skipped = 0
        while len(found) < n:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order()
            prompt = self._prompts[self._order[self._position]]
            self._position += 1
            skips = self._skips(prompt)
            if skips and skipped < len(self._prompts):
                skipped += 1
                continue
            found.append(prompt)
            skipped = skipped if skips else 0
        return found

    def record_rewards(self, prompts: Sequence[Prompt], rewards: Sequence[float]) -> None:
        """Record the rewards of responses, the same number per prompt, in the order of the prompts."""
        if self._bounds is None:
            return
        n = len(rewards) // len(prompts)
        for i, prompt in enumerate(prompts):
            self._rates[prompt.id] = sum(rewards[i * n : (i + 1) * n]) / n

    def _skips(self, prompt: Prompt) -> bool:
        rate = self._rates.get(prompt.id)
        if self._bounds is None or rate is None:
            return False
        low, high = self._bounds
        return not low - 1e-9 <= rate <= high + 1e-9  # the mean of 0.7 and 0.1 is 0.39999999999999997

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values: the position, and [prompt id, mean reward] of scored prompts if skipping."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self.fingerprint,
            "columns_fingerprint": self.columns_fingerprint,
            "pass_rates": [[id_, rate] for id_, rate in sorted(self._rates.items())],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state`. Raises UserError if it is for other prompts or other columns.

        If the state has no `columns_fingerprint` (earlier versions), the columns are not checked.
        """
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"data: the prompts are not those of the checkpoint (fingerprint {self.fingerprint[:12]}, in the "
                f"checkpoint {state['fingerprint'][:12]}); restore the data, its options and the tokenizer, "
                "or start a new run directory"
            )
        columns = state.get("columns_fingerprint", self.columns_fingerprint)
        if columns != self.columns_fingerprint:
            raise UserError(
                "data: the prompts are those of the checkpoint, but their other columns (answers) are not (fingerprint "
                f"{self.columns_fingerprint[:12]}, in the checkpoint {columns[:12]}); restore the data and "
                "data.columns, or start a new run directory"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._rates = {id_: rate for id_, rate in state.get("pass_rates") or ()}
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}-{self._epoch}").shuffle(order)
        return order


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of ids, texts, token ids and given responses. It depends on template and tokenizer too."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.text, prompt.token_ids)).encode())
        if prompt.response is not None:
            digest.update(repr(prompt.response).encode())
    return digest.hexdigest()


def _columns_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of ids and columns (the inputs of rewards), independent of the order of columns."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, pack(prompt.columns)], sort_keys=True).encode())
    return digest.hexdigest()
