"""Rows of dicts as a table for a terminal and as CSV."""
import csv
import io

import numpy as np


def text(rows: list[dict], columns=None) -> list[str]:
    """Lines with a header, words on the left of their column and numbers on the right; - for what is not known."""
    columns = columns or list(rows[0])
    cells = [[_cell(row.get(c)) for c in columns] for row in rows]
    header = [c.replace("_", " ") for c in columns]
    left = [any(isinstance(row.get(c), str) for row in rows) for c in columns]
    width = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = (
        "  ".join(f"{cell:{'<' if to_left else '>'}{w}}" for cell, to_left, w in zip(line, left, width, strict=True))
        for line in [header, *cells]
    )
    return [line.rstrip() for line in lines]


def _known(value) -> bool:
    return value is not None and not (isinstance(value, (float, np.floating)) and np.isnan(value))


def _cell(value) -> str:
    if not _known(value):
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, (float, np.floating)) else str(value)


def csv_text(rows: list[dict]) -> str:
    """CSV with every column that any row has, in the order of first appearance; empty for what is not known."""
    columns = list(dict.fromkeys(c for row in rows for c in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({c: row[c] if _known(row.get(c)) else "" for c in columns})
    return out.getvalue()
