"""The scheduler against a model of the KV cache: every chunk must find the right keys and values in its pages."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from qarl_kernels.attention import PAGE

from qarl.rollout.native.pages import PagePool
from qarl.rollout.native.scheduler import Chunk, Scheduler
from qarl.rollout.sequence import Sequence
from qarl.types import Prompt


@dataclass
class Simulation:
    """Runs a scheduler as the engine does. slots: what each page holds, (prompt or sequence, position) per token."""

    pages: int
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    max_response_length: int = 100
    steps: int = 0
    targets: dict[Sequence, int] = field(default_factory=dict)
    finished: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots: list[list] = [[None] * PAGE for _ in range(self.pages)]
        self.pool = PagePool(self.pages, self._clear)
        self.scheduler = Scheduler(
            self.pool, self.max_num_seqs, self.max_batched_tokens, self.max_response_length, self._copy
        )

    def _clear(self, page: int) -> None:
        self.slots[page] = [None] * PAGE

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self.slots[target][:tokens] = self.slots[source][:tokens]

    def add(self, prompt_length: int, targets: list[int]) -> list[Sequence]:
        prompt = Prompt(len(self.targets), [0] * prompt_length, "", {})
        samples = [Sequence(prompt, i, np.zeros(0)) for i in range(len(targets))]
        self.targets |= dict(zip(samples, targets, strict=True))
        self.scheduler.add(samples)
        return samples

    def step(self) -> list[Chunk]:
        self.steps += 1
        chunks = self.scheduler.plan()
        self._check(chunks)
        for chunk in chunks:
            for position in range(chunk.start, chunk.stop):
                page = chunk.sequence.pages[position // PAGE]
                self.slots[page][position % PAGE] = identity(chunk.sequence, position)
        for chunk in chunks:
            for position in range(chunk.stop):
                page = chunk.sequence.pages[position // PAGE]
                assert self.slots[page][position % PAGE] == identity(chunk.sequence, position), "foreign keys"
        drawn = [s for chunk in chunks for s in self.scheduler.computed(chunk)]
        assert len(set(drawn)) == len(drawn)
        for sequence in drawn:
            sequence.response.append(0)
            if len(sequence.response) == self.targets[sequence]:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)
        assert len(self.scheduler.running) + len(self.scheduler.prefilling) <= self.max_num_seqs
        return chunks

    def _check(self, chunks: list[Chunk]) -> None:
        assert sum(c.stop - c.start for c in chunks) <= self.max_batched_tokens
        assert len({c.sequence for c in chunks}) == len(chunks), "a sequence ran twice in a step"
        written = [c.sequence.pages[p // PAGE] for c in chunks for p in range(c.start, c.stop)]
        holders = [page for s in self.targets for page in s.pages]
        for chunk in chunks:
            assert chunk.start == chunk.sequence.computed < chunk.stop <= chunk.sequence.length
            assert len(chunk.sequence.pages) * PAGE >= chunk.stop, "a planned sequence lost its pages"
        assert all(holders.count(page) == 1 for page in set(written)), "a shared page is written"

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.busy:
            self.step()
            assert self.steps < limit, "livelock"


def identity(sequence: Sequence, position: int) -> tuple[object, int]:
    """Return what the keys at a position depend on: samples of one prompt share the keys of its positions."""
    prompt = sequence.prompt
    return (prompt.id, position) if position < len(prompt.token_ids) else (sequence, position)


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_all_finish_on_their_own_keys_and_leak_no_page(seed: int):
    rng = random.Random(seed)
    limit = rng.choice([1, 5, 70, 130])
    arrivals = [(rng.randint(1, 200), [rng.randint(1, limit) for _ in range(rng.randint(1, 6))]) for _ in range(8)]
    needed = max(-(-(length + limit) // PAGE) for length, _ in arrivals)
    simulation = Simulation(
        pages=needed + rng.choice([0, 1, 2, 8]),
        max_num_seqs=rng.choice([1, 2, 5, 64]),
        max_batched_tokens=rng.choice([1, 3, 7, 64, 512]),
        max_response_length=limit,
    )
    for length, targets in arrivals:
        simulation.add(length, targets)
        for _ in range(rng.choice([0, 0, 3, 30])):
            if simulation.scheduler.busy:
                simulation.step()
    simulation.run(limit=20_000)
    assert len(simulation.finished) == len(simulation.targets)
    assert all(len(s.response) == target for s, target in simulation.targets.items())
    assert simulation.pool.free == simulation.pool.count
    assert all(s.pages == [] for s in simulation.targets)


@pytest.mark.parametrize("seed", range(8))
def test_cancelled_prompts_leave_no_page_and_the_others_finish(seed: int):
    """Whether their samples run, are prefilled, wait, or have lost their pages."""
    rng = random.Random(seed)
    simulation = Simulation(
        pages=rng.choice([3, 6, 40]),
        max_num_seqs=rng.choice([1, 4, 64]),
        max_batched_tokens=rng.choice([3, 64, 512]),
        max_response_length=60,
    )
    added = [simulation.add(rng.randint(1, 100), [rng.randint(1, 60) for _ in range(4)]) for _ in range(6)]
    gone: set[Sequence] = set()
    for samples in rng.sample(added, 3):
        for _ in range(rng.randint(0, 20)):
            if simulation.scheduler.busy:
                simulation.step()
        left = {sample for sample in samples if sample not in simulation.finished}
        simulation.scheduler.cancel(left)
        gone |= left
        assert all(sample.pages == [] for sample in left)
    simulation.run(limit=20_000)
    assert set(simulation.finished) == set(simulation.targets) - gone
    assert simulation.pool.free == simulation.pool.count


def test_the_oldest_sequence_is_never_preempted():
    simulation = Simulation(pages=3)
    oldest = simulation.add(60, [100])[0]
    for _ in range(4):
        simulation.add(60, [60])
    while oldest not in simulation.finished:
        assert oldest in [c.sequence for c in simulation.step()]
    assert simulation.scheduler.preemptions > 0


def test_forks_share_full_pages_and_own_the_partial_one():
    simulation = Simulation(pages=20)
    samples = simulation.add(2 * PAGE + 5, [3, 3, 3])
    simulation.step()
    assert len({tuple(s.pages[:2]) for s in samples}) == 1
    assert len({s.pages[2] for s in samples}) == 3


def test_a_sample_that_starts_late_computes_only_the_last_prompt_token():
    simulation = Simulation(pages=40, max_num_seqs=2)
    late = simulation.add(100, [50, 20, 20])[2]
    chunk = None
    while chunk is None:
        chunk = next((c for c in simulation.step() if c.sequence is late), None)
    assert (chunk.start, chunk.stop) == (99, 100)
