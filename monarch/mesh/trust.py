"""The secret that the hosts of a job share: where it comes from, and when there may be none.

It is the content of the file that `MONARCH_SECRET_FILE` names, or the text of `MONARCH_SECRET`. Where there is neither,
connections that stay on this host prove a secret that is this user's own, in a file that nobody else can read; it is
made at first use. Beyond this host nothing is opened without a secret, unless `MONARCH_INSECURE=1` says that whoever
can connect may run code here.

Secrets are no settings: they are never shown, logged, or handed on with the configuration. The files of certificates
for TLS are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from typing import Final

from attrs import evolve

from monarch.core import settings
from monarch.core.address import EVERYWHERE, domain_of
from monarch.errors import AuthenticationError
from monarch.log import get_logger
from monarch.transports import certificates
from monarch.transports.certificates import Certificates
from monarch.transports.url import parse

log = get_logger("monarch.trust")

FILE_VARIABLE: Final = "MONARCH_SECRET_FILE"
VARIABLE: Final = "MONARCH_SECRET"
INSECURE_VARIABLE: Final = "MONARCH_INSECURE"

_SECRET_BYTES: Final = 32
_LEAST_BYTES: Final = 16
_NONE: Final = b"MONARCH_INSECURE: no secret"


class NoSecret(AuthenticationError):
    """The network needs a secret, and there is none, or none that is good enough."""


def new_secret() -> str:
    """A secret as text, good for a file or a variable."""
    return secrets.token_hex(_SECRET_BYTES)


def configured_or_new() -> bytes:
    """The secret of the environment, or one that is drawn now. Raises: NoSecret, when the one there is not good."""
    configured = _configured()
    return configured if configured is not None else new_secret().encode()


def shared_secret(url: str) -> bytes:
    """What a link to or from that address proves; of ADVERTISE@BIND, what is bound says who can come.

    Raises:
        NoSecret: says what to do.
    """
    configured = _configured()
    if configured is not None:
        return configured
    url = str(evolve(parse(url).local, bind=None))
    if domain_of(url, b"") != EVERYWHERE:
        return _users_secret()
    if os.environ.get(INSECURE_VARIABLE) == "1":
        log.warning(
            "network.insecure",
            address=url,
            meaning="MONARCH_INSECURE=1: whoever can connect can run code here. `monarch secret new` makes a secret.",
        )
        return _NONE
    raise NoSecret(
        f"{url} can be reached from other machines, and there is no secret that tells friends from strangers. Make one "
        f"with `monarch secret new FILE`, copy the file to all hosts, and set {FILE_VARIABLE}=FILE on each. Where "
        f"everybody who can connect may run code on this machine, {INSECURE_VARIABLE}=1 does without"
    )


def own_secret(url: str) -> bytes:
    """What the links of a program prove that listens at `url`: the same as those of its user's other programs, so that
    it can be reached by one that was sent a reference; where there is no such secret, one that is drawn for it."""
    try:
        return shared_secret(url)
    except (NoSecret, OSError) as error:
        log.info("secret.drawn", address=url, reason=str(error))
        return secrets.token_bytes(_SECRET_BYTES)


def show_certificates() -> None:
    """Let links over TLS use the files of the settings, as of now."""
    get = settings.get
    certificates.use(Certificates(get("hyperactor_tls_cert"), get("hyperactor_tls_key"), get("hyperactor_tls_ca")))


def _configured() -> bytes | None:
    path = os.environ.get(FILE_VARIABLE)
    if path:
        try:
            return _read(path, FILE_VARIABLE)
        except OSError as error:
            raise NoSecret(f"{FILE_VARIABLE}: the secret cannot be read: {error}") from error
    text = os.environ.get(VARIABLE)
    return good(text.strip().encode(), VARIABLE) if text else None


def _read(path: str, source: str) -> bytes:
    """What a file has that nobody else can read. Raises: OSError, NoSecret."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        secret = file.read().strip()
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise NoSecret(f"{source}: {path} can be read by others; chmod 600 {path}")
    return good(secret, source)


def good(secret: bytes, source: str) -> bytes:
    """`secret`, which comes from `source`. Raises: NoSecret, when it can be guessed."""
    if len(secret) < _LEAST_BYTES:
        raise NoSecret(
            f"{source}: the secret has {len(secret)} bytes, and can be guessed; make one: `monarch secret new`"
        )
    return secret


def _users_secret() -> bytes:
    """This user's secret for what stays on this host."""
    folder = f"/run/user/{os.getuid()}"  # never by the environment: all processes of a user must find the same
    if not os.access(folder, os.W_OK):
        folder = f"/tmp/monarch-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoSecret(f"{folder} belongs to another user, or others may write to it; set {FILE_VARIABLE} to a file")
    path = os.path.join(folder, "monarch-secret")
    source = f"this user's secret in {path}"
    with contextlib.suppress(FileNotFoundError):
        return _read(path, source)
    write_secret(path, new_secret())
    return _read(path, source)  # of whoever was first


def write_secret(path: str, secret: str) -> bool:
    """Put a secret into a new file that only its owner can read; False: there is a file already, which stays."""
    new = f"{path}.{secrets.token_hex(4)}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secret)
        os.link(new, path)  # whole, or not at all
    except FileExistsError:
        return False
    finally:
        os.unlink(new)
    return True
