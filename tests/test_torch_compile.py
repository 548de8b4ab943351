"""torch.compile: its options, its layouts, and the best of them."""

import os
import signal
import warnings
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_worker.subproc_pool import SubprocException

from systems.base import BadOption, Compilation, Unsupported
from systems.cache import Cache
from systems.notice import Notice
from systems.pytorch import torch_compile
from systems.pytorch.torch_compile import PreparedCompiled, TorchCompile, Variant

if reason := TorchCompile().unsupported("cpu"):
    pytest.skip(reason, allow_module_level=True)

CHANNELS_LAST = torch.channels_last


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return Cache()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)).relu()


def small() -> nn.Module:
    return Small().eval()


def image(seed: int = 0) -> tuple[Tensor]:
    return (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),)


@torch.no_grad()
def agree(prepared: Any, module: nn.Module) -> None:
    draws = [image(seed) for seed in (1, 2)]
    outputs = [prepared(*x) for x in draws]  # a later call must not overwrite what an earlier one returned
    for x, out in zip(draws, outputs, strict=True):
        torch.testing.assert_close(out, module(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "default"},
        {"mode": "default", "layout": "channels_last"},
        {"mode": "reduce-overhead", "freezing": True},
        {"mode": "max-autotune", "layout": "contiguous"},
    ],
)
@pytest.mark.slow
def test_agrees_with_eager_and_tells_what_compiling_took(options: dict[str, Any]) -> None:
    module = small()
    prepared = TorchCompile(**options).prepare(module, image())
    agree(prepared, module)
    compilation = prepared.compilation
    assert Variant(compilation.mode, compilation.layout, compilation.freezing) == TorchCompile(**options).variant
    assert compilation.compile_s > 0 and compilation.decisions is None
    assert module.a.weight.is_contiguous(), "a layout is of a copy"


@torch.no_grad()
@pytest.mark.parametrize("freezing", [False, True])
def test_only_what_is_frozen_keeps_the_weights_of_its_compilation(freezing: bool) -> None:
    module = small()
    prepared = TorchCompile("default", freezing=freezing).prepare(module, image())
    before = prepared(*image())
    module.norm.weight.zero_()
    module.norm.bias.zero_()
    assert before.any() and torch.equal(prepared(*image()), before if freezing else torch.zeros_like(before))
    assert not torch._inductor.config.freezing


def test_why_a_process_that_compiles_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    details = "Traceback (most recent call last):\n  ...\nFileNotFoundError: no such kernel\n"
    failure = torch._dynamo.exc.BackendCompilerFailed(torch_compile.compiled, SubprocException(details), None)  # type: ignore[arg-type]

    def fails(*arguments: Any) -> Any:
        raise failure

    monkeypatch.setattr(torch, "compile", lambda module, **options: fails)
    with pytest.raises(Unsupported, match=r"cannot compile it: FileNotFoundError: no such kernel$"):
        TorchCompile("default").prepare(small(), image())


def test_what_was_compiled_is_found_again(cache: Cache) -> None:
    first, again = (TorchCompile("default").prepare(small(), image()) for _ in range(2))
    assert (first.compilation.num_cached_graphs, again.compilation.num_cached_graphs) == (0, 1)
    (entry,) = cache.entries()
    assert entry.kind == "torch_compile" and entry.label == "Small float32[2, 3, 8, 8]" and entry.bytes > 1000


