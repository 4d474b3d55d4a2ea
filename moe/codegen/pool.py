"""Compiles jobs in worker processes, two at a time. The caller may itself run under Triton's interpreter.

A compiler that aborts (an MLIR assertion, LLVM running out of registers) takes its worker down, not the run:
the job is reported as failed with the last words of the process and a new worker takes the next one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import megamoe
from megamoe.codegen.analyse import Report
from megamoe.codegen.registry import KERNELS

TIMEOUT_S = 300


@dataclass(frozen=True)
class Entry:
    """A job as the parent knows it; `key` also is the order of results in a file."""

    arch: int
    kernel: str
    recipe: str
    name: str

    @property
    def key(self) -> tuple[int, str, str, str]:
        return self.arch, self.kernel, self.recipe, self.name


@dataclass(frozen=True)
class Result:
    """`error` when the job did not compile, else `report` and what it violates. `seconds` is wall time."""

    entry: Entry
    report: Report | None
    violations: list[str]
    error: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None and not self.violations


class WorkerDied(RuntimeError):
    """The worker ended without an answer; the message ends with what it wrote to stderr."""


class Worker:
    """One compiling process, started when first asked and again after it died."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}

    def ask(self, **request: object) -> object:
        process = self._process or self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return self._answer(process)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._stderr.close()

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        root = str(Path(megamoe.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment["PYTHONSAFEPATH"] = "1"
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megamoe.codegen.worker", self._source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        self.versions = self._answer(self._process)  # type: ignore[assignment]
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> object:
        assert process.stdout is not None
        alarm = threading.Timer(TIMEOUT_S, process.kill)
        alarm.start()
        line = process.stdout.readline()
        alarm.cancel()
        if line:
            return json.loads(line)
        status = process.wait()
        self._stderr.seek(0)
        last_words = self._stderr.read()[-2000:].strip()
        self.close()
        raise WorkerDied(f"the compiling process ended with status {status}: {last_words}")


class Pool:
    """`with Pool() as pool`: list the jobs of a source (see `registry.collect`), run some of them."""

    def __init__(self, source: str = KERNELS, processes: int = 2) -> None:
        self._workers = [Worker(source) for _ in range(processes)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()

    @property
    def versions(self) -> dict[str, str]:
        """What the workers compile with; known once a job was listed."""
        return self._workers[0].versions

    def list_jobs(self, arch: int) -> list[Entry]:
        """Raises `WorkerDied` when the kernel modules cannot be imported."""
        jobs = self._workers[0].ask(arch=arch)
        return [Entry(arch=arch, **job) for job in jobs]  # type: ignore[attr-defined]

    def run(self, entries: list[Entry]) -> Iterator[Result]:
        """Results in the order in which they are ready."""
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def compile_one(entry: Entry) -> Result:
            worker = idle.get()
            try:
                return _compile(worker, entry)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            for future in as_completed([threads.submit(compile_one, entry) for entry in entries]):
                yield future.result()


def _compile(worker: Worker, entry: Entry) -> Result:
    start = time.perf_counter()
    try:
        answer: dict = worker.ask(arch=entry.arch, name=entry.name)  # type: ignore[assignment]
    except WorkerDied as death:
        answer = {"error": str(death)}
    seconds = time.perf_counter() - start
    report = Report(**answer["report"]) if "report" in answer else None
    return Result(entry, report, answer.get("violations", []), answer.get("error"), seconds)
