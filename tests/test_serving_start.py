"""What starts an endpoint: addresses and GPUs, and in one line what cannot be served."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from conftest import Run, command
from served_endpoint import MODEL, SOON_S, Running

from results.cell import Cell, Conditions, choose
from runners.cell.messages import Show
from runners.cell.messages import decoded as decoded_message
from runners.command import main
from runners.request import request
from runners.showings import serve
from runners.showings.registry import showing


@pytest.mark.parametrize("values", [["system=orca,orca_paged"], ["system=orca", "batch=1,2"]])
def test_a_sweep_is_one_line(run_here: Run, values: list[str]) -> None:
    done = run_here("-m", "runner=serve", "runner.port=0", *values, *MODEL)
    assert done.returncode == 2 and done.stderr.strip().splitlines() == [
        "opweave: runner=serve serves one model under one system: ask for no sweep"
    ]


def test_a_batch_of_calls_is_one_line(run_here: Run) -> None:
    done = run_here("runner=serve", "runner.port=0", "system=orca", "batch=3", *MODEL)
    assert done.returncode == 2 and done.stderr.strip().splitlines() == [
        "opweave: batch=3 is of calls: what a server batches is system.max_batch_size"
    ]


def test_a_host_that_is_none_is_one_line(run_here: Run) -> None:
    done = run_here("runner=serve", "runner.host=nohost.invalid", "system=orca", *MODEL)
    assert done.returncode == 2 and done.stderr.startswith("opweave: runner.host=nohost.invalid: nothing can listen at ")
    done = run_here("runner=serve", "runner.host=", "system=orca", *MODEL)  # which sockets take for every address
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "runner.host= names no address" in done.stderr


@pytest.mark.parametrize(
    ("host", "shown", "reached"),
    [pytest.param("::1", "[::1]", ["::1"], marks=pytest.mark.slow), ("::", "[::]", ["::1", "127.0.0.1"])],
)
def test_a_host_of_ipv6_is_listened_on(tmp_path: Path, host: str, shown: str, reached: list[str]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("it needs IPv6")
    running = Running(tmp_path, [*MODEL, f"runner.host={host}"])
    try:
        port = urlsplit(running.address).port
        assert running.address == f"http://{shown}:{port}"
        for address in reached:
            socket.create_connection((address, port or 0), timeout=SOON_S).close()
        assert running.get("/health")[0] == 200
    finally:
        running.process.kill()
        running.process.wait()


def check_refusal(status: int, messages: str, words: str) -> None:
    making, line = messages.strip().splitlines()
    assert status in (1, 2) and making == "opweave: making the model" and re.search(f"^opweave: .*{words}", line)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["system=vllm"], {}, "vllm on gpt: .*vllm"),
        (
            ["system.tensor_parallel=2", "model.heads=8"],
            {"GLOO_SOCKET_IFNAME": "bogus0"},
            r"rank \d of 2 .* ended with status 1",
        ),
    ],
)
@pytest.mark.slow
def test_a_server_that_cannot_be_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run("runner=serve", "runner.port=0", "system=orca", *MODEL, *options)
    check_refusal(done.returncode, done.stderr, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["system.slots=2000000000"], r"system.slots=2000000000 take 953\.7 GiB, and .* are free: there is room for"),
        ([f"system.slots={10**19}"], "is not an integer of at least 0 and at most 2147483647"),
        (["system=request_level", "system.slots=1000"], "a request holds 2048 K/V slots"),
        (["system.slots=1"], "there is room for no request: 1 prompt token and 1 to generate are more than the 1 K/V"),
    ],
)
def test_a_server_without_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    """In this process, from the arguments on; the program that would begin anew goes on here."""

    def begun(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        sys.exit(serve.main(os.dup(int(arguments[-2])), arguments[-1]))

    monkeypatch.setattr("os.execve", begun)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # the program sets it for itself
    monkeypatch.setattr("sys.argv", command("runner=serve", "runner.port=0", "system=orca", *MODEL, *options)[1:])
    with pytest.raises(SystemExit) as end:
        main()
    check_refusal(int(end.value.code or 0), capfd.readouterr().err, words)


def test_a_model_is_served_on_the_gpu_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CUDA has seen in this process: the program that serves begins anew."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        calls.append((arguments, environment))
        raise KeyboardInterrupt

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    cell = Cell(
        choose("model", "gpt"), choose("system", "orca"), choose("runner", "serve", port=0), Conditions(1, "cuda", "fp16")
    )
    options = SimpleNamespace(gpus=(1, 0))
    with pytest.raises(KeyboardInterrupt):
        showing(cell.runner).run(request.Request((cell,), options))  # type: ignore[arg-type]
    ((arguments, environment_),) = calls
    assert (environment_["CUDA_VISIBLE_DEVICES"], environment_["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    command_ = decoded_message(arguments[-1])
    assert arguments[1:4] == ["-P", "-m", "runners.showings.serve"] and isinstance(command_, Show) and command_.cell == cell
