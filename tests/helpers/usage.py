"""What a command with all its processes has taken of the machine."""

import os
import threading
from pathlib import Path

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Usage:
    """Peak memory (megabytes) and processor time (seconds) of a process and its descendants, while one looks."""

    def __init__(self, process: int) -> None:
        self.process, self.megabytes, self.spent, self.over = process, 0.0, dict[int, float](), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Usage":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    @property
    def seconds(self) -> float:
        return sum(self.spent.values())

    def _watch(self) -> None:
        while not self.over.wait(0.2):
            now = dict(_processes())
            ours = [number for number in now if self._is_ours(number, now)]
            self.spent |= {number: now[number][1] for number in ours}
            self.megabytes = max(self.megabytes, sum(now[number][2] for number in ours))

    def _is_ours(self, number: int, now: dict[int, tuple[int, float, float]]) -> bool:
        while number in now and number != self.process:
            number = now[number][0]
        return number == self.process and number in now


def _processes():
    """Yield each process with its parent, its seconds of the processor and its megabytes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds = (int(fields[11]) + int(fields[12])) / TICKS
        yield int(process.name), (int(fields[1]), seconds, int(fields[21]) * PAGE / 1e6)
