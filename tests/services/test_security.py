"""One `kafka:` setting for three clients: what each is told, what is refused by name, and that no secret is shown."""

import base64
import json
import logging
import re
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from schemas.errors import AccessError, MachineError, MeshFileError
from schemas.mesh import Mesh, parse_mesh
from services.runtime.acls import rights_of
from services.runtime.grants import principal_form
from services.runtime.security import secrets
from services.runtime.security.for_confluent import confluent_settings
from services.runtime.security.for_faust import faust_brokers, faust_credentials
from services.runtime.security.for_java import java_settings
from services.runtime.security.refusals import Refusals, refusal
from services.runtime.security.secrets import HIDDEN, hide, resolved
from services.runtime.security.settings import check_settings
from services.runtime.security.tokens import Tokens
from tests.certificates import Certificates, Endpoint

CANARY = "canary-Zq83-do-not-show"
MESH = """
mesh: shop
kafka:
  bootstrap: "h:1,i:2"
  {kafka}
streams:
  a: {{event_time: ts, fields: {{k: int64, ts: timestamp}}}}
  b: {{event_time: ts, fields: {{k: int64, n: int64, ts: timestamp}}}}
  c: {{topic: the-c, event_time: ts, fields: {{n: int64, ts: timestamp}}}}
queries:
  q: SELECT a.k FROM a [RANGE 1 SECOND], b [RANGE 1 SECOND], c [RANGE 1 SECOND] WHERE a.k = b.k AND b.n = c.n
plans: {{q: "((a b) c)"}}
{more}
"""


def mesh_with(kafka: str, more: str = "") -> Mesh:
    return parse_mesh(MESH.format(kafka="\n  ".join(kafka.strip().splitlines()), more=more))


def scram(password: str = CANARY) -> Mesh:
    return mesh_with(
        f"security.protocol: SASL_SSL\nsasl.mechanism: SCRAM-SHA-512\nsasl.username: shop-${{service}}\n"
        f"sasl.password: {password}"
    )


# -- secrets


def test_references_are_looked_up_for_the_asking_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q-j1").write_text(f"{CANARY}\n")
    monkeypatch.setenv("SHOP_CA", "/ca.pem")
    mesh = scram(f"${{file:{tmp_path}/${{service}}}}").asked_by("q.j1")
    mesh = replace(mesh, kafka={**mesh.kafka, "ssl.ca.location": "${env:SHOP_CA}"})
    found = resolved(mesh)
    assert (found["sasl.username"], found["sasl.password"]) == ("shop-q-j1", CANARY)
    assert found["ssl.ca.location"] == "/ca.pem"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${file:/no/such/file}", "from file /no/such/file, which cannot be read (No such file or directory); provide"),
        ("${env:NO_SUCH_VARIABLE}", "from environment variable NO_SUCH_VARIABLE, which is not set; provide it"),
    ],
)
def test_a_missing_secret_is_named_in_one_line(reference: str, says: str) -> None:
    with pytest.raises(MachineError) as error:
        confluent_settings(scram(reference).asked_by("ingest"))
    assert "`kafka.sasl.password` of ingest comes " + says in str(error.value)
    assert "\n" not in str(error.value)


def test_other_braces_are_refused_when_the_file_is_read() -> None:
    with pytest.raises(MeshFileError, match=r"mesh.yaml:4: `kafka.sasl.password` holds a `\$\{` that is no reference"):
        scram("${vault:x}")


def test_nothing_is_looked_up_before_a_client_is_made() -> None:
    mesh = scram("${file:/no/such/file}")
    check_settings(mesh)
    assert "/no/such/file" not in repr(mesh)
    assert rights_of(mesh)


def test_what_was_looked_up_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    resolved(scram())
    assert CANARY not in repr(scram())
    assert hide(f"password {CANARY}!") == f"password {HIDDEN}!"
    assert CANARY not in str(secrets.without_secrets(resolved(scram())))
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        secrets.hide_in_logs()
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger("joinmesh.t").exception("it was %s", CANARY)
    finally:
        logging.getLogger().removeHandler(handler)
    said = capsys.readouterr().err
    assert f"it was {HIDDEN}" in said
    assert CANARY not in said
    assert CANARY not in repr(faust_credentials(scram()))


# -- three clients


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_user_and_password_reach_all_three(mechanism: str) -> None:
    mesh = scram('pass"word').asked_by("ingest")
    mesh = replace(mesh, kafka={**mesh.kafka, "sasl.mechanism": mechanism})
    confluent, faust, java = confluent_settings(mesh), faust_credentials(mesh), java_settings(mesh)
    assert confluent == {**resolved(mesh)}
    assert faust_brokers(mesh) == ["kafka://h:1", "kafka://i:2"]
    assert (faust.username, faust.password, faust.mechanism.value) == ("shop-ingest", 'pass"word', mechanism)
    assert faust.protocol.value == "SASL_SSL"
    assert faust.ssl_context.check_hostname
    assert faust.ssl_context.verify_mode == ssl.CERT_REQUIRED
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    assert java == {
        "bootstrap.servers": "h:1,i:2",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": (
            f'org.apache.kafka.common.security.{module} required username="shop-ingest" password="pass\\"word";'
        ),
    }


