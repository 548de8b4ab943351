"""Where a cell ran."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clocks:
    """A GPU's clocks in MHz, its temperature, its power, and the reasons for throttling that held."""

    sm_mhz: int
    sm_max_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """Where a cell ran. The first fields, up to `sources`, decide whether a record stands for a new run.

    Args:
        host, cpu, cores: the machine, and the CPU cores that the sweep may use.
        python, libraries: versions, libraries by name.
        code: a digest of the project's code that the cell runs.
        gpu, driver: the GPU and its driver's version.
        settings: variables of the shell that change speed or results.
        sources: a digest of a custom model's own files.
        os, threads: the system, and PyTorch's threads.
        commit, modified: the commit of the code, and whether files differ from it; None where neither is known.
        cuda, cudnn: versions.
        sm_count, gpu_memory_bytes, compute_capability: of the GPU.
        clocks: of the GPU while the cell ran.
    """

    host: str
    cpu: str
    cores: int
    python: str
    libraries: dict[str, str]
    code: str
    gpu: str | None = None
    driver: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    sources: str | None = None
    os: str | None = None
    threads: int | None = None
    commit: str | None = None
    modified: bool | None = None
    cuda: str | None = None
    cudnn: int | None = None
    sm_count: int | None = None
    gpu_memory_bytes: int | None = None
    compute_capability: str | None = None
    clocks: Clocks | None = None

    @property
    def place(self) -> str:
        """The GPU, or the CPU where there is none."""
        return self.gpu or self.cpu

    @property
    def identity(self) -> dict[str, object]:
        """What must be the same for a record to stand for a new run."""
        names = ("host", "cpu", "cores", "python", "libraries", "code", "gpu", "driver", "settings", "sources")
        return {name: getattr(self, name) for name in names}
