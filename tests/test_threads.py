"""An executor of a CPU among the threads of a process: calls and closing at once, and what nobody closed."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import Branches
from torch import Tensor, nn

import systems
from systems.nimble import Nimble
from systems.scheduling.execution.cpu_executor import CpuExecutor

SECONDS = 30.0  # in which calls end that take milliseconds


class Slow:
    """A queue that a run reaches after a while, so that runs of several callers overtake each other if they may."""

    def __init__(self, queue: Any):
        self.queue = queue

    def put(self, run: object) -> None:
        time.sleep(random.random() / 500)
        self.queue.put(run)


@pytest.fixture
def executor() -> CpuExecutor:
    prepared = systems.load("nimble").prepare(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    assert isinstance(prepared, CpuExecutor) and prepared.schedule.stream_count == 2
    return prepared


def in_threads(number: int, call: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def all_end(threads: list[threading.Thread]) -> bool:
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def test_several_threads_call_at_once(executor: CpuExecutor) -> None:
    executor.queues = [Slow(queue) for queue in executor.queues]  # type: ignore[misc]
    answers: list[tuple[Tensor, Tensor]] = []

    def call() -> None:
        x = torch.randn(1, 3, 8, 8)
        answers.extend((x, executor(x)) for _ in range(20))

    assert all_end(in_threads(3, call)) and len(answers) == 60
    for x, answer in answers:
        assert torch.equal(answer, executor(x))
    executor.close()


def test_closing_waits_for_calls_and_ends_later_ones(executor: CpuExecutor) -> None:
    executor.queues = [Slow(queue) for queue in executor.queues]  # type: ignore[misc]
    refusals: list[str] = []

    def call() -> None:
        try:
            while True:
                executor(torch.randn(1, 3, 8, 8))
        except RuntimeError as error:
            refusals.append(str(error))

    threads = in_threads(3, call)
    time.sleep(0.05)
    executor.close()
    assert all_end(threads) and refusals == ["this executor is closed"] * 3
    executor.close()


def gone(*references: weakref.ref[Any]) -> bool:
    """Are they all freed, once threads have let go of them?"""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and any(reference() is not None for reference in references):
        gc.collect()
        time.sleep(0.01)
    return all(reference() is None for reference in references)


def test_what_a_call_returned_is_the_callers_alone(executor: CpuExecutor) -> None:
    x = torch.randn(1, 3, 8, 8)
    answer = executor(x)
    references = weakref.ref(answer), weakref.ref(x)
    del answer, x
    assert gone(*references)
    executor.close()


def test_an_executor_that_nobody_closed_is_freed_with_its_threads() -> None:
    module = Branches().eval()
    executor: Any = systems.load("nimble").prepare(module, (torch.randn(1, 3, 8, 8),))
    executor(torch.randn(1, 3, 8, 8))
    threads, references = executor.threads, (weakref.ref(executor), weakref.ref(module.a.weight))
    del executor, module
    assert gone(*references) and all_end(threads)


class Showing(nn.Module):
    """It lets another act while it is traced, and its parameters are stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.while_traced = nn.Linear(3, 3), list[Callable[[], object]]()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            for act in self.while_traced:
                act()
        return self.linear(x).relu()


def test_a_call_while_another_thread_prepares_is_as_ever() -> None:
    """Another shape of the same module, whose stand-ins are nobody's else."""
    module, x = Showing().eval(), torch.randn(2, 3)
    nimble = Nimble(module).prepare(x)
    answers: list[object] = []
    threads: list[threading.Thread] = []

    def call() -> None:
        try:
            answers.append(nimble(x))
        except Exception as error:
            answers.append(error)

    def act() -> None:
        threads.extend(in_threads(1, call))
        time.sleep(0.2)

    expected = module(x)
    module.while_traced.append(act)
    nimble.prepare(torch.randn(4, 3))
    assert threads and all_end(threads) and all(type(answer) is Tensor for answer in answers), answers
    for answer in answers:
        torch.testing.assert_close(answer, expected)
    nimble.close()
