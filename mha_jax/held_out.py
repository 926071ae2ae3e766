"""How many documents are held out for validation: `data.validation`, a share '5%' or a number '90'."""
import re

from mha_jax.config import ConfigError

AUTO = "auto"  # the dataset's own split, or else AUTO_PERCENT of its training documents
AUTO_PERCENT = 5


def held_out(validation: str, documents: int) -> int:
    """How many of `documents` are held out. ConfigError unless some are, and some are left."""
    if documents < 2:
        raise ConfigError(f"config.data.dataset: {documents} document(s) with text, of which none can be held out for "
                          "validation; give more files, or JSON lines")  # fmt: skip
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", f"{AUTO_PERCENT}%" if validation == AUTO else validation)
    count = round(documents * float(share[1]) / 100) if share else int(validation)
    if validation == AUTO:
        count = max(count, 1)
    if not 0 < count < documents:
        raise ConfigError(f"config.data.validation = {validation!r} of {documents} documents is {count}: allowed is a "
                          "share or number that leaves at least one on each side")  # fmt: skip
    return count


def is_valid(validation: str) -> bool:
    """Whether it is 'auto', a share above 0 % and below 100 %, or a number."""
    match = re.fullmatch(r"auto|(\d+(?:\.\d+)?)%|[1-9]\d*", validation)
    return bool(match) and (match[1] is None or 0 < float(match[1]) < 100)


def meaning(validation: str, own_split: str | None) -> str:
    """What is held out, in words, for the start of a run. own_split: of the dataset, where 'auto' takes it."""
    if validation == AUTO and own_split:
        return f"split {own_split!r}"
    much = {AUTO: f"{AUTO_PERCENT}%"}.get(validation, validation)
    return f"{much} of " + ("the different texts, by their hashes" if own_split is None else "split 'train', the last")
