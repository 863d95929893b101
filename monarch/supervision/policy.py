"""What a supervisor decides when a child has ended: a table, a window, and a function. No clocks, no processes.

The rules are those of OTP's supervisor(3), with two differences. An end on purpose is one thing here (OTP tells
`normal` from `shutdown`, and treats them alike). A child that has ended for good stays down also when its siblings are
restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final

from attrs import define, field


class Restart(Enum):
    """When a child is started again after its end."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class Strategy(Enum):
    """Who is restarted along with a child."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Exit(Enum):
    """How a child ended: on purpose, or not."""

    NORMAL = 0
    FAILED = 1


@define(frozen=True)
class Rule:
    """What the policy must know of a child."""

    name: str
    restart: Restart = Restart.PERMANENT


@define(frozen=True)
class Start:
    """Start the child, as its incarnation number `incarnation`; answer with `up` or `gone`."""

    name: str
    incarnation: int


@define(frozen=True)
class Stop:
    """Stop that incarnation of the child, whatever it takes; answer with `gone`."""

    name: str
    incarnation: int


@define(frozen=True)
class Forget:
    """The child has ended for good."""

    name: str
    reason: str


@define(frozen=True)
class Escalate:
    """The supervisor gives up, because of that child: fail it, then `shut_down`."""

    name: str
    reason: str


Action = Start | Stop | Forget | Escalate

_RESTARTS: Final = {  # by Exit: NORMAL, FAILED. Source: OTP supervisor(3), child specification
    Restart.PERMANENT: (True, True),
    Restart.TRANSIENT: (False, True),
    Restart.TEMPORARY: (False, False),
}


def restarts(restart: Restart, exit: Exit) -> bool:
    """Whether a child of that kind is started again after such an end."""
    return _RESTARTS[restart][exit.value]


@define
class Window:
    """How often restarts may happen: `limit` within any `period_s` seconds. Source: OTP supervisor(3), intensity."""

    limit: int
    period_s: float
    _admitted_s: deque[float] = field(factory=deque, init=False)

    def admit(self, now_s: float) -> bool:
        """Whether one more restart is allowed now; counts it if so."""
        while self._admitted_s and self._admitted_s[0] <= now_s - self.period_s:
            self._admitted_s.popleft()
        if len(self._admitted_s) >= self.limit:
            return False
        self._admitted_s.append(now_s)
        return True

    def __str__(self) -> str:
        return f"{self.limit} restart{'' if self.limit == 1 else 's'} within {self.period_s:g} s"


def group_of(strategy: Strategy, children: Sequence[Rule], dead: Rule) -> Sequence[Rule]:
    """The children that a restart of `dead` concerns, itself included, in the order of starts."""
    at = children.index(dead)
    if strategy is Strategy.ONE_FOR_ONE:
        return children[at : at + 1]
    return children if strategy is Strategy.ONE_FOR_ALL else children[at:]


@define(frozen=True)
class Verdict:
    """What follows from one end.

    Attributes:
        group: whom a restart concerns, oldest first; empty when there is none.
        forget: the child stays down, and that is all.
        escalate: why the supervisor gives up, or "".
    """

    group: Sequence[Rule] = ()
    forget: bool = False
    escalate: str = ""


def decide(
    strategy: Strategy, children: Sequence[Rule], dead: Rule, exit: Exit, window: Window, now_s: float
) -> Verdict:
    """The verdict on one end. Counts in `window`."""
    if not restarts(dead.restart, exit):
        return Verdict(forget=True)
    if not window.admit(now_s):
        return Verdict(escalate=f"restart intensity reached, {window}")
    return Verdict(group=group_of(strategy, children, dead))
