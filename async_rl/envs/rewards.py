"""Rewards, and the processes that compute them.

Owns: loading a reward by name, the pool, what counts as a score, two built-in rewards. Imports types and its room.
Invariant: no reward function, whatever it does (raise, hang, exit, eat memory, return junk), stops a rollout or its event
loop; it costs one answer, whose reward is NaN with a reason.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import numbers
import os
import re
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from pebble import ProcessExpired

from async_rl.envs.base import Scored
from async_rl.envs.fitting import Example, misfit
from async_rl.envs.scorers import OUT_OF_MEMORY, end_if_out_of_memory, end_pool, new_pool
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.types import MAX_REWARD, MAX_SCORE_NAME_BYTES, MAX_SCORES, Prompt

log = get_logger(__name__)
START_TIMEOUT_S = 60.0
GRACE_S = 30.0
MAX_WORDS = 400  # characters of what a process that could not load said last
SCORE_KEYS = ("score", "reward")
MAX_TOLD = 16  # kinds of exceptions whose traceback goes to the log
LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
WHERE = "start this process in the folder that holds it, install it or set PYTHONPATH"


class RewardError(Exception):
    """The reward function cannot be used; one sentence."""


def exact_last_field(prompt: str, answer: str, *, target: str | int, **_: Any) -> float:
    """1.0 when the last space-separated field of the stripped answer is exactly the target, else 0.0."""
    return float(answer.strip().split(" ")[-1] == str(target))


def first_integer(prompt: str, answer: str, *, target: str | int, **_: Any) -> float:
    """1.0 when the first integer in the answer is the target, else 0.0."""
    found = re.search(r"-?\d+", answer)
    return float(found is not None and found.group() == str(target))


def graded_integer(prompt: str, answer: str, *, target: str | int, **_: Any) -> dict[str, float]:
    """1.0 when the first integer in the answer is the target, 0.2 when it is one off, less the farther off, 0.0 without one.
    `exact` tells only the first apart."""
    found = re.search(r"-?\d{1,9}", answer)
    off = abs(int(found.group()) - int(target)) if found else None
    return {"score": 0.0 if off is None else 1.0 if off == 0 else 0.2 / off, "exact": float(off == 0)}


def check_loadable(reward: str, examples: Sequence[Example] = ()) -> None:
    """Load the function once, in a process of its own that then ends, and see whether it takes the fields of the examples: what
    is wrong with it is to be known before an engine starts, and threads of a reward's libraries must not be there when an
    engine forks. Raises RewardError."""
    program = "import sys; from async_rl.envs.rewards import load_fitting; load_fitting(*sys.argv[1:])"
    argv = [sys.executable, "-c", program, reward, json.dumps(examples)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=START_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RewardError(_unusable(reward, f"loading it took longer than {START_TIMEOUT_S:g} s")) from None
    if done.returncode:
        words = (done.stderr.strip() or "it ended the process without a word").splitlines()[-1]
        hint = f"; {WHERE}" if words.startswith("ModuleNotFoundError") else ""
        raise RewardError(_unusable(reward, f"{words[:MAX_WORDS]}{hint}"))


def load_fitting(reward: str, examples: str) -> None:
    """The whole of that process; a function that does not fit ends it with a sentence."""
    try:
        signature = inspect.signature(load(reward))
    except ValueError:  # of a function in C, which does not tell
        return
    if problem := misfit(signature, json.loads(examples)):
        sys.exit(problem)


def _unusable(reward: str, why: str) -> str:
    return f"data.reward is '{reward}', which cannot be used: {why}"


class RewardPool:
    """`num_workers` processes that score answers, each within `timeout_s`; one that overstays is replaced."""

    def __init__(self, reward: str, num_workers: int, timeout_s: float, memory_bytes: int = 8 << 30) -> None:
        """Start the workers and load `reward` ("package.module:function") in one of them.

        Blocks for the start of an interpreter, at most START_TIMEOUT_S. Raises RewardError when the function cannot be loaded.
        """
        self._reward = reward
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._pending = 0
        self._told: set[str] = set()  # kinds of exceptions whose traceback is in the log
        self._pool = new_pool(num_workers, memory_bytes)
        problem = self._probe()
        if problem:
            self.close()
            raise RewardError(_unusable(reward, problem))

    async def score(self, prompt: Prompt, answer: str) -> Scored:
        """The reward, or NaN and the reason when the function fails or overstays. Never raises, but for cancellation."""
        self._pending += 1
        # a guard against a lost reply; the pool itself times the call, from when a worker takes it
        deadline_s = GRACE_S + self._timeout_s * (1 + math.ceil(self._pending / self._num_workers))
        try:
            future = self._schedule(prompt.text, answer, prompt.fields)
            with waiting(f"reward {self._reward} to score"):
                async with asyncio.timeout(deadline_s):
                    call = await asyncio.wrap_future(future)
            self._tell(call)
            return call.scored
        except TimeoutError:
            return Scored(math.nan, f"reward {self._reward} took longer than {self._timeout_s:g} s")
        except ProcessExpired as e:
            if e.exitcode == OUT_OF_MEMORY:
                return Scored(math.nan, f"reward {self._reward} was not scored: memory: {self._too_much}")
            return Scored(math.nan, f"reward {self._reward} ended its process with code {e.exitcode}")
        except asyncio.CancelledError:
            raise
        except Exception as e:  # a broken pool, an argument that cannot be sent
            return Scored(math.nan, f"reward {self._reward} was not scored: {type(e).__name__}: {_one_line(e)}")
        finally:
            self._pending -= 1

    def _tell(self, call: Call) -> None:
        if call.kind and call.kind not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(call.kind)
            log.info("%s; the first %s in full:\n%s", call.scored.error, call.kind, call.traceback)

    def close(self) -> None:
        """End the workers, whatever they do; returns within a few seconds."""
        end_pool(self._pool)

    def _schedule(self, text: str, answer: str, fields: dict[str, Any]) -> Any:
        args = (self._reward, text, answer, fields)
        if not self._pool.active:  # an idle worker was killed from outside: pebble then gives up the whole pool
            threading.Thread(target=end_pool, args=(self._pool,), daemon=True).start()
            self._pool = new_pool(self._num_workers, self._memory_bytes)
        return self._pool.schedule(_score_in_worker, args=args, timeout=self._timeout_s)

    @property
    def _too_much(self) -> str:
        return f"it needs more than {self._memory_bytes} bytes (rollout.reward_memory_bytes)"

    def _probe(self) -> str:
        try:
            with waiting(f"reward {self._reward} to load in a scorer"):
                loading = self._pool.schedule(_load_in_worker, args=(self._reward,), timeout=START_TIMEOUT_S)
                return loading.result(START_TIMEOUT_S)
        except TimeoutError:
            return f"loading it took longer than {START_TIMEOUT_S:g} s"
        except (ProcessExpired, CancelledError, RuntimeError) as e:
            if isinstance(e, ProcessExpired) and e.exitcode == OUT_OF_MEMORY:
                return f"loading it failed: {self._too_much}"
            return f"loading it ended the process: {_one_line(e)}"


def as_score(value: Any) -> Scored:
    """The reward, within +-MAX_REWARD, in whatever a reward function returned, or NaN and the reason.

    Accepted: int, float, bool, their numpy kinds, 0-d arrays and tensors, and a dict with one of these as `score` or `reward`
    (BR-087). Other entries of a dict that are such numbers become scores; texts, NaN and the like are left out. More scores
    than MAX_SCORES, or a name beyond MAX_SCORE_NAME_BYTES, is a mistake: the answer is not scored, and the reason says so.
    """
    scores: dict[str, float] = {}
    if isinstance(value, dict):
        found = [key for key in SCORE_KEYS if key in value]
        if not found:
            return Scored(math.nan, f"returned a dict without 'score' or 'reward': keys {sorted(map(str, value))[:5]}")
        others = {str(key): _number(entry) for key, entry in value.items() if key != found[0]}
        scores = {name: x for name, x in others.items() if x is not None and abs(x) <= MAX_REWARD}
        value = value[found[0]]
    reward = _number(value)
    if reward is None:
        return Scored(math.nan, f"returned a {type(value).__name__}, not one number")
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        return Scored(math.nan, f"returned {reward:g}" + f", beyond {MAX_REWARD:g}" * math.isfinite(reward))
    problem = _too_many(scores)
    return Scored(math.nan, problem) if problem else Scored(reward, "", scores)


def _number(value: Any) -> float | None:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf


def _too_many(scores: dict[str, float]) -> str:
    odd = [
        name
        for name in scores
        if not 0 < len(name.encode(errors="surrogatepass")) <= MAX_SCORE_NAME_BYTES or not _sendable(name)
    ]
    if odd:
        return f"returned a score under the name {ascii(odd[0])[:80]}: a name takes 1 to {MAX_SCORE_NAME_BYTES} bytes of text"
    if len(scores) > MAX_SCORES:
        return f"returned {len(scores)} scores beside the reward: {MAX_SCORES} may be logged, leave out the others"
    return ""


def _sendable(name: str) -> bool:
    return all(not 0xD800 <= ord(c) < 0xE000 for c in name)  # half a surrogate pair is no text


_loaded: dict[str, Callable[..., Any]] = {}


def load(reward: str) -> Callable[..., Any]:
    """The function itself; raises whatever its module raises."""
    if reward not in _loaded:
        module, _, name = reward.partition(":")
        if not name:
            raise ValueError("write it as package.module:function")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
        _loaded[reward] = function
    return _loaded[reward]


def _load_in_worker(reward: str) -> str:
    try:
        load(reward)
    except ModuleNotFoundError as e:
        return f"{_one_line(e)}; {WHERE}"
    except BaseException as e:  # a user's module may raise anything on import, also SystemExit
        end_if_out_of_memory(e)
        return f"{type(e).__name__}: {_one_line(e)}"
    return ""


class Call(NamedTuple):
    """What came of one call: of one that raised also what it raised, and the traceback from the function on."""

    scored: Scored
    kind: str = ""
    traceback: str = ""


def _score_in_worker(reward: str, text: str, answer: str, fields: dict[str, Any]) -> Call:
    try:
        value = load(reward)(text, answer, **fields)
        if inspect.isawaitable(value):
            value = asyncio.run(_wait(value))
        scored = as_score(value)
    except BaseException as e:  # the user's code, which may also call sys.exit: that ends one answer, not the rollout
        end_if_out_of_memory(e)
        kind, frames = type(e).__name__, e.__traceback__ and e.__traceback__.tb_next
        error = f"reward {reward} raised {kind}: {_one_line(e)}{_place(frames)}"
        return Call(Scored(math.nan, error), kind, "".join(traceback.format_exception(type(e), e, frames)).rstrip())
    return Call(scored._replace(error=f"reward {reward} {scored.error}") if scored.error else scored)


def _place(frames: TracebackType | None) -> str:
    """As ` (file:line)` the innermost frame in the user's own code, else the innermost that is not ours; "" without one."""
    found = [(f.filename, f.lineno) for f in traceback.extract_tb(frames) if f.filename != __file__]
    own = [(name, line) for name, line in found if not name.startswith(LIBRARIES) and not name.startswith("<")]
    if not found:
        return ""
    name, line = (own or found)[-1]
    path = Path(name)
    return f" ({path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name}:{line})"


async def _wait(value: Any) -> Any:
    return await value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
