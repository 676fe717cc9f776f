"""Who a client is: its API key, or its address where the server asks for none."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from pathlib import Path

from overlap_spec.errors import ConfigError, reason
from overlap_spec.server.settings import ServerSettings


class Keys:
    """The keys that a server accepts; ConfigError if a file of keys cannot be read, or has none."""

    def __init__(self, settings: ServerSettings) -> None:
        self._clients = _keys("api_key", settings.api_key, settings.api_key_file)
        self._admins = _keys("admin_api_key", settings.admin_api_key, settings.admin_api_key_file)

    @property
    def are_asked_for(self) -> bool:
        """Whether clients need a key."""
        return bool(self._clients)

    def owner(self, authorization: bytes, address: str) -> str | None:
        """Who asks: stands for the key that was sent, or, where none is asked for, for the address;
        None for a wrong key."""
        known = _match(authorization, self._clients + self._admins)
        if known is not None:
            return f"key {hashlib.sha256(known).hexdigest()}"
        return None if self._clients else f"address {address}"

    def is_admin(self, authorization: bytes) -> bool:
        """Whether the administrator's key was sent."""
        return _match(authorization, self._admins) is not None


def holder_of(owner: str) -> str:
    """Whom what an owner uses is counted to: its key, or its network as in :func:`network_of`."""
    kind, _, name = owner.partition(" ")
    return f"address {network_of(name)}" if kind == "address" else owner


def network_of(address: str) -> str:
    """An address; of IPv6 its network, whose addresses one machine takes as it likes."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is None:
            return str(ipaddress.ip_network((known.packed[:8] + bytes(8), 64)))
        known = known.ipv4_mapped
    return str(known)


def _match(given: bytes, keys: tuple[bytes, ...]) -> bytes | None:
    # All are compared, so that the time tells nothing.
    found = [key for key in keys if hmac.compare_digest(given, key)]
    return found[-1] if found else None


def _keys(name: str, key: str | None, file: Path | None) -> tuple[bytes, ...]:
    found = [] if key is None else [key]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{name}_file {file}: {reason(error)}") from None
        read = [line for line in lines if line and not line.startswith("#")]
        if not read:
            raise ConfigError(f"{name}_file {file}: has no key; one a line is expected")
        found += read
    return tuple(f"Bearer {each}".encode() for each in found)
