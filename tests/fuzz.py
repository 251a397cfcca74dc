"""The learner's gate and control plane under hostile input: `python -m tests.fuzz --inputs 1000000 --seed 1`.

Every input goes through a real hub's intake into a real ControlPlane with a ledger. After each life of LIFE inputs an honest
rollout joins, delivers and is acknowledged, and the ledger's invariants hold. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_rl.data.evaluation import Evaluation
from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.data.record import State
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.sizes import sizes_of
from async_rl.transport.base import Event
from async_rl.transport.codec import decode, encode, encode_group
from async_rl.transport.intake import Intake
from async_rl.transport.memory import MemoryHub
from async_rl.transport.messages import PROTOCOL, Ack, Heartbeat, Hello, Lease, Message, Welcome
from async_rl.types import Attempt, Group, WeightName
from benchmarks.whole_runs import whereabouts
from tests.fuzz_inputs import PEERS, Input, Inputs, Known
from tests.ledger_samples import make_prompt, make_rules, make_trajectory
from tests.scripted_members import make_config

T = TypeVar("T")
LIFE = 5000  # inputs to one control plane
MAX_MESSAGE_BYTES = 1 << 16
BYTES_PER_BYTE, BYTES_MORE = 160, 256 << 10  # what reading one message may allocate: 160 times its size and 256 KiB
MAX_GROWTH_BYTES = 256 << 20  # of the process, however many inputs it has read; one may be CONTROL_MAX_BYTES long
TURN = 8  # inputs, at most, to one turn of the IO thread
CONFIG = make_config(num_steps=10**6, transport={"heartbeat_timeout_s": 5.0, "max_message_bytes": MAX_MESSAGE_BYTES})
IDENTITY = {"run_id": "run", "config_digest": "config", "tokenizer_digest": "tokenizer"}


@dataclass
class Ear:
    """A rollout's end of a connection: what the learner says is kept, and read when somebody wants it."""

    heard: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))

    def deliver(self, content: bytes) -> str:
        self.heard.append(content)
        return ""

    def notify(self) -> None: ...

    def take(self) -> list[Message]:
        messages: list[Message] = [decode(content) for content in self.heard]
        self.heard.clear()
        return messages


