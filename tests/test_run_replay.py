"""Whole replays: the learner of a recorded run alone, killed and gone on with, is that run bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from async_rl.cli import main
from benchmarks.replay_equality import NUM_STEPS, difference, interrupted, live, steps

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(900)]


def test_a_replay_that_is_killed_and_stopped_and_gone_on_with_is_the_recorded_run_bit_for_bit(tmp_path: Path, capsys) -> None:
    recorded = live(tmp_path, 1)
    assert [row["step"] for row in steps(recorded)] == list(range(1, NUM_STEPS + 1))
    assert any(row["policy/grad_norm"] > 0 for row in steps(recorded)), "or everything would be equal"
    out, kills = interrupted(recorded, "out", 1, True, random.Random(1))
    assert kills == 1 and len({row["incarnation"] for row in steps(out)}) == 3
    assert difference(recorded, out)["differs"] == []
    assert not (out / "learner.json").exists() and not list((out / "logs").glob("rollout*"))

    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    replay = ("replay", str(recorded), "--out")
    assert f"--out is {recorded}, the folder of the recorded run" in refused(*replay, str(recorded))
    assert "eval.draws cannot be given to a replay" in refused(*replay, str(tmp_path / "new"), "eval.draws=8")
    assert "only a run with record=true can be replayed" in refused("replay", str(out), "--out", str(tmp_path / "new"))
    config = str(recorded / "config.yaml")
    assert "which holds a replay: choose another for a run" in refused("train", config, f"run_dir={out}")
    (recorded / "record").rename(tmp_path / "moved")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        (other / name).write_bytes((recorded / name).read_bytes())
    (tmp_path / "moved").rename(other / "record")
    assert f"which holds a replay of {recorded}/record/batches: choose another" in refused(
        "replay", str(other), "--out", str(out)
    )
    assert "which holds a run: choose another for a replay" in refused("replay", str(other), "--out", str(recorded))
