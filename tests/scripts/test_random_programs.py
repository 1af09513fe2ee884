"""random_programs.py finds nothing where nothing is wrong, and finds what is planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import first_are_quick

SCRIPT = Path(__file__).parents[2] / "scripts" / "guards" / "random_programs.py"
PLANTED = """
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")

def twice(x):
    return x + (x - x.detach()) if getattr(x, "requires_grad", False) else x

def spoil(name):
    given = getattr(mpgrad.Pool, name)
    setattr(mpgrad.Pool, name, lambda *args, **options: FAULT)

spoil("map")
spoil("starmap")
"""
FAULTS = {
    "gradients are added twice": "[tree_map(twice, each) for each in given(*args, **options)]",
    "results are in another order": "given(*args, **options)[::-1]",
}


@pytest.mark.parametrize("fault", first_are_quick(1, [*FAULTS, "none"]))
def test_a_fault_is_found(script: Any, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    version = script.Version(
        SCRIPT.parents[2], PLANTED.replace("FAULT", FAULTS[fault]) if fault in FAULTS else ""
    )
    try:
        code = script.compare([version], range(70, 80))  # whose pools are of engine "inline"
    finally:
        version.close()
    said = capsys.readouterr().out
    assert code == (fault in FAULTS) and ("the serial loop differ" in said) == (fault in FAULTS), (
        said
    )


def test_versions_are_compared(script: Any) -> None:
    one = script.Entry("step 0 [0]", "torch.float64 [1]", "0a1b", "[1.0]")
    other = one._replace(digest="0a1c")
    assert script.first_difference([one, one], [list(one), list(one)]) is None
    assert script.first_difference([one, one], [one, other]) == (one, other)
    assert script.first_difference([one], [one, one]) is not None
