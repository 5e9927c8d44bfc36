"""What an operator may choose for the router: one frozen dataclass, checked once."""

from __future__ import annotations

import dataclasses
import math
import urllib.parse

from jaxserve.server.settings import check_keys, check_log_format, check_web

from jaxserve.routing.policy import DEFAULT_CAPACITY, POLICY_NAMES

PREFIX_SOURCES = ("guess", "events")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Options of the router. Raises ValueError naming the field, the value seen and the values allowed.

    workers               addresses of engines' servers, http(s)://HOST[:PORT]
    allowed_hosts, cors_origins, ssl_certfile, ssl_keyfile, log_format, max_connections, header_timeout_s,
    write_timeout_s       as of the server (ServerSettings)
    policy                one of POLICY_NAMES
    prefix_source         where cache_aware takes its picture of caches from: "guess" (what was sent where) or
                          "events" (what workers tell; they must be started with kv_events)
    tokenizer             model whose tokenizer reads prompts, with "events"; None: only prompts of token ids are
                          compared with what workers tell
    prefix_bytes          remembered of each worker when guessing
    min_share, balance_absolute, balance_relative   see routing.policy.Balance
    api_keys              keys of which clients must send one; passed on to workers, which may ask for the same
    admin_key             key of the admin API; None: there is no admin API
    worker_key            key for the router's own questions to workers (metrics, and events, which ask for the admin
                          key); None: none is sent
    requests_per_second, burst   per API key (per address, if there are no keys); 0: no limit
    max_in_flight         requests that may be under way or waiting in the router; more get 503
    max_worker_in_flight  requests under way at one worker; more wait in the router. 0: no limit
    max_attempts          workers that one request is sent to at most, one after another
    queue_timeout_s       seconds a request may wait for a worker that can take it
    connect_timeout_s     seconds to connect to a worker
    first_byte_timeout_s  seconds until the answer begins; then another worker is tried
    idle_timeout_s        seconds between two pieces of an answer
    body_timeout_s, max_body_bytes   of a client's request
    probe_interval_s, probe_timeout_s   questions to GET /ready of each worker
    probe_failures        probes in a row that fail before a worker is taken out
    breaker_failures      requests in a row that fail before a worker is left alone
    breaker_cooldown_s    for so long; doubled each time it fails again at once, at most 30 s
    drain_s               seconds that requests in flight get after SIGTERM, and by default when a worker is drained
    """

    workers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_format: str = "text"
    max_connections: int = 16384
    header_timeout_s: float = 20.0
    write_timeout_s: float = 120.0
    policy: str = "cache_aware"
    prefix_source: str = "guess"
    tokenizer: str | None = None
    prefix_bytes: int = DEFAULT_CAPACITY
    min_share: float = 0.3
    balance_absolute: int = 32
    balance_relative: float = 1.5
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    worker_key: str | None = None
    requests_per_second: float = 0.0
    burst: int = 20
    max_in_flight: int = 16384
    max_worker_in_flight: int = 0
    max_attempts: int = 3
    queue_timeout_s: float = 30.0
    connect_timeout_s: float = 3.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 16 * 2**20
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 3.0
    probe_failures: int = 2
    breaker_failures: int = 3
    breaker_cooldown_s: float = 1.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for worker in self.workers:
            check_worker(worker)
        check_log_format(self.log_format)
        check_web(self.ssl_certfile, self.ssl_keyfile, self.cors_origins)
        if len(set(map(normalised, self.workers))) != len(self.workers):
            raise ValueError("workers: one address is given twice")
        _one_of("policy", self.policy, POLICY_NAMES)
        _one_of("prefix_source", self.prefix_source, PREFIX_SOURCES)
        if self.prefix_source == "events" and self.policy != "cache_aware":
            raise ValueError(f"prefix_source: got 'events' with policy {self.policy!r}; allowed: with cache_aware")
        check_keys("api_keys", self.api_keys)
        for name in ("admin_key", "worker_key"):
            key = getattr(self, name)
            check_keys(name, () if key is None else (key,))
        if self.worker_key is not None and self.worker_key.startswith("sha256:"):
            raise ValueError("worker_key: got a digest; allowed: the key itself, which the router has to send")
        for name, low, high in (
            ("port", 0, 65535), ("prefix_bytes", 1, 2**40), ("burst", 1, 2**31), ("max_in_flight", 1, 2**31),
            ("max_worker_in_flight", 0, 2**31), ("max_attempts", 1, 100), ("max_body_bytes", 1024, 2**40),
            ("max_connections", 1, 2**20), ("probe_failures", 1, 1000), ("breaker_failures", 1, 10**6),
            ("balance_absolute", 0, 2**31),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}: got {value!r}; allowed: an integer from {low} to {high}")
        for name, low in (
            ("requests_per_second", 0.0), ("queue_timeout_s", 0.0), ("connect_timeout_s", 0.01),
            ("first_byte_timeout_s", 0.01), ("idle_timeout_s", 0.01), ("body_timeout_s", 0.1),
            ("probe_interval_s", 0.01), ("probe_timeout_s", 0.01), ("breaker_cooldown_s", 0.0), ("drain_s", 0.0),
            ("header_timeout_s", 0.1), ("write_timeout_s", 0.1), ("min_share", 0.0), ("balance_relative", 1.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < low:
                raise ValueError(f"{name}: got {value!r}; allowed: a number, {low:g} or more")


def check_worker(url: str) -> None:
    """Raise ValueError unless `url` names a server and nothing below it."""
    parts = urllib.parse.urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"worker: got {url!r}; allowed: http://HOST[:PORT] or https://HOST[:PORT]")


def normalised(url: str) -> str:
    """One spelling of a worker's address: its name in metrics and in the admin API."""
    return url.rstrip("/").lower()


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}")
