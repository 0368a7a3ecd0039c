"""The engine: takes requests, runs rounds over everything in flight, hands out finished images."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cspd import noise as philox_noise
from cspd.calibration import Calibrations, user_cache
from cspd.continuous.host import MARHost
from cspd.costs import Costs, measured_costs
from cspd.methods import METHODS
from cspd.precision import Precision, Stopwatch
from cspd.scheduler import Scheduler
from cspd.sequence import Output, Request, RoundStats, Sequence
from cspd.validation import check_memory, check_models, pick_device, resolve
from mar.model import MAR
from mar.registry import defaults_of
from mar.vae import AutoencoderKL

BAR_FORMAT = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"
DECODE_BATCH = 8  # images through the autoencoder at once, which bounds its memory


class Engine:
    """Generates images with a target model, many requests at a time.

    `max_batch` sequences are in flight at once; a finished one is replaced at the next step. A request's image
    depends on the request alone, not on what else is in flight.

    Args:
        target: the model whose images are made; its published sampling settings are the requests' defaults. All models
            are moved to the device, put in eval mode and frozen, in place.
        draft: a smaller model of the same tokens, for methods that draft.
        vae: the autoencoder of the target's latents; without it outputs have tokens and no image.
        max_batch: slots; memory grows with them, not with the number of requests.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "fp32", "tf32" or "bf16", see `cspd.precision.POLICIES`.
        compiled: run speculative rounds through torch.compile: half a minute on first use, then faster.
        cache: where calibrations are kept, before the user's cache directory.
        noise: the source of randomness, see `cspd.noise`; replaced in tests that inject noise.

    Raises:
        ValueError: models that do not fit each other, no such device, unknown precision, or too little memory.
    """

    def __init__(
        self,
        target: MAR,
        draft: MAR | None = None,
        vae: AutoencoderKL | None = None,
        *,
        max_batch: int = 8,
        device: str | torch.device = "auto",
        precision: str = "fp32",
        compiled: bool = False,
        cache: Path | None = None,
        noise: types.ModuleType = philox_noise,
    ) -> None:
        check_models(target, draft, vae)
        self.device = pick_device(device)
        self.precision = Precision(precision, self.device)
        self.defaults = defaults_of(target.config)
        self.target, self.draft, self.vae = (
            model if model is None else model.to(self.device).eval().requires_grad_(False)
            for model in (target, draft, vae)
        )
        check_memory(target, max_batch, self.defaults.num_iter, self.device)
        self._cache = cache
        folders = [folder for folder in (cache, user_cache()) if folder]
        self.calibrations = {
            name: Calibrations(model, self.device, self.precision, folders)
            for name, model in (("target", self.target), ("draft", self.draft))
            if model is not None
        }
        self.host = MARHost(
            self.target,
            max_batch,
            self.device,
            self.precision,
            noise,
            draft=self.draft,
            calibrations=self.calibrations,
            compiled=compiled,
        )
        self.scheduler = Scheduler(max_batch)
        self._least_iter = self.defaults.num_iter
        self._tickets = 0
        self._streaming = False
        self._costs: dict[bool, Costs] = {}
        self._windows: dict[Request, int] = {}

    def with_slots(self, max_batch: int) -> Engine:
        """Another engine over the same models."""
        engine = Engine(
            self.target,
            self.draft,
            self.vae,
            max_batch=max_batch,
            device=self.device,
            precision=self.precision.policy,
            compiled=self.host.compiled,
            cache=self._cache,
            noise=self.host.noise,
        )
        engine.calibrations = engine.host.calibrations = self.calibrations
        engine._costs = self._costs
        return engine

    def resolve(self, request: Request) -> Request:
        """The request with every default filled in, checked. Raises ValueError on a bad one.

        The window is chosen here, which calibrates the draft where that was not done before.
        """
        request = resolve(request, self.target.config, self.defaults)
        self.check_draft(request)
        method = METHODS[request.method]
        if "window" in method.options and request.window is None:
            kind = dataclasses.replace(request, label=0, seed=0)
            if kind not in self._windows:
                self._windows[kind] = self._window(request)
            request = dataclasses.replace(request, window=self._windows[kind])
        if request.num_iter < self._least_iter:  # more tokens an iteration than memory was checked for
            check_memory(self.target, self.host.num_slots, request.num_iter, self.device)
            self._least_iter = request.num_iter
        return request

    def check_draft(self, request: Request) -> None:
        """Raises ValueError where a method needs a draft model and there is none."""
        if METHODS[request.method].needs == "draft model" and self.draft is None:
            raise ValueError(
                f"method={request.method!r} needs a draft model and this engine has none: Engine(target, draft=...),"
                " load(..., draft=file), or --draft-checkpoint on the command line"
            )

    def costs(self, guided: bool, again: bool = False) -> Costs:
        """The head's costs on this device, measured on first use or `again`; kept in the user's cache directory."""
        if guided not in self._costs or again:
            self._costs[guided] = measured_costs(
                self.target.head, guided, self.device, self.precision, self.host.compiled, user_cache(), again
            )
        return self._costs[guided]

    def _window(self, request: Request) -> int:
        """The fastest window for what is known of the request and the engine: not what else is in flight."""
        if request.temperature == 0 or request.num_sampling_steps < 3:  # no densities, or nothing to draft
            return 0
        if request.chains == "ancestral":
            return 0
        tokens = request.gamma or self.target.config.seq_len / request.num_iter  # of an iteration, of one sequence
        rows = self.host.num_slots * tokens
        calibration = self.calibrations["target"].get(request)
        return self.costs(request.guided).window(request.num_sampling_steps, rows, calibration)

    def add_request(self, request: Request) -> int:
        """Queues a request and returns its ticket.

        Raises:
            ValueError: a bad request; it harms no other. RuntimeError: a stream has the engine to itself.
        """
        if self._streaming:
            raise RuntimeError("a stream has the engine to itself: finish it first, or give it the request")
        return self._queue(request)

    def _queue(self, request: Request) -> int:
        request = self.resolve(request)
        ticket = self._tickets
        self._tickets += 1
        stats = RoundStats(guarantee=METHODS[request.method].guarantee)
        self.scheduler.add(Sequence(request, ticket, stats=stats))
        return ticket

    @torch.inference_mode()
    def step(self) -> dict[int, Output]:
        """Runs one round of one kind of request and returns what it finished, by ticket.

        An error or interruption in a round drops all requests in flight.
        """
        watch = Stopwatch(self.device)
        admitted = self.scheduler.admit()
        if admitted:
            self.host.admit(admitted)
        batch = self.scheduler.next()
        if not batch:
            return {}
        try:
            finished = METHODS[batch[0].request.method].round(self.host, batch, watch)
        except BaseException:  # cut off in the middle of a round, its state is no one's any more
            self.scheduler.clear()
            self.host.clear()
            raise
        tokens, heat = self.host.results(finished)
        self.scheduler.release(finished)
        outputs = self._outputs(finished, tokens, heat, watch)
        seconds = watch.seconds()
        for sequence in batch:
            for phase, spent in seconds.items():
                sequence.stats.seconds[phase] += spent
        return outputs

    def stream(self, requests: Iterable[Request], progress: bool = False) -> Iterator[tuple[int, Output]]:
        """Yields (index of the request, output) as requests finish; `progress` shows a bar that counts images.

        `requests` may be endless: it is read as slots become free, so that no queue grows. A stream that is left early
        takes its requests out of the engine.

        Raises:
            ValueError: at a bad request, when it is read; those read before are finished first.
            RuntimeError: other requests are in flight.
        """
        if self._streaming or len(self.scheduler):
            raise RuntimeError(f"{len(self.scheduler)} requests are in flight: finish them, or the other stream, first")
        self._streaming = True
        source, index_of, error, finished = enumerate(requests), {}, None, 0
        total = len(requests) if isinstance(requests, Sized) else None
        bar = tqdm(total=total, unit="image", bar_format=BAR_FORMAT if total else None, disable=not progress)
        try:
            while True:
                while source and len(self.scheduler) < self.host.num_slots:
                    try:
                        index, request = next(source)
                        index_of[self._queue(request)] = index
                    except StopIteration:
                        source = None
                    except ValueError as bad:
                        error, source = bad, None
                if not index_of:
                    break
                outputs = self.step()
                finished += len(outputs)
                bar.n = finished + self.scheduler.tokens_in_flight() / self.target.config.seq_len
                bar.update(0)
                for ticket, output in outputs.items():
                    yield index_of.pop(ticket), output
        finally:
            bar.close()
            self.scheduler.clear()
            self.host.clear()
            self._streaming = False
        if error:
            raise error

    def generate(self, requests: list[Request], progress: bool = False) -> list[Output]:
        """The outputs of all requests, in their order; `progress` shows a bar.

        Raises:
            ValueError: before any work, naming every bad request.
        """
        bad = []
        for index, request in enumerate(requests):
            try:
                self.resolve(request)
            except ValueError as error:
                bad.append(f"request {index}: {error}")
        if bad:
            raise ValueError("; ".join(bad))
        outputs = dict(self.stream(requests, progress))
        return [outputs[index] for index in range(len(requests))]

    def _outputs(self, finished: list[Sequence], tokens: Tensor, heat: Tensor, watch: Stopwatch) -> dict[int, Output]:
        if not finished:
            return {}
        watch.start("decode")
        images = self.decode(tokens)
        watch.start("other")
        tokens, heat = tokens.cpu(), heat.cpu()
        with torch.inference_mode(False):  # copies that are ordinary tensors and do not hold the batch
            return {
                s.ticket: Output(
                    s.request,
                    tokens[i].clone(),
                    None if images is None else images[i].clone(),
                    heat[i].clone(),
                    s.stats,
                )
                for i, s in enumerate(finished)
            }

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 on the CPU of tokens [B, L, d]; None without autoencoder."""
        if self.vae is None:
            return None
        latents = self.target.unpatchify(tokens) / self.vae.config.scale
        with self.precision.full():
            images = torch.cat([self.vae.decode(part) for part in latents.split(DECODE_BATCH)])
        return images.add(1).div(2).clamp(0, 1).cpu()
