"""Addresses, tokens and certificates of data servers, and the checks of them."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mmjax.configurable import ConfigError, require

TOKEN = "MMJAX_DATA_TOKEN"
"""Environment variable of the token that servers and trainers share."""
PLAIN, TLS = "grpc", "grpc+tls"
LEAST_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Whether `host`, such as "127.0.0.1", "::1" or "localhost", can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(field: str, address: str) -> None:
    """Raises ConfigError unless `address` is grpc+tls://host:port, or grpc://host:port of this host.

    field: the setting or line that has it, such as "Data.servers", for the message.
    """
    example = "write grpc+tls://host:8815, or grpc://127.0.0.1:8815"
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    complete = f"{parts.scheme}://{parts.netloc}" == address and not parts.username and not parts.password
    require(parts.scheme in (PLAIN, TLS) and bool(parts.hostname) and bool(port) and complete, field, address, example)
    if parts.scheme == PLAIN:
        fix = f"without TLS anybody on the way reads and changes batches; write {TLS}://{parts.netloc}"
        require(is_loopback(parts.hostname or ""), field, address, fix)


def is_path(servers: str | Sequence[str]) -> bool:
    """Whether `Data.servers` names a file that lists addresses: a string that is neither "" nor has "://"."""
    return isinstance(servers, str) and "://" not in servers and servers != ""


def read_addresses(servers: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses that `Data.servers` has: its own, or those of its file, one a line; "#" starts a comment.

    servers: the addresses, such as ("grpc+tls://host:8815",), a single one, or the path of the file. Duplicates are
    removed.

    Raises ConfigError when the file cannot be read or a line is no address.
    """
    if not isinstance(servers, str):
        return tuple(dict.fromkeys(servers))
    if not is_path(servers):
        return (servers,)
    path = Path(servers)
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "no text"
        fix = f"cannot be read ({cause}); it lists servers, one address a line, such as grpc+tls://host:8815"
        raise ConfigError(f"Data.servers={servers!r}: {fix}") from None
    for number, line in enumerate(lines, 1):
        if line:
            check_address(f"{path}:{number}", line)
    return tuple(dict.fromkeys(filter(None, lines)))


def read_token(field: str, path: str) -> str:
    """The token in the file `path` or, if `path` is "", in the environment's MMJAX_DATA_TOKEN; "" if there is none.

    field: the setting that names the file, such as "Data.token_file", for messages. Raises ConfigError when the file
    cannot be read, may be read by others, or holds no token, and for a malformed token.
    """
    if not path:
        return _checked(f"the environment's {TOKEN}", os.environ.get(TOKEN, ""))
    try:
        mode = os.stat(path).st_mode
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "no text"
        fix = "name a file that holds the token alone, or '' for the environment's"
        raise ConfigError(f"{field}={path!r}: cannot be read ({cause}); {fix} {TOKEN}") from None
    require(not mode & (stat.S_IRWXG | stat.S_IRWXO), field, path, f"others may read it; chmod 600 {path}")
    require(bool(token), field, path, "is empty; write a token into it, such as openssl rand -hex 32 makes")
    return _checked(f"{field}={path!r}", token)


def read_pair(cert: str, key: str) -> tuple[bytes, bytes] | None:
    """The certificate chain and the key of a server, from `--tls_cert` and `--tls_key`; None if both are "".

    cert, key: paths of their files (PEM). The result has the bytes of each.

    Raises ConfigError when one is missing, cannot be read, is of another kind, or they do not belong together.
    """
    require(bool(key) or not cert, "--tls_cert", cert, "needs its key; add --tls_key=FILE")
    require(bool(cert) or not key, "--tls_key", key, "needs the certificate; add --tls_cert=FILE")
    if not cert:
        return None
    pair = _read("--tls_cert", cert, "the certificate"), _read("--tls_key", key, "its key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        fix = "name a certificate (PEM) and, with --tls_key, the key that it was made for, without a password"
        raise ConfigError(
            f"--tls_cert={cert!r}: does not go with --tls_key={key!r} ({_reason(error)}); {fix}"
        ) from None
    return pair


def read_trusted(path: str) -> bytes | None:
    """The bytes (PEM) of the file `path` of `Data.tls_ca`; None for "", the system's certificates.

    Raises ConfigError when they cannot be read.
    """
    if not path:
        return None
    certificates = _read("Data.tls_ca", path, "the servers' authority")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        fix = "name the servers' authority (PEM)"
        raise ConfigError(f"Data.tls_ca={path!r}: holds no certificate ({_reason(error)}); {fix}") from None
    return certificates


def _read(field: str, path: str, content: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}={path!r}: cannot be read ({error.strerror}); name {content} (PEM)") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM").lower().replace("_", " ")


def _checked(where: str, token: str) -> str:
    """The token, checked. The error names `where`, where it was set, and never the token: messages end in logs."""
    legal = not token or (len(token) >= LEAST_TOKEN and token.isascii() and token.isprintable() and " " not in token)
    if not legal:
        fix = f"a token is {LEAST_TOKEN} or more printable ASCII characters without spaces, such as"
        raise ConfigError(f"{where}: {fix} openssl rand -hex 32 makes")
    return token
