"""The GPU benchmark: what it says without a GPU, and that its simulations are what they claim to
be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    assert "there is no CUDA GPU here, so nothing was measured" in capsys.readouterr().out


def test_its_contenders_agree(script: Any, fork_server: mpgrad.Pool) -> None:
    simulations = script.drawn(script.QUICK, torch.device("cpu"))
    assert (
        len({len(each.state) for each in simulations}) > 1
        and len({each.steps for each in simulations}) > 1
    )
    expected = script.run(script.serial, simulations)
    with script.started({"processes": 2}) as loop:
        script.check("pool", loop, simulations, expected)
    with pytest.raises(
        script.WrongResultError, match="wrong: a value or gradient is not the serial loop's"
    ):
        script.check(
            "wrong",
            lambda items: [script.simulate(each) * 2 for each in items],
            simulations,
            expected,
        )


def test_what_is_compared_and_what_comes_out(script: Any) -> None:
    names = list(script.contenders([1, 2, 4, 8], "cuda:0"))
    assert names == [
        "serial loop",
        *(f"{n} workers" for n in (1, 2, 4, 8)),
        *(f"{n} streams" for n in (2, 4, 8)),
    ]
    seconds = {"serial loop": [3.0, 3.0, 2.0], "2 workers": [2.0, 1.0, 1.0]}
    memory = {"serial loop": 0, "2 workers": 3 << 20}
    found = script.figures_of("a GPU", script.Plan(simulations=10), seconds, memory)
    values = {figure.name: figure.value for figure in found}
    assert values["2 workers"] == 10 and values["2 workers over the serial loop"] == 2
    assert values["2 workers, further memory of the GPU"] == 3
