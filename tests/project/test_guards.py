"""Each fault in the lists of scripts/guards has its place, so that it can be planted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
GUARDS = ROOT / "scripts" / "guards"


@pytest.mark.parametrize("name", ["mutants.txt", "planted_faults.txt"])
def test_each_fault_can_be_planted(name: str) -> None:
    spec = importlib.util.spec_from_file_location("mutants", GUARDS / "mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    texts = [file.read_text() for file in mutants.sources(ROOT)]
    olds = [fault.old for fault in mutants.mutants_in((GUARDS / name).read_text())]
    assert olds
    assert [old for old in olds if sum(text.count(old) for text in texts) != 1] == []
