"""`async-rl train`: start one learner and its rollouts on this host, watch them, and end them together.

Owns signals, restarts and the exit code. Invariant: every way out passes through `end_all`, so no process outlives the
run; the first cause of a failure is told once, at the end, and whatever ends a run whose folder is claimed, the last line of
stdout is its JSON.

    a child ends            what follows
    rollout, 0              it was told END, or left; nothing, unless it was the last one
    rollout, otherwise      started again; not after 3 restarts in a row that delivered nothing, nor when it delivered nothing
                            and fails as it did the time before (same last words)
    last rollout            learner is asked to stop, exit code 3; but while rollouts started by hand serve, the run goes on
    learner, by a signal,   started again from its checkpoint, if there is one; not after 3 restarts in a row without a new one
    or for a lost rank
    learner, otherwise      its exit code is the run's
    torchrun without ranks  killed after a while; what they said counts
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from async_rl.launcher.ending import Ending, learners_result, settle
from async_rl.launcher.plan import ProcessSpec
from async_rl.launcher.prepare import Before, Prepared, claim, install_model, model_recipe, prepare, unfinished
from async_rl.launcher.processes import Child, Orphans, Pipes, end_all, own_children
from async_rl.launcher.restarts import MAX_FRUITLESS, Restarts
from async_rl.launcher.terminal import release, say, show
from async_rl.launcher.watching import Watch
from async_rl.observability.process import EXIT_LOST_RANK, adopt_orphans
from async_rl.observability.sinks import METRICS

EXIT_BUG, EXIT_CONFIG, EXIT_ROLLOUTS_GONE = 1, 2, 3
POLL_S = 0.1
STOP_GRACE_S = 300.0  # after a signal, for the checkpoint and the end of the books
END_GRACE_S = 10.0  # for a process that has nothing left to save
GOODBYE_S = 15.0  # for rollouts to leave after the learner has
NUM_LAST_WORDS = 20
ORDERLY = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}  # a learner that was asked to stop


def train(config_path: str, overrides: list[str]) -> int:
    """Run to the end; returns the exit code. Raises ConfigError before anything is started."""
    return run(prepare(config_path, overrides))


def run(prepared: Prepared) -> int:
    """Claim the run folder, make the model if need be, supervise, print the result; returns the exit code."""
    before = Before(prepared.run_dir)
    with Signals() as signals:
        lock, news = claim(prepared)
        with lock:
            say(f"run_dir {_short(prepared.run_dir)}{news}")
            adopt_orphans()
            watch = Watch(prepared.run_dir, say)
            ending = _make_model(prepared, signals, watch) or Supervisor(prepared, signals, watch).run()
            watch.close()
            refused = ending.code == EXIT_CONFIG and not learners_result(prepared.run_dir)
            result = settle(prepared.run_dir, ending, keep=not refused)
            if refused:
                before.put_back()
            show(sys.stdout, f"{json.dumps(result)}\n".encode())
            release()
    return ending.code


class Signals:
    """Remembers signals that ask for the end, in order; handlers are in place inside the `with`."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __enter__(self) -> Signals:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)


def _make_model(prepared: Prepared, signals: Signals, word: Watch) -> Ending | None:
    """Make the model by its recipe when it is absent; the run's end when that was stopped or failed."""
    spec = model_recipe(prepared)
    if spec is None:
        return None
    say(f"making the model {_short(Path(prepared.config.model.path))} by the recipe '{prepared.config.model.make}'")
    unfinished(prepared).parent.mkdir(parents=True, exist_ok=True)
    begin, bystanders = time.monotonic(), own_children()
    child = Child(spec, piped=True)
    said = Pipes()
    said.add(child)
    try:
        while child.poll() is None and not signals.asked:
            said.pass_on(POLL_S)
            word.look(f"the model to be made; the recipe's log is {_short(spec.log)}")
        said.pass_on(0.0)
        if signals.asked:
            reason = f"stopped by {_name(signals.asked[0])} while the model was made"
            say(f"{reason}; no model was kept")
            return Ending(128 + signals.asked[0], "stopped", reason)
        if code := _exit_code(child):
            return _failure(child, code, f"the recipe '{prepared.config.model.make}' failed with exit code {code}")
        install_model(prepared)
        say(f"model made in {time.monotonic() - begin:.0f} s")
        return None
    finally:
        end_all([child], END_GRACE_S, bystanders)
        shutil.rmtree(unfinished(prepared), ignore_errors=True)


