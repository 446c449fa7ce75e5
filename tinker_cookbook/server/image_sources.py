"""Images that a request names by an address: from hosts and folders that the operator allows.

A client must not reach machines or files through the server that it could not reach itself. So each
name is resolved once, all its addresses are checked, and the connection is made to a checked
address; redirects are checked in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.image_processing_utils import read_file, read_media

Address: TypeAlias = IPv4Address | IPv6Address

MAX_BYTES = 20 << 20
"""Maximum size of one image, as in OpenAI's API."""
SECONDS = 10.0
"""Time for one image: names, redirects and the whole body."""
_REDIRECTS = 3
_AT_ONCE = 16

_GLOBAL_V6 = IPv6Network("2000::/3")
# Services of clouds for their machines: metadata and keys of Azure and of Oracle.
_SERVICES = IPv4Network("168.63.129.16"), IPv4Network("192.0.0.0/24")

# It would write each address, which is content of a request, to the server's log.
logging.getLogger("httpx").setLevel(logging.WARNING)


class ImageSources:
    """Reads images from their addresses.

    ``allowed`` are host names (``*``: all), folders (absolute paths), and networks such as
    ``10.1.0.0/16``, whose addresses are allowed although they are not public. Raises
    ConfigurationError.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._hosts: set[str] = set()
        self._folders: list[Path] = []
        self._networks: list[IPv4Network | IPv6Network] = []
        for source in allowed:
            if source.startswith(("/", "~")):
                self._folders.append(Path(source).expanduser().resolve())
                if not self._folders[-1].is_dir():
                    raise ConfigurationError(f"image_sources: got {source!r}, which is no folder")
            elif "/" in source or _literal(source) is not None:
                try:
                    self._networks.append(ip_network(source))
                except ValueError as error:
                    raise ConfigurationError(f"image_sources: got {source!r}: {error}") from error
            else:
                self._hosts.add(source.lower())
        self._slots = asyncio.Semaphore(_AT_ONCE)
        # Not the event loop's threads: slow names would occupy all of them.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="image_sources")

    async def read(self, location: str, where: str, budget: int) -> bytes:
        """Returns the bytes of an image from a data URI, an http(s) address or a file.

        ``budget`` are the bytes that the images of the request may still have. Raises
        ``DataValidationError``, which begins with ``where``.
        """
        loop = asyncio.get_running_loop()
        try:
            if location.startswith("data:"):
                data = await asyncio.to_thread(read_media, location)
            elif "://" in location and not location.startswith("file:"):
                data = await self._fetch(location)
            else:
                data = await loop.run_in_executor(self._threads, self._read_file, location)
        except ValueError as error:
            raise DataValidationError(f"{where}: {error}") from error
        if len(data) > budget:
            raise DataValidationError(
                f"{where}: the images of the request are larger than max_request_mb= of this "
                "server; send fewer per request"
            )
        return data

    async def _fetch(self, location: str) -> bytes:
        host = ""
        try:
            url = httpx.URL(location)
            async with self._slots, asyncio.timeout(SECONDS):
                for _ in range(_REDIRECTS + 1):
                    host = url.host
                    found = await self._get_from_any(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            problem = f"{host} did not send the whole image within {SECONDS:g} s"
            raise DataFormatError(problem) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            # Without the error's text, which may name addresses of this network.
            problem = f"{host or 'the address'} cannot be read ({type(error).__name__})"
            raise DataFormatError(f"{problem}; send the image as a data URL") from error
        raise DataFormatError(f"got more than {_REDIRECTS} redirects")

    async def _get_from_any(self, url: httpx.URL) -> bytes | httpx.URL:
        *others, last = await self._addresses(url)
        for address in others:
            with contextlib.suppress(httpx.ConnectError):
                return await _get(url, address)
        return await _get(url, last)

    async def _addresses(self, url: httpx.URL) -> list[Address]:
        """Resolves the host of ``url``; raises ``DataFormatError`` if it is not allowed."""
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise DataFormatError(
                f"got an address of the scheme {url.scheme!r}, expected http://HOST/… or "
                "https://HOST/… without a password"
            )
        host = url.raw_host.decode("ascii").lower()
        literal = _literal(host)
        listed = literal is not None and self._in_networks(literal)
        if not (listed or host in self._hosts or "*" in self._hosts):
            raise DataFormatError(
                f"this server does not read images from {host}; send the image as a data URL (its "
                "operator can allow hosts with image_sources=)"
            )
        loop = asyncio.get_running_loop()
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = [ip_address(entry[4][0]) for entry in found]
        # All of them, since a name may have a public and a private address.
        if not all(is_public(one) or self._in_networks(one) for one in addresses):
            raise DataFormatError(
                f"{host} is an address that is not public, from which this server does not read "
                "images; send the image as a data URL"
            )
        return addresses

    def _read_file(self, location: str) -> bytes:
        if location.startswith("file:"):
            location = url2pathname(urlsplit(location).path)
        # Resolved, so that neither ".." nor a link leads out of the folder.
        path = Path(location).resolve()
        if not any(path.is_relative_to(folder) for folder in self._folders):
            raise DataFormatError(
                "this server does not read images from this file; send the image itself (its "
                "operator can allow folders with image_sources=)"
            )
        try:
            return read_file(path, MAX_BYTES)
        except OSError as error:
            raise DataFormatError(f"the file cannot be read: {error.strerror or error}") from error

    def _in_networks(self, address: Address) -> bool:
        return any(_unmapped(address) in network for network in self._networks)


async def _get(url: httpx.URL, address: Address) -> bytes | httpx.URL:
    """Returns the body, or where the answer redirects to."""
    host = url.raw_host.decode("ascii")
    names = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
    # No client is shared: a connection's certificate is checked for the name of one host.
    async with (
        httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=SECONDS) as client,
        client.stream(
            "GET",
            url.copy_with(host=str(address)),
            headers=names,
            extensions={"sni_hostname": host},
        ) as response,
    ):
        if response.is_redirect:
            return url.join(response.headers.get("location", ""))
        if response.status_code != 200:
            raise DataFormatError(f"got status {response.status_code}, expected 200, from {host}")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MAX_BYTES:
                raise DataFormatError(f"got more than {MAX_BYTES >> 20} MiB from {host}")
        return bytes(body)


def is_public(address: Address) -> bool:
    """Returns whether an address belongs to the public internet, and to no service of a cloud."""
    address = _unmapped(address)
    if isinstance(address, IPv4Address):
        is_service = any(address in network for network in _SERVICES)
        return address.is_global and not address.is_multicast and not is_service
    # Other ranges contain IPv4 addresses too: compatible ones, NAT64, 6to4 and Teredo.
    embeds = address.sixtofour is not None or address.teredo is not None
    return address in _GLOBAL_V6 and address.is_global and not embeds


def _unmapped(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


@cache
def _tls() -> ssl.SSLContext:
    """Returns the settings of TLS, read once: the certificates of authorities are a large file."""
    return httpx.create_ssl_context()
