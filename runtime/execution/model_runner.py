"""ModelRunner: the model, its cache and one step of work on the device."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from typing import Any

import torch

from sgl_aspects.errors import ConfigError, ModelLoadError, PlatformError
from sgl_aspects.platforms import DeviceEvent, current_platform
from sgl_aspects.platforms.answers import answer_of, class_of, made_by, name_of
from sgl_aspects.runtime.attention.base import AttentionBackend
from sgl_aspects.runtime.attention.registry import choose_attention_backend
from sgl_aspects.runtime.communicator import make_communicator
from sgl_aspects.runtime.core import Batch, ForwardBatch, ForwardMode, SampledTokens
from sgl_aspects.runtime.dispatch import get_manager
from sgl_aspects.runtime.kv_cache import KVCache, ReqToTokenPool, token_bytes
from sgl_aspects.runtime.kv_cache.checks import make_allocator, make_pool
from sgl_aspects.runtime.loader.checkpoint import Checkpoint, open_checkpoint
from sgl_aspects.runtime.loader.model_config import ModelConfig, model_class
from sgl_aspects.runtime.messages import RankLinks, TokenLogprobs
from sgl_aspects.runtime.ops import Operator
from sgl_aspects.runtime.ops.quantization import quantization_config, quantize
from sgl_aspects.runtime.sampling.logit_adjuster import LogitAdjuster
from sgl_aspects.runtime.sampling.sampler import Sampler, token_logprobs
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: The methods that the engine calls on a platform's classes.
_POOL = ("set_kv_buffer", "get_key_buffer", "get_value_buffer")
_ALLOCATOR = ("available_size", "alloc", "free")
_GRAPH_RUNNER = ("capture", "can_run", "replay")


class ModelRunner:
    """Loads the model and makes the cache when it is made; then ``forward`` and ``sample`` once a step."""

    def __init__(self, server_args: ServerArgs, ranks: RankLinks | None = None) -> None:
        ranks = ranks or RankLinks()
        self.server_args = server_args
        self.platform = current_platform
        answer_of(object, self.platform.init_backend)
        self.device: torch.device = answer_of(torch.device, self.platform.get_device, ranks.rank)
        answer_of(object, self.platform.set_device, self.device)
        if server_args.random_seed is not None:
            answer_of(object, self.platform.seed_everything, server_args.random_seed)
        self._check_platform()
        self.communicator = make_communicator(ranks.rank, ranks.world_size, ranks.init_method)
        self.checkpoint = open_checkpoint(str(server_args.model_path))
        self.config = self.checkpoint.config
        name = self.config.dtype if server_args.dtype == "auto" else server_args.dtype
        self.dtype: torch.dtype = getattr(torch, name)
        wanted, most = server_args.context_length, self.config.context_length
        if wanted is not None and wanted > most:
            raise ConfigError(f"context_length={wanted} is more than the {most} that the model was made for")
        self.context_length = wanted or most
        self.load_model()
        self.sampler = Sampler()
        self.logit_adjuster = LogitAdjuster(
            server_args.max_running_requests, self.config.vocab_size, self.config.eos_token_ids, self.device
        )
        self.init_kv_cache()
        self.compile_model()
        self.init_graphs()

    @property
    def page_size(self) -> int:
        return self.server_args.page_size

    def _check_platform(self) -> None:
        """Raise PlatformError for answers that would fail in a later step."""
        if self.platform.is_asynchronous():
            answer_of(DeviceEvent, self.platform.create_event)
        key = answer_of(str, self.platform.get_dispatch_key_name)
        if not key.isidentifier():
            raise PlatformError(
                f"{name_of(self.platform.get_dispatch_key_name)} returned {key!r}, which names "
                f"implementations of operators: letters, digits and _ alone"
            )

    def load_model(self) -> None:
        """Load the model with the checkpoint's weights, ready to run."""
        self.model = self._build_model(self.checkpoint)

    def update_weights(self, model_path: str) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        They are loaded beside the present ones. ModelLoadError if any rank cannot load them: nothing has
        changed then, on any rank.
        """
        failure, model = None, None
        try:
            checkpoint = open_checkpoint(model_path)
            check_same_model(self.config, checkpoint.config, model_path)
            model = self._build_model(checkpoint)
        except Exception as error:  # noqa: BLE001 - any error: the other ranks must get it
            failure = f"{type(error).__name__}: {error}"
        failures = [other for other in self.communicator.gather_objects(failure) if other]
        if not failures:
            self.model, self.checkpoint = model, checkpoint
        # Release the unused one of the two now: the next one may need its memory.
        del model
        gc.collect()  # its layers and their call sites form reference cycles
        self.platform.empty_cache()
        if failures:
            raise ModelLoadError(f"{model_path} was not loaded, the old weights stay: {failures[0]}")
        self.weights_changed()

    def _build_model(self, checkpoint: Checkpoint) -> Any:
        start = time.perf_counter()
        get_manager()  # an invalid setting of operators is reported before weights are read
        method = self.server_args.quantization
        quantization = None if method is None else quantization_config(method, self.platform)
        with self.device, self.platform.inference_mode():
            model = model_class(self.config.architecture)(
                self.config, self.dtype, self.context_length, self.communicator
            )
            model.load_weights(checkpoint.weights())
            model.eval()
            if quantization is not None:
                quantize(model, quantization)
            for module in model.modules():
                if isinstance(module, Operator):
                    module.prepare_weights()
            answer_of(object, self.platform.post_load_model, model)
        self.platform.empty_cache()
        logger.info("loaded %s as %s in %.1f s", checkpoint.path, self.dtype, time.perf_counter() - start)
        return model

    def init_kv_cache(self) -> None:
        """Make pool, allocator and table of slots, of the configured size or of what free memory allows."""
        args, config = self.server_args, self.config
        kind, row = config.kv_kind, config.kv_row(self.communicator.world_size)
        pool_class = class_of(self.platform.get_kv_pool_cls, kind=kind, has=_POOL)
        allocator_class = class_of(self.platform.get_paged_allocator_cls, has=_ALLOCATOR)
        bytes_each = token_bytes(kind, self.dtype, config.num_layers, **row)
        free, _ = answer_of((tuple, list), self.platform.get_available_memory)
        size = args.max_total_tokens
        if size is None:
            # More than every running request at full length could never be used.
            useful = args.max_running_requests * (self.context_length + args.page_size)
            size = min(int(free * args.mem_fraction) // bytes_each, useful)
        size = min(self.communicator.gather_objects(size))  # all ranks have the same pages
        if size < args.page_size or size * bytes_each > free:
            raise ConfigError(
                f"no room for a key-value cache of {max(size, args.page_size)} tokens: {bytes_each} bytes "
                f"each, {free >> 20} MiB free. Lower max_total_tokens, or raise mem_fraction "
                f"({args.mem_fraction})."
            )
        size = size // args.page_size * args.page_size
        self.token_to_kv_pool = make_pool(
            pool_class,
            self.platform.get_kv_pool_cls,
            size=size,
            page_size=args.page_size,
            dtype=self.dtype,
            device=self.device,
            layers=range(config.num_layers),
            **row,
        )
        allocator = make_allocator(
            allocator_class,
            self.platform.get_paged_allocator_cls,
            size,
            page_size=args.page_size,
            dtype=self.dtype,
            device="cpu",  # the scheduler decides on the host
            kvcache=self.token_to_kv_pool,
            need_sort=False,
        )
        self.req_to_token_pool = ReqToTokenPool(
            args.max_running_requests, self.context_length, args.page_size, self.device
        )
        self.attention_backend: AttentionBackend = made_by(
            self.platform.get_attention_backends, choose_attention_backend(args.attention_backend, kind), self
        )
        self.kv_cache = KVCache(
            allocator,
            self.req_to_token_pool,
            self.token_to_kv_pool,
            prefix_cache=args.prefix_cache,
            clears_pages=getattr(self.attention_backend, "reads_unwritten_slots", True),
        )
        logger.info(
            "key-value cache: %d tokens of %d bytes, attention backend %s",
            size,
            bytes_each,
            type(self.attention_backend).__name__,
        )

    def compile_model(self) -> None:
        """Compile the model's layers if configured, by the platform's compiler.

        Attention stays as it is: its backend has kernels of its own, and reads sizes that differ from step
        to step.
        """
        if not self.server_args.compile:
            return
        try:
            compiler = self.platform.get_compile_backend(self.server_args.compile_mode)
        except NotImplementedError as error:
            raise ConfigError(
                f"compile=True: platform {self.platform.device_name!r} has no compiler: {error}"
            ) from error
        attention: Any = self.attention_backend
        attention.forward = torch.compiler.disable(attention.forward)  # type: ignore[no-untyped-call]
        self.model.compile_layers(compiler)

    def init_graphs(self) -> None:
        """Make the platform's graph runner, with its graphs captured; None if there is nothing to capture."""
        self.graph_runner: Any = None
        self._sent_inputs: list[torch.Tensor] = []
        if self.server_args.disable_graphs or not self.platform.support_cuda_graph():
            return
        for part in (self.attention_backend, self.model):
            if not getattr(part, "capturable", False):
                label = self.platform.get_graph_label()
                logger.warning("no %s: %s cannot be captured", label, type(part).__name__)
                return
        self.graph_runner = class_of(self.platform.get_graph_runner_cls, has=_GRAPH_RUNNER)(self)
        self.graph_runner.capture()

    def weights_changed(self) -> None:
        """Renew what was compiled and captured with the old weights; called after a change."""
        self.compile_model()
        if self.graph_runner is not None and self.platform.needs_graph_recapture():
            self.graph_runner.capture()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits [batch_size, vocab_size] for the token after each request's last one."""
        with self.platform.inference_mode():
            if self.graph_runner is not None and self.graph_runner.can_run(batch):
                logits: torch.Tensor = self.graph_runner.replay(batch)
                return logits
            return self.compute_logits(ForwardBatch.of(batch, self.attention_backend, self.req_to_token_pool))

    def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step on the device."""
        self.attention_backend.init_forward_metadata(batch)
        logits: torch.Tensor = self.model(batch)
        return logits

    # -- decode steps whose inputs stay where they are, for graph runners --------------------------------

    def decode_inputs(self, size: int) -> torch.Tensor:
        """Return inputs of a decode step for ``size`` requests, int64 [3, size] on the device: token ids,
        positions, and rows of ``req_to_token``. All are padding, whose row is always empty.
        """
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self.device)
        inputs[2] = self.req_to_token_pool.padding_row
        return inputs

    def write_decode_inputs(self, batch: Batch, inputs: torch.Tensor) -> None:
        """Write the requests of ``batch`` into ``inputs``, padding beyond them, without waiting."""
        padding = [0] * (inputs.shape[1] - batch.batch_size)
        ahead = 0 if batch.follows is None else 1  # the previous step's token is not counted yet
        values = [
            [req.last_token for req in batch.reqs] + padding,
            [req.computed_tokens + ahead for req in batch.reqs] + padding,
            [req.row for req in batch.reqs] + [self.req_to_token_pool.padding_row] * len(padding),
        ]
        pinned = self.platform.is_pin_memory_available()
        host = torch.tensor(values, device="cpu", pin_memory=pinned)
        # The device may still read those of the step before.
        self._sent_inputs = [*self._sent_inputs[-1:], host]
        inputs.copy_(host, non_blocking=True)
        if batch.follows is not None:
            inputs[0, : batch.batch_size].copy_(batch.follows.on_device)

    def decode(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [size, vocab_size] of the step with these inputs: the work to capture. Everything
        that changes from step to step is read from ``inputs``, on the device.
        """
        token_ids, positions, rows = inputs.unbind(0)
        size = len(token_ids)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=token_ids,
            positions=positions,
            req_pool_indices=rows,
            num_decodes=size,
            num_new_tokens=[1] * size,
            lengths=[self.context_length] * size,  # the worst case: the real ones are on the device
            attention_backend=self.attention_backend,
            req_to_token_pool=self.req_to_token_pool,
        )
        return self.compute_logits(batch)

    # -- one step --------------------------------------------------------------------------------------

    def can_follow(self, batch: Batch) -> bool:
        """Return whether a step can begin before the host has the tokens of ``batch``, the previous step."""
        return (
            self.platform.is_asynchronous()
            and not self.server_args.disable_overlap
            and self.graph_runner is not None
            and self.graph_runner.can_run(batch)
        )

    def sample(self, logits: torch.Tensor, batch: Batch) -> SampledTokens:
        """Sample one token per request; undefined for requests that ``batch.samples`` excludes.

        Rank 0 chooses, and broadcasts to the others.
        """
        with self.platform.inference_mode():
            if self.communicator.rank > 0:
                tokens = torch.empty(len(batch.reqs), dtype=torch.int64, device=self.device)
            else:
                tokens = self._choose_tokens(logits, batch)
            return SampledTokens(self.communicator.broadcast(tokens), self.platform)

    def _choose_tokens(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        params = [req.sampling_params for req in batch.reqs]
        # A greedy request, or an incomplete prompt, draws nothing: its sequence is not advanced.
        uniforms = [
            req.random.random() if sampling and not req.sampling_params.is_greedy else 0.0
            for req, sampling in zip(batch.reqs, batch.samples)
        ]
        adjusted = self.logit_adjuster(logits, batch.reqs, batch.samples)
        return self.sampler(adjusted, params, uniforms)

    def logprobs(
        self, logits: torch.Tensor, token_ids: list[int], batch: Batch
    ) -> list[TokenLogprobs | None]:
        """Return log probabilities for each request that needs them, before penalties and temperature."""
        with self.platform.inference_mode():
            return token_logprobs(logits, token_ids, [req.sampling_params.logprobs for req in batch.reqs])


def check_same_model(present: ModelConfig, new: ModelConfig, path: str) -> None:
    """Raise a ModelLoadError that names the differences. The type of the weights may differ."""
    differing = [
        f"{field.name} ({getattr(new, field.name)!r} instead of {getattr(present, field.name)!r})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in ("dtype", "eos_token_ids")
        and getattr(new, field.name) != getattr(present, field.name)
    ]
    if differing:
        raise ModelLoadError(f"{path} is another model: its config differs in {', '.join(differing)}")
