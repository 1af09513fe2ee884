"""The GPU benchmark: what it says without a GPU, and that its simulations are what they claim to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    assert "there is no CUDA GPU here, so nothing was measured" in capsys.readouterr().out


def test_its_contenders_agree(script: Any, nursery: mpgrad.Pool) -> None:
    simulations = script.drawn(script.QUICK, torch.device("cpu"))
    assert len({len(each.state) for each in simulations}) > 1 and len({each.steps for each in simulations}) > 1
    expected = script.run(script.serial, simulations)
    with mpgrad.Pool(2) as pool:
        script.check(script.Contender("pool", lambda items: script.in_pool(pool, items)), simulations, expected)
    with pytest.raises(script.WrongResultError, match="wrong: a value or gradient is not the serial loop's"):
        wrong = script.Contender("wrong", lambda items: [script.simulate(each) * 2 for each in items])
        script.check(wrong, simulations, expected)


def test_what_is_compared_and_what_comes_out(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = list(script.contenders([1, 2, 4, 8], "cuda:0"))
    assert names == ["serial loop", *(f"{n} workers" for n in (1, 2, 4, 8)), *(f"{n} streams" for n in (2, 4, 8))]
    row = script.row("2 workers", script.Plan(simulations=10), [2.0, 1.0, 1.0], [3.0, 3.0, 2.0], 3 << 20)
    assert row["simulations a second"] == 10 and row["speed-up"] == 2 and row["further MiB of the GPU"] == 3
    script.show({"gpu": "a GPU", "cuda": "12", "date": "today", "rows": [row]})
    assert "| 2 workers | 10.0 | 2.00 | 3 |" in capsys.readouterr().out
