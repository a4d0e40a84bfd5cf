"""Tests of tier L1 in the front: ids from kept pieces are the ids of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from cachewarmd.lru2 import BURST_S, Lru2
from engine.chat import ChatEncoder, ChatTemplates
from engine.prompt_cache import PromptCache
from engine.text_cuts import TextCuts
from engine.tokenizer import Tokenizer, encode_plainly
from tests.fixtures.models import write_tokenizer
from tests.fixtures.tokenizers import T_ADD_TOKENS, write_t_add, write_t_bf, write_t_bl

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Texts in which joins are dangerous: words, blanks, marks, contractions, scripts, tokens.
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|WIDE|>", "<s>", "</s>", "stop", "stops")
SCRAPS = (
    *("the", " quick", " a", "fox ", "zebra", "word", "words", "it's", "'", "'v", "e", "ë", "A"),
    *(" ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000", "\ufffd", "\u200b"),
    *(
        "1",
        "22",
        "333",
        "4444",
        ",",
        ".",
        "...",
        "/",
        "//",
        "\n/",
        "{",
        '"',
        "<",
        "<|",
        "|>",
        "<|im",
    ),
    *("你好", "，", "。", "世界。", "ひら", "한국", "e\u0301", "\u0301", "ﬁ", "ǅ", "İ", "ß"),
    *("👩‍👩‍👧", "🇫🇷", "\U0001f600", "é", "Ω", "क्षि", *T_ADD_TOKENS, *SPECIAL),
)


def byte_level_bpe(
    regex: str | None, normalizer: normalizers.Normalizer | None, added: Sequence[AddedToken] = ()
) -> tokenizers.Tokenizer:
    """A byte-level BPE with the merges that make joins go wrong: of marks, blanks and words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("Ġ", "a"), ("Ġ", "Ġ"), ("ĠĠ", "Ġ")]
    pairs += [("Ċ", "Ċ"), ("Ġ", "Ċ"), (".", "."), ("..", "."), ("o", "r"), ("w", "or"), ("'", "s")]
    pairs += [("wor", "d"), (",", "Ċ"), (".", "Ċ"), ("Ġ", "'"), ("1", "2"), ("2", "2"), ("/", "/")]
    vocabulary = {text: i for i, text in enumerate([*alphabet, *("".join(p) for p in pairs)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if regex is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def of_model(write: Callable[[Path], object]) -> Callable[[Path], tokenizers.Tokenizer]:
    """The library's tokenizer of a model directory that ``write`` makes."""

    def make(folder: Path) -> tokenizers.Tokenizer:
        write(folder)
        return Tokenizer(folder).backend

    return make


def metaspace(_: Path) -> tokenizers.Tokenizer:
    """A unigram model, whose first word alone gets a space, with two added tokens."""
    vocab = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "▁the", "▁a", *"abcdefgt."])]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


FLAGGED = (
    AddedToken("<|im_start|>", normalized=False),
    AddedToken("<|im_start|>the", normalized=False, single_word=True),
    AddedToken("<left>", lstrip=True),
    AddedToken("<|im_end|>", normalized=False, rstrip=True),
    AddedToken("word", single_word=True),
    AddedToken("stop", normalized=False, rstrip=True),
)
MAKERS: dict[str, Callable[[Path], tokenizers.Tokenizer]] = {
    "tiny": of_model(write_tokenizer),
    "t-bf": of_model(write_t_bf),
    "t-bl": of_model(write_t_bl),
    "t-add": of_model(write_t_add),
    "llama-3": lambda _: byte_level_bpe(LLAMA_3, None),
    "qwen": lambda _: byte_level_bpe(LLAMA_3.replace("{1,3}", ""), normalizers.NFC()),
    "gpt-2": lambda _: byte_level_bpe(None, None),
    "nfkc": lambda _: byte_level_bpe(None, normalizers.NFKC(), FLAGGED),
    "flags": lambda _: byte_level_bpe(LLAMA_3, normalizers.Lowercase(), FLAGGED),
    "metaspace": metaspace,
}
BETWEEN_WORDS = {"tiny", "t-bl", "t-add", "llama-3", "qwen", "gpt-2", "nfkc", "flags"}


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Each kind of tokenizer, with its name."""
    name = request.param
    return name, MAKERS[name](tmp_path_factory.mktemp("tokenizer"))


Made = tuple[str, tokenizers.Tokenizer]


def cache_of(tokenizer: tokenizers.Tokenizer, chars: int, capacity: int = 1 << 20) -> PromptCache:
    """A cache that cuts texts into pieces of at least so many characters."""
    return PromptCache(tokenizer, lambda text: encode_plainly(tokenizer, text), capacity, chars)


# An added token, and what it may take along or look at.
beside = st.sampled_from(("", " ", "\n", "fox ", "a\n", "好"))
tokens = st.tuples(beside, st.sampled_from((*T_ADD_TOKENS, *SPECIAL)), beside, st.just("fox"))
scrap = st.one_of(st.sampled_from(SCRAPS), tokens.map("".join), st.text(max_size=3))
scraps = st.lists(scrap, max_size=40)
texts = scraps.map("".join).map(lambda text: text.encode("utf-8", "ignore").decode())


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(head=texts, tails=st.lists(texts, min_size=1, max_size=3), chars=st.integers(1, 8))
def test_ids_with_the_cache_are_those_without_it(
    made: Made, head: str, tails: list[str], chars: int
) -> None:
    """Whatever is joined, also after other texts that begin alike, the ids are the library's."""
    _, tokenizer = made
    cache = cache_of(tokenizer, chars)
    for text in (head, *(head + tail for tail in tails), *tails):
        assert cache.encode(text) == encode_plainly(tokenizer, text)


