"""OAUTHBEARER tokens: from a file that somebody renews, or from an OIDC endpoint for a client id and its secret.

Invariant: a token is fetched anew when the one at hand is past four fifths of its life, and never shown.
"""

import base64
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import AccessError
from schemas.mesh import Mesh
from services.runtime.security.secrets import remember, value_of
from services.runtime.security.settings import TOKEN

UNKNOWN_LIFE_S = 60.0  # of a token that does not say when it ends
TIMEOUT_S = 10.0
_OIDC = "sasl.oauthbearer"


@dataclass(frozen=True)
class Token:
    text: str
    expires: float  # seconds since 1970
    fetched: float

    @property
    def is_fresh(self) -> bool:
        return time.time() < self.fetched + 0.8 * (self.expires - self.fetched)


class Tokens:
    """The tokens of one service."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._last = mesh, Token("", 0, 0)

    def next(self) -> Token:
        if not self._last.is_fresh:
            text = self._of_file() if TOKEN in self.mesh.kafka else self._of_endpoint()
            remember(text)
            self._last = Token(text, expiry(text), time.time())
        return self._last

    def _of_file(self) -> str:
        return value_of(self.mesh, TOKEN, self.mesh.kafka[TOKEN])

    def _of_endpoint(self) -> str:
        def given(name: str) -> str:
            key = f"{_OIDC}.{name}"
            return value_of(self.mesh, key, self.mesh.kafka.get(key, ""))

        url, client = given("token.endpoint.url"), given("client.id")
        fields = {"grant_type": "client_credentials", **({"scope": given("scope")} if given("scope") else {})}
        pair = base64.b64encode(f"{client}:{given('client.secret')}".encode()).decode()
        request = urllib.request.Request(
            url,
            urllib.parse.urlencode(fields).encode(),
            {"Authorization": f"Basic {pair}", "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return str(json.load(answer)["access_token"])
        except urllib.error.HTTPError as error:
            why = f"answers {error.code} {error.reason}"
        except (OSError, ValueError) as error:
            why = f"does not answer: {getattr(error, 'reason', error)}"
        except (KeyError, TypeError):
            why = "gives no access_token"
        raise AccessError(f"no token for client {client}: {url} {why}; see {_OIDC}.… in {self.mesh.file}")


def expiry(token: str) -> float:
    """When a JWT says that it ends; soon, if it does not say.

    >>> expiry("e30.eyJleHAiOjE3MDAwMDAwMDB9.sig")
    1700000000.0
    """
    try:
        body = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"])
    except (ValueError, KeyError, TypeError, IndexError):
        return time.time() + UNKNOWN_LIFE_S


def extensions(kafka: Mapping[str, str]) -> dict[str, str]:
    """
    >>> extensions({"sasl.oauthbearer.extensions": "logicalCluster=lkc-1,pool=p"})
    {'logicalCluster': 'lkc-1', 'pool': 'p'}
    """
    pairs = (pair.partition("=") for pair in kafka.get(f"{_OIDC}.extensions", "").split(",") if pair)
    return {name: value for name, _, value in pairs}