class Life:
    """One control plane, a clock and a trainer of its own, and strangers on all its connections."""

    def __init__(self, seed: int) -> None:
        self.inputs = Inputs(seed, MAX_MESSAGE_BYTES)
        self.rng = self.inputs.rng
        self.hub = MemoryHub(max_message_bytes=MAX_MESSAGE_BYTES)
        on_stale = self.rng.choice(["wait", "cancel", "train"])
        rules = make_rules(num_steps=10**6, on_stale=on_stale, max_staleness=2, max_buffered_bytes=4000)
        self.ledger = Ledger(rules, 1)
        self.prompts = [make_prompt(i) for i in range(50)]
        dealer = Dealer(PromptStream(self.prompts, seed=seed % 2**31), sizes_of(CONFIG), CONFIG.algorithm.has_greedy)
        identity = Identity(*IDENTITY.values(), incarnation=1)
        self.notices: deque[str] = deque(maxlen=100)
        self.control = ControlPlane(CONFIG, self.hub, self.ledger, dealer, identity, 0, 1000, self.notices.append)
        self.ears: dict[bytes, Ear] = {}
        self.known_leases: deque[Lease] = deque(maxlen=32)
        self.now = time.monotonic()
        self.inputs_seen = self.accepted = 0
        self.largest = (0.0, 0, 0)  # (share of its bound, bytes allocated, bytes of the message) of the worst input

    # ---- a turn

    def turn(self, count: int) -> None:
        """Some inputs, and then what the learner does: the IO thread's turn, commits, a step, an evaluation."""
        members = deque((m.rollout_id for m in self.control.members), maxlen=32)
        known = Known(IDENTITY, members, self.known_leases, self.ledger.version)
        events: list[Event] = []
        for _ in range(count):
            events += self.read(self.inputs.draw(known))
        self.now += self.rng.choice((0.0, 0.01, 0.3, 2.0))
        with self.control.changed:
            self.control.turn(events, self.now)
            self.learn()
        for ear in self.ears.values():
            if self.rng.random() < 0.2:
                self.known_leases += [m for m in ear.take() if isinstance(m, Lease)]
        self.connections()

    def read(self, given: Input) -> list[Event]:
        with self.hub.changed:
            if given.channel == "data":
                self.hub.data.append(list(given.frames))
            elif len(given.frames) == 2:
                self.hub.control.append((given.frames[0], given.frames[1]))
            else:
                self.hub.control.append(tuple(given.frames))  # pyright: ignore[reportArgumentType]
        events, used = _measured(lambda: self.hub.poll(0.0))
        bound = BYTES_PER_BYTE * given.num_bytes + BYTES_MORE
        if used > bound:  # Python's table of interned strings grows now and then; what a message costs, it costs each time
            used = _measured(lambda: _read_again(given))[1]
        assert used <= bound, f"reading {given.num_bytes} bytes allocated {used}, over {bound}: {given.frames!r:.2000}"
        self.largest = max(self.largest, (used / bound, used, given.num_bytes))
        self.inputs_seen += 1
        self.accepted += len(events)
        return events

    def learn(self) -> None:
        """As publisher and trainer would."""
        control, ledger, rng = self.control, self.ledger, self.rng
        for member in control.members:
            if not member.excused and (member.committed != ledger.version) and rng.random() < 0.5:
                control.committed(member, ledger.version)
        control.cancel_stale(ledger.version)
        if (batch := ledger.take(ledger.version)) is not None:
            if rng.random() < 0.9:
                control.trained(batch, ledger.version + 1)
            else:
                ledger.drop([record.group_id for record in batch], "skipped")
        if control.evaluation is not None and (control.evaluation.done or rng.random() < 0.1):
            assert 0 <= control.evaluation.missing <= 4
            control.end_evaluation()
        elif control.evaluation is None and rng.random() < 0.02:
            name = WeightName(1, ledger.version)
            control.begin_evaluation(Evaluation(self.prompts, 4, 0, name, self.now + 60))

    def connections(self) -> None:
        """They come and go; what is said over one that is gone comes from nobody."""
        for peer in PEERS:
            if self.rng.random() < 0.02 and peer in self.hub.links:
                del self.hub.links[peer], self.ears[peer]
            elif self.rng.random() < 0.2:
                self.ears.setdefault(peer, Ear())
                self.hub.links[peer] = self.ears[peer]  # pyright: ignore[reportArgumentType]

    # ---- what must hold

    def check(self) -> None:
        """Every input is accepted or counted, the books balance, the bounds hold, and nothing has piled up."""
        assert self.inputs_seen == self.accepted + self.hub.refused.total(), self.hub.refused
        ledger, rules, control = self.ledger, self.ledger.rules, self.control
        books = ledger.books()
        assert books["balanced"], books
        assert ledger.reserved_bytes <= rules.max_buffered_bytes + MAX_MESSAGE_BYTES * books["groups"]["ready"]
        if ledger.released is not None:
            assert ledger.outstanding <= rules.window(ledger.released, ledger.released + rules.max_staleness)
        for record in ledger._shelves.records.values():
            assert (record.payload is not None) == (record.state in (State.READY, State.TAKEN))
        assert control.failure is None
        assert len(control.replies) <= 4 * len(control.members)
        assert len(control.members._asked_s) <= 1024
        assert len(control.events) < 64 and len(control.screen.invalid) <= 16

    def honest(self) -> None:
        """A rollout that comes now joins, is leased a group, delivers it, and hears that it was accepted."""
        ear, peer = Ear(deque()), b"honest"
        self.hub.links[peer] = ear  # pyright: ignore[reportArgumentType]
        with self.control.changed:
            if self.control.evaluation is not None:
                self.control.end_evaluation()
            for member in self.control.members:
                self.control.expel(member.rollout_id, "it went silent", self.now)
        hello = Hello.model_validate(IDENTITY | {"protocol": PROTOCOL, "name": "honest", "num_slots": 8, "pid": 77})
        self.said(peer, hello)
        (welcome,) = [m for m in ear.take() if isinstance(m, Welcome)]
        for _ in range(4):  # whatever was ready may fill the window: the trainer takes it
            with self.control.changed:
                self.now += 0.1
                member = self.control.members.of_peer(peer)
                assert member is not None and member.rollout_id == welcome.rollout_id
                self.control.committed(member, self.ledger.version)
                self.learn()
            self.said(peer, Heartbeat(free_slots=8))
            messages = ear.take()
            for lease in (m for m in messages if isinstance(m, Lease) and m.split == "train"):
                ids = self.prompts[int(lease.prompt_id[1:])].token_ids
                versions = [self.ledger.version] * 3
                siblings = (make_trajectory(versions),) * lease.num_samples
                group = Group(lease.group_id, Attempt(*lease.attempt), lease.split, welcome.rollout_id, ids, siblings)
                self.hub.data.append(encode_group(group))
                self.said(peer, Heartbeat())
                (ack,) = [m for m in ear.take() if isinstance(m, Ack)]
                assert (ack.group_id, ack.outcome) == (lease.group_id, "accepted"), ack
                return
        raise AssertionError(f"no lease for an honest rollout: {self.ledger.why_not(self.ledger.version, self.now)}")

    def said(self, peer: bytes, message: Message) -> None:
        self.hub.control.append((peer, encode(message)))
        with self.control.changed:
            self.control.turn(self.hub.poll(0.0), self.now)

    def end(self) -> None:
        tracemalloc.stop()
        self.ledger.end()
        books = self.ledger.books()
        groups = books["groups"]
        assert books["balanced"] and groups["waiting"] == groups["leased"] == groups["ready"] == groups["taken"] == 0, books


