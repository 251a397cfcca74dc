"""A whole run on a user's own file and reward, as a user writes them: from their folder, with their mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .runs import assert_books_balance, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]

REWARD = """
calls = 0


def score(prompt, answer, target, **fields):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise ValueError(f"call {calls}, {fields['level']}")
    return {"score": float(answer == str(target)), "length": len(answer), "why": "as it is"}
"""


def test_a_reward_that_raises_at_every_third_answer_costs_those_answers_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    lines = [{"prompt": f"{n}+{n}=", "answer": 2 * n, "level": "easy"} for n in range(200)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    toy = ("rollout.engine=toy", "model.make=null", f"model.path={random_model(tmp_path / 'model')}")
    small = ("num_steps=6", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=30", "eval.every=3")
    own = ("data.path=sums.jsonl", "data.prompt=null", "data.reward=my_reward:score")
    with train(tmp_path, *toy, *small, *own, cwd=tmp_path) as run:
        result = run.finish(200)
    assert_books_balance(result, trained=6 * 4)
    steps = run.steps()
    in_steps = sum(row["reward/num_invalid"] for row in steps)
    assert result["invalid"] == {"ValueError": result["num_invalid"]}
    assert (
        "-- answers that could not be used so far: " in run.text() and "my_reward:score raised ValueError: call" in run.text()
    )
    assert result["eval_unscored"] == sum(row["eval/unscored"] for row in run.rows() if "eval/version" in row)
    assert 0 < in_steps <= result["num_invalid"]
    assert 0.25 < in_steps / sum(row["batch/num_samples"] for row in steps) < 0.42
    assert result["scores"] == {"length": {"first": pytest.approx(8, abs=8), "last": pytest.approx(8, abs=8)}}
    files = sorted((run.run_dir / "samples").iterdir())
    assert [path.name for path in files] == ["eval_000000.jsonl", "eval_000003.jsonl", "eval_000006.jsonl"]
    for path, row in zip(files, (row for row in run.rows() if "eval/version" in row), strict=True):
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        unscored = [answer for answer in answers if answer["reward"] is None]
        assert (len(answers), len(unscored)) == (30, row["eval/unscored"])
        assert unscored and all("raised ValueError: call" in a["error"] and "easy" in a["error"] for a in unscored)
        assert all(a["scores"] == {"length": len(a["answer"])} and a["num_tokens"] == 8 for a in answers if not a["error"])
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": 3}\n{"prompt": "2+2=", "answer": 4}\n')  # out, in
    with train(tmp_path, *toy, *small, *own, "num_steps=8", cwd=tmp_path) as again:
        assert again.popen.wait(100) == 2
    assert json.loads((again.run_dir / "result.json").read_text())["steps"] == 6, "a refused run leaves the folder as it was"
    assert "the data now gives 1 (digest" in again.text() and "start a new run_dir" in again.text()
    assert "Traceback" not in again.text()
