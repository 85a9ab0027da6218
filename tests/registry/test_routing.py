"""Names: what an adapter may be called, and which version a model name leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.errors import Conflict, InvalidName, NotFound
from registry.routing import check_name, resolve
from tests.registry.servers import manifest, run, running

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_every_form_of_a_model_name_leads_to_its_version(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            for seed in (1, 2, 1):  # version 3 has the content of version 1 again
                revision = opened.snapshot.revision
                await opened.add_version("t", "a.b", manifest(seed), request_id=f"r{revision}")
            adapter = opened.snapshot.get("t", "a.b")
            for model, number in (
                ("a.b", 3),
                ("a.b@latest", 3),
                ("a.b@1", 1),
                ("a.b@2", 2),
                (f"a.b@sha256:{manifest(2).digest}", 2),
                (f"a.b@sha256:{manifest(1).digest}", 3),
            ):
                route = resolve(opened.snapshot, "t", model, BASE)
                assert route.model == model
                assert route.adapter == adapter
                assert route.version == adapter.versions[number - 1]
            base = resolve(opened.snapshot, "t", BASE, BASE)
            assert (base.model, base.adapter, base.version) == (BASE, None, None)

    run(test)


def test_what_does_not_exist_is_never_served_by_the_base(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            await opened.add_version("t", "tone", manifest(1), request_id="r1")
            await opened.add_version("u", "theirs", manifest(2), request_id="r2")
            await opened.add_version("t", "gone", manifest(3), request_id="r3")
            await opened.delete_adapter("t", "gone", request_id="r4")
            models = ["", " ", "tine", "Tone", "tone ", " tone", "tone\n", "gone", "theirs"]
            models += ["tone@", "tone@2", "tone@0", "tone@01", "tone@-1", "tone@+1", "tone@1 "]
            models += ["tone@Latest", "tone@latest@1", "@1", "tone@1@1", "tone@١", "tone@prod"]
            models += [f"tone@sha256:{manifest(2).digest}", f"tone@{manifest(1).digest}"]
            models += [f"tone@SHA256:{manifest(1).digest}", "tone@sha256:", "tone@" + "9" * 5000]
            models += [BASE.lower(), BASE + " ", BASE + "@1", BASE + "@latest", BASE.split("/")[1]]
            models += ["/etc/passwd", "../tone", "t/tone", "file:///etc/passwd", "base", "__base__"]
            for model in models:
                with pytest.raises(NotFound) as caught:
                    resolve(opened.snapshot, "t", model, BASE)
                # One message, whether it exists for someone else, existed once or never did.
                if len(model) < 200:
                    assert str(caught.value) == f"The model {model!r} does not exist."
                assert len(str(caught.value)) < 300

    run(test)


@pytest.mark.parametrize(
    "name",
    ["lora", "default", "weight", "v1.2", "latest", "0", "a" * 64, "a..b", "a_-", "lora_a.weight"],
)
def test_plain_names_are_allowed_however_odd(name: str) -> None:
    check_name(name, BASE)


@pytest.mark.parametrize(
    "name",
    ["", " ", "..", "../x", "org/name", "a:b", "a@1", "Ünï", "A", "a b", "a\n", "-a", ".a", "_a"]
    + ["a" * 65, "x" * 300, "a\0", "a%2fb", "http://169.254.169.254/", "/etc/passwd", "ⅷ", "a١"],
)
def test_other_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidName, match="1 to 64 of a-z, 0-9") as caught:
        check_name(name, BASE)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [BASE, "__base__", "base"])
def test_the_names_of_the_base_are_taken(name: str) -> None:
    with pytest.raises(Conflict, match="reserved"):
        check_name(name, BASE)
    with pytest.raises(Conflict):
        check_name("tiny", "tiny")
