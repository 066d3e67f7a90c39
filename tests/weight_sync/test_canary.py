"""The canary's difference, the bound that the first load sets, and the choice of its sequences."""

import math

import pytest

from qarl.weight_sync.canary import BROKEN, FACTOR, FLOOR, TOKENS, CanaryCheck, Difference, canary_of, difference
from qarl.weight_sync.fingerprints import PublishError

LONG = list(range(3, 203))


def checked(*gaps: float, exact: bool = False, said: list[str] | None = None) -> CanaryCheck:
    """Compare two tokens per publish, one of which differs by twice the gap."""
    check = CanaryCheck(exact, [].append if said is None else said.append)
    for version, gap in enumerate(gaps):
        found = check.compare(version, [[-1.0], [-1.0 - 2 * gap]], [-1.0, -1.0])
        assert found == {
            "publish/canary_abs_mean": pytest.approx(gap),
            "publish/canary_abs_max": pytest.approx(2 * gap),
        }
    return check


@pytest.mark.parametrize("pair", [([-1.0, math.nan], [-1.0, -2.0]), ([-1.0, -2.0], [-1.0, -math.inf])])
def test_a_value_that_is_not_finite_exceeds_every_bound(pair) -> None:
    assert difference(*pair) == Difference(math.inf, math.inf)
    check = checked(0.1)
    with pytest.raises(PublishError):
        check.compare(3, [pair[0]], pair[1])


@pytest.mark.parametrize(
    ("first", "bound"),
    [(0.1, FACTOR * 0.1), (0.0, FLOOR), (0.9 * BROKEN, BROKEN)],
    ids=["multiple", "floor", "no more than a first load may differ by"],
)
def test_the_bound_follows_from_the_first_loads_difference(first, bound) -> None:
    assert checked(first).bound == pytest.approx(bound)


def test_an_exact_sampler_that_agreed_to_the_bit_must_continue_to():
    with pytest.raises(PublishError, match=r"version 2.*mean 0\.0000, max 0\.0001"):
        checked(0.0, 0.0, 5e-5, exact=True)
    said: list[str] = []
    assert checked(1e-6, exact=True, said=said).bound == FLOOR and "verify-exact" in said[0]


@pytest.mark.parametrize("first", [2.1, math.inf])
def test_a_first_load_that_computes_something_else_is_refused(first) -> None:
    with pytest.raises(PublishError, match=r"initial policy are off by .*rollout\.numerics=exact"):
        checked(first)


def test_a_publish_beyond_the_bound_of_the_mean_is_refused_in_one_line() -> None:
    with pytest.raises(PublishError) as refused:
        checked(0.0, FLOOR, 0.26)
    text = str(refused.value)
    assert text.startswith("publish of version 2: vLLM's log-probs on the canary are off by mean 0.2600, max 0.5200")
    assert "above the mean of 0.2500 that the first load allows" in text and "\n" not in text


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
