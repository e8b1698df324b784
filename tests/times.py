"""Where time goes: a table of seconds by test file, at the end of every run of pytest.

Wall seconds are those that a worker was busy with the file, fixtures included; CPU seconds are
those of the worker and of all processes that its tests started. On a busy machine only the second
are worth comparing. `--times` shows every file; without it, the ten that cost most.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

SHOWN = 10
PROPERTY = "cpu_seconds"

_told = 0.0
_elsewhere = 0.0


def count_cpu_seconds(seconds: float) -> None:
    """Add what was used by processes that this one has not waited for."""
    global _elsewhere
    _elsewhere += seconds


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return _elsewhere + sum(u.ru_utime + u.ru_stime for u in used)


class Times:
    """Adds up what the reports of all workers tell."""

    def __init__(self, show_all: bool) -> None:
        self.show_all = show_all
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.wall[file] += report.duration
        if report.when == "teardown":
            self.tests[file] += 1
            self.cpu[file] += sum(v for name, v in report.user_properties if name == PROPERTY)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("seconds by file")
        write(f"{'wall':>7} {'CPU':>7} {'tests':>5}")
        files = sorted(self.wall, key=lambda file: (-self.cpu[file], file))
        for file in files if self.show_all else files[:SHOWN]:
            write(f"{self.wall[file]:7.1f} {self.cpu[file]:7.1f} {self.tests[file]:5} {file}")
        totals = [sum(counter.values()) for counter in (self.wall, self.cpu, self.tests)]
        write("{:7.1f} {:7.1f} {:5} in all (--times shows every file)".format(*totals))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="seconds of every test file")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config.getoption("--times")))


def pytest_collection_finish() -> None:
    global _told
    _told = _cpu_seconds()  # what imports took is no file's


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    global _told
    used = _cpu_seconds()
    item.user_properties.append((PROPERTY, used - _told))
    _told = used
    return (yield)
