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
from adapters.manifest import AdapterRef
from tests.fuzz.good import contents
from tests.fuzz.options import NAMES, Options, options
from tests.fuzz.served import Stand, stand
from tests.fuzz.spoiling import Spoilt, spoilt
from tests.fuzz.uploads import Folder
from tests.tiny import make_adapter, tiny_base

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:peft"),
    # What hypothesis says when it shows an example that fails.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

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


def examples(short: int) -> settings:
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

    @examples(50)
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
                known = codes & refusals(options) or not loads(stand, folder, options)
                assert known, (error.violations, config(folder))
                return
            try:
                found = stand.difference(ref, folder)
            finally:
                stand.engine.forget(ref.digest)
            assert found < 1, (found, config(folder))
            seen["served"] += 1

    run()
    if EXAMPLES:
        print(seen)
    assert seen["served"] > 0.5 * seen.total(), seen


@pytest.mark.timeout(300 + 3 * EXAMPLES)
def test_a_changed_file_is_refused_or_served_as_peft_reads_it(
    stands: Stands, tmp_path: Path
) -> None:
    stand = stands["llama"]
    good = good_adapters(stand.base, tmp_path)
    seen: Counter[str] = Counter()

    @examples(120)
    @given(spoilt(good))
    def run(changed: Spoilt) -> None:
        with tempfile.TemporaryDirectory() as root:
            folder = write(Path(root) / "changed", changed.files)
            original = write(Path(root) / "original", good[changed.name])
            seen[judged(stand, folder, original)] += 1

    run()
    if EXAMPLES:
        print(seen)
    assert seen["served"] > 0.1 * seen.total(), seen
    assert len(seen) > 5, seen


def judged(stand: Stand, folder: Path, original: Path) -> str:
    """ "served", "read otherwise" or the code of the refusal of the adapter in `folder`, which is
    that of `original` after a change. Fails where it is not served as it must be."""
    try:
        ref = stand.accept(folder)
    except AdapterRejected as error:
        return error.violations[0].code
    try:
        if read_by_peft(stand, ref, folder):
            assert stand.difference(ref, folder) < 1
            return "served"
        # Only names are otherwise than PEFT's, and mean what they did before.
        assert stand.difference(ref, original) < 1
        return "read otherwise"
    finally:
        stand.engine.forget(ref.digest)


def read_by_peft(stand: Stand, ref: AdapterRef, folder: Path) -> bool:
    """Whether PEFT loads all of the adapter and nothing else. If not, for it knows names only as it
    writes them, the upload's report must tell of those that were read otherwise."""
    told = {name for name, _ in (*ref.manifest.mapped, *ref.manifest.unused)}
    try:
        missing, ignored = stand.left_out(folder)
    except KeyError as error:  # of a saved module's tensor
        assert ref.manifest.mapped, error
        return False
    assert ignored <= told and len(missing) <= len(ignored), (missing, ignored - told)
    return not (missing or ignored)


def good_adapters(base: Path, root: Path) -> dict[str, Folder]:
    """Adapters with different features, to be changed."""
    options: dict[str, Options] = {
        "plain": {"target_modules": ["q_proj", "k_proj", "up_proj"]},
        "patterns": {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {r"layers\.1\..*": 3},
        },
        "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
        "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
        "ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 60]},
    }
    return {
        name: contents(make_adapter(base, root / name, seed=i, **more))
        for i, (name, more) in enumerate(options.items())
    }


def write(folder: Path, files: Folder) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def loads(stand: Stand, folder: Path, options: Options) -> bool:
    """Whether PEFT loads what it saved: in a config, the keys of a pattern are sorted anew."""
    added = options.get("added_tokens", 0)
    try:
        stand.peft(folder, stand.engine.base.vocab_size + added if added else 0)
    except Exception:  # whatever PEFT raises
        return False
    return True


def refusals(options: Options) -> set[str]:
    """The codes for one of which an adapter of these options may be refused, as is documented."""
    found = set()
    if options.get("alora_invocation_tokens"):
        # Together with anything that changes what comes before the invocation.
        found.add("invalid_combination")
    saved, targets = options.get("modules_to_save"), options["target_modules"]
    if options.get("trainable_token_indices") and (saved or "lm_head" in targets):
        # Two changes of one module, also through a tied head.
        found.add("unsupported_target")
    if options.get("added_tokens") and {*_ENDS} & {*options["target_modules"]}:
        # Of the head in the new size, or where PEFT saves the embedding alone.
        found |= {"shape_mismatch", "vocabulary_mismatch"}
    return found


_ENDS = ("lm_head", "embed_tokens", "wte")


def config(folder: Path) -> dict[str, Any]:
    """What the adapter's config says, but for what is empty."""
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return {key: value for key, value in found.items() if value not in (None, False, [], {})}
