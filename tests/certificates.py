"""Certificates for tests, made by `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from monarch.transports.certificates import Certificates

_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=20)


class Authority:
    """Signs certificates, in files in `folder`. Skips the test where there is no `openssl`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made by `openssl`, which is not installed")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority.key"
        named = ["-subj", f"/CN={folder.name}"]
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate, *named)

    def sign(self, name: str, days: int = 2) -> Certificates:
        """A certificate of `name`; with -1 days, one that has expired."""
        key, request, signed = (self.folder / f"{name}.{kind}" for kind in ("key", "request", "pem"))
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        by = ["-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", str(days)]
        _openssl("x509", "-req", "-in", request, *by, "-out", signed)
        return Certificates(str(signed), str(key), str(self.certificate))


def settings_of(files: Certificates) -> dict[str, str]:
    return {
        "hyperactor_tls_cert": files.certificate,
        "hyperactor_tls_key": files.key,
        "hyperactor_tls_ca": files.authority,
    }


def variables(files: Certificates) -> dict[str, str]:
    """The environment of a process that uses them."""
    return {name.upper(): value for name, value in settings_of(files).items()}
