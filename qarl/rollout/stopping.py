"""Decides when a response ends, and its final text."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from qarl.rollout.engine import SamplingParams
from qarl.rollout.sequence import Sequence


class Stopping:
    """Stop tokens, stop strings and the length limit of one `generate`, in this order of precedence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> None:
        self.tokenizer, self.sampling = tokenizer, sampling
        # Special tokens are not in the text, so they do not count when looking back for a stop string.
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # A text token has at least one byte, so a stop string that ends now began at most this many tokens ago. 4 more,
        # because the first of these tokens may begin within a character of up to 4 bytes.
        self._tail = max((len(s.encode()) for s in sampling.stop), default=0) + 4

    def check(self, sequence: Sequence) -> None:
        """Set the finish reason and the text of a sequence if its last token ends it."""
        tokens = sequence.response
        if tokens[-1] in self.sampling.stop_token_ids:
            sequence.finish_reason, sequence.text = "stop", self._decode(tokens[:-1])
        elif (text := self._text_before_stop(tokens)) is not None:
            sequence.finish_reason, sequence.text = "stop", text
        elif len(tokens) == self.sampling.max_response_length:
            sequence.finish_reason, sequence.text = "length", self._decode(tokens)

    def stop_string(self, tokens: list[int]) -> str | None:
        """Return the stop string that the last token completes; None if it completes none."""
        if self._text_before_stop(tokens) is None:
            return None
        text = self._decode(tokens)
        return next(stop for stop in self.sampling.stop if stop in text)

    def stopped_at(self, tokens: list[int], start: int) -> int | None:
        """Find a stop string across the point where another engine continued a response.

        That engine sees only its own tokens, so it misses a stop string that began before them.

        Args:
            tokens: The whole response.
            start: Number of tokens before that engine's first one.

        Returns:
            Length of the response up to the end of the stop string; None if there is none.
        """
        ends = range(start + 1, min(len(tokens), start + self._tail) + 1)
        return next((end for end in ends if self._text_before_stop(tokens[:end]) is not None), None)

    def final_text(self, tokens: list[int], stopped_by: int | str | None) -> str:
        """Return the text of a response that another engine ended.

        Args:
            tokens: The whole response.
            stopped_by: Stop token id, stop string, or None for the length limit.
        """
        if isinstance(stopped_by, int):
            return self._decode(tokens[:-1])
        text = self._decode(tokens)
        return text if stopped_by is None else text[: min(self._stop_positions(text), default=len(text))]

    def _text_before_stop(self, tokens: list[int]) -> str | None:
        """Return the text before a stop string that the last token completes; None if it completes none."""
        if not self.sampling.stop or tokens[-1] in self._special:
            return None
        # Decode only the last tokens at first: decoding the whole response at every token takes quadratic time.
        recent: list[int] = []
        for token in reversed(tokens):
            if len(recent) == self._tail:
                break
            if token not in self._special:
                recent.append(token)
        if not self._stop_positions(self._decode(recent[::-1])):
            return None
        text = self._decode(tokens)
        positions = self._stop_positions(text)
        return text[: min(positions)] if positions else None

    def _stop_positions(self, text: str) -> list[int]:
        return [text.find(s) for s in self.sampling.stop if s in text]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
