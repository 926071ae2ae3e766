"""docs/tour.ipynb runs from top to bottom, here on a small run, and is stored without outputs."""
import itertools
import json
import pathlib
import sys

import matplotlib.pyplot as plt
import pytest

from tests.laboratory import small

ROOT = pathlib.Path(__file__).parents[1]
BOOK = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
RUN = 'ROOT / "runs/quickstart"'


@pytest.fixture(scope="module", autouse=True)
def surroundings():
    with small.surroundings():
        yield


def test_it_is_a_notebook_without_outputs():
    assert (BOOK["nbformat"], BOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    kinds = [cell["cell_type"] for cell in BOOK["cells"]]
    assert all({a, b} == {"markdown", "code"} for a, b in itertools.pairwise(kinds)) and kinds[0] == "markdown"
    assert len({cell["id"] for cell in BOOK["cells"]}) == len(kinds)
    for cell in BOOK["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("where", [".", "docs"])
def test_it_finds_the_project_from_where_it_is_started(where, monkeypatch):
    monkeypatch.chdir(ROOT / where)
    names = {}
    monkeypatch.setattr("sys.path", [])
    exec("".join(next(c for c in BOOK["cells"] if c["cell_type"] == "code")["source"]), names)
    assert names["ROOT"] == ROOT and names["sys"].path == [str(ROOT)]


def test_every_cell_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr("sys.path", [*sys.path])
    names, code = {}, ["".join(c["source"]) for c in BOOK["cells"] if c["cell_type"] == "code"]
    assert sum(RUN in text for text in code) == 1
    for text in code:
        exec(text.replace(RUN, repr(str(small.run().workdir))), names)
    printed = capsys.readouterr().out
    assert "step 30: loss " in printed and "strongest head L" in printed and "induction heads: []" in printed
    assert "previous-token head" in printed
    assert len(plt.get_fignums()) == 2 and names["logits_BTV"].shape == (1, 32, 32)
    assert abs(names["without_T"] - names["whole_T"]).max() > 1e-3
    found = [r for r in names["result"].tables["sets"] if r["kind"] == "head"]
    assert len(found) == 2 * 8
    plt.close("all")
