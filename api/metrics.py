"""What the server tells Prometheus. No name that a tenant chose is ever a label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from base_engine.engine import Engine
from base_engine.request import StepRecord

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_ADAPTERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class Metrics:
    """The server's own collectors; `watch` adds what the engine counts by itself."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "lorikeet_http_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.finished = Counter(
            "lorikeet_choices_finished",
            "Generated choices by finish reason.",
            ["reason"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "lorikeet_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "lorikeet_request_seconds",
            "From a generation request's arrival to its last token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "lorikeet_step_seconds",
            "Duration of one forward pass.",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self.step_adapters = Histogram(
            "lorikeet_step_adapters",
            "Different adapters in one forward pass, the base not counted.",
            buckets=_ADAPTERS,
            registry=self.registry,
        )
        self.uploads = Counter(
            "lorikeet_uploads", "Adapter uploads accepted.", registry=self.registry
        )

    def on_step(self, step: StepRecord) -> None:
        """Count one step; called from the engine's thread."""
        self.step_seconds.observe(step.seconds)
        self.step_adapters.observe(len(step.tokens) - ("base" in step.tokens))

    def watch(self, engine: Engine) -> None:
        """Read the engine's own counts at every scrape."""
        self.registry.register(_EngineCollector(engine))

    def render(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        stats = self._engine.stats()
        pool = stats.adapters
        gauges = {
            "requests_waiting": ("Sequences waiting.", stats.waiting),
            "requests_running": ("Sequences being generated.", stats.running),
            "kv_blocks_used": ("KV cache blocks in use.", stats.kv_blocks_used),
            "kv_blocks_total": ("KV cache blocks there are.", stats.kv_blocks_total),
            "adapters_resident": ("Adapters on the device.", pool.resident),
            "adapters_pinned": ("Adapters in use by a running sequence.", pool.pinned),
            "adapters_loading": ("Adapters on their way to the device.", pool.loading),
            "adapter_device_bytes_used": ("Device memory of adapters in use.", pool.device_used),
            "adapter_device_bytes_total": ("Device memory for adapters.", pool.device_bytes),
            "adapter_host_bytes_used": ("Host memory of cached adapters.", pool.host_used),
            "adapter_host_bytes_total": ("Host memory for cached adapters.", pool.host_bytes),
        }
        counters = {
            "steps": ("Forward passes.", stats.steps),
            "prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens),
            "generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "prefix_cached_tokens": ("Prompt tokens reused from the cache.", stats.cached_tokens),
            "preemptions": ("Sequences put back for lack of KV blocks.", stats.preemptions),
            "adapter_reads": ("Adapters read from disk.", pool.loads_total),
            "adapter_copies": ("Adapters copied to the device.", pool.copies_total),
            "adapter_evictions": ("Adapters evicted from the device.", pool.evictions_total),
            "adapter_failures": ("Adapter loads that failed.", pool.failures_total),
        }
        found: list[Metric] = []
        for name, (text, value) in gauges.items():
            found.append(GaugeMetricFamily(f"lorikeet_{name}", text, value))
        for name, (text, value) in counters.items():
            found.append(CounterMetricFamily(f"lorikeet_{name}", text, value))
        return found
