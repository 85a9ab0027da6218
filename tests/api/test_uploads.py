"""Adapters in, over real HTTP: good ones, hostile ones, cut ones, large ones."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.archive_files import tar_of, zip_of
from tests.api.asking import Files, models, post, staged, violations
from tests.api.server import Running, serving, until
from tests.tiny import make_adapter, signature_adapter

pytestmark = pytest.mark.usefixtures("clean")


def test_an_upload_is_served_at_once(server: Running, adapter: Path) -> None:
    assert models(server) == ["tiny"]
    response = server.upload("nine", adapter)
    assert response.status_code == 201
    record = response.json()
    assert (record["name"], record["version"], record["rank"]) == ("nine", 1, 1)
    assert record["targets"] == ["lm_head"]
    (warning,) = record["warnings"]
    assert "the base served is 'tiny'" in warning
    assert len(record["digest"]) == 64 and record["parameters"] == 64 + 320
    assert models(server) == ["tiny", "nine"]
    assert server.complete("nine", max_tokens=3)["choices"][0]["text"] == "999"
    listed = server.openai.models.list().data
    assert listed[1].parent == "tiny"  # type: ignore[attr-defined]
    one = server.openai.models.retrieve("nine")
    assert one.id == "nine" and one.created == listed[1].created
    report = record.pop("report")
    assert report["status"] == "accepted" and report["effect"] == record["effect"] > 1
    assert server.client.get("/v1/adapters/nine").json()["versions"] == [record]
    assert server.client.get("/v1/adapters/nine/versions/1").json() == record
    stored = server.client.get("/v1/adapters/nine/versions/1/report").json()
    assert (stored["name"], stored["version"], stored["report"]) == ("nine", 1, report)


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tgz"])
@pytest.mark.parametrize("folder", ["", "my-adapter/"])
def test_archives_are_the_same_as_files(
    server: Running, files: dict[str, bytes], kind: str, folder: str
) -> None:
    digest = post(server, "plain", list(files.items())).json()["digest"]
    members = {folder + name: content for name, content in files.items()}
    packed = zip_of(members) if kind == "zip" else tar_of(members)
    response = post(server, "packed", [(f"adapter.{kind}", packed)], field="file")
    assert response.status_code == 201 and response.json()["digest"] == digest


def test_a_new_upload_is_a_new_version_and_the_old_one_stays(
    server: Running, scripted: Path, adapter: Path, tmp_path: Path
) -> None:
    server.upload("pet", adapter)
    second = server.upload("pet", signature_adapter(scripted, tmp_path / "b", 61))
    assert second.json()["version"] == 2
    assert server.complete("pet", max_tokens=1)["choices"][0]["text"] == ":"
    assert server.complete("pet@1", max_tokens=1)["choices"][0]["text"] == "9"
    assert server.client.get("/v1/models/pet@1").json()["parent"] == "tiny"


def test_requests_finish_on_the_version_they_began_with(
    server: Running, scripted: Path, adapter: Path, tmp_path: Path
) -> None:
    server.upload("pet", adapter)
    body = {"model": "pet", "prompt": "!", "max_tokens": 60, "stream": True, "temperature": 0}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.upload("pet", signature_adapter(scripted, tmp_path / "b", 61)).is_success
        assert server.client.delete("/v1/adapters/pet").is_success
        text = [json.loads(line[6:])["choices"][0]["text"] for line in lines if "{" in line]
    assert "".join(text) == "9" * 59
    assert server.client.post("/v1/completions", json=body).status_code == 404


def test_repeating_an_upload_makes_no_second_version(server: Running, adapter: Path) -> None:
    first = server.upload("same", adapter, **{"Idempotency-Key": "k1"})
    again = server.upload("same", adapter, **{"Idempotency-Key": "k1"})
    assert (first.status_code, again.status_code) == (201, 201)
    unchanged = server.upload("same", adapter)
    assert unchanged.status_code == 200
    assert first.json() == again.json() == unchanged.json()
    conflict = server.upload("other", adapter, **{"Idempotency-Key": "k1"})
    assert conflict.status_code == 409
    assert conflict.headers["x-should-retry"] == "false" and "retry-after" not in conflict.headers
    assert server.upload("other", adapter, **{"Idempotency-Key": "no way"}).status_code == 400


def test_a_deleted_adapter_is_gone(server: Running, adapter: Path) -> None:
    server.upload("gone", adapter)
    server.complete("gone", max_tokens=1)
    assert server.client.delete("/v1/adapters/gone").json()["deleted"] is True
    until(lambda: server.engine.stats().adapters.resident == 0, 1)
    for method in ("GET", "DELETE"):
        response = server.client.request(method, "/v1/adapters/gone")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "adapter_not_found"
    assert models(server) == ["tiny"]
    assert server.upload("gone", adapter).json()["version"] == 2


def test_files_of_a_deleted_adapter_go_once_no_request_needs_them(
    scripted: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.app.SWEEP_EVERY_S", 0.02)
    with serving(scripted, tmp_path / "data") as server:
        kept = server.upload("kept", signature_adapter(scripted, tmp_path / "b", 61)).json()
        digest = server.upload("gone", adapter).json()["digest"]
        monkeypatch.setattr("api.app.SWEEP_MIN_AGE_S", 0.0)
        blobs = server.settings.data / "adapters" / "blobs"
        with server.openai.completions.create(
            model="gone", prompt="!", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            assert next(stream).choices[0].text == "9"
            assert server.client.delete("/v1/adapters/gone").status_code == 200
            time.sleep(0.2)
            assert (blobs / digest[:2] / digest).is_dir()
        until(lambda: not (blobs / digest[:2] / digest).exists(), 10)
        assert (blobs / kept["digest"][:2] / kept["digest"]).is_dir()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("lora", 201),
        ("default", 201),
        ("weight", 201),
        ("v1.2", 201),
        ("a" * 64, 201),
        ("org/name", 400),
        ("a:b", 400),
        ("a@1", 400),
        ("Ünï", 400),
        ("UPPER", 400),
        ("a b", 400),
        ("a" * 300, 400),
        ("a" * 5000, 400),
        ("", 400),
        (" ", 400),
        ("..", 400),
        ("../x", 400),
        ("__base__", 409),
        ("base", 409),
        ("tiny", 409),
    ],
)
def test_adapter_names(server: Running, adapter: Path, name: str, status: int) -> None:
    response = server.upload(name, adapter)
    assert response.status_code == status, response.text
    if status == 201:
        answer = server.complete(name, max_tokens=1)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, "9")
    else:
        assert len(response.text) < 600 and models(server) == ["tiny"]


class Pickle:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_pickles_are_refused_unread(
    server: Running, files: dict[str, bytes], tmp_path: Path
) -> None:
    bad = pickle.dumps(Pickle(tmp_path / "mark"))
    config = (CONFIG_FILE, files[CONFIG_FILE])
    response = post(server, "evil", [config, ("adapter_model.bin", bad)])
    assert violations(response) == {"unexpected_weights", "missing_file"}
    assert "scripts/check_adapter FOLDER --convert" in response.text
    both = post(server, "evil", [*files.items(), ("adapter_model.bin", bad)])
    assert violations(both) == {"unexpected_weights"}
    renamed = post(server, "evil", [config, (WEIGHTS_FILE, bad)])
    assert renamed.status_code == 422
    packed = zip_of({CONFIG_FILE: files[CONFIG_FILE], "adapter_model.bin": bad})
    assert "unexpected_weights" in violations(post(server, "evil", [("a.zip", packed)]))
    assert not (tmp_path / "mark").exists()
    assert models(server) == ["tiny"] and server.client.get("/live").is_success


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({CONFIG_FILE: None}, {"missing_file"}),
        ({WEIGHTS_FILE: None}, {"missing_file"}),
        ({CONFIG_FILE: None, WEIGHTS_FILE: None}, {"missing_file"}),
        ({"step-250.safetensors": b"x"}, {"unexpected_weights"}),
        ({"checkpoint-10/adapter_model.safetensors": b"x"}, {"sub_folder"}),
        ({"../adapter_config.json": b"{}"}, {"unsafe_name"}),
        (
            {CONFIG_FILE: b"nope", "optimizer.pt": b""},
            {"invalid_adapter_config", "unexpected_weights"},
        ),
        ({WEIGHTS_FILE: b"<html>"}, {"corrupt_adapter"}),
    ],
)
def test_wrong_sets_of_files_are_refused_with_all_reasons(
    server: Running, files: dict[str, bytes], change: dict[str, bytes | None], codes: set[str]
) -> None:
    content = {k: v for k, v in (files | change).items() if v is not None}
    plain = post(server, "wrong", list(content.items()) or [("README.md", b"")])
    assert violations(plain) == codes
    packed = zip_of(content or {"README.md": b""})
    assert violations(post(server, "wrong", [("a.zip", packed)])) == codes
    assert models(server) == ["tiny"] and not staged(server)
    assert post(server, "wrong", list(files.items())).status_code == 201


def test_harmless_files_are_ignored_and_told(server: Running, files: dict[str, bytes]) -> None:
    extra = [("README.md", b"hello"), ("tokenizer.json", b"{}"), ("training_args.bin", b"?")]
    response = post(server, "extra", [*files.items(), *extra])
    assert response.status_code == 201
    warning = response.json()["warnings"][0]
    assert all(name in warning for name, _ in extra if name != "tokenizer.json")
    assert response.json()["report"]["tokenizer"]


@pytest.mark.parametrize(
    ("sent", "codes"),
    [
        ([("a.zip", b"PK nope")], {"archive_unreadable"}),
        ([("a.tar.xz", b"x")], {"archive_kind"}),
        ([("a.zip", zip_of({"x": b""})), ("b.zip", zip_of({"x": b""}))], {"archive_and_files"}),
        ([("a.zip", zip_of({"x": b""})), (CONFIG_FILE, b"{}")], {"archive_and_files"}),
        ([(CONFIG_FILE, b"{}"), ("a.zip", zip_of({"x": b""}))], {"archive_and_files"}),
    ],
)
def test_archives_that_are_not_taken(server: Running, sent: Files, codes: set[str]) -> None:
    assert violations(post(server, "x", sent)) >= codes


@pytest.mark.parametrize(
    ("data", "form", "param"),
    [
        ({}, "files", "name"),
        ({"name": "a", "alias": "b"}, "files", "alias"),
        ({"name": ["a", "b"]}, "files", "name"),
        ({"name": "a"}, "weights", "weights"),
    ],
)
def test_forms_are_read_strictly(
    server: Running, files: dict[str, bytes], data: dict[str, Any], form: str, param: str
) -> None:
    sent = [(form, item) for item in files.items()]
    response = server.client.post("/v1/adapters", data=data, files=sent)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_name_may_come_last(server: Running, files: dict[str, bytes]) -> None:
    parts: list[tuple[str, Any]] = [("files", item) for item in files.items()]
    parts.append(("name", (None, b"last")))
    assert server.client.post("/v1/adapters", files=parts).status_code == 201


def test_uploads_of_one_name_at_once_are_all_kept(
    server: Running, scripted: Path, tmp_path: Path
) -> None:
    folders = [signature_adapter(scripted, tmp_path / str(i), 60 + i) for i in range(4)]
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda f=folder: answers.append(server.upload("race", f)))
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.json()["version"] for answer in answers) == [1, 2, 3, 4]
    for answer in answers:
        record = answer.json()
        got = server.complete(f"race@{record['version']}", max_tokens=1)
        assert got["system_fingerprint"] == "fp_" + record["digest"][:16]


def test_adapters_over_the_servers_limits_are_refused(llama_base: Path, tmp_path: Path) -> None:
    wide = make_adapter(llama_base, tmp_path / "wide", seed=1, r=9)
    fine = make_adapter(llama_base, tmp_path / "fine", seed=1, r=8)
    with serving(llama_base, tmp_path / "data", max_rank=8) as server:
        assert violations(server.upload("wide", wide)) == {"rank_over_limit"}
        assert server.upload("fine", fine).status_code == 201


def test_values_that_the_served_type_cannot_hold_are_refused(
    llama_base: Path, tmp_path: Path
) -> None:
    folder = make_adapter(llama_base, tmp_path / "a", seed=1)
    tensors = load_file(folder / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = 3.4e38  # the largest bfloat16 is a little less
    save_file(tensors, folder / WEIGHTS_FILE)
    with serving(llama_base, tmp_path / "half", dtype="bfloat16") as server:
        response = server.upload("large", folder)
        assert violations(response) == {"non_finite_weights"}
        assert "too large for bfloat16" in response.text
        assert models(server) == ["tiny"]


def test_uploads_and_deletions_of_one_name_at_once_never_fail_nor_mix(
    server: Running, scripted: Path, tmp_path: Path
) -> None:
    """Ten equal uploads, ten different ones, ten deletions and twenty questions, all together."""
    folders = [signature_adapter(scripted, tmp_path / str(i), 60 + i) for i in range(10)]
    letters = {chr(57 + i) for i in range(10)}
    body = {"model": "race", "prompt": "!", "max_tokens": 5, "temperature": 0}

    def act(i: int) -> tuple[str, int]:
        with httpx.Client(base_url=server.client.base_url, timeout=60) as client:
            if i % 5 == 4:
                return "delete", client.delete("/v1/adapters/race").status_code
            if i % 5 >= 2:
                answer = client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    text = answer.json()["choices"][0]["text"]
                    assert text == text[0] * 5 and text[0] in letters
                return "ask", answer.status_code
            folder = folders[0] if i % 5 == 0 else folders[i // 5]
            files = [("files", (n, (folder / n).read_bytes())) for n in (CONFIG_FILE, WEIGHTS_FILE)]
            return "upload", client.post(
                "/v1/adapters", data={"name": "race"}, files=files
            ).status_code

    with ThreadPoolExecutor(50) as threads:
        ends = set(threads.map(act, range(50)))
    allowed = {"upload": {200, 201}, "delete": {200, 404}, "ask": {200, 404}}
    assert all(status in allowed[what] for what, status in ends), ends
    until(lambda: not staged(server) and server.idle(), 5)
    last = server.upload("race", folders[3])
    assert last.status_code in (200, 201)
    assert server.complete("race", max_tokens=2)["choices"][0]["text"] == "<<"
    deletions = [server.client.delete("/v1/adapters/race").status_code for _ in range(3)]
    assert deletions == [200, 404, 404]


@pytest.mark.parametrize("field", ["file", "files"])
def test_a_forgotten_at_sign_is_answered_with_what_to_write(server: Running, field: str) -> None:
    form = {"name": (None, "x"), field: (None, CONFIG_FILE)}
    response = server.client.post("/v1/adapters", files=form)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "missing_file")
    assert f"with curl, write {field}=@adapter_config.json" in error["message"]


def test_a_missing_file_is_explained_by_the_one_sent_instead(
    server: Running, files: dict[str, bytes]
) -> None:
    sent = [("config.json", files[CONFIG_FILE]), (WEIGHTS_FILE, files[WEIGHTS_FILE])]
    response = post(server, "x", sent)
    assert violations(response) == {"missing_file"}
    (violation,) = response.json()["error"]["violations"]
    assert "sent were config.json, which are not read" in violation["message"]


def test_what_is_too_large_is_answered_with_the_setting(server: Running) -> None:
    large = server.settings.max_upload + 1
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for path, length, flag in (
        ("/v1/adapters", large + (2 << 20), "--max-upload"),
        ("/v1/completions", server.settings.max_body + 1, "--max-body"),
    ):
        with server.connect() as connection:
            lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            answer = connection.recv(1 << 16)
            while b"}" not in answer:
                answer += connection.recv(1 << 16)
        assert b" 413 " in answer and f"(set by {flag})".encode() in answer
