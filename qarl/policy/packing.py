"""Responses behind their prompts, one after the other without padding: how the learner lays a batch out."""

from __future__ import annotations

from dataclasses import dataclass, field

from qarl.policy.trace import Context


@dataclass
class Packing:
    """groups: (prompt tokens, tokens of each continuation), as `qarl.policy.attention.packed` takes them. ids: all
    tokens. rows: of each response token, the row that it is predicted from. starts: of each response, the first row of
    its prompt and of its own tokens."""

    groups: list[tuple[int, list[int]]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    def contexts(self, prompts: list[list[int]], responses: list[list[int]]) -> list[Context]:
        """What the rows are, of the prompts and responses that were packed."""
        found = {}
        for (of_prompt, own), prompt, response in zip(self.starts, prompts, responses, strict=True):
            found[of_prompt] = Context(of_prompt, 0, prompt)
            if len(response) > 1:
                found[own] = Context(own, len(prompt), prompt + response[:-1])
        return list(found.values())


def pack(prompts: list[list[int]], responses: list[list[int]]) -> Packing:
    """Neighbours with the same prompt share it. The last token of a response predicts nothing, so it is not run."""
    found = Packing()
    before: list[int] | None = None
    start = 0
    for prompt, response in zip(prompts, responses, strict=True):
        if prompt != before:
            start = len(found.ids)
            found.groups.append((len(prompt), []))
            found.ids += prompt
            before, last_of_prompt = prompt, len(found.ids) - 1
        found.groups[-1][1].append(len(response) - 1)
        found.rows += [last_of_prompt, *range(len(found.ids), len(found.ids) + len(response) - 1)]
        found.starts.append((start, len(found.ids)))
        found.ids += response[:-1]
    return found
