"""A trainer of rank 0 with everything real but sockets, engines and the update: its KL is scripted, its weights do move.

The ledger, the control plane, the publisher, gloo, the checkpoints and the gate are those of a run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from async_rl.config import Config
from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.learner import trainer as trainer_module
from async_rl.learner.checkpoints.best import Best
from async_rl.learner.checkpoints.checkpoint import Checkpointer
from async_rl.learner.checkpoints.state import Kept, pack_state, unpack_state
from async_rl.learner.commands import Code
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.control.sizes import sizes_of
from async_rl.learner.lead import _train
from async_rl.learner.rank import Rank
from async_rl.learner.report.progress import Progress
from async_rl.learner.saver import Saver
from async_rl.learner.signals import Stop
from async_rl.learner.trainer import Trainer
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.model import hf_named_parameters
from async_rl.learner.update.optim import policy_tensors
from async_rl.learner.update.shaping import RewardShaping
from async_rl.learner.update.steering import Steering
from async_rl.learner.update.step import StepReport
from async_rl.observability.sinks import read_run
from async_rl.transport.messages import Lease, Message
from async_rl.types import Attempt, Group
from async_rl.weights.source import WeightSource

from . import scripted_members
from .learner_cases import make_policy, make_update, weights
from .ledger_samples import make_prompt, make_rules, make_trajectory
from .scripted_members import ListHub, Rollout

WARM_UP = "warm-up"


def make_config(folder: Path, gated: bool = True, **kl: Any) -> Config:
    """Two groups a step, a checkpoint after each, of which one is kept; the gate pauses at 10 nats, twice in a row."""
    return scripted_members.make_config(
        num_steps=8,
        run_dir=str(folder),
        algorithm={"kl": {"gate": 10.0, "gate_patience": 2, "gate_action": "halve_lr"} | kl if gated else {}},
        learner={"max_skipped_steps": 1},
        rollout={"timeout_s": 20.0, "start_timeout_s": 20.0},
        transport={"heartbeat_timeout_s": 20.0},
        weights={"phase_timeout_s": 20.0, "bucket_bytes": 1 << 16},
        eval={"draws": 0},
        checkpoint={"every": 1, "keep": 1},
    )


class Commands:
    """Those of a single rank: what is said is kept."""

    def __init__(self) -> None:
        self.said: list[tuple[Code, int]] = []

    def issue(self, code: Code, argument: int = 0) -> None:
        self.said.append((code, argument))


class AnsweringRollout(Rollout):
    """Answers each lease after `delay_s`, by the version it was born at, but those beyond the first `answered` never."""

    scene: Training
    delay_s = 0.0

    def _hear(self, message: Message) -> None:
        super()._hear(message)
        if isinstance(message, Lease) and len(self.leases) <= self.scene.answered:
            threading.Timer(self.delay_s, self._answer, (message,)).start()

    def _answer(self, lease: Lease) -> None:
        (incarnation, version), ids = lease.born, np.array(lease.prompt_ids, np.int32)
        answer = make_trajectory([version] * 2, incarnation)
        group = Group(lease.group_id, Attempt(*lease.attempt), lease.split, self.rollout_id, ids, (answer, answer))
        self.scene.hub.deliver(group)


@dataclass
class Training:
    """`kls`: what the step at each version measures; None skips the step, WARM_UP is one that trains a critic alone."""

    folder: Path
    kls: dict[int, float | str | None]
    config: Config
    critic: None = None
    incarnation: int = 1
    lease_timeout_s: float = 20.0
    answered: int = 1000  # leases
    on_notice: dict[str, Callable[[], object]] = field(default_factory=dict)  # beginning of a notice -> what then happens
    on_step: dict[int, Callable[[], object]] = field(default_factory=dict)  # version -> what happens before its step
    notices: list[str] = field(default_factory=list)
    steered: dict[int, Steering] = field(default_factory=dict)
    held: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # version -> weights and moments at its step

    def __post_init__(self) -> None:
        policy = make_policy(seed=self.incarnation)
        _, optimizer = make_update(self.config, policy)
        self.policy, self.optimizer, self.stop = policy, optimizer, Stop()
        checkpointer = Checkpointer(self.folder / "checkpoints", self.config.checkpoint.keep)
        latest = checkpointer.latest_complete()
        packed = checkpointer.load(latest, policy_tensors(optimizer)) if latest else None
        state = unpack_state(packed, latest) if packed and latest else None
        version = state.version if state else 0
        self.hub, self.gate = ListHub(), Gate(self.config.algorithm.kl)
        stream = PromptStream([make_prompt(i) for i in range(50)], seed=0)
        dealer = Dealer(stream, sizes_of(self.config), greedy=False)
        self.ledger = Ledger(self._rules(), self.incarnation, version)
        kept = Kept(dealer, self.ledger, self.gate, RewardShaping(self.config.algorithm, 12))
        if state:
            state.restore(kept)
        progress = Progress(self.config, self.folder, self.incarnation, version if state else None, lambda ids: "")
        progress.notice = self._notice
        identity = Identity("run", "config", "tokenizer", self.incarnation)
        self.control = ControlPlane(self.config, self.hub, self.ledger, dealer, identity, version, 1000, self._notice)
        source = WeightSource(hf_named_parameters(policy), torch.float32, self.config.weights.bucket_bytes)
        self.publisher = Publisher(self.control, source, "gloo", version)
        self.commands = Commands()
        rank = Rank(policy, optimizer, self, source, self.commands, checkpointer, None, None)  # pyright: ignore[reportArgumentType]
        best = Best(checkpointer.directory, version if state else None, self._notice)
        saved = version if state else -1
        self.saver = Saver(
            self.config.checkpoint, rank, lambda at: pack_state(at, kept), best, kept.gate, progress, None, saved
        )
        own = (self.stop, version, self.saver, best, kept.gate, kept.shaping)
        self.trainer = Trainer(self.config, rank, self.control, self.publisher, progress, [], *own)

    def train(self, monkeypatch: Any, delay_s: float = 0.0) -> tuple[int, str, str]:
        """To the end, with one rollout; (exit code, status, reason), as `lead` has them. The books are closed."""
        monkeypatch.setattr(trainer_module, "assemble", _assemble)
        self.stop.remember()
        self.control.start()
        self.publisher.start()
        try:
            self.rollout = AnsweringRollout(self, "rollout-0")  # pyright: ignore[reportArgumentType]
            self.rollout.delay_s = delay_s
            ended = _train(self.trainer)
            self.saver.close()
            return ended
        finally:
            with self.control.changed:
                self.ledger.end()
            self.publisher.close()
            self.control.close("the test is over", 0.0)
            self.trainer.progress.result({}, {})

    def run(self, batch: Any, step: int, steering: Steering, boundary: Any, before_update: Any) -> StepReport:
        """The update: every weight and moment moves by the steered rate."""
        self.on_step.get(step, lambda: None)()
        self.steered[step], self.held[step] = steering, self.tensors()
        boundary()
        kl = self.kls.get(step, 1.0)
        if kl is None:
            return StepReport(True, "the script says so", {}, 0)
        before_update()
        if kl == WARM_UP:
            return StepReport(False, "", {}, 8, warm_up=True)
        assert isinstance(kl, float)
        with torch.no_grad():
            for tensor in (*self.policy.parameters(), *self.optimizer.named_state().values()):
                tensor += 0.01 * steering.lr_scale * (step + 1)
        return StepReport(False, "", {"kl_ref/seq_sum": kl}, 8)

    def tensors(self) -> dict[str, torch.Tensor]:
        return weights(self.policy) | {name: value.clone() for name, value in self.optimizer.named_state().items()}

    def stop_by_signal(self) -> None:
        self.stop._remember(signal.SIGTERM, None)

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_run(self.folder) if "reward/mean" in row]

    def groups(self) -> dict[str, Any]:
        with self.control.changed:
            return self.ledger.books()["groups"]

    def _rules(self) -> Any:
        c = self.config
        return make_rules(
            groups_per_step=c.groups_per_step,
            max_staleness=c.max_staleness,
            num_steps=c.num_steps,
            max_group_bytes=c.max_group_bytes,
            lease_timeout_s=self.lease_timeout_s,
        )

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        for beginning, act in self.on_notice.items():
            if text.startswith(beginning):
                act()


def _assemble(records: list[Any], *_: Any) -> tuple[Any, dict[str, Any]]:
    num_answers = sum(len(record.payload.trajectories) for record in records)
    return SimpleNamespace(num_trajectories=num_answers), {"reward/mean": 0.5, "batch/num_samples": num_answers}
