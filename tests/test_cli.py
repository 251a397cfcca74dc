"""The command line as a user meets it: quick, light, and plain about mistakes. Times are CPU time, for busy machines."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
HEAVY = ("torch", "vllm", "transformers")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "async_rl", *arguments], capture_output=True, text=True, cwd=cwd, timeout=100)


def cpu_s(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(code: str) -> set[str]:
    """Which heavy packages a fresh Python holds after running this code."""
    tell = f"{code}\nimport sys; print('HELD', *(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def refused(*arguments: str, cwd: Path = ROOT) -> str:
    """The one sentence with which a command is refused."""
    done = run(*arguments, cwd=cwd)
    assert done.returncode == 2 and done.stdout == "", (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("async-rl: "), done.stderr
    return lines[0]


def test_help_answers_at_once():
    assert min(cpu_s("--help") for _ in range(2)) < 0.7


def test_check_answers_within_3_s():
    assert cpu_s("check", QUICKSTART) < 3


def test_check_imports_neither_torch_nor_vllm_nor_transformers():
    code = f"from async_rl.cli import main\nassert main(['check', {QUICKSTART!r}]) == 0"
    assert imported(code) == set()


@pytest.mark.parametrize("package", ["types", "config", "data", "transport", "envs", "launcher", "cli"])
def test_the_light_floors_import_without_heavy_packages(package):
    walk = (
        "import importlib, pkgutil\n"
        f"root = importlib.import_module('async_rl.{package}')\n"
        "for m in pkgutil.walk_packages(getattr(root, '__path__', []), root.__name__ + '.'): importlib.import_module(m.name)"
    )
    assert imported(walk) == set()


def test_check_says_what_would_run_and_creates_nothing(tmp_path):
    done = run("check", QUICKSTART, "num_steps=7", "rollout.count=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "7 steps" in done.stdout and "rollout-1" in done.stdout and "recipe 'tiny' first" in done.stdout
    assert "memory     not estimated: the size of" in done.stdout
    by_hand = run("check", QUICKSTART, "rollout.count=0", cwd=tmp_path)
    assert "start them by hand with `async-rl rollout RUN_DIR --name NAME`" in by_hand.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_typo_in_a_key_is_one_sentence_with_the_right_key():
    assert "did you mean 'learner.lr'?" in refused("train", QUICKSTART, "learner.lrr=1")


def test_a_missing_model_path_is_one_sentence():
    assert "model.path is models/none" in refused("train", QUICKSTART, "model.path=models/none", "model.make=null")


def test_a_port_in_use_is_one_sentence_and_nothing_is_left(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = refused("train", QUICKSTART, f"transport.port={port}", cwd=tmp_path)
    assert f"transport.port is {port}" in sentence and "in use" in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_reward_in_the_working_directory_is_found_by_the_console_script(tmp_path):
    (tmp_path / "my_reward.py").write_text("def score(prompt, answer, **fields):\n    return 1.0\n")
    code = (
        "import sys; sys.path[0] = '/the/folder/of/the/script'; from async_rl.cli import main\n"
        f"sys.exit(main(['check', {QUICKSTART!r}, 'data.reward=my_reward:score']))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=100)
    assert done.returncode == 0 and "scored by my_reward:score" in done.stdout, done.stderr


def test_what_the_data_and_the_reward_lack_for_each_other_is_one_sentence(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": 2, "units": "m"}\n')
    own = (QUICKSTART, f"data.path={data}", "data.prompt=null")
    assert "but no prompt is held out of 1 (" in refused("check", *own)
    assert "no training prompt is left" in refused("check", *own, f"data.heldout_path={data}")
    assert "does not take the field `units`" in refused("check", *own, "data.reward=colorsys:rgb_to_hsv")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    for command in (["learner"], ["rollout", "--name", "rollout-0"]):
        assert "holds no config.yaml" in refused(command[0], str(tmp_path), *command[1:])
    assert "holds no metrics.jsonl" in refused("report", str(tmp_path))


def test_a_path_too_long_for_the_system_is_one_sentence():
    long = "x" * 300
    for command in (["check", long], ["check", "configs/quickstart.yaml", f"model.path={long}"], ["status", long]):
        assert "File name too long" in refused(*command)


def test_a_model_is_not_written_over(tmp_path):
    assert "which exists" in refused("model", "tiny", "--out", str(tmp_path))


def test_an_export_without_a_checkpoint_or_over_a_folder_is_one_sentence(tmp_path):
    assert "holds no config.yaml" in refused("export", str(tmp_path), "--out", str(tmp_path / "out"))
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "run.json").write_text("{}")
    assert "holds no checkpoint" in refused("export", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "which exists" in refused("export", str(tmp_path), "--out", str(tmp_path))


def test_what_cannot_be_evaluated_is_one_sentence(tmp_path):
    assert "a folder without config.json" in refused("eval", str(tmp_path), QUICKSTART)
    assert "eval.draws is 0" in refused("eval", str(tmp_path), QUICKSTART, "eval.draws=0")
    assert "did you mean" in refused("eval", str(tmp_path), QUICKSTART, "eval.drawz=1")
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    assert "finds no module nowhere" in refused("eval", str(tmp_path), QUICKSTART, "data.reward=nowhere:f")
    assert "no option of 'basic_arithmetic'" in refused("eval", str(tmp_path), QUICKSTART, "data.options.max_term=3")


def test_settings_may_stand_behind_an_option(tmp_path):
    sentence = refused("eval", str(tmp_path), QUICKSTART, "eval.draws=3", "--engine", "transformers", "eval.drawz=1")
    assert "did you mean 'eval.draws'?" in sentence
    for words in (["eval", str(tmp_path), QUICKSTART, "--enginee", "x"], ["report", str(tmp_path), "a=1"]):
        done = run(*words)
        assert (
            done.returncode == 2
            and "unrecognized arguments: " + " ".join(words[-1 if words[0] == "report" else -2 :]) in done.stderr
        )


def test_rollout_becomes_the_process_that_train_would_start(tmp_path):
    """Shown by the process image: the command replaces itself instead of starting a child."""
    (tmp_path / "config.yaml").write_text(Path(QUICKSTART).read_text())
    (tmp_path / "run.json").write_text("{}")
    code = (
        "import json, os\n"
        "os.execv = lambda path, argv: print(json.dumps(argv))\n"
        "from async_rl.cli import main\n"
        f"main(['rollout', {str(tmp_path)!r}, '--name', 'rollout-7'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ})
    assert json.loads(done.stdout)[1:] == ["-m", "async_rl.rollout", str(tmp_path), "--name", "rollout-7"], done.stderr


def test_nobody_joins_a_run_that_has_finished(tmp_path):
    (tmp_path / "config.yaml").write_text(Path(QUICKSTART).read_text())
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "result.json").write_text(json.dumps({"policy_version": 160, "status": "finished"}))
    assert "has finished its 160 steps: nobody is left to join" in refused("rollout", str(tmp_path), "--name", "x")


def test_the_script_for_one_gpu_says_what_is_missing(tmp_path):
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    script = ["/bin/bash", str(ROOT / "launch" / "one_gpu.sh")]
    done = subprocess.run(script, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=20)
    assert done.returncode == 2 and "no nvidia-smi here" in done.stderr
