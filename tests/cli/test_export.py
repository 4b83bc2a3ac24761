"""`memlane export`, a browser at its page, Prometheus at its metrics, and `memlane trace`.

With ``MEMLANE_PICTURES=docs/figures`` they take the manual's pictures.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from memlane import Handle, MessageQueue, ShmRingBuffer, WriterClosed
from memlane.cli import export
from tests.support import PATIENCE, Aside, Link, assert_in_time, dismiss, run_memlane, start, until
from tests.support.exporters import Browser, Exporter, browser, exporter
from tests.support.missing import needed
from tests.support.queues import name_in, path_of, queue_of, start_reader
from tests.support.stores import store_of

PICTURES = os.environ.get("MEMLANE_PICTURES")
PROMETHEUS = needed("Prometheus", shutil.which("prometheus") is not None)
CHROMIUM = needed("Chromium", shutil.which("chromedriver") is not None)


pytestmark = pytest.mark.usefixtures("commands")


def names(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


def test_what_is_served() -> None:
    with queue_of(2) as (writer, readers), store_of() as _, exporter() as served:
        writer.enqueue({"step": 1})
        for reader in readers:
            reader.dequeue()
        name = name_in(writer.export_handle())
        assert f'memlane_queue_messages_total{{queue="{name}",role="reader",rank="1"' in (
            served.metrics()
        )
        assert "memlane_store_puts" in names(served.metrics())
        seen = served.json()
        (segment,) = [each for each in seen["segments"] if each["name"] == name]
        assert [who["position"] for who in segment["participants"]] == [1, 1, 1]
        assert seen["names"][str(os.getpid())].startswith("python")
        status, page = served.get("/")
        assert status == 200
        assert re.findall(r"\b(?:src|href)=|url\(|@import|import\(|fetch\(\S+", page) == [
            'fetch("json",'
        ]  # all that it loads
        assert served.get("/elsewhere")[0] == 404
        assert served.get("/metrics", method="HEAD") == (200, "")
        assert served.get("/metrics", method="POST")[0] == 501


def test_who_may_ask() -> None:
    """A page of another site, whose name leads here, may not."""
    with exporter() as served:
        for host in (f"localhost:{served.port}", "127.0.0.1", f"[::1]:{served.port}"):
            assert served.get("/json", host)[0] == 200
        for host in ("evil.example", "localhost.evil.example", "192.0.2.7", "", "[evil]"):
            status, text = served.get("/json", host)
            assert status == 421
            assert "segments" not in text


def test_a_name_that_is_allowed() -> None:
    with exporter("--allow-host", "metrics.example", "--allow-host", "Other.example") as served:
        for host, status in (
            ("metrics.example:9469", 200),
            ("other.example", 200),
            ("evil.example", 421),
        ):
            assert served.get("/json", host)[0] == status


def test_it_starts_beside_a_name_server_that_is_silent() -> None:
    """No look-up of a name is waited for; here none ends."""
    program = """
