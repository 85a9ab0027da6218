from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from base_engine.tokenizer import ChatTemplateError, ChatTemplateMissing, ChatTokenizer, TextStream
from tests.tiny import BOS, BYTE0, EOS, IM_END, IM_START, byte_ids, save_tokenizer

HELLO = byte_ids("Hello STOP world")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(folder)


def with_template(folder: Path, template: str | None) -> ChatTokenizer:
    save_tokenizer(folder, chat_template=template)
    return ChatTokenizer.load(folder)


def pieces(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """What is sent after each token, and what comes at the end."""
    return [stream.push(i) for i in ids] + [stream.finish()]


def sentencepiece(strip: int) -> ChatTokenizer:
    """Llama 2's kind: words with U+2581 for spaces, bytes for what is no word."""
    words = ["\u2581Hi", "\u2581there", "!", "\u2581"]
    vocab = {"<s>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    vocab |= {word: 257 + i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)])
    backend.add_special_tokens(["<s>"])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def byte_level() -> ChatTokenizer:
    """GPT-2's kind: bytes spelled as printable characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["an added word"])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


def word_pieces() -> ChatTokenizer:
    """A kind whose tokens have no bytes of their own: the space depends on the neighbour."""
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "##s": 4, "cards": 5}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]"))


class TestPrompts:
    MESSAGES: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "aé😀<|im_end|>"},
    ]

    def test_chat_ids_are_those_of_transformers_with_one_bos(
        self, folder: Path, tokenizer: ChatTokenizer
    ) -> None:
        """The template writes BOS and the tokenizer adds one to plain text: not both."""
        reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            self.MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        ids = tokenizer.encode_chat(self.MESSAGES)
        assert ids == reference
        assert ids.count(BOS) == 1
        assert ids[0] == BOS

    def test_text_gets_the_special_tokens_of_the_tokenizer(
        self, folder: Path, tokenizer: ChatTokenizer, tmp_path: Path
    ) -> None:
        assert tokenizer.encode("hi") == AutoTokenizer.from_pretrained(folder)("hi").input_ids
        assert tokenizer.encode("hi") == [BOS, *byte_ids("hi")]
        save_tokenizer(tmp_path, add_bos=False)
        assert ChatTokenizer.load(tmp_path).encode("hi") == byte_ids("hi")

    def test_null_or_absent_content_is_empty_text(self, tokenizer: ChatTokenizer) -> None:
        def ids(**content: Any) -> list[int]:
            return tokenizer.encode_chat([{"role": "assistant", **content}])

        assert ids(content=None) == ids() == ids(content="")

    def test_messages_are_not_changed(self, tokenizer: ChatTokenizer) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": None}]
        tokenizer.encode_chat(messages)
        assert messages == [{"role": "user", "content": None}]

    def test_no_template_is_an_error_and_text_still_works(self, tmp_path: Path) -> None:
        tokenizer = with_template(tmp_path, None)
        with pytest.raises(ChatTemplateMissing, match="no chat template"):
            tokenizer.encode_chat(self.MESSAGES)
        assert tokenizer.encode("hi") == [BOS, *byte_ids("hi")]

    def test_the_template_refuses_with_its_own_message(self, tmp_path: Path) -> None:
        tokenizer = with_template(
            tmp_path,
            "{% for m in messages %}{% if m.role == 'system' %}"
            "{{ raise_exception('System role not supported') }}"
            "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
        )
        with pytest.raises(ChatTemplateError, match="^System role not supported$"):
            tokenizer.encode_chat(self.MESSAGES)
        user: dict[str, Any] = {"role": "user", "content": "x"}
        with pytest.raises(ChatTemplateError, match="^Roles must alternate$"):
            tokenizer.encode_chat([user, user])
        assert tokenizer.encode_chat([user]) == byte_ids("x")

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages[0].content + 1 }}",
            "{{ messages[0].absent.deeper }}",
            "{{ messages[9]['role'] }}",
            "{{ 1 / 0 }}",
            "{% for",
            "{{ ''.__class__.__mro__ }}",
        ],
    )
    def test_whatever_a_template_raises_is_a_template_error(
        self, tmp_path: Path, template: str
    ) -> None:
        with pytest.raises(ChatTemplateError):
            with_template(tmp_path, template).encode_chat([{"role": "user", "content": "x"}])


class TestTokens:
    def test_text_and_bytes_of_one_token(self, tokenizer: ChatTokenizer) -> None:
        assert tokenizer.token_bytes(BYTE0 + 0xC3) == b"\xc3"
        assert tokenizer.token_text(BYTE0 + 0xC3) == "\ufffd"
        assert tokenizer.token_text(BYTE0 + ord("a")) == "a"
        assert tokenizer.token_text(IM_END) == "<|im_end|>"

    def test_ids_without_a_token_have_no_text(self, tokenizer: ChatTokenizer) -> None:
        """The head of a model is often wider than its tokenizer."""
        assert tokenizer.vocab_size == IM_END + 1
        for token in (tokenizer.vocab_size, 319, 10**9, -1):
            assert tokenizer.token_bytes(token) == b""
            assert tokenizer.decode([BYTE0 + 97, token, BYTE0 + 98]) == "ab"

    def test_end_tokens(self, tokenizer: ChatTokenizer) -> None:
        assert tokenizer.eos_ids == {EOS}

    def test_special_tokens_are_shown_on_request_only(self, tokenizer: ChatTokenizer) -> None:
        ids = [BOS, IM_START, *byte_ids("hi"), IM_END, EOS]
        assert tokenizer.decode(ids) == "hi"
        assert tokenizer.decode(ids, skip_special=False) == "<bos><|im_start|>hi<|im_end|><eos>"
        assert "".join(pieces(TextStream(tokenizer), ids)) == "hi"

    def test_no_token_stands_for_more_characters_than_the_longest(
        self, tokenizer: ChatTokenizer
    ) -> None:
        assert tokenizer.longest_token == len("<|im_start|>")
        level = byte_level()
        assert level.longest_token == len("an added word")
        text = "an added word" * 50
        assert len(level.encode(text)) * level.longest_token >= len(text)

    def test_an_unknown_word_of_any_length_may_be_one_token(self) -> None:
        assert word_pieces().longest_token is None


class TestCharacters:
    TEXT = "aé😀中z"

    def test_come_whole_and_at_once(self, tokenizer: ChatTokenizer) -> None:
        sent = pieces(TextStream(tokenizer), byte_ids(self.TEXT))
        assert [s for s in sent if s] == list(self.TEXT)

    def test_every_cut_gives_at_most_one_replacement_at_the_very_end(
        self, tokenizer: ChatTokenizer
    ) -> None:
        ids = byte_ids(self.TEXT)
        for end in range(len(ids) + 1):
            sent = pieces(TextStream(tokenizer), ids[:end])
            whole = bytes(i - BYTE0 for i in ids[:end]).decode(errors="ignore")
            assert "".join(sent[:-1]) == whole
            assert sent[-1] == ("" if whole.encode() == self.TEXT.encode()[:end] else "\ufffd")
            assert "".join(sent) == tokenizer.decode(ids[:end])

    def test_an_invalid_byte_does_not_hold_back_what_follows(
        self, tokenizer: ChatTokenizer
    ) -> None:
        ids = [*byte_ids("é"), BYTE0 + 0xFF, *byte_ids("bc")]
        assert pieces(TextStream(tokenizer), ids) == ["", "é", "\ufffd", "b", "c", ""]

    def test_a_special_token_inside_a_character_does_not_break_it(
        self, tokenizer: ChatTokenizer
    ) -> None:
        first, second = byte_ids("é")
        assert pieces(TextStream(tokenizer), [first, EOS, second]) == ["", "", "é", ""]

    @given(st.binary(max_size=24))
    @settings(max_examples=60, deadline=None)
    def test_any_bytes_join_up_to_their_decoding(self, data: bytes) -> None:
        tokenizer = byte_level()
        byte_of = {tokenizer.token_bytes(i): i for i in range(256)}
        assert len(byte_of) == 256
        ids = [byte_of[bytes([b])] for b in data]
        sent = pieces(TextStream(tokenizer), ids)
        assert "".join(sent) == data.decode(errors="replace") == reference(tokenizer)(ids)
        # Nothing is held back longer than the text needs it.
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        assert sent[:-1] == [utf8.decode(bytes([b])) for b in data]


def reference(tokenizer: ChatTokenizer) -> Callable[[list[int]], str]:
    """The decoding of transformers itself."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


class TestOtherTokenizers:
    @pytest.mark.parametrize("strip", [0, 1, 2])
    def test_sentencepiece_spaces(self, strip: int) -> None:
        tokenizer = sentencepiece(strip)
        for ids in (
            [257, 258, 259],
            [0, 260, 257, 258],
            [260, 260, 260, 257],
            [257, 1 + 0xC3, 1 + 0xA9, 258],
            [1 + 0x20, 1 + 0x20, 257],
        ):
            sent = pieces(TextStream(tokenizer), ids)
            assert "".join(sent) == reference(tokenizer)(ids) == tokenizer.decode(ids)

    def test_text_that_continues_a_prompt_keeps_its_leading_space(self) -> None:
        tokenizer = sentencepiece(1)
        assert pieces(TextStream(tokenizer), [257, 258]) == ["Hi", " there", ""]
        assert pieces(TextStream(tokenizer, continues=True), [257, 258]) == [" Hi", " there", ""]

    def test_byte_level_added_tokens(self) -> None:
        tokenizer = byte_level()
        ids = [*tokenizer.encode("an é "), 257, 256, *tokenizer.encode("!")]
        sent = pieces(TextStream(tokenizer), ids)
        assert "".join(sent) == reference(tokenizer)(ids) == "an é an added word!"

    def test_tokens_whose_text_depends_on_neighbours(self) -> None:
        tokenizer = word_pieces()
        ids = [2, 3, 1, 5, 2, 4, *[5] * 20]
        sent = pieces(TextStream(tokenizer, ("s pla",)), ids[:4])
        assert sent == ["play", "ing", "", " card", "s"]
        assert "".join(pieces(TextStream(tokenizer), ids)) == reference(tokenizer)(ids)
        stream = TextStream(tokenizer, ("s pla",))
        assert "".join(pieces(stream, ids)) == "playing card"
        assert stream.stopped


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stop", "text"),
        [
            (("STOP",), "Hello "),
            (("OP w", "STOP"), "Hello "),
            (("STOP", "OP w"), "Hello "),
            (("OP w",), "Hello ST"),
            (("H",), ""),
            (("world",), "Hello STOP "),
            (("llo", "lo ST"), "He"),
        ],
    )
    def test_text_ends_before_the_stop_string(
        self, tokenizer: ChatTokenizer, stop: tuple[str, ...], text: str
    ) -> None:
        stream = TextStream(tokenizer, stop)
        assert "".join(pieces(stream, HELLO)) == text
        assert stream.stopped

    def test_no_beginning_of_a_stop_string_is_ever_sent(self, tokenizer: ChatTokenizer) -> None:
        sent = pieces(TextStream(tokenizer, ("STOP",)), HELLO)
        assert sent == [*"Hello ", *[""] * (len(HELLO) - 6), ""]

    def test_held_back_text_comes_in_order_when_the_match_fails(
        self, tokenizer: ChatTokenizer
    ) -> None:
        stream = TextStream(tokenizer, ("STOPX",))
        sent = pieces(stream, HELLO)
        assert sent == [*"Hello ", "", "", "", "", "STOP ", *"world", ""]
        assert not stream.stopped

    def test_a_failed_match_may_hide_the_start_of_another(self, tokenizer: ChatTokenizer) -> None:
        stream = TextStream(tokenizer, ("aab",))
        assert pieces(stream, byte_ids("aaab!")) == ["", "", "a", "", "", ""]
        assert stream.stopped

    def test_the_string_that_is_complete_first_wins_however_tokens_cut_the_text(
        self, tmp_path: Path
    ) -> None:
        save_tokenizer(tmp_path, pieces=["abcd", "xab", "cde"])
        tokenizer = ChatTokenizer.load(tmp_path)
        for ids in (byte_ids("xabcde"), [BYTE0 + 120, 261, BYTE0 + 101], [262, 263]):
            assert "".join(pieces(TextStream(tokenizer, ("abcd", "bc")), ids)) == "xa"

    def test_end_of_generation_flushes_a_half_match(self, tokenizer: ChatTokenizer) -> None:
        stream = TextStream(tokenizer, ("STOP",))
        assert pieces(stream, HELLO[:9])[-1] == "STO"
        assert not stream.stopped
        stream = TextStream(tokenizer, ("STOP",))
        assert pieces(stream, HELLO[:10])[-1] == ""
        assert stream.stopped

    def test_stop_string_of_many_byte_characters(self, tokenizer: ChatTokenizer) -> None:
        ids = byte_ids("a😀é中")
        assert "".join(pieces(TextStream(tokenizer, ("é",)), ids)) == "a😀"
        # U+1F601 differs from U+1F600 in its last byte only.
        assert "".join(pieces(TextStream(tokenizer, ("\U0001f601",)), ids)) == "a😀é中"

    def test_half_a_character_behind_a_half_match_comes_last(
        self, tokenizer: ChatTokenizer
    ) -> None:
        stream = TextStream(tokenizer, ("STOP",))
        assert pieces(stream, [*byte_ids("ST"), *byte_ids("😀")[:2]])[-1] == "ST\ufffd"

    def test_nothing_comes_after_a_stop(self, tokenizer: ChatTokenizer) -> None:
        stream = TextStream(tokenizer, ("a",))
        assert stream.push(byte_ids("a")[0]) == ""
        assert stream.stopped
        assert stream.push(byte_ids("b")[0]) == ""
        assert stream.finish() == ""

    def test_an_empty_stop_string_is_refused(self, tokenizer: ChatTokenizer) -> None:
        with pytest.raises(ValueError, match="empty"):
            TextStream(tokenizer, ("a", ""))

    @given(
        st.text("ab\u00e9", max_size=12),
        st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    @settings(max_examples=150, deadline=None)
    def test_agrees_with_looking_at_the_text_one_character_at_a_time(
        self, text: str, stops: list[str]
    ) -> None:
        expected = text
        for end in range(len(text) + 1):
            hits = [end - len(s) for s in stops if text[:end].endswith(s)]
            if hits:
                expected = text[: min(hits)]
                break
        stream = TextStream(BYTES, tuple(stops))
        assert "".join(pieces(stream, BYTES.encode(text))) == expected


BYTES = byte_level()
