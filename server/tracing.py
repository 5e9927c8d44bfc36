"""OpenTelemetry traces of HTTP requests, if the extra `otel` is installed and an endpoint is given."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

import jaxserve


class OpenTelemetry:
    """One server span a request, in the trace that `traceparent` names. Attributes follow the conventions for HTTP and
    for generative AI. Spans are sent in batches by a thread of the SDK.

    endpoint   of an OTLP collector over HTTP, as in http://127.0.0.1:4318/v1/traces
    Raises RuntimeError when the packages are missing.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise RuntimeError("otlp_endpoint: needs more packages: pip install 'jaxserve[otel]'") from error
        resource = Resource.create({"service.name": "jaxserve", "service.version": jaxserve.__version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._context = TraceContextTextMapPropagator()
        self._model_name = model_name

    def start(self, scope: Scope) -> Any:
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        parent = self._context.extract(carrier)
        return self._tracer.start_span(f"{scope['method']}", context=parent, kind=self._kind)

    def end(self, span: Any, facts: dict[str, Any]) -> None:
        span.update_name(f"{facts['method']} {facts['route']}")
        attributes = {
            "http.request.method": facts["method"],
            "http.route": facts["route"],
            "url.path": facts["path"],
            "http.response.status_code": facts["status"],
            "client.address": facts["client"],
        }
        if "prompt_tokens" in facts:
            attributes |= {
                "gen_ai.response.model": self._model_name,
                "gen_ai.usage.input_tokens": facts["prompt_tokens"],
                "gen_ai.usage.output_tokens": facts["output_tokens"],
                "gen_ai.server.time_to_first_token": facts.get("first_token_seconds"),
            }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if facts["status"] >= 500:
            span.set_status(self._error)
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
