"""A weight's way out: PREPARE, SEND, COMMIT, RELEASE, as one straight line in a thread of rank 0.

The publisher thread talks through the control plane and broadcasts; the trainer hands it buckets at micro-batch
boundaries (`GatherPort`), because a gather is a collective of all learner ranks. Invariants: the weights named v are
not changed while a SEND of v reads them; a member that misses a phase deadline is expelled and the publish completes
on the survivors; a member that says Hello is served the current version before its first lease.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any, Literal

from async_rl.learner.control.gather import GatherPort
from async_rl.learner.control.members import Member
from async_rl.learner.control.membership import Faults, MemberLost, Membership, Sums, close_late, in_thread
from async_rl.learner.control.plane import ControlPlane
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.transport.messages import Commit, Committed, Error, Prepare
from async_rl.weights.base import WeightsError
from async_rl.weights.checksum import digest
from async_rl.weights.group import GroupSpec, WeightGroup, listen
from async_rl.weights.source import WeightSource

log = get_logger(__name__)
POLL_S = 0.2  # the longest a waiting publisher sleeps before it looks at its deadline again
GRACE_S = 2.0  # members see a failure of the group within this of each other
MAX_BROKEN = 3  # broadcasts of one version that may break at once before its members are served one by one


class Publisher:
    def __init__(self, control: ControlPlane, source: WeightSource, backend: Literal["gloo", "nccl"], version: int) -> None:
        self.control, self.source = control, source
        self.backend: Literal["gloo", "nccl"] = backend
        self.manifest = source.manifest
        self.changed = control.changed
        self.port = GatherPort(self.changed)
        self.version = version  # of the weights the trainer holds now
        self.published = -1  # newest version every member has committed
        self.sending = False
        self.mutating = False
        self.stats: dict[str, float] = {}
        self._membership = Membership(0, [])
        self._faults = Faults(control)
        self._phase = ""  # of the update under way, for what is told of whom it waits for
        self._broken: Counter[int] = Counter()  # version -> broadcasts of it that broke before their time
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    # ---- the trainer's side

    def start(self) -> None:
        self._thread.start()

    def begin_update(self) -> bool:
        """Called in a loop before an optimizer step: True once nothing reads the weights any more."""
        with self.changed:
            if self.sending:
                return False
            self.mutating = True
            return True

    def end_update(self, version: int) -> None:
        """After the step: the weights are `version` now (the same as before for a mini-batch in the middle)."""
        with self.changed:
            self.mutating, self.version = False, version
            self.changed.notify_all()

    def close(self) -> None:
        self.port.close()
        self._thread.join(timeout=5.0)
        if self._membership.group is not None:
            self._membership.group.close()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._publish()
        except WeightsError as e:
            if not self.port.closed:
                self._fail(e)
        except BaseException as e:
            self._fail(e)

    def _fail(self, error: BaseException) -> None:
        log.exception("the publisher thread died")
        with self.changed:
            self.control.failure = error
            self.changed.notify_all()

    def _wait_for_work(self) -> bool:
        """True when somebody lacks the current version; False when the learner closes. Marks the weights as read."""
        with self.changed:
            while True:
                if self.port.closed:
                    return False
                behind = any(m.committed != self.version for m in self._served())
                if behind and not self.mutating:
                    self.sending = True
                    return True
                self.changed.wait(POLL_S)

    def _served(self) -> list[Member]:
        """Everybody but a rollout that an evaluation pins to its version."""
        return [m for m in self.control.members if not m.excused]

    def _to_serve(self) -> list[Member]:
        """All of them; one alone while the group breaks again and again, which shows whose connection it is."""
        members = self._served()
        if self._broken[self.version] < MAX_BROKEN:
            return members
        return [m for m in members if m.committed != self.version][:1]

    def _publish(self) -> None:
        """Version `self.version` to every member; starts over without those that are lost on the way."""
        started = time.monotonic()
        sums: Sums | None = None
        try:
            while sums is None:
                with self.changed:
                    members = self._to_serve()
                if not members:
                    return
                try:
                    membership = self._prepare(members)
                    sums = self._send(membership)
                    self._await("staged", membership)
                except MemberLost as lost:
                    log.warning("publish of version %d starts over: %s", self.version, lost)
                    self._dissolve()
                    sums = None
            version = self.version
        finally:
            with self.changed:
                self.sending = False
                self.changed.notify_all()
        sent = time.monotonic()
        self._commit(membership, version, sums)
        with self.changed:
            self.stats = {
                "publish/send_s": sent - started,
                "publish/commit_s": time.monotonic() - sent,
                "publish/bytes": float(self.manifest.num_bytes),
            }

    # ---- PREPARE

    def _prepare(self, members: list[Member]) -> Membership:
        """Form the group if its composition changed; every member has agreed on the manifest and posted its receive."""
        self._phase = "PREPARE"
        if {m.rollout_id for m in members} != self._membership.ids or self._membership.group is None:
            membership = self._form(members)
        else:
            membership = self._membership
            self._say_prepare(membership, "", 0)
        self._await("prepared", membership)
        return membership

    def _form(self, members: list[Member]) -> Membership:
        self._dissolve()
        membership = Membership(self._membership.number + 1, members)
        for member in members:
            membership.ranks[member.rollout_id] = membership.world_size
            membership.world_size += member.num_workers
        self._membership = membership
        host = self.control.config.transport.host
        sock, port = listen(host)
        membership.tag = secrets.token_hex(8)
        self._say_prepare(membership, host, port)
        spec = GroupSpec(
            backend=self.backend,
            host=host,
            port=port,
            tag=membership.tag,
            rank=0,
            world_size=membership.world_size,
            membership=membership.number,
            timeout_s=self.control.config.weights.phase_timeout_s,
        )
        forming = in_thread(WeightGroup, spec, sock)
        try:
            membership.group = self._outcome(forming, membership, "form the weight group")
        except BaseException:
            forming.add_done_callback(close_late)
            raise
        return membership

    def _say_prepare(self, membership: Membership, host: str, port: int) -> None:
        with self.changed:
            self.control.replies.clear()
            for member in membership.members:
                prepare = Prepare.model_validate(
                    {
                        "incarnation": self.control.identity.incarnation,
                        "version": self.version,
                        "membership": membership.number,
                        "backend": self.backend,
                        "host": host,
                        "port": port,
                        "tag": membership.tag,
                        "rank": membership.ranks[member.rollout_id],
                        "world_size": membership.world_size,
                        "manifest": self.manifest.to_dict(),
                        "timeout_s": self.control.config.weights.phase_timeout_s,
                    }
                )
                self.control.say(member.peer, prepare)

    def _dissolve(self) -> None:
        if self._membership.group is not None:
            self._membership.group.close()
            self._membership.group = None

    # ---- SEND

    def _send(self, membership: Membership) -> Sums:
        """Broadcast every bucket while the next is gathered; returns digests and checksum of what was sent."""
        assert membership.group is not None
        self._phase = "SEND"
        digests: list[str] = []
        in_flight: Future[Any] | None = None
        for k in range(len(self.manifest.buckets)):
            bucket = self.port.fetch(k)
            if in_flight is not None:
                self._outcome(in_flight, membership, f"receive bucket {k - 1}")
            in_flight = in_thread(membership.group.broadcast, bucket)
            digests.append(digest(bucket))
        if in_flight is not None:
            self._outcome(in_flight, membership, "receive the last bucket")
        return Sums(digests, self.source.checksum())

    def _outcome(self, future: Future[Any], membership: Membership, what: str) -> Any:
        """The future's result, or MemberLost when a member is gone, the group fails, or a member reports that it cannot
        take part and the group does not fail by itself within GRACE_S."""
        reported_s, started = math.inf, time.monotonic()
        with waiting(f"{', '.join(sorted(membership.ids))} to {what}"):
            while True:
                try:
                    return future.result(timeout=POLL_S / 4)
                except TimeoutError:
                    with self.changed:
                        self._check_gone(membership)
                        now = time.monotonic()
                        reported_s = min(reported_s, now if self._reports(membership) else math.inf)
                        if now - reported_s > GRACE_S:
                            self._check(membership)
                except WeightsError as e:
                    timed_out = time.monotonic() - started > 0.9 * self.control.config.weights.phase_timeout_s
                    self._blame(membership, e, timed_out)
                    raise MemberLost(str(e)) from None

    def _blame(self, membership: Membership, error: WeightsError, timed_out: bool) -> None:
        """A group operation failed: expel those it waited for. They never came to the group; or it timed out and, while all
        others report the same, they say nothing of it. When it failed before its time, a connection broke, and the others may
        not have noticed yet: heartbeats will tell whose it was, or else `_to_serve`."""
        absent = {i for i, rank in membership.ranks.items() if rank in error.absent}
        with self.changed:
            if not (absent or timed_out):
                self._broken = Counter({self.version: self._broken[self.version] + 1})
                if len(membership.ids) == 1:
                    self._faults.reported(next(iter(membership.ids)), str(error))
                return
            deadline = time.monotonic() + GRACE_S
            while not absent and time.monotonic() < deadline and self._quiet(membership):
                self.changed.wait(POLL_S)
            guilty = absent or self._quiet(membership)
            for rollout_id in guilty:
                self._faults.caused(rollout_id, f"it kept the others waiting in {self._phase}: {error}")
            if not guilty:
                for rollout_id, report in self._reports(membership).items():
                    self._faults.reported(rollout_id, report.text)

    def _quiet(self, membership: Membership) -> set[str]:
        """Members that neither hold the whole version nor report a failure."""
        return (self._missing("staged", membership, self.version) - self._reports(membership).keys()) & {
            m.rollout_id for m in self.control.members
        }

    def _reports(self, membership: Membership) -> dict[str, Error]:
        """Failures that members have reported for this membership since its last Prepare."""
        replies = self.control.replied("error", membership.number)
        return {i: reply for i, reply in replies.items() if i in membership.ids and isinstance(reply, Error)}

    # ---- waiting for replies

    def _await(self, kind: str, membership: Membership) -> None:
        """Until every member said `kind`; expels those that miss the phase deadline and raises MemberLost."""
        deadline = time.monotonic() + self.control.config.weights.phase_timeout_s
        with waiting(f"{', '.join(sorted(membership.ids))} to say {kind} {self.version}"), self.changed:
            while True:
                self._check(membership)
                missing = self._missing(kind, membership, self.version)
                if not missing:
                    return
                now = time.monotonic()
                if now > deadline:
                    for rollout_id in missing:
                        self._faults.caused(rollout_id, f"in {self._phase} it did not say {kind} {self.version} in time")
                self.changed.wait(POLL_S)

    def _missing(self, kind: str, membership: Membership, version: int) -> set[str]:
        replies = self.control.replied(kind, membership.number)
        said = {i for i, reply in replies.items() if not isinstance(reply, Error) and reply.version == version}
        return membership.ids - said

    def _check(self, membership: Membership) -> None:
        """MemberLost when the membership is no longer what it was, or a member reports a failed transfer."""
        self._check_gone(membership)
        for rollout_id, reply in self._reports(membership).items():
            self._faults.reported(rollout_id, reply.text)
            raise MemberLost(f"{rollout_id}: {reply.text}")

    def _check_gone(self, membership: Membership) -> None:
        if self.port.closed:
            raise WeightsError("the learner is closing")
        gone = [i for i in membership.ids if i not in self.control.members]
        if gone:
            raise MemberLost(f"{', '.join(gone)} left")

    # ---- COMMIT

    def _commit(self, membership: Membership, version: int, sums: Sums) -> None:
        """Every member loads and labels; those that fail are expelled, the others are released to lease."""
        identity, deadline = self.control.identity, time.monotonic() + self.control.config.weights.phase_timeout_s
        commit = Commit(
            incarnation=identity.incarnation, version=version, membership=membership.number, bucket_digests=sums.bucket_digests
        )
        done: set[str] = set()
        with waiting(f"{', '.join(sorted(membership.ids))} to commit {identity.incarnation}:{version}"), self.changed:
            for member in membership.members:
                self.control.say(member.peer, commit)
            while not self.port.closed:
                self._take_commits(membership, version, sums, done)
                missing = {i for i in membership.ids - done if i in self.control.members}
                if not missing:
                    break
                if time.monotonic() > deadline:
                    for rollout_id in missing:
                        why = f"in COMMIT it did not commit version {version} in time"
                        self.control.expel(rollout_id, why, time.monotonic())
                self.changed.wait(POLL_S)
            if done:
                self.published = version
                log.info("published %d:%d to %s", identity.incarnation, version, ", ".join(sorted(done)))
            self.changed.notify_all()

    def _take_commits(self, membership: Membership, version: int, sums: Sums, done: set[str]) -> None:
        now = time.monotonic()
        for rollout_id, reply in self.control.replied("committed", membership.number).items():
            member = self.control.members.get(rollout_id)
            if member is None or rollout_id in done or not isinstance(reply, Committed) or reply.version != version:
                continue
            if reply.checksum != sums.checksum:
                why = f"checksum mismatch at version {version}: it holds {reply.checksum}, sent was {sums.checksum}"
                self.control.events["checksum_mismatch"] += 1
                self.control.expel(rollout_id, why, now, code="fatal")
                continue
            done.add(rollout_id)
            self._faults.forgive(member.name)
            self.control.committed(member, version)
        for rollout_id, reply in self._reports(membership).items():
            if rollout_id not in done:
                self.control.expel(rollout_id, f"in COMMIT it could not commit version {version}: {reply.text}", now)
