"""Images that a request names by an address: what the server reads, and what it must not read."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import ClassVar

import pytest
from PIL import Image

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.server import image_sources
from tinker_cookbook.server.image_sources import ImageSources, is_public

LARGE = 1 << 30


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").save(buffer, "PNG")
    return buffer.getvalue()


class Site(BaseHTTPRequestHandler):
    """Answers by the path; notes the host of each request."""

    asked: ClassVar[list[str]] = []
    slow_bytes: ClassVar[int] = 0

    def do_GET(self):
        Site.asked.append(self.headers["Host"].partition(":")[0] + self.path)
        kind, body, more = "image/png", picture(), {}
        words = self.path.strip("/").split("/", 1)
        if words[0] == "to":
            more, kind = {"Location": words[1]}, "text/html"
        elif words[0] == "large":
            body = bytes(image_sources.MAX_BYTES + 1)
        self.send_response(302 if "Location" in more else 404 if words[0] == "none" else 200)
        for name, value in {"Content-Type": kind, **more}.items():
            self.send_header(name, value)
        if words[0] not in ("large", "slow"):  # these have no declared size
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if words[0] == "slow":
            for byte in body:
                self.wfile.write(bytes([byte]))
                Site.slow_bytes += 1
                time.sleep(0.05)
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def site():
    """A server on the loopback network, where each address of 127.0.0.0/8 leads to it."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    server.handle_error = lambda request, client_address: None  # clients that read no further
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to one address after the other; the list has the names asked for."""
    table: dict[str, list[str]] = {}
    real, asked = socket.getaddrinfo, []

    def resolve(host, port, *rest, **more):
        if host not in table:
            return real(host, port, *rest, **more)
        asked.append(host)
        found = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        return [entry for one in found.split() for entry in real(one, port, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table, asked


def read(location, *allowed, budget=LARGE):
    Site.asked.clear()
    return asyncio.run(ImageSources(allowed).read(location, "prompt: image 0", budget))


def refused(location, *allowed, budget=LARGE):
    with pytest.raises(DataValidationError, match=r"^prompt: image 0") as caught:
        read(location, *allowed, budget=budget)
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "public"),
    [("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True),
     *((one, False) for one in (
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.31.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:53aa:64c::1",
        "fe80::1", "fe80::1%eth0", "fec0::1", "fd00:ec2::254", "fc00::1", "ff02::1",
        "2001:db8::1", "100::1"))],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert is_public(ip_address(address)) is public


def test_images_are_read_from_where_the_operator_allows_it(site, names, tmp_path):
    table, asked = names
    table["pictures.test"] = ["127.0.0.5", "10.0.0.1"]  # DNS rebinding: private when asked again
    loopback = "127.0.0.0/29"
    assert read(f"http://127.0.0.1:{site}/a.png", loopback) == picture()
    assert read(f"http://pictures.test:{site}/a.png", loopback, "pictures.test") == picture()
    assert asked == ["pictures.test"]
    assert Site.asked == ["pictures.test/a.png"]  # the connection has the name of the host
    table["two.test"] = ["127.0.0.7 127.0.0.1"]
    assert read(f"http://two.test:{site}/to/http://127.0.0.2:{site}/b", loopback, "*") == picture()
    assert Site.asked[-1] == "127.0.0.2/b"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(picture())
    folder = str(tmp_path / "in")
    for location in (f"{folder}/a b.png", (tmp_path / "in" / "a b.png").as_uri()):
        assert read(location, folder) == picture()
    assert read("data:image/png;base64,aGk=") == b"hi"


def test_addresses_that_are_not_allowed_are_not_asked(site, names, tmp_path):
    table, _ = names
    table["inside.test"], table["both.test"] = ["127.0.0.1"], ["8.8.8.8 127.0.0.1"]
    table["mapped.test"], table["later.test"] = ["::ffff:127.0.0.1"], ["127.0.0.1", "127.0.0.9"]
    here, metadata = f"127.0.0.1:{site}", "http://169.254.169.254/latest/meta-data"
    hosts = (f"localhost:{site}", f"127.1:{site}", f"2130706433:{site}", f"0x7f.1:{site}",
             f"0:{site}", f"[::ffff:127.0.0.1]:{site}", here, f"inside.test:{site}",
             f"both.test:{site}", f"mapped.test:{site}")  # fmt: skip
    for host in hosts:
        assert "an address that is not public" in refused(f"http://{host}/a.png", "*"), host
        assert not Site.asked
    for host in hosts:  # without "*", the host must be listed
        assert "does not read images from" in refused(f"http://{host}/a.png", "example.test")
        assert "does not read images from" in refused(f"http://{host}/a.png")
    one = "127.0.0.1/32", "*"
    for target in (f"http://127.0.0.2:{site}/b", f"http://0:{site}/b", metadata,
                   f"//[::ffff:7f00:2]:{site}/b", "file:///etc/passwd", "ftp://127.0.0.1/b",
                   f"http://user@127.0.0.1:{site}/b"):  # fmt: skip
        said = refused(f"http://{here}/to/{target}", *one)
        assert "not public" in said or "scheme" in said, (target, said)
        assert len(Site.asked) == 1, target
    said = refused(f"http://later.test:{site}/to/http://later.test:{site}/b", *one)
    assert "not public" in said
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(picture())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")
    for path in ("in/../out.png", "out.png", "in/link.png"):
        location = f"{tmp_path}/{path}"
        assert "does not read images from this file" in refused(location, str(tmp_path / "in"))
        assert "does not read images from this file" in refused(f"file://{location}")
    assert "No such file" in refused(f"{tmp_path}/in/none.png", str(tmp_path / "in"))
    assert "null byte" in refused(f"{tmp_path}/in/\0", str(tmp_path / "in"))


def test_invalid_image_downloads_are_refused(site, monkeypatch):
    here, allowed = f"http://127.0.0.1:{site}", "127.0.0.1"
    for path, said in (
        ("/none", "got status 404, expected 200, from 127.0.0.1"),
        ("/large", "got more than 20 MiB"),
        (f"/to/{here}/to/{here}/to/{here}/to/{here}/a", "more than 3 redirects"),
    ):
        assert said in refused(here + path, allowed)
    assert "larger than max_request_mb" in refused(here + "/a.png", allowed, budget=100)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "cannot be read (ConnectError)" in refused(f"http://127.0.0.1:{port}/", allowed)
    assert "no.such.name.invalid" in refused("http://no.such.name.invalid/", "*")
    monkeypatch.setattr(image_sources, "SECONDS", 0.3)
    assert "did not send the whole image within 0.3 s" in refused(here + "/slow", allowed)
    assert Site.slow_bytes < len(picture())
    for wrong in ("10.0.0.0/99", "10.1.2.3/8", "/no/such/folder"):
        with pytest.raises(ConfigurationError, match="image_sources: got"):
            ImageSources([wrong])