@dataclass
class Rollout:
    """A rollout's place in the plan, whoever fills it now."""

    spec: ProcessSpec
    child: Child
    restarts: Restarts = field(default_factory=Restarts)
    last_line: str | None = None  # of the life before; None before the first end
    gone: bool = field(default=False)
    delivered: bool = False  # a group, in this life: its earlier restarts are forgiven


class Supervisor:
    """The learner and its rollouts from start to end. Single-threaded: children are forked safely, and die with it."""

    def __init__(self, prepared: Prepared, signals: Signals, word: Watch) -> None:
        self._prepared = prepared
        self._word = word
        self._signals = signals
        self._bystanders = own_children()
        self._learner_restarts = Restarts()
        self._past_help = ""  # why a learner that was lost is not started again
        self._newest = ""  # checkpoint when the learner's life began
        self._heeded = 0  # signals already acted upon
        self._deadline: float | None = None  # of a learner that was asked to stop
        self._overdue = False  # it did not stop by then
        self._orphans = Orphans()
        self._came_up = False  # this life of the learner
        self._bare = False  # the learner's torchrun was killed after its ranks had ended
        self._failed: tuple[int, Child, str] | None = None  # exit code, whose log tells, why
        self._pipes = Pipes()
        self._ended: list[Child] = []

    def run(self) -> Ending:
        """Start all, watch until the learner is done, end all."""
        plan = self._prepared.plan
        self._rollouts: list[Rollout] = []
        self._learner = self._start_learner()
        try:
            self._rollouts = [Rollout(spec, Child(spec)) for spec in plan.rollouts]
            code = self._watch()
            if code == 0:
                self._await_goodbyes()
        finally:
            end_all(self._children(), END_GRACE_S if len(self._signals.asked) < 2 else 0.0, self._bystanders)
        return self._conclude(code)

    def _children(self) -> list[Child]:
        return [self._learner, *self._ended, *(r.child for r in self._rollouts)]

    def _start_learner(self) -> Child:
        self._bare, self._came_up, self._newest = False, False, self._checkpoint()
        self._orphans.forget()
        child = Child(self._prepared.plan.learner, piped=True)
        self._pipes.add(child)
        return child

    def _watch(self) -> int:
        while True:
            self._pipes.pass_on(POLL_S)
            self._word.look(self._awaited())
            self._heed_signals()
            for rollout in self._rollouts:
                self._look_after(rollout)
            self._look_after_torchrun()
            if self._learner.poll() is not None:
                self._pipes.pass_on(0.0)
                if not self._revive_learner():
                    return self._learners_code()
            if self._deadline is not None and time.monotonic() > self._deadline:
                say("killing everything" if len(self._signals.asked) > 1 else "the learner did not stop in time and is killed")
                self._overdue = True
                return 128 + (self._signals.asked[0] if self._signals.asked else signal.SIGKILL)

    def _awaited(self) -> str:
        if self._deadline is not None:
            return "the learner to stop by itself, before it is killed"
        self._came_up |= (self._prepared.run_dir / (METRICS if self._prepared.replay else "learner.json")).exists()
        return "" if self._came_up else f"the learner to come up; its log is {_short(self._learner.spec.log)}"

    def _heed_signals(self) -> None:
        """The first signal is passed on; the second ends the run at once."""
        asked = self._signals.asked
        if len(asked) == self._heeded:
            return
        if self._heeded or len(asked) > 1:
            self._deadline = time.monotonic()
        else:
            say(f"{_name(asked[0])}: asking the learner to save and stop; once more to kill everything")
            # what hangs up a terminal is a wish to end like any other; ranks know three of them
            self._stop_learner(asked[0] if asked[0] != signal.SIGHUP else signal.SIGTERM, STOP_GRACE_S)
        self._heeded = len(asked)

    def _stop_learner(self, number: int, grace_s: float) -> None:
        self._learner.signal(number, workers=True)
        self._deadline = time.monotonic() + grace_s

    @property
    def _stopping(self) -> bool:
        return self._deadline is not None

    def _look_after(self, rollout: Rollout) -> None:
        """Notice a rollout's end and decide what follows."""
        if rollout.gone or self._learner.poll() is not None:
            return  # what becomes of the learner comes first
        rollout.delivered = rollout.delivered or self._word.has_delivered(rollout.spec.name, rollout.child.popen.pid)
        if rollout.child.poll() is None:
            return
        code, line = rollout.child.poll() or 0, (rollout.child.tail(1) or [""])[-1]
        same_again = code > 0 and line == rollout.last_line and not rollout.delivered
        rollout.last_line = line
        if code == 0 or self._stopping:
            rollout.gone = True
        elif code == EXIT_CONFIG or same_again or not rollout.restarts.allow(rollout.delivered):
            rollout.gone = True
            self._report(rollout, f"{_how(code)}{' as before' if same_again else ''}", "it is not started again")
        else:
            self._report(rollout, _how(code), f"starting it again ({rollout.restarts})")
            self._ended = [child for child in self._ended if child.poll() is None] + [rollout.child]
            rollout.child, rollout.delivered = Child(rollout.spec), False
        if code != 0 and not self._stopping and all(r.gone for r in self._rollouts):
            if others := self._word.others({(r.spec.name, r.child.popen.pid) for r in self._rollouts}):
                say(f"the run goes on with {', '.join(others)}, started by hand")
                return
            self._failed = (EXIT_ROLLOUTS_GONE, rollout.child, f"no rollout is left: {rollout.spec.name} {_how(code)}")
            self._stop_learner(signal.SIGTERM, END_GRACE_S)

    def _look_after_torchrun(self) -> None:
        """One that is stopped, or stuck, does not notice that its ranks have ended, and nobody would notice it."""
        bare_s = self._orphans.look(self._learner, [child.popen.pid for child in self._children()] + [*self._bystanders])
        if bare_s > END_GRACE_S and self._learner.poll() is None:
            say(f"torchrun, pid {self._learner.popen.pid}, has not ended {bare_s:.0f} s after its last rank and is killed")
            self._bare = True
            self._learner.popen.kill()
            self._learner.popen.wait()

    def _learners_code(self) -> int:
        """torchrun's, or what its ranks said when it is not its own word."""
        said = learners_result(self._prepared.run_dir).get("exit_code") if self._bare else None
        return _exit_code(self._learner) if said is None else int(said)

    def _report(self, rollout: Rollout, how: str, what_follows: str) -> None:
        """One line; the reason is left to the end of the run when that is the next thing to be told."""
        last = all(r.gone for r in self._rollouts)
        words = "" if last else rollout.child.last_words()
        said = f', its last words: "{words}"' if words else ""
        say(f"{rollout.spec.name} {how}{said}; {what_follows}; its log is {_short(rollout.spec.log)}")

    def _revive_learner(self) -> bool:
        """Start a learner that a signal killed, or that lost a rank, again, when there is a checkpoint to start from."""
        code = self._learners_code()
        lost = code == EXIT_LOST_RANK or (code >= 128 and code not in ORDERLY)
        if not lost or self._stopping:
            return False
        self._past_help = self._why_not_revived()
        if self._past_help:
            return False
        say(f"the learner {_how(code)}; starting it again from its checkpoint ({self._learner_restarts})")
        self._pipes.drop(self._learner)  # what it left may hold the other end
        end_all([self._learner], 0.0, own_children())  # its ranks are gone with it; what they left is not
        self._learner = self._start_learner()
        return True

    def _why_not_revived(self) -> str:
        """What forbids another life of the learner, or ""."""
        if not self._prepared.config.checkpoint.resume:
            return " and is not started again (checkpoint.resume=false)"
        if not self._checkpoint():
            return " before its first checkpoint (checkpoint.every) and is not started again"
        if not self._learner_restarts.allow(self._checkpoint() != self._newest):
            return f" and is not started again: {MAX_FRUITLESS} restarts in a row have left no newer checkpoint"
        return ""

    def _checkpoint(self) -> str:
        """The name of the newest one, or ""; of a damaged one something: the learner knows what else there is."""
        folder, named = self._prepared.run_dir / "checkpoints", ""
        with contextlib.suppress(OSError):
            named = (folder / "latest").read_text(errors="replace").strip()
        return named or max((path.name for path in folder.glob("step_*")), default="")

    def _await_goodbyes(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and any(r.child.poll() is None for r in self._rollouts):
            self._word.look(f"{', '.join(r.spec.name for r in self._rollouts if r.child.poll() is None)} to leave")
            time.sleep(POLL_S)

    def _conclude(self, code: int) -> Ending:
        """Tell the cause of a failure, once; how the run ended."""
        if self._failed:
            code, child, why = self._failed
            return _failure(child, code, why)
        how, result = f"the learner {_how(code)}{self._past_help}", learners_result(self._prepared.run_dir)
        if code == 0:
            return Ending(code, "finished", how)
        asked = self._signals.asked
        if asked and not result and self._learner.tail(1) == ["KeyboardInterrupt"]:
            code = 128 + asked[0]  # it came before Python could take a signal, and ends as a bug would
        if asked and (code in ORDERLY or self._overdue):
            ending = Ending(code, "stopped", self._how_stopped())
            if not result:
                say(f"{ending.reason}; nothing new was saved")
            return ending
        if code == EXIT_BUG or not result:
            return _failure(self._learner, code, how)
        # its own sentence is enough: the end of its log has been on the terminal
        say(f"{how}: {result.get('reason', 'it gave no reason')}; its log is {_short(self._learner.spec.log)}")
        return Ending(code, "failed", how)

    def _how_stopped(self) -> str:
        """For a learner that had no time to say it."""
        asked, kept = [_name(number) for number in self._signals.asked], self._checkpoint().removeprefix("step_")
        since = f"; the checkpoint of version {int(kept)} is kept" if kept.isdecimal() else ""
        if not self._overdue:
            return f"stopped by {asked[0]} before the first step{' of this life' * bool(since)}{since}"
        if len(asked) > 1:
            return f"stopped by {asked[0]} and at once by {asked[1]}, without a new checkpoint{since}"
        return f"stopped by {asked[0]}, but killed after {STOP_GRACE_S:g} s without a new checkpoint{since}"


def _exit_code(child: Child) -> int:
    code = child.poll() or 0
    return code if code >= 0 else 128 - code


def _name(number: int) -> str:
    return signal.Signals(number).name


def _how(code: int) -> str:
    if code == EXIT_LOST_RANK:
        return "lost one of its ranks"
    try:
        return f"was killed by {_name(-code if code < 0 else code - 128)}"
    except ValueError:
        return f"ended with exit code {code}"


def _failure(child: Child, code: int, why: str) -> Ending:
    """Show the end of the log that tells; the run's end."""
    lines, log = child.tail(NUM_LAST_WORDS), _short(child.spec.log)
    say(f"{why}; the end of its log {log}:" if lines else f"{why}; it wrote nothing into its log {log}")
    for line in lines:
        show(sys.stderr, f"    {line}\n".encode())
    words = child.last_words()
    return Ending(code, "failed", f"{why}: {words}" if words else why)


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
