"""The phenobarbital script: NONMEM's figures, exact gradients, refused files, and the pool against
the serial loop.

NONMEM's objectives are the check from outside; gradcheck and the stationarity of the inner optimum
are the ones from inside, and each comes with a test that a wrong gradient or figure does not pass.
"""

from __future__ import annotations

import dataclasses
import io
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from tqdm import tqdm

# as for a script that is run from there
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))

import foce
import phenobarbital
from infants import DataError, Infant, read_infants
from phenobarbital import DATA, Comparison, Evaluation, Fit, complaints, evaluate, main, serial

import mpgrad

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")

HEADER = "subject,time_h,dose_mg,weight_kg,apgar,concentration_mg_per_l"
DOSE = "1,0,25,1.4,7,"
SAMPLE = "1,2,,1.4,7,17.3"


def scaled(natural: Sequence[float]) -> Tensor:
    return foce.scaled(torch.tensor(natural, dtype=torch.float64))


START, NONMEM = scaled(phenobarbital.START), scaled(phenobarbital.NONMEM)


@pytest.fixture(scope="module")
def infants() -> list[Infant]:
    return read_infants(DATA)


@pytest.fixture(autouse=True, scope="module")
def fonts() -> None:
    """Matplotlib keeps the files of its fonts open; better before the test that draws than as
    something it left behind."""
    figure = Figure()
    figure.subplots().semilogy([1, 10])
    figure.savefig(io.BytesIO())


