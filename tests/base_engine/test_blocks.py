"""KV blocks: what is taken, shared, found again and given up."""

from __future__ import annotations

import random

import pytest

from base_engine.blocks import BlockPool, Branch

ROOT = ("salt", "", "adapters", ())


def fill(
    pool: BlockPool, tokens: list[int], root: object = ROOT, branch: Branch | None = None
) -> list[int]:
    """Take blocks for `tokens` as a sequence does, and record the full ones."""
    prefix = pool.match(root, tokens, branch)
    missing = pool.blocks_for(len(tokens)) - len(prefix.blocks)
    fresh = pool.allocate(missing, prefix.blocks)
    assert fresh is not None
    blocks, node, size = prefix.blocks + fresh, prefix.node, pool.block_size
    for index in range(len(prefix.blocks), len(tokens) // size):
        part = tuple(tokens[index * size : (index + 1) * size])
        node = pool.record(node, index, blocks[index], part, branch)
    return blocks


def test_a_repeated_prompt_reuses_all_full_blocks_but_the_last_token() -> None:
    pool = BlockPool(8, 4)
    first = fill(pool, list(range(12)))
    again = pool.match(ROOT, list(range(12)))
    assert again.blocks == first[:2]  # the third block holds the token whose logits are needed
    assert pool.match(ROOT, list(range(13))).blocks == first


def test_a_prefix_is_only_found_under_its_own_root() -> None:
    pool = BlockPool(8, 4)
    fill(pool, list(range(8)), ("salt", "tenant-1", "adapters", "a"))
    for root in [
        ("salt", "tenant-1", "adapters", "b"),
        ("salt", "tenant-2", "adapters", "a"),
        ("salt", "tenant-1", "adapters", ()),
    ]:
        assert pool.match(root, list(range(9))).blocks == []


def test_equal_tokens_after_different_beginnings_are_not_confused() -> None:
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 7, 8, 0])
    assert pool.match(ROOT, [3, 4, 7, 8, 0]).blocks == []
    assert pool.match(ROOT, [7, 8, 0]).blocks == []


def test_shared_blocks_stay_until_their_last_user_leaves() -> None:
    pool = BlockPool(4, 4)
    first = fill(pool, list(range(9)))
    second = fill(pool, list(range(9)))
    assert second[:2] == first[:2] and pool.num_used == 4
    pool.release(first)
    assert pool.num_used == 3
    assert pool.allocate(2) is None
    pool.release(second)
    assert pool.num_used == 0
    pool.check_integrity()


def test_released_content_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(3, 2)
    pool.release(fill(pool, [1, 2, 3, 4, 5]))
    assert len(pool.match(ROOT, [1, 2, 3, 4, 9]).blocks) == 2
    pool.allocate(2)  # the never-recorded block goes first, then the leaf of the chain
    assert len(pool.match(ROOT, [1, 2, 3, 4, 9]).blocks) == 1
    pool.check_integrity()


def test_no_room_takes_nothing() -> None:
    pool = BlockPool(3, 2)
    held = fill(pool, [1, 2, 3, 4])
    prefix = pool.match(ROOT, [1, 2, 3, 4, 5, 6, 7])
    assert prefix.blocks == held
    assert pool.allocate(2, prefix.blocks) is None
    pool.release(held)
    assert pool.num_used == 0
    pool.check_integrity()


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(2, 2)
    blocks = fill(pool, [1, 2])
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_a_branch_shares_only_the_blocks_before_it() -> None:
    pool = BlockPool(32, 2)
    tokens = list(range(11))
    plain = fill(pool, tokens)
    branch = Branch(2, "a")
    branched = fill(pool, tokens, branch=branch)
    assert branched[:2] == plain[:2] and not set(branched[2:]) & set(plain)
    assert pool.match(ROOT, tokens, branch).blocks == branched[:5]
    assert pool.match(ROOT, tokens).blocks == plain[:5]
    for other in (Branch(2, "b"), Branch(3, "a")):
        assert pool.match(ROOT, tokens, other).blocks == plain[: other.first]
    assert pool.match(ROOT, tokens, Branch(0, "a")).blocks == []


def test_the_blocks_before_a_branch_serve_those_without_one() -> None:
    pool = BlockPool(16, 2)
    branched = fill(pool, list(range(9)), branch=Branch(2, "a"))
    assert pool.match(ROOT, list(range(9))).blocks == branched[:2]


def test_below_the_root_none_nothing_is_kept_or_found() -> None:
    pool = BlockPool(16, 2)
    fill(pool, list(range(9)), None)
    assert pool.match(None, list(range(9))).blocks == []
    fill(pool, list(range(9)))
    assert pool.match(None, list(range(9))).blocks == []


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(8, 4, prefix_cache=False)
    fill(pool, list(range(9)))
    assert pool.match(ROOT, list(range(9))).blocks == []


@pytest.mark.parametrize("seed", range(5))
def test_blocks_always_hold_what_the_index_says(seed: int) -> None:
    """Random prompts from a small alphabet against what was last written into each block."""
    rng = random.Random(seed)
    pool = BlockPool(12, 2)
    written: dict[int, tuple[object, ...]] = {}
    live: list[list[int]] = []
    hits = 0
    for _ in range(600):
        if live and rng.random() < 0.5:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            root = ("salt", "", "adapters", rng.choice("ab"))
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            branch = rng.choice([None, Branch(rng.randrange(3), rng.choice("xy"))])
            prefix = pool.match(root, tokens, branch)
            # What the keys and values of each block depend on.
            contents = [
                (root, tuple(tokens[:end]), branch if branch and end > 2 * branch.first else None)
                for end in range(2, len(tokens) + 2, 2)
            ]
            for index, block in enumerate(prefix.blocks):
                assert written[block] == contents[index]
            hits += len(prefix.blocks)
            missing = pool.blocks_for(len(tokens)) - len(prefix.blocks)
            fresh = pool.allocate(missing, prefix.blocks)
            if fresh is None:
                continue
            blocks, node = prefix.blocks + fresh, prefix.node
            for index in range(len(prefix.blocks), len(blocks)):
                written[blocks[index]] = contents[index]
                if len(tokens) >= 2 * index + 2:
                    part = (tokens[2 * index], tokens[2 * index + 1])
                    node = pool.record(node, index, blocks[index], part, branch)
            live.append(blocks)
        pool.check_integrity()
    assert hits > 50
