"""What an answer is worth, whatever the function that says so does."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.envs.base import Scored
from async_rl.envs.rewards import (
    RewardError,
    RewardPool,
    as_score,
    check_loadable,
    exact_last_field,
    first_integer,
    graded_integer,
)
from async_rl.types import Prompt

HERE = "tests.reward_functions"
ROOT = Path(__file__).parents[1]
FILE = "tests/reward_functions.py"


def prompt(**fields: Any) -> Prompt:
    return Prompt("p", np.array([1, 2], dtype=np.int32), "1+2=", fields)


@contextmanager
def pool(function: str, num_workers: int = 1, timeout_s: float = 20.0, memory_bytes: int = 8 << 30) -> Iterator[RewardPool]:
    scorer = RewardPool(f"{HERE}:{function}", num_workers, timeout_s, memory_bytes)
    try:
        yield scorer
    finally:
        scorer.close()


def children() -> set[int]:
    """The spawned processes that any thread of this one started."""
    found = {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
    return {pid for pid in found if is_scorer(pid)}


def is_scorer(pid: int) -> bool:
    try:
        return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _workers_find_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


class ZeroDim:
    """Stands for a 0-d tensor of any library."""

    shape = ()

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float64(1), np.bool_(True), np.array(1), ZeroDim(1.0), {"score": 1}, {"reward": 1}]
)
def test_one_number_in_any_dress_is_a_score(value: Any) -> None:
    scored = as_score(value)
    assert (scored, type(scored.reward)) == (Scored(1.0), float)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("1.0", "str"),
        (None, "NoneType"),
        ((1.0, {}), "tuple"),
        ([1.0], "list"),
        (np.array([1.0]), "ndarray"),
        ({"value": 1}, "value"),
        ({"score": "1"}, "str"),
        ({"score": 1, "a\ud800": 1.0}, "under the name"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (-1e308, "beyond 1e+12"),
        (10**400, "inf"),
        (1j, "complex"),
    ],
)
def test_what_is_not_one_finite_number_is_refused_with_its_type(value: Any, says: str) -> None:
    scored = as_score(value)
    assert math.isnan(scored.reward)
    assert says in scored.error


@pytest.mark.parametrize(
    ("answer", "exact", "first"),
    [
        ("15 85", 1.0, 0.0),
        ("85", 1.0, 1.0),
        (" 85 \n", 1.0, 1.0),
        ("85 15", 0.0, 1.0),
        ("15 85.", 0.0, 0.0),
        ("15  85", 1.0, 0.0),
        ("15 185", 0.0, 0.0),
        ("The sum is 85!", 0.0, 1.0),
        ("-85", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("I don't know.", 0.0, 0.0),
    ],
)
def test_built_in_rewards_pay_for_the_exact_answer_only(answer: str, exact: float, first: float) -> None:
    assert exact_last_field("47+38=", answer, target="85", question="?") == exact
    assert first_integer("47+38=", answer, target="85", question="?") == first


def test_built_in_rewards_take_a_gold_answer_that_is_a_number() -> None:
    assert exact_last_field("47+38=", "15 85", target=85) == first_integer("47+38=", "85", target=85) == 1.0


def test_further_numbers_of_a_dict_are_scores_and_what_is_no_number_is_left_out() -> None:
    value = {"score": 1, "format": np.float32(0.5), "right": True, "why": "because", "nan": math.nan, "big": 10**400, 7: 2}
    assert as_score(value) == Scored(1.0, "", {"format": 0.5, "right": 1.0, "7": 2.0})
    assert as_score({"reward": 0.0, "length": np.int64(3)}) == Scored(0.0, "", {"length": 3.0})


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({f"s{i}": i for i in range(17)}, "17 scores beside the reward: 16 may be logged"),
        ({"é" * 33: 1}, "a name takes 1 to 64 bytes"),
        ({"": 1}, "a name takes 1 to 64 bytes"),
    ],
)
def test_scores_that_cannot_be_carried_are_a_mistake_and_say_so(scores: dict[str, float], says: str) -> None:
    assert as_score({"score": 1.0, **{f"s{i}": i for i in range(16)}}).reward == 1.0
    scored = as_score({"score": 1.0, **scores})
    assert math.isnan(scored.reward) and scored.scores == {}
    assert says in scored.error


def test_a_hundred_answers_are_scored_by_workers_that_load_the_function_once() -> None:
    async def run(scorer: RewardPool) -> set[tuple[float, str]]:
        return {(s.reward, s.error) for s in await asyncio.gather(*(scorer.score(prompt(), "x") for _ in range(100)))}

    with pool("pid", num_workers=2) as scorer:
        scored = asyncio.run(run(scorer))
    assert {error for _, error in scored} == {""}
    assert 1 <= len(scored) <= 2
    assert os.getpid() not in {int(pid) for pid, _ in scored}


def test_scores_cross_the_process_border() -> None:
    with pool("returns") as scorer:
        scored = asyncio.run(scorer.score(prompt(value={"score": 1.0, "format": 0.5}), "x"))
    assert scored == Scored(1.0, "", {"format": 0.5})


def test_async_functions_and_numpy_results_cross_the_process_border() -> None:
    with pool("waits") as scorer:
        assert asyncio.run(scorer.score(prompt(value=0.5), "x")) == Scored(0.5)
    with pool("returns_numpy") as scorer:
        assert asyncio.run(scorer.score(prompt(), "x")) == Scored(0.25)


def test_what_goes_wrong_in_the_function_costs_one_answer_and_says_why() -> None:
    with pool("raises") as scorer:
        scored = asyncio.run(scorer.score(prompt(), "x"))
    assert math.isnan(scored.reward)
    line = next(n for n, text in enumerate((ROOT / FILE).read_text().splitlines(), 1) if "planet" in text)
    assert scored.error == f"reward {HERE}:raises raised ValueError: no such planet ({FILE}:{line})"
    with pool("returns") as scorer:
        scored = asyncio.run(scorer.score(prompt(value="1.0"), "x"))
    assert math.isnan(scored.reward)
    assert scored.error == f"reward {HERE}:returns returned a str, not one number"


def test_where_a_reward_raised_is_the_place_in_its_own_code_and_the_log_has_the_whole_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("async_rl.envs.rewards.log.info", lambda text, *words: told.append(text % words))
    with pool("raises_by_answer", num_workers=2) as scorer:
        errors = [asyncio.run(scorer.score(prompt(), answer)).error for answer in ("{", "[", "", "{", "ok")]
    line = next(n for n, text in enumerate((ROOT / FILE).read_text().splitlines(), 1) if "json.loads" in text)
    assert ["JSONDecodeError" in error and error.endswith(f" ({FILE}:{line})") for error in errors] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert "raised KeyError: ''" in errors[2] and errors[4] == ""
    assert len(told) == 2, "each kind once"
    assert "Traceback (most recent call last)" in told[0] and "in parses\n" in told[0] and "json/decoder.py" in told[0]
    assert "_score_in_worker" not in told[0] and told[1].endswith("KeyError: ''")


def test_a_function_that_ends_its_process_costs_one_answer() -> None:
    async def run(scorer: RewardPool) -> list[Scored]:
        return [await scorer.score(prompt(), answer) for answer in ("exit", "x")]

    with pool("exits") as scorer:
        exited, after = asyncio.run(run(scorer))
    assert math.isnan(exited.reward)
    assert "code 7" in exited.error
    assert after == Scored(1.0)


def test_what_is_not_even_an_exception_costs_one_answer_and_not_the_rollout() -> None:
    async def run(scorer: RewardPool) -> list[Scored]:
        return [await scorer.score(prompt(), kind) for kind in ("exit", "stop", "cancel", "base")]

    with pool("ends_with") as scorer:
        found = asyncio.run(run(scorer))
    assert all(math.isnan(scored.reward) for scored in found)
    names = ("SystemExit", "KeyboardInterrupt", "CancelledError", "BaseException")
    assert all(name in scored.error for name, scored in zip(names, found, strict=True))


def test_after_twenty_timeouts_the_pool_has_as_many_children_as_before() -> None:
    async def run(scorer: RewardPool) -> list[Scored]:
        hung = await asyncio.gather(*(scorer.score(prompt(), "hang") for _ in range(20)))
        return [*hung, await scorer.score(prompt(), "x")]

    before = children()
    with pool("hangs_if_asked", num_workers=2, timeout_s=0.05) as scorer:
        *hung, after = asyncio.run(run(scorer))
        assert len(children() - before) == 2
    assert all(math.isnan(scored.reward) and "longer than 0.05 s" in scored.error for scored in hung)
    assert after == Scored(1.0)
    assert children() == before


def test_the_event_loop_runs_on_while_a_reward_hangs() -> None:
    async def run(scorer: RewardPool) -> float:
        hung = asyncio.create_task(scorer.score(prompt(), "hang"))
        longest, last = 0.0, time.monotonic()
        while not hung.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    with pool("hangs_if_asked", timeout_s=2.0) as scorer:
        assert asyncio.run(run(scorer)) < 1.0


def test_a_pool_whose_idle_workers_were_killed_starts_new_ones() -> None:
    async def run(scorer: RewardPool) -> list[Scored]:
        for _ in range(100):  # until pebble has seen it, answers may be lost, one by one and with a reason
            scored = await scorer.score(prompt(), "x")
            if not scored.error:
                return [scored]
            await asyncio.sleep(0.1)
        return []

    before = children()
    with pool("exits", timeout_s=5.0) as scorer:
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        time.sleep(1.0)
        assert asyncio.run(run(scorer)) == [Scored(1.0)]


@pytest.mark.parametrize("then", ["wait", "wait deaf", "die", "return", "return deaf"])
def test_a_program_that_a_reward_has_started_ends_with_it(then: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pid"
    with pool("starts_a_program", timeout_s=10.0 if "return" in then else 2.0) as scorer:
        scored = asyncio.run(scorer.score(prompt(), f"{path} {then}"))
        assert math.isnan(scored.reward) == ("return" not in then)
        if "return" not in then:
            _assert_gone(int(path.read_text()))
    _assert_gone(int(path.read_text()))
    assert capfd.readouterr().out == "", "what a reward prints is not the result of the command"


def _assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return
        except OSError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} outlived its reward")


def test_closing_does_not_wait_for_a_function_that_hangs() -> None:
    async def run(scorer: RewardPool) -> None:
        hung = asyncio.create_task(scorer.score(prompt(), "hang"))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        await asyncio.to_thread(scorer.close)
        assert time.monotonic() - started < 10
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)

    before = children()
    asyncio.run(run(RewardPool(f"{HERE}:hangs_if_asked", 1, 60.0)))
    assert children() == before


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("no.such.module:f", "No module named 'no'; start this process in the folder that holds it"),
        ("tests.reward_functions:nothing", "AttributeError"),
        ("tests.reward_functions:HERE_TOO", "AttributeError"),
        ("tests.reward_functions", "package.module:function"),
        ("tests.reward_functions:np", "is a module, not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(reward: str, says: str) -> None:
    with pytest.raises(RewardError, match=r"^data\.reward is '" + reward) as refused:
        RewardPool(reward, 1, 1.0)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("no_such_module:f", "No module named 'no_such_module'; start this process in the folder that holds it"),
        ("tests.reward_functions:nothing", "AttributeError"),
        ("tests.reward_functions:np", "is a module, not a function"),
    ],
)
def test_a_reward_is_loaded_in_a_process_of_its_own_before_anything_is_started(reward: str, says: str) -> None:
    check_loadable("tests.reward_functions:raises")
    with pytest.raises(RewardError, match=r"^data\.reward is '" + reward) as refused:
        check_loadable(reward)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


ORPHANS = """
import asyncio, os, sys, time
import numpy as np
from async_rl.envs.rewards import RewardPool
from async_rl.types import Prompt
if __name__ == "__main__":
    pool = RewardPool("tests.reward_functions:hangs_if_asked", 2, 600.0)
    async def main():
        hung = asyncio.create_task(pool.score(Prompt("p", np.array([1]), "t"), "hang"))
        await asyncio.sleep(0.5)
        print(*(w for w in pool._pool._pool_manager.worker_manager.workers), flush=True)
        await hung
    asyncio.run(main())
"""


def test_a_killed_rollout_leaves_no_scorer_behind_even_one_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(ORPHANS)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdout is not None
        workers = list(map(int, parent.stdout.readline().split()))
        parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(is_scorer, workers)):
        assert time.monotonic() < deadline, "a scorer outlived its rollout"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "score", "exact"),
    [
        ("12", 1.0, 1.0),
        ("It is 12.", 1.0, 1.0),
        ("11", 0.2, 0.0),
        ("4+8=12", 0.2 / 8, 0.0),
        ("twelve", 0.0, 0.0),
        ("9" * 400, 0.0, 0.0),
    ],
)
def test_a_graded_reward_pays_for_coming_near_and_tells_the_exact_apart(answer, score, exact):
    assert graded_integer("4+8", answer, target="12") == {"score": pytest.approx(score, abs=1e-6), "exact": exact}
