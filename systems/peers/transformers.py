"""transformers, as a server: its continuous batching, and `generate` on batches that are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.exchange import as_transformers
from systems.base import Unsupported
from systems.serving.engine import Decoder
from systems.serving.peer import Peer, PeerFailed, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem, not_below

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAIT_S = 0.05  # for a token
NO_STOP = -1  # the id of no token: requests run to their last
BLOCK = 256  # slots of a block of its cache


class TransformersServer(AnyServingSystem):
    """What both ways of transformers share.

    Args:
        max_batch_size: requests of a batch.
    """

    def __init__(self, max_batch_size: int = 64):
        not_below("max_batch_size", max_batch_size, 1)
        self.max_batch_size = max_batch_size

    def unsupported(self, device: str) -> str | None:
        if find_spec("transformers") is None:
            return "transformers is not installed: pip install transformers"
        return None


class ContinuousBatching(TransformersServer):
    """Its `generate_batch`, whose manager takes requests as they come. Its attention is torch's, over a mask of the batch.

    Args:
        max_batch_size: requests of a batch.
        slots: tokens of its cache; 0 leaves the number to it on a GPU.
        max_num_batched_tokens: of an iteration; 0 leaves the number to it.
        cuda_graphs: it captures its iterations.
    """

    name = "transformers_continuous_batching"

    def __init__(self, max_batch_size: int = 64, slots: int = 0, max_num_batched_tokens: int = 0, cuda_graphs: bool = False):
        super().__init__(max_batch_size)
        not_below("slots", slots, 0)
        not_below("max_num_batched_tokens", max_num_batched_tokens, 0)
        self.slots, self.max_num_batched_tokens, self.cuda_graphs = slots, max_num_batched_tokens, cuda_graphs

    def prepare_serving(self, decoder: Decoder) -> PeerServer:
        shape = decoder.shape
        num_slots = self.slots or self.max_batch_size * shape.positions
        bounds = (num_slots, shape.positions, shape.vocabulary)
        return PeerServer(ManagerPeer(decoder, self), bounds)


class ManagerPeer(Peer):
    """A manager of transformers' continuous batching."""

    def __init__(self, decoder: Decoder, options: ContinuousBatching):
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        self.module = causal(decoder)
        names = {field.name for field in fields(ContinuousBatchingConfig)}
        block = min(BLOCK, decoder.shape.positions)
        is_on_cpu = self.module.device.type == "cpu"  # where it would fill the host's memory
        num_slots = options.slots or options.max_batch_size * decoder.shape.positions * is_on_cpu
        chosen: dict[str, Any] = {
            "page_size" if "page_size" in names else "block_size": block,  # its name until 5.17
            "allow_block_sharing": False,
            "use_cuda_graph": options.cuda_graphs,
            "max_requests_per_batch": options.max_batch_size,
            "num_blocks": -(-num_slots // block) or None,
            "max_batch_tokens": options.max_num_batched_tokens or None,
        }
        if missing := sorted(chosen.keys() - names):
            raise Unsupported(f"this transformers has no continuous batching with {missing[0]}: pip install -U transformers")
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=decoder.shape.positions, eos_token_id=NO_STOP, pad_token_id=0
        )
        config = ContinuousBatchingConfig(**chosen)
        self.manager = self.module.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        self.manager.start()
        self.num_delivered: dict[str, int] = {}

    def add(self, request: Request) -> None:
        number = self.manager.add_request(
            list(request.prompt), str(request.id), request.max_new_tokens, streaming=True, eos_token_id=NO_STOP
        )
        if number is None:
            raise PeerFailed("transformers takes no requests any more")
        self.num_delivered[number] = 0

    def take(self) -> list[Delivery]:
        deliveries = []
        output = self.manager.get_result(timeout=WAIT_S)
        if output is None and not self.manager.is_running():
            raise PeerFailed("transformers' continuous batching has stopped")
        while output is not None:
            if output.error:
                raise PeerFailed(f"transformers failed request {output.request_id}: {output.error}")
            new = tuple(output.generated_tokens[self.num_delivered[output.request_id] :])
            self.num_delivered[output.request_id] += len(new)
            if new or output.is_finished():
                deliveries.append(Delivery(int(output.request_id), new, output.is_finished()))
            try:
                output = self.manager.output_router.output_queue.get_nowait()
            except Empty:
                output = None
        return deliveries

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Its attention is another one while it serves; that one is put back."""
        serving = self.module.config._attn_implementation
        self.module.set_attn_implementation("sdpa")
        try:
            return whole_logits(self.module, tokens)
        finally:
            self.module.set_attn_implementation(serving)

    def close(self) -> None:
        self.manager.stop(block=True)


class StaticGenerate(TransformersServer):
    """Its `generate`: the queue's first requests, padded on the left, until the last of them has all its tokens.

    Args:
        max_batch_size: requests of a batch.
    """

    name = "transformers_generate"

    def __init__(self, max_batch_size: int = 8):
        super().__init__(max_batch_size)

    def prepare_serving(self, decoder: Decoder) -> PeerServer:
        shape = decoder.shape
        num_slots = self.max_batch_size * shape.positions
        return PeerServer(GeneratePeer(decoder, self.max_batch_size), (num_slots, shape.positions, shape.vocabulary))


class GeneratePeer(Peer):
    """`generate`, a batch at a time."""

    def __init__(self, decoder: Decoder, max_batch_size: int):
        self.module, self.max_batch_size = causal(decoder), max_batch_size
        self.queue: list[Request] = []

    def add(self, request: Request) -> None:
        self.queue.append(request)

    @torch.inference_mode()
    def take(self) -> list[Delivery]:
        batch, self.queue = self.queue[: self.max_batch_size], self.queue[self.max_batch_size :]
        if not batch:
            return []
        longest = max(len(request.prompt) for request in batch)
        paddings = [longest - len(request.prompt) for request in batch]
        device = self.module.device
        tokens = torch.tensor([[0] * n + [*r.prompt] for n, r in zip(paddings, batch, strict=True)], device=device)
        mask = (torch.arange(longest)[None] >= torch.tensor(paddings)[:, None]).to(device)
        most = max(request.max_new_tokens for request in batch)
        # no token ends a row: each has as many as the longest wants, and those that nobody asked for are dropped
        made = self.module.generate(
            tokens, attention_mask=mask.long(), max_new_tokens=most, do_sample=False, eos_token_id=NO_STOP, pad_token_id=0
        )
        new = made[:, longest:].tolist()
        return [Delivery(r.id, tuple(row[: r.max_new_tokens]), True) for r, row in zip(batch, new, strict=True)]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return whole_logits(self.module, tokens)


def causal(decoder: Decoder) -> PreTrainedModel:
    """Its module with a decoder's weights. Raises Unsupported."""
    assert isinstance(decoder, nn.Module)
    if decoder.start_token is not None:
        raise Unsupported("transformers is measured on decoders alone: an encoder-decoder is for system=orca")
    return as_transformers(decoder)


@torch.inference_mode()
def whole_logits(module: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Of a stream, [S, vocabulary]."""
    weight = next(module.parameters())
    logits: Tensor = module(torch.tensor([list(tokens)], device=weight.device)).logits[0]
    return logits
