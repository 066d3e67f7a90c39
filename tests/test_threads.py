"""How many of torch's CPU threads compute what."""

import pytest
import torch

from qarl.utils.threads import one_thread


@pytest.mark.parametrize("count", [1, 3])
def test_one_thread_computes_inside_and_as_many_as_before_afterwards(count: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == count
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