import socket, threading
socket.getfqdn = socket.gethostbyaddr = lambda *_: threading.Event().wait()
from memlane.__main__ import main
main()
"""
    command = [sys.executable, "-c", program, "export", "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("memlane: http://0.0.0.0:")
        finally:
            process.kill()


def idle(link: Link) -> None:
    """Role: a process that takes part in nothing."""
    link.hear()


def test_only_one_process_exports() -> None:
    own = ("--pid", str(os.getpid()))
    with queue_of() as (writer, _), exporter(*own, _SEARCH_EVERY=0.2) as served:
        name = name_in(writer.export_handle())
        assert name in served.metrics()
        with MessageQueue(1, 1) as second:
            until(lambda: name_in(second.export_handle()) in served.metrics())
    other = start(idle)
    with exporter("--pid", str(other.pid)) as served, queue_of() as (writer, _):
        assert name_in(writer.export_handle()) not in served.metrics()
    other.kill()


def test_what_is_refused() -> None:
    with exporter() as served:
        taken = run_memlane("export", "--port", str(served.port))
        assert taken.returncode == 2
        assert taken.stderr == (
            f"memlane: cannot listen on 127.0.0.1 port {served.port}: Address already in use\n"
        )
    other = start(idle)
    for arguments, text in (
        (["export", "--host", "192.0.2.1"], "Cannot assign requested address"),
        (["export", "--pid", "999999999"], "there is no process 999999999"),
        (["trace", "999999999"], "there is no process 999999999"),
        (["trace", str(other.pid), "--seconds", "0.1", "-o", "/dev/null"], "takes part in no"),
    ):
        done = run_memlane(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("memlane: ")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    other.kill()


def test_a_segment_of_another_version_is_counted_and_hides_nothing() -> None:
    """Is counted, and hides nothing."""
    with queue_of() as (writer, _), ShmRingBuffer(1, 64, 1) as ring, exporter() as served:
        path = path_of(ring)
        data = bytearray(path.read_bytes())
        data[data.index(b"MEMLANE1") + 8] = 99
        path.write_bytes(data)
        until(lambda: "memlane_unreadable_segments 1\n" in served.metrics(), "it is seen")
        assert name_in(writer.export_handle()) in served.metrics()


def patched(queue: MessageQueue, patch: Callable[[bytearray, int], None]) -> bytes:
    """The bytes of its segment, changed; `patch` gets the offset of the header, too."""
    data = bytearray(path_of(queue).read_bytes())
    patch(data, data.index(b"MEMLANE1"))
    return bytes(data)


def put(data: bytearray, at: int, form: str, *values: int) -> None:
    struct.pack_into(form, data, at, *values)


def test_segments_that_lie() -> None:
    """Each is one that cannot be read, and the others are shown as ever."""
    sections = 256
    lies: list[Callable[[bytearray, int], None]] = [
        lambda data, at: put(data, at + 72, "<Q", 1 << 40),  # readers
        lambda data, at: put(data, at + 80, "<Q", 1 << 63),  # bytes of a chunk
        lambda data, at: put(data, at + 68, "<I", 0),  # no sections
        lambda data, at: put(data, at + sections + 16, "<Q", 0),  # no participants
        lambda data, at: put(data, at + sections + 16, "<Q", 1 << 50),
        lambda data, at: put(data, at + sections, "<I", 6),  # an object table in their place
        lambda data, at: put(data, at + sections, "<I", 8),  # a tier's counters
        lambda data, at: put(data, at + 64, "<I", 3),  # a tier without counters
    ]
    with MessageQueue(1, 1, None, 64, 2) as writer, exporter() as served:
        copies = [Path(f"/dev/shm/memlane-lie-{number}") for number in range(len(lies))]
        odd = os.fsencode("/dev/shm/memlane-") + b'\xff"\n'
        try:
            for path, lie in zip(copies, lies, strict=True):
                path.write_bytes(patched(writer, lie))
            with open(odd, "wb") as file:
                file.write(path_of(writer).read_bytes())
            names(served.metrics())
            seen = {segment["name"]: segment for segment in served.json()["segments"]}
            assert seen[name_in(writer.export_handle())]["kind"] == "queue"
            assert [bool(seen[path.name]["problem"]) for path in copies] == [True] * len(lies)
            assert f"memlane_unreadable_segments {len(lies)}\n" in served.metrics()
            assert run_memlane("ls").returncode == 0
            assert run_memlane("stuck").returncode == 0
        finally:
            for path in (*copies, odd):
                os.unlink(path)


def is_served(served: Exporter) -> bool:
    with suppress(OSError, http.client.HTTPException):
        return served.get("/metrics")[0] == 200
    return False


def connect(served: Exporter) -> socket.socket:
    """A client that the server has begun to serve."""
    threads = Path(f"/proc/{served.process.pid}/task")
    before = len(os.listdir(threads))
    client = socket.create_connection(("127.0.0.1", served.port))
    until(lambda: len(os.listdir(threads)) > before, "a thread serves it")
    return client


def send_slowly(client: socket.socket) -> None:
    while True:
        client.sendall(b"x")
        time.sleep(0.1)  # the time is what is tested


def test_clients_that_are_too_many() -> None:
    """Those that are silent make room, the oldest first: every scrape is answered."""
    constants = {"_MOST_CLIENTS": 4, "_PATIENCE": PATIENCE, "_MOMENT": PATIENCE}
    with exporter(**constants) as served, ExitStack() as stack:
        silent = [stack.enter_context(connect(served)) for _ in range(4)]
        for each in silent:
            each.settimeout(PATIENCE)
        served.metrics()
        assert silent[0].recv(1) == b""
        silent[3].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert silent[3].recv(12) == b"HTTP/1.0 200"
        for _ in range(8):
            served.metrics()


def test_clients_that_are_slow() -> None:
    """Are turned away once their time is over, also if they go on to send; others are served."""
    with exporter(_MOST_CLIENTS=1, _PATIENCE=1.0) as served:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            with pytest.raises(ConnectionError):
                send_slowly(client)
            assert time.monotonic() - began > 0.9
            until(lambda: is_served(served), "its time is over", pause=0.2)


def test_processes_that_come_and_go() -> None:
    """While they are scraped: series come and go, and nothing fails."""
    with exporter() as served:
        over = threading.Event()

        def churn() -> None:
            while not over.is_set():
                with MessageQueue(1, 1) as writer:
                    start_reader(writer.export_handle())
                    writer.wait_until_ready(PATIENCE)
                dismiss()

        churning = Aside(churn)
        seen: set[str] = set()

        def has_seen_some() -> bool:
            served.metrics()
            seen.update(segment["name"] for segment in served.json()["segments"])
            return len(seen) > 8

        try:
            until(has_seen_some, "queues came and went")
        finally:
            over.set()
        churning.result()


def test_many_scrapes_need_no_more_memory() -> None:
    """Memory stays as it is, and so do descriptors."""
    with queue_of(4) as (writer, _), exporter() as served:
        writer.enqueue(1)

        def held() -> tuple[int, int]:
            process = Path(f"/proc/{served.process.pid}")
            pages = int((process / "statm").read_text().split()[1])
            return pages, len(os.listdir(process / "fd"))

        for _ in range(100):
            served.metrics()
        before = held()
        for _ in range(300):
            served.metrics()
        after = held()
        assert after[0] - before[0] < 512  # pages: 2 MiB
        # The last connection ends a moment after its answer was read.
        until(lambda: held()[1] <= before[1], "descriptors are free again")


def test_it_ends_with_its_process() -> None:
    peer = start(_sleeps)
    peer.hear()
    with exporter("--ends-with", str(peer.pid)) as served:
        served.metrics()
        peer.kill()
        assert served.process.wait(PATIENCE) == 0


def _sleeps(link: Link) -> None:
    link.tell()
    link.hear()


def test_an_interrupted_export_ends() -> None:
    with exporter() as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(PATIENCE) == 0


def sending(link: Link, count: int) -> None:
    """Role: a writer that never pauses for long; its ring is full when a reader stops."""
    with MessageQueue(count, count, max_chunk_bytes=4096, max_chunks=8) as writer:
        link.tell([writer.export_handle(rank) for rank in range(count)])
        writer.wait_until_ready(PATIENCE)
        while not link.has_word():
            writer.enqueue(b"x" * 100, PATIENCE)
            time.sleep(0.002)  # the work


def taking(link: Link, handle: Handle, rank: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as reader:
        link.tell()
        for _ in reader:
            pass


@contextmanager
def scene(count: int = 3) -> Iterator[list[Any]]:
    """A writer and its readers, in processes of their own."""
    writer = start(sending, count)
    readers = [start(taking, handle, rank) for rank, handle in enumerate(writer.hear())]
    for reader in readers:
        reader.hear()
    yield readers
    writer.tell(None)
    writer.join()
    for reader in readers:
        reader.join()


BANNER = 'return [...document.querySelectorAll("#banner li")].map(line => line.textContent)'
OVERFLOWS = """
const wide = document.documentElement.scrollWidth > window.innerWidth;
const boxes = [...document.querySelectorAll("svg text")].filter(text => {
  const inside = text.getBoundingClientRect(), card = text.closest(".card").getBoundingClientRect();
  return inside.right > card.right || inside.left < card.left;
});
return wide || boxes.length > 0;
"""


@CHROMIUM
def test_the_page_names_a_stopped_reader_and_fits_a_phone(tmp_path: Path) -> None:
    """Names a stopped reader within two seconds; fits a phone and a desk, light and dark."""
    with scene() as readers, store_of() as _, exporter() as served, browser() as page:
        address = f"http://127.0.0.1:{served.port}/"
        for width in (400, 1400):
            for dark in (False, True):
                page.open(address, width, dark=dark)
                until(lambda: page.run('return document.querySelectorAll(".card svg").length >= 1'))
                until(lambda: page.run('return document.querySelector(".spark").points.length > 2'))
                assert not page.run(OVERFLOWS)
                until(lambda: page.run(BANNER) == [], "nobody is stuck")
                page.shoot(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
        os.kill(readers[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            until(lambda: page.run(BANNER), "the banner is there")
            assert_in_time(2.0, stopped)
            (sentence,) = page.run(BANNER)
            assert "no free chunk" in sentence
            assert f"reader 1 (pid {readers[1].pid}" in sentence
            assert f"`kill -CONT {readers[1].pid}`" in sentence
            page.shoot(picture(tmp_path, "live-page.png", page))
            assert page.run('return document.querySelectorAll(".link.waits").length > 0')
        finally:
            os.kill(readers[1].pid, signal.SIGCONT)
        until(lambda: page.run(BANNER) == [], "the banner has gone")
        assert page.errors() == []
        served.process.kill()
        until(lambda: "no answer" in "".join(page.run(BANNER)), "it says that nobody answers")


@PROMETHEUS
def test_prometheus_scrapes_and_its_rule_fires(tmp_path: Path) -> None:
    """Scrapes an exporter, and its rule fires for a stopped reader."""
    rules = (files("memlane.metrics") / "alerts.yml").read_text().replace("> 10\n", "> 1\n")
    (tmp_path / "rules.yml").write_text(rules)
    with scene() as readers, exporter() as served:
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [rules.yml]\n"
            "scrape_configs:\n"
            "  - job_name: memlane\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{served.port}']}}]\n"
        )
        command = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        log = tmp_path / "log"
        with log.open("w") as output, subprocess.Popen(command, stderr=output) as prometheus:
            try:
                until(lambda: "Listening on" in log.read_text(), "it listens")
                line = next(line for line in log.read_text().splitlines() if "Listening on" in line)
                where = line.rpartition("127.0.0.1:")[2].strip('"')

                def ask(path: str) -> Any:
                    with urllib.request.urlopen(f"http://127.0.0.1:{where}/api/v1/{path}") as found:
                        return json.load(found)["data"]

                until(lambda: has_scraped(ask), "it has scraped")
                until(lambda: ask("alerts")["alerts"] == [], "nobody is stuck")
                for expression in dashboard():
                    ask("query?query=" + urllib.parse.quote(expression))  # or status 400
                os.kill(readers[2].pid, signal.SIGSTOP)
                until(lambda: firing(ask("alerts")["alerts"]), "the alert fires")
                assert "no free chunk" in firing(ask("alerts")["alerts"])[0]
                if PICTURES is not None:
                    with browser() as page:
                        page.open(f"http://127.0.0.1:{where}/classic/alerts", 1100, dark=False)
                        drawn = 'return document.body.innerText.includes("MemlaneStuck")'
                        until(lambda: page.run(drawn), "the alert is shown")
                        page.shoot(picture(tmp_path, "alert.png", page, 560))
            finally:
                os.kill(readers[2].pid, signal.SIGCONT)
                prometheus.terminate()


def dashboard() -> list[str]:
    """Returns what its panels ask for."""
    board = json.loads((files("memlane.metrics") / "dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [each.replace("$__rate_interval", "1m").replace("$instance", ".*") for each in asked]


def picture(folder: Path, name: str, page: Browser, height: int = 370) -> Path:
    """Returns where to put that picture."""
    if PICTURES is None:
        return folder / name
    page.resize(1100, height)
    return Path(PICTURES) / name


def has_scraped(ask: Callable[[str], Any]) -> bool:
    with suppress(urllib.error.HTTPError):  # it is not ready yet
        return bool(ask("query?query=memlane_queue_chunks")["result"])
    return False


def firing(alerts: list[Any]) -> list[str]:
    return [
        each["annotations"]["summary"]
        for each in alerts
        if each["state"] == "firing" and each["labels"]["alertname"] == "MemlaneStuck"
    ]


def traced(writer: MessageQueue, text: str, pause: float, options: list[str]) -> str:
    """Returns what `memlane trace` prints of this process, whose writer sends that text
    meanwhile."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            writer.enqueue({"text": text}, PATIENCE)
            time.sleep(pause)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        done = run_memlane("trace", str(os.getpid()), *options)
    finally:
        over.set()
        sender.join()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_timeline_has_all_calls(tmp_path: Path) -> None:
    """It has the calls of the writer and its readers, in the format that Perfetto reads."""
    output = tmp_path / "trace.json"
    with MessageQueue(1, 1, max_chunk_bytes=1 << 25, max_chunks=2) as writer:
        peer = start(taking, writer.export_handle(), 0)
        writer.wait_until_ready(PATIENCE)
        timeline(writer, 1 << 24, 0, output, {"copying", "decoding", "waiting"})
        peer.kill()


