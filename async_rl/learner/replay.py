"""Rank 0's life in a replay: the trainer of a run, on batches that were recorded, with nobody to talk to.

Owns what stands in for rollouts: a ledger that reads, a control plane without a socket, a publisher that sends nothing.
Invariants: the training code is that of a run, line by line; numbers are those of the record; a record that this learner could
not follow is refused in one sentence before it trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.config import Config
from async_rl.data.prompts import PromptError
from async_rl.data.record import Record
from async_rl.data.replay import ReplayLedger, Source
from async_rl.envs.text import decoder, load_tokenizer, tokenizer_digest
from async_rl.learner import LearnerError
from async_rl.learner.checkpoints.state import Kept, State
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.control.sizes import Sizes, sizes_of
from async_rl.learner.failure import RunFailed
from async_rl.learner.lead import Parts, conduct, next_incarnation, rules_of
from async_rl.learner.rank import Rank
from async_rl.learner.report.progress import Progress
from async_rl.learner.report.recorder import Recorded, model_digest, read_record
from async_rl.learner.signals import Stop
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.shaping import RewardShaping
from async_rl.observability.finished import REPLAY
from async_rl.observability.status import StatusFile
from async_rl.transport.memory import MemoryHub
from async_rl.types import Prompt

# Keys, or beginnings of keys, that do not change what a step makes of a recorded batch.
FREE = (
    *("run_dir", "record", "data.", "transport.", "weights.", "checkpoint.", "eval.", "observe."),
    *("model.path", "model.make", "learner.ranks", "learner.replicas", "learner.device", "learner.threads"),
    *("learner.step_timeout_s", "learner.max_skipped_steps", "algorithm.preset"),
)
ROLLOUTS = ("rollout.temperature", "rollout.max_new_tokens")  # of their section only these do


class Order(NamedTuple):
    """What the launcher asks for: the record, and the keys that were given by hand, which may differ."""

    record: Path
    given: list[str]


def order_of(folder: Path) -> Order | None:
    """None when the folder is of a run and not of a replay."""
    path = folder / REPLAY
    if not path.exists():
        return None
    held = json.loads(path.read_text())
    return Order(Path(held["record"]), held["given"])


def lead_replay(
    config: Config, folder: Path, rank: Rank, order: Order, state: State | None, stop: Stop, status: StatusFile
) -> int:
    """Train on the record to its end, or the run's; returns the exit code."""
    version, position = (state.version, state.position) if state else (0, 0)
    if position is None:
        raise LearnerError(f"{folder} holds checkpoints of a run, not of a replay: choose another --out")
    differs, torn = _check(config, order)
    incarnation = next_incarnation(folder, state.incarnation if state else 0)
    batches = (entry for entry in read_record(order.record, position) if isinstance(entry, Recorded))
    ledger = ReplayLedger(rules_of(config), incarnation, version, _source(batches))
    ledger.position = position
    kept = Kept(
        _Sizer(sizes_of(config)),
        ledger,
        Gate(config.algorithm.kl),
        RewardShaping(config.algorithm, config.rollout.max_new_tokens),
    )
    if state:
        state.restore(kept)
    progress = Progress(config, folder, incarnation, version if state else None, decoder(load_tokenizer(config.model)))
    for sentence in rank.checkpointer.skipped if state else []:
        progress.notice(sentence)
    if torn:
        progress.notice(f"the last entry of the record was cut short ({torn} bytes), as by a kill, and is left out")
    if differs:
        progress.notice(f"differs from the recorded run, so its figures will: {differs}")
    progress.notice(
        f"replaying {order.record} from version {version} as incarnation {incarnation}: no rollout, no weights sent"
    )
    control = Playback(config, kept, ledger, Identity("", "", "", incarnation), version, rank.policy.vocab_size, progress)
    publisher = Unpublished(control, rank.source, "gloo", version)
    parts = Parts(rank, kept, control, publisher, progress, state, stop, status, None, lambda: ledger.position)
    return conduct(parts, [], None)


