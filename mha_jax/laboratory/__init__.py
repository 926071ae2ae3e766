"""The questions that can be asked of a trained run: each task takes a snapshot and returns a `Result`."""
