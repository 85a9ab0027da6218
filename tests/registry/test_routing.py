"""Names: what an adapter may be called, and which version a model name leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters.manifest import BaseSpec
from registry.errors import Conflict, InvalidName, NotFound, WrongBase
from registry.routing import check_name, resolve
from tests.registry.servers import manifest, run, running

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SERVED = BaseSpec(BASE, 100, 100, ())


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
                route = resolve(opened.snapshot, "t", model, SERVED)
                assert route.model == model
                assert route.adapter == adapter
                assert route.version == adapter.versions[number - 1]
            base = resolve(opened.snapshot, "t", BASE, SERVED)
            assert (base.model, base.adapter, base.version) == (BASE, None, None)

    run(test)


def test_versions_of_another_base_never_answer(tmp_path: Path) -> None:
    ours, theirs = (
        replace(SERVED, name=n, digest=d) for n, d in (("ours", "aa"), ("theirs", "bb"))
    )

    async def test() -> None:
        async with running(tmp_path) as opened:
            for number, (base, seed) in enumerate(
                [(ours, 1), (theirs, 1), (theirs, 2), (theirs, 2)], start=1
            ):
                made = replace(manifest(seed), base_name=base.name, base_digest=base.digest)
                added = await opened.add_version("t", "a", made, request_id=f"r{number}")
                # Equal files are another version only if they are for another base.
                assert added.number == min(number, 3)

            def number_of(model: str, base: BaseSpec) -> int:
                version = resolve(opened.snapshot, "t", model, base).version
                assert version is not None
                return version.number

            shared = f"a@sha256:{manifest(1).digest}"
            for model, ours_is, theirs_is in [("a", 1, 3), ("a@latest", 1, 3), (shared, 1, 2)]:
                assert number_of(model, ours) == ours_is
                assert number_of(model, theirs) == theirs_is
            for model in ("a@2", "a@3", f"a@sha256:{manifest(2).digest}"):
                with pytest.raises(WrongBase, match="uploaded for the base 'theirs'"):
                    resolve(opened.snapshot, "t", model, ours)
            with pytest.raises(WrongBase):
                resolve(opened.snapshot, "t", "a", replace(ours, digest="cc"))

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
                    resolve(opened.snapshot, "t", model, SERVED)
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
