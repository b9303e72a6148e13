"""Laws of the passage between text and tokens."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gspo.chat import ChatError, EncodeError, character_tokenizer, decode, encode, encode_response, eos_ids

ALPHABET = "0123456789+-= \né<|>:user"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer("".join(dict.fromkeys(ALPHABET)))


@pytest.fixture(scope="module")
def chatty():
    tokenizer = character_tokenizer("".join(dict.fromkeys(ALPHABET)))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_each_character_is_one_token_and_comes_back(tokenizer, text):
    ids = encode(tokenizer, text)
    assert len(ids) == len(text)
    assert decode(tokenizer, ids) == text


def test_the_character_tokenizer_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode(loaded, "12 + 3\n=é") == encode(tokenizer, "12 + 3\n=é")
    assert decode(loaded, encode(loaded, "1  -2")) == "1  -2"
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, len(set(ALPHABET)) + 2)
    with pytest.raises(EncodeError, match="'a', 'b'"):
        encode(loaded, "1a2b")


def test_a_character_outside_the_alphabet_is_never_dropped(tokenizer):
    for call in (encode, encode_response):
        with pytest.raises(EncodeError, match="no token for 'x'"):
            call(tokenizer, "1x2")


def test_half_a_surrogate_pair_is_an_error_of_that_text(tokenizer):
    with pytest.raises(EncodeError, match="surrogate"):
        encode(tokenizer, "1\ud8002")


def test_an_unknown_token_is_an_error_not_a_quiet_substitute():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert encode(words, "one two") == [1, 2]
    assert encode(words, "one <unk>") == [1, 0]  # spelled out by the text itself
    with pytest.raises(EncodeError, match="2 of the text's pieces"):
        encode(words, "one three four")


@pytest.mark.parametrize(("alphabet", "words"), [("", "empty"), ("abca", "'a' more than once")])
def test_an_unusable_alphabet_is_refused(alphabet, words):
    with pytest.raises(ChatError, match=words):
        character_tokenizer(alphabet)


def test_a_chat_is_what_the_template_says_with_the_assistants_turn_opened(chatty):
    chat = ({"role": "user", "content": "1+2"},)
    ids = encode(chatty, chat)
    assert decode(chatty, ids) == "<|user>1+2\n="
    whole = chatty.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True)
    assert ids == whole["input_ids"]


def test_a_chat_without_a_template_says_what_to_set(tokenizer):
    with pytest.raises(ChatError, match='no chat template: set format = "text"'):
        encode(tokenizer, [{"role": "user", "content": "1"}])


def test_a_chat_that_the_template_refuses_is_an_error_of_that_chat(chatty):
    with pytest.raises(EncodeError, match="no tools here"):
        encode(chatty, [{"role": "tool", "content": "1"}])


def test_plain_text_gets_the_tokenizers_special_tokens_and_a_response_does_not():
    from tokenizers import processors

    tokenizer = character_tokenizer("123")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    assert encode(tokenizer, "12") == [1, 2, 3]
    assert encode_response(tokenizer, "12") == [2, 3]


def test_decoding_leaves_special_tokens_out_and_spaces_alone(tokenizer):
    assert decode(tokenizer, [*encode(tokenizer, "1 - 2 , "[:6]), 1, 0]) == "1 - 2 "


def config(eos, inner=None):
    text = SimpleNamespace(eos_token_id=inner)
    return SimpleNamespace(eos_token_id=eos, get_text_config=lambda: text)


def test_end_of_sequence_ids_are_the_union_of_all_that_name_one():
    found = eos_ids(config(1, [2, 3]), SimpleNamespace(eos_token_id=[3, 4]), SimpleNamespace(eos_token_id=5), 6)
    assert found == {1, 2, 3, 4, 5}
    assert eos_ids(config(0), None, SimpleNamespace(eos_token_id=None), 1) == {0}


def test_no_end_of_sequence_id_at_all_is_an_error():
    with pytest.raises(ChatError, match="end-of-sequence"):
        eos_ids(config(None), None, SimpleNamespace(eos_token_id=None), 6)


@pytest.mark.parametrize("ids", [[500], [16], [-1, 500]])
def test_end_of_sequence_ids_that_no_row_of_the_output_matrix_is_of_are_an_error(ids):
    with pytest.raises(ChatError, match=r"ids are .*, and the model's tokens 0 to 15, so that no response ends: set"):
        eos_ids(config(ids), None, SimpleNamespace(eos_token_id=None), 16)
    assert eos_ids(config([*ids, 15]), None, SimpleNamespace(eos_token_id=None), 16) == {*ids, 15}


def test_a_real_configuration_gives_its_ids(tokenizer):
    from transformers import GenerationConfig, Qwen3Config

    assert eos_ids(Qwen3Config(eos_token_id=7), GenerationConfig(eos_token_id=[8]), tokenizer, 16) == {1, 7, 8}