@pytest.fixture
def few(infants: list[Infant]) -> list[Infant]:
    """Ragged, and with both kinds of Apgar score."""
    chosen = [
        infants[0],
        *[infant for infant in infants if infant.apgar < foce.LOW_APGAR][:2],
        *infants[20:25],
    ]
    assert len({len(infant.sample_times) for infant in chosen}) > 1
    return chosen


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round, and no thread that refreshes stale progress bars and would outlive the test."""
    monkeypatch.setattr(phenobarbital, "ROUNDS", 1)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def infant_with(**changes: object) -> Infant:
    one = Infant(
        subject=7,
        weight=1.5,
        apgar=8,
        doses=torch.tensor([20.0, 5.0], dtype=torch.float64),
        dose_times=torch.tensor([0.0, 12.0], dtype=torch.float64),
        sample_times=torch.tensor([3.0, 12.0, 12.0, 30.0], dtype=torch.float64),
        doses_before=torch.tensor([1, 1, 2, 2]),
        concentrations=torch.tensor([12.0, 11.0, 14.0, 12.0], dtype=torch.float64),
    )
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


class TestModel:
    def test_nonmem_objectives(self, infants: list[Infant]) -> None:
        for parameters, reference in (
            (START, phenobarbital.NONMEM_START_OBJECTIVE),
            (NONMEM, phenobarbital.NONMEM_OBJECTIVE),
        ):
            with torch.no_grad():
                total = sum(foce.objective(infant, parameters).item() for infant in infants)
            assert total == pytest.approx(reference, rel=0, abs=1e-6)

    def test_scales_are_inverse(self) -> None:
        natural = torch.tensor([0.005, 1.0, -0.3, 0.03, 0.02, 0.01], dtype=torch.float64)
        torch.testing.assert_close(foce.estimates(foce.scaled(natural)), natural)

    @pytest.mark.parametrize("apgar", [4, 5])
    def test_concentration_by_hand(self, apgar: int) -> None:
        th1, th2, th3, weight = 0.005, 1.0, 0.2, 1.5
        eta = torch.tensor([0.1, -0.2], dtype=torch.float64)
        clearance = th1 * weight * math.exp(0.1)
        volume = th2 * weight * (1 + th3 if apgar == 4 else 1) * math.exp(-0.2)

        def left(dose: float, hours: float) -> float:
            return dose / volume * math.exp(-clearance / volume * hours)

        parameters = scaled([th1, th2, th3, 0.03, 0.03, 0.01])
        # a dose and two samples at 12 h: the first was taken before the dose, the second after it
        by_hand = [left(20, 3), left(20, 12), left(20, 12) + left(5, 0), left(20, 30) + left(5, 18)]
        predicted = foce.log_concentration(infant_with(apgar=apgar), parameters, eta).exp()
        assert predicted.tolist() == pytest.approx(by_hand, rel=1e-13)

    def test_value_is_the_same_without_gradient(self, few: list[Infant]) -> None:
        with_gradient = foce.objective(few[0], START.clone().requires_grad_())
        assert with_gradient.requires_grad
        without = foce.objective(few[0], START)
        assert not without.requires_grad
        assert with_gradient.item() == without.item()


class TestInnerOptimum:
    # the start, then clearance, volume or variances off by factors that a bad step of the outer
    # optimiser may bring
    @pytest.mark.parametrize(
        "natural",
        [
            phenobarbital.START,
            (0.03, 1.0, 0.1, 1.0, 1.0, 1e-3),
            (1e-5, 0.1, 3.0, 5.0, 5.0, 3.0),
            (0.005, 10.0, -0.9, 0.01, 0.01, 1e-3),
            (0.01, 0.2, 0.1, 1e-3, 1e-3, 0.1),
        ],
    )
    def test_gradient_vanishes_and_curvature_is_positive(
        self, infants: list[Infant], natural: Sequence[float]
    ) -> None:
        parameters = scaled(natural)
        for infant in infants[::4]:
            around = foce.expand(infant, parameters, foce.minimise_surprise(infant, parameters))
            curvatures = torch.linalg.eigvalsh(around.hessian)
            assert curvatures.min() > 0
            assert torch.linalg.solve(around.hessian, around.gradient).abs().max() < 1e-12

    def test_parameters_that_are_not_finite(self) -> None:
        with pytest.raises(ArithmeticError, match=r"infant: 7, parameters: \[nan, "):
            foce.objective(infant_with(), torch.full((6,), math.nan, dtype=torch.float64))


class TestGradient:
    @pytest.mark.slow
    def test_of_the_inner_optimum(self, few: list[Infant]) -> None:
        parameters = START.clone().requires_grad_()
        for infant in few[:3]:
            assert gradcheck(partial(foce.most_probable, infant), parameters)
            assert gradgradcheck(partial(foce.most_probable, infant), parameters)

    def test_of_an_infants_objective(self, few: list[Infant]) -> None:
        parameters = START.clone().requires_grad_()
        for infant in few[:3]:
            assert gradcheck(partial(foce.objective, infant), parameters)
            assert gradgradcheck(partial(foce.objective, infant), parameters)

    def test_check_notices_a_missing_implicit_term(
        self, few: list[Infant], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(foce, "most_probable", foce.minimise_surprise)  # no derivative of eta
        parameters = START.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            gradcheck(partial(foce.objective, few[0]), parameters)


@pytest.mark.quick
class TestPool:
    def test_gradient_is_the_serial_loops(self, pool: mpgrad.Pool, few: list[Infant]) -> None:
        expected = evaluate(serial, few, START)
        found = evaluate(pool.map, few, START)
        assert found.objective == expected.objective
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-12, atol=1e-12)

    def test_gradcheck_across_processes(self, pool2: mpgrad.Pool, few: list[Infant]) -> None:
        def total(parameters: Tensor) -> Tensor:
            return torch.stack(
                pool2.map(partial(foce.objective, parameters=parameters), few[:3])
            ).sum()

        assert gradcheck(total, START.clone().requires_grad_())


def written(folder: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path = folder / "infants.csv"
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


class TestData:
    def test_shipped_infants(self, infants: list[Infant]) -> None:
        assert [infant.subject for infant in infants] == list(range(1, 60))
        assert sum(len(infant.doses) for infant in infants) == 589
        assert sum(len(infant.concentrations) for infant in infants) == 155
        first = infants[0]
        assert (first.weight, first.apgar) == (1.4, 7)
        assert first.doses.tolist() == [25.0] + [3.5] * 9
        assert first.sample_times.tolist() == [2.0, 112.5]
        assert first.doses_before.tolist() == [1, 10]
        assert first.concentrations.tolist() == [17.3, 31.0]

    def test_order_of_lines_settles_ties(self, tmp_path: Path) -> None:
        at_noon = ["1,12,,1.4,7,9", "1,12,5,1.4,7,", "1,12,,1.4,7,12"]
        (infant,) = read_infants(written(tmp_path, HEADER, DOSE, *at_noon))
        assert infant.doses_before.tolist() == [1, 2]

    def test_byte_order_mark_line_ends_blank_lines_and_spaces(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            HEADER + "\r",
            "",
            DOSE + "\r",
            " 1, 2, , 1.4, 7, 17.3\r",
            "",
            encoding="utf-8-sig",
        )
        (infant,) = read_infants(path)
        assert infant.concentrations.tolist() == [17.3]

    def test_infants_need_not_be_in_blocks(self, tmp_path: Path) -> None:
        others = ["2,0,10,2,3,", "2,1,,2,3,5"]
        path = written(tmp_path, HEADER, DOSE, others[0], SAMPLE, others[1])
        assert [(infant.subject, infant.apgar) for infant in read_infants(path)] == [(1, 7), (2, 3)]

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([""], "line 1, column 1 (subject): the header must be"),
            ([HEADER.replace("dose_mg", "dose")], "line 1, column 3 (dose_mg): the header must be"),
            ([HEADER + ",sex"], "line 1, column 7: the header must be"),
            ([HEADER], "line 2, column 1 (subject): no infants below the header"),
            (
                [HEADER, DOSE, "1,2,,1.4,7"],
                "line 3, column 6 (concentration_mg_per_l): a line must have 6 columns",
            ),
            (
                [HEADER, DOSE, SAMPLE + ",1"],
                "line 3, column 7: a line must have 6 columns (here: 7)",
            ),
            ([HEADER, "", "x,0,25,1.4,7,"], "line 3, column 1 (subject): not a number ('x')"),
            (
                [HEADER, "1.5,0,25,1.4,7,"],
                "line 2, column 1 (subject): must be a whole number (1.5)",
            ),
            ([HEADER, DOSE, "1,,,1.4,7,17.3"], "line 3, column 2 (time_h): not a number ('')"),
            ([HEADER, "1,0,abc,1.4,7,"], "line 2, column 3 (dose_mg): not a number ('abc')"),
            ([HEADER, "1,0,1_4,1.4,7,"], "line 2, column 3 (dose_mg): not a number ('1_4')"),
            ([HEADER, "1,0,-25,1.4,7,"], "line 2, column 3 (dose_mg): must be positive (-25)"),
            ([HEADER, "1,0,25,nan,7,"], "line 2, column 4 (weight_kg): not a number ('nan')"),
            ([HEADER, "1,0,25,0,7,"], "line 2, column 4 (weight_kg): must be positive (0)"),
            ([HEADER, "1,0,25,1.4,11,"], "line 2, column 5 (apgar): must be from 1 to 10 (11)"),
            ([HEADER, "1,0,25,1.4,7.5,"], "line 2, column 5 (apgar): must be a whole number (7.5)"),
            (
                [HEADER, DOSE, "1,2,,1.4,7,inf"],
                "line 3, column 6 (concentration_mg_per_l): not a number ('inf')",
            ),
            (
                [HEADER, "1,0,,1.4,7,"],
                "line 2, column 3 (dose_mg): neither a dose nor a concentration",
            ),
            (
                [HEADER, "1,0,25,1.4,7,9"],
                "line 2, column 6 (concentration_mg_per_l): both a dose and a concentration",
            ),
            (
                [HEADER, DOSE],
                "line 2, column 6 (concentration_mg_per_l): no sample of this infant (subject: 1)",
            ),
            (
                [HEADER, SAMPLE],
                "line 2, column 3 (dose_mg): no dose before this sample (subject: 1)",
            ),
            (
                [HEADER, SAMPLE, "1,3,5,1.4,7,"],
                "line 2, column 3 (dose_mg): no dose before this sample (subject: 1)",
            ),
            (
                [HEADER, DOSE, SAMPLE, "1,1,5,1.4,7,"],
                "line 4, column 2 (time_h): earlier than line 3 (1 after 2)",
            ),
            (
                [HEADER, DOSE, "1,2,,1.5,7,9"],
                "line 3, column 4 (weight_kg): differs from line 2 (1.5, not 1.4)",
            ),
            (
                [HEADER, DOSE, "1,2,,1.4,8,9"],
                "line 3, column 5 (apgar): differs from line 2 (8, not 7)",
            ),
        ],
    )
    def test_mistake_is_named(self, tmp_path: Path, lines: list[str], message: str) -> None:
        path = written(tmp_path, *lines)
        with pytest.raises(DataError) as caught:
            read_infants(path)
        assert str(caught.value).startswith(f"{path}, {message}")

    def test_not_utf8(self, tmp_path: Path) -> None:
        path = written(tmp_path, HEADER, "1,0,25\xb5g,1.4,7,", encoding="latin-1")
        with pytest.raises(
            DataError, match=r"line 2, column 3 \(dose_mg\): not UTF-8 \(byte: 0xb5\)"
        ):
            read_infants(path)

    @pytest.mark.parametrize("name", ["missing.csv", "."])
    def test_file_that_cannot_be_read(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(
            DataError,
            match=r"line 1, column 1 \(subject\): cannot read the file \(.*\); see --data",
        ):
            read_infants(tmp_path / name)


class TestCommandLine:
    @pytest.mark.slow
    @pytest.mark.usefixtures("quick")
    def test_fit_is_nonmems(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        shared_pools: Callable[[str, int], mpgrad.Pool],
    ) -> None:
        output = tmp_path / "fit.png"
        status = main(["--processes", "2", "--output", str(output)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        for wanted in (
            "59 infants, 589 doses, 155 samples",
            "586.276056",
            "th3",
            "speed-up",
            "gradients: ",
        ):
            assert wanted in printed.out
        assert "fit:" in printed.err and "serial and pool: 100%" in printed.err  # the progress bars
        assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 50_000

    @pytest.mark.slow
    @pytest.mark.usefixtures("quick")
    def test_other_data_are_not_compared_with_nonmem(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        data = written(tmp_path, *DATA.read_text().splitlines()[:120])
        output = tmp_path / "fit.svg"
        assert main(["--engine", "inline", "--data", str(data), "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        assert "NONMEM" not in printed and "objective at end" in printed
        assert "<svg" in output.read_text()

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        for option in ("--processes", "--engine", "--data", "--output"):
            assert option in printed

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--processes", "0"],
                "argument --processes: must be a whole number, at least 1 ('0')",
            ),
            (["--engine", "steam"], "argument --engine: invalid choice: 'steam'"),
            (["--output", "no/such/folder.png"], "no such folder ('no/such'); make it first"),
            (["--output", "fit.docx"], "no picture format ('fit.docx'); end in one of ."),
        ],
    )
    def test_mistake_in_an_argument(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.slow
    def test_mistake_in_the_data_is_one_line(self, tmp_path: Path) -> None:
        path = written(tmp_path, HEADER, DOSE, "1,2,,1.4,7,17,3")
        command = [sys.executable, phenobarbital.__file__, "--data", str(path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert (
            line
            == f"phenobarbital.py: {path}, line 3, column 7: a line must have 6 columns (here: 7)"
        )


class TestComplaints:
    def complaints(
        self, with_nonmem: bool = True, pool_gradient: float = 0.0, **changes: object
    ) -> list[str]:
        zero = torch.zeros(6, dtype=torch.float64)
        at_start = Evaluation(START, phenobarbital.NONMEM_START_OBJECTIVE, zero, 1.0)
        fitted = Fit([at_start], NONMEM, phenobarbital.NONMEM_OBJECTIVE, complaint="")
        other = at_start._replace(gradient=zero + pool_gradient)
        return list(
            complaints(
                fitted._replace(**changes), Comparison([at_start], [other], [0.0]), with_nonmem
            )
        )  # type: ignore[arg-type]

    def test_none_about_nonmems_own_fit(self) -> None:
        assert self.complaints() == []

    def test_each(self) -> None:
        assert self.complaints(complaint="precision loss") == [
            "the optimiser stopped early (precision loss)"
        ]
        assert self.complaints(pool_gradient=1e-6) == [
            "largest gradient differs by more than 1e-09 (1e-06)"
        ]
        assert self.complaints(objective=587.0) == [
            "objective at end differs by more than 0.001 (0.72)"
        ]
        assert self.complaints(objective=math.nan) == [
            "objective at end differs by more than 0.001 (nan)"
        ]
        (about_th1,) = self.complaints(
            parameters=NONMEM + torch.eye(6, dtype=torch.float64)[0] * 0.006
        )
        assert about_th1 == "th1 (l/h/kg) differs by more than 0.005 (0.006)"
        bad_start = Evaluation(START, 587.4, torch.zeros(6), 1.0)
        assert self.complaints(evaluations=[bad_start]) == [
            "objective at start differs by more than 1e-05 (0.034)"
        ]

    def test_other_data_are_held_to_no_reference(self) -> None:
        assert self.complaints(with_nonmem=False, objective=1.0) == []


class TestSpeedUp:
    @pytest.mark.parametrize(
        ("taken", "told"),
        [(0.1, "2.00"), (0.9, "2.00 (other programs used 0.9 CPUs: more on a quiet machine)")],
    )
    def test_says_where_others_use_the_cpus(
        self, taken: float, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        slow = Evaluation(START, 0.0, torch.zeros(6), 1.0)
        comparison = Comparison([slow] * 3, [slow._replace(seconds=0.5)] * 3, [taken, 0.0, 5.0])
        phenobarbital.report_comparison(comparison)
        assert f"  speed-up           {told}\n" in capsys.readouterr().out

    def test_others_are_looked_at_in_each_serial_evaluation(
        self, few: list[Infant], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[object] = []
        real = phenobarbital.evaluate
        monkeypatch.setattr(
            phenobarbital, "evaluate", lambda side, *rest: (done.append(side), real(side, *rest))[1]
        )
        monkeypatch.setattr(
            phenobarbital, "OthersClock", lambda: done.append("from here") or Clock()
        )

        class Clock:
            def cpus(self) -> float:
                done.append("to here")
                return 0.7

        def other(
            function: Callable[[Infant], Tensor], infants: Sequence[Infant]
        ) -> Sequence[Tensor]:
            return serial(function, infants)

        assert phenobarbital.compare(other, few, [START], rounds=2).taken == [0.7, 0.7]
        looked = ["from here", serial, "to here"]
        assert done == [*looked, other, other, *looked]  # the sides take turns