def test_a_place_that_the_user_names_is_kept_to(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    TorchCompile("default").prepare(small(), image())
    assert not cache.entries() and list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("named", [None, pytest.param("there", marks=pytest.mark.slow)])
def test_the_environment_is_what_it_was(named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor moves Triton's cache where it makes a kernel of Triton, which it does for a GPU: a stand-in moves it here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    if named is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    before, within, own = dict(os.environ), dict[str, str](), torch_compile.compiled

    def moving(*arguments: Any) -> Any:
        os.environ.setdefault("TRITON_CACHE_DIR", "moved")
        within.update(os.environ)
        return own(*arguments)

    monkeypatch.setattr(torch_compile, "compiled", moving)
    TorchCompile("default").prepare(small(), image())
    assert within["TRITON_CACHE_DIR"] == (named or "moved") and "TORCHINDUCTOR_CACHE_DIR" in within
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "max-autotune"),
        ({"layout": "nhwc"}, "channels_last"),
        ({"budget_s": -1.0}, "seconds, not negative"),
        ({"budget_s": float("inf")}, "seconds"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        TorchCompile(**options)


def preferring(monkeypatch: pytest.MonkeyPatch, fastest: str) -> list[Variant]:
    """Only variants of mode default compile, and one of them is twice as fast; the variants compiled, as they are."""
    made: list[Variant] = []

    def compile_one(module: nn.Module, inputs: tuple[Tensor, ...], variant: Variant) -> Any:
        made.append(variant)
        if variant.mode != "default":
            raise (Unsupported if variant.freezing else RuntimeError)("no such thing")
        prepared = PreparedCompiled(module, "given", is_captured=False)
        prepared.compilation = Compilation(**asdict(variant))
        return prepared

    monkeypatch.setattr(torch_compile, "compiled", compile_one)
    monkeypatch.setattr(torch_compile, "_milliseconds", lambda prepared, inputs: 1.0 if str(made[-1]) == fastest else 2.0)
    return made


class TestBest:
    def test_variants_are_all_there_are_the_configured_one_first(self) -> None:
        variants = TorchCompile("max-autotune", freezing=True).variants(image())
        assert variants[0] == Variant("max-autotune", "given", True)
        # On a CPU a CUDA Graph makes no difference, and contiguous is the layout given: 2 modes, 2 layouts, 2 freezings.
        assert len(variants) == len(set(variants)) == 8
        assert Variant("max-autotune-no-cudagraphs", "contiguous", True) not in variants[1:]
        assert {v.layout for v in variants[1:]} == {"contiguous", "channels_last"}
        last = image()[0].contiguous(memory_format=CHANNELS_LAST)
        assert Variant("default", "channels_last", False) not in TorchCompile("default").variants((last,))[1:]

    def test_what_takes_minutes_to_compile_comes_after_what_takes_seconds(self) -> None:
        variants = TorchCompile("default").variants(image())
        assert [v.mode in torch_compile.TUNING for v in variants] == [False] * 4 + [True] * 4

    def test_after_a_captured_variant_that_fails_comes_one_without_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on_gpu = [Variant(mode, "given", False) for mode in ("reduce-overhead", "max-autotune", "default")]
        monkeypatch.setattr(TorchCompile, "variants", lambda self, inputs: on_gpu)  # there is no GPU in a fast test
        made = preferring(monkeypatch, "default, layout given")
        TorchCompile(best=True).learn(small(), image())
        assert [v.mode for v in made] == ["reduce-overhead", "default", "max-autotune"]

    def test_without_images_there_is_one_layout(self) -> None:
        variants = TorchCompile("default").variants((torch.ones(2, 3),))
        assert len(variants) == 4 and {v.layout for v in variants} == {"given"}

    def test_the_fastest_is_chosen_and_all_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted, made = (
            Variant("default", "channels_last", True),
            preferring(monkeypatch, "default, layout channels_last, frozen"),
        )
        system, reports = TorchCompile("default", best=True), []
        system.report = reports.append
        module = small()
        with pytest.warns(Notice, match="in the process that is timed"):
            prepared = system.prepare(module, image())
        agree(prepared, module)
        compilation = prepared.compilation
        assert Variant(compilation.mode, compilation.layout, compilation.freezing) == wanted == made[-1]
        (decision,) = compilation.decisions
        assert decision.kind == "torch_compile" and decision.chosen == str(wanted)
        assert compilation.num_untried == 0 and len(decision.milliseconds) == 8 and len(made) == 9
        failed = [name for name, ms in decision.milliseconds.items() if ms is None]
        assert failed == list(decision.reasons) == [str(v) for v in system.variants(image()) if v.mode != "default"]
        assert set(decision.reasons.values()) == {"no such thing"} and decision.gain == 2
        assert reports[-1] == "the fastest: default, layout channels_last, frozen" and "1 of 8" in reports[0]

    def test_what_was_learned_is_compiled_without_a_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = preferring(monkeypatch, "default, layout channels_last")
        system = TorchCompile("default", best=True)
        assert system.learns and not TorchCompile().learns
        system.learn(small(), image())
        assert len(made) == 8
        made.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            prepared = system.prepare(small(), image())
        assert made == [Variant("default", "channels_last", False)]
        agree(prepared, small())
        assert prepared.compilation.search_s > 0 and len(prepared.compilation.decisions[0].milliseconds) == 8
        made.clear()
        system.learn(small(), image())  # what is known is not searched for again
        assert made == []

    @pytest.mark.parametrize("what", ["budget", "configured", "inputs", "strides", "structure", "code"])
    def test_a_choice_is_of_the_module_the_inputs_and_the_options(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        made = preferring(monkeypatch, "default, layout channels_last")
        TorchCompile("default", best=True).learn(small(), image())
        made.clear()
        module, inputs, options = small(), image(), {"mode": "default", "best": True}
        if what == "budget":
            options["budget_s"] = 479.0
        elif what == "configured":
            options["freezing"] = True
        elif what == "inputs":
            inputs = (torch.randn(3, 3, 8, 8),)
        elif what == "strides":
            inputs = (inputs[0].contiguous(memory_format=CHANNELS_LAST),)
        elif what == "structure":
            module.register_buffer("more", torch.zeros(1))  # which repr does not tell
        else:
            monkeypatch.setattr(torch_compile, "_source", lambda kind: "another forward")
        with pytest.warns(Notice, match="in the process that is timed"):
            TorchCompile(**options).prepare(module, inputs)
        assert len(made) > 1

    def test_other_weights_share_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = preferring(monkeypatch, "default, layout channels_last")
        TorchCompile("default", best=True).learn(small(), image())
        made.clear()
        module = small()
        torch.nn.init.uniform_(module.a.weight)
        agree(TorchCompile("default", best=True).prepare(module, image()), module)
        assert len(made) == 1

    @pytest.mark.filterwarnings("ignore::systems.notice.Notice")
    def test_the_budget_ends_the_tries_and_one_is_made_in_any_case(self) -> None:
        prepared = TorchCompile("default", best=True, budget_s=0.0).prepare(small(), image())
        agree(prepared, small())
        (decision,) = prepared.compilation.decisions
        assert list(decision.milliseconds) == ["default, layout given"] and prepared.compilation.num_untried == 7
        assert decision.milliseconds["default, layout given"] > 0 and prepared.compilation.search_s > 0

    @pytest.mark.filterwarnings("ignore::systems.notice.Notice")
    def test_a_variant_that_the_end_of_the_budget_interrupts_is_given_up_and_the_fastest_so_far_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        system = TorchCompile("default", best=True, budget_s=2.0)
        PreparedCompiled(small(), "given", is_captured=False)(*image())  # imports what takes seconds

        def compile_one(module: nn.Module, inputs: tuple[Tensor, ...], variant: Variant) -> Any:
            # Any other is compiled by what takes an interruption for a failure of a candidate, and goes on.
            while variant != system.variant:
                try:
                    sleep(60)
                except Exception:
                    continue
            # At once, so that the budget can be short.
            return PreparedCompiled(module, variant.layout, is_captured=False)

        monkeypatch.setattr(torch_compile, "compiled", compile_one)
        handler = signal.getsignal(signal.SIGALRM)
        prepared = system.prepare(small(), image())
        agree(prepared, small())
        (decision,) = prepared.compilation.decisions
        assert decision.chosen == str(system.variant) and prepared.compilation.num_untried == 6
        first, second = decision.milliseconds
        assert decision.milliseconds[first] > 0 and decision.milliseconds[second] is None
        assert decision.reasons == {second: "not compiled within the budget of 2 s"}
        assert signal.getsignal(signal.SIGALRM) == handler

    @pytest.mark.filterwarnings("ignore::systems.notice.Notice")
    def test_where_none_compiles_the_reason_is_raised_and_nothing_learned(
        self, monkeypatch: pytest.MonkeyPatch, cache: Cache
    ) -> None:
        def fails(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(torch_compile, "compiled", fails)
        for error in (Unsupported("Inductor cannot compile it: no"), RuntimeError("cannot compile it: no")):
            with pytest.raises(type(error), match="cannot compile it: no"):
                TorchCompile("default", best=True).prepare(small(), image())
        assert {entry.kind for entry in cache.entries()} == {"torch_compile"}  # Inductor's own

    def test_it_is_for_inference(self) -> None:
        module = small().train()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for options in ({"best": True}, {"freezing": True}):
            with pytest.raises(Unsupported, match="for inference"):
                TorchCompile(**options).prepare_training(module, optimizer, lambda y, t: y.sum(), image(), torch.ones(1))
