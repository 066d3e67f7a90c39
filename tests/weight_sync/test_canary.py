"""The canary's difference, the bound that the first load sets, and the choice of its sequences."""

import math

import pytest

from qarl.weight_sync.canary import BROKEN, FACTOR, FLOOR, TOKENS, Bound, Difference, canary_of, difference
from qarl.weight_sync.fingerprints import PublishError

LONG = list(range(3, 203))


def test_difference_is_the_mean_and_the_largest_gap() -> None:
    found = difference([-1.0, -2.0, -3.5], [-1.0, -2.25, -3.0])
    assert found == Difference(0.25, 0.5)
    assert str(found) == "mean 0.2500, max 0.5000"


@pytest.mark.parametrize("pair", [([-1.0, math.nan], [-1.0, -2.0]), ([-1.0, -2.0], [-1.0, -math.inf])])
def test_a_value_that_is_not_finite_exceeds_every_bound(pair) -> None:
    found = difference(*pair)
    assert found == Difference(math.inf, math.inf)
    with pytest.raises(PublishError):
        Bound(1e9).check(3, found)


def test_sequences_of_different_lengths_are_a_fault_of_qarl() -> None:
    with pytest.raises(ValueError):
        difference([-1.0], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("first", "bound"),
    [(0.1, FACTOR * 0.1), (0.0, FLOOR), (0.9 * BROKEN, BROKEN)],
    ids=["multiple", "floor", "no more than a first load may differ by"],
)
def test_the_bound_follows_from_the_first_loads_difference(first, bound) -> None:
    assert Bound.of(Difference(first, 3.0)) == Bound(bound)


def test_an_exact_sampler_that_agreed_to_the_bit_must_continue_to():
    bound = Bound.of(Difference(0.0, 0.0), exact=True)
    bound.check(1, Difference(0.0, 0.0))
    with pytest.raises(PublishError, match=r"version 2.*mean 0\.0000, max 0\.0001"):
        bound.check(2, Difference(1e-6, 1e-4))
    assert Bound.of(Difference(1e-6, 1e-4), exact=True) == Bound(FLOOR)


@pytest.mark.parametrize("first", [Difference(2.1, 3.0), Difference(math.inf, math.inf)])
def test_a_first_load_that_computes_something_else_is_refused(first) -> None:
    with pytest.raises(PublishError, match=r"initial policy are off by .*rollout\.numerics=exact"):
        Bound.of(first)


def test_a_publish_beyond_the_bound_of_the_mean_is_refused_in_one_line() -> None:
    found = Difference(0.26, 0.3)
    with pytest.raises(PublishError) as refused:
        Bound(FLOOR).check(7, found)
    text = str(refused.value)
    assert text.startswith(f"publish of version 7: vLLM's log-probs on the canary are off by {found}")
    assert "first load allows a mean of 0.2500" in text and "\n" not in text
    Bound(FLOOR).check(7, Difference(FLOOR, 5.0))


@pytest.mark.parametrize(
    ("prompts", "context", "canary"),
    [
        ([[1], [2, 3], [2, 3], [4, 5, 6], [7, 8]], 512, [[2, 3], [4, 5, 6]]),  # the first two distinct, of two tokens
        ([LONG], 512, [LONG[:TOKENS]]),
        ([LONG], 16, [LONG[:15]]),  # one token is generated
        ([[5], [], [6]], 8, [[5, 6, 5, 6, 5, 6, 5]]),  # prompts of one token, concatenated
        ([[5]], 512, [[5] * TOKENS]),
        ([[5, 6, 7]], 2, []),  # nothing to score
    ],
)
def test_the_canary_is_chosen_from_the_prompts_and_fits_the_context(prompts, context, canary) -> None:
    assert canary_of(prompts, context) == canary
