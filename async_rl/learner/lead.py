"""Rank 0's life: data, ledger, sockets and threads around the trainer, and the closing of the books.

Invariant: however the training ends, END goes out, the ledger is closed and its balance decides the exit code. Only a
life cut short by the loss of another rank says nothing: the next life resumes, and finds the rollouts waiting for it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from async_rl.config import Config
from async_rl.data.books import in_words
from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.data.record import Rules
from async_rl.envs.tasks import Tasks
from async_rl.envs.text import decoder, load_tokenizer, tokenizer_digest
from async_rl.learner import LearnerError
from async_rl.learner.checkpoints.best import Best
from async_rl.learner.checkpoints.state import MAX_INCARNATION, Kept, State, pack_state
from async_rl.learner.commands import Code
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.control.sizes import groups_at, sizes_of
from async_rl.learner.failure import RunFailed, RunStopped, lost_rank, tell
from async_rl.learner.rank import Rank
from async_rl.learner.report.progress import Progress
from async_rl.learner.report.recorder import Recorder, cut_record, life_of
from async_rl.learner.saver import Saver
from async_rl.learner.signals import Stop
from async_rl.learner.standing import standing
from async_rl.learner.trainer import Trainer
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.shaping import RewardShaping
from async_rl.learner.update.value_update import ValueUpdate
from async_rl.observability.files import read_run_id, replace_file
from async_rl.observability.log import get_logger
from async_rl.observability.process import other_cores
from async_rl.observability.report import write_report
from async_rl.observability.sinks import METRICS, read_rows
from async_rl.observability.status import StatusFile
from async_rl.transport.discovery import Discovery, write_discovery
from async_rl.transport.keys import read_learner_keys
from async_rl.transport.zmq import ZmqHub
from async_rl.types import Prompt

log = get_logger(__name__)
LINGER_S = 2.0


def lead(config: Config, folder: Path, rank: Rank, tasks: Tasks, state: State | None, stop: Stop, status: StatusFile) -> int:
    """Train to the end; returns the exit code."""
    transport = config.transport
    keys = read_learner_keys(Path(transport.keys)) if transport.keys is not None else None
    version = state.version if state else 0
    position = _position(config, state)
    run_id = read_run_id(folder)
    incarnation = next_incarnation(folder, state.incarnation if state else 0)
    identity = Identity(run_id, config.digest(), tokenizer_digest(config.model), incarnation)
    decode = decoder(load_tokenizer(config.model))
    kept = _kept(config, tasks, incarnation, state)
    progress = Progress(config, folder, incarnation, version if state else None, decode)  # from here on files change
    _announce(progress, tasks, identity, version, rank.critic, rank.checkpointer.skipped if state else None)
    if config.rollout.count == 0:
        progress.notice(f"rollout.count is 0: start rollouts by hand with `async-rl rollout {folder} --name NAME`")
    with other_cores(only=True):
        hub = ZmqHub(
            transport.host,
            transport.port,
            max_message_bytes=transport.max_message_bytes,
            max_frame_bytes=config.max_group_bytes,
            insecure=transport.insecure,
            keys=keys,
            heartbeat_timeout_s=transport.heartbeat_timeout_s,
        )
    vocab_size = rank.policy.vocab_size
    control = ControlPlane(config, hub, kept.ledger, kept.dealer, identity, version, vocab_size, progress.notice)
    publisher = Publisher(control, rank.source, weight_backend(config), version)
    if state and state.position is not None and not config.record:
        cut_record(folder, state.position)
        progress.notice(f"the record of this run ends with version {version}, for record=false now")
    recorder = _recorder(config, folder, identity, version, position, control, progress) if position is not None else None
    found = Discovery(control_address=hub.control_address, incarnation=incarnation, run_id=run_id)

    def recorded() -> int | None:
        return recorder.position if recorder else None

    parts = Parts(rank, kept, control, publisher, progress, state, stop, status, recorder, recorded)
    return conduct(parts, tasks.heldout, found)


class Parts(NamedTuple):
    """What rank 0 has, besides its rank, in a run or a replay. `state`: what it resumes."""

    rank: Rank
    kept: Kept
    control: ControlPlane
    publisher: Publisher
    progress: Progress
    state: State | None
    stop: Stop
    status: StatusFile
    recorder: Recorder | None
    position: Callable[[], int | None]  # in the record that is written or read, for a checkpoint


def conduct(parts: Parts, heldout: list[Prompt], found: Discovery | None) -> int:
    """Train with these to the end, close the books, write the result; returns the exit code. Rollouts find the learner by
    `found`; None: there are none."""
    rank, kept, control, publisher, progress, state, stop, status, recorder, position = parts
    config, folder, version = control.config, progress.run_dir, state.version if state else 0

    def checkpoint_state(version: int) -> bytes:
        with control.changed:
            return pack_state(version, kept, position())

    best = Best(rank.checkpointer.directory, version if state else None, progress.notice)
    saved = version if state else -1
    saver = Saver(config.checkpoint, rank, checkpoint_state, best, kept.gate, progress, recorder, saved)
    own = (stop, version, saver, best, kept.gate, kept.shaping, recorder)
    trainer = Trainer(config, rank, control, publisher, progress, heldout, *own)
    status.look = partial(standing, trainer)
    stop.remember()
    control.start()
    progress.serve(control)
    publisher.start()
    discovery = folder / "learner.json"
    if found is not None:
        write_discovery(discovery, found)
    code, status, reason = _train(trainer)
    if code != 128 + signal.SIGINT:  # a second one waits for nothing
        saver.close()
    rank.commands.issue(Code.END)
    with control.changed:
        kept.ledger.end()
        books = kept.ledger.books()
    publisher.close()
    control.close(reason, LINGER_S)
    progress.notice(in_words(books))
    discovery.unlink(missing_ok=True)
    if recorder is not None:
        recorder.close()
    if not books["balanced"]:
        code, status, reason = 5, "failed", f"the books do not balance: {json.dumps(books)}"
    found_best = {"best": best.score._asdict()} if best.score else {}
    ending = {"status": status, "exit_code": code, "reason": reason, **found_best}
    return _finish(folder, progress, books, control.screen.invalid, **ending)


def _position(config: Config, state: State | None) -> int | None:
    """Where in the run's record this life goes on writing; None: it keeps none. Raises LearnerError."""
    if not config.record:
        return None
    if state is None:
        return 0
    if state.position is None:
        raise LearnerError(
            f"record=true, but up to version {state.version} the run kept no record: a record begins with the run, so choose "
            "another run_dir, or record=false"
        )
    return state.position


