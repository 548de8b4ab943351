"""Models that fail, that change what they are given, that compute constants or numbers: what every system says of them."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from made_records import cell, record
from modules import Lambda
from torch import Tensor, nn

import systems
from models import Model
from models.by_name import ByName
from results.cell import choose
from results.record import Record
from runners.cell import messages, session, worker
from runners.cell.messages import Failed
from runners.showings.registry import showing
from systems.base import BadOption, Unsupported
from systems.custom.system import Custom
from systems.ios.system import Ios
from systems.nimble import Nimble
from systems.nimble.system import NimbleSystem
from systems.onnx.runtime import OnnxRuntime
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.effects import DrawAfter
from systems.tvm.system import Tvm

pytestmark = pytest.mark.usefixtures("cache_folder")
ON_CPU = ["eager", "torchscript", "nimble", "ios", "opara", "onnxruntime"]


class Stateful(nn.Module):
    """Answers by how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Growing(nn.Module):
    """Answers with one number more each time."""

    size = 0

    def forward(self, x: Tensor) -> Tensor:
        self.size += 1
        return x.new_ones(self.size)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, str], Record | Failed]:
    """What the process of a cell answers for a model under a system: its record, or how it failed."""

    def ask(module: nn.Module, system: str) -> Record | Failed:
        model = Model("odd", module.eval(), (torch.randn(3, 4),))
        monkeypatch.setattr(session, "load", lambda *_, **__: model)
        odd_cell = replace(cell(), system=choose("system", system), runner=choose("runner", "latency", samples=3))
        phases: list[object] = []
        own = worker.Worker(None)  # type: ignore[arg-type]
        monkeypatch.setattr(own, "write", phases.append)
        for command in (messages.Learn(odd_cell), messages.Measure(replace(record(), cell=odd_cell), None, False)):
            reply = worker.guarded(own.carry_out, command)
            if isinstance(reply, Failed):
                return reply
        assert isinstance(reply, messages.Done)
        return reply.record

    return ask


@pytest.mark.parametrize("system", ON_CPU)
def test_what_fails_in_eager_has_failed_under_every_system(system: str, answer: Callable) -> None:
    reply = answer(nn.Linear(5, 2), system)
    assert isinstance(reply, Failed) and reply.status == "failed"
    assert reply.reason.startswith("RuntimeError: ") and "mat1 and mat2 shapes cannot be multiplied" in reply.reason


def test_where_a_module_of_ones_own_fails_is_told(answer: Callable) -> None:
    reply = answer(Lambda(lambda x: x.no_such_attribute), "eager")
    assert reply.status == "failed" and re.search(r" 'no_such_attribute' \(.*test_odd_models\.py:\d+\)$", reply.reason)


def test_what_fails_in_eager_has_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = choose("runner", "schedule")
    for module, error in ((nn.Linear(5, 2), RuntimeError), (Lambda(lambda x: x if x.sum() > 0 else -x), Unsupported)):
        model = Model("odd", module.eval(), (torch.randn(3, 4),))
        monkeypatch.setattr("runners.cell.shape.shape_of", lambda *_, model=model: model)
        with pytest.raises(error):
            showing(runner).show(replace(cell(), system=choose("system", "nimble"), runner=runner), "0", lambda _: None)


def test_what_a_system_alone_refuses_is_unsupported(answer: Callable) -> None:
    reply = answer(Lambda(lambda x: x if x.sum() > 0 else -x), "nimble")
    assert reply.status == "unsupported" and "cannot capture it" in reply.reason
    assert answer(Lambda(torch.relu), "nimble").status == "ok"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Lambda(lambda x: x.add_(1)), "the model changes its input 0 in place"),
        (Stateful(), "the model changes its own state in a forward pass (count)"),
        (Lambda(torch.rand_like), "the model answers the same inputs differently each time"),
        (Lambda(lambda x: (x + 1, torch.rand_like(x))), "the model answers the same inputs differently each time"),
        (Growing(), "the model answers the same inputs differently each time"),
    ],
)
def test_what_cannot_be_compared_is_told_as_such(module: nn.Module, says: str, answer: Callable) -> None:
    reply = answer(module, "eager")
    assert reply.status == "unchecked" and reply.reason == f"{says}, so nothing can be compared"


