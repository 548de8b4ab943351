"""Backends of torch.compile, one for every scheduler."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import conf
import systems
from systems import backends
from systems.custom.system import Custom
from systems.scheduling.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("cache_folder")


def schedulers() -> list[str]:
    """The choices of conf/system that schedule operators and need no option."""
    classes = {c: systems.registry.system_class(str(conf.options("system", c)["name"])) for c in conf.choices("system")}
    return [choice for choice, c in classes.items() if issubclass(c, Scheduler) and c is not Custom]


@pytest.fixture
def module() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()


def test_every_scheduler_has_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch_dynamo_backends"]
    assert set(entries) == {f"opweave_{choice}" for choice in schedulers()}
    for name, target in entries.items():
        assert target == f"systems.backends:{name}" and getattr(backends, name).__name__ == name
    with pytest.raises(AttributeError, match="opweave_nimbel"):
        _ = backends.opweave_nimbel


@pytest.mark.parametrize("choice", schedulers())
@torch.no_grad()
def test_one_line_replaces_the_module(module: nn.Module, choice: str) -> None:
    fast, x = torch.compile(module, backend=backends.backend(choice), dynamic=False), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-5)
    module[0].weight.mul_(2)
    torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_options_of_torch_compile_are_the_schedulers(module: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8)
    for options, message in (({"strategy": "fast"}, "not one of both"), ({"strategi": "both"}, "did you mean strategy")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(module, backend=backends.backend("ios"), dynamic=False, options=options)(x)


@torch.no_grad()
def test_a_second_shape_needs_fixed_shapes(module: nn.Module) -> None:
    module, shapes = module[:3], (torch.randn(3, 3, 8, 8), torch.randn(5, 3, 8, 8), torch.randn(3, 3, 8, 8))
    fast = torch.compile(module, backend=backends.opweave_nimble, dynamic=False)
    for x in shapes:
        torch.testing.assert_close(fast(x), module(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"opweave_nimble schedules fixed shapes.*dynamic=False"):
        torch.compile(module, backend=backends.opweave_nimble, dynamic=True)(shapes[0])


def test_a_gradient_is_refused(module: nn.Module) -> None:
    with pytest.raises(Exception, match="runs inference"):
        torch.compile(module, backend=backends.opweave_nimble)(torch.randn(3, 3, 8, 8))


def test_a_choice_without_a_schedule_is_no_backend(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="did you mean nimble"):
        backends.backend("nimbel")
    with pytest.raises(Exception, match="schedules no operators"):
        torch.compile(module, backend=backends.backend("eager"))(torch.randn(3, 3, 8, 8))