def _recorder(
    config: Config, folder: Path, identity: Identity, version: int, position: int, control: ControlPlane, progress: Progress
) -> Recorder:
    life = life_of(config, identity.run_id, identity.incarnation, version)
    return Recorder(folder, position, life, config.checkpoint.max_failed_saves, control.events, progress.notice)


def _train(trainer: Trainer) -> tuple[int, str, str]:
    """(exit code, status, reason). Raises what a lost rank makes of a collective."""
    try:
        try:
            trainer.run()
        except RunStopped as e:
            return _save_at_stop(trainer, e)
        if trainer.reached:
            return 0, "finished", f"{trainer.reached} after {trainer.version} of {trainer.config.num_steps} steps"
        return 0, "finished", f"{trainer.version} steps done"
    except RunFailed as e:
        return e.code, "failed", str(e)
    except KeyboardInterrupt:
        return 130, "stopped", "stopped by a second SIGINT, without a checkpoint"
    except Exception as e:
        if lost_rank(e):
            raise
        log.exception("training failed")
        return 1, "failed", f"{type(e).__name__}: {e}"


def _save_at_stop(trainer: Trainer, stopped: RunStopped) -> tuple[int, str, str]:
    try:
        trainer.saver.finish()
        if trainer.version > 0:
            trainer.save()
            trainer.saver.finish()
    except RunFailed as e:
        return stopped.code, "stopped", f"{stopped}; {e}"
    if trainer.version == 0:
        return stopped.code, "stopped", f"{stopped} before the first step"
    saved = trainer.saver.saved
    saved = f"checkpoint of version {saved}" if saved >= 0 else "no checkpoint could be written"
    return stopped.code, "stopped", f"{stopped}; {saved}"


