"""Random adapters are served as PEFT computes them, or refused; never anything in between.

LORIKEET_EXAMPLES=2000 looks at as many of each kind, other ones each time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from hypothesis import strategies as st

from adapters.errors import AdapterRejected
from tests.fuzz.options import NAMES, Options, options
from tests.fuzz.served import TOLERANCE, Stand, stand
from tests.tiny import make_adapter, tiny_base

pytestmark = pytest.mark.filterwarnings("ignore::Warning:peft")

#: Examples of each test; 0 means a few, the same each time.
EXAMPLES = int(os.environ.get("LORIKEET_EXAMPLES", "0"))


class Stands(dict[str, Stand]):
    """Family -> its stand, put up when first asked for."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        super().__init__()
        self._root, self._stack = root, stack

    def __missing__(self, family: str) -> Stand:
        base = tiny_base(self._root / family, family)
        self[family] = self._stack.enter_context(stand(base, family))
        return self[family]


@pytest.fixture(scope="module")
def stands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stands]:
    with ExitStack() as stack:
        yield Stands(tmp_path_factory.mktemp("bases"), stack)


def examples(short: int) -> Any:
    return settings(
        max_examples=EXAMPLES or short,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(300 + 3 * EXAMPLES)
def test_what_peft_saves_is_served_exactly(stands: Stands) -> None:
    seen: Counter[str] = Counter()

    @examples(60)
    @given(st.sampled_from(sorted(NAMES)).flatmap(lambda f: st.tuples(st.just(f), options(f))))
    def run(drawn: tuple[str, Options]) -> None:
        family, options = drawn
        stand = stands[family]
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "adapter"
            try:
                make_adapter(stand.base, folder, **options)
            except Exception as error:  # what PEFT does not do
                event(f"PEFT: {type(error).__name__}")
                seen["no adapter"] += 1
                reject()
            try:
                ref = stand.accept(folder)
            except AdapterRejected as error:
                codes = {violation.code for violation in error.violations}
                seen.update(codes)
                assert codes <= refusals(family, options), (error.violations, config(folder))
                return
            try:
                found = stand.difference(ref, folder)
            finally:
                stand.engine.forget(ref.digest)
            assert found < max(TOLERANCE, 4 * stand.rounding(folder)), (found, config(folder))
            seen["served"] += 1

    run()
    if EXAMPLES:
        print(seen)
    assert seen["served"] > 0.5 * seen.total(), seen


def refusals(family: str, options: Options) -> set[str]:
    """The codes with which an adapter of these options may be refused, because it is documented."""
    return set()


def config(folder: Path) -> dict[str, Any]:
    """What the adapter's config says, but for what is empty."""
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return {key: value for key, value in found.items() if value not in (None, False, [], {})}
