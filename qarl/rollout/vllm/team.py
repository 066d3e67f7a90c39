"""Several processes that are one vLLM, each with a part of the model on a GPU of its own.

Each is a whole vLLM engine that is given the same orders, and meets the others in its model's sums. One that fails
leaves the others waiting in such a sum, so all of them end with it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qarl.rollout.vllm.process import TICK_S, SamplerProcess, Tick
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.update import WeightUpdate
from qarl.weight_sync.verify import PublishError


class SamplerTeam:
    """The interface of `SamplerProcess`. plans: of each process, in the order of the model's parts.

    log: of the first; the others' have the part's number before the ending. Publications are orders with
    a payload for each.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        expected: Mapping[str, Fingerprint],
        plans: Sequence[ReceiverPlan],
        log: Path,
        timeout_s: float,
    ) -> None:
        self.capabilities: dict[str, Any] = {}
        self._operation = "start"
        self._folder = Path(tempfile.mkdtemp(prefix="qarl-team-"))
        self.members: list[SamplerProcess] = []
        try:
            for index, plan in enumerate(plans):
                own = replace(settings, shard=index, shards=len(plans), meeting=self._folder / "store")
                own_log = log if index == 0 else log.with_suffix(f".{index}{log.suffix}")
                self.members.append(SamplerProcess(own, expected, plan, own_log, timeout_s))
        except BaseException:
            self.close()
            raise

    def start(self, tick: Tick) -> None:
        try:
            for member in self.members:
                member.begin_start()
        except BaseException:
            self._end()
            raise
        facts = self._answers(tick)
        self.capabilities = facts[0] | {"proved_frac": min(each["proved_frac"] for each in facts)}

    def call(self, operation: str, payload: Any, tick: Tick) -> Any:
        self.begin(operation, payload)
        return self.finish(tick)

    def begin(self, operation: str, payload: Any) -> None:
        self._operation = operation
        try:
            for index, member in enumerate(self.members):
                own = payload
                if isinstance(payload, WeightUpdate):
                    own = replace(payload, payloads=[payload.payloads[index]])
                member.begin(operation, own)
        except BaseException:
            self._end()
            raise

    def finish(self, tick: Tick) -> Any:
        results = self._answers(tick)
        if self._operation == "generate" and any(result != results[0] for result in results):
            self._end()
            raise SamplerFault("its processes drew different tokens")
        if self._operation == "sleep" and None not in results:
            return max(results)  # bytes of a GPU
        return results[0]

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self, tick: Tick) -> list[Any]:
        """What each answers, once all have. A refused publish is all's; anything else that is raised ends them."""
        waiting, refused = list(self.members), None
        try:
            for member in self.members:
                member.expect()
            while waiting:
                for member in list(waiting):
                    try:
                        if member.hear(TICK_S / len(self.members)):
                            waiting.remove(member)
                    except PublishError as error:
                        refused = refused or error
                        waiting.remove(member)
                tick(*self.members[0].progress)
        except BaseException:
            self._end()
            raise
        if refused is not None:
            raise refused
        return [member.result for member in self.members]

    def _end(self) -> None:
        for member in self.members:
            member.close()
