"""What a person sees while a run is going: one live line on a terminal, plain lines elsewhere."""
import sys

from tqdm import tqdm


class Console:
    """Prints messages and the state of a run; silent on processes other than 0."""

    def __init__(self, active: bool = True, stream=None):
        self.stream = stream or sys.stderr
        self.active, self.live = active, active and self.stream.isatty()
        self._bar = None

    def say(self, message: str):
        """One line, above the live one."""
        if self._bar is not None:
            self._bar.write(message, file=self.stream)
        elif self.active:
            print(message, file=self.stream, flush=True)

    def start(self, step: int, steps: int):
        """Begins the live line."""
        if self.live:
            form = "{percentage:3.0f}% {bar:20} step {n_fmt}/{total_fmt} {remaining} left{postfix}"
            self._bar = tqdm(total=steps, initial=step, bar_format=form, file=self.stream, dynamic_ncols=True)

    def show(self, step: int, steps: int, numbers: dict, seconds_left: float, full: bool):
        """The state at `step`; without a terminal only when `full`, so that a log stays readable."""
        text = "  ".join(f"{k} {v}" for k, v in numbers.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self.active and full:
            print(f"step {step:>6}/{steps}  {text}  {seconds_left:.0f} s left", file=self.stream, flush=True)

    def close(self):
        """Ends the live line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
