"""Who may read a process's metrics, and how the way there is protected: a bearer token and TLS, each from files.

    JOINMESH_HTTP_TOKEN_FILE    `GET /metrics` wants `Authorization: Bearer <what the file holds>`
    JOINMESH_HTTP_CERT_FILE     certificate chain (PEM), and
    JOINMESH_HTTP_KEY_FILE      its key: everything is served over TLS

Invariant: what is set is enforced. A file that cannot be used at the start is an error; one that goes bad later lets
nobody in (token) or leaves the last good one in use (certificate). Tokens are compared in constant time and never said.
"""

import contextlib
import hmac
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from schemas.errors import SettingError

TOKEN, CERT, KEY = "JOINMESH_HTTP_TOKEN_FILE", "JOINMESH_HTTP_CERT_FILE", "JOINMESH_HTTP_KEY_FILE"


class Access:
    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = {name: value for name, value in (os.environ if environment is None else environment).items() if value}
        self._token_file = Path(given[TOKEN]) if TOKEN in given else None
        if self._token_file is not None:
            _read_token(self._token_file)
        if (CERT in given) != (KEY in given):
            there, lacks = (CERT, KEY) if CERT in given else (KEY, CERT)
            raise SettingError(f"{there} is set and {lacks} is not; set both, or neither to serve without TLS")
        self._pair = (given[CERT], given[KEY]) if CERT in given else None
        self._stamp: tuple[float, ...] = ()
        self.tls = self._context()

    @property
    def wants_token(self) -> bool:
        return self._token_file is not None

    def admits(self, authorization: str | None) -> bool:
        """Whether a request with this header may read the metrics. The file is read again: tokens are rotated."""
        if self._token_file is None:
            return True
        try:
            token = _read_token(self._token_file)
        except SettingError:
            return False
        scheme, _, said = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(said.strip().encode(), token)

    def renew(self) -> None:
        """Take a certificate that was replaced; connections from now on see it."""
        if self.tls is None or self._pair is None or _stamp(self._pair) == self._stamp:
            return
        with contextlib.suppress(SettingError):  # half replaced: it fits the next time, or the old one goes on
            self.tls = self._context()

    def _context(self) -> ssl.SSLContext | None:
        if self._pair is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for name, file in zip((CERT, KEY), self._pair, strict=True):
            _check_readable(name, Path(file))
        self._stamp = _stamp(self._pair)
        try:
            # An encrypted key would ask for its password at the terminal; there is none.
            context.load_cert_chain(*self._pair, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise SettingError(
                f"{CERT} ({self._pair[0]}) and {KEY} ({self._pair[1]}) are not a certificate and its unencrypted key in"
                f" PEM form: {reason}"
            ) from None
        return context


def _read_token(file: Path) -> bytes:
    _check_readable(TOKEN, file)
    token = file.read_bytes().strip()
    if not token:
        raise SettingError(f"{TOKEN}: {file} is empty; write the token into it")
    return token


def _check_readable(name: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise SettingError(
            f"{name}: {file} cannot be read ({error.strerror}); correct the path or its rights"
        ) from None


def _stamp(files: tuple[str, ...]) -> tuple[float, ...]:
    try:
        return tuple(os.stat(file).st_mtime for file in files)
    except OSError:
        return ()
