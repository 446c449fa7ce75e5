"""A Hugging Face Hub on this machine: repositories, uploads and commits, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test"


class FakeHub:
    """``files["me/model"]`` are the committed files; ``requests`` what was asked."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Status and JSON of a request."""
        path = path.partition("?")[0]
        if (method, path) == ("POST", "/api/repos/create"):
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in self.private:
                return 409, {"url": f"{self.url}/{name}"}
            # Newer versions of the client send a word in place of the flag.
            private = asked.get("private", asked.get("visibility") == "private")
            self.private[name], self.files[name] = private, {}
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if method == "PUT" and path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        for name, files in self.files.items():
            if path == f"/api/models/{name}/preupload/main":
                uploads = [{"path": one["path"], "shouldIgnore": False,
                            "uploadMode": "lfs" if one["path"].endswith(".safetensors") else
                            "regular"} for one in json.loads(body)["files"]]  # fmt: skip
                return 200, {"files": uploads}
            if path == f"/{name}.git/info/lfs/objects/batch":
                asked = json.loads(body)["objects"]
                objects = [{"oid": one["oid"], "size": one["size"], "actions": {
                    "upload": {"href": f"{self.url}/objects/{one['oid']}", "header": {}}}}
                    for one in asked]  # fmt: skip
                return 200, {"transfer": "basic", "objects": objects}
            if path == f"/api/models/{name}/commit/main":
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        value = entry["value"]
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        content = self.objects[entry["value"]["oid"]]
                        assert hashlib.sha256(content).hexdigest() == entry["value"]["oid"]
                        files[entry["value"]["path"]] = content
                return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40,
                             "success": True}  # fmt: skip
            if path in (f"/api/models/{name}/revision/main", f"/api/models/{name}"):
                return 200, {"id": name, "sha": "0" * 40, "siblings": [], "private": True}
        return 404, {"error": f"{method} {path}: not here"}

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                hub.requests.append((self.command, self.path))
                if self.headers.get("authorization") not in (f"Bearer {TOKEN}", None):
                    status, answer = 401, {"error": "Invalid username or password."}
                else:
                    status, answer = hub.answer(self.command, self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_HEAD = respond

            def log_message(self, *_: object) -> None:
                pass

        return Handler