def _measured(read: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and the most bytes that it held at once. (To start and stop tracing for each would leak a kilobyte.)"""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    return read(), tracemalloc.get_traced_memory()[1] - before


def _read_again(given: Input) -> None:
    intake = Intake(MAX_MESSAGE_BYTES)
    intake.delivered(given.frames) if given.channel == "data" else intake.said(given.frames)


def live(seed: int, count: int) -> Life:
    """One life of `count` inputs, with all its checks."""
    life = Life(seed)
    while life.inputs_seen < count:
        life.turn(min(life.rng.randint(1, TURN), count - life.inputs_seen))
        if life.rng.random() < 0.02:
            life.check()
    life.check()
    life.honest()
    life.end()
    return life


def run(inputs: float, seed: int, seconds: float = math.inf) -> dict[str, Any]:
    """Lives until so many inputs were read or so many seconds have passed; what they came to."""
    logging.disable(logging.WARNING)
    started, refused, turned_away = time.monotonic(), Counter[str](), Counter[str]()
    seen, accepted, largest, number, growth = 0, 0, (0.0, 0, 0), 0, 0
    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        while seen < inputs and time.monotonic() - started < seconds:
            life = live(seed * 1_000_003 + number, int(min(LIFE, inputs - seen)))
            number += 1
            seen += life.inputs_seen
            accepted += life.accepted
            refused += life.hub.refused
            turned_away += Counter({k: v for k, v in life.control.events.items() if k not in ("joined", "stale_cancelled")})
            largest = max(largest, life.largest)
            growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before) << 10
            assert growth < MAX_GROWTH_BYTES, f"{seen} inputs have made the process {growth} bytes larger"
    except KeyboardInterrupt:
        pass  # the figures so far
    finally:
        logging.disable(logging.NOTSET)
    share, used, num_bytes = largest
    return {
        "inputs": seen,
        "accepted": accepted,
        "refused": dict(refused.most_common()),
        "control": dict(turned_away.most_common()),
        "crashes": 0,  # the first ends the run
        "largest_allocation_bytes": used,
        "of_a_message_of_bytes": num_bytes,
        "share_of_its_bound": round(share, 3),
        "bound": f"{BYTES_PER_BYTE} x message + {BYTES_MORE}",
        "rss_growth_bytes": growth,
        "lives": number,
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(run(args.inputs, args.seed) | {"seed": args.seed, **whereabouts()}))
    sys.exit(0)
