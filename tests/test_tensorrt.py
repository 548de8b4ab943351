"""TensorRT as far as it goes without its libraries, which PyPI does not hold: nothing here executes it."""

import dataclasses
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Run, records
from torch import Tensor, nn

import systems
from systems.base import BadOption, Unsupported
from systems.cache import Cache
from systems.compilers.exported import Exported
from systems.notice import Notice
from systems.tensorrt import system as tensorrt
from systems.tensorrt.system import Binding, InHalf, TensorRT, bindings, engine_of, installed, timing_of

WITHOUT = pytest.mark.skipif(installed(), reason="TensorRT is installed here")


class Two(nn.Module):
    """Three outputs and no tensor, of two inputs, the second one of integers."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.rows = nn.Linear(4, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"sum": y + self.rows(index), "of": None, "where": (y > 0, index + 1)}


def two(seed: int = 0) -> nn.Module:
    return Two(seed).eval()


def model_inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, 4), torch.arange(batch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The GPU and the version of TensorRT that keys are made of; a test may change either."""
    here: dict[str, Any] = {"name": "H200", "multi_processor_count": 132, "major": 9, "minor": 0, "version": "10.13.0.35"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**here))
    monkeypatch.setattr(tensorrt, "version", lambda: here["version"])
    return here


class TestUnsupported:
    @WITHOUT
    def test_it_says_which_package_to_install(self) -> None:
        for device in ("cpu", "cuda"):
            reason = systems.load("tensorrt").unsupported(device)
            assert reason is not None and "pip install 'opweave[onnx,tensorrt]'" in reason and "docker" in reason.lower()

    @WITHOUT
    def test_a_cell_is_unsupported_and_the_exit_status_0(self, run: Run, folder: Path) -> None:
        arguments = (
            "model=custom",
            "model.factory=tiny:make",
            "system=tensorrt",
            "runner=latency",
            "device=cpu",
            "rounds=0",
        )
        done = run(*arguments, f"results={folder / 'out'}")
        assert done.returncode == 0 and "opweave[onnx,tensorrt]" in done.stdout + done.stderr
        (record,) = records(folder / "out").values()
        assert record["status"] == "unsupported" and record["reason"] == tensorrt.NOT_INSTALLED

    def test_type_stubs_alone_are_no_tensorrt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tensorrt").mkdir()
        (tmp_path / "tensorrt" / "__init__.pyi").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        if not importlib.metadata.packages_distributions().get("tensorrt"):
            assert not installed()
        (tmp_path / "tensorrt" / "__init__.py").write_text("")
        assert installed()

    @pytest.mark.parametrize(
        ("version", "device", "reason"),
        [
            ("8.6.1", "cuda", "TensorRT 8.6.1 is too old"),
            ("10.13.0.35", "cpu", "needs a CUDA device"),
            ("10.13.0.35", "cuda", None),
            ("11.0.0.1", "cuda", None),
        ],
    )
    def test_versions_and_devices(
        self, version: str, device: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensorrt, "installed", lambda: True)
        monkeypatch.setattr(tensorrt, "version", lambda: version)
        monkeypatch.setattr(tensorrt, "onnx_unavailable", lambda: None)
        said = TensorRT().unsupported(device)
        assert said is None if reason is None else reason in str(said)
        monkeypatch.setattr(tensorrt, "onnx_unavailable", lambda: "onnx is not installed")
        assert version[0] == "8" or TensorRT().unsupported(device) == "onnx is not installed"

    def test_options(self) -> None:
        with pytest.raises(BadOption, match="0, 1, 2, 3, 4, 5"):
            TensorRT(optimization_level=6)


