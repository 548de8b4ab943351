"""Backends of torch.compile, one for every scheduler."""

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import conf
import systems
from systems import backends
from systems.custom.system import Custom
from systems.profiling.timing import milliseconds
from systems.scheduling.graph.capture import capture
from systems.scheduling.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
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


class Cache(nn.Module):
    """Keys of a fixed number of places, of which a call writes the next."""

    keys: Tensor
    position: Tensor

    def __init__(self, position: int):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(2, 4, 8))
        self.register_buffer("position", torch.tensor([position]))

    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(1, self.position, self.linear(x)[:, None])
        self.position.add_(1)
        return self.keys.sum(1).sigmoid()


@torch.no_grad()
def test_a_module_that_writes_buffers_keeps_its_state() -> None:
    """Also after a buffer was assigned anew."""
    torch._dynamo.reset()
    module, x = Cache(0).eval(), torch.randn(2, 8)
    eager = copy.deepcopy(module)
    fast = torch.compile(module, backend=backends.opweave_nimble_fused, dynamic=False)
    for step in range(4):
        if step == 2:
            module.keys, eager.keys = torch.ones(2, 4, 8), torch.ones(2, 4, 8)
        assert_same(fast, module, eager, x * step)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_language_model_generates_the_same_with_a_static_cache(device: str) -> None:
    """The library counts the places that its cache holds, in a buffer of each layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    model = LlamaForCausalLM(config).eval().to(device)
    prompt = torch.randint(0, 128, (1, 8), device=device)

    def generated(step: Callable[..., Any]) -> list[int]:
        cache = StaticCache(config, max_cache_len=12)
        logits, tokens = model(prompt, past_key_values=cache).logits, []
        for place in range(8, 12):
            tokens.append(logits[:, -1:].argmax(-1))
            logits = step(tokens[-1], past_key_values=cache, position_ids=torch.full_like(tokens[-1], place)).logits
        return [token.item() for token in tokens]

    fast = torch.compile(model, backend=backends.opweave_nimble, dynamic=False)
    assert generated(fast) == generated(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("choice", schedulers())
@torch.no_grad()
def test_preparing_writes_no_place_beyond_the_last(choice: str, device: str) -> None:
    """Whatever is timed or profiled runs many times."""
    module, x = Cache(3).eval().to(device), torch.randn(2, 8, device=device)
    eager = copy.deepcopy(module)
    system = systems.load(choice, **({"budget_s": 1.0} if choice == "weave" else {}))
    prepared = system.prepare(module, (x,))
    assert_same(prepared, module, eager, x)
    prepared.close()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_timing_a_program_writes_no_place_beyond_the_last(device: str) -> None:
    module, x = Cache(3).eval().to(device), torch.randn(2, 8, device=device)
    program = capture(module, (x,))
    with program.undone():
        assert milliseconds(program) > 0 and milliseconds(program, [range(len(program.graph)), []]) > 0
    assert module.position.item() == 3 and not module.keys.any()


def assert_same(call: Callable[[Tensor], Tensor], module: Cache, eager: Cache, x: Tensor) -> None:
    """One call of each gives the same, and leaves the same behind."""
    torch.testing.assert_close(call(x), eager(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((module.keys, module.position), (eager.keys, eager.position), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_batch_may_be_empty() -> None:
    """Passes compile with shapes of their own, and not with those that Dynamo keeps open."""
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sigmoid(), nn.Linear(8, 4)).eval()
    fast = torch.compile(module, backend=backends.opweave_nimble_fused, dynamic=False)
    for rows in (3, 0):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_options_of_torch_compile_are_the_schedulers(module: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8)
    for options, message in (({"strategy": "fast"}, "not one of both"), ({"strategi": "both"}, "did you mean strategy")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(module, backend=backends.backend("ios"), dynamic=False, options=options)(x)


@torch.no_grad()
def test_a_mode_is_none_of_a_schedulers(module: nn.Module) -> None:
    fast = torch.compile(module, backend=backends.opweave_nimble, dynamic=False, mode="max-autotune")
    with pytest.raises(Exception, match="opweave_nimble takes options="):
        fast(torch.randn(2, 3, 8, 8))


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
