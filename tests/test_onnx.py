"""The ONNX export that compilers share, and ONNX Runtime on its CPU provider."""

import errno
import importlib.metadata
import inspect
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import Lambda
from test_exported import image, small
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_structure

import models
import systems
from runners.cell.messages import Failed, Ready, Round
from runners.cell.worker import guarded
from runners.machine.environment import libraries
from runners.measurements import correctness
from systems.base import BadOption, Unsupported
from systems.cache import Cache
from systems.compilers.exported import Exported
from systems.notice import Notice
from systems.onnx import export as onnx_export
from systems.onnx.export import MODEL, OnnxNotes, onnx_file, unavailable
from systems.onnx.runtime import OnnxRuntime, _operators_by_provider

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs a CUDA device and onnxruntime-gpu",
    ),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "cache"))
    return Cache()


class TestExport:
    @pytest.mark.slow
    def test_the_file_is_valid_agrees_and_is_kept(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        module, exported = small(), Exported(small(), image())
        with onnx_file(exported, module, cache) as artefact:
            onnx.checker.check_model(str(artefact.folder / MODEL))
            assert artefact.is_new and artefact.notes["error"] < 1e-5 and artefact.notes["operators"] > 3
            assert (len(artefact.notes["inputs"]), len(artefact.notes["outputs"])) == (1, 1)
        with onnx_file(Exported(small(), image()), small(), cache) as again:
            assert not again.is_new
        for other, x in ((small(1), image()), (small(), image(4))):
            with onnx_file(Exported(other, x), other, cache) as another:
                assert another.is_new
        monkeypatch.setattr(onnx_export, "code_of", lambda *modules: "older")
        with onnx_file(exported, module, cache) as another:
            assert another.is_new

    @pytest.mark.parametrize(
        ("act", "operator"),
        [
            (lambda x: torch.special.airy_ai(x), "aten.special_airy_ai.default"),
            (lambda x: x.cummax(0)[0], "aten.cummax.default"),
        ],
    )
    def test_an_operator_without_a_counterpart_is_named(self, cache: Cache, act: Any, operator: str) -> None:
        module = Lambda(act)
        with pytest.raises(Unsupported, match=operator), onnx_file(Exported(module, image()), module, cache):
            pass
        assert not cache.entries()

    def test_a_transposed_weight_is_written_in_its_order(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        linear, x, are_ordered = nn.Linear(8, 16, bias=False).half(), (torch.rand(2, 3, 8).half(),), []
        save = torch.onnx.ONNXProgram.save

        def saving(program: Any, *arguments: Any, **options: Any) -> None:
            are_ordered.extend(v.const_value.numpy().flags.c_contiguous for v in program.model.graph.initializers.values())
            save(program, *arguments, **options)

        monkeypatch.setattr(torch.onnx.ONNXProgram, "save", saving)
        with onnx_file(Exported(linear, x), linear, cache) as artefact:
            error = OnnxNotes.of(artefact).error
            assert are_ordered and all(are_ordered) and error is not None and error < 1e-3

    @pytest.mark.parametrize(("hot", "mode"), [(1, "sum"), (3, "sum"), (3, "mean"), (3, "max")])
    def test_bags_of_equally_many_rows_are_no_loop(self, cache: Cache, hot: int, mode: str) -> None:
        bag, ids = nn.EmbeddingBag(50, 8, mode=mode).eval(), torch.randint(50, (4, hot))
        assert not {"Loop", "If"} & self.kinds_of(cache, bag, (ids,))

    @pytest.mark.parametrize(
        "module",
        [
            Lambda(lambda table, ids: F.embedding_bag(ids, table, torch.tensor([0, 1, 5]))),  # of 1, 4 and 7 rows
            Lambda(lambda table, ids: F.embedding_bag(ids.view(4, 3), table, padding_idx=1)),
            Lambda(lambda table, ids: F.embedding_bag(ids.view(4, 3), table, per_sample_weights=table[:4, :3], mode="sum")),
        ],
    )
    def test_all_other_bags_are_what_the_exporter_makes_of_them(self, cache: Cache, module: nn.Module) -> None:
        assert "Loop" in self.kinds_of(cache, module.eval(), (torch.randn(50, 8), torch.randint(50, (12,))))

    @staticmethod
    def kinds_of(cache: Cache, module: nn.Module, inputs: tuple[Tensor, ...]) -> set[str]:
        """The operators of its file, which agrees with eager."""
        with onnx_file(Exported(module, inputs), module, cache) as artefact:
            error = OnnxNotes.of(artefact).error
            assert error is not None and error < 1e-6
            return {node.op_type for node in onnx.load(str(artefact.folder / MODEL)).graph.node}

    def test_a_full_disk_says_nothing_of_the_model(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        def save(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(torch.onnx.ONNXProgram, "save", save)
        with pytest.raises(OSError, match="No space left"), onnx_file(Exported(small(), image()), small(), cache):
            pass
        assert not cache.entries() and not list(cache.root.glob("partial/*"))

    def test_a_constant_in_the_place_of_an_output_is_told(self, cache: Cache) -> None:
        module = Lambda(lambda x: (x + 1, 2))
        with pytest.raises(Unsupported, match="it returns 2"), onnx_file(Exported(module, image()), module, cache):
            pass

    def test_what_computes_something_else_is_refused(self, cache: Cache) -> None:
        with (
            pytest.raises(Unsupported, match="computes something else"),
            onnx_file(Exported(small(), image()), small(1), cache),
        ):
            pass

    def test_what_the_cpu_provider_has_no_kernel_for_is_not_compared(self, cache: Cache) -> None:
        module, x = small().bfloat16(), (image()[0].bfloat16(),)
        with onnx_file(Exported(module, x), module, cache) as artefact:
            assert artefact.notes["error"] is None and "Conv" in artefact.notes["not_compared"]

    def test_missing_packages_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert unavailable() is None
        monkeypatch.setattr(onnx_export, "NEEDED", ("onnx", "no_such_package"))
        assert unavailable() == "no_such_package is not installed: pip install 'opweave[onnx]'"


def agree(prepared: Any, module: nn.Module, draws: list[tuple[Tensor, ...]], precision: str = "fp32") -> float:
    """The largest relative error, which a record would call correct for `precision`. All outputs are looked at last, so that
    a later call must not overwrite them.
    """
    outputs = [prepared(*x) for x in draws]
    for x, out in zip(draws, outputs, strict=True):
        with torch.no_grad():
            expected = module(*x)
        assert tree_structure(out) == tree_structure(expected)
        for o, e in zip(tree_leaves(out), tree_leaves(expected), strict=True):
            if isinstance(e, Tensor):
                assert (o.dtype, o.shape) == (e.dtype, e.shape)
    answers = iter(outputs)
    comparison = correctness.measure(module, lambda *_: next(answers), draws, precision)
    assert comparison.is_correct, comparison.reason
    assert comparison.relative_error is not None
    return comparison.relative_error


class DividedSession:
    """Stands for a session on a machine with a GPU, whose graph is divided between providers: (provider, operators) each."""

    def __init__(self, *parts: tuple[str, list[str]]):
        self.parts = parts

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def nodes(types: list[str]) -> list[Any]:
            return [SimpleNamespace(op_type=t) for t in types]

        return [SimpleNamespace(ep_name=name, get_nodes=partial(nodes, types)) for name, types in self.parts]


class TestOnnxRuntime:
    @pytest.mark.parametrize(
        ("model", "options", "device"),
        [
            ("squeezenet", {}, "cpu"),
            ("squeezenet", {"mode": "parallel"}, "cpu"),
            *(pytest.param(model, {}, "cpu", marks=pytest.mark.slow) for model in ("resnet18", "nasnet")),
            *(
                pytest.param(model, options, "cuda", marks=GPU)
                for model in ("squeezenet", "nasnet", "bert")
                for options in ({}, {"cuda_graph": True}, {"mode": "parallel"})
            ),
        ],
    )
    def test_agrees_with_eager(self, model: str, options: dict[str, Any], device: str) -> None:
        loaded = models.load(model, 1, device=device)
        prepared = systems.load("onnxruntime", **options).prepare(loaded.module, loaded.inputs)
        agree(prepared, loaded.module, [loaded.fresh_inputs(s) for s in (11, 12)], "fp32" if device == "cpu" else "tf32")
        prepared.close()
        with pytest.raises(RuntimeError, match="closed"):
            prepared(*loaded.inputs)

    @pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), pytest.param("tf32", "cuda", marks=GPU)])
    def test_what_computes_something_else_disagrees(self, precision: str, device: str) -> None:
        """In either precision by which the cases above are judged."""
        wrong, module = small(1).to(device), small().to(device)
        with pytest.raises(AssertionError, match="relative error"):
            agree(wrong, module, [(x.to(device),) for x in (image()[0], -image()[0])], precision)

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.slow
    def test_precisions_and_layouts(self, precision: str, layout: str) -> None:
        model = models.place(models.load("squeezenet", 1), device="cpu", precision=precision, layout=layout)
        prepared = OnnxRuntime().prepare(model.module, model.inputs)
        assert agree(prepared, model.module, [model.fresh_inputs(s) for s in (7, 8)], precision) < 1e-2

    @pytest.mark.parametrize(
        "act",
        [
            lambda x, y: {"sum": x + y, "more": [x * y, None]},
            lambda x, y: (x.relu(),),  # y is not read
            lambda x, y: (x, x + y),  # an input is an output
            lambda x, y: [x - y] * 2,  # an output twice
            lambda x, y: (x > y, (x * 3).long()),
        ],
    )
    def test_any_form_of_inputs_and_outputs(self, act: Any) -> None:
        module = Lambda(act).eval()
        draws = [(torch.randn(2, 5), torch.randn(2, 5)) for _ in range(3)]
        agree(OnnxRuntime().prepare(module, draws[0]), module, draws)

    def test_other_shapes_are_refused(self) -> None:
        prepared = OnnxRuntime().prepare(small(), image())
        with pytest.raises(ValueError, match="prepare it again"):
            prepared(*image(3))

    def test_the_export_is_paid_for_once_and_told(self) -> None:
        first, second = (OnnxRuntime(mode).prepare(small(), image()) for mode in ("sequential", "parallel"))
        assert first.compilation.is_exported_now and not second.compilation.is_exported_now
        assert first.compilation.export_s == second.compilation.export_s > 0

    def test_what_it_has_learned_is_read_and_not_made_again(self) -> None:
        system = OnnxRuntime()
        assert system.learns
        system.learn(small(), image())
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            prepared = system.prepare(small(), image())
        assert prepared.compilation is not None and prepared.compilation.is_exported_now is False

    def test_each_providers_operators_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from onnxruntime.capi.onnxruntime_inference_collection import Session

        module, x = Lambda(lambda x: x.relu().sin().flatten(1) @ torch.ones(192, 2)), image()
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            assert OnnxRuntime().prepare(module, x).compilation.providers == {"CPUExecutionProvider": 4}
            monkeypatch.delattr(Session, "get_provider_graph_assignment_info")  # as an older ONNX Runtime
            assert OnnxRuntime().prepare(module, x).compilation.providers is None

    def test_what_the_cpu_has_on_a_gpu_is_told(self) -> None:
        cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
        parts = (cuda, ["Conv"]), (cpu, ["Shape"]), (cuda, ["Relu"]), (cpu, ["NonZero"]), (cpu, ["Shape"])
        with pytest.warns(Notice, match="3 of 5 operators on the CPU: 2 Shape, 1 NonZero$"):
            assert _operators_by_provider(DividedSession(*parts), torch.device("cuda")) == {cuda: 2, cpu: 3}
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            whole = DividedSession((cuda, ["Conv"]), (cuda, ["Relu"]))
            assert _operators_by_provider(whole, torch.device("cuda")) == {cuda: 2}

    def test_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BadOption, match="sequential, parallel"):
            OnnxRuntime("fast")
        with pytest.raises(BadOption, match="several threads"):
            OnnxRuntime("parallel", cuda_graph=True)
        assert OnnxRuntime().unsupported("cpu") is None
        assert "CUDA device" in str(OnnxRuntime(cuda_graph=True).unsupported("cpu"))
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
        assert "onnxruntime-gpu" in str(OnnxRuntime().unsupported("cuda"))
        monkeypatch.setattr(onnx_export, "NEEDED", ("no_such_package",))
        assert "no_such_package" in str(OnnxRuntime().unsupported("cpu"))

    @pytest.mark.parametrize("output", ["Failed to load libcurand.so.10: no such file\nPlease follow https://...", ""])
    def test_a_provider_that_does_not_load_is_told_with_what_it_lacks(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
    ) -> None:
        """A stand-in for a session on a machine that lacks a library of the CUDA provider, which goes on without it."""
        monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print(output, end=""), raising=False)
        without = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: without)
        exported = SimpleNamespace(device=torch.device("cuda"), allow_tf32=True, channels_last=False)
        with pytest.raises(Unsupported) as refused:
            OnnxRuntime()._session("model.onnx", exported, SimpleNamespace(cuda_stream=0))  # type: ignore[arg-type]
        lacks = "Failed to load libcurand.so.10: no such file" if output else "of another version"
        assert lacks in str(refused.value) and "onnxruntime-gpu[cuda,cudnn]" in str(refused.value)
        assert "\n" not in str(refused.value) and not capsys.readouterr().out

    def test_the_gpus_package_counts_as_the_cpus_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has a name of its own; another version of it makes a record another one."""
        installed = {"onnxruntime-gpu": "1.31.0"}

        def version(name: str) -> str:
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        assert inspect.unwrap(libraries)() == installed  # within its cache

    def test_what_it_has_no_kernel_for_is_told(self) -> None:
        with pytest.raises(Unsupported, match="Conv"):
            OnnxRuntime().prepare(small().bfloat16(), (image()[0].bfloat16(),))

    def test_threads_are_pytorchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        session = onnxruntime.InferenceSession

        def spy(file: str, options: Any = None, **more: Any) -> Any:
            seen.append(options)
            return session(file, options, **more)

        monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
        OnnxRuntime("parallel").prepare(small(), image())
        options = seen[-1]
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert options.intra_op_num_threads == options.inter_op_num_threads == torch.get_num_threads()
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


@pytest.mark.parametrize(
    ("words", "status"),
    [("AllocateRawInternal Failed to allocate memory for requested buffer", "out_of_memory"), ("no kernel", "unsupported")],
)
def test_a_session_that_lacks_memory_is_not_unsupported(words: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    def refuses(*_: object, **__: object) -> None:
        raise Fail(words)

    def prepares(_: object) -> Ready:
        OnnxRuntime()._session("model.onnx", Exported(small(), image()), None)
        return Ready()

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuses)
    answer = guarded(prepares, Round())
    assert isinstance(answer, Failed) and answer.status == status and words in answer.reason
