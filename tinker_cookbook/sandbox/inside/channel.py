"""Messages with file descriptors over a Unix socket; used on both sides of the sandbox."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!I")
_MOST_DESCRIPTORS = 8
MAX_MESSAGE_BYTES = 64 << 20


def send(channel: socket.socket, message: Any, descriptors: list[int] | None = None) -> None:
    """Sends a JSON value, and copies of ``descriptors``."""
    body = json.dumps(message).encode()
    # The descriptors travel with the header, so that the receiver gets them with its first bytes.
    if descriptors:
        socket.send_fds(channel, [_HEADER.pack(len(body))], descriptors)
        channel.sendall(body)
    else:
        channel.sendall(_HEADER.pack(len(body)) + body)


def receive(channel: socket.socket, limit: int = MAX_MESSAGE_BYTES) -> tuple[Any, list[int]]:
    """Waits for a message.

    Returns:
        The JSON value, and the descriptors that came with it.

    Raises:
        EOFError: The other side closed the socket, or ended.
        ValueError: The message is not JSON, or has more than ``limit`` bytes.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MOST_DESCRIPTORS)
    head += _exactly(channel, _HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError("the channel is closed")
    (size,) = _HEADER.unpack(head)
    if size > limit:
        raise ValueError(f"message of {size} bytes, limit {limit}")
    return json.loads(_exactly(channel, size)), descriptors


def _exactly(channel: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        piece = channel.recv(min(size - len(body), 1 << 20))
        if not piece:
            raise EOFError("the channel is closed")
        body += piece
    return bytes(body)


def write_and_close(descriptor: int, message: Any) -> None:
    """Writes a short JSON value to a pipe, as a line, and closes it; the reader may be gone."""
    try:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
    except OSError:
        pass
    finally:
        os.close(descriptor)