def test_certificates_reach_all_three(certificates: Certificates) -> None:
    mesh = mesh_with(
        f"security.protocol: ssl\nssl.ca.location: {certificates.ca}\nssl.certificate.location: {certificates.client}\n"
        f"ssl.key.location: {certificates.client_key}\nssl.endpoint.identification.algorithm: none"
    )
    assert confluent_settings(mesh)["ssl.key.location"] == str(certificates.client_key)
    faust = faust_credentials(mesh)
    assert faust.protocol.value == "SSL"
    assert not faust.context.check_hostname
    assert faust.context.verify_mode == ssl.CERT_REQUIRED
    assert [dict(part[0] for part in c["subject"])["commonName"] for c in faust.context.get_ca_certs()] == ["test-ca"]
    java = java_settings(mesh)
    assert java["ssl.truststore.certificates"] == certificates.ca.read_text()
    assert java["ssl.keystore.key"] == certificates.client_key.read_text()
    assert java["ssl.keystore.certificate.chain"] == certificates.client.read_text()
    assert (java["ssl.keystore.type"], java["ssl.endpoint.identification.algorithm"]) == ("PEM", "")
    assert hide(java["ssl.keystore.key"]) == HIDDEN


def test_a_key_that_java_cannot_read_is_named(tmp_path: Path, certificates: Certificates) -> None:
    old = tmp_path / "old.key"
    old.write_text("-----BEGIN RSA PRIVATE KEY-----\n")
    mesh = mesh_with(
        f"security.protocol: ssl\nssl.certificate.location: {certificates.client}\nssl.key.location: {old}"
    )
    with pytest.raises(MachineError, match=r"old\.key\) is not PKCS#8.*openssl pkcs8 -topk8"):
        java_settings(mesh)
    with pytest.raises(MachineError, match=r"`kafka.ssl.certificate.location` .*client.pem\) cannot be used: "):
        faust_credentials(mesh)


def test_a_token_is_read_again_when_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    mesh = mesh_with(
        "security.protocol: sasl_ssl\nsasl.mechanism: OAUTHBEARER\n"
        f"sasl.oauthbearer.token: ${{file:{tmp_path}/${{service}}}}\nsasl.oauthbearer.extensions: pool=p"
    )
    file.write_text(_jwt(time.time() + 0.2))
    tokens = Tokens(mesh)
    first = tokens.next()
    file.write_text(_jwt(time.time() + 3600))
    assert tokens.next() == first
    time.sleep(0.3)
    assert tokens.next().text == file.read_text()
    settings = confluent_settings(mesh)
    assert settings["oauth_cb"]("")[0] == file.read_text()
    assert settings["oauth_cb"]("")[3] == {"pool": "p"}
    assert faust_credentials(mesh).oauth_cb.extensions() == {"pool": "p"}
    java = java_settings(mesh)
    assert java["sasl.oauthbearer.token.endpoint.url"] == file.as_uri()
    assert java["sasl.jaas.config"].endswith('OAuthBearerLoginModule required extension_pool="p";')


def test_tokens_of_an_endpoint(token_endpoint: Endpoint) -> None:
    def mesh(secret: str) -> Mesh:
        return mesh_with(
            "security.protocol: sasl_ssl\nsasl.mechanism: OAUTHBEARER\nsasl.oauthbearer.method: oidc\n"
            f"sasl.oauthbearer.client.id: shop-${{service}}\nsasl.oauthbearer.client.secret: {secret}\n"
            f"sasl.oauthbearer.token.endpoint.url: {token_endpoint.url}\nsasl.oauthbearer.scope: kafka"
        )

    good = mesh(token_endpoint.secret)
    assert Tokens(good).next().text == token_endpoint.token("shop-admin")
    assert confluent_settings(good)["sasl.oauthbearer.method"] == "oidc"
    assert f'clientSecret="{token_endpoint.secret}" scope="kafka"' in java_settings(good)["sasl.jaas.config"]
    with pytest.raises(
        AccessError, match=r"no token for client shop-admin: http://\S+ answers 401 Unauthorized"
    ) as bad:
        Tokens(mesh(CANARY)).next()
    assert CANARY not in str(bad.value)


