from __future__ import annotations

import pytest
import torch
from qarl_kernels.attention import PAGE

from qarl.rollout.native.pages import KVCache, PagePool


def pool(count: int) -> PagePool:
    return PagePool(count, lambda page: None)


def test_pages_taken_are_distinct_and_fewer_are_free():
    pages = pool(3)
    assert sorted(pages.take() for _ in range(3)) == [0, 1, 2] and pages.free == 0


def test_a_shared_page_is_free_only_after_its_last_holder():
    pages = pool(1)
    page = pages.take()
    pages.share(page)
    pages.release([page])
    assert pages.free == 0
    pages.release([page])
    assert pages.free == 1


def test_releasing_a_free_page_is_refused():
    pages = pool(2)
    page = pages.take()
    pages.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        pages.release([page])


def test_sharing_a_free_page_is_refused():
    with pytest.raises(AssertionError, match="not taken"):
        pool(1).share(0)


def test_every_page_taken_is_announced():
    announced: list[int] = []
    pages = PagePool(2, announced.append)
    taken = [pages.take(), pages.take()]
    pages.release(taken[:1])
    again = pages.take()
    assert announced == [*taken, again]


def test_a_shared_page_is_not_announced():
    announced: list[int] = []
    pages = PagePool(1, announced.append)
    pages.share(pages.take())
    assert announced == [0]


def cache() -> KVCache:
    made = KVCache(3, layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    for page in range(3):
        for keys, values in made.layers:
            keys[page], values[page] = page + 1, -page - 1
    return made


def test_clear_zeroes_one_page_in_every_layer():
    made = cache()
    made.clear(1)
    for keys, values in made.layers:
        assert keys.amax(dim=(1, 2, 3)).tolist() == [1, 0, 3] and values.amin(dim=(1, 2, 3)).tolist() == [-1, 0, -3]


def test_copy_takes_the_first_tokens_of_keys_and_values_in_every_layer():
    made = cache()
    made.copy(source=2, target=0, tokens=5)
    for keys, values in made.layers:
        assert torch.equal(keys[0, :, :5], keys[2, :, :5]) and torch.equal(values[0, :, :5], values[2, :, :5])
        assert keys[0, :, 5:].unique().tolist() == [1] and keys.shape == (3, 2, PAGE, 4)
