"""A collector for prometheus-client."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Self

try:
    from prometheus_client import Metric as ClientMetric
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.registry import Collector as ClientCollector
except ImportError as error:
    raise ImportError(
        f"memlane.metrics needs prometheus-client: pip install 'memlane[metrics]' ({error})"
    ) from error

from memlane._locks import Lock
from memlane.inspect.looks import Looks
from memlane.inspect.segment import Deliveries, free_space
from memlane.metrics.catalogue import BOUNDS, METRICS, Metric, cumulative, measure
from memlane.metrics.tally import Tally, taken

_SEARCH_EVERY = 0.5  # seconds: cheap, as only this process is searched


class Collector(ClientCollector):
    """Metrics of the segments that this process takes part in.

    Collecting reads /proc and the segments in the thread that asks; several may ask at once.
    """

    def __init__(self) -> None:
        self._looks = Looks(os.getpid(), search_every=_SEARCH_EVERY)
        self._lock = Lock()
        self._tally = Tally()

    @classmethod
    def of_user(cls) -> Self:
        """Collects from all segments of this user: for a process that reports on others."""
        made = cls()
        made._looks = Looks()
        return made

    def describe(self) -> Iterable[ClientMetric]:
        """Every metric that `collect` may return, without samples."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[ClientMetric]:
        """One look.

        Raises:
            SystemFault: as `memlane.inspect.segments`.
        """
        with self._lock:
            look = taken(self._looks, self._tally)
            families = list(measure(look, free_space(), self._tally))
        for metric, samples in families:
            family = _family(metric)
            for labels, value in samples:
                if isinstance(value, Deliveries):
                    counts = map(float, cumulative(value))
                    family.add_metric(
                        labels, list(zip(_BOUNDS, counts, strict=True)), value.seconds
                    )
                else:
                    family.add_metric(labels, value)
            yield family


_BOUNDS = [str(bound) for _, bound in BOUNDS] + ["+Inf"]
_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(metric: Metric) -> Any:
    return _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
