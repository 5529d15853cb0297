"""A server on loopback that answers as a model hub does, so far as huggingface_hub asks: HEAD and GET of files."""

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PATH = re.compile(r"/([^/]+/[^/]+)/resolve/main/(.+)")


@dataclass
class Hub:
    """The server, in a `with` block.

    Attributes:
        files: (repository, file) -> content; may change while it runs.
        sizes: what is said of a file's size, where that is not the truth.
        sent: content that is sent in place of the announced one.
        cut: how many bytes of a file are sent before the connection breaks.
        stall: how many bytes of a file are sent before nothing more comes.
        ranges: whether a part of a file may be asked for.
        gated: repositories that want their terms accepted.
        asked: (method, repository, file, range) of every request.
    """

    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[tuple[str, str], bytes] = field(default_factory=dict)
    cut: dict[tuple[str, str], int] = field(default_factory=dict)
    stall: dict[tuple[str, str], int] = field(default_factory=dict)
    ranges: bool = True
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self
        self.over = threading.Event()

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fetched(self, file: str) -> list[str]:
        """The ranges with which a file was fetched; "" for all of it."""
        return [asked for method, _, name, asked in self.asked if method == "GET" and name == file]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, match = self.hub, _PATH.fullmatch(self.path)
        key = (match[1], match[2]) if match else ("", self.path)
        hub.asked.append((self.command, *key, self.headers.get("Range", "")))
        if key[0] in hub.gated:
            return self._error(403, "GatedRepo")
        if key not in hub.files:
            known = any(repo == key[0] for repo, _ in hub.files)
            return self._error(404, "EntryNotFound" if known else "RepoNotFound")
        content = hub.sent.get(key, hub.files[key])
        start = 0
        if self.headers.get("Range") and hub.ranges and body:
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
        rest = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(hub.files[key]).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(hub.sizes.get(key, len(hub.files[key]))))
        self.send_header("Content-Length", str(len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            most = hub.cut.get(key, hub.stall.get(key, len(rest)))
            self.wfile.write(rest[:most])
            self.wfile.flush()
            if key in hub.stall:
                hub.over.wait(60)
            self.close_connection = self.close_connection or most < len(rest)
        return None

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
