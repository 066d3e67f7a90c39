"""Ranks over torch.distributed: gloo for JSON and CPU tensors, NCCL for model tensors on a GPU."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl.config import Config
from qarl.distributed.fault import (
    INTERRUPTED,
    Fault,
    OtherRankFailed,
    fault_behind,
    fault_of,
    forget_fault,
    write_fault,
)
from qarl.distributed.rank_info import rank_info
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.rendezvous import Rendezvous
from qarl.distributed.together import require_same
from qarl.distributed.watch import TICK_S, Watch
from qarl.errors import UserError
from qarl.utils.versions import package_versions

LEAST_FILES = 64  # sockets of gloo, the store and reward workers; measured: two ranks on a CPU need 24
# Packages that only the first rank uses, so their versions may differ.
_ON_FIRST_RANK = ("tensorboard", "wandb", "trackio", "mlflow", "mlflow-skinny", "swanlab")


def connect(config: Config, device: torch.device) -> Ranks:
    """Wait for all ranks that the launcher of this process started.

    Args:
        config: The configuration of the run.
        device: The device of this rank, from `rank_device`.

    Returns:
        The ranks, or `SingleProcess` without a launcher.

    Raises:
        UserError: The ranks cannot find each other in time, or were started with different configurations.
        OtherRankFailed: Another rank failed while it started.
    """
    own = rank_info()
    if own is None:
        return SingleProcess()
    _require_files()
    group = Group(Rendezvous(own), device, config.distributed.timeout_s, config.run_dir)
    try:
        _require_same(group, config)
    except BaseException as error:
        raise group.fail(error) from None
    if group.first:
        forget_fault(config.run_dir)
    return group


def _require_files() -> None:
    """Raise UserError if this process may open too few files: gloo aborts the process when it cannot open a socket."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < LEAST_FILES:
        raise UserError(f"several ranks: each needs up to {LEAST_FILES} open files, but ulimit -n is {limit}; raise it")


