"""runner=simulate: how long a schedule would take on a GPU that need not be here, and when each operator would run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import conf
from conf.text import first_line
from results.cell import Cell
from results.document import part_from_json, part_to_json
from results.files import read_json
from results.timeline import COMPUTE, MEMORY, Bar, from_trace, to_trace
from results.timeline import Timeline as CellTimeline
from runners.cell.messages import Failed
from runners.checks import BadRequest, is_positive, not_negative, one_of
from runners.machine.installation import ROOT
from runners.request.request import Request

from .asking import ask, check_output, exit_status, tell, write
from .base import Showing

if TYPE_CHECKING:
    from systems.scheduling.plans.schedule import Schedule
    from systems.scheduling.simulate.gpu import Gpu
    from systems.scheduling.simulate.timeline import Timeline

TRACES = ROOT / "results" / "reference" / "exhibits"

NO_SEARCH = "device=cpu has no times of a GPU, by which weave searches: system=ios searches by simulated ones"


@dataclass(frozen=True)
class SimulateOptions:
    """Args:
    gpu: Of conf/gpu.
    profile: A file; "" for the committed one.
    timeline: A file of measured timelines; "" for those that are committed beside the committed profiles.
    multiprocessors, bandwidth_gb_s, launch_us: In the place of the GPU's.
    """

    gpu: str
    profile: str
    timeline: str
    multiprocessors: int | None
    bandwidth_gb_s: float | None
    launch_us: float | None

    def __post_init__(self) -> None:
        one_of("runner.gpu", self.gpu, conf.choices("gpu"))
        for name in ("multiprocessors", "bandwidth_gb_s"):
            value = getattr(self, name)
            if value is not None and (not is_positive(value) or (name == "multiprocessors" and not isinstance(value, int))):
                kind = "positive integer" if name == "multiprocessors" else "positive number"
                raise BadRequest(f"runner.{name}={value} is neither a {kind} nor null")
        if self.launch_us is not None:
            if isinstance(self.launch_us, bool) or not isinstance(self.launch_us, int | float):
                raise BadRequest(f"runner.launch_us={self.launch_us} is neither a number nor null")
            not_negative("runner.launch_us", self.launch_us)

    @property
    def changed(self) -> dict[str, int | float]:
        """What is in the place of the GPU's own values."""
        values = {
            "multiprocessors": self.multiprocessors,
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "launch_us": self.launch_us,
        }
        return {
            name: float(value) if name != "multiprocessors" else value for name, value in values.items() if value is not None
        }


@dataclass(frozen=True)
class Simulated:
    """A prediction.

    Args:
        timeline: As runner=timeline has it.
        latency_ms: Simulated.
        sum_ms, critical_path_ms, bound_ms: The baselines.
        measured_ms: Of the same schedule, on the GPU of the profile; None where nobody measured it, or for a what-if.
        is_guess: Is it a what-if?
        decided_on: The device whose measured times chose the schedule, where that is not the GPU of the profile.
    """

    timeline: CellTimeline
    latency_ms: float
    sum_ms: float
    critical_path_ms: float
    bound_ms: float
    measured_ms: float | None
    is_guess: bool
    decided_on: str | None = None

    @property
    def line(self) -> str:
        """For people."""
        stated = (
            f"{self.timeline.title}, {self.timeline.source}: {self.latency_ms:.3f} ms (sum of kernels {self.sum_ms:.3f}, "
            f"critical path {self.critical_path_ms:.3f}, larger of it and SM area {self.bound_ms:.3f})"
        )
        if self.measured_ms is not None:
            stated += f"; measured {self.measured_ms:.3f} ms, error {self.latency_ms / self.measured_ms - 1:+.1%}"
        if self.decided_on is not None:
            stated += (
                f"; times of this {self.decided_on} chose the schedule: system.costs=simulated has simulated ones choose"
            )
        return stated


