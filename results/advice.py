"""Whether scheduling operators over streams can pay for a model: what runner=advise predicts, and how it says so."""

from dataclasses import dataclass

from conf.text import counted

from .cell import Cell, Choice, Conditions, plain

WORTH = 1.05  # from which gain on the answer is yes
CLOSE = 0.05  # of gain, within which the predicted answer may be wrong: the simulator's error
ESTIMATED = 0.5  # share of the kernels' time, above which an answer rests on estimates
FILLED = 0.9  # share of one stream's kernels, from which on a limit alone is the reason
STREAM_MS = 0.003  # that a host takes to launch a stream of a graph: 1.5 to 3.2 us a chain of empty kernels, measured


@dataclass(frozen=True)
class Forecast:
    """What one scheduler's schedule would take.

    Args:
        system: A choice of conf/system.
        latency_ms: Simulated; None where it has no schedule, for this reason.
        num_streams: Of the schedule.
        num_merged: Operators that each take the place of several, in kernels of their own.
        measured_gain: Of the same schedule over one stream, both measured in turn; None where nobody did.
    """

    system: str
    latency_ms: float | None
    num_streams: int | None = None
    num_merged: int = 0
    measured_gain: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Advice:
    """What is predicted of a cell's model. Milliseconds are of one replay, or of kernels alone.

    Args:
        cell: Its system does not matter.
        gpu: Of conf/gpu, or as CUDA names it.
        source: Where the kernels' times are from.
        is_guess: Are some kernels' times scaled from another GPU?
        operators, kernels, width: How many there are; the most operators with kernels of which none depends on another.
        one_stream_ms: All operators in turn on one stream, simulated: what system=cuda_graph does.
        measured_ms: The same, measured; None where nobody did.
        launch_ms: What a graph of any schedule takes beside its kernels: its launch and its end.
        busy_ms: The sum over kernels.
        critical_path_ms: The longest chain of dependent operators.
        sm_area_ms: The sum over the waves of all kernels of the share of SMs that each one holds, at its own time.
        fusible_ms: What of `busy_ms` is of operators that memory limits by Opara's table: passes fuse these into others.
        estimated_ms: What of `busy_ms` is estimated by the roofline rule, and not measured.
        forecasts: A scheduler each.
    """

    cell: Cell
    gpu: str
    source: str
    is_guess: bool
    operators: int
    kernels: int
    width: int
    one_stream_ms: float
    measured_ms: float | None
    launch_ms: float
    busy_ms: float
    critical_path_ms: float
    sm_area_ms: float
    fusible_ms: float
    estimated_ms: float
    forecasts: tuple[Forecast, ...]

    @property
    def launch_share(self) -> float:
        """Of one stream's time, what passes between kernels: the launch, and the edges from one to the next."""
        return 1 - self.busy_ms / self.one_stream_ms if self.one_stream_ms else 0.0

    @property
    def most(self) -> float:
        """The gain that no schedule of these kernels exceeds, as far as a full SM takes no further block."""
        floor_ms = max(self.critical_path_ms, self.sm_area_ms) + self.launch_ms
        return self.one_stream_ms / floor_ms if floor_ms and self.width > 1 else 1.0

    def gain(self, forecast: Forecast) -> float | None:
        """One stream's latency over the forecast's; None where there is none."""
        return self.one_stream_ms / forecast.latency_ms if forecast.latency_ms else None

    @property
    def best(self) -> tuple[float, str, bool]:
        """The largest gain, the system, and whether it was measured, which a prediction gives way to; 1 and cuda_graph where
        no scheduler gains."""
        measured = [(f.measured_gain, f.system, True) for f in self.forecasts if f.measured_gain is not None]
        others = [f for f in self.forecasts if f.measured_gain is None]
        predicted = [(gain, f.system, False) for f in others if (gain := self.gain(f)) is not None]
        is_known = bool(measured) and not predicted
        return max([(1.0, "cuda_graph", is_known), *measured, *predicted], key=lambda each: each[0])

    @property
    def _predicted(self) -> list[float]:
        """The gains that nobody measured."""
        gains = (self.gain(f) for f in self.forecasts if f.measured_gain is None)
        return [gain for gain in gains if gain is not None]

    @property
    def pays(self) -> bool:
        """Does the best scheduler gain more than WORTH?"""
        return self.best[0] > WORTH

    @property
    def is_close(self) -> bool:
        """May the answer be the other one?"""
        if self.most <= WORTH or (self.best[2] and self.pays):
            return False
        return abs(max(self._predicted, default=0.0) - WORTH) <= CLOSE

    @property
    def doubts(self) -> list[str]:
        """Why the answer may be the other one: none where a measurement says yes or one schedule alone is possible."""
        _, system, is_measured = self.best
        if self.width <= 1 or (is_measured and self.pays):
            return []
        doubts = ["is within the simulator's error"] * self.is_close
        doubts += ["rests on estimates"] * (bool(self._predicted) and self.estimated_ms > ESTIMATED * self.busy_ms)
        best = next((f for f in self.forecasts if f.system == system), None)
        if not is_measured and best and best.latency_ms and best.latency_ms < STREAM_MS * (best.num_streams or 1):
            doubts.append(f"leaves out the host, which may take longer to launch {best.num_streams} streams")
        unknown = [f.system for f in self.forecasts if f.latency_ms is None]
        if unknown and not self.pays and self.most > WORTH:
            doubts.append(f"leaves out {' and '.join(unknown)}")
        return doubts

    @property
    def reason(self) -> str:
        """Why no schedule gains."""
        if not self.busy_ms:
            return "nothing is launched"
        if self.width == 1:
            return "each operator depends on the one before it"
        if self.critical_path_ms >= FILLED * self.busy_ms:
            return f"the longest chain of operators is {self.critical_path_ms / self.busy_ms:.0%} of all kernels' time"
        if self.sm_area_ms >= FILLED * self.busy_ms:
            return f"kernels hold {self.sm_area_ms / self.busy_ms:.0%} of the SMs while they run"
        return "kernels that could run at once share the SMs and memory, and edges between streams take time"

    @property
    def verdict(self) -> str:
        """One line."""
        gain, system, is_measured = self.best
        doubt = f"; that {' and '.join(self.doubts)}: measure it" if self.doubts else ""
        if self.pays:
            how = "was measured to be" if is_measured else "is predicted to be"
            return f"yes: {system} {how} {gain:.2f} times as fast as one stream{doubt}"
        has_measured = any(f.measured_gain is not None for f in self.forecasts)
        how = " or ".join(["was measured"] * has_measured + ["is predicted"] * (not has_measured or bool(self._predicted)))
        return f"no: no scheduler {how} to gain more than {WORTH - 1:.0%}, since {self.reason}{doubt}"

    @property
    def command(self) -> str:
        """What to run next on the GPU: all schedulers where one may pay, forecast or not, and what fuses operators."""
        schedulers = [f.system for f in self.forecasts]
        systems = ["cuda_graph", *schedulers, "nimble_fused"] if self.pays or self.doubts else ["cuda_graph", *FUSING]
        request = [*_of_choice("model", self.cell.model), *_of_conditions(self.cell.conditions)]
        return " ".join(["python run.py -m", *request, f"system={','.join(systems)}"])

    @property
    def lines(self) -> list[str]:
        """For people."""
        share, guess = self.estimated_ms / self.busy_ms if self.busy_ms else 0.0, "a guess: " if self.is_guess else ""
        percent = f"{share:.0%}" if share >= 0.005 else "less than 1%"
        estimated = f", {percent} of their time estimated by a roofline rule" if share else ""
        source = self.source if share < 1 else "measured nowhere"
        measured = "" if self.measured_ms is None else f", measured {self.measured_ms:.3f}"
        parts_ms = self.critical_path_ms, self.sm_area_ms, self.fusible_ms
        path, area, fusible = (_share(part_ms, self.busy_ms) for part_ms in parts_ms)
        first = f"{self.cell.model.label} b{self.cell.batch}, {self.cell.conditions.arithmetic}, on {self.gpu}"
        return [
            f"{first}: {guess}kernels {source}{estimated}",
            f"  {counted(self.operators, 'operator')}, {counted(self.kernels, 'kernel')}, width {self.width}",
            f"  one stream {self.one_stream_ms:.3f} ms simulated{measured}; kernels {self.busy_ms:.3f} ms",
            f"  of the kernels' time: critical path {path}, SM area {area}, what fusion may save {fusible}",
            f"  launch and edges: {self.launch_share:.0%} of one stream",
            f"  no schedule of these kernels gains more than {self.most:.2f}x",
            *(f"  {self._of(forecast)}" for forecast in self.forecasts),
            f"  {self.verdict}",
            f"  next, on a GPU: {self.command}",
        ]

    def _of(self, forecast: Forecast) -> str:
        gain = self.gain(forecast)
        if gain is None:
            return f"{forecast.system}: {forecast.reason}"
        measured = "" if forecast.measured_gain is None else f"; measured {forecast.measured_gain:.2f}x"
        streams = counted(forecast.num_streams or 1, "stream")
        merged = f", with {counted(forecast.num_merged, 'merged operator')}" if forecast.num_merged else ""
        return f"{forecast.system} {gain:.2f}x: {forecast.latency_ms:.3f} ms on {streams}{merged}{measured}"


FUSING = ("nimble_fused", "torch_compile_best", "onnxruntime_cuda_graph")  # what may still be faster where streams are not


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _of_choice(group: str, choice: Choice) -> list[str]:
    options = choice.options
    changed = [f"{group}.{key}={plain(options[key])}" for key in choice.changed]
    return [f"{group}={choice.choice}", *changed]


def _of_conditions(conditions: Conditions) -> list[str]:
    """Those that are not the usual ones; the device is the one that runs the command."""
    usual = Conditions(conditions.batch, conditions.device)
    unusual = [f"{k}={getattr(conditions, k)}" for k in KEYS if getattr(conditions, k) != getattr(usual, k)]
    return [f"batch={conditions.batch}", *unusual]


KEYS = ("precision", "layout", "algorithms", "seed")
