"""The training loop: device calls of several steps, cut wherever something is due, and nothing lost between.

Step k names the parameters after k updates. Train lines at k belong to the update applied to them (0..N-1);
probes, evaluations and checkpoints stand at 0..N.
"""
import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError
from mha_jax.data import tokenizer
from mha_jax.data.source import make_source
from mha_jax.layout import replicated, residual_sharding
from mha_jax.model import transformer
from mha_jax.probes import icl
from mha_jax.probes.induction import FORMED
from mha_jax.probes.panel import Panel, Reading
from mha_jax.schedule import Schedule
from mha_jax.training import clamp, folder, sharding, state, step, summary
from mha_jax.training.checkpoint import Checkpoints
from mha_jax.training.console import Console
from mha_jax.training.hosts import check_hosts_agree
from mha_jax.training.progress import Progress, start_lines
from mha_jax.training.signals import Stop
from mha_jax.training.tracking import Tracker, drop_after, read_metrics


class NonFinite(RuntimeError):
    """A loss or gradient was not finite; the message names the step, `step`. Parameters stay those before it."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Stopped(SystemExit):
    """SIGTERM (exit code 143) or Ctrl-C (130) was obeyed: the state is saved."""


def train(config: Config, workdir, *, restore: str = "state", draw=None, console: Console | None = None) -> dict:
    """Trains a resolved config in a run folder, resuming what is there; returns the summary.

    restore: 'state' continues exactly; 'params' takes parameters alone and starts a fresh optimizer at their step.
    draw: function of the folder returning {name: picture}, called at the end. ConfigError for what does not fit
    together, NonFinite, CheckpointError, Stopped.
    """
    return Training(config, folder.absolute(workdir), restore, console or Console(jax.process_index() == 0)).run(draw)


class Training:
    """One run in progress: what `train` sets up and steps through."""

    def __init__(self, config: Config, workdir: pathlib.Path, restore: str, console: Console):
        self.config, self.workdir, self.console = config, workdir, console
        self.stop = Stop()
        self.mesh = sharding.make_mesh(config)
        clamp.make(config.interventions, config.model)  # refuses heads that do not exist, before anything is written
        resumes = (workdir / "config.json").exists()
        warnings = folder.check_same_run(workdir, config, restore == "params") if resumes else []
        self.checkpoints = Checkpoints(workdir, config.checkpoint, config.steps)
        saved = self.checkpoints.steps()
        if saved and saved[-1] > config.steps:
            raise ConfigError(f"config.steps = {config.steps} is less than the saved step {saved[-1]} in "
                              f"{self.checkpoints.folder}; choose another --workdir (make: WORKDIR=...)")  # fmt: skip
        if restore == "params" and not saved:
            raise ConfigError(f"--restore=params: {self.checkpoints.folder} has no checkpoint to take them from")
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--workdir={workdir}: cannot be used ({folder.first_line(error)})") from None
        if jax.process_index() == 0:
            self.lock = folder.lock(workdir)
        for warning in warnings:
            self._warn(warning)
        for line in start_lines(config, self.mesh):
            console.say(line)
        # A resumed run keeps its own tokenizer: one trained again on another corpus would change every token.
        own = workdir / "tokenizer.json"
        self.source = make_source(config, self.mesh, tokenizer.load(own) if resumes and own.exists() else None)
        # Where the data lies and what is tracked may differ from host to host.
        alike = {k: v for k, v in configs.flat(config).items() if not k.startswith(("data.cache_dir", "data.dataset",
                                                                                    "tracking."))}  # fmt: skip
        check_hosts_agree(f"{self.source.fingerprint} {alike}")
        console.say(f"data: {self.source.description}")
        self.panel = Panel(config, self.source, self.mesh)
        icl.check_windows(self.panel.evaluation.early_RT, self.panel.evaluation.late_RT)
        if self.panel.ceiling <= FORMED:
            console.say(f"warning: config.model.window = {config.model.window} does not reach back over all periods "
                        f"{self.panel.repeats['induction'][0]}: prefix matching can be {self.panel.ceiling:.2f} at "
                        "most, so nothing will count as formed")  # fmt: skip
        self.panel_schedule = Schedule.parse(config.probes.panel)
        self.save_schedule = Schedule.parse(config.checkpoint.save)
        self.progress, self.finished, self.saved_at = Progress(), None, None
        self._restore_or_init(restore)
        changed = resumes and bool(folder.differences(folder.read_config(workdir), config))
        logged, first = 0, jax.process_index() == 0
        if first:
            logged = drop_after(workdir, self.progress.step, self._warn) if resumes else 0
            folder.write_json(workdir / "config.json", configs.to_dict(config))
            if self.progress.step < config.steps:  # a finished run stays as it was made
                folder.write_environment(workdir, self.mesh, self.progress.step, self._warn)
                (workdir / "summary.json").unlink(missing_ok=True)
            if self.source.tokenizer is not None:
                self.source.tokenizer.save(workdir / "tokenizer.json")
        if jax.process_count() > 1:  # nobody reads the events before they are rewound
            multihost_utils.sync_global_devices("rewound")
        self.tracker = Tracker(workdir, config, console.say, active=first, logged=logged, changed=changed)

    def _warn(self, message: str):
        self.console.say(f"warning: {message}")

    def _restore_or_init(self, restore: str):
        abstract = state.abstract_state(self.config, self.mesh)
        wanted = ("params", "optimizer") if restore == "state" else ("params",)
        found = self.checkpoints.restore_newest({name: abstract[name] for name in wanted}, self._warn)
        if found is None:
            if any(e["step"] for e in read_metrics(self.workdir)):
                raise ConfigError(f"--workdir={self.workdir} holds a run of which no checkpoint is left: it would "
                                  "begin again and replace what is there; choose another --workdir")  # fmt: skip
            self.state = state.sharded_init(self.config, self.mesh)
            return
        at, items, meta = found
        folder.check_same_data(meta, self.source)
        if restore == "state":
            folder.check_same_optimizer(meta, self.config)
        scalar = lambda x: jax.device_put(jnp.int32(x), replicated(self.mesh))  # noqa: E731
        if restore == "params":
            moments = state.sharded_init(self.config, self.mesh)["optimizer"]
            # The learning rate stands where the step does; Adam's own count, in "0", begins at 0 with its moments.
            adamw = moments["1"] | {"2": {"count": scalar(at)}}
            items = items | {"optimizer": moments | {"1": adamw}}
        self.state = items | {"step": scalar(at), "failed_at": scalar(-1)}
        self.progress, self.saved_at = Progress.of_checkpoint(meta), at
        if at == self.config.steps:  # it was timed when it was made; measuring it again does not count
            self.finished = dataclasses.replace(self.progress)
        how = "parameters alone, with a fresh optimizer" if restore == "params" else "exactly"
        self.console.say(f"resumes {how} from step {at}")

    def run(self, draw) -> dict:
        """Everything from here to the summary."""
        exit_code = 1  # unless something below says otherwise
        try:
            self._compile()
            self._loop()
            self.stop.close()
            self.console.close()
            out = self._finish(draw)
            exit_code = 0
            return out
        except NonFinite as error:
            self.tracker.log(error.step, self.progress.tokens, self.progress.seconds, {"failed_at": error.step})
            raise
        except Stopped:
            exit_code = self.stop.exit_code
            raise
        finally:
            self.console.close()
            self.stop.close()
            self.tracker.close(exit_code)
            if self.tracker.active:
                self.lock.close()

    def _loop(self):
        self.console.start(self.progress.step, self.config.steps)
        self.events = read_metrics(self.workdir)
        self.reading: Reading | None = None
        self.best: dict[str, str] = {}  # the strongest head's name and score, as last probed
        self._pending = None
        self._clock = time.perf_counter()
        while True:
            self._do_what_is_due()
            if self.progress.step == self.config.steps:
                return
            if self.stop.asked():
                self._flush()
                if self.saved_at != self.progress.step:
                    self._save(None)
                self.console.say(f"stopped at step {self.progress.step}, saved")
                raise Stopped(self.stop.exit_code)
            self._advance()

    def _compile(self):
        begin = time.perf_counter()
        c = self.config
        self.console.say("compiling")
        graph = transformer.graphdef(c.model)
        batches = self.source.batches(self.progress.step, 1)
        self._train_steps = step.compile_train_steps(
            c, graph, state.abstract_state(c, self.mesh), batches, self.mesh, residual_sharding(self.mesh)
        )
        self.panel.compile(self.state["params"])
        self.progress.compile_seconds += time.perf_counter() - begin

    def _is_full(self, at: int) -> bool:
        last = self.config.steps
        return at == last or self.panel_schedule.is_due(at, last) or self.save_schedule.is_due(at, last)

    def _do_what_is_due(self):
        at, last = self.progress.step, self.config.steps
        light = at % self.config.probes.induction_every == 0 and not self.settled
        done = [e for e in self.events if e["step"] == at]  # a resumed run may have probed here already
        if self._is_full(at):
            self._flush()
            self._probe(self.panel.measure, full=True, log=not any("eval/loss" in e for e in done))
        elif light and not done:
            self._flush()
            self._probe(self.panel.light, full=False, log=True)
        if self.save_schedule.is_due(at, last) and self.saved_at != at:
            self._save(self.reading.values["eval/loss"])

    @property
    def settled(self) -> bool:
        return summary.settled(self.events)

    def _advance(self):
        """Dispatches the steps up to whatever is due next, then reads the metrics of the call before."""
        at, last = self.progress.step, self.config.steps
        until = min(self.panel_schedule.next_due(at, last), self.save_schedule.next_due(at, last))
        if not self.settled:
            every = self.config.probes.induction_every
            until = min(until, (at // every + 1) * every)
        count = min(self.config.steps_per_call, until - at)
        begin = time.perf_counter()
        batches = self.source.batches(at, count)
        self.progress.input_seconds += time.perf_counter() - begin
        self.state, metrics = self._train_steps(self.state, batches, jnp.int32(count))
        waiting, self._pending = self._pending, (at, count, metrics)
        self.progress.step = at + count
        self._log_train(waiting)
        self.stop.started()

    def _flush(self):
        """Reads what is still pending, so that nothing is logged, probed or saved past a bad step."""
        waiting, self._pending = self._pending, None
        self._log_train(waiting)
        jax.block_until_ready(self.state)
        self._tick()

    def _tick(self):
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    def _log_train(self, waiting):
        if waiting is None:
            return
        at, count, metrics = waiting
        metrics = np.asarray(metrics)[:count]
        self._tick()
        for i, row in enumerate(metrics):
            values = dict(zip(step.METRICS, map(float, row), strict=True))
            bad = not np.isfinite(row[:2]).all()
            if bad or (at + i) % self.config.tracking.log_every == 0:
                logged = {k: v for k, v in values.items() if k != "train/tokens"}
                self.tracker.log(at + i, self.progress.tokens, self.progress.seconds, logged)
            if bad:
                saved = max(self.checkpoints.steps(), default=None)
                last = "there is no checkpoint" if saved is None else f"the last checkpoint is step {saved}"
                raise NonFinite(f"step {at + i}: loss {values['train/loss']}, gradient norm "
                                f"{values['train/grad_norm']}; nothing was updated from there on, {last}", at + i)
            self.progress.tokens += int(values["train/tokens"])
        self._show(False)

    def _probe(self, measure, full: bool, log: bool):
        begin = time.perf_counter()
        reading = measure(self.state["params"])
        self.progress.probe_seconds += time.perf_counter() - begin
        self._tick()
        p, values = self.progress, dict(reading.values)
        if full and not np.isfinite(values["eval/loss"]):
            raise NonFinite(f"step {p.step}: evaluation loss {values['eval/loss']}, though every training loss was "
                            "finite", p.step)  # fmt: skip
        name, figures = summary.strongest(self.panel, reading)
        self.best = {} if name is None else {name: f"{figures['score']:.2f}"}
        if full:
            self.reading = reading
            rate = {"perf/probe_share": p.share(p.probe_seconds), "perf/tokens_per_second": p.tokens_per_second}
            if self._input_share(p) is not None:
                rate["perf/input_share"] = self._input_share(p)
            known = any("limit/uniform" in e for e in self.events)
            values |= ({} if known else self.panel.limits) | rate
        if log:
            self.events.append({"step": p.step} | values)
            if full:  # before the line, so that a line always has its arrays
                self.tracker.arrays(p.step, reading.arrays)
            self.tracker.log(p.step, p.tokens, p.seconds, values)
        self._show(full)

    def _input_share(self, p: Progress) -> float | None:
        """Of the time, spent waiting for rows; None where the devices make them."""
        return p.share(p.input_seconds) if self.config.data.task == "text" else None

    def _show(self, full: bool):
        p, values = self.progress, self.reading.values if self.reading else {}
        rate = p.tokens_per_second
        row_tokens = self.config.data.batch_size * self.config.data.length
        left = (self.config.steps - p.step) * row_tokens / rate if rate else 0.0
        numbers = {"loss": f"{values['eval/loss']:.3f}", "ICL": f"{values['icl/score']:+.3f}"} if values else {}
        numbers |= self.best | {"tok/s": f"{rate:,.0f}"}
        self.console.show(p.step, self.config.steps, numbers, left, full)

    def _save(self, eval_loss: float | None):
        self._tick()
        p = self.progress
        meta = dataclasses.asdict(p) | {"data": self.source.fingerprint, "config": configs.to_dict(self.config)}
        self.checkpoints.save(p.step, self.state, meta, eval_loss)
        self._clock = time.perf_counter()  # writing is not training: it depends on the disk and the schedule
        self.saved_at = p.step

    def _finish(self, draw) -> dict:
        p = self.finished or self.progress
        totals = {"steps": p.step, "tokens": p.tokens, "seconds": p.seconds, "compile_seconds": p.compile_seconds,
                  "tokens_per_second": p.tokens_per_second,
                  "probe_share": p.share(p.probe_seconds), "input_share": self._input_share(p),
                  "num_params": transformer.count_params(self.config.model)}  # fmt: skip
        out = summary.summarise(self.config, self.events, self.panel, self.reading, totals)
        self.tracker.summary(out)
        if draw is not None and self.tracker.active:
            self.tracker.images(p.step, draw(self.workdir))
        return out
