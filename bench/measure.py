"""Timing on a machine that may have other things to do.

What is compared is measured in turns, round by round, so that a change of the machine's mood meets
all of it. A round during which other processes used the processors is repeated, within limits; the
result is the median of the quiet rounds.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

QUIET_SHARE = 0.03
PATIENCE_S = 20
REST_S = 0.05
MIN_SPAN_S = 0.2  # /proc/stat counts in hundredths of a second


class Bystanders:
    """The share of the processors' time that others took: processes, interrupts, the host."""

    def __init__(self):
        self.total_s = self.others_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begins a new span."""
        self._time, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def share(self) -> float:
        """The share in the span until now, which ends here; 0 for one too short to tell."""
        span = (time.perf_counter() - self._time) * os.cpu_count()
        others = max(_busy_s() - self._busy - (_own_s() - self._own), 0.0)
        if span < MIN_SPAN_S * os.cpu_count():
            return 0.0
        self.total_s += span
        self.others_s += others
        self.restart()
        return others / span

    @property
    def overall(self) -> float:
        """The share in all spans together."""
        return self.others_s / self.total_s if self.total_s else 0.0


def _own_s() -> float:
    """Processor seconds of this process and of the finished ones that it started."""
    return sum(os.times()[:4])


def _busy_s() -> float:
    """Seconds that the processors have been busy, stolen time included."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(
                int, file.readline().split()[1:9]
            )
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Clock:
    """Measures with `rounds` quiet rounds; a row's noisy ones are repeated for PATIENCE_S."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.bystanders = Bystanders()

    def medians(self, calls: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Median seconds of each call; a call returns the seconds of what it stands for.

        Each is called once before, to warm up.
        """
        for call in calls.values():
            call()
        quiet: list[dict[str, float]] = []
        noisy: list[dict[str, float]] = []
        deadline = time.monotonic() + PATIENCE_S
        self.bystanders.restart()
        while len(quiet) < self.rounds:
            if len(quiet) + len(noisy) >= self.rounds and time.monotonic() > deadline:
                break
            times = {name: rested(call) for name, call in calls.items()}
            (quiet if self.bystanders.share() <= QUIET_SHARE else noisy).append(times)
        kept = quiet if 2 * len(quiet) >= self.rounds else quiet + noisy
        return {name: statistics.median(times[name] for times in kept) for name in calls}

    def median(self, call: Callable[[], float]) -> float:
        """Median seconds of one call; see medians."""
        return self.medians({"": call})[""]


def rested(call: Callable[[], float]) -> float:
    """The call's seconds, when the threads of the program before no longer spin for more work."""
    time.sleep(REST_S)
    return call()


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """A call that returns the seconds that `work` takes."""

    def call() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return call


def repeated(work: Callable[[int], object], times: int, warm_up: int = 0) -> Callable[[], float]:
    """A call that runs work(0), work(1), .. and returns the median of `times` runs of it.

    The first `warm_up` runs are on top and not timed.
    """

    def call() -> float:
        seconds = []
        for i in range(warm_up + times):
            begin = time.perf_counter()
            work(i)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[warm_up:])

    return call


def import_seconds(module: str) -> Callable[[], float]:
    """A call: a fresh interpreter's seconds for importing a module beyond NumPy's own import."""
    code = "import numpy, time; t = time.perf_counter(); "
    code += f"import {module}; print(time.perf_counter() - t)"

    def call() -> float:
        result = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
        )
        return float(result.stdout)

    return call


def wait_for_quiet(load: float, minutes: float) -> None:
    """Returns when the load average of a minute is below `load`, or after so many minutes."""
    deadline = time.monotonic() + 60 * minutes
    while os.getloadavg()[0] >= load and time.monotonic() < deadline:
        print(f"  load average {os.getloadavg()[0]:.2f}: waiting", file=sys.stderr, flush=True)
        time.sleep(10)