@pytest.mark.parametrize("load", [0.05, 0.5])
def test_a_cpu_that_others_use_is_told_of(load: float, answer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.machine.cpu_load.CpuLoad.share_of_others", lambda _: load)
    warnings = [warning for warning in answer(Lambda(torch.relu), "eager").warnings if warning.kind == "busy_cpu"]
    assert [warning.values["load"] for warning in warnings] == ([load] if load > 0.1 else [])


def test_a_system_says_what_a_model_changes_or_changes_it_too() -> None:
    x = torch.randn(3)
    for choice in ("nimble", "onnxruntime"):
        with pytest.raises(Unsupported, match=r"it changes its input .* in place"):
            systems.load(choice).prepare(Lambda(lambda x: x.add_(1)).eval(), (x,))
        own, stateful = Stateful(), Stateful()
        ready = systems.load(choice).prepare(own.eval(), (x,))
        for _ in range(3):
            torch.testing.assert_close(ready(x), stateful(x))
            assert torch.equal(own.count, stateful.count)
        ready.close()


class Recurrent(nn.Module):
    """Has its state in attributes that are no buffers, and what it computed last."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.state, self.states, self.last = kind, torch.zeros(3), [torch.zeros(3)], None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attribute":
            self.state = self.state / 2 + x
        elif self.kind == "list":
            self.states[0] = self.states[0] / 2 + x
        self.last = self.state + self.states[0] + x
        return self.last * 2


@pytest.mark.parametrize("choice", ["nimble", "opara_fused", "onnxruntime"])
@pytest.mark.parametrize(("kind", "name"), [("attribute", "state"), ("list", "states"), ("nothing", "")])
def test_state_that_is_no_buffer_is_refused(kind: str, name: str, choice: str) -> None:
    own, x = Recurrent(kind), torch.randn(3)
    module = nn.Sequential(own).eval()
    if name:
        with pytest.raises(Unsupported, match=rf"its own state in a forward pass \(0\.{name}\), which is no buffer$"):
            systems.load(choice).prepare(module, (x,))
    else:  # what it computed last is nobody's input
        prepared = systems.load(choice).prepare(module, (x,))
        torch.testing.assert_close(prepared(x), module(x))
        prepared.close()
    assert not own.state.any() and len(own.states) == 1 and not own.states[0].any()


class Keeping(nn.Module):
    """Keeps what it computes in attributes, counts, and writes a buffer; each changes no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.last, self.all, self.by_name = None, [torch.zeros(3)], {"a": torch.zeros(3)}
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.linear(x))
        self.last, self.added, self.number = out, out, getattr(self, "number", 0) + 1
        self.all.append(out)
        self.by_name["b"] = out
        self.total.add_(1)
        return out


@pytest.mark.parametrize("choice", ["nimble", "ios", "opara", "weave"])
def test_preparing_draws_no_random_number_of_the_hosts(choice: str) -> None:
    """Where operators are timed, too."""
    state = torch.get_rng_state()
    options = {"budget_s": 0.1} if choice == "weave" else {}
    systems.load(choice, **options).prepare(Lambda(lambda x: x + torch.rand_like(x)).eval(), (torch.ones(3),)).close()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("choice", ["eager", "nimble", "torchscript"])
