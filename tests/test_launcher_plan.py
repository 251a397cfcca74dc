"""Who runs where (plan), what is refused beforehand (preflight), and the run folder (prepare). No process is started."""

from __future__ import annotations

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.config import ConfigError, DataConfig, load_config, parse_config
from async_rl.launcher import preflight
from async_rl.launcher.datasets import check_dataset
from async_rl.launcher.plan import Machine, make_plan
from async_rl.launcher.prepare import Before, changes, claim, install_model, model_recipe, prepare, unfinished
from async_rl.observability import files
from async_rl.observability.process import HOST_CORES, other_cores

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def config(**sections):
    return parse_config({"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "org/name"}, **sections})


def plan(machine: Machine, **sections):
    return make_plan(config(**sections), Path("/run"), machine)


def machine(num_cores: int = 2, num_gpus: int = 0, **environ: str) -> Machine:
    return Machine(tuple(range(num_cores)), tuple(str(i) for i in range(num_gpus)), environ)


def test_each_process_has_cores_of_its_own_when_there_are_enough():
    made = plan(machine(6), learner={"threads": 2}, rollout={"count": 2, "threads": 2})
    assert [spec.cores for spec in (made.learner, *made.rollouts)] == [{0, 1}, {2, 3}, {4, 5}]
    assert made.learner.env["OMP_NUM_THREADS"] == made.rollouts[0].env["OMP_NUM_THREADS"] == "2"
    assert made.learner.env[HOST_CORES] == "0,1,2,3,4,5" and HOST_CORES not in made.rollouts[0].env


def test_nobody_is_pinned_when_the_threads_outnumber_the_cores():
    made = plan(machine(3), learner={"ranks": 2}, rollout={"count": 2})
    assert [spec.cores for spec in (made.learner, *made.rollouts)] == [None, None, None]
    assert HOST_CORES not in made.learner.env


def test_threads_that_serve_sockets_may_leave_the_share_of_cores_and_the_others_not(monkeypatch):
    every = os.sched_getaffinity(0)
    share = {min(every)}
    monkeypatch.setenv(HOST_CORES, ",".join(map(str, every)))
    os.sched_setaffinity(0, share)
    try:
        with other_cores(), ThreadPoolExecutor(1) as pool:
            assert pool.submit(os.sched_getaffinity, 0).result() == every
        with other_cores(only=True), ThreadPoolExecutor(1) as pool:
            assert pool.submit(os.sched_getaffinity, 0).result() == (every - share or every)
        assert os.sched_getaffinity(0) == share
    finally:
        os.sched_setaffinity(0, every)


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(4, ["0,1", "2", "3"]), (5, ["0,1", "2", "3"]), (2, ["0,1", "0", "1"]), (3, ["0,1", "2", "0"]), (0, ["", "", ""])],
)
def test_ranks_take_the_first_gpus_and_rollouts_the_rest(num_gpus, expected):
    made = plan(machine(num_gpus=num_gpus), learner={"ranks": 2}, rollout={"count": 2})
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in (made.learner, *made.rollouts)] == expected
    assert made.shares_gpu == (num_gpus in (2, 3))


@pytest.mark.parametrize(("num_gpus", "count", "own"), [(2, 1, True), (1, 1, False), (0, 1, False), (2, 0, False)])
def test_nccl_needs_a_gpu_for_each_process_and_is_not_guessed_for_rollouts_started_by_hand(num_gpus, count, own):
    assert plan(machine(num_gpus=num_gpus), rollout={"count": count}).own_gpus == own


def test_a_learner_on_the_cpu_leaves_the_gpus_to_the_rollouts():
    made = plan(machine(num_gpus=2), learner={"device": "cpu"}, rollout={"count": 2})
    assert [spec.gpus for spec in (made.learner, *made.rollouts)] == [(), ("0",), ("1",)]


def test_rollouts_do_not_inherit_what_torchrun_sets():
    inherited = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "HOME": "/h"}
    made = plan(Machine((0,), (), {**inherited, "TORCHELASTIC_RUN_ID": "x"}))
    env = made.rollouts[0].env
    assert env["HOME"] == "/h" and not (set(inherited) - {"HOME"}) & set(env) and "TORCHELASTIC_RUN_ID" not in env


