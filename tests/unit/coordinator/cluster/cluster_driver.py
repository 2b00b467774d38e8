"""Drives a ClusterState with one-letter workers and a planner that gives each one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checkpoint import DType
from coordinator.cluster.actions import Action
from coordinator.cluster.membership import WorkerIdentity
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.worker_order import WorkerOrder
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan, StepLimits, WorkerCapacity
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.rejoin import GraceExpired, StartTimer
from wire.ids import Incarnation, StageRole

WAITS_FOR_RETURN = StartTimer(DEFAULT_POLICY.rejoin_grace_s, GraceExpired(1))
"""Timer after the first loss without a spare."""
LIMITS = StepLimits(max_step_tokens=8, max_step_sequences=4, max_sequence_tokens=32)


def identity_of(
    name: str,
    *,
    incarnation: int = 1,
    address: str | None = None,
    memory_bytes: int = 1000,
    last_epoch: int = 0,
    is_mock: bool = False,
    memory_domain: str = "",
) -> WorkerIdentity:
    """A worker as in its hello."""
    return WorkerIdentity(
        name=name,
        incarnation=Incarnation(incarnation.to_bytes(16, "big")),
        address=address or f"{name}:1",
        device="cpu",
        memory_bytes=memory_bytes,
        last_epoch=last_epoch,
        pid=1,
        is_mock=is_mock,
        memory_domain=memory_domain,
    )


def plan_of(workers: Sequence[WorkerCapacity], *, needed_bytes: int) -> Plan:
    """One layer each, in the given order. Raises PlanImpossible unless they offer `needed_bytes` together."""
    offered = sum(worker.memory_bytes for worker in workers)
    if offered < needed_bytes:
        raise PlanImpossible(f"{offered} bytes offered, {needed_bytes} needed")
    stages = tuple(
        StagePlan(
            stage=stage,
            worker=worker.name,
            role=StageRole.of_stage(stage, len(workers)),
            layer_begin=stage,
            layer_end=stage + 1,
            weight_bytes=1,
            kv_bytes=1,
            activation_bytes=1,
            memory_bytes=worker.memory_bytes,
            cost=1,
        )
        for stage, worker in enumerate(workers)
    )
    return Plan(stages=stages, num_blocks=4, block_size=4, dtype=DType.F32, limits=LIMITS)


def kinds(actions: Sequence[object]) -> list[type]:
    """Their types."""
    return [type(action) for action in actions]


class ClusterDriver:
    """A cluster state with helpers for common event sequences."""

    def __init__(
        self,
        *,
        num_stages: int,
        needed_bytes: int = 0,
        needs_check: bool = False,
        has_served: bool = False,
        last_epoch: int = 0,
        orders_by_links: bool = False,
        max_stages: int = 1,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.state = ClusterState(
            num_stages=num_stages,
            make_plan=lambda workers: plan_of(workers, needed_bytes=needed_bytes),
            policy=replace(DEFAULT_POLICY, max_stages=max_stages),
            needs_check=needs_check,
            has_served=has_served,
            last_epoch=last_epoch,
            order=WorkerOrder(by_links=orders_by_links),
        )

    @property
    def names(self) -> set[str]:
        """Names of known workers in any state."""
        return {worker.identity.name for worker in self.state.workers}

    @property
    def stage_names(self) -> list[str]:
        return [worker.identity.name for worker in self.state.stage_workers]

    def join(
        self,
        name: str,
        *,
        incarnation: int = 1,
        address: str | None = None,
        memory_bytes: int = 1000,
        last_epoch: int = 0,
        is_mock: bool = False,
        memory_domain: str = "",
    ) -> list[Action]:
        return self.state.join(
            identity_of(
                name,
                incarnation=incarnation,
                address=address,
                memory_bytes=memory_bytes,
                last_epoch=last_epoch,
                is_mock=is_mock,
                memory_domain=memory_domain,
            )
        )

    def join_all(self, *names: str) -> list[Action]:
        return [action for name in names for action in self.join(name)]

    def shrink(self, num_losses: int = 1) -> list[Action]:
        """Expire the rejoin timer."""
        return self.state.elapsed(GraceExpired(num_losses))

    def fail_load(self, name: str, reason: str = "no such file") -> list[Action]:
        return self.state.load_failed(name, self.state._plan_id, reason)

    def lose(self, name: str, reason: str = "gone") -> list[Action]:
        return self.state.lose(name, self.state.workers[name].identity.incarnation, reason)

    def loaded(self, name: str) -> list[Action]:
        return self.state.loaded(name, self.state._plan_id)

    def load_all(self) -> list[Action]:
        return [action for name in self.stage_names for action in self.loaded(name)]

    def get_ready(self) -> list[Action]:
        """Delivers all readiness signals of the current epoch."""
        epoch = self.state.epoch
        actions = [action for name in self.stage_names for action in self.state.epoch_ready(name, epoch)]
        return actions + self.state.link_open(epoch) + self.state.results_open(epoch)

    def serving(self) -> ClusterDriver:
        """A serving cluster of workers a, b, c, ..., one per stage."""
        self.join_all(*"abcdefgh"[: self.state.num_stages])
        self.load_all()
        self.get_ready()
        return self
