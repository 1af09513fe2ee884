"""`KnownFunctions` numbers the pickled functions that workers keep, and notes how long calls take.
Each function is sent to each worker once, however often it is mapped. This module runs in the
caller only.

Assumes: called by the scheduling thread; any thread may call `own_seconds`, `predicted` and
    `predictor_of`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from mpgrad.calls.packing import SharedFunction
from mpgrad.machine.timing import FunctionTiming, Prediction, Predictor
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Results

__all__ = ["KnownFunctions"]

# Workers keep this many functions for the next operation that uses one.
MOST_CODES = 128
MOST_BYTES = 64 << 20


class KnownFunctions:
    """Holds the functions mapped last, by number, and the seconds that their calls took."""

    def __init__(self, workers: Mapping[int, WorkerHandle]) -> None:
        self._workers = workers
        # the function that was used last is at the end
        self._numbers: dict[bytes, int] = {}
        self._new_numbers = itertools.count(1)
        self._measured: dict[int, FunctionTiming] = {}  # by number
        # This is approximate: two threads that count at the same time may lose one.
        self.wrong_predictions = 0

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code.

        Workers forget the functions used longest ago, if there are too many or they are too large.
        """
        code = self._numbers.pop(function.pickled, None) or next(self._new_numbers)
        self._numbers[function.pickled] = function.code = code
        while len(self._numbers) > 1 and (
            len(self._numbers) > MOST_CODES or sum(map(len, self._numbers)) > MOST_BYTES
        ):
            oldest = self._numbers.pop(next(iter(self._numbers)))
            self._measured.pop(oldest, None)
            for worker in self._workers.values():
                if oldest in worker.writer.codes:
                    worker.writer.codes.discard(oldest)
                    worker.forgotten_codes.append(oldest)

    def own_seconds(self, pickled: bytes) -> float | None:
        """Return the seconds that one of the function's calls takes; None before the first.

        Any thread may ask.
        """
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.own_seconds

    def predicted(self, pickled: bytes) -> Prediction | None:
        """Predict the gradient that the losses of a new map will get; None if that is not possible.

        Any thread may ask.
        """
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.predictor.predict()

    def predictor_of(self, function: SharedFunction) -> Predictor:
        """Return the function's predictor; a new one before its first result, or if it was
        forgotten.

        Any thread may ask.
        """
        measured = self._measured.get(function.code)
        return Predictor() if measured is None else measured.predictor

    def seconds(self, function: SharedFunction, unknown: float) -> float:
        """Return the seconds of a call, including mpgrad's own work; `unknown` before the first."""
        measured = self._measured.get(function.code)
        return unknown if measured is None else measured.seconds

    def note_results(
        self, function: SharedFunction, message: Results, items: int, share: float = math.inf
    ) -> None:
        """Note the time that `items` calls took.

        The last measurement counts most. If an operation's largest calls come first, a measurement
        counts for at most its `share` of all that the operation has made, so their mean counts.
        """
        # The function has been forgotten since.
        if self._numbers.get(function.pickled) != function.code:
            return
        measured = self._measured.get(function.code) or FunctionTiming()
        own = message.own_seconds + message.eager_seconds
        measured.note(own / items, message.seconds / items, len(self._workers), share)
        # Only now may other threads look at the measurement.
        self._measured[function.code] = measured
