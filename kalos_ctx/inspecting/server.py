"""Serves the page to a browser on this machine, and to nobody else.

What stands in a store is private, and a port on 127.0.0.1 can be reached by every user of the
machine and, through a browser, by every page that it has open. So each request must have

- the token of this run in its path, compared in constant time: other users do not know it;
- this server's own address as its Host: a name that is made to point here (DNS rebinding) is not;
- no Origin, or this server's: a page from elsewhere gets nothing, whatever its browser permits.

Only GET is answered, the store is open for reading, and every answer forbids scripts, styles,
images and connections from elsewhere. The standard library's server is enough for one reader.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from kalos_ctx.errors import BudgetExceeded, InvalidArgument, KalosError, StoreClosed
from kalos_ctx.inspecting.pages import StorePages
from kalos_ctx.inspecting.queries import Query
from kalos_ctx.inspecting.windows import WindowPages
from kalos_ctx.store import SessionStore
from kalos_ctx.terminal import shown

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
TOKEN_NBYTES = 32
# Seconds for which a connection may say nothing.
IDLE_S = 30
FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "window.js": ("window.js", "text/javascript; charset=utf-8"),
    "dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class InspectServer(ThreadingHTTPServer):
    """A server of one store's page.

    Parameters
    ----------
    store : SessionStore
        Opened for reading; stays the caller's.
    port : int
        0 takes a free one.
    embed : callable, optional
        Takes a text and returns its vector.

    Attributes
    ----------
    url : str
        Where the page is; whoever has it can read the store.

    Raises
    ------
    InvalidArgument, OSError

    Notes
    -----
    `serve_forever` answers until `shutdown`. A context manager.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        store: SessionStore,
        *,
        port: int = 0,
        embed: Callable[[str], Any] | None = None,
    ) -> None:
        if store.mode != "r":
            raise InvalidArgument("store must be opened for reading")
        self.token = secrets.token_urlsafe(TOKEN_NBYTES)
        self._launch: str | None = secrets.token_urlsafe(TOKEN_NBYTES)
        self._launching = threading.Lock()
        pages = StorePages(store, embed)
        self._windows = WindowPages(pages)
        self.routes: dict[str, Callable[[Query], dict[str, Any]]] = {
            "store": pages.overview,
            "sessions": pages.sessions,
            "session": pages.session,
            "passages": pages.passages,
            "window": self._windows.window,
        }
        super().__init__((ADDRESS, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.url = f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Bind; the base class would ask the network for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def launch_url(self) -> str:
        """An address that leads to the page once.

        A browser gets it on its command line, where other users of the machine may read it.
        """
        return f"http://{ADDRESS}:{self.server_port}/open/{self._launch}"

    def launched(self, given: str) -> bool:
        """Say whether this is the launch address, which then leads nowhere any more."""
        with self._launching:
            good = self._launch is not None and _equal(given, self._launch)
            if good:
                self._launch = None
            return good

    def knows(self, given: str) -> bool:
        """Say whether this is the token."""
        return _equal(given, self.token)

    def server_close(self) -> None:
        """Stop listening and forget the windows that were shown."""
        super().server_close()
        self._windows.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what ended a connection; what was asked for may name a session."""
        log.debug("a connection ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: InspectServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kalos", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer a request."""
        refusal = self._refusal()
        if refusal:
            self._refuse(HTTPStatus.FORBIDDEN, "Forbidden", refusal)
            return
        path, _, query = self.path.partition("?")
        token, slash, rest = path.removeprefix("/").partition("/")
        if token == "open" and self.server.launched(rest):
            self._answer(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": self.server.url})
        elif not self.server.knows(token) or not slash:
            self._refuse(
                HTTPStatus.NOT_FOUND,
                "NotFound",
                "There is no page here; take the whole address that kalos inspect has printed.",
            )
        elif rest.startswith("api/"):
            self._document(rest.removeprefix("api/"), query)
        elif rest in FILES:
            name, kind = FILES[rest]
            data = (files("kalos_ctx.inspecting") / "page" / name).read_bytes()
            self._answer(HTTPStatus.OK, data, kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "NotFound", "There is no such page.")

    def _refusal(self) -> str | None:
        """Say why a request is not answered, whatever it asks for; None for one that is."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return f"This page answers to http://{ADDRESS}:{self.server.server_port} alone."
        origins = self.headers.get_all("Origin", [])
        if origins and origins != [f"http://{hosts[0].lower()}"]:
            return "Another page has asked; only this one may."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # A reader may follow a link to the page, as in a terminal that is itself a page.
            goes = ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")
            if any(self.headers.get(name) != value for name, value in goes):
                return "Another page has asked; only this one may."
        return None

    def _document(self, name: str, query: str) -> None:
        """Answer with a document, or with the error that stands in its way."""
        make = self.server.routes.get(name)
        if make is None:
            self._refuse(HTTPStatus.NOT_FOUND, "NotFound", "There is no such document.")
            return
        try:
            document = make(Query(query))
        except KalosError as error:
            self._refuse(_status(error), type(error).__name__, sentence(error), **_more(error))
        except Exception:
            # A fault of ours: the reader learns that, and the log why, without what was asked for.
            log.exception("a document could not be made")
            self._refuse(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "Fault",
                "Something is wrong in kalos inspect itself; its log says what.",
            )
        else:
            self._answer(HTTPStatus.OK, _json(document), "application/json")

    def _refuse(self, status: HTTPStatus, kind: str, sentence: str, **more: Any) -> None:
        document = {"error": {"kind": kind, "sentence": sentence, **more}}
        self._answer(status, _json(document), "application/json")

    def _answer(
        self, status: HTTPStatus, data: bytes, kind: str, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **HEADERS,
            **(more or {}),
        }.items():
            self.send_header(name, value)
        # What comes with a request is not read, so the next one could not be found behind it.
        given = getattr(self, "headers", None) or {}
        if self.close_connection or "Content-Length" in given or "Transfer-Encoding" in given:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request of ours: another method, or no HTTP at all."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            said = "Only GET is answered here."
        else:
            said = "This is no request that can be read."
        self._refuse(HTTPStatus(code), "NotAnswered", said)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address holds the token and names of sessions."""


def sentence(error: KalosError) -> str:
    """Return an error's message as a sentence; what may stand for a name is escaped."""
    text = shown(" ".join(str(error).split())).rstrip(".")
    first, _, _ = text.partition(" ")
    # Arguments keep the spelling that they have in a call.
    return f"{text if '_' in first else text[:1].upper() + text[1:]}."


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode())


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False).encode()


def _status(error: KalosError) -> HTTPStatus:
    if isinstance(error, LookupError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, ValueError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, StoreClosed):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _more(error: KalosError) -> dict[str, Any]:
    if isinstance(error, BudgetExceeded):
        parts = {str(name): tokens for name, tokens in error.by_segment.items()}
        return {"by_segment": parts, "budget": error.budget, "over": error.over}
    return {}
