"""Two actors in two processes throw a ball back and forth, without the driver in between.

python examples/ping_pong.py
"""

from __future__ import annotations

import time

from monarch.actor import Actor, Channel, Port, endpoint, this_host


class Player(Actor):
    """Returns every ball to the other player, until it has been thrown often enough."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.other: Player | None = None
        self.seen = 0

    @endpoint
    def meet(self, other: Player) -> str:
        """Remember whom to throw to. What arrives is a reference to an actor in another process."""
        self.other = other
        return f"{self.name} is ready"

    @endpoint
    def throw(self, ball: int, last: int, finished: Port[str]) -> None:
        """Take the ball; throw it on with `broadcast`, which waits for nothing."""
        self.seen += 1
        if ball == last:
            finished.send(f"{self.name} caught ball {ball}")
        else:
            assert self.other is not None
            self.other.throw.broadcast(ball + 1, last, finished)

    @endpoint
    def score(self) -> tuple[str, int]:
        return self.name, self.seen


def main(balls: int = 2000) -> None:
    # One mesh of two processes, and an actor in each: slices pick the process.
    table = this_host().spawn_procs(per_host={"side": 2})
    ping = table.slice(side=0).spawn("ping", Player, "Ping")
    pong = table.slice(side=1).spawn("pong", Player, "Pong")
    print(ping.meet.call_one(pong).get())
    print(pong.meet.call_one(ping).get())

    # The players tell us through a port when they have finished.
    port, finished = Channel[str].open()
    begun = time.perf_counter()
    ping.throw.broadcast(1, balls, port)
    print(finished.recv().get(timeout=60))
    took_s = time.perf_counter() - begun
    print(f"{balls} throws, {took_s / balls * 1e6:.0f} microseconds each")

    for player in (ping, pong):
        name, seen = player.score.call_one().get()
        print(f"{name} had the ball {seen} times")

    table.stop().get()


if __name__ == "__main__":
    main()
