"""Where this process finds the certificates that `tls` shows and asks for: files, by their paths. Loads no `ssl`."""

from __future__ import annotations

from typing import Final

from attrs import define

SETTINGS: Final = {
    "certificate": "hyperactor_tls_cert",
    "key": "hyperactor_tls_key",
    "authority": "hyperactor_tls_ca",
}
"""The settings that name the files; in capitals, the variables of the environment that do."""


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
        lacking = [what for what in SETTINGS if not getattr(self, what)]
        if not lacking:
            return ""
        settings = [SETTINGS[what] for what in lacking]
        return (
            f"no file is named for its {' and '.join(lacking)}: set {', '.join(map(str.upper, settings))} in the "
            f"environment, or configure({', '.join(f'{name}=...' for name in settings)})"
        )

    def setting(self, path: str) -> str:
        """Which one names that file."""
        return next((name for what, name in SETTINGS.items() if getattr(self, what) == path), "")


_used = Certificates()


def use(files: Certificates) -> None:
    """From now on."""
    global _used
    _used = files


def used() -> Certificates:
    return _used
