"""The files are complete whatever W&B does, and W&B sees every event once.

The real wandb runs in processes of their own, offline or against `FakeServer`; the rest uses a stand-in module.
"""
import json
import os
import pathlib
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax.numpy as jnp
import pytest

from mha_jax.training.tracking import Tracker, drop_after, read_metrics, send_evaluation
from tests.training import tiny

ROOT = pathlib.Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form that W&B asks for, and nobody's


class FakeWandb(types.ModuleType):
    """`wandb` as far as the tracker goes, remembering what it was told."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.lines, self.summaries, self.finished = [], [], [], []
        self.broken = None
        self.util = types.SimpleNamespace()
        self.Settings = dict
        self.Image = lambda path: f"image of {path}"
        self.Table = lambda columns, data: (columns, data)

    def init(self, **kwargs):
        self._break("init")
        self.inits.append(kwargs)
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None, log=self._log, finish=self._finish,
            summary=types.SimpleNamespace(update=self.summaries.append),
        )  # fmt: skip

    def _log(self, values):
        self._break("log")
        self.lines.append(values)

    def _finish(self, exit_code=0):
        self._break("finish")
        self.finished.append(exit_code)

    def _break(self, where):
        if self.broken == where:
            raise ConnectionError(f"{where}: no route\nto host")


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    return fake


def test_an_evaluation_goes_to_the_page_of_its_run_pictures_and_tables(tmp_path, wandb):
    rows, said = [{"head": "L0H0", "loss": 1.0}, {"head": "L0H1", "control": 2.0}], []
    send_evaluation(tmp_path, online(), "ablate", 30, {"": "a.png", "edges": "b.png"}, {"sets": rows}, said.append)
    assert wandb.inits == [], "no page, nothing to add to"
    (tmp_path / "wandb_id.txt").write_text("abc123 1\n")
    send_evaluation(tmp_path, online(), "ablate", 30, {"": "a.png", "edges": "b.png"}, {"sets": rows}, said.append)
    assert (wandb.inits[0]["id"], wandb.inits[0]["resume"], wandb.finished, said) == ("abc123", "allow", [0], [])
    assert wandb.lines == [{
        "step": 30, "eval/ablate/figure": "image of a.png", "eval/ablate/edges": "image of b.png",
        "eval/ablate/table/sets": (["head", "loss", "control"], [["L0H0", 1.0, None], ["L0H1", None, 2.0]]),
    }]  # fmt: skip


@pytest.mark.usefixtures("no_key")
def test_online_without_a_key_is_said_and_never_asked_about(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    said = []
    Tracker(tmp_path, online(), said.append, active=True, logged=0, changed=False).close(0)
    assert len(said) == 1 and "no key found" in said[0]


@pytest.fixture
def no_key(monkeypatch, tmp_path_factory):
    """Nothing in the environment speaks of W&B."""
    for name in [n for n in os.environ if n.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


def online(**changes):
    return tiny.config(**{"tracking.wandb": "online"} | changes)


def write(workdir, steps, cfg=None, close=True, **kwargs) -> list[str]:
    """Logs one event a step, value = step; returns what was said."""
    said = []
    tracker = Tracker(workdir, cfg or online(), said.append, **kwargs)
    for step in steps:
        tracker.log(step, 10 * step, float(step), {"train/loss": step})
    if close:
        tracker.close()
    return said


def test_fc_22_a_process_that_is_not_the_first_writes_nothing_and_starts_nothing(tmp_path, wandb):
    tracker = Tracker(tmp_path / "run", online(), print, active=False)
    tracker.log(0, 0, 0.0, {"a": 1})
    tracker.arrays(0, {})
    tracker.images(0, {"a": tmp_path})
    tracker.summary({})
    tracker.close()
    assert wandb.inits == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["auto", "disabled"])
def test_without_a_key_wandb_is_not_even_imported(tmp_path, monkeypatch, no_key, setting):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    said = write(tmp_path, [0], online(**{"tracking.wandb": setting}))
    assert [s[:17] for s in said] == (["W&B: no key found"] if setting == "auto" else [])
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(("variable", "mode"), [("WANDB_API_KEY", "online"), ("WANDB_MODE", "offline"),
                                                ("netrc", "online")])  # fmt: skip
def test_auto_follows_key_and_environment(tmp_path, monkeypatch, wandb, no_key, variable, mode):
    if variable == "netrc":
        (no_key / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
        (no_key / ".netrc").chmod(0o600)
    else:
        monkeypatch.setenv(variable, {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}[variable])
    assert write(tmp_path, [0], online(**{"tracking.wandb": "auto"})) == []
    assert [i["mode"] for i in wandb.inits] == [mode]


def test_auto_obeys_an_environment_that_turns_it_off(tmp_path, monkeypatch, wandb, no_key):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(tmp_path, [0], online(**{"tracking.wandb": "auto"}))
    assert wandb.inits == []


def test_wandb_gets_flat_values_as_plain_numbers(tmp_path, wandb):
    cfg = online(**{"model.num_kv_heads": 1, "model.kept_heads": ((0, 1), (2, 3)), "tracking.timeout": 7.0})
    said = []
    tracker = Tracker(tmp_path, cfg, said.append)
    tracker.log(4, 8, 0.5, {"a": jnp.bfloat16(1.5), "b": float("nan")})
    tracker.summary({"x": {"y": 1}})
    tracker.images(4, {"heads": tmp_path / "heads.png"})
    tracker.close(143)
    (init,) = wandb.inits
    assert wandb.lines == [{"step": 4, "tokens": 8, "seconds": 0.5, "a": 1.5},
                           {"step": 4, "heads": f"image of {tmp_path}/heads.png"}]  # fmt: skip
    assert type(wandb.lines[0]["a"]) is float
    assert init["config"]["model.num_kv_heads"] == 1 and init["config"]["model.kept_heads"] == "((0, 1), (2, 3))"
    assert not any(isinstance(v, dict | tuple | list) for v in init["config"].values())
    assert (init["group"], init["name"], init["dir"]) == ("repeat-MQA", "tiny", str(tmp_path))
    assert init["settings"]["init_timeout"] == init["settings"]["finish_timeout"] == 7.0
    assert (wandb.summaries, wandb.finished, said) == ([{"x": {"y": 1}}], [143], [])


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_fc_22_wandb_breaking_leaves_the_files_complete_and_one_warning(tmp_path, wandb, where):
    wandb.broken = where
    said = write(tmp_path, range(20))
    assert [e["step"] for e in read_metrics(tmp_path)] == list(range(20))
    assert len(said) == 1 and "ConnectionError" in said[0] and "metrics.jsonl has everything" in said[0]
    assert "\n" not in said[0]


def test_fc_22_a_picture_that_wandb_refuses_is_no_error(tmp_path, wandb):
    def refuse(path):
        raise ValueError("no pillow")

    wandb.Image, said = refuse, []
    tracker = Tracker(tmp_path, online(), said.append)
    tracker.images(0, {"a": tmp_path})
    tracker.summary({"steps": 1})
    tracker.close()
    assert len(said) == 1 and json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


def resume(workdir, at, until, **kwargs):
    """As the loop does: rewind to `at`, log up to `until`."""
    logged = drop_after(workdir, at)
    return write(workdir, range(at, until), logged=logged, close=False, **kwargs)


def test_fc_23_replayed_events_are_sent_once_however_often_the_run_is_killed(tmp_path, wandb):
    write(tmp_path, range(26), close=False)
    run_id = (tmp_path / "wandb_id.txt").read_text().split()[0]
    resume(tmp_path, 20, 22)  # killed before it had come as far again
    resume(tmp_path, 20, 23)
    resume(tmp_path, 10, 30)
    assert [x["step"] for x in wandb.lines] == list(range(30))
    assert [e["step"] for e in read_metrics(tmp_path)] == list(range(30))
    assert {i["id"] for i in wandb.inits} == {run_id} and len(wandb.inits) == 4
    assert {i["resume"] for i in wandb.inits} == {"allow"}


def test_fc_23_events_of_one_step_are_told_apart(tmp_path, wandb):
    tracker = Tracker(tmp_path, online(), print)
    tracker.log(20, 0, 0.0, {"eval/loss": 1.0})  # killed between the probe and the update of step 20
    logged = drop_after(tmp_path, 10)
    tracker = Tracker(tmp_path, online(), print, logged=logged)
    tracker.log(20, 0, 0.0, {"eval/loss": 1.0})
    tracker.log(20, 0, 0.0, {"train/loss": 2.0})
    assert [set(x) & {"eval/loss", "train/loss"} for x in wandb.lines] == [{"eval/loss"}, {"train/loss"}]


def test_fc_23_a_changed_config_is_a_new_run_of_the_same_group_with_the_replayed_events(tmp_path, wandb):
    write(tmp_path, range(26), close=False)
    resume(tmp_path, 20, 30, cfg=online(steps=99), changed=True)
    first, second = wandb.inits
    assert first["id"] != second["id"] and first["group"] == second["group"]
    assert second["config"]["steps"] == 99
    assert [x["step"] for x in wandb.lines] == [*range(26), *range(20, 30)]
    assert (tmp_path / "wandb_id.txt").read_text().split()[0] == second["id"]
    resume(tmp_path, 20, 31, cfg=online(steps=99))
    assert wandb.inits[2]["id"] == second["id"] and wandb.lines[-1]["step"] == 30
    assert len(wandb.lines) == 26 + 10 + 1


def test_fc_23_a_run_that_wandb_did_not_see_is_sent_from_where_it_resumes(tmp_path, wandb):
    write(tmp_path, range(26), online(**{"tracking.wandb": "disabled"}))
    resume(tmp_path, 20, 30)
    assert [x["step"] for x in wandb.lines] == list(range(20, 30))


# --------------------------------------------------------------------------------------------------- the real wandb


class FakeServer(ThreadingHTTPServer):
    """As much of a W&B server as a run needs; keeps the history lines of the one run it knows."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.history = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self):
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_address[1]}", "WANDB_API_KEY": KEY}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body, history = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.server.history
        if "file_stream" in self.path:
            history += [json.loads(x) for x in json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get(
                "content", [])]  # fmt: skip
        run = {"id": "x", "name": "r", "displayName": "n", "project": {"name": "p", "entity": {"name": "e"}},
               "historyLineCount": len(history), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]",
               "historyTail": json.dumps([json.dumps(h) for h in history[-1:]]), "summaryMetrics": "{}",
               "config": "{}", "wandbConfig": "{}", "tags": []}  # fmt: skip
        data = {"viewer": {"id": "u", "entity": "e", "username": "e", "flags": "{}", "teams": {"edges": []}},
                "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
                "model": {"bucket": run if history else None}, "upsertBucket": {"bucket": run, "inserted": True},
                "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}  # fmt: skip
        out = json.dumps({"data": data} if "graphql" in self.path else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass


SCRIPT = """
import sys
from tests.training import test_wandb as t, tiny
mode, workdir, first, end, logged = sys.argv[1:]
tracker = t.Tracker(t.pathlib.Path(workdir), tiny.config(**{"tracking.wandb": mode, "tracking.timeout": 3.0}),
                    lambda line: print("SAID", line), logged=int(logged))
for step in range(int(first), int(end)):
    if step == 10 and mode == "online":
        print("AT 10", flush=True)
        sys.stdin.readline()
    tracker.log(step, 0, 0.0, {"train/loss": t.jnp.bfloat16(step), "nan": float("nan")})
tracker.close()
print("DONE", flush=True)
"""


def real(mode, workdir, steps, logged, environment, at_10=lambda: None) -> list[str]:
    """Logs `steps` with the real wandb in a process of its own; returns what was said. It must end well, and soon."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | environment
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, str(workdir), str(steps.start), str(steps.stop), str(logged)], cwd=ROOT,
        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, too_late = [], threading.Timer(60, process.kill)
    too_late.start()
    for line in process.stdout:
        out.append(line.strip())
        if line.startswith("AT 10"):
            at_10()
            process.stdin.write("\n")
            process.stdin.flush()
    code = process.wait()
    too_late.cancel()
    assert code == 0 and "DONE" in out, out
    return [line.removeprefix("SAID ") for line in out if line.startswith("SAID ")]


def test_fc_23_a_real_resume_leaves_every_step_once_on_the_server(tmp_path):
    server = FakeServer()
    assert real("online", tmp_path, range(0, 26), 0, server.environment) == []
    logged = drop_after(tmp_path, 20)
    assert real("online", tmp_path, range(20, 30), logged, server.environment) == []
    server.shutdown()
    assert [h["step"] for h in server.history] == list(range(30))
    assert [h["train/loss"] for h in server.history] == list(range(30))


def test_fc_22_a_server_that_stops_in_the_middle_costs_one_warning(tmp_path):
    server = FakeServer()

    def stop():
        server.shutdown()
        server.server_close()

    (said,) = real("online", tmp_path, range(20), 0, server.environment, at_10=stop)
    assert "W&B is off from here on: TimeoutError" in said
    assert [e["step"] for e in read_metrics(tmp_path)] == list(range(20))


def test_offline_runs_for_real(tmp_path):
    assert real("offline", tmp_path, range(3), 0, {}) == []
    run_id = (tmp_path / "wandb_id.txt").read_text().split()[0]
    (written,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    assert written.stat().st_size > 0
