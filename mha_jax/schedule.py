"""When something is due: one small grammar for probes, checkpoints and whatever else happens at some steps.

    "50"          every 50 steps: 0, 50, 100, ...
    "log:500"     0, 1, 2, 4, ... up to 500, then every 500: dense early, where training changes fastest
    "at:0,10,75"  exactly these steps
    "never"
The last step of a run is due in every schedule but "never": a run must not end without its final figures.
"""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The parsed form; `every` = 0 means no regular part, `steps` are the extra ones."""

    every: int = 0
    steps: frozenset[int] = frozenset()
    never: bool = False

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads the grammar above; ValueError says what is allowed."""
        allowed = "a schedule is 'N' (every N steps), 'log:N', 'at:A,B,C' or 'never'"
        kind, _, rest = text.partition(":")
        try:
            match kind:
                case "never" if not rest:
                    return cls(never=True)
                case "at":
                    steps = frozenset(int(s) for s in rest.split(","))
                    if min(steps) < 0:
                        raise ValueError
                    return cls(steps=steps)
                case "log":
                    every = int(rest)
                    powers = frozenset(2**i for i in range(64) if 2**i <= every)
                case _:
                    every, powers = int(text), frozenset()
            if every < 1:
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r}: {allowed}") from None
        return cls(every=every, steps=powers)

    def is_due(self, step: int, last: int) -> bool:
        """Whether `step` is due in a run of `last` steps."""
        if self.never:
            return False
        return step == last or step in self.steps or (self.every > 0 and step % self.every == 0)

    def next_due(self, step: int, last: int) -> int:
        """The first due step after `step`, at most `last`."""
        candidates = [last] + [s for s in self.steps if step < s < last]
        if self.every:
            candidates.append((step // self.every + 1) * self.every)
        return min(candidates)
