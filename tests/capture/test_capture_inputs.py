"""Input modes, option checks, token counts, sampling, token bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtool.capture.generation import Decoding
from kvtool.capture.inputs import Input, read_texts, tokenize
from kvtool.capture.request import Request, parse_memory, parse_queries
from kvtool.capture.tokenization import Tokenization
from kvtool.errors import KvtoolError
from kvtool.words import parse_ids


def read_inputs(request: Request, tokenization: Tokenization, position_limit: int | None) -> list[Input]:
    return tokenize(request, read_texts(request), tokenization, position_limit)


@pytest.fixture(scope="module")
def tokenization(folder):
    import transformers

    return Tokenization(transformers.AutoTokenizer.from_pretrained(folder("llama")))


BASE = Request(model="m", output=Path("never.zarr"), prompt="Hi")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": None}, "nothing to run"),
        ({"prompt_file": Path("x")}, "--prompt and --prompt-file exclude"),
        ({"prompts": Path("x"), "prompt": None, "text_file": Path("y")}, "--prompts and --text-file exclude"),
        ({"prompt": None, "text_file": Path("x")}, "where the prompt ends"),
        ({"prompt": None, "text_file": Path("x"), "prompt_tokens": 5}, "where the prompt ends"),
        ({"prompt_tokens": 5}, "cut a --text-file"),
        ({"top_k": 5}, "greedy"),
        ({"top_p": 0.5, "temperature": 0.0}, "greedy"),
        ({"top_p": 1.5, "temperature": 1.0}, "above 0 and at most 1"),
        ({"top_p": 0.0, "temperature": 1.0}, "above 0 and at most 1"),
        ({"temperature": -1.0}, "number from 0 up"),
        ({"temperature": float("nan")}, "number from 0 up"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"chunk": -3}, "at least 1"),
        ({"seed": -1}, "negative"),
        ({"layers": "3-1"}, "list of ids"),
        ({"layers": "a"}, "list of ids"),
        ({"queries": "last:0"}, "all, decode or last:N"),
        ({"queries": "first"}, "all, decode or last:N"),
        ({"dtype": "int8"}, "not a dtype"),
        ({"model_dtype": "fp8"}, "not a dtype"),
        ({"max_memory": "lots"}, "not a size"),
        ({"output": None}, "needs a name"),
        ({"prompt": None, "prompt_file": Path("/no/such/file")}, "not a file"),
    ],
)
def test_contradictions_are_refused(changes, match):
    with pytest.raises(KvtoolError, match=match) as caught:
        replace(BASE, **changes).check()
    assert caught.value.code in ("usage", "file-missing")


@pytest.mark.parametrize("option", [{"chat": True}, {"max_new_tokens": 4}, {"temperature": 0.5}])
def test_a_given_text_is_not_generated(tmp_path, option):
    path = tmp_path / "t.txt"
    path.write_text("x")
    request = Request(model="m", output=Path("n.zarr"), text_file=path, prompt_tokens=1, eval_tokens=1, **option)
    with pytest.raises(KvtoolError, match="feeds a given text"):
        request.check()


def test_words_become_values():
    assert parse_ids("0,4-7, 5", "--layers") == [0, 4, 5, 6, 7]
    assert parse_ids(None, "--layers") is None
    assert parse_memory("12GB") == 12_000_000_000
    assert parse_memory("800MiB") == 800 * 2**20
    assert parse_memory("1.5g") == 1_500_000_000
    assert parse_memory("4e9") == 4_000_000_000
    assert parse_queries("last:7").first_step(10, 30) == 23
    assert parse_queries("decode").first_step(10, 30) == 10
    assert parse_queries("all").first_step(10, 30) == 0


def request_of(**options):
    return Request(model="m", output=Path("n.zarr"), **options)


def test_a_text_that_is_too_short_says_its_tokens(tmp_path, tokenization):
    path = tmp_path / "t.txt"
    path.write_text("x" * 50)
    with pytest.raises(KvtoolError, match=r"50 tokens, but 40 \+ 20"):
        read_inputs(request_of(text_file=path, prompt_tokens=40, eval_tokens=20), tokenization, None)
    (item,) = read_inputs(request_of(text_file=path, prompt_tokens=30, eval_tokens=20), tokenization, None)
    assert (len(item.prompt), len(item.forced), item.most_tokens) == (30, 20, 50)


def test_a_prompt_that_is_too_long_says_its_tokens(tokenization):
    with pytest.raises(KvtoolError, match="40 tokens and 64 follow, the model has 100"):
        read_inputs(request_of(prompt="x" * 40), tokenization, 100)
    with pytest.raises(KvtoolError, match="holds no token"):
        read_inputs(request_of(prompt=""), tokenization, 100)
    assert read_inputs(request_of(prompt="x" * 36), tokenization, 100)[0].most_tokens == 100


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "line 1 .* is not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'line 3 .* has no "prompt"'),
        ('{"prompt": 3}', 'no "prompt" text'),
        ('{"prompt": "a", "weight": 1}', "unknown key 'weight'"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "id x twice"),
        ("\n\n", "holds no prompt"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "", "id": "y"}', "prompt y holds no token"),
    ],
)
def test_prompt_lines_are_checked(tmp_path, tokenization, content, match):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(KvtoolError, match=match) as caught:
        read_inputs(request_of(prompts=path), tokenization, None)
    assert caught.value.code == "prompt"


def test_text_that_is_no_text(tmp_path, tokenization):
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvtoolError, match="not UTF-8"):
        read_inputs(request_of(prompt_file=path), tokenization, None)


def test_line_ends_are_tokens_too(tmp_path, tokenization):
    path = tmp_path / "t.txt"
    path.write_bytes(b"a\r\nb\n")
    (item,) = read_inputs(request_of(prompt_file=path), tokenization, None)
    assert b"".join(tokenization.pieces(list(item.prompt))) == b"a\r\nb\n"


def test_pieces_join_to_the_text(tokenization):
    text = "tabs\tand\nlines, é, 你好, 🙂, \u2028, <s> inside"
    tokens = tokenization.encode(text)
    pieces = tokenization.pieces(tokens)
    assert len(pieces) == len(tokens)
    assert b"".join(pieces).decode() == text
    assert all(len(piece) >= 1 for piece in pieces)


def test_pieces_of_a_metaspace_vocabulary():
    """SentencePiece spells spaces as a low line and unknown bytes in angle brackets."""

    class Metaspace:
        def convert_ids_to_tokens(self, ids):
            return [["\u2581Hello", "<0xE4>", "<0x0A>", "</s>", None][i] for i in ids]

        def get_added_vocab(self):
            return {"</s>": 3}

    assert Tokenization(Metaspace()).pieces([0, 1, 2, 3, 4]) == [b" Hello", b"\xe4", b"\n", b"</s>", b""]


LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draws(decoding, count=4000):
    generator = torch.Generator().manual_seed(0)
    found = torch.tensor([decoding.pick(LOGITS, generator) for _ in range(count)])
    return torch.bincount(found, minlength=5) / count


def test_greedy_takes_the_largest():
    assert draws(Decoding(), 10).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    assert torch.allclose(draws(Decoding(temperature)), (LOGITS / temperature).softmax(0), atol=0.03)


def test_top_k_and_top_p_cut_the_tail():
    assert set(draws(Decoding(1.0, top_k=2)).nonzero().flatten().tolist()) == {1, 3}
    # The three likeliest have 0.64, 0.24 and 0.09: 0.7 needs two of them, 0.9 a third.
    assert set(draws(Decoding(1.0, top_p=0.7)).nonzero().flatten().tolist()) == {1, 3}
    assert set(draws(Decoding(1.0, top_p=0.9)).nonzero().flatten().tolist()) == {1, 2, 3}
    assert set(draws(Decoding(1.0, top_p=1e-9)).nonzero().flatten().tolist()) == {1}
    kept = torch.tensor([3.0, 2.0]).softmax(0)
    assert draws(Decoding(1.0, top_k=2))[1] == pytest.approx(float(kept[0]), abs=0.03)