def _source(batches: Iterator[Recorded]) -> Source:
    def more() -> tuple[int, list[Record], int] | None:
        found = next(batches, None)
        return None if found is None else (found.version, found.records, found.end)

    return more


def _check(config: Config, order: Order) -> tuple[str, int]:
    """Read all of the record. Whether every life in it was of this model and configuration, else LearnerError: what differs
    because it was asked for, and the bytes of a last entry that is not whole."""
    asked: dict[str, None] = {}
    end = 0
    for life in read_record(order.record):
        end = life.end
        if isinstance(life, Recorded):
            continue
        if life.tokenizer != tokenizer_digest(config.model) or life.model != model_digest(config.model.path):
            raise LearnerError(
                f"{order.record} was recorded with another model or tokenizer than {config.model.path} holds now: restore it, "
                "or give model.path=FOLDER"
            )
        changed = _differences(life.config, config)
        if odd := [text for key, text in changed.items() if not _given(key, order.given)]:
            raise LearnerError(
                f"{order.record} was recorded from version {life.version} on with another configuration "
                f"({', '.join(odd[:5])}): give the key as it was, or as it shall be, behind the command"
            )
        asked |= dict.fromkeys(changed.values())
    if end == 0:
        raise LearnerError(f"{order.record} holds no batch: give the folder of a run with record=true")
    return ", ".join(asked), order.record.stat().st_size - end


def _differences(recorded: dict[str, Any], config: Config) -> dict[str, str]:
    """Key -> "key recorded -> now", of those that matter here."""
    before, now = _flat(recorded), _flat(config.model_dump(mode="json"))
    keys = [key for key in now | before if before.get(key) != now.get(key) and not _is_free(key)]
    return {key: f"{key} {before.get(key)} -> {now.get(key)}" for key in keys}


def _is_free(key: str) -> bool:
    return key.startswith(FREE) or (key.startswith("rollout.") and key not in ROLLOUTS)


def _given(key: str, given: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in given)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


class _Sizer(Dealer):
    """A dealer without prompts: it learns from what is trained on, as in a run, and deals nothing."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self.num_greedy = sizes, 0

    def deal(self, step: int) -> tuple[Prompt, int]:
        raise PromptError("a replay deals no prompt")

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._sizes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sizes.load_state_dict(state["sizes"])


class Playback(ControlPlane):
    """No thread and no member: what the trainer asks of it has its answer at once."""

    replayed = True

    def __init__(
        self,
        config: Config,
        kept: Kept,
        ledger: ReplayLedger,
        identity: Identity,
        version: int,
        vocab_size: int,
        progress: Progress,
    ) -> None:
        hub = MemoryHub(max_message_bytes=config.transport.max_message_bytes)
        super().__init__(config, hub, ledger, kept.dealer, identity, version, vocab_size, progress.notice)
        self._recorded = ledger

    @property
    def exhausted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        with self.changed:
            return self._recorded.recorded is None

    def start(self) -> None:
        pass

    def close(self, reason: str, linger_s: float) -> None:
        self.hub.close(0.0)

    def cancel_stale(self, version: int) -> None:
        """Asked before each batch: whether the record goes on from here."""
        if (recorded := self._recorded.recorded) != version:
            raise RunFailed(
                4,
                f"the record goes on with a batch of version {recorded}, but the replay is at version {version}: it skipped "
                "other steps than the recorded run, or rolled back to another checkpoint",
            )

    def raise_if_hopeless(self, now: float) -> None:
        pass


class Unpublished(Publisher):
    """Nobody is served: every version counts as published."""

    def __init__(self, control: ControlPlane, source: Any, backend: Any, version: int) -> None:
        super().__init__(control, source, backend, version)
        self.published = version

    def start(self) -> None:
        pass

    def end_update(self, version: int) -> None:
        super().end_update(version)
        self.published = version

    def close(self) -> None:
        self.port.close()
