"""Records survive their JSON and stored forms exactly."""

from __future__ import annotations

import dataclasses
import json

import pytest

from registry.records import Adapter, Version
from tests.registry.servers import manifest

VERSION = Version(
    3,
    manifest(1).digest,
    1_700_000_000,
    dataclasses.replace(manifest(1, modules=210), warnings=("ünï \0 'quoted'",), base_model="b/c"),
    "req-1",
)


def test_json_forms_are_exact() -> None:
    adapter = Adapter("t", "a", 5, (VERSION, dataclasses.replace(VERSION, number=4)))
    assert Adapter.from_json(json.loads(json.dumps(adapter.to_json()))) == adapter
    assert Version.from_json(json.loads(json.dumps(VERSION.to_json()))) == VERSION
    assert adapter.latest.number == 4


def test_the_stored_form_is_exact_and_small() -> None:
    packed = VERSION.pack()
    assert Version.unpack(3, packed) == VERSION
    assert Version.unpack(8, packed) == dataclasses.replace(VERSION, number=8)
    assert len(packed) < len(json.dumps(VERSION.to_json())) / 5


def test_no_damage_to_the_stored_form_goes_unnoticed() -> None:
    packed = VERSION.pack()
    for place in range(0, len(packed), 7):
        for damaged in (
            packed[:place],
            packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :],
        ):
            with pytest.raises(ValueError, match="stored version 3"):
                Version.unpack(3, damaged)
