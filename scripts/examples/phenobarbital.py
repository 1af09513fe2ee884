"""Fits a population model to real data: phenobarbital in 59 newborns, whose objectives are mapped
over a pool.

    infants ──► pool.map(objective) ──► 59 scalars ──► sum ──► backward ──► BFGS ──► six estimates
                     ▲ each with its own Newton optimum inside                │
                     └───────────────── six parameters, captured ◄────────────┘

Every infant has its own doses and samples, at its own times. So this is a slow differentiable loop
that cannot be batched. The script fits the model with the pool's gradients, and prints the result
beside NONMEM's. Then it evaluates the fit's whole path again, serially and with the pool in turns,
and compares times and gradients. data/README.md describes the data, the model and the reference.

    pip install '.[scripts]'
    python scripts/examples/phenobarbital.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from foce import estimates, log_concentration, most_probable, objective, scaled
from infants import DataError, Infant, read_infants
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor
from tqdm import tqdm

import mpgrad
from mpgrad.system import OthersClock

DESCRIPTION = (
    "A population fit of phenobarbital in 59 newborns, mapped over a pool; beside NONMEM's."
)
EPILOG = (
    "exit status: 0 if the result is NONMEM's, 1 if not, 2 for a mistake in the arguments or in "
    "the data"
)
DATA = Path(__file__).parent / "data" / "phenobarbital.csv"

NAMES = ("th1 (l/h/kg)", "th2 (l/kg)", "th3", "om1", "om2", "s2")
START = (0.00469307, 1.00916, 0.1, 0.0309626, 0.031128, 0.0130865)
NONMEM = (0.00469555, 0.984258, 0.158920, 0.0293508, 0.0279060, 0.0132410)
NONMEM_START_OBJECTIVE = 587.366441346617
NONMEM_OBJECTIVE = 586.276056285210

START_TOLERANCE = 1e-5
OBJECTIVE_TOLERANCE = 1e-3
ESTIMATE_TOLERANCE = 5e-3  # relative
GRADIENT_TOLERANCE = 1e-9  # serial against pool: the same terms, added in another order

# in every scaled parameter; the objective is then within 1e-9 of its minimum
GRADIENT_ENOUGH = 1e-4
ENGINES = ("process", "thread", "inline", "ray")
TAKEN = 0.25  # CPUs that other programs may use without a remark
ROUNDS = 15  # of serial and pool in turns; about as many as the fit has evaluations

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
# `serial`, or a pool's `map`
Loop = Callable[[Callable[[Infant], Tensor], Sequence[Infant]], Sequence[Tensor]]


class Evaluation(NamedTuple):
    parameters: Tensor
    objective: float
    gradient: Tensor
    seconds: float


class Fit(NamedTuple):
    evaluations: list[Evaluation]
    parameters: Tensor
    objective: float
    complaint: str  # the optimiser's; empty if it has none


class Comparison(NamedTuple):
    """Holds evaluations of two loops at the same parameters, measured in turns."""

    serial: list[Evaluation]
    pool: list[Evaluation]
    # CPUs that other programs took during each serial evaluation (a cluster's workers would count
    # as other programs)
    taken: list[float]

    @property
    def speed_up(self) -> float:
        """Return the median over rounds of serial time over pool time. Noise of the machine affects
        both halves of a round."""
        return statistics.median(one.seconds / other.seconds for one, other in self.rounds)

    @property
    def gradient_difference(self) -> float:
        return max(float((one.gradient - other.gradient).abs().max()) for one, other in self.rounds)

    @property
    def rounds(self) -> Iterator[tuple[Evaluation, Evaluation]]:
        return zip(self.serial, self.pool, strict=True)

    @property
    def remark(self) -> str:
        """Return a remark if other programs were so busy that the speed-up is not that of a quiet
        machine."""
        taken = statistics.median(self.taken)
        return (
            f"(other programs used {taken:.1f} CPUs: more on a quiet machine)"
            if taken > TAKEN
            else ""
        )


# --- the fit


def serial(function: Callable[[Infant], Tensor], infants: Sequence[Infant]) -> Sequence[Tensor]:
    return [function(infant) for infant in infants]


def evaluate(loop: Loop, infants: Sequence[Infant], parameters: Tensor) -> Evaluation:
    """Return the objective over all infants, and its gradient in the scaled parameters, which the
    mapped function captures."""
    parameters = parameters.detach().requires_grad_()
    began = time.perf_counter()
    total = torch.stack(tuple(loop(partial(objective, parameters=parameters), infants))).sum()
    (gradient,) = torch.autograd.grad(total, parameters)
    return Evaluation(parameters.detach(), total.item(), gradient, time.perf_counter() - began)


def fit(loop: Loop, infants: Sequence[Infant], start: Tensor) -> Fit:
    """Minimise the objective by BFGS from `start` (scaled parameters)."""
    evaluations: list[Evaluation] = []

    def value_and_gradient(parameters: Vector) -> tuple[float, Vector]:
        evaluation = evaluate(loop, infants, torch.tensor(parameters))
        evaluations.append(evaluation)
        bar.set_postfix_str(f"objective {evaluation.objective:.6f}", refresh=False)
        bar.update()
        return evaluation.objective, evaluation.gradient.numpy()

    with tqdm(desc="fit", unit=" evaluations") as bar:
        result = scipy.optimize.minimize(
            value_and_gradient,
            start.numpy(),
            jac=True,
            method="BFGS",
            options={"gtol": GRADIENT_ENOUGH},
        )
    complaint = "" if result.success else str(result.message)
    return Fit(evaluations, torch.tensor(result.x), float(result.fun), complaint)


def compare(
    loop: Loop, infants: Sequence[Infant], path: Sequence[Tensor], rounds: int
) -> Comparison:
    """Evaluate at the path's parameters, serially and by `loop` in turns, so that both meet the
    same noise."""
    comparison = Comparison([], [], [])
    sides = [(serial, comparison.serial), (loop, comparison.pool)]
    for parameters in tqdm(
        itertools.islice(itertools.cycle(path), rounds),
        total=rounds,
        desc="serial and pool",
        unit=" rounds",
    ):
        for side, evaluations in sides:
            others = OthersClock() if side is serial else None
            evaluations.append(evaluate(side, infants, parameters))
            if others is not None:
                comparison.taken.append(others.cpus())
        sides.reverse()
    return comparison


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Give the serial loop one intra-op thread, as each worker has. More would not be faster for
    tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- the report


def report_fit(fitted: Fit, with_nonmem: bool) -> None:
    at_start = fitted.evaluations[0].objective
    rows = [
        ("", "mpgrad", "NONMEM", "difference"),
        objective_row("objective at start", at_start, NONMEM_START_OBJECTIVE),
        objective_row("objective at end", fitted.objective, NONMEM_OBJECTIVE),
    ]
    for name, estimate, reference in zip(
        NAMES, estimates(fitted.parameters).tolist(), NONMEM, strict=True
    ):
        rows.append(
            (
                name,
                f"{estimate:.6g}",
                f"{reference:.6g}",
                f"{100 * (estimate / reference - 1):+.4f} %",
            )
        )
    for name, *figures in rows:
        print(
            f"{name:20}"
            + "".join(f"{figure:>13}" for figure in (figures if with_nonmem else figures[:1]))
        )
    seconds = sum(evaluation.seconds for evaluation in fitted.evaluations)
    print(
        f"\nfit: {len(fitted.evaluations)} evaluations in {seconds:.1f} s, start of the workers "
        "included"
    )


def objective_row(name: str, value: float, reference: float) -> tuple[str, str, str, str]:
    return name, f"{value:.6f}", f"{reference:.6f}", f"{value - reference:+.1e}"


def report_comparison(comparison: Comparison) -> None:
    print(
        f"one evaluation of objective and gradient, median of {len(comparison.serial)} rounds in "
        "turns:"
    )
    print(f"  serial             {median_seconds(comparison.serial):.3f} s")
    print(f"  pool               {median_seconds(comparison.pool):.3f} s")
    print(f"  speed-up           {comparison.speed_up:.2f} {comparison.remark}".rstrip())
    print(
        "largest difference between serial and pool gradients: "
        f"{comparison.gradient_difference:.1e}"
    )


def median_seconds(evaluations: Sequence[Evaluation]) -> float:
    return statistics.median(evaluation.seconds for evaluation in evaluations)


def complaints(fitted: Fit, comparison: Comparison, with_nonmem: bool) -> Iterator[str]:
    """Yield the faults of the result. Usually there are none."""
    if fitted.complaint:
        yield f"the optimiser stopped early ({fitted.complaint})"
    differences = {"largest gradient": (comparison.gradient_difference, GRADIENT_TOLERANCE)}
    if with_nonmem:
        at_start = fitted.evaluations[0].objective
        differences["objective at start"] = (at_start - NONMEM_START_OBJECTIVE, START_TOLERANCE)
        differences["objective at end"] = (fitted.objective - NONMEM_OBJECTIVE, OBJECTIVE_TOLERANCE)
        for name, estimate, reference in zip(
            NAMES, estimates(fitted.parameters).tolist(), NONMEM, strict=True
        ):
            differences[name] = (estimate / reference - 1, ESTIMATE_TOLERANCE)
    for name, (difference, tolerance) in differences.items():
        if not abs(difference) <= tolerance:  # true for nan
            yield f"{name} differs by more than {tolerance:g} ({difference:.2g})"


# --- the picture

SERIAL_COLOUR, POOL_COLOUR, SECOND_COLOUR = "#8a8f98", "#1f6fb4", "#d1603d"


def draw(infants: Sequence[Infant], fitted: Fit, comparison: Comparison, workers: str) -> Figure:
    etas = [most_probable(infant, fitted.parameters) for infant in infants]
    figure = Figure(figsize=(11, 9), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    figure.suptitle(
        f"Phenobarbital in {len(infants)} newborns: a population fit by mpgrad", fontsize=15
    )
    (predictions, courses), (convergence, speed) = figure.subplots(2, 2)
    draw_predictions(predictions, infants, fitted.parameters, etas)
    draw_courses(courses, infants, fitted.parameters, etas)
    draw_convergence(convergence, fitted)
    draw_speed(speed, comparison, workers)
    for axes in (predictions, courses, convergence, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(axes.get_title(), fontsize=12, pad=10)
    return figure


def draw_predictions(
    axes: Axes, infants: Sequence[Infant], parameters: Tensor, etas: Sequence[Tensor]
) -> None:
    observed = torch.cat([infant.concentrations for infant in infants])
    typical = torch.cat(
        [
            log_concentration(infant, parameters, torch.zeros_like(parameters[:2]))
            for infant in infants
        ]
    )
    own = torch.cat(
        [
            log_concentration(infant, parameters, eta)
            for infant, eta in zip(infants, etas, strict=True)
        ]
    )
    limit = 1.05 * float(torch.cat([observed, typical.exp(), own.exp()]).max())
    axes.plot([0, limit], [0, limit], color="black", linewidth=0.8)
    axes.scatter(
        typical.exp(),
        observed,
        s=18,
        facecolors="none",
        edgecolors=SERIAL_COLOUR,
        label="typical infant",
    )
    axes.scatter(
        own.exp(), observed, s=18, color=POOL_COLOUR, alpha=0.8, linewidths=0, label="this infant"
    )
    axes.set(xlim=(0, limit), ylim=(0, limit), title="Observed against predicted")
    axes.set(xlabel="predicted concentration (mg/l)", ylabel="observed concentration (mg/l)")
    axes.legend(frameon=False, title="predicted for", alignment="left", loc="upper left")


def draw_courses(
    axes: Axes, infants: Sequence[Infant], parameters: Tensor, etas: Sequence[Tensor]
) -> None:
    most_sampled = sorted(
        zip(infants, etas, strict=True), key=lambda pair: -len(pair[0].sample_times)
    )
    for (infant, eta), colour in zip(most_sampled, (POOL_COLOUR, SECOND_COLOUR), strict=False):
        end = float(torch.cat([infant.dose_times, infant.sample_times]).max())
        hours = torch.linspace(float(infant.dose_times[0]), end, 1000, dtype=torch.float64)
        given = torch.searchsorted(infant.dose_times, hours, right=True)
        course = log_concentration(
            dataclasses.replace(infant, sample_times=hours, doses_before=given), parameters, eta
        )
        axes.plot(hours, course.exp(), color=colour, linewidth=1, label=f"infant {infant.subject}")
        axes.scatter(
            infant.sample_times,
            infant.concentrations,
            s=34,
            color=colour,
            edgecolors="white",
            zorder=3,
        )
    axes.set(title="Courses of the two infants with most samples", ylim=(0, None))
    axes.set(xlabel="time since the first dose (h)", ylabel="concentration (mg/l)")
    axes.legend(frameon=False, loc="lower right")


def draw_convergence(axes: Axes, fitted: Fit) -> None:
    numbers = range(1, len(fitted.evaluations) + 1)
    above = [
        evaluation.objective - fitted.objective or math.nan for evaluation in fitted.evaluations
    ]
    steepest = [float(evaluation.gradient.abs().max()) for evaluation in fitted.evaluations]
    axes.semilogy(
        numbers,
        steepest,
        "o-",
        color=SERIAL_COLOUR,
        markersize=4,
        label="its largest partial derivative",
    )
    axes.semilogy(
        numbers, above, "o-", color=POOL_COLOUR, markersize=4, label="objective above its minimum"
    )
    axes.set(title="Convergence", xlabel="evaluation", ylabel="-2 log likelihood")
    axes.legend(frameon=False)


def draw_speed(axes: Axes, comparison: Comparison, workers: str) -> None:
    for one, other in comparison.rounds:
        axes.plot(
            [0, 1], [one.seconds, other.seconds], color=SERIAL_COLOUR, linewidth=0.6, alpha=0.5
        )
    for x, evaluations, colour in (
        (0, comparison.serial, SERIAL_COLOUR),
        (1, comparison.pool, POOL_COLOUR),
    ):
        seconds = [evaluation.seconds for evaluation in evaluations]
        median = median_seconds(evaluations)
        axes.scatter(
            [x] * len(seconds), seconds, s=18, color=colour, alpha=0.8, linewidths=0, zorder=3
        )
        axes.hlines(median, x - 0.1, x + 0.1, color=colour, linewidth=3)
        where, align = (x - 0.13, "right") if x == 0 else (x + 0.13, "left")
        axes.text(
            where, median, f"{median:.3f} s", color=colour, va="center", ha=align, fontsize=11
        )
    axes.set_xticks([0, 1], ["serial loop", workers])
    axes.set(xlim=(-0.5, 1.5), ylim=(0, None), ylabel="time of objective and gradient (s)")
    title = f"Speed-up {comparison.speed_up:.2f}, median of {len(comparison.serial)} rounds"
    axes.set_title("\n".join(filter(None, (title, comparison.remark))))


# --- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    try:
        infants = read_infants(options.data)
    except DataError as error:
        print(f"phenobarbital.py: {error}", file=sys.stderr)
        return 2
    # NONMEM's figures are only for this data
    with_nonmem = DATA.exists() and options.data.read_bytes() == DATA.read_bytes()
    doses = sum(len(infant.doses) for infant in infants)
    samples = sum(len(infant.concentrations) for infant in infants)
    print(f"{len(infants)} infants, {doses} doses, {samples} samples\n")
    cluster = mpgrad.Ray(address=options.ray_address) if options.engine == "ray" else None
    with (
        one_thread(),
        mpgrad.Pool(processes=options.processes, engine=options.engine, ray=cluster) as pool,
    ):
        fitted = fit(pool.map, infants, scaled(torch.tensor(START, dtype=torch.float64)))
        report_fit(fitted, with_nonmem)
        path = [evaluation.parameters for evaluation in fitted.evaluations]
        comparison = compare(pool.map, infants, path, ROUNDS)
    report_comparison(comparison)
    workers = f"pool, engine {options.engine}" + (
        f" × {options.processes}" if options.processes else ""
    )
    draw(infants, fitted, comparison, workers).savefig(options.output, dpi=150)
    print(f"picture: {options.output}")
    found = list(complaints(fitted, comparison, with_nonmem))
    for complaint in found:
        print(f"phenobarbital.py: {complaint}", file=sys.stderr)
    return 1 if found else 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--processes", type=positive, help="workers (default: as many as there are CPUs to use)"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0], help="of the pool (default: %(default)s)"
    )
    parser.add_argument(
        "--ray-address",
        default="local",
        help='with --engine ray: the cluster, or "auto" (default: one on this machine)',
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="CSV file, as data/README.md describes it (default: shipped)",
    )
    parser.add_argument(
        "--output", type=picture, default="phenobarbital.png", help="picture (default: %(default)s)"
    )
    return parser


def file_to_write(text: str) -> Path:
    """Return the path of a file that can be written. A wrong path is refused now rather than after
    the fit."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder ({str(path.parent)!r}); make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is a folder ({text!r}); name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"may not be written ({text!r}); choose another")
    return path


def positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, at least 1 ({text!r})")


def picture(text: str) -> Path:
    endings = Figure().canvas.get_supported_filetypes()
    if Path(text).suffix[1:].lower() not in endings:
        raise argparse.ArgumentTypeError(
            f"no picture format ({text!r}); end in one of .{', .'.join(sorted(endings))}"
        )
    return file_to_write(text)


if __name__ == "__main__":
    sys.exit(main())