def test_preparing_leaves_what_a_module_keeps(choice: str, training: bool) -> None:
    module, x = Keeping().train(training), torch.randn(2, 3)
    everything, by_name = module.all, module.by_name
    before = dict(vars(module).items())
    random = torch.get_rng_state()
    if training:
        optimizer = torch.optim.SGD(module.parameters())
        systems.load(choice).prepare_training(module, optimizer, nn.functional.mse_loss, (x,), x).close()
    else:
        systems.load(choice).prepare(module, (x,)).close()
    assert vars(module).keys() == before.keys() and all(vars(module)[name] is value for name, value in before.items())
    assert module.all is everything and len(everything) == 1 and list(by_name) == ["a"] and not module.total.any()
    assert torch.equal(torch.get_rng_state(), random) and module(x).isfinite().all()


def test_state_that_is_no_buffer_is_refused_in_training() -> None:
    module = nn.Sequential(nn.Linear(3, 3), Recurrent("attribute"))
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(Unsupported, match=r"^it changes its own state in a forward pass \(1\.state\), which is no buffer$"):
        systems.load("nimble").prepare_training(
            module, optimizer, nn.functional.mse_loss, (torch.randn(2, 3),), torch.randn(2, 3)
        )


@pytest.mark.parametrize("family", ["bert", "gpt2"])  # whose outputs torch.jit.trace refuses in two ways
def test_an_output_that_cannot_be_traced_is_a_reason_in_one_sentence(family: str) -> None:
    """Where torch quotes the output's numbers, or advises its own caller."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=99)
    model = BertModel(tiny) if family == "bert" else GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99))
    reason = "torch.jit.trace takes a model that returns tensors or tuples of them, and this one returns something else"
    with pytest.raises(Unsupported, match=f"^{re.escape(reason)}$"):
        systems.load("torchscript").prepare(ByName(model.eval(), ["input_ids"]), (torch.ones(1, 8, dtype=torch.long),))


def test_torchscript_takes_the_eval_form() -> None:
    with pytest.raises(Unsupported, match="takes a model in eval form"):
        systems.load("torchscript").prepare(nn.Sequential(nn.Linear(3, 3)), (torch.randn(2, 3),))


def test_names_of_inputs_are_as_many_as_the_inputs() -> None:
    with pytest.raises(TypeError, match=re.escape("names is a sequence of them: ['input_ids']")):
        ByName(nn.Linear(3, 3), "input_ids")
    with pytest.raises(TypeError, match="2 inputs, but names of 1: input"):
        ByName(nn.Linear(3, 3), ["input"])(torch.randn(2, 3), torch.randn(2, 3))


def test_a_refusal_logs_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), Lambda(lambda x: x + torch.ones(5))).eval(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(Unsupported):
        systems.load("nimble").prepare(module, (x,))
    with pytest.raises(Unsupported):
        systems.load("nimble").prepare_training(module, optimizer, nn.functional.mse_loss, (x,), x)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("what", [torch.relu, None, nn.Linear])
def test_what_is_no_module_is_refused(what: object) -> None:
    with pytest.raises(Unsupported, match=r"^it is a \w+, and no module of PyTorch$"):
        systems.load("nimble").prepare(what, (torch.randn(3),))  # type: ignore[arg-type]


class Drawing(nn.Module):
    """Draws random numbers in branches that nothing else orders."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        dropped = nn.functional.dropout(x, 0.5)
        sampled = torch.normal(x, 1.0)
        return (
            dropped.relu() + torch.randn(4, 4),
            sampled,
            torch.randperm(4),
            torch.rand_like(x).exp(),
            nn.functional.dropout(x + 1, 0.3),
        )


def test_attention_without_dropout_draws_nothing() -> None:
    """Two of them wait for each other no more than two products do."""
    attention = nn.functional.scaled_dot_product_attention
    module = Lambda(lambda x: (attention(x, x, x), attention(x + 1, x, x, dropout_p=0.0))).eval()
    program = capture(module, (torch.randn(1, 1, 4, 4),))
    assert program.graph.width == 2 and not any(isinstance(call.function, DrawAfter) for call in program.calls)


