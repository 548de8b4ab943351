"""vLLM in this process, on random weights of its own (`load_format=dummy`)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from models.exchange import config_of
from systems.base import BadOption, Unsupported
from systems.serving.engine import Decoder
from systems.serving.peer import Peer, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem, not_below


class VLLM(AnyServingSystem):
    """vLLM's engine, a step at a time.

    Args:
        max_batch_size: requests of a batch.
        memory_share: of the GPU's memory that is free, for weights and cache together.
        prefix_caching: prompts that begin alike share blocks.
        max_num_batched_tokens: of an iteration; 0 leaves the number to it.
        cuda_graphs: it captures its iterations.
    """

    name = "vllm"

    def __init__(
        self,
        max_batch_size: int = 64,
        memory_share: float = 0.85,
        prefix_caching: bool = False,
        max_num_batched_tokens: int = 0,
        cuda_graphs: bool = True,
    ):
        not_below("max_batch_size", max_batch_size, 1)
        not_below("max_num_batched_tokens", max_num_batched_tokens, 0)
        if not 0 < memory_share <= 1:
            raise BadOption(f"system.memory_share={memory_share} is not above 0 and up to 1")
        self.max_batch_size, self.memory_share, self.prefix_caching = max_batch_size, memory_share, prefix_caching
        self.max_num_batched_tokens, self.cuda_graphs = max_num_batched_tokens, cuda_graphs

    def unsupported(self, device: str) -> str | None:
        if find_spec("vllm") is None:
            return "vLLM is not installed: pip install vllm, of a version that is built for this torch and CUDA"
        return None if device == "cuda" else "vLLM is measured on a GPU: device=cuda"

    def prepare_serving(self, decoder: Decoder) -> PeerServer:
        shape = decoder.shape
        peer = StepPeer(decoder, self)
        return PeerServer(peer, (peer.num_slots, shape.positions, shape.vocabulary))


class StepPeer(Peer):
    """vLLM's LLMEngine."""

    def __init__(self, decoder: Decoder, options: VLLM):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import EngineArgs, LLMEngine

        assert isinstance(decoder, nn.Module)
        try:
            config = config_of(decoder)
        except TypeError as error:
            raise Unsupported(f"vLLM needs a class of transformers: {error}") from error
        weight = next(decoder.parameters())
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        chosen: dict[str, object] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "max_model_len": decoder.shape.positions,
            "max_num_seqs": options.max_batch_size,
            "enable_prefix_caching": options.prefix_caching,
            "enforce_eager": not options.cuda_graphs,
            # of all memory, and no more than is free: the decoder lies there too
            "gpu_memory_utilization": options.memory_share * free_bytes / all_bytes,
        }
        if options.max_num_batched_tokens:
            chosen["max_num_batched_tokens"] = options.max_num_batched_tokens
        with TemporaryDirectory() as folder:
            config.save_pretrained(Path(folder))
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(model=folder, **chosen))
        cache = self.engine.vllm_config.cache_config
        self.num_slots = int(cache.num_gpu_blocks * cache.block_size)
        self.num_delivered: dict[str, int] = {}

    def add(self, request: Request) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_new_tokens, detokenize=False)
        self.num_delivered[str(request.id)] = 0
        self.engine.add_request(str(request.id), {"prompt_token_ids": list(request.prompt)}, parameters)

    def take(self) -> list[Delivery]:
        deliveries = []
        for output in self.engine.step():
            tokens = output.outputs[0].token_ids
            new = tuple(tokens[self.num_delivered[output.request_id] :])
            self.num_delivered[output.request_id] += len(new)
            if new or output.finished:
                deliveries.append(Delivery(int(output.request_id), new, output.finished))
        return deliveries
