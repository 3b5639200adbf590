"""Gives a run's secret token to the run's processes, and encrypts their messages with it.  No torch.

The supervisors (the processes that start the ranks of a run's nodes) send messages through a key-value store.  The
store has no authentication: every local user, and every host that reaches the store's port, may read and write it.
Therefore each message is encrypted and authenticated with a token that only the run's own processes have.  The token is
random, and no command line shows it.  How the processes get the token depends on the launcher:

- ``hosts``: the first supervisor makes the token, and writes it to the standard input of ``ssh``;
- ``slurm``: the process that submits the job, or starts the step, sets ``ZEROPP_TOKEN`` in its environment;
- ``torchrun``: the user sets ``ZEROPP_TOKEN``.  On one host this is not necessary: the first process writes a file of
  mode 0600 in a folder of mode 0700, which only the same user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

from harness.errors import Refusal

VARIABLE: Final = "ZEROPP_TOKEN"
_FEWEST: Final = 32  # characters of a token: the digest of a shorter one could be found by trying
_NONCE_BYTES: Final = 16
_TAG_BYTES: Final = 32


class Seal:
    """Encrypts and authenticates JSON values with a secret (encrypt-then-MAC: SHAKE-256, then HMAC-SHA-256)."""

    def __init__(self, secret: bytes) -> None:
        self._cipher, self._mac = (hmac.digest(secret, use, "sha256") for use in (b"cipher", b"mac"))

    def close(self, key: str, value: Any) -> str:
        """Encrypt and authenticate ``value`` for ``key``, and return the result as hexadecimal text.

        :meth:`open` decrypts this text only if it is called with the same key.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hidden = nonce + self._masked(nonce, json.dumps(value).encode())
        return (hidden + self._tag(key, hidden)).hex()

    def open(self, key: str, text: bytes) -> Any:
        """Decrypt a text that :meth:`close` returned for ``key``, and return the value.

        Raises:
            ValueError: If ``text`` was not encrypted with this object's secret, or was encrypted for another key.
        """
        content = bytes.fromhex(text.decode("ascii"))
        hidden, tag = content[:-_TAG_BYTES], content[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(key, hidden)):
            raise ValueError("the text was not sealed with this secret for this key")
        return json.loads(self._masked(hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:]))

    def _masked(self, nonce: bytes, content: bytes) -> bytes:
        mask = hashlib.shake_256(self._cipher + nonce).digest(len(content))
        masked = int.from_bytes(content, "big") ^ int.from_bytes(mask, "big")
        return masked.to_bytes(len(content), "big")

    def _tag(self, key: str, hidden: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._mac, len(name).to_bytes(4, "big") + name + hidden, "sha256")


def of_session(token: str, nonces: list[str]) -> Seal:
    """Return the seal of one session, whose secret is made from the run's token and from the supervisors' ``nonces``.

    A session is one run of all supervisors, the processes that start the ranks of the nodes.  In each session, each
    supervisor draws a new random text, its nonce.  The seal therefore cannot open messages of another session, even of
    a session with the same token.
    """
    return Seal(hmac.digest(token.encode(), json.dumps(nonces).encode(), "sha256"))


def digest_of(token: str) -> str:
    """Return a digest of a token.  The digest may be public, but the token must not be.

    Processes compare digests to find out whether they have the same token.
    """
    return hashlib.sha256(f"zeropp token {token}".encode()).hexdigest()


def new() -> str:
    """Return a new random token."""
    return secrets.token_hex(32)


def from_environment() -> str | None:
    """Return the token in the environment variable ``ZEROPP_TOKEN``; None if the variable is not set.

    Raises:
        Refusal: If the token is too short.
    """
    token = os.environ.get(VARIABLE)
    if token is not None and len(token) < _FEWEST:
        raise Refusal(
            f"{VARIABLE} is too short: {len(token)} of at least {_FEWEST} characters; "
            f"export {VARIABLE}=$(openssl rand -hex 32)"
        )
    return token


def set_in_environment() -> None:
    """Make sure that this process, and the processes that it starts, have a run's token in their environment.

    The environment variable is ``ZEROPP_TOKEN``.  A token that is already there is kept; otherwise a new token is set.
    """
    os.environ.setdefault(VARIABLE, new())


def write(token: str) -> Path:
    """Write a token into a file in which :func:`find` finds it, and return the file's path.

    Other processes of the same user on this host can read the file.  The caller must remove it.

    Raises:
        Refusal: If the folder in which tokens are kept belongs to another user, or if other users have access to it.
    """
    path = _path(digest_of(token))
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    return path


def find(digest: str, *, node: int) -> str:
    """Return the token with this digest, from the environment or from the file that :func:`write` wrote.

    Raises:
        Refusal: If there is no token with this digest.  The message names ``node``, the number of this process's node.
    """
    token = from_environment()
    if token is None:
        with contextlib.suppress(OSError):
            token = _path(digest).read_text(encoding="ascii")
    if token is None or digest_of(token) != digest:
        what = "no token of this run" if token is None else f"a token ({VARIABLE}) other than node 0's"
        raise Refusal(
            f"node {node} has {what}: set {VARIABLE} to the same text on all hosts, such as the output of "
            "openssl rand -hex 32"
        )
    return token


def _path(digest: str) -> Path:
    """Return the path of the file that holds the token with this digest, in a folder that only this user can enter.

    Raises:
        Refusal: If the folder belongs to another user, or if other users have access to it.
    """
    folder = Path(tempfile.gettempdir(), f"zeropp-tokens-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Refusal(
            f"{folder} must be a folder of this user with mode 0700: remove it, or set {VARIABLE} on all hosts"
        )
    return folder / digest
