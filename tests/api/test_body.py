"""Uploads that are cut, too large, or merely large, over real HTTP."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.asking import models, post, staged
from tests.api.server import Running, serving, until

pytestmark = pytest.mark.usefixtures("clean")


def form_of(files: dict[str, bytes], name: str) -> bytes:
    body = f'--cut\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}\r\n'.encode()
    for filename, content in files.items():
        head = f'--cut\r\nContent-Disposition: form-data; name="file"; filename="{filename}"'
        body += head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + b"--cut--\r\n"


def head_of(length: int | None) -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        "POST /v1/adapters HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: multipart/form-data; boundary=cut\r\n{size}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_upload_leaves_nothing(
    server: Running, files: dict[str, bytes], share: float
) -> None:
    body = form_of(files | {WEIGHTS_FILE: bytes(3 << 20)}, "cut")
    with server.connect() as connection:
        connection.sendall(head_of(len(body)) + body[: int(len(body) * share)])
        until(lambda: len(staged(server)) == 1, 5)
    until(lambda: not staged(server), 5)
    assert models(server) == ["tiny"]
    assert post(server, "cut", list(files.items())).status_code == 201


def test_a_body_shorter_than_its_form_is_refused(server: Running, files: dict[str, bytes]) -> None:
    body = form_of(files, "short")[:-20]
    with server.connect() as connection:
        connection.sendall(head_of(len(body)) + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_declared_size_below_the_forms_is_refused(
    server: Running, files: dict[str, bytes]
) -> None:
    body = form_of(files, "short")
    with server.connect() as connection:
        connection.sendall(head_of(len(body) - 20) + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    until(lambda: not staged(server), 5)
    assert models(server) == ["tiny"]


def test_a_declared_size_over_the_limit_is_refused_unread(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(head_of(1 << 40))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_undeclared_size_is_refused_when_it_passes_the_limit(server: Running) -> None:
    limit = server.settings.max_upload
    start = form_of({WEIGHTS_FILE: b""}, "big").removesuffix(b"\r\n--cut--\r\n")
    piece = bytes(1 << 20)
    sent = 0
    with server.connect() as connection:
        connection.sendall(head_of(None) + b"%x\r\n%s\r\n" % (len(start), start))
        connection.settimeout(0.001)
        answer = b""
        while not answer:
            connection.settimeout(10)
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            sent += len(piece)
            assert sent < 2 * limit, "the server takes more than its limit"
            connection.settimeout(0.001)
            try:
                answer = connection.recv(100)
            except TimeoutError:
                pass
    assert answer.startswith(b"HTTP/1.1 413") and sent > limit


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_large_upload_neither_fills_memory_nor_stops_streams(
    scripted: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    size, piece = 160 << 20, bytes(1 << 16)
    body_start = form_of({CONFIG_FILE: files[CONFIG_FILE], WEIGHTS_FILE: b""}, "large")
    start, end = body_start[:-11], body_start[-11:]

    def body() -> Iterator[bytes]:
        yield start
        for _ in range(size // len(piece)):
            yield piece
        yield end

    with serving(scripted, tmp_path, max_upload=256 << 20) as server:
        peaks, gaps = [0], [0.0]
        before = resident_bytes()
        done = threading.Event()

        def stream() -> None:
            while not done.is_set():
                request = {"model": "tiny", "prompt": "!", "max_tokens": 400, "stream": True}
                with server.client.stream("POST", "/v1/completions", json=request) as response:
                    last = time.monotonic()
                    for _ in response.iter_lines():
                        now = time.monotonic()
                        gaps.append(now - last)
                        peaks.append(resident_bytes() - before)
                        last = now

        streaming = threading.Thread(target=stream)
        streaming.start()
        headers = {"content-type": "multipart/form-data; boundary=cut"}
        with httpx.Client(base_url=server.client.base_url, timeout=60) as client:
            response = client.post("/v1/adapters", content=body(), headers=headers)
        done.set()
        streaming.join()
        assert response.status_code == 422 and len(gaps) > 20
        assert max(peaks) < 64 << 20
        assert max(gaps) < 1.0
        assert not staged(server)