@pytest.mark.parametrize(
    ("name", "is_hub_name"),
    [("gpt2", True), ("org/name-1.5", True), ("./org/name", False), ("models/x", False), ("a/b/c", False), ("", False)],
)
def test_a_path_that_does_not_exist_may_be_a_hub_name(name, is_hub_name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "why_no_hub", lambda _: "")
    made = config(model={"path": name})
    if is_hub_name:
        preflight.check_model(made)
    else:
        with pytest.raises(ConfigError, match=r"model\.path"):
            preflight.check_model(made)


def test_a_name_below_a_folder_that_exists_is_a_missing_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        preflight.check_model(config(model={"path": "org/name"}))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        preflight.check_model(config(model={"path": str(tmp_path), "make": "tiny"}))


def test_a_misspelt_dataset_is_refused_with_the_nearest_name():
    check_dataset(DataConfig(dataset="basic_arithmetic", options={"min_terms": 2}))
    with pytest.raises(ConfigError, match="did you mean 'basic_arithmetic'"):
        check_dataset(DataConfig(dataset="basic_arithmetics"))


def test_a_misspelt_option_of_a_dataset_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"data.options.operatorz is no option .* did you mean 'operators'"):
        check_dataset(DataConfig(options={"operatorz": ["+"]}))


@pytest.mark.parametrize(
    ("key", "content", "words"),
    [
        ("path", None, r"^data\.path is .*file\.jsonl, which cannot be read"),
        ("path", "{", r"file\.jsonl:1 is not JSON"),
        ("path", '{"question": "1+2="}', r"cannot be filled from .*file\.jsonl:1"),
        ("heldout_path", None, r"^data\.heldout_path is .*file\.jsonl, which cannot be read"),
        ("heldout_path", "[]", r"file\.jsonl:1 holds a JSON list"),
    ],
)
def test_a_data_file_that_cannot_be_used_is_refused_before_anything_starts(key, content, words, tmp_path):
    (tmp_path / "fine.jsonl").write_text('{"prompt": "1+2="}')
    if content is not None:
        (tmp_path / "file.jsonl").write_text(content)
    data = {"path": str(tmp_path / "fine.jsonl"), "dataset": "not_looked_at", key: str(tmp_path / "file.jsonl")}
    with pytest.raises(ConfigError, match=words):
        preflight.check_data(config(data=data).data)


@pytest.mark.parametrize(
    ("num_gpus", "sections", "words"),
    [
        (0, {"learner": {"device": "cuda"}}, "no GPU is visible"),
        (1, {"learner": {"ranks": 2}}, "only 1 GPU"),
        (1, {"weights": {"backend": "nccl"}}, "weights.backend=gloo"),
        (0, {"weights": {"backend": "nccl"}}, "weights.backend=gloo"),
    ],
)
def test_devices_that_are_not_there_are_refused(num_gpus, sections, words):
    made = config(**sections)
    host = machine(num_gpus=num_gpus)
    with pytest.raises(ConfigError, match=words):
        preflight.check_devices(made, make_plan(made, Path("/run"), host), host)


def test_a_run_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        preflight.check_run_dir(tmp_path / "file" / "run")


def test_the_run_folder_tells_every_process_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare(str(QUICKSTART), ["run_dir=out", "num_steps=3"])
    assert list(tmp_path.iterdir()) == [], "preparing writes nothing"
    with claim(prepared)[0]:
        read = load_config(tmp_path / "out" / "config.yaml")
        assert read == prepared.config and read.num_steps == 3
        assert read.run_dir == str(tmp_path / "out") and read.model.path == str(tmp_path / "models" / "tiny-seed0")
        assert read.weights.backend == "gloo", "auto is settled for this host"
        run_id = json.loads((tmp_path / "out" / "run.json").read_text())["run_id"]
        with pytest.raises(ConfigError, match="another run is at work"):
            claim(prepared)
    with claim(prepared)[0]:
        assert json.loads((tmp_path / "out" / "run.json").read_text())["run_id"] == run_id, "a resumed run keeps its id"


def test_going_on_in_a_folder_says_what_has_changed_and_a_finished_run_keeps_its_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for overrides, expected in (([], ""), (["learner.lr=3e-5", "num_steps=4"], "num_steps 3 -> 4")):
        lock, news = claim(prepare(str(QUICKSTART), ["run_dir=out", "num_steps=3", *overrides]))
        lock.close()
        assert expected in news and bool(news) == bool(expected)
    assert "learner.lr 0.0001 -> 3e-05" in news and "max_staleness" not in news
    result = tmp_path / "out" / "result.json"
    result.write_text(json.dumps({"status": "finished", "policy_version": 4}))
    with pytest.raises(ConfigError, match="finished its 4 steps: raise num_steps"):
        claim(prepare(str(QUICKSTART), ["run_dir=out", "num_steps=4"]))
    assert result.exists()
    claim(prepare(str(QUICKSTART), ["run_dir=out", "num_steps=5"]))[0].close()
    assert not result.exists()


