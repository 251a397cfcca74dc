"""What Prometheus is told of a run, and what nobody is told."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.config import ConfigError
from async_rl.launcher.preflight import check_metrics_port
from async_rl.observability.prometheus import Endpoint, Figure, metric_name

from .runs import Run, random_model, train
from .scripted_members import make_config


def scrape(address: str) -> tuple[str, dict[str, float]]:
    """The text, and each sample under its name and labels."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return text, {f"{s.name}{'/'.join(['', *s.labels.values()])}": s.value for s in samples}


def test_rows_become_numbers_under_names_without_a_user_text() -> None:
    live = [Figure("version", "Version.", {"": 3}), Figure("groups", "Groups.", {"ready": 1, "trained": 2}, "state")]
    endpoint = Endpoint(0, lambda: live)
    try:
        row = {
            "reward/mean": 0.5,
            "version": 2,
            'score/fo rm\n\u00e9"}': 1,
            "score/fo rm": 2,
            "lag/hist": [4, 5],
            "skipped": "why it",
        }
        endpoint.write(row | {"mask": True, "none": None, "nan": math.nan})
        endpoint.write({"step": 9, "eval/accuracy": 0.25, "time_s": 3.0})
        text, samples = scrape(endpoint.address)
    finally:
        endpoint.close()
    assert samples == {
        "async_rl_version": 3.0,
        "async_rl_groups/ready": 1.0,
        "async_rl_groups/trained": 2.0,
        "async_rl_reward_mean": 0.5,
        "async_rl_score_fo_rm": 1.0,
        "async_rl_score_fo_rm_2": 2.0,
        "async_rl_lag_hist_0": 4.0,
        "async_rl_lag_hist_1": 5.0,
        "async_rl_mask": 1.0,
        "async_rl_eval_accuracy": 0.25,
    }
    assert "why" not in text and "fo rm" not in text and "\u00e9" not in text


def test_a_metric_name_is_short_and_never_taken_twice() -> None:
    taken: dict[str, float] = {}
    for _ in range(3):
        taken[metric_name("score/" + "x y" * 100, taken)] = 0.0
    assert len(taken) == 3 and all(re.fullmatch(r"[a-z_][a-z0-9_]{0,160}", name) for name in taken)


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"observe.metrics_port is {port}, but 127.0.0.1:{port} cannot be bound"):
            check_metrics_port(make_config(observe={"metrics_port": port}))
    check_metrics_port(make_config(observe={"metrics_port": 0}))
    with pytest.raises(ConfigError, match=r"which transport.port=4000 takes"):
        check_metrics_port(make_config(observe={"metrics_port": 4001}, transport={"port": 4000}))


def _elsewhere(port: int) -> list[str]:
    """This host's addresses beside loopback that answer on the port."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, and tells the address it would be sent from
            found.add(probe.getsockname()[0])
        except OSError:
            pass
    return [address for address in (*found, "127.0.0.2") if _answers(address, port)]


def _answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((address, port)) == 0


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_run_is_scraped_while_it_trains_on_loopback_alone_and_says_no_text(tmp_path: Path) -> None:
    model = f"model.path={random_model(tmp_path / 'random')}"
    toy = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=8", "eval.every=0")
    with train(tmp_path, *toy, model, "num_steps=40", "observe.metrics_port=0") as run:
        found = run.wait_until("the address", lambda: re.search(r"metrics for Prometheus at (http://127\S+)", run.text()), 200)
        address = found.group(1)
        run.wait_until("version 2", lambda: len(run.steps()) >= 2, 120)
        text, samples = scrape(address)
        assert _elsewhere(int(address.rsplit(":", 1)[1].split("/")[0])) == []
        result = run.finish(200)
    assert samples["async_rl_ledger_balanced"] == 1 and samples["async_rl_incarnation"] == 1
    groups = {name.split("/")[1]: n for name, n in samples.items() if name.startswith("async_rl_ledger_groups/")}
    assert groups.pop("granted") == sum(groups.values()) > 0
    tokens = {name.split("/")[1]: n for name, n in samples.items() if name.startswith("async_rl_ledger_tokens/")}
    assert tokens.pop("received") == sum(tokens.values()) > 0
    assert samples["async_rl_members"] == samples["async_rl_members_live"] == 1 and samples["async_rl_version"] >= 2
    assert "async_rl_reward_mean" in samples and "async_rl_eval_accuracy" in samples
    _assert_says_no_text(text, run, tmp_path)
    assert f"the books balance: {result['ledger']['groups']['granted']} groups granted = 160 trained + " in run.text()


def _assert_says_no_text(text: str, run: Run, tmp_path: Path) -> None:
    samples = [json.loads(line) for path in (run.run_dir / "samples").glob("*.jsonl") for line in path.read_text().splitlines()]
    texts = {str(value) for sample in samples for key in ("prompt", "answer") if len(value := str(sample.get(key, ""))) > 2}
    assert texts, "there is something to look for"
    assert [found for found in texts if found in re.sub(r"(?m) [0-9.e+-]+$", "", text)] == []
    assert str(tmp_path) not in text and "rollout-0" not in text
    for line in text.splitlines():
        assert re.fullmatch(
            r'# (HELP|TYPE) .*|[a-z0-9_]+(\{(state|reason)="[a-z_]+"\})? [0-9.eE+-]+|\S+ (NaN|[+-]Inf)', line
        ), line