def test_an_engine_that_prepare_builds_is_learned_in_place(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the builder and the runtime: what `learn` has built is read without a notice."""
    pytest.importorskip("onnx", reason="needs the extra onnx")
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    built: list[str] = []
    monkeypatch.setattr(TensorRT, "_build", lambda self, onnx, *_: built.append(onnx) or b"engine")
    monkeypatch.setattr(tensorrt, "PreparedEngine", lambda plan, *_: lambda *inputs: plan)
    assert TensorRT().learns
    with pytest.warns(Notice) as heard:
        TensorRT().prepare(two(), model_inputs())
    assert [str(w.message) for w in heard] == [tensorrt.CAUTION, tensorrt.LEARNED_IN_PLACE] and len(built) == 1
    TensorRT(optimization_level=5).learn(two(), model_inputs())
    with pytest.warns(Notice) as heard:
        TensorRT(optimization_level=5).prepare(two(), model_inputs())
    assert [str(w.message) for w in heard] == [tensorrt.CAUTION] and len(built) == 2


@WITHOUT
def test_a_record_will_say_that_it_has_not_been_run(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice, which a record keeps and a summary shows. Preparing goes as far as it does without the library."""
    pytest.importorskip("onnx", reason="needs the extra onnx")
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    with pytest.warns(Notice, match="has not been run"), pytest.raises(ModuleNotFoundError, match="tensorrt"):
        TensorRT().prepare(two(), model_inputs())
    assert [entry.kind for entry in Cache().entries()] == ["onnx"]


class TestKeys:
    def test_an_engine_is_of_its_model_batch_gpu_and_versions(self, gpu: dict[str, Any]) -> None:
        same, again = (engine_of(Exported(two(), model_inputs()), 3) for _ in range(2))
        assert same == again
        others = [engine_of(Exported(two(1), model_inputs()), 3), engine_of(Exported(two(), model_inputs(4)), 3)]
        others += [engine_of(Exported(two(), model_inputs()), 5), engine_of(Exported(InHalf(two()), model_inputs()), 3)]
        for change in ({"version": "11.0"}, {"name": "A100"}, {"multi_processor_count": 16}, {"major": 8}):
            before = dict(gpu)
            gpu.update(change)
            others.append(engine_of(Exported(two(), model_inputs()), 3))
            gpu.update(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensorrt, "code_of", lambda *modules: "older")
            others.append(engine_of(Exported(two(), model_inputs()), 3))
        assert all(other != same for other in others)
        assert len({tuple(sorted(map(str, other.items()))) for other in others}) == len(others)

    def test_tf32_counts(self, gpu: dict[str, Any]) -> None:
        before, seen = torch.backends.cuda.matmul.allow_tf32, []
        try:
            for allowed in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                seen.append(engine_of(Exported(two(), model_inputs()), 3)["tf32"])
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        assert seen == [False, True]

    def test_timings_are_shared_between_models_of_one_gpu(self, gpu: dict[str, Any], tmp_path: Path) -> None:
        cache = Cache(tmp_path)
        for content in (b"a", b"b"):
            timing = timing_of(torch.device("cuda"))
            with cache.workspace("tensorrt-timing", timing["gpu"], timing) as folder:
                (folder / content.decode()).write_bytes(content)
        assert sorted(f.name for f in folder.iterdir() if f.suffix != ".json") == ["a", "b"]
        gpu["version"] = "11.0"
        timing = timing_of(torch.device("cuda"))
        with cache.workspace("tensorrt-timing", timing["gpu"], timing) as other:
            assert other != folder


class TestBindings:
    def test_they_follow_the_order_of_the_file(self) -> None:
        exported = Exported(two(), model_inputs())
        assert bindings(exported, ["x", "index"], ["sum", "positive", "next"]) == [
            Binding("x", (2, 4), torch.float32, 0, False),
            Binding("index", (2,), torch.int64, 1, False),
            Binding("sum", (2, 3), torch.float32, 0, True),
            Binding("positive", (2, 3), torch.bool, 1, True),
            Binding("next", (2,), torch.int64, 2, True),
        ]

    @pytest.mark.parametrize(("inputs", "outputs"), [(["x"], ["a", "b", "c"]), (["x", "index"], ["a", "b"])])
    def test_another_number_is_refused(self, inputs: list[str], outputs: list[str]) -> None:
        with pytest.raises(ValueError):
            bindings(Exported(two(), model_inputs()), inputs, outputs)

    def test_those_of_an_exported_file(self, tmp_path: Path) -> None:
        pytest.importorskip("onnx", reason="needs the extra onnx")
        onnx_export = pytest.importorskip("systems.onnx.export")
        if reason := onnx_export.unavailable():
            pytest.skip(reason)
        exported = Exported(two(), model_inputs())
        with onnx_export.onnx_file(exported, two(), Cache(tmp_path)) as artefact:
            bound = bindings(exported, artefact.notes["inputs"], artefact.notes["outputs"])
        assert [dataclasses.replace(b, name="") for b in bound] == [
            dataclasses.replace(b, name="") for b in bindings(exported, ["x", "index"], ["a", "b", "c"])
        ]
        assert len({b.name for b in bound}) == 5
        assert {b.dtype for b in bound} <= set(tensorrt.DTYPES.values())


class TestHalf:
    def test_it_computes_in_half_and_looks_as_before(self) -> None:
        module, x = two(), model_inputs()
        half = InHalf(module)
        seen = []
        half.module.linear.register_forward_hook(lambda layer, args, out: seen.append((args[0].dtype, out.dtype)))
        with torch.no_grad():
            out, expected = half(*x), module(*x)
        assert seen == [(torch.float16, torch.float16)]
        assert (
            out["of"] is None and out["where"][0].dtype == torch.bool and torch.equal(out["where"][1], expected["where"][1])
        )
        torch.testing.assert_close(out["sum"], expected["sum"], rtol=1e-2, atol=1e-2)
        assert all(p.dtype == torch.float32 for p in module.parameters())

    def test_a_copy_in_half_writes_no_state_of_the_model(self) -> None:
        class Counting(nn.Module):
            count: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                return x + self.count.add_(1)

        module, x = Counting().eval(), (torch.ones(2),)
        with pytest.raises(Unsupported, match="it changes its own state: take precision=fp16"):
            TensorRT(fp16=True).learn(module, x)
        exported = Exported(module, x)
        assert [(b.index, b.shape, b.is_output) for b in bindings(exported, ["x", "count"], ["y", "next"])] == [
            *((0, (2,), False), (1, (), False), (0, (2,), True), (1, (), True)),
        ]