def test_sigterm_ends_it_though_it_is_process_1() -> None:
    """The kernel ignores a signal to process 1 that has no handler, so there must be one."""
    with exporter() as served:
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        assert caught is not None
        assert int(caught[1], 16) & 1 << signal.SIGTERM - 1
        served.process.terminate()
        assert served.process.wait(PATIENCE) == 143


def test_a_timeline_of_a_process_that_is_killed(tmp_path: Path) -> None:
    """It waits until then, and no longer."""
    # Samples are seldom on a busy machine, and a wait and a death that last longer have more.
    assert any(waits_until_killed(tmp_path / "trace.json", pause) for pause in (0.5, 2.0, 8.0))


def waits_until_killed(output: Path, pause: float) -> bool:
    """Returns whether a reader that waits so long, and is dead so long, is shown as waiting until
    then."""
    with MessageQueue(1, 1) as writer:
        peer = start(taking, writer.export_handle(), 0)
        writer.wait_until_ready(PATIENCE)
        output.write_text("before")
        command = [sys.executable, "-m", "memlane", "trace", str(os.getpid()), "-o", str(output)]
        with subprocess.Popen([*command, "--seconds", "60"], stdout=subprocess.PIPE) as tracing:
            until(lambda: len(os.listdir(output.parent)) == 2, "it has begun")
            time.sleep(pause)  # the time is what is drawn
            assert output.read_text() == "before"
            killed = peer.kill()
            time.sleep(pause)
            tracing.send_signal(signal.SIGINT)
            assert tracing.wait(PATIENCE) == 0
    assert os.listdir(output.parent) == [output.name]
    spans = [e for e in json.loads(output.read_text())["traceEvents"] if e["ph"] == "X"]
    ends = [span["ts"] + span["dur"] for span in spans if span["pid"] == peer.pid]
    return len(ends) == 1 and abs(ends[0] / 1e6 - killed) < 0.4 * pause


