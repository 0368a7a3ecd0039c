"""Jobs of `cspd serve` by Ray Serve whose engines die, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from cspd.request import Request

pytest.importorskip("ray")

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cspd.serving.loop import CLOSING, Closing
from cspd.serving.ray_serve import Replicas

HANGS = 30.0  # seconds after which a client would wait in vain


class Engines:
    """A handle of engines that give some events, and then raise an error, or wait, or end."""

    def __init__(self, *events, error=None, waits=False):
        self.generate = self
        self.events, self.error, self.waits = events, error, waits

    def options(self, stream):
        return self

    def remote(self, *arguments):
        return Response(self)


class Response:
    def __init__(self, engines):
        self.engines = engines

    async def __aiter__(self):
        for event in self.engines.events:
            yield dict(event)
        if self.engines.error is not None:
            raise self.engines.error
        if self.engines.waits:
            await asyncio.sleep(2 * HANGS)

    def cancel(self):
        """The engine would end the request."""


def ask(replicas, told):
    """Two requests: the future of the advice on them; their events are added to `told`."""
    _, advice = replicas.add("a client", "a model", [Request(1), Request(2)], [told.append, told.append])
    return asyncio.wait_for(asyncio.wrap_future(advice), HANGS)


FAILURES = [Engines(error=RayError("dead")), Engines(error=RayServeException("unavailable")), Engines()]


@pytest.mark.parametrize("engines", FAILURES, ids=["dead", "unavailable", "silent"])
def test_no_client_waits_for_an_engine_that_is_gone(engines):
    """Before the requests are accepted they are refused, later they end in an error. There is room for others."""

    async def ask_both():
        replicas, told = Replicas(engines, most=2, most_each=2), []
        with pytest.raises(RuntimeError, match="the engine failed"):
            await ask(replicas, told)
        assert not replicas.jobs and not told
        engines.events = {"request": Request(1)}, {"advice": None}
        assert await ask(replicas, told) == [None, None]
        await asyncio.wait_for(until(lambda: not replicas.jobs), HANGS)
        assert len(told) == 2 and all("the engine failed" in event["error"] for event in told)

    asyncio.run(ask_both())


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0.01)


def test_a_front_that_closes_answers_everybody():
    async def close_twice():
        told = []
        replicas = Replicas(Engines(waits=True), most=2, most_each=2)
        waiting = asyncio.ensure_future(ask(replicas, told))
        await asyncio.sleep(0.05)
        replicas.close()
        with pytest.raises(Closing):
            await waiting
        assert not told
        replicas = Replicas(Engines({"request": Request(1)}, {"advice": None}, waits=True), most=2, most_each=2)
        assert await ask(replicas, told) == [None, None]
        replicas.close()
        await asyncio.wait_for(until(lambda: not replicas.jobs), HANGS)
        assert [event["error"] for event in told] == [CLOSING] * 2

    asyncio.run(close_twice())
