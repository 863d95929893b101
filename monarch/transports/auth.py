"""Who may connect, sans-IO: a mutual proof that both ends know the job's secret.

Decides by whom a byte may be sent to the layers above; leaves sockets, deadlines and how many newcomers there may be to
the listeners.

```
both      magic (8) version (u16) nonce (32)        the dialer at once, the acceptor when it has heard something
acceptor  HMAC-SHA256(secret, "acceptor" + version + dialer's nonce + acceptor's nonce)
dialer    HMAC-SHA256(secret, "dialer" + ...)       only after the acceptor's proof was good
```

The secret never travels. Nonces make a recorded handshake worthless, and the role in the proof keeps a stranger from
sending ours back to us. One who squats an address learns nothing. The bytes after the handshake are not encrypted: it
tells friends from strangers, it does not protect against someone who can change packets on their way, or who stands
between two friends and passes their handshake on.
"""

from __future__ import annotations

import hmac
import os
from struct import Struct
from typing import Final, Literal

from monarch.errors import AuthenticationError, RemoteProtocolError

Role = Literal["dialer", "acceptor"]

MAGIC: Final = b"MONARCH\n"
VERSION: Final = 1

_HELLO: Final = Struct("!8sH32s")
_VERSION_END: Final = len(MAGIC) + 2
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_STRANGER: Final = (
    "the peer does not know this job's secret: it belongs to another job or user, or MONARCH_SECRET_FILE "
    "(or MONARCH_SECRET) is not the same on both sides"
)


class Handshake:
    """One end of one handshake. Send `greeting`, then feed what arrives and send what `feed` returns, until `done`.

    Ask the socket for no more than `missing_bytes`: then everything after the handshake is left for the link.
    """

    def __init__(self, role: Role, secret: bytes, nonce: bytes | None = None) -> None:
        if not secret:
            raise ValueError("the job's secret is empty: anybody would know it")
        self._role: Role = role
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES) if nonce is None else nonce
        self._peer_nonce: bytes | None = None
        self._pending = b""
        self.greeting: bytes = _HELLO.pack(MAGIC, VERSION, self._nonce)
        self.done = False

    def ended(self) -> None:
        """The peer closes the connection, as a dialer does who finds that our proof is not good.

        Raises:
            AuthenticationError: it has seen our proof.
        """
        if self._role == "acceptor" and self._peer_nonce is not None:
            raise AuthenticationError(_STRANGER)

    @property
    def missing_bytes(self) -> int:
        """How much has to arrive before the next step; 0 once done."""
        if self.done:
            return 0
        return (_HELLO.size if self._peer_nonce is None else _PROOF_BYTES) - len(self._pending)

    def feed(self, data: bytes) -> bytes:
        """Take in at most `missing_bytes` and return what is to be sent now, maybe nothing.

        Raises:
            AuthenticationError: the peer does not know the secret.
            RemoteProtocolError: whoever this is, it does not speak our protocol, or another version of it.
        """
        if len(data) > self.missing_bytes:
            raise RemoteProtocolError(f"{len(data)} bytes during the handshake, expected {self.missing_bytes}")
        self._pending += data
        if self._peer_nonce is None:
            self._check_hello()
            if self.missing_bytes:
                return b""
            self._peer_nonce = self._pending[_VERSION_END:]
            self._pending = b""
            return self._proof("acceptor") if self._role == "acceptor" else b""
        if self.missing_bytes:
            return b""
        other: Role = "acceptor" if self._role == "dialer" else "dialer"
        if not hmac.compare_digest(self._pending, self._proof(other)):
            raise AuthenticationError(_STRANGER)
        self.done = True
        return self._proof("dialer") if self._role == "dialer" else b""

    def _check_hello(self) -> None:
        """As early as the bytes are there: a peer of another version may have a hello of another length."""
        if not MAGIC.startswith(self._pending[: len(MAGIC)]):
            raise RemoteProtocolError(f"the peer does not speak monarch's protocol (it sent {self._pending[:8]!r})")
        if len(self._pending) >= _VERSION_END:
            version = int.from_bytes(self._pending[len(MAGIC) : _VERSION_END], "big")
            if version != VERSION:
                raise RemoteProtocolError(
                    f"the peer speaks version {version} of monarch's protocol, this process version {VERSION}: "
                    "install the same release of monarch on both sides"
                )

    def _proof(self, role: Role) -> bytes:
        assert self._peer_nonce is not None
        nonces = (self._nonce, self._peer_nonce) if self._role == "dialer" else (self._peer_nonce, self._nonce)
        return hmac.digest(
            self._secret, b"".join((role.encode(), b"\0", VERSION.to_bytes(2, "big"), *nonces)), "sha256"
        )