def test_the_data_files_of_a_run_are_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": 3}')
    (tmp_path / "other.jsonl").write_text('{"prompt": "1+3=", "answer": 4}')
    made = prepare(str(QUICKSTART), ["data.path=sums.jsonl", "data.heldout_path=other.jsonl", "data.prompt=null"]).config
    assert (made.data.path, made.data.heldout_path) == (str(tmp_path / "sums.jsonl"), str(tmp_path / "other.jsonl"))


def test_what_a_folder_said_can_be_put_back_when_the_next_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim(prepare(str(QUICKSTART), ["run_dir=out"]))[0].close()
    out = tmp_path / "out"
    (out / "result.json").write_text('{"status": "finished", "policy_version": 1}')
    said = {name: (out / name).read_bytes() for name in ("config.yaml", "result.json")}
    before = Before(out)
    claim(prepare(str(QUICKSTART), ["run_dir=out", "seed=7"]))[0].close()
    assert (out / "config.yaml").read_bytes() != said["config.yaml"] and not (out / "result.json").exists()
    assert (out / "result.previous.json").read_bytes() == said["result.json"], "the last run's result is lost at no moment"
    before.put_back()
    assert {name: (out / name).read_bytes() for name in said} == said


def test_a_folder_on_a_full_disk_is_refused_and_says_what_it_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim(prepare(str(QUICKSTART), ["run_dir=out"]))[0].close()
    out = tmp_path / "out"
    (out / "result.json").write_text('{"status": "finished", "policy_version": 1}')
    names = ("config.yaml", "run.json", "result.json")
    said = {name: (out / name).read_bytes() for name in names}
    before, (soft, hard) = Before(out), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(ConfigError, match=r"run_dir is \S+out, where config.yaml cannot be written \(File too large\)"):
            claim(prepare(str(QUICKSTART), ["run_dir=out", "seed=7"]))
        (out / "result.json").rename(out / "result.previous.json")
        with pytest.raises(ConfigError, match=r"config.yaml could not be put back as the last run had it \(File too large\)"):
            before.put_back()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: (out / name).read_bytes() for name in names} == said
    assert not list(out.glob("*.new"))
    claim(prepare(str(QUICKSTART), ["run_dir=out", "seed=7"]))[0].close()


def test_a_fresh_folder_on_a_full_disk_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_file", full)
    with pytest.raises(ConfigError, match=r"where run.json cannot be written \(No space left on device\)"):
        claim(prepare(str(QUICKSTART), ["run_dir=out"]))


@pytest.mark.parametrize("content", ["{", "[]", '{"run": 1}', "\0"])
def test_a_folder_whose_run_has_lost_its_name_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"run.json is missing or damaged"):
        claim(prepare(str(QUICKSTART), ["run_dir=out"]))


def test_a_model_is_made_beside_its_place_and_moved_there_when_it_is_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare(str(QUICKSTART), ["seed=5"])
    spec = model_recipe(prepared)
    assert spec is not None and spec.argv[3:] == ("model", "tiny", "--out", str(unfinished(prepared)), "--seed", "5")
    unfinished(prepared).mkdir(parents=True)
    (unfinished(prepared) / "config.json").touch()
    install_model(prepared)
    assert (tmp_path / "models" / "tiny-seed5" / "config.json").exists()
    assert model_recipe(prepared) is None, "it is there now"


def test_what_has_changed_is_told_by_key_also_when_a_method_brings_others():
    before, after = config(), config(algorithm={"masks": {"icepop": {"low": 0.1}}}, max_staleness=1)
    assert changes(before, before) == []
    assert set(changes(before, after)) == {
        f"max_staleness {before.max_staleness} -> 1",
        "algorithm.masks.icepop.low (unset) -> 0.1",
        "algorithm.masks.icepop.high (unset) -> 5.0",
        "algorithm.masks.veto.threshold 0.0001 -> (unset)",
    }
    other = changes(before, config(algorithm={"advantage": "gae"}))
    assert "algorithm.advantage grpo -> gae" in other and "algorithm.advantage_options.ddof 1 -> (unset)" in other
