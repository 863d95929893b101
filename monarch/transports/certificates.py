"""Where this process finds the certificates that `tls` shows and asks for: files, by their paths. Loads no `ssl`."""

from __future__ import annotations

from attrs import define


@define(frozen=True)
class Certificates:
    """Paths of PEM files; "" for one that nobody has named.

    Attributes:
        certificate: our own, with those between it and the authority, if any.
        key: the private key of it.
        authority: of those who sign the certificates of a job, ours and the others'.
    """

    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def missing(self) -> str:
        """Why there can be no TLS; "" where there can."""
        named = {"certificate": self.certificate, "key": self.key, "authority": self.authority}
        lacking = [what for what, path in named.items() if not path]
        return f"no file is named for its {' and '.join(lacking)}" if lacking else ""


_used = Certificates()


def use(files: Certificates) -> None:
    """From now on."""
    global _used
    _used = files


def used() -> Certificates:
    return _used
