"""Jobs of `cspd serve` by Ray Serve whose engines die, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from cspd.request import Request

pytest.importorskip("ray")

from ray.exceptions import RayError

from cspd.serving.ray_serve import Replicas


class Dead:
    """A handle of engines that die at once."""

    generate: Dead

    def options(self, stream):
        return self

    async def remote(self, *arguments):
        raise RayError("dead")
        yield


Dead.generate = Dead()


def test_images_of_dead_engines_leave_room_for_others():
    async def ask_twice():
        replicas = Replicas(Dead(), most=2, most_each=2)
        for _ in range(2):
            _, advice = replicas.add("a client", "a model", [Request(1), Request(2)], [print, print])
            with pytest.raises(RuntimeError, match="dead"):
                await asyncio.wrap_future(advice)
            assert not replicas.jobs

    asyncio.run(ask_twice())