class Simulate(Showing):
    """Prints predictions, and writes their timelines to the file output=... if there is one.

    Each timeline stands there below the measured one of its cell, where there is one. On a CPU simulated costs choose a
    schedule in the place of measured ones.
    """

    name: ClassVar[str] = "simulate"
    Options: ClassVar[type] = SimulateOptions
    writes_output: ClassVar[bool] = True
    options: SimulateOptions

    def run(self, request: Request) -> int:
        output = request.options.output
        check_output(output)
        measured = self._measured()
        timelines: list[CellTimeline] = []
        failures: list[Failed] = []
        for cell in request.cells:
            answer = Failed("unsupported", NO_SEARCH) if _would_search(cell) else ask(cell, request.options)
            if isinstance(answer, Failed):
                tell(answer, cell)
                failures.append(answer)
            else:
                prediction = part_from_json(answer.document, Simulated)
                print(prediction.line)
                if not prediction.is_guess:
                    timelines += [each for each in measured if _what_ran(each.cell) == _what_ran(cell)]
                timelines.append(prediction.timeline)
        if timelines and output is not None:
            write(output, to_trace(timelines))
        return exit_status(failures, output is not None and not timelines)

    def _measured(self) -> list[CellTimeline]:
        """The measured timelines. Raises BadRequest where the file has none."""
        if self.options.profile and not self.options.timeline:
            return []  # committed ones are of the GPU of the committed profiles
        files = (
            [Path(self.options.timeline).expanduser()] if self.options.timeline else sorted(TRACES.glob("*/*.trace.json*"))
        )
        timelines: list[CellTimeline] = []
        for file in files:
            try:
                timelines += from_trace(read_json(file))
            except (OSError, ValueError) as error:
                raise BadRequest(f"runner.timeline={file} has no timelines: {first_line(error)}") from error
        return timelines

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The prediction as data. Raises Unsupported, BadOption, BadModel, and what the model itself raises."""
        import torch

        import systems
        from runners.cell.arithmetic import set_arithmetic
        from runners.cell.behaviour import refused_by_the_system
        from runners.cell.shape import shape_of
        from systems.base import Unsupported
        from systems.scheduling.scheduler import Scheduler
        from systems.scheduling.simulate.baselines import baselines
        from systems.scheduling.simulate.gpu import find, load
        from systems.scheduling.simulate.simulator import Simulator
        from systems.scheduling.simulate.stored import StoredOperators, read_sets
        from systems.scheduling.simulate.what_if import on_another

        # Profiles are of one arithmetic, and some schedulers measure.
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
        options = dict(cell.system.options)
        if cell.device == "cpu" and "gpu" in options and options["costs"] == "measured":  # a CPU's say nothing of a GPU
            options |= {"costs": "simulated", "gpu": self.options.gpu, "profile": self.options.profile}
        system = systems.load(cell.system.name, **options)
        if not isinstance(system, Scheduler):
            raise Unsupported(f"{system.name} has no schedule of operators")
        stored = StoredOperators(read_sets(self._files(cell)))
        report("loading the model")
        model = shape_of(cell.model, cell.conditions)
        report("scheduling")
        system.report = report
        with torch.no_grad(), refused_by_the_system(lambda: model.module(*model.inputs)):
            program, schedule = system.lowered(model.module, model.inputs)
        report("simulating")
        try:
            profile = stored.profile(program)
        except Unsupported as error:
            raise Unsupported(f"{error}; runner=advise estimates what a profile lacks") from error
        gpu, own = load(self.options.gpu, **self.options.changed), find(profile.device)
        is_guess = gpu != own
        measured = None if is_guess else stored.measurement(schedule, profile)
        is_by_times = options.get("costs", "simulated") != "simulated"
        device = torch.cuda.get_device_name(program.device) if cell.device == "cuda" else cell.device
        decided_on = device if is_by_times and device != profile.device else None
        if is_guess:
            if own is None:
                raise Unsupported(f"conf/gpu has no {profile.device}, from which times could be scaled")
            profile = on_another(profile, own, gpu)
        simulator = Simulator(program.graph, profile, gpu)
        timeline, stated = simulator(schedule), baselines(schedule, simulator)
        return part_to_json(
            Simulated(
                CellTimeline(cell, self._source(gpu, is_guess), _bars(timeline, schedule), schedule.stream_count),
                timeline.latency_us / 1e3,
                stated.sum_us / 1e3,
                stated.critical_path_us / 1e3,
                stated.bound_us / 1e3,
                None if measured is None else measured.latency_ms,
                is_guess,
                decided_on,
            )
        )

    def _source(self, gpu: "Gpu", is_guess: bool) -> str:
        changed = "".join(f", {name}={value}" for name, value in self.options.changed.items())
        return f"{'a guess, ' if is_guess else ''}simulated on {gpu.name}{changed}"

    def _files(self, cell: Cell) -> list[Path]:
        """Of the profile. Raises Unsupported where none is committed."""
        from systems.base import Unsupported
        from systems.scheduling.simulate.stored import COMMITTED

        if self.options.profile:
            return [Path(self.options.profile).expanduser()]
        files = sorted(COMMITTED.glob(f"{cell.model.choice}-b{cell.batch}*.json.gz"))
        own = [f for f in files if f.name.split("-b")[-1].removesuffix(".json.gz").partition("-")[0] == str(cell.batch)]
        if not own:
            raise Unsupported(
                f"no profile of {cell.model.choice} at batch {cell.batch} is committed: runner.profile=FILE names one, "
                "which runner=profile writes on a GPU; runner=advise estimates without"
            )
        return own


def _would_search(cell: Cell) -> bool:
    """Would weave search on a CPU, for operators that no profile of a GPU has?"""
    return cell.device == "cpu" and cell.system.name == "weave" and not cell.system.get("plan")


def _what_ran(cell: Cell) -> object:
    """Equal for cells that differ in the device and the runner alone."""
    conditions = cell.conditions
    kinds = conditions.batch, conditions.precision, conditions.layout, conditions.algorithms
    return cell.model.key, cell.system.key, kinds


def _bars(timeline: "Timeline", schedule: "Schedule") -> tuple[Bar, ...]:
    """A bar for each operator that launches something; kinds are by Opara's table."""
    from systems.profiling.intensity import in_table

    bars = []
    for v, (begin_us, end_us) in sorted(timeline.operator_spans_us.items()):
        operator = schedule.graph.operators[v]
        kind = MEMORY if in_table(operator.name) else COMPUTE
        details: dict[str, object] = {"operator": v, "target": operator.target}
        bars.append(Bar(schedule.streams[v], operator.name, begin_us / 1e3, (end_us - begin_us) / 1e3, kind, details))
    return tuple(bars)