@CHROMIUM
def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    """Rows, spans and curves, by a page that knows only the format."""
    output = tmp_path / "trace.json"
    with MessageQueue(2, 2, max_chunk_bytes=1 << 23, max_chunks=4) as writer:
        peers = [start(taking, writer.export_handle(0), 0), start(holding, writer.export_handle(1))]
        writer.wait_until_ready(PATIENCE)
        names = {"copying", "decoding", "holding", "waiting"}
        trace = timeline(writer, 7 << 20, 0.004, output, names)
        for peer in peers:
            peer.kill()
    with browser() as page:
        page.open((Path(__file__).parents[1] / "support/timeline.html").as_uri(), 1100, dark=False)
        rows = page.run(f"return draw({json.dumps(trace)})")
        assert rows == 3
        page.shoot(picture(tmp_path, "timeline.png", page, 300))


def holding(_link: Link, handle: Handle) -> None:
    """Role: a reader that keeps each message for a while."""
    with MessageQueue.create_from_handle(handle, 1) as reader, suppress(WriterClosed):
        while True:
            with reader.acquire_read():
                time.sleep(0.01)


def timeline(
    writer: MessageQueue, nbytes: int, pause: float, output: Path, expected: set[str]
) -> Any:
    """Returns a timeline of texts that are sent, in which each of the `expected` spans was seen."""
    for seconds in ("1", "4", "16"):  # samples are seldom on a busy machine: `trace` gives way
        done = traced(writer, "x" * nbytes, pause, ["--seconds", seconds, "-o", str(output)])
        assert "1 segments" in done
        trace = json.loads(output.read_text())
        if expected <= {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}:
            break
    events = trace["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any(row.endswith(": writer") for row in rows)
    spans = [event for event in events if event["ph"] == "X"]
    assert expected <= {span["name"] for span in spans}
    last: dict[int, float] = {}
    for span in spans:
        assert span["dur"] > 0
        assert span["ts"] >= last.get(span["tid"], 0.0) - 1.0
        last[span["tid"]] = span["ts"] + span["dur"]
    counters = [event for event in events if event["ph"] == "C"]
    assert counters
    assert all(isinstance(value, int) for each in counters for value in each["args"].values())
    return trace


def test_a_death_between_two_scrapes_is_counted_and_outlives_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody looks between them but for the end of a participant."""
    line = 'memlane_queue_deaths_total{queue="steps",role="reader"} '
    queue = MessageQueue(1, 1, name="steps")
    reader = start_reader(queue.export_handle())
    queue.wait_until_ready(PATIENCE)
    with closing(export.Source(None)) as source:
        assert f"{line}0\n" in source.metrics()
        monkeypatch.setattr(export, "_FRESH", float("inf"))  # a scrape takes no look
        reader.peer.kill()
        until(lambda: f"{line}1\n" in source.metrics(), "it is counted", pause=0.01)
        monkeypatch.undo()
        queue.close()
        assert f"{line}1\n" in source.metrics()
        assert "memlane_look_errors_total 0\n" in source.metrics()
