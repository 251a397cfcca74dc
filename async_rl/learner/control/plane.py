"""The learner's control plane: every message in, every lease and verdict out.

One IO thread polls the hub and calls the handlers below; the training and publisher threads read and change the same
state under `changed`, the one lock of rank 0, and are woken by it. Owns the ledger, the members and the running
evaluation; touches no tensor. Invariant: whatever a rollout sends, it gets a final answer or is expelled by a deadline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

from async_rl.config import Config
from async_rl.data.evaluation import Evaluation, sampled_by
from async_rl.data.ledger import Ledger
from async_rl.data.record import Record
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.leases import evaluation_lease, training_lease
from async_rl.learner.control.members import Identity, Member, Members
from async_rl.learner.control.screen import Screen
from async_rl.learner.failure import RunFailed
from async_rl.observability import stacks
from async_rl.observability.log import get_logger, rare
from async_rl.observability.process import other_cores
from async_rl.transport.base import Delivered, Event, Hub, Peer
from async_rl.transport.messages import (
    Ack,
    Cancel,
    Committed,
    End,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Prepared,
    Staged,
    Welcome,
)
from async_rl.types import Attempt, Group

log = get_logger(__name__)
TICK_S = 0.05  # longest the IO thread sleeps: bounds the delay of a grant that a release made possible


Outcome = Literal["accepted", "duplicate", "refused"]
Reply = Prepared | Staged | Committed | Error


class ControlPlane:
    exhausted = False  # whether no batch will come any more
    replayed = False  # whether batches come from a record

    def __init__(
        self,
        config: Config,
        hub: Hub,
        ledger: Ledger,
        dealer: Dealer,
        identity: Identity,
        resumed_version: int,
        vocab_size: int,
        notice: Callable[[str], None],
    ) -> None:
        self.config, self.hub, self.ledger, self.dealer = config, hub, ledger, dealer
        self.identity, self.resumed_version, self.notice = identity, resumed_version, notice
        self.changed = threading.Condition(threading.RLock())
        self.members = Members()
        self.evaluation: Evaluation | None = None
        self.evaluation_due: int | None = None  # the version that one is about to begin of
        self.replies: dict[tuple[str, str], Reply] = {}  # (kind, rollout id) -> the newest since the last Prepare
        self.events: Counter[str] = Counter()  # joins, expulsions, unscorable groups, ...: what the metrics report
        self.screen = Screen(config, vocab_size, ledger, self.events, notice)
        self.failure: BaseException | None = None
        self.admitting = True  # False: no new training lease (a pause by the KL gate)
        self._alone_since = time.monotonic()
        self._ever_live = False
        self._last_beat = self._last_turn = 0.0
        self._closed = False
        self._outgoing: deque[tuple[Peer, Message]] = deque()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # ---- life of the IO thread

    def start(self) -> None:
        with other_cores():
            self._thread.start()

    def close(self, reason: str, linger_s: float) -> None:
        """Say End to every rollout and stop; bounded by linger_s and one poll."""
        with self.changed:
            for member in self.members:
                self.say(member.peer, End(reason=reason))
            self._closed = True
        self.hub.wake()
        self._thread.join(timeout=5.0)
        self.hub.close(linger_s)

    def _run(self) -> None:
        try:
            while not self._closed:
                events = self.hub.poll(TICK_S)
                if not events and not self._outgoing and time.monotonic() < self._last_turn + TICK_S:
                    continue  # what was refused costs no turn
                with self.changed:
                    self.turn(events, time.monotonic())
            with self.changed:
                self._flush(time.monotonic())
        except BaseException as e:
            log.exception("the control thread died")
            with self.changed:
                self.failure = e
                self.changed.notify_all()

    def turn(self, events: list[Event], now: float) -> None:
        """What the IO thread does with what has arrived, and with the time that has passed. Call under the lock."""
        self._last_turn = now
        for event in events:
            self._handle(event, now)
        self._tick(now)
        self._flush(now)
        self.changed.notify_all()

    def _tick(self, now: float) -> None:
        timeout_s = self.config.transport.heartbeat_timeout_s
        for member, why in self.members.silent(now, timeout_s):
            self.expel(member.rollout_id, why, now)
        for lease in self.ledger.expire(now):
            self._cancel(lease.rollout_id, lease.group_id, lease.attempt, "its lease expired")
            self.events["lease_expired"] += 1
            stacks.dump(f"the lease of group {lease.group_id} at {lease.rollout_id} has expired")
        if now - self._last_beat >= self.config.transport.heartbeat_s:
            self._last_beat = now
            for member in self.members:
                self.say(member.peer, Heartbeat())
        self._lease_evaluations(now)
        self._grant(now)

    # ---- what arrives

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Delivered):
            self._delivered(event, now)
            return
        message, member = event.message, self.members.of_peer(event.peer)
        if isinstance(message, Hello):
            self._hello(event.peer, message, now)
        elif member is None:
            self.events["unknown_peer"] += 1
            self.say(event.peer, Error(code="rejoin", text="the learner does not know this connection: say Hello"))
        elif isinstance(message, Heartbeat):
            self.members.heard(member, message, now)
        elif isinstance(message, Goodbye):
            self._remove(member, f"left: {message.reason}", now)
        elif isinstance(message, Prepared | Staged | Committed):
            member.heard_s = now
            self.replies[message.kind, member.rollout_id] = message
        elif isinstance(message, Error):
            member.heard_s = now
            log.warning("%s reports %s: %s", member.rollout_id, message.code, message.text)
            self.replies[message.kind, member.rollout_id] = message
        else:
            self.events["unexpected_message"] += 1

    def replied(self, kind: str, membership: int) -> dict[str, Reply]:
        """What each member said last of this kind, when it is of this membership."""
        return {i: reply for (said, i), reply in self.replies.items() if said == kind and reply.membership == membership}

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        objection = self.identity.objection(hello) or self.members.objection(hello, now, self.config.transport.heartbeat_s)
        if objection is not None:
            self._refuse(peer, objection)
            return
        for predecessor in (self.members.named(hello.name), self.members.of_peer(peer)):
            if predecessor is not None and predecessor.rollout_id in self.members:
                self._remove(predecessor, "replaced by a new connection", now)
        member = self.members.join(peer, hello, now)
        welcome = Welcome(
            rollout_id=member.rollout_id,
            incarnation=self.identity.incarnation,
            version=self.resumed_version,
            data_address=self.hub.data_address,
        )
        self.say(peer, welcome)
        self.events["joined"] += 1
        self.notice(f"{member.rollout_id} joined")

    def _refuse(self, peer: Peer, error: Error) -> None:
        self.say(peer, error)
        self.events["refused_hello"] += error.code == "fatal"
        if error.code == "fatal" and rare(self.events["refused_hello"]):
            self.notice(error.text)

    def _delivered(self, event: Delivered, now: float) -> None:
        group = event.group
        member = self.members.get(group.rollout_id)
        if member is not None:
            member.heard_s = now
        if group.split == "eval":
            outcome, reason = self._evaluated(group, member)
        else:
            unfit = self.screen.unfit(group)
            verdict = self.ledger.refuse(group, unfit, now) if unfit else self.ledger.accept(group, event.num_bytes, now)
            outcome, reason = verdict.outcome, verdict.reason
            if verdict.cancel is not None:
                self._cancel(verdict.cancel[0], group.group_id, verdict.cancel[1], "another attempt was faster")
            if member is not None:
                member.held.discard(group.group_id)
            if outcome == "accepted":
                self.screen.sift(group)
        if member is not None:
            ack = Ack(group_id=group.group_id, attempt=group.attempt, outcome=outcome, reason=reason)
            self.say(member.peer, ack)
        if outcome == "refused":
            self.events[f"refused/{reason}"] += 1
            if rare(self.events[f"refused/{reason}"]):
                log.warning("refused group %d of %r: %s", group.group_id, group.rollout_id, reason)

    # ---- what goes out

    def say(self, peer: Peer, message: Message) -> None:
        """Queue a message; the IO thread, which alone touches the sockets, sends it."""
        self._outgoing.append((peer, message))
        if threading.current_thread() is not self._thread:
            self.hub.wake()

    def _flush(self, now: float) -> None:
        while self._outgoing:
            peer, message = self._outgoing.popleft()
            if not self.hub.send(peer, message):
                member = self.members.of_peer(peer)
                if member is not None:
                    self._remove(member, "left: its connection is gone", now)

    def _grant(self, now: float) -> None:
        """One lease to each member in turn while slots and admission allow: leases follow the free slots."""
        if self._one_at_a_time:
            return
        granted: dict[Peer, list[Lease]] = {}
        candidates = [m for m in self.members if m.live and self.admitting]
        while candidates:
            for member in list(candidates):
                full = len(member.held) >= member.num_slots
                record = None if full else self.ledger.grant(member.rollout_id, self.dealer.deal, now)
                if record is None:
                    candidates.remove(member)
                    continue
                member.held.add(record.group_id)
                granted.setdefault(member.peer, []).append(training_lease(self.config, record))
        for peer, leases in granted.items():
            for k, lease in enumerate(leases, 1):
                self.say(peer, lease.model_copy(update={"more": k < len(leases)}))

    def _cancel(self, rollout_id: str | None, group_id: int, attempt: Attempt, reason: str) -> None:
        """Tell the holder of a lease to stop; the ledger has already ended that attempt."""
        member = self.members.get(rollout_id or "")
        if member is not None:
            member.held.discard(group_id)
            self.say(member.peer, Cancel(group_id=group_id, attempt=attempt, reason=reason))

    def cancel_stale(self, version: int) -> None:
        """on_stale=cancel: groups born too long ago are sampled anew."""
        for lease in self.ledger.cancel_stale(version):
            self._cancel(lease.rollout_id, lease.group_id, lease.attempt, "too old")
            self.events["stale_cancelled"] += 1

    def trained(self, records: list[Record], new_version: int) -> None:
        """The taken batch made `new_version`. What it says of its prompts sizes their next groups."""
        self.ledger.trained([record.group_id for record in records], new_version)
        for record in records:
            if record.payload is not None:
                self.dealer.saw(record.prompt.prompt_id, self.screen.has_signal(record.payload))

    # ---- evaluation

    @property
    def _one_at_a_time(self) -> bool:
        """Synchronous training samples nothing beside an evaluation: what a batch is computed with is in its last digits."""
        at_work = self.evaluation is not None or self.ledger.released == self.evaluation_due
        return at_work and self.config.max_staleness == 0 and not any(m.excused for m in self.members)

    def begin_evaluation(self, evaluation: Evaluation) -> bool:
        """Hand its answers out from now on. True when one rollout of several does it alone, pinned to that version,
        while training goes on with the others; False when training must wait for it."""
        self.evaluation, self.evaluation_due = evaluation, None
        live = [m for m in self.members if m.live]
        if len(live) < 2:
            return False
        evaluator = min(live, key=lambda m: len(m.held))
        evaluator.excused = True
        self.ledger.excuse(evaluator.rollout_id)
        self.notice(f"{evaluator.rollout_id} evaluates version {evaluation.name.version}, training goes on with the others")
        return True

    def end_evaluation(self) -> None:
        """Take back what is still out; an excused rollout counts again and gets the update it has missed."""
        assert self.evaluation is not None
        attempt = Attempt(self.evaluation.name.incarnation, 0)
        self.evaluation = None
        for member in self.members:
            for eval_id in member.evaluating:
                self.say(member.peer, Cancel(group_id=eval_id, attempt=attempt, reason="the evaluation ended"))
            member.evaluating.clear()
            if member.excused and member.committed is not None:
                member.excused = False
                self.ledger.committed(member.rollout_id, member.committed)
        self.changed.notify_all()

    def _lease_evaluations(self, now: float) -> None:
        evaluation = self.evaluation
        if evaluation is None:
            return
        alone = any(m.excused for m in self.members)
        for member in self.members:
            if alone and not member.excused:
                continue
            while member.committed == evaluation.name.version and len(member.evaluating) < self.config.rollout.max_num_seqs:
                item = evaluation.next_lease()
                if item is None:
                    return
                eval_id, prompt = item
                member.evaluating.add(eval_id)
                remaining_s = max(1.0, evaluation.deadline_s - now)
                self.say(member.peer, evaluation_lease(self.config, eval_id, prompt, evaluation.name, remaining_s))

    def _evaluated(self, group: Group, member: Member | None) -> tuple[Outcome, str]:
        if member is not None:
            member.evaluating.discard(group.group_id)
        if self.evaluation is None or len(group.trajectories) != 1:
            return "refused", "no_evaluation"
        (answer,) = group.trajectories
        pinned = sampled_by(group, self.evaluation.name)
        counted = self.evaluation.deliver(group.group_id, pinned, answer.reward, answer)
        return ("accepted", "") if counted else ("duplicate", "")

    # ---- members leave

    def expel(self, rollout_id: str, why: str, now: float, code: str = "rejoin") -> None:
        """Remove a member that failed a deadline; if it lives, it may say Hello again (unless `code` is fatal)."""
        member = self.members.get(rollout_id)
        if member is None:
            return
        self.events["expelled"] += 1
        stacks.dump(f"{rollout_id} is expelled: {why}")
        self.say(member.peer, Error.model_validate({"code": code, "text": f"{rollout_id} was expelled: {why}"}))
        self._remove(member, f"expelled: {why}", now)

    def _remove(self, member: Member, why: str, now: float) -> None:
        self.members.leave(member.rollout_id)
        self.replies = {key: reply for key, reply in self.replies.items() if key[1] != member.rollout_id}
        returned = self.ledger.leave(member.rollout_id, now)
        if self.evaluation is not None:
            self.evaluation.give_back(sorted(member.evaluating))
        self.notice(f"{member.rollout_id} {why} ({len(returned)} groups leased again)")
        if member.live and not any(m.live for m in self.members):
            self._alone_since = now
            self.notice(f"no rollout is left: waiting {self.config.rollout.timeout_s:g} s (rollout.timeout_s) for one to join")
        self.changed.notify_all()

    def committed(self, member: Member, version: int) -> None:
        """The member serves this version from now on; its first one makes it live."""
        member.committed = version
        self._ever_live = True
        self.ledger.committed(member.rollout_id, version)

    def raise_if_hopeless(self, now: float) -> None:
        """RunFailed when nothing can come any more: the IO thread died, rollouts are gone, or every answer fails."""
        if self.failure is not None:
            raise RunFailed(1, f"the learner's control thread died: {self.failure!r}")
        limit = self.config.algorithm.max_refill * self.ledger.rules.groups_per_step(self.ledger.version)
        if self.screen.failed_in_a_row >= limit:
            what = f"all of the last {self.screen.failed_in_a_row} groups were unscorable"
            raise RunFailed(4, f"{what}, last error: {self.screen.last_error}")
        if any(m.live for m in self.members):
            return
        key = "timeout_s" if self._ever_live else "start_timeout_s"
        limit_s = getattr(self.config.rollout, key)
        if now - self._alone_since > limit_s:
            who = self.members.why_not_live()
            stacks.dump(f"no rollout is serving after {limit_s:g} s")
            raise RunFailed(
                3, f"no rollout is serving after {limit_s:g} s (rollout.{key}); {who}: see the logs of the rollouts"
            )
