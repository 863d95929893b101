"""Who is called what. The creator of a thing names it, at once, without asking anybody.

A process is its `Uid`, and where to ask for it: its own `address`, or its `keeper`, the process that launched it and
knows where it listens and, later, how it ended. An actor is a process plus a number, a port an actor plus a number.
On the wire only the numbers travel (`ProcId.key`, `ActorId.number`); names are for people.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final

from attrs import define, field

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_random = random.SystemRandom()


def new_number() -> int:
    """A 63-bit number that nobody else will draw."""
    return _random.getrandbits(63) | 1


def base58(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return digits or _ALPHABET[0]


def from_base58(text: str) -> int:
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise ValueError(f"{text!r} is not a base 58 number: {character!r} is no digit of it")
        number = number * 58 + digit
    return number


@define(frozen=True)
class Uid:
    """A name in the world: a label (a singleton), a random number, or both (an instance of a label).

    Text forms: `label`, `label-<base 58>`, `-<base 58>`.
    """

    label: str = ""
    number: int = 0

    @classmethod
    def anonymous(cls) -> Uid:
        """Without a label, and unlike any other."""
        return cls("", new_number())

    @classmethod
    def instance(cls, label: str) -> Uid:
        """Of that label, and unlike any other."""
        return cls(label, new_number())

    @classmethod
    def singleton(cls, label: str) -> Uid:
        """Equal to every other singleton of that label."""
        return cls(label, 0)

    @classmethod
    def from_string(cls, text: str) -> Uid:
        """Raises: ValueError when `text` is none of the text forms."""
        label, dash, number = text.rpartition("-")
        if not dash:
            if not text:
                raise ValueError("an empty text is no uid")
            return cls.singleton(text)
        if not number or not from_base58(number):
            raise ValueError(f"{text!r} is no uid: there is no number behind the dash")
        return cls(label, from_base58(number))

    @property
    def is_singleton(self) -> bool:
        """Whether it is a label alone."""
        return self.number == 0

    @property
    def is_instance(self) -> bool:
        """Whether it has a number, and so is unlike any other."""
        return self.number != 0

    def __str__(self) -> str:
        return self.label if self.is_singleton else f"{self.label}-{base58(self.number)}"


@define(frozen=True)
class ProcId:
    """A process. Two ids are equal when they name the same process, however it is reached.

    Attributes:
        address: where its gateway listens; "" for a process whose creator could not know that.
        keeper: the process that launched it; None for one that was not launched by another.
    """

    uid: Uid
    address: str = field(default="", eq=False)
    keeper: ProcId | None = field(default=None, eq=False)

    @property
    def key(self) -> int:
        """The 64-bit number that stands for this process on the wire."""
        if self.uid.number:
            return self.uid.number
        return int.from_bytes(hashlib.blake2b(self.uid.label.encode(), digest_size=8).digest(), "little") | 1 << 63

    @classmethod
    def from_string(cls, text: str) -> ProcId:
        """The inverse of `str()`: `uid`, `uid@address`, or `uid@keeper`, where a keeper is a process in turn."""
        name, _, where = text.partition("@")
        uid = Uid.from_string(name.replace("%40", "@").replace("%25", "%"))
        if where and "://" not in where.partition("@")[0]:
            return cls(uid, "", cls.from_string(where))
        return cls(uid, where)

    def __str__(self) -> str:
        name = str(self.uid).replace("%", "%25").replace("@", "%40")
        if self.keeper is not None:
            return f"{name}@{self.keeper}"
        return f"{name}@{self.address}" if self.address else name


@define(frozen=True)
class ActorId:
    """An actor: a process, and a number that its creator drew. `name` is for people."""

    proc: ProcId
    number: int
    name: str = field(default="", eq=False)

    def __str__(self) -> str:
        return f"{self.proc.uid}.{self.name}-{base58(self.number)}"


@define(frozen=True)
class PortId:
    """A typed address inside an actor."""

    actor: ActorId
    number: int

    def __str__(self) -> str:
        return f"{self.actor}[{self.number}]"