def _finish(folder: Path, progress: Progress, books: dict[str, Any], invalid: Mapping[str, int], **ending: Any) -> int:
    result = None
    try:
        result = progress.result(books, invalid, **ending)
    except OSError as e:
        lost = f"{e.filename} could not be written, so there is no result ({e.strerror}): free space and start again"
        if ending["exit_code"]:
            progress.notice(lost)
        else:
            ending = {"status": "failed", "exit_code": 4, "reason": lost}
    if ending["status"] == "failed":  # once: a launcher keeps this line in its log and says the reason of the result
        log.info("failed: %s", ending["reason"])
        tell(ending["reason"])
    else:
        progress.notice(f"{ending['status']}: {ending['reason']}")
    if result:
        _report(folder, progress, result)
    return ending["exit_code"]


def _report(folder: Path, progress: Progress, result: dict[str, Any]) -> None:
    if not result["steps"]:
        return
    try:
        result["report"] = str(write_report(folder))
        replace_file(folder / "result.json", json.dumps(result).encode())
    except OSError as e:
        progress.notice(f"the report could not be written ({e.strerror}): `async-rl report {folder}` makes it again")


def rules_of(config: Config) -> Rules:
    """Of the ledger."""
    return Rules(
        max_staleness=config.max_staleness,
        on_stale=config.on_stale,
        num_steps=config.num_steps,
        groups_per_step=partial(groups_at, config),
        max_attempts=config.rollout.max_attempts,
        lease_timeout_s=config.rollout.lease_timeout_s,
        max_buffered_bytes=config.transport.max_buffered_bytes,
        max_group_bytes=config.max_group_bytes,
        max_refill=config.algorithm.max_refill,
    )


def _kept(config: Config, tasks: Tasks, incarnation: int, state: State | None) -> Kept:
    ledger = Ledger(rules_of(config), incarnation, state.version if state else 0)
    dealer = Dealer(PromptStream(tasks.train, config.seed), sizes_of(config), config.algorithm.has_greedy)
    shaping = RewardShaping(config.algorithm, config.rollout.max_new_tokens)
    kept = Kept(dealer, ledger, Gate(config.algorithm.kl), shaping)
    if state:
        state.restore(kept)
    return kept


def _announce(
    progress: Progress, tasks: Tasks, identity: Identity, version: int, critic: ValueUpdate | None, skipped: list[str] | None
) -> None:
    """`skipped`: the newer checkpoints that could not be used; None when no run is resumed."""
    dropped = ", ".join(f"{n} {why}" for why, n in tasks.dropped.items() if n) or "none dropped"
    progress.notice(f"{len(tasks.train)} training and {len(tasks.heldout)} held-out prompts ({dropped})")
    if 0 < len(tasks.heldout) < progress.eval_draws:
        progress.notice(
            f"eval.draws is {progress.eval_draws}, but only {len(tasks.heldout)} prompts are held out: they are asked again "
            "and again, and the accuracy is no surer than of so many; hold out more (data.heldout_fraction, data.heldout_path)"
        )
    if critic:
        progress.notice(critic.told)
    for sentence in skipped or []:
        progress.notice(sentence)
    if skipped is not None:
        progress.notice(f"resumed version {version} as incarnation {identity.incarnation}")


def weight_backend(config: Config) -> Literal["gloo", "nccl"]:
    """NCCL refuses two ranks on one card, so `auto` takes it only when learner and engines have cards of their own."""
    if config.weights.backend != "auto":
        return config.weights.backend
    cards = 0 if config.learner.device == "cpu" else torch.cuda.device_count()
    count = config.rollout.count  # 0: rollouts started by hand, wherever they are
    return "nccl" if count and cards >= config.learner.ranks + count else "gloo"


def next_incarnation(folder: Path, saved: int = 0) -> int:
    """One more than the last life's; kept in a file, since a killed life may leave nothing else behind. `saved` is the
    checkpoint's. A life whose number the file has lost is known from there or from the metrics."""
    path = folder / "incarnation"
    try:
        number = int(path.read_text()) if path.exists() else 0
        if not 0 <= number < MAX_INCARNATION:
            raise ValueError("no life of a learner has that number")
    except (OSError, ValueError):
        raise LearnerError(
            f"{path} is damaged: write the highest incarnation in metrics.jsonl into it, or choose another run_dir"
        ) from None
    lived = [n for row in read_rows(folder / METRICS) if isinstance(n := row.get("incarnation"), int) and n < MAX_INCARNATION]
    number = max(number, saved, *lived) + 1
    replace_file(path, str(number).encode())
    return number
