"""An adapter's tokenizer, judged by AutoTokenizer on the uploaded files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken as Token
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapters.manifest import AdapterManifest, AddedToken
from adapters.tokenizer_files import TokenizerFiles, read_tokenizer_files
from base_engine.tokenizer import ChatTemplateError, ChatTokenizer, TextStream
from tests.tiny import CHAT_TEMPLATE, save_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "aé😀<|im_end|>"},
]
TEXTS = [
    "hello <word> and<word>y <strip>  x <Upper> <upper> hell<|im_start|>o\n",
    "<|stop|>é😀 <|stop|><word><bos></s><|im_end|> a",
    " x  x",
]
OWN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<word>"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ pad_token }}"
)


def save_byte_level(folder: Path) -> None:
    """A base of GPT-2's kind with merges and a normalizer, whose post-processor adds BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "he", "ll", "hell"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 259)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def manifest_of(files: TokenizerFiles) -> AdapterManifest:
    assert files.usable
    manifest = AdapterManifest(
        *("0" * 64, (), 0, 0, (), 0),
        added_tokens=files.added_tokens,
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
        eos_ids=files.eos_ids,
    )
    assert AdapterManifest.from_json(manifest.to_json()) == manifest
    return manifest


@pytest.fixture(scope="module", params=[save_tokenizer, save_byte_level])
def base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("base")
    request.param(folder)
    tokenizer = ChatTokenizer.load(folder)
    yield folder, tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def uploaded(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("upload")
    own = AutoTokenizer.from_pretrained(base[0])
    own.add_tokens([Token("<word>", single_word=True), Token("<strip>", lstrip=True)])
    own.add_tokens([Token("<Upper>", normalized=False), Token("<upper>", rstrip=True)])
    own.add_tokens(["é😀"])
    own.add_special_tokens({"eos_token": "<|stop|>", "pad_token": "<|fill|>"})
    own.chat_template = OWN_TEMPLATE
    own.save_pretrained(folder)
    manifest = manifest_of(read_tokenizer_files(folder, base[1].identity))
    assert len(manifest.added_tokens) == 7
    return AutoTokenizer.from_pretrained(folder), manifest


def test_encodes_as_the_uploaded_tokenizer(base: Any, uploaded: Any) -> None:
    reference, manifest = uploaded
    derived = base[1].for_adapter(manifest)
    added = {token.id for token in manifest.added_tokens}
    seen: set[int] = set()
    for text in TEXTS:
        ids = derived.encode(text)
        assert ids == reference(text).input_ids
        assert len(ids) * derived.longest_token >= len(text)
        seen |= set(ids)
    assert added - seen == {derived.encode("<|fill|>")[-1]}
    assert derived.vocab_size == max(added) + 1 == len(reference)


def test_decodes_as_the_uploaded_tokenizer(base: Any, uploaded: Any) -> None:
    reference, manifest = uploaded
    derived = base[1].for_adapter(manifest)
    for text in TEXTS:
        ids = derived.encode(text)
        for hidden in (True, False):
            expected = reference.decode(
                ids, skip_special_tokens=hidden, clean_up_tokenization_spaces=False
            )
            assert derived.decode(ids, skip_special=hidden) == expected
    stop = derived.encode("<|stop|>")[-1]
    assert derived.decode([stop]) == ""
    assert derived.token_text(stop) == "<|stop|>"
    word = manifest.added_tokens[0].id
    stream = TextStream(derived)
    assert stream.push(word) + stream.push(stop) + stream.finish() == "<word>"


def test_chat_ids_are_those_of_transformers_with_one_bos(base: Any, uploaded: Any) -> None:
    reference, manifest = uploaded
    derived = base[1].for_adapter(manifest)
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    ids = derived.encode_chat(MESSAGES)
    assert ids == expected
    (bos,) = base[1]._tokenizer.convert_tokens_to_ids([reference.bos_token])
    assert ids.count(bos) == 1 and ids[0] == bos


def test_its_end_token_counts_beside_the_bases(base: Any, uploaded: Any) -> None:
    reference, manifest = uploaded
    derived = base[1].for_adapter(manifest)
    assert derived.eos_ids == base[1].eos_ids | {reference.eos_token_id}
    assert manifest.eos_ids == (reference.eos_token_id,)


def test_the_base_stays_as_it_was(base: Any, uploaded: Any) -> None:
    tokenizer = base[1]
    state = tokenizer._tokenizer.backend_tokenizer.to_str()
    before = [tokenizer.encode(text) for text in TEXTS]
    copied = AdapterManifest(
        *("1" * 64, (), 0, 0, (), 0),
        added_tokens=(AddedToken(tokenizer.identity.next_id, "hello", special=True),),
    )
    derived = tokenizer.for_adapter(copied)
    assert derived.encode("hello")[-1] == tokenizer.identity.next_id
    derived.encode_chat(MESSAGES)
    derived.token_bytes(tokenizer.identity.next_id)
    assert tokenizer._tokenizer.backend_tokenizer.to_str() == state
    assert [tokenizer.encode(text) for text in TEXTS] == before
    assert tokenizer.token_bytes(tokenizer.identity.next_id) == b""
    assert tokenizer.vocab_size == tokenizer.identity.next_id


def test_nothing_of_its_own_is_the_base_itself(base: Any) -> None:
    assert base[1].for_adapter(manifest_of(TokenizerFiles(usable=True))) is base[1]


def test_equal_ones_are_shared_and_few_are_kept(base: Any, uploaded: Any) -> None:
    manifest = uploaded[1]
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(base[1].for_adapter, [copy.deepcopy(manifest)] * 16))
    assert len(found) == 1
    for i in range(20):
        other = TokenizerFiles(usable=True, chat_template=f"{i}")
        base[1].for_adapter(manifest_of(other))
    assert base[1]._derived.cache_info().currsize <= 8


def test_a_template_alone_shares_the_vocabulary(base: Any) -> None:
    files = TokenizerFiles(usable=True, chat_template="{{ bos_token }}hi")
    derived = base[1].for_adapter(manifest_of(files))
    assert derived._tokenizer is base[1]._tokenizer
    bos = base[1]._tokenizer.bos_token_id
    assert derived.encode_chat(MESSAGES) == [bos, *base[1].encode("hi")[1:]]


def test_the_bases_template_sees_its_special_tokens(base: Any) -> None:
    folder, tokenizer = base
    im_end = tokenizer.identity.added_tokens[-1]
    files = TokenizerFiles(usable=True, special_tokens=(("bos_token", im_end.content),))
    derived = tokenizer.for_adapter(manifest_of(files))
    assert derived.encode_chat(MESSAGES)[0] == im_end.id


def test_a_hanging_template_is_refused(base: Any) -> None:
    loops = "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2
    derived = base[1].for_adapter(manifest_of(TokenizerFiles(usable=True, chat_template=loops)))
    with pytest.raises(ChatTemplateError, match="takes longer than 2 s"):
        derived.encode_chat(MESSAGES)


@pytest.mark.parametrize("id_", [5, 10_000])
def test_tokens_that_do_not_fit_are_an_error(base: Any, id_: int) -> None:
    files = TokenizerFiles(usable=True, added_tokens=(AddedToken(id_, "<new>"),))
    with pytest.raises(ValueError, match="cannot have the id"):
        base[1].for_adapter(manifest_of(files))
