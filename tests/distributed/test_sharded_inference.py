"""Export, generate and diagnose open runs of several ranks: the same bits, without all masters in memory."""

import shutil
import weakref
from pathlib import Path

import pytest
from cut_tensors import cut_anywhere, cut_rows
from thread_ranks import as_threads
from tiny_exports import SCHEMES, entries, save_run
from torch import Tensor

from qarl.diagnose.policies import RunPolicy
from qarl.distributed.ranks import Ranks
from qarl.inference.generate import GenerateOptions, complete
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import StoredTensors, load_checkpoint


def as_of_ranks(run: Path, copy: Path, count: int, seed: int | None = None) -> Path:
    """The same run with its checkpoints as that many ranks would have written them, by rows or cut anywhere."""
    shutil.copytree(run, copy, symlinks=True)
    store = CheckpointStore(run / "checkpoints", 0)
    for step in store.steps():
        found = load_checkpoint(store.path(step))
        tensors = {group: dict(members) for group, members in found.tensors.items()}

        def work(ranks: Ranks) -> Path:
            if seed is None:
                pieces = cut_rows(tensors, ranks.rank, count)  # noqa: B023
            else:
                pieces = cut_anywhere(tensors, ranks.rank, count, seed)  # noqa: B023
            place = CheckpointStore(copy / "checkpoints", 0, ranks)
            return place.save(step, pieces, found.state)  # noqa: B023

        assert as_threads(count, work) == [copy / "checkpoints" / f"{step:06d}"] * count
    assert not list(copy.rglob("masters.safetensors"))
    return copy


class Joined:
    """Counts the tensors that are joined from pieces. most: Alive at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: list[weakref.ref] = []
        self.most = self.count = 0
        real = StoredTensors.read

        def read(tensors: StoredTensors, name: str, start: int, stop: int) -> Tensor:
            value = real(tensors, name, start, stop)
            self.count += 1
            self.alive = [*(reference for reference in self.alive if reference() is not None), weakref.ref(value)]
            self.most = max(self.most, len(self.alive))
            return value

        patch.setattr(StoredTensors, "read", read)


@pytest.mark.parametrize("scheme", ["asymmetric", "fp8_block", "nvfp4a16"])
def test_an_export_has_the_same_bytes_with_one_master_in_memory(tiny_model, tmp_path, monkeypatch, scheme):
    run = save_run(tmp_path / "one" / "run", tiny_model("qwen3"), **SCHEMES[scheme])
    whole = run.export(tmp_path / "whole")
    for number, seed in enumerate((None, 5)):
        path = as_of_ranks(run.path, tmp_path / str(number) / "run", 3, seed)
        out = tmp_path / f"pieces-{number}"
        with monkeypatch.context() as patch:
            joined = Joined(patch)
            report = run.export(out, resolve_target(str(path)))
        assert report.digest == whole.digest and report.same_as_run
        shares = scheme == "nvfp4a16"  # q, k and v have one scale, of the largest value of all three
        assert joined.most <= (2 if shares else 1) and joined.count >= len(
            open_masters(resolve_target(str(path))).shapes
        )
        assert entries(out) == entries(tmp_path / "whole")
        for name in entries(out):
            if name != "README.md":  # which names the run's directory
                assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_generate_and_diagnose_open_a_run_of_several_ranks(tiny_model, tmp_path):
    run = save_run(tmp_path / "one" / "run", tiny_model("llama"))
    path = as_of_ranks(run.path, tmp_path / "run", 2)
    targets = [resolve_target(str(place)) for place in (run.path, path, path / "checkpoints" / "latest")]
    looks = [
        complete(target, ["7 + 5 ="], GenerateOptions(max_new_tokens=6), "cpu", lambda line: None) for target in targets
    ]
    drawn = [(look[0].token_ids, look[0].logprobs) for look in looks]
    assert drawn[0] == drawn[1] == drawn[2]
    assert resolve_target(str(path), step=2).step == 2
    policy = open_policy(resolve_target(str(path), step=2), device="cpu").policy
    assert policy.current.manifest().digest() == run.snapshots[2].manifest().digest()
    snapshot = RunPolicy(targets[1], "cpu").load(4)
    assert snapshot.manifest().digest() == run.snapshots[4].manifest().digest()