def test_an_operator_that_fails_on_random_inputs_is_told() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(Unsupported, match=r"^an operator fails on random inputs, so it cannot be measured: .*element < 0$"):
        systems.load("ios").prepare(Lambda(lambda x: torch.multinomial(x.softmax(1), 2)).eval(), (x,))


@pytest.mark.parametrize("choice", ["nimble", "nimble_fused", "opara", "ios"])
def test_random_numbers_are_drawn_in_eagers_order(choice: str) -> None:
    module, x = Drawing().eval(), torch.randn(4, 4)
    prepared = systems.load(choice).prepare(module, (x,))
    for seed in range(3):
        torch.manual_seed(seed)
        expected, state = module(x), torch.get_rng_state()
        torch.manual_seed(seed)
        for out, reference in zip(prepared(x), expected, strict=True):
            torch.testing.assert_close(out, reference)
        assert torch.equal(torch.get_rng_state(), state)
    prepared.close()


CONSTANT = {
    "two constants": lambda x: torch.zeros(3) + torch.ones(3) * 2,
    "a range": lambda x: torch.arange(3).float().relu(),
    "beside an input": lambda x: (torch.zeros(3) + 1).relu() + x.relu(),
}


@pytest.mark.parametrize("what", CONSTANT)
@pytest.mark.parametrize("choice", ["ios", "opara", "nimble"])
def test_operators_of_constants_are_scheduled(what: str, choice: str) -> None:
    module, x = Lambda(CONSTANT[what]).eval(), torch.randn(3)
    torch.testing.assert_close(systems.load(choice).prepare(module, (torch.randn(3),))(x), module(x))


@pytest.mark.parametrize(
    "act", [lambda x: x * x.sum().item() + x.relu(), lambda x: x * x.tolist()[0], lambda x: x * sum(x.tolist())]
)
def test_a_number_that_is_read_is_computed_or_refused_in_one_line(act: Callable[[Tensor], Tensor]) -> None:
    module, x = Lambda(act).eval(), torch.randn(3)
    for choice in ("ios", "ios_fused", "nimble", "nimble_fused"):
        try:
            prepared = systems.load(choice).prepare(module, (torch.randn(3),))
        except Unsupported as error:
            assert "cannot be measured alone" in str(error) or "a number of Python's" in str(error)
        else:
            torch.testing.assert_close(prepared(x), module(x))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: systems.load("nimble", multi_stream="maybe"), "system.multi_stream=maybe is not true or false"),
        (lambda: NimbleSystem(multi_stream="maybe"), "system.multi_stream=maybe is not true or false"),
        (lambda: NimbleSystem(1), "system.multi_stream=1 is not true or false"),
        (lambda: Nimble(nn.ReLU(), multi_stream="maybe"), "system.multi_stream=maybe is not true or false"),
        (lambda: Nimble(nn.ReLU(), fold_batch_norm="maybe"), "system.fold_batch_norm is maybe, and must be true or false"),
        (lambda: Nimble(nn.ReLU(), multi_streams=True), "system.multi_streams is no switch"),
        (lambda: Ios(r="2"), "system.r=2 is not an integer"),
        (lambda: Ios(s=True), "system.s=True is not an integer"),
        (lambda: Ios(r=None), "system.r=None is not an integer"),
        (lambda: Ios(schedule=["a"]), "is not a single value"),
        (lambda: OnnxRuntime(cuda_graph=1), "system.cuda_graph=1 is not true or false"),
        (lambda: OnnxRuntime(cuda_graf=True), "there is no key 'system.cuda_graf': did you mean cuda_graph"),
        (lambda: Tvm(trials=1.5), "system.trials=1.5 is not an integer"),
        (lambda: Custom(plan=3), "system.plan=3 is not of the form"),
    ],
)
def test_an_option_is_checked_whichever_way_a_system_is_made(make: Callable[[], object], says: str) -> None:
    with pytest.raises(BadOption) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_may_be_whole_where_the_default_is_not() -> None:
    assert Tvm(budget_s=3).budget_s == 3.0