def conversation(document: str, question: str) -> str:
    """A rendered chat with a long message that ends in a question."""
    return (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{document}\n\n{question}"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


DOCUMENT = "".join(f"{n}. The quick brown fox's 12 own words, {n * 7919}.\n" for n in range(200))


def test_a_document_is_reused_under_another_question(made: Made) -> None:
    """Of a byte-level tokenizer most of a document's ids come from before, and they are right."""
    name, tokenizer = made
    cache = cache_of(tokenizer, 64)
    for question in ("What is it?", "Who, then? Say it in one word", "狐狸在哪里？"):
        text = conversation(DOCUMENT, question)
        assert cache.encode(text) == encode_plainly(tokenizer, text)
    if name in BETWEEN_WORDS:
        assert cache.num_hit_tokens > 0.6 * cache.num_tokens


def test_where_words_are_cut_is_known(made: Made) -> None:
    """Only tokenizers of a known kind are cut between words."""
    name, tokenizer = made
    pieces = TextCuts(tokenizer).pieces("the quick brown fox " * 50, 64)
    assert (len(pieces) > 10) == (name in BETWEEN_WORDS)


@pytest.mark.parametrize("regex", [r"\w+|\s+|[^\w\s]+", LLAMA_3 + r"|(?<=a)b", r".{1,7}"])
def test_an_unknown_pre_tokenizer_is_not_cut_between_words(regex: str) -> None:
    """One alternative that nobody looked at is enough."""
    assert not TextCuts(byte_level_bpe(regex, None)).is_any


@pytest.mark.parametrize("content", ["fox the", " fox", "fox\n", "a\nb", "好。吗"])
def test_an_added_token_that_may_lie_across_a_place_keeps_words_together(content: str) -> None:
    """Where such a token may stand nothing is cut."""
    cuts = TextCuts(byte_level_bpe(LLAMA_3, None, [AddedToken(content, normalized=False)]))
    assert len(cuts.pieces("the quick brown fox " * 50, 64)) == 1


def test_what_is_kept_is_bounded() -> None:
    """A cache of few bytes stays within them, and its ids right."""
    tokenizer = byte_level_bpe(LLAMA_3, None)
    cache = cache_of(tokenizer, 64, capacity=4096)
    for start in range(20):
        text = DOCUMENT[start * 100 :]
        assert cache.encode(text) == encode_plainly(tokenizer, text)
        assert 0 < cache.used_bytes <= 4096


async def test_what_a_long_template_writes_is_tokenised_ahead(tmp_path: Path) -> None:
    """The first conversation finds the template's own text, and has the same ids."""
    rules = "".join(f"{n}. Say the quick brown fox's own words. " for n in range(200))
    template = rules + "{% for m in messages %}<|eot_id|>{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(write_t_bl(tmp_path, template))
    tokenizer.keep_prompts(1 << 20)
    cache = tokenizer.prompt_cache
    assert cache is not None
    chat = ChatEncoder(tokenizer, ChatTemplates.load(tmp_path), 100_000)
    try:
        await chat.prefill()
        assert (cache.num_tokens > 0, cache.num_hit_tokens) == (True, 0)
        ids = await chat.encode([("user", "the fox")])
    finally:
        await chat.close()
    assert ids[1:] == encode_plainly(tokenizer.backend, rules + "<|eot_id|>the fox")
    assert cache.num_hit_tokens > 0.7 * len(ids)


def test_a_burst_is_one_touch_and_what_is_touched_again_stays() -> None:
    """LRU-2: a flood of what is new drops what was touched once, or in one burst only."""
    cache: Lru2[str, str] = Lru2(100)
    for key in ("burst", "again"):
        cache.put(key, key, 10, 0.0)
    assert cache.get("burst", BURST_S / 2) == "burst"
    assert cache.get("again", BURST_S * 2) == "again"
    for number in range(50):
        cache.put(str(number), "", 10, 20.0)
        assert cache.used <= 100
    assert ("burst" in cache, "again" in cache, "49" in cache) == (False, True, True)


def test_what_is_new_has_room_among_what_was_touched_again() -> None:
    """A cache full of what was touched again lets new entries stay long enough for a second."""
    cache: Lru2[int, int] = Lru2(100)
    for number in range(10):
        cache.put(number, number, 10, float(number))
    for number in range(10):
        assert cache.get(number, 100.0 + number) == number
    for number in range(10, 14):
        cache.put(number, number, 10, 300.0)
    kept = [number for number in range(14) if number in cache]
    assert kept[-1] == 13
    assert len(kept) == 10
    assert 0 not in kept