@pytest.mark.parametrize(
    ("kafka", "says"),
    [
        ("ssl.keystore.location: k.p12\nsecurity.protocol: ssl", "`kafka.ssl.keystore.location` is not understood"),
        ("ssl.crl.location: x\nsecurity.protocol: ssl", "`kafka.ssl.crl.location` is not understood by every client"),
        ("sasl.pasword: x", "`kafka.sasl.pasword` is not understood by every client of a mesh; did you mean `sasl.pas"),
        ("security.protocol: tls", "`kafka.security.protocol` is none of plaintext, ssl, "),
        ("sasl.username: u", "`kafka.security.protocol` must be sasl_ssl"),
        ("ssl.ca.location: c", "`kafka.security.protocol` must be ssl or sasl_ssl"),
        ("security.protocol: sasl_ssl", "`kafka.sasl.mechanism` must be one of PLAIN"),
        (
            "security.protocol: sasl_ssl\nsasl.mechanism: PLAIN\nsasl.username: u",
            "`kafka.sasl.password` is missing: PLAIN needs sasl.username and sasl.password",
        ),
        (
            "security.protocol: sasl_ssl\nsasl.mechanism: OAUTHBEARER\nsasl.oauthbearer.token: literal",
            "`kafka.sasl.oauthbearer.token` must be ${file:/path}",
        ),
        ("security.protocol: ssl\nssl.key.location: k", "`kafka.ssl.certificate.location` is missing"),
    ],
)
def test_what_one_client_would_not_understand_is_refused_by_name(kafka: str, says: str) -> None:
    for translate in (check_settings, confluent_settings, faust_credentials, java_settings):
        with pytest.raises(MeshFileError) as error:
            translate(mesh_with(kafka))
        assert says in str(error.value)


# -- rights


def test_each_service_has_the_least_rights() -> None:
    found = rights_of(mesh_with("", "feedback: {q: on}"))
    assert list(found) == ["admin", "controller", "ingest", "q-j1", "q-j2", "q-sink", "audit"]
    writers = {
        name: {
            service for service, rights in found.items() for r in rights if r.name == name and "Write" in r.operations
        }
        for name in ("shop.control", "shop.q.results", "shop.audit", "a", "the-c", "shop.q.j1.feedback", "shop.q.j1.in")
    }
    assert writers == {
        "shop.control": {"admin", "controller"},
        "shop.q.results": {"q-sink"},
        "shop.audit": {"audit"},
        "a": set(),
        "the-c": set(),
        "shop.q.j1.feedback": {"q-j2"},
        "shop.q.j1.in": {"ingest", "q-j1"},
    }
    assert {service for service, rights in found.items() for r in rights if "Create" in r.operations} == {"admin"}


def test_feedback_costs_rights_only_where_it_is_on() -> None:
    names = {right.name for rights in rights_of(mesh_with("")).values() for right in rights}
    assert "shop.q.places" not in names
    assert "shop.q.places" in {
        r.name for rights in rights_of(mesh_with("", "feedback: {q: on}")).values() for r in rights
    }


def test_principals_are_called_as_the_mesh_file_says() -> None:
    assert principal_form(mesh_with("")) == "User:shop-${service}"
    assert principal_form(scram()) == "User:shop-${service}"
    named = replace(scram(), kafka={"sasl.username": "${env:NAME}"})
    assert principal_form(named) == "User:shop-${service}"
    assert principal_form(replace(named, kafka={"sasl.username": "x.${service}.y"})) == "User:x.${service}.y"


# -- refusals


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "shop-ingest may not write topic t at h:1,i:2 .*joinmesh acls -f mesh"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "shop-ingest may not write group t"),
        (KafkaError._AUTHENTICATION, "does not let shop-ingest in: user name or password is wrong"),
        (KafkaError.UNSUPPORTED_SASL_MECHANISM, "does not offer `kafka.sasl.mechanism` SCRAM-SHA-512"),
    ],
)
def test_a_refusal_names_who_and_what(code: int, says: str) -> None:
    found = refusal(scram().asked_by("ingest"), KafkaError(code), "t", "write")
    assert found is not None
    assert re.search(says, str(found))


def test_other_errors_are_no_refusals_and_a_short_trouble_is_none_yet() -> None:
    mesh = scram().asked_by("ingest")
    assert refusal(mesh, KafkaError(KafkaError._TRANSPORT)) is None
    seen: list[KafkaError] = []
    watch = Refusals(mesh, {}, then=seen.append)
    watch(KafkaError(KafkaError._SSL, "handshake failed: Disconnected"))
    watch(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert len(seen) == 2
    with pytest.raises(AccessError, match="does not let shop-ingest in"):
        watch(KafkaError(KafkaError._AUTHENTICATION))


def _jwt(expires: float) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": expires}).encode()).decode().rstrip("=")
    return f"e30.{body}.c2ln"
