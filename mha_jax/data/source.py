"""The one door to data: `batches(step, n)` for training, frozen rows for evaluation, whatever the task.

Row r of step s is item s * batch_size + r of the shuffled, repeated data, on every mesh: a batch is a pure
function of (seed, step, row), so there is no iterator to save or to lose.
A batch is a dict of inputs_BT, targets_BT, weights_BT (0 where no loss is due), positions_BT and segments_BT
(both None where every row is one document from position 0).
"""
import dataclasses
import functools
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.config import SMALL_VOCAB, Config
from mha_jax.data import tasks
from mha_jax.data.text import open_text
from mha_jax.data.tokenizer import FileTokenizer, Tokenizer
from mha_jax.layout import batch_sharding, local_rows, put_local

# Above every run's seed, so evaluation rows are never training rows, and all runs of a task share them.
EVAL_SEED = 2**31 + 1
CALIBRATION_SEED = 2**31 + 2


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Frozen evaluation rows and what is known about them.

    tokens_RU int32; lines: name -> loss [R, T] in nats; parts: name -> bool [R, T], losses reported apart;
    early_RT, late_RT: the windows of the ICL score; plateau: the line a model rests on before it learns in context.
    """

    tokens_RU: np.ndarray
    lines: dict[str, np.ndarray]
    parts: dict[str, np.ndarray]
    early_RT: np.ndarray
    late_RT: np.ndarray
    plateau: str


class TaskSource:
    """A synthetic task: rows made on the devices that hold them."""

    tokenizer = None
    induction_probe = "repeated blocks of distinct random tokens"

    def __init__(self, config: Config, mesh):
        self.task = tasks.make_task(config.data)
        self.config = config
        self.description = f"{config.data.task}, made on the fly"
        self.name, self.fingerprint = config.data.task, repr(self.task)
        self._make = _batch_maker(self.task, config.data.batch_size, config.steps_per_call, mesh)
        if config.data.vocab_size < SMALL_VOCAB:
            self.induction_probe = "the task's own sequences"

    def batches(self, step: int, n: int) -> dict:
        """Batches of steps step .. step + n - 1, stacked: [steps_per_call, B, ...], of which the first n count."""
        return self._make(self.config.seed, step)

    def evaluation(self) -> Evaluation:
        """`data.eval_rows` rows that no training run sees."""
        tokens_RU = self._rows(EVAL_SEED, self.config.data.eval_rows)
        lines, parts = self.task.lines(tokens_RU), self.task.parts(tokens_RU)
        return Evaluation(tokens_RU, lines, parts, *self.task.icl_windows(tokens_RU), self.task.plateau)

    def calibration(self, num: int) -> np.ndarray:
        """tokens [num, U] int32 to choose by: neither training nor evaluation rows."""
        return self._rows(CALIBRATION_SEED, num)

    def _rows(self, seed: int, num: int) -> np.ndarray:
        return np.asarray(jax.jit(functools.partial(tasks.rows, self.task))(jnp.uint32(seed), np.arange(num)))


class TextSource:
    """A corpus, tokenised once; each process reads the rows its devices hold, those of the next call in the
    background."""

    induction_probe = "repeated spans of the corpus"

    def __init__(self, config: Config, mesh, tokenizer: Tokenizer | FileTokenizer | None = None):
        self.text = open_text(config.data, config.seed, tokenizer)
        self.config, self.mesh, self.name = config, mesh, config.data.dataset
        self.tokenizer = self.text.tokenizer
        self.description = self.text.describe()
        streams = (self.text.train, self.text.validation)
        self.fingerprint = "-".join(x.fingerprint[:16] for x in (self.tokenizer, *streams))
        self.spans = self.text.spans
        self._rows_B = local_rows(mesh, config.data.batch_size)
        self._reader = ThreadPoolExecutor(1, "rows")
        self._next: tuple[int, int, Future] | None = None  # first step, number and batches of what is made ahead

    def batches(self, step: int, n: int) -> dict:
        """Batches of steps step .. step + n - 1, stacked: [steps_per_call, B, ...], of which the first n count.

        As many from step + n on are then made ahead: what comes next unless something is due before.
        """
        ahead, self._next = self._next, None
        guessed = ahead is not None and ahead[0] == step and n <= ahead[1]
        batches = ahead[2].result() if guessed else self._make(step, n)
        self._next = step + n, n, self._reader.submit(self._make, step + n, n)
        return batches

    def _make(self, step: int, n: int) -> dict:
        B, size = self.config.data.batch_size, self.config.steps_per_call
        items = (step + np.arange(n))[:, None] * B + self._rows_B
        rows = self.text.rows(items.ravel())
        if self.config.data.packing == "concatenated":
            rows |= {"positions_BT": None, "segments_BT": None}

        def stack(values):
            full = np.zeros((size, len(self._rows_B), *values.shape[1:]), values.dtype)
            full[:n] = values.reshape(n, len(self._rows_B), *values.shape[1:])
            return put_local(self.mesh, full, self._rows_B, B)

        return {k: None if v is None else stack(v) for k, v in rows.items()}

    def evaluation(self) -> Evaluation:
        """`data.eval_rows` rows from random offsets inside validation documents."""
        tokens_RU = self.text.eval_rows(self.config.data.eval_rows, EVAL_SEED)
        windows_T = tasks.default_windows(self.config.data.length)
        early_RT, late_RT = (np.tile(window_T, (len(tokens_RU), 1)) for window_T in windows_T)
        return Evaluation(tokens_RU, self.text.lines(tokens_RU), {}, early_RT, late_RT, self.text.plateau)

    def calibration(self, num: int) -> np.ndarray:
        """tokens [num, U] int32 to choose by, from inside training documents: never evaluation rows."""
        return self.text.calibration_rows(num, CALIBRATION_SEED)


def _batch_maker(task, batch_size: int, size: int, mesh):
    @functools.partial(jax.jit, out_shardings=batch_sharding(mesh, leading=1))
    def make(seed, step):
        items = (step + jnp.arange(size, dtype=jnp.uint32)[:, None]) * batch_size + jnp.arange(batch_size)
        tokens_nBU = jax.vmap(lambda i: tasks.rows(task, seed, i))(items)
        return to_batch(tokens_nBU, jnp)

    return lambda seed, step: make(jnp.uint32(seed), jnp.uint32(step))


def to_batch(tokens, xp=np) -> dict:
    """The batch dict of whole one-document rows [..., U]: T = U - 1 predictions."""
    return {
        "inputs_BT": tokens[..., :-1],
        "targets_BT": tokens[..., 1:],
        "weights_BT": xp.ones(tokens[..., 1:].shape, xp.float32),
        "positions_BT": None,
        "segments_BT": None,
    }


def make_source(config: Config, mesh, tokenizer: Tokenizer | FileTokenizer | None = None):
    """The source of a resolved config; `tokenizer` of an existing run. ConfigError when its data is not there."""
    if config.data.task == "text":
        return TextSource(config, mesh, tokenizer)
    return TaskSource(config, mesh)
