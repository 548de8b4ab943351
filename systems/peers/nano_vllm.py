"""nano-vllm in this process, where it is installed. It serves Qwen3 alone, and never greedily."""

from __future__ import annotations

from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from models.exchange import as_transformers
from systems.base import BadOption, Unsupported
from systems.serving.engine import Decoder
from systems.serving.peer import Peer, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem, not_below

QWEN3 = "qwen3"
LEAST_TEMPERATURE = 1e-6  # what it refuses is 1e-10


class NanoVLLM(AnyServingSystem):
    """nano-vllm's engine, a step at a time.

    Args:
        max_batch_size: requests of a batch.
        memory_share: of the GPU's memory, for weights and cache together.
        cuda_graphs: it captures its iterations.
    """

    name = "nano_vllm"

    def __init__(self, max_batch_size: int = 64, memory_share: float = 0.85, cuda_graphs: bool = True):
        not_below("max_batch_size", max_batch_size, 1)
        if not 0 < memory_share <= 1:
            raise BadOption(f"system.memory_share={memory_share} is not above 0 and up to 1")
        self.max_batch_size, self.memory_share, self.cuda_graphs = max_batch_size, memory_share, cuda_graphs

    def unsupported(self, device: str) -> str | None:
        if find_spec("nanovllm") is None:
            return "nano-vllm is not installed: pip install it from its own repository, with flash-attn"
        return None if device == "cuda" else "nano-vllm runs on a GPU alone: device=cuda"

    def prepare_serving(self, decoder: Decoder) -> PeerServer:
        shape = decoder.shape
        bounds = (self.max_batch_size * shape.positions, shape.positions, shape.vocabulary)
        return PeerServer(NanoPeer(decoder, self), bounds)


class NanoPeer(Peer):
    """nano-vllm's LLM on a decoder's weights, which go through a folder."""

    def __init__(self, decoder: Decoder, options: NanoVLLM):
        from nanovllm import LLM

        assert isinstance(decoder, nn.Module)
        module = as_transformers(decoder)
        if module.config.model_type != QWEN3:
            raise Unsupported(f"nano-vllm serves Qwen3 alone: {module.config.model_type} is model=qwen3 under system=orca")
        with TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            try:
                self.engine: Any = LLM(
                    folder,
                    enforce_eager=not options.cuda_graphs,
                    max_num_seqs=options.max_batch_size,
                    max_model_len=decoder.shape.positions,
                    gpu_memory_utilization=options.memory_share,
                )
            except (OSError, ValueError) as error:
                raise Unsupported(f"nano-vllm needs a folder with a tokenizer: {error}") from error
        self.ids: dict[int, int] = {}  # ours by its own
        self.num_delivered: dict[int, int] = {}

    def add(self, request: Request) -> None:
        from nanovllm import SamplingParams

        parameters = SamplingParams(temperature=LEAST_TEMPERATURE, ignore_eos=True, max_tokens=request.max_new_tokens)
        self.engine.add_request(list(request.prompt), parameters)
        self.ids[self.engine.scheduler.waiting[-1].seq_id] = request.id

    def take(self) -> list[Delivery]:
        """It shows the tokens of finished requests alone; those of others are read off its scheduler."""
        finished, _ = self.engine.step()
        deliveries = [self._delivery(number, tokens, True) for number, tokens in finished]
        running = [(s.seq_id, s.completion_token_ids) for s in self.engine.scheduler.running]
        return deliveries + [self._delivery(n, t, False) for n, t in running if len(t) > self.num_delivered.get(n, 0)]

    def _delivery(self, number: int, tokens: list[int], is_last: bool) -> Delivery:
        begin = self.num_delivered.get(number, 0)
        self.num_delivered[number] = len(tokens)
        return Delivery(self.ids[number], tuple(tokens[begin:]), is_last)

    def close(self) -> None:
        self.engine.exit()
