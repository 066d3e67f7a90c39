import json

import pytest

from qarl.data import PromptStream
from qarl.errors import UserError
from qarl.types import Prompt

PROMPTS = [Prompt(id=i, token_ids=[i, i + 1], text=f"text {i}") for i in range(7)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def test_every_epoch_deals_every_prompt_once_in_an_order_of_its_own():
    stream = PromptStream(PROMPTS, seed=0, shuffle=True)
    epochs = [ids(stream.next(7)) for _ in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_sequence_does_not_depend_on_how_many_are_taken_at_once():
    one_by_one, by_five = (PromptStream(PROMPTS, seed=1, shuffle=True) for _ in range(2))
    assert [ids(one_by_one.next(1))[0] for _ in range(25)] == [i for _ in range(5) for i in ids(by_five.next(5))]


@pytest.mark.parametrize("taken", [0, 3, 7, 26])
def test_resumed_stream_continues_exactly(taken):
    stream = PromptStream(PROMPTS, seed=5, shuffle=True)
    stream.next(taken)
    state = json.loads(json.dumps(stream.state()))
    resumed = PromptStream(PROMPTS, seed=5, shuffle=True)
    resumed.next(4)
    resumed.load_state(state)
    assert ids(resumed.next(30)) == ids(stream.next(30))


@pytest.mark.parametrize(
    "other",
    [
        PROMPTS[:-1],
        PROMPTS[::-1],
        [*PROMPTS[:-1], Prompt(id=6, token_ids=[6, 7], text="changed")],
        [*PROMPTS[:-1], Prompt(id=6, token_ids=[6, 8], text="text 6")],
    ],
    ids=["fewer", "reordered", "text", "tokens"],
)
def test_state_of_other_data_is_refused(other):
    state = PromptStream(PROMPTS, seed=0, shuffle=True).state()
    with pytest.raises(UserError, match="the prompts are not those of the checkpoint"):
        PromptStream(other, seed=0, shuffle=True).load_state(state)
