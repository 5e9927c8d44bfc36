"""What an operator may choose for the HTTP server: one frozen dataclass, checked once."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from jaxserve.server.reasoning import styles
from jaxserve.server.tools import formats

from jaxserve.logs import FORMATS
from jaxserve.sampling_params import MAX_N

TOOL_PARSERS = ("auto", *formats.FORMATS, *formats.ALIASES)
REASONING_PARSERS = ("auto", "none", *styles.STYLES, *styles.ALIASES)
_ORIGIN = re.compile(r"https?://[^/\s]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of the HTTP side. Raises ValueError naming the field, the value seen and the values allowed.

    host, port            address to listen on; port 0: a free one, which is printed
    served_model_name     name of the model in the API; None: the engine's model argument
    api_keys              keys of which clients must send one; empty: no key is asked for. "sha256:" and a hexadecimal
                          digest stand for the key that has it
    admin_api_key         key of control routes (/flush_cache, /server_info, /kv_events, abort_all); None: they are
                          closed if there are api_keys, and open if there are none
    tool_call_parser      how the model writes tool calls: "auto" (found in its chat template) or a name, see tools.md
    reasoning_parser      how it reasons: "auto", "none", or a name
    max_body_bytes        longest request body; a longer one is refused before it is read
    max_n                 continuations of one prompt at most
    max_sequences         prompts x n of one HTTP request at most
    max_in_flight         prompts that may be queued or running at once; more are answered with 503
    max_requests_per_minute, max_requests_at_once   of each key, or of each address if there are no keys; more are
                          answered with 429; 0: no limit
    allowed_hosts         host names that requests may be for; "*": any; empty: any, but loopback names alone if host is
                          a loopback address and no key is needed
    cors_origins          origins whose web pages may use the API, as in https://example.org; "*": all
    ssl_certfile, ssl_keyfile   PEM files: serve HTTPS
    log_format            text, or json: one JSON object a line, from the engine's process too
    otlp_endpoint         OpenTelemetry collector (OTLP over HTTP) that gets a span for each request; None: none
    max_stored_responses, max_stored_response_bytes   responses of /v1/responses that are kept; the oldest go first
    max_connections       open connections; more are answered with 503
    header_timeout_s      seconds from a connection's start, or a request's first byte, until all headers are there
    body_timeout_s        seconds a client may take to send its body
    write_timeout_s       seconds a client may leave its answer unread before it is dropped
    request_timeout_s     seconds after which the engine gives a request up; None: never. A client may ask for less with
                          the header X-Request-Timeout
    chat_page             whether the chat page is served at /
    access_log            one log line per HTTP request
    drain_s               seconds that requests in flight get to finish after SIGTERM or SIGINT
    heartbeat_timeout_s   seconds of silence after which a ready engine counts as stuck and is replaced; longer than
                          the longest step
    max_restarts, restart_window_s   an engine lost more often than this within so many seconds ends the server
    restart_delay_s       pause before the first restart; doubled for each further one in the window, at most 30 s
    engine_command        command that starts an engine, to which --config JSON --socket ADDRESS --parent PID are
                          added; empty: this Python with -m jaxserve.engine_process
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_body_bytes: int = 16 * 2**20
    max_n: int = MAX_N
    max_sequences: int = 1024
    max_in_flight: int = 4096
    max_requests_per_minute: int = 0
    max_requests_at_once: int = 0
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_format: str = "text"
    otlp_endpoint: str | None = None
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 64 * 2**20
    max_connections: int = 4096
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 120.0
    request_timeout_s: float | None = None
    chat_page: bool = True
    access_log: bool = False
    drain_s: float = 30.0
    heartbeat_timeout_s: float = 60.0
    max_restarts: int = 5
    restart_window_s: float = 300.0
    restart_delay_s: float = 0.5
    engine_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: got an empty string; allowed: an address or a host name")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError(f"served_model_name: got {self.served_model_name!r}; allowed: a name that is not blank")
        check_keys("api_keys", self.api_keys)
        check_keys("admin_api_key", () if self.admin_api_key is None else (self.admin_api_key,))
        if self.admin_api_key in self.api_keys:
            raise ValueError("admin_api_key: is one of api_keys; allowed: a key of its own")
        for name, allowed in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        self._check_network()
        self._check_integers()
        self._check_seconds()

    def _check_network(self) -> None:
        check_log_format(self.log_format)
        check_web(self.ssl_certfile, self.ssl_keyfile, self.cors_origins)
        for host in self.allowed_hosts:
            if not host or "/" in host or ("*" in host and host != "*" and not host.startswith("*.")):
                raise ValueError(f"allowed_hosts: got {host!r}; allowed: a host name, *.NAME or *")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint: got {self.otlp_endpoint!r}; allowed: a URL with http or https")

    def _check_integers(self) -> None:
        for name, low, high in (
            ("port", 0, 65535), ("max_body_bytes", 1024, 2**40), ("max_n", 1, MAX_N), ("max_sequences", 1, 2**20),
            ("max_in_flight", 1, 2**31), ("max_restarts", 0, 2**31), ("max_stored_responses", 0, 2**31),
            ("max_requests_per_minute", 0, 2**31), ("max_requests_at_once", 0, 2**31),
            ("max_connections", 1, 2**20),
            ("max_stored_response_bytes", 0, 2**40),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}: got {value!r}; allowed: an integer from {low} to {high}")

    def _check_seconds(self) -> None:
        for name, low in (
            ("body_timeout_s", 0.1), ("header_timeout_s", 0.1), ("write_timeout_s", 0.1), ("drain_s", 0.0),
            ("heartbeat_timeout_s", 1.0), ("restart_window_s", 1.0), ("restart_delay_s", 0.0),
            ("request_timeout_s", 0.001),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "request_timeout_s":
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or value < low:
                raise ValueError(f"{name}: got {value!r}; allowed: seconds, {low:g} or more")


def check_keys(name: str, keys: tuple[str, ...]) -> None:
    """Raises ValueError for keys that no client could send. The message does not repeat them."""
    for key in keys:
        # A key travels in a header: other characters could never match what a client can send.
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{name}: a key is empty or has odd characters; allowed: visible ASCII, no blanks")
        if key.startswith("sha256:") and not re.fullmatch("sha256:[0-9a-f]{64}", key):
            raise ValueError(f"{name}: a key is 'sha256:' without a digest; allowed: 64 hexadecimal digits behind it")


def check_log_format(name: str) -> None:
    """Raises ValueError for a form of log lines that there is not."""
    if name not in FORMATS:
        raise ValueError(f"log_format: got {name!r}; allowed: {', '.join(FORMATS)}")


def check_web(ssl_certfile: str | None, ssl_keyfile: str | None, cors_origins: tuple[str, ...]) -> None:
    """Raises ValueError for PEM files that are not there or come alone, and for origins that are none."""
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ValueError("ssl_certfile: ssl_certfile and ssl_keyfile belong together; got one of them")
    for name, path in (("ssl_certfile", ssl_certfile), ("ssl_keyfile", ssl_keyfile)):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{name}: got {path!r}; allowed: a PEM file that exists")
    for origin in cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"cors_origins: got {origin!r}; allowed: '*', or SCHEME://HOST[:PORT] without a path")