class Group(Ranks):
    """The ranks of a run of several processes.

    Attributes:
        control: gloo process group, for JSON and CPU tensors.
        tensors: Process group for tensors on `device`: NCCL on CUDA, gloo on the CPU; torch's default group.

    Args:
        rendezvous: The rendezvous. Create it after all imports, because the wait for the other ranks starts then.
        device: The device of this rank.
        timeout_s: Limit in seconds for the start (see `Rendezvous.start_s`), for each collective, and for a rank
            without a heartbeat.
        run_dir: Directory for fault.json. None: no file.

    Raises:
        UserError: A rank did not start in time, or the rendezvous cannot be used. Names the rank or the address.
        OtherRankFailed: Another rank failed while it started.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, timeout_s: float, run_dir: Path | None = None
    ) -> None:
        self.rank, self.count, self.device = rendezvous.rank, rendezvous.count, device
        self._rendezvous, self._run_dir, self._open, self._calls = rendezvous, run_dir, True, 0
        timeout = timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        start_s = rendezvous.start_s(timeout_s)
        end = time.monotonic() + start_s
        store = rendezvous.store(start_s)
        try:
            _claim_rank(store, self.rank, self.count)
            self._store, self._waits, self._timeout_s = rendezvous.key_value_store(timeout_s), 0, timeout_s
            self._looked = -TICK_S
            self._watch = Watch(
                rendezvous.key_value_store(timeout_s), self.rank, self.count, timeout_s, self._record_fault
            )
        except RuntimeError as error:  # torch.distributed raises nothing else
            raise self._unreachable(error) from error
        self._watch.start()
        try:
            self._await_all(store, start_s, end)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.count,
                timeout=timeout,
                device_id=device if on_gpu else None,  # NCCL connects now, so that it fails here if it fails
            )
            self.control = dist.new_group(backend="gloo", timeout=timeout)
        except UserError as error:
            raise self.fail(error) from None
        except RuntimeError as error:
            fault = self._watch.fault
            raise self.fail(self._unreachable(error) if fault is None else OtherRankFailed(fault)) from error
        world = dist.group.WORLD
        assert world is not None
        self.tensors = world
        count = world._get_sequence_number_for_group  # type: ignore[attr-defined]  # torch's stubs lack it
        self._watch.begun = lambda: self._calls + count()
        if on_gpu:
            nccl = world._get_backend(device)
            self._watch.stuck = lambda: nccl.get_error().name != "SUCCESS"
            self._watch.stuck()  # fail here, not in the watch thread, if this torch lacks it

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._gather_bytes(json.dumps(value).encode("ascii"))]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        kinds = self.gather([str(tensor.dtype), list(tensor.shape)])
        assert {kind for kind, _ in kinds} == {str(tensor.dtype)}, f"ranks gather tensors of several types: {kinds}"
        flat = tensor.detach().contiguous().view(-1)
        longest = max(torch.Size(shape).numel() for _, shape in kinds)
        parts = self._all_gather(_padded(flat.view(torch.uint8), longest * tensor.element_size()))
        return [
            part.view(tensor.dtype)[: torch.Size(shape).numel()].view(shape)
            for part, (_, shape) in zip(parts, kinds, strict=True)
        ]

    def wait_for_all(self, longer_s: float) -> None:
        self._waits += 1
        self._store.post(f"met-{self.rank}", str(self._waits))
        end = time.monotonic() + self._timeout_s + longer_s
        for rank in range(self.count):
            while int(self._store.read(f"met-{rank}") or 0) < self._waits:
                if self._watch.fault is not None:
                    raise OtherRankFailed(self._watch.fault)
                if time.monotonic() > end:
                    raise OtherRankFailed(self._watch.claim(self._watch.absent(rank, longer_s)))
                time.sleep(0.01)

    def broadcast_error(self, fault: BaseException) -> None:
        with suppress(OSError, RuntimeError):  # the other ranks' watch threads will notice that this rank is gone
            self._store.claim(f"broken-{self._calls}", fault_behind(self.rank, fault).text())

    def poll(self) -> None:
        if self._watch.fault is not None:
            raise OtherRankFailed(self._watch.fault)
        if time.monotonic() < self._looked + TICK_S:
            return
        self._looked = time.monotonic()
        with suppress(OSError, RuntimeError):
            if (text := self._store.read(f"broken-{self._calls}")) is not None:
                raise OtherRankFailed(Fault.of(text))

    def log_in(self, directory: Path) -> None:
        self._rendezvous.log_in(directory)

    def close(self) -> None:
        if self._open:
            try:
                self.barrier()
            except BaseException as error:
                raise self.fail(error) from None
            self._open = False
            self._watch.stop()
            self._release_groups()

    def _release_groups(self) -> None:
        """Drop the last references to the process groups, which ends their threads.

        Otherwise a thread may release tensors of the last collective while the interpreter exits, and abort.
        """
        self._watch.begun, self._watch.stuck = lambda: 0, lambda: False
        dist.destroy_process_group()
        del self.control, self.tensors

    def fail(self, error: BaseException) -> BaseException:
        if not self._open:
            return error
        self._open = False
        if isinstance(error, OtherRankFailed):
            self._record_fault(self._watch.claim(error.fault))
            return error
        if _is_lost_rank(error):
            fault = self._watch.find(error)
            self._record_fault(fault)
            return OtherRankFailed(fault)
        fault = fault_of(self.rank, error)
        self._watch.claim(fault)
        self._watch.stop()
        self._record_fault(fault)
        return error

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes. A first message has the length, and the call number, which must be equal on all ranks."""
        self._calls += 1
        heads = self._all_gather(torch.tensor([self._calls, len(data)]))
        calls, lengths = zip(*(head.tolist() for head in heads), strict=True)
        assert len(set(calls)) == 1, f"ranks are at different calls: {calls}"
        parts = self._all_gather(_padded(torch.frombuffer(bytearray(data), dtype=torch.uint8), max(lengths)))
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather CPU tensors of equal shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        if tensor.numel():
            try:
                dist.all_gather(parts, tensor, group=self.control)
            except RuntimeError as error:
                raise OtherRankFailed(self._watch.find(error)) from error
        return parts

    def _record_fault(self, fault: Fault) -> None:
        """Write fault.json before this rank ends, unless a signal stopped the run."""
        if self._run_dir is not None and fault.code not in INTERRUPTED:
            write_fault(self._run_dir, fault)

    def _await_all(self, store: Any, seconds: float, end: float) -> None:
        """Wait until every rank has started. Polls, so that a rank that fails meanwhile is noticed at once.

        Args:
            store: torch's store.
            seconds: The limit, for the message.
            end: Deadline in `time.monotonic` seconds.
        """
        store.set(f"here-{self.rank}", "")
        for rank in range(self.count):
            while not store.check([f"here-{rank}"]):
                if self._watch.fault is not None:
                    raise self.fail(OtherRankFailed(self._watch.fault))
                if time.monotonic() > end:
                    raise UserError(
                        f"rank {rank} of {self.count}: has not started within {seconds:g} s (distributed.timeout_s) of "
                        f"rank {self.rank}; start all ranks, or see its output"
                    )
                time.sleep(0.02)

    def _unreachable(self, error: RuntimeError) -> UserError:
        """The error for ranks that have started and cannot reach each other."""
        reason = " ".join(str(error).split())[:300]
        return UserError(f"rank {self.rank} of {self.count}: cannot reach the others: {reason}")


def _claim_rank(store: Any, rank: int, count: int) -> None:
    """Raise UserError if another process of the run has the same rank. The other process is not disturbed."""
    if store.add(f"rank-{rank}", 1) > 1:
        raise UserError(f"RANK: {rank}: another process of the {count} ranks has it too; give each rank its own number")


def _is_lost_rank(error: BaseException) -> bool:
    """Whether an exception was caused by another rank's end, which made a tensor collective fail."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))


def _require_same(group: Group, config: Config) -> None:
    """Raise UserError on all ranks unless all were started with the same configuration. A collective.

    Inputs (model, data, rewards) are compared later, once they are read: see `qarl.training.setup.build_run`.
    """
    values = {
        "configuration": hashlib.sha256(config.to_yaml().encode()).hexdigest(),
        "device": group.device.type,
        "Python": sys.version.split()[0],
        **{name: version for name, version in package_versions().items() if name not in _ON_FIRST_RANK},
        "torch": torch.__version__,
    }
    require_same(group, values, "start all ranks with the same configuration and packages")


def _padded(data: Tensor, length: int) -> Tensor:
    """Zero-pad `data` (n,) uint8 to (length,)."""
    return data if len(data) == length else torch.cat([data, data.new_zeros(length - len(data))])
