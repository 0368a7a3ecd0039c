"""What is in flight: requests of any number of threads, which take turns to run its rounds.

What becomes of a request goes to the inbox of who gave it, whoever runs the round: (sequence, its Output), or what
failed, or None where it was cancelled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

import torch
from PIL import Image

from cspd.finishing import Finisher
from cspd.lookup import method_of
from cspd.method import Host
from cspd.precision import Stopwatch
from cspd.scheduler import Scheduler
from cspd.sequence import Output, Sequence
from cspd.turns import Turns


class Flight:
    """Requests in flight over the hosts of an engine. All that changes anything is for who has the turn.

    Attributes:
        turns: of the threads. hosts: by family. scheduler, finisher: of the sequences that run, and of their images.
    """

    def __init__(self, hosts: Mapping[str, Host], num_slots: int, device: torch.device) -> None:
        self.hosts, self.device = hosts, device
        self._lengths = {family: host.seq_len for family, host in hosts.items()}  # told after the engine is closed too
        self.turns = Turns()
        self.scheduler = Scheduler(num_slots)
        self.finisher = Finisher(device)
        self._tickets = itertools.count()
        self._cancelled: set[Sequence] = set()  # their slots are not free yet

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence and gives it its ticket."""
        sequence.ticket = next(self._tickets)
        self.scheduler.add(sequence)

    @torch.inference_mode()
    def run_round(self, on_decoded: Callable[[int], object] = lambda count: None) -> None:
        """Runs one round of one kind of request; what is finished goes to inboxes. `on_decoded`: as of `Finisher.add`.

        An error or interruption drops everything in flight.
        """
        watch = Stopwatch(self.device)
        try:
            self._free_cancelled()
            admitted = self.scheduler.admit()
            for family, host in self.hosts.items():
                host.admit([sequence for sequence in admitted if sequence.request.family == family])
            batch = self.scheduler.next()
            if batch:
                self._run(batch, watch, on_decoded)
            for sequence, output in self.finisher.ready(wait=not len(self.scheduler)):
                sequence.inbox.append((sequence, output))
        except BaseException as error:  # cut off in the middle of a round, its state is no one's any more
            self.drop(error)
            raise

    def _run(self, batch: list[Sequence], watch: Stopwatch, on_decoded: Callable[[int], object]) -> None:
        method, key = method_of(batch[0].request), batch[0].key
        host = self.hosts[method.family]
        finished = method.run_round(host, batch, watch)
        watch.stop()
        self.finisher.add_round(batch, watch)
        for sequence in batch:
            if len(sequence.reached) < sequence.iteration:
                sequence.reached.append(sequence.num_started)
        self.scheduler.release(finished)
        if len(finished) == len(batch):
            host.forget(key)
        # one whose chains were under way as it was cancelled can end its last iteration nevertheless
        if wanted := [sequence for sequence in finished if sequence not in self._cancelled]:
            self.finisher.add(host, wanted, on_decoded)

    def cancel(self, sequences: Collection[Sequence]) -> None:
        """Takes sequences out that are not finished. Slots that work under way will write to are free a round later."""
        going = [sequence for sequence in sequences if sequence in self.scheduler and sequence not in self._cancelled]
        self._cancelled.update(going)
        for sequence in going:
            sequence.inbox.append((sequence, None))
        self._free_cancelled()

    def _free_cancelled(self) -> None:
        for key, batch in list(self.scheduler.running.items()) if self._cancelled else ():
            if self._cancelled.issuperset(batch):  # what is under way is theirs alone
                self.hosts[str(batch[0].request.family)].forget(key)
                self.scheduler.release(list(batch))
        for sequence in list(self._cancelled):
            if sequence in self.scheduler and not sequence.num_under_way:
                self.scheduler.cancel(sequence)
            if sequence not in self.scheduler:
                self._cancelled.remove(sequence)

    def drop(self, why: BaseException) -> None:
        """Drops everything in flight."""
        dropped = [*self.unfinished(), *self.finisher.sequences()]
        self.scheduler.clear()
        self.finisher.clear()
        self._cancelled.clear()
        for host in self.hosts.values():
            host.clear()
        for sequence in dropped:
            sequence.inbox.append((sequence, why))

    def unfinished(self) -> list[Sequence]:
        """The sequences that wait or run."""
        return [*self.scheduler.waiting, *self.scheduler.in_flight()]

    def seq_len(self, sequence: Sequence) -> int:
        """How many tokens a sequence will have."""
        return self._lengths[str(sequence.request.family)]

    def share(self, sequence: Sequence) -> float:
        """The share of those that it makes that is committed, in 0..1."""
        return sequence.share_made(self.seq_len(sequence))

    def preview(self, sequence: Sequence) -> Image.Image | None:
        """A picture of a running sequence's committed tokens; None if it does not run, or has no image."""
        with self.turns.take():
            if sequence not in self.scheduler.in_flight():
                return None
            (output,) = so_far(self.hosts[str(sequence.request.family)], [sequence])
        return None if output.image is None else output.pil()


@torch.inference_mode()
def so_far(host: Host, sequences: list[Sequence]) -> list[Output]:
    """What is committed by now of running sequences of a host, as outputs; for who has the turn.

    Heat is NaN where a token is yet to be made. On a GPU some statistics are a few rounds late.
    """
    tokens, heat = (torch.cat(each) for each in zip(*map(host.so_far, sequences)))
    images = host.decode(tokens)
    shown = [None] * len(sequences) if images is None else images.nan_to_num().cpu()
    outputs = []
    for sequence, *own in zip(sequences, tokens.cpu(), shown, heat.cpu()):
        outputs.append(Output(sequence.request, *own, sequence.stats, class_name=sequence.class_name))
    return outputs
