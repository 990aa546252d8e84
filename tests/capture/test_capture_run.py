"""Whole captures of tiny models through the Python door: modes, selections, dtypes, manifest, failures."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

import kvtool
from kvtool.capture import capture
from kvtool.errors import KvtoolError
from kvtool.trace import open_trace
from kvtool.trace.recompute import recompute

TEXT = "Sphinx of black quartz, judge my vow. Déjà vu: 你好!\n\tThe five boxing wizards jump quickly.\n" * 3


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def forced(folder, tmp_path, text_file, name="llama", out="run.zarr", **options):
    options = {"prompt_tokens": 60, "eval_tokens": 13, **options}
    return capture(folder(name), tmp_path / out, text_file=text_file, **options)


def test_teacher_forcing_stores_the_text_itself(folder, tmp_path, text_file):
    trace = forced(folder, tmp_path, text_file)
    (sequence,) = trace.sequences
    assert (sequence.length, sequence.prompt_length) == (73, 60)
    raw = TEXT.encode()[:73]
    assert sequence.texts() == [raw[i : i + 1].decode(errors="replace") for i in range(73)]
    layer = sequence.layer(1)
    assert layer.queries.shape == (4, 73, 16)
    assert layer.keys.shape == (2, 73, 16)
    assert layer.output_projection.shape == (4, 16, 64)
    assert layer.positions.tolist() == list(range(73))


def test_the_trace_holds_what_the_model_computes(folder, tmp_path, text_file, tiny):
    """Keys of layer 0 from the weights alone: norm, projection, rotation written out here."""
    trace = forced(folder, tmp_path, text_file)
    model, layer = tiny("llama"), trace.sequences[0].layer(0)
    tokens = torch.tensor([3 + sorted_index for sorted_index in byte_ids(TEXT.encode()[:73])])
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
    plain = model.model.layers[0].self_attn.k_proj(x).reshape(73, 2, 16).transpose(0, 1).double()
    for t in (0, 1, 40, 72):
        for i in range(8):
            angle = t * 10000.0 ** (-2 * i / 16)
            c, s = torch.tensor(angle).double().cos(), torch.tensor(angle).double().sin()
            expected = plain[:, t, i] * c - plain[:, t, i + 8] * s
            assert torch.allclose(layer.keys[:, t, i].double(), expected, atol=2e-5)


def byte_ids(raw):
    """Place of each byte in the sorted byte alphabet of the test tokenizer."""
    import tokenizers

    from kvtool.capture.tokenization import _byte_alphabet

    order = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelled = {byte: character for character, byte in _byte_alphabet().items()}
    return [order.index(spelled[byte]) for byte in raw]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v3", "gemma3n", "qwen3_next", "gpt2", "llama4"])
def test_every_kind_of_layer_survives_the_trace(folder, tmp_path, text_file, tiny, name):
    notes = []
    trace = forced(folder, tmp_path, text_file, name, chunk=17, notes=notes.append)
    results = list(recompute(trace))
    assert all(result.error < 1e-5 and result.steps == 8 for result in results)
    from kvtool.capture.probe import probe

    probed = probe(tiny(name))
    assert trace.layer_ids == list(probed)
    for layer, entry in probed.items():
        g, want = trace.sequences[0].layer(layer).geometry, entry.geometry
        assert (g.kind, g.window, g.softcap, g.kv_source) == (want.kind, want.window, want.softcap, want.kv_source)
        assert g.scale == want.scale
        assert (g.rotation == "none") == (want.rotation == "none")
        if want.sink_logits is not None:
            assert torch.equal(g.sink_logits, want.sink_logits)
    assert any("no output projection" in note for note in notes) == (name == "qwen3_next")


def test_layers_keep_their_own_numbers(folder, tmp_path, text_file):
    trace = forced(folder, tmp_path, text_file, layers="0,2")
    whole = forced(folder, tmp_path, text_file, out="whole.zarr")
    assert trace.layer_ids == [0, 2]
    for layer in (0, 2):
        assert torch.equal(trace.sequences[0].layer(layer).keys, whole.sequences[0].layer(layer).keys)


def test_wrong_layers_are_listed(folder, tmp_path, text_file):
    with pytest.raises(KvtoolError, match="no attention in layer 3,7-8") as caught:
        forced(folder, tmp_path, text_file, layers="1,3,7-8")
    assert caught.value.hint == "its attention layers are 0-2"
    assert not (tmp_path / "run.zarr").exists()
    with pytest.raises(KvtoolError, match="layer 5 reads the keys and values of layer 2"):
        forced(folder, tmp_path, text_file, "gemma3n", layers="5")


def test_one_shot_and_chunked_prefill_agree(folder, tmp_path, text_file):
    whole = forced(folder, tmp_path, text_file, "gemma3")
    parts = forced(folder, tmp_path, text_file, "gemma3", out="parts.zarr", chunk=8)
    for layer in whole.layer_ids:
        a, b = (trace.sequences[0].layer(layer) for trace in (whole, parts))
        for name in ("queries", "keys", "values"):
            x, y = getattr(a, name).double(), getattr(b, name).double()
            assert float((x - y).norm() / x.norm()) < 1e-5


def test_a_trace_from_eager_attention_is_the_same(folder, tmp_path, text_file, monkeypatch):
    """sdpa hands out no weights; what is recorded must not depend on that."""
    from kvtool.capture import prepare as preparing

    a = forced(folder, tmp_path, text_file)
    original = preparing.load_model

    def eager(*args):
        model = original(*args)
        model.set_attn_implementation("eager")
        return model

    monkeypatch.setattr(preparing, "load_model", eager)
    b = forced(folder, tmp_path, text_file, out="eager.zarr")
    assert b.manifest["capture"]["attention"] == "eager"
    for layer in a.layer_ids:
        x, y = (trace.sequences[0].layer(layer).queries.double() for trace in (a, b))
        assert float((x - y).norm() / x.norm()) < 1e-5


def greedy(model, prompt, count):
    """Token by token without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_is_the_models_own(folder, tmp_path, tiny, name):
    trace = capture(folder(name), tmp_path / "run.zarr", prompt="Sphinx of black quartz", max_new_tokens=12)
    (sequence,) = trace.sequences
    prompt = [3 + i for i in byte_ids(b"Sphinx of black quartz")]
    tokens = greedy(tiny(name), prompt, 12)
    tokens = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
    assert sequence.tokens.tolist() == tokens
    assert sequence.length == len(tokens)  # the last generated token has keys and values as well
    assert sequence.layer(0).keys.shape[1] == len(tokens)


def test_end_of_text_stops_and_is_recorded(folder, tmp_path, tiny, monkeypatch):
    from kvtool.capture import sequences
    from kvtool.capture.request import Request
    from kvtool.capture.run import run

    prompt = [3 + i for i in byte_ids(b"Pack my box")]
    end = greedy(tiny("llama"), prompt, 4)[-1]
    monkeypatch.setattr(sequences, "stop_tokens", lambda model: frozenset([end]))
    outcome = run(
        Request(model=str(folder("llama")), output=tmp_path / "run.zarr", prompt="Pack my box", max_new_tokens=20)
    )
    tokens = open_trace(tmp_path / "run.zarr").sequences[0].tokens.tolist()
    assert tokens[-1] == end
    assert tokens.index(end, len(prompt)) == len(tokens) - 1 < len(prompt) + 4
    assert outcome.sequences[0].stopped == "end-of-text"
    assert outcome.sequences[0].tokens == len(tokens)


def lines(tmp_path, prompts):
    path = tmp_path / f"prompts-{len(list(tmp_path.glob('prompts-*')))}.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in prompts) + "\n", encoding="utf-8")
    return path


def test_sequences_do_not_depend_on_their_neighbours(folder, tmp_path):
    a, b = {"prompt": "A line\u2028with a separator", "id": "a"}, {"prompt": "Another, longer one", "id": "b"}
    options = {"max_new_tokens": 9, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 11}
    both = capture(folder("llama-dynamic"), tmp_path / "ab.zarr", prompts=lines(tmp_path, [a, b]), **options)
    back = capture(folder("llama-dynamic"), tmp_path / "ba.zarr", prompts=lines(tmp_path, [b, a]), **options)
    alone = capture(folder("llama-dynamic"), tmp_path / "b.zarr", prompts=lines(tmp_path, [b]), **options)
    assert [s.attributes["id"] for s in both.sequences] == ["a", "b"]
    for other in (back.sequences[0], alone.sequences[0]):
        assert other.tokens.tolist() == both.sequences[1].tokens.tolist()
        assert torch.equal(other.layer(2).keys, both.sequences[1].layer(2).keys)
    again = capture(
        folder("llama-dynamic"), tmp_path / "c.zarr", prompts=lines(tmp_path, [b]), **{**options, "seed": 12}
    )
    assert again.sequences[0].tokens.tolist() != alone.sequences[0].tokens.tolist()


def test_the_chat_template_is_applied(folder, tmp_path):
    import shutil

    import transformers

    chatty = tmp_path / "chatty"
    shutil.copytree(folder("llama"), chatty)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    tokenizer.save_pretrained(chatty)
    trace = capture(chatty, tmp_path / "run.zarr", prompt="Hi", chat=True, max_new_tokens=2)
    sequence = trace.sequences[0]
    assert "".join(sequence.texts()[: sequence.prompt_length]) == "<user>Hi<answer>"
    assert (
        trace.manifest["tokenizer"]["chat_template_digest"]
        == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    )
    with pytest.raises(KvtoolError, match="no chat template"):
        capture(folder("llama"), tmp_path / "no.zarr", prompt="Hi", chat=True)


def test_stored_dtypes(folder, tmp_path, text_file):
    notes = []
    wide = forced(folder, tmp_path, text_file)
    half = forced(folder, tmp_path, text_file, out="half.zarr", dtype="float16", notes=notes.append)
    assert notes == ["queries, keys and values of the float32 run are rounded to float16 in the trace"]
    a, b = (trace.sequences[0].layer(1).keys for trace in (wide, half))
    assert torch.equal(a.half().float(), b)
    notes.clear()
    brain = forced(folder, tmp_path, text_file, out="bf16.zarr", model_dtype="bf16", notes=notes.append)
    assert notes == []
    assert brain.stored_dtype == torch.bfloat16
    assert brain.manifest["capture"]["run_dtype"] == brain.manifest["capture"]["stored_dtype"] == "bfloat16"
    (bound,) = {result.bound for result in recompute(brain)}
    assert bound == 1e-2
    (bound,) = {result.bound for result in recompute(half)}
    assert bound == 2e-3


def test_overflow_is_an_error_and_leaves_nothing(folder, tmp_path, text_file, monkeypatch):
    from kvtool.capture import prepare as preparing

    original = preparing.load_model

    def large(*args):
        model = original(*args)
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e5)
        return model

    monkeypatch.setattr(preparing, "load_model", large)
    with pytest.raises(KvtoolError, match="layer 1 values") as caught:
        forced(folder, tmp_path, text_file, dtype="float16")
    assert caught.value.code == "overflow"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_trace_that_disagrees_with_the_model_is_taken_away(folder, tmp_path, text_file, monkeypatch):
    """The probe is deceived, the recomputation of the stored arrays is not."""
    monkeypatch.setattr("kvtool.capture.probe._check_output", lambda *args: None)
    monkeypatch.setattr("kvtool.capture.probe.softcap", lambda call: None)
    with pytest.raises(KvtoolError) as caught:
        forced(folder, tmp_path, text_file, "gemma2")
    assert caught.value.code == "trace-inaccurate"
    assert not (tmp_path / "run.zarr").exists()


def test_the_manifest_suffices_to_repeat_the_run(folder, tmp_path):
    source = folder("llama")
    trace = capture(source, tmp_path / "run.zarr", prompt="Hello", max_new_tokens=3, temperature=0.7, seed=5)
    model, tokenizer, how = (trace.manifest[name] for name in ("model", "tokenizer", "capture"))
    weights = (source / "model.safetensors").read_bytes()
    assert model["name"] == "llama"
    assert model["architecture"] == "LlamaForCausalLM"
    assert model["weight_digest"] == hashlib.sha256(weights).hexdigest()
    assert len(tokenizer["digest"]) == 64
    assert how["mode"] == "generation"
    assert how["generation"]["decoding"] == "sampled"
    assert how["generation"]["temperature"] == 0.7
    assert how["seed"] == 5
    assert how["attention"] == "sdpa"
    assert how["device"] == "cpu"
    assert how["threads"] == torch.get_num_threads()
    assert {"kvtool", "torch", "transformers", "tokenizers", "python"} <= set(how["versions"])
    prompt = torch.tensor([3 + i for i in byte_ids(b"Hello")], dtype=torch.int32)
    assert trace.sequences[0].attributes["prompt_digest"] == hashlib.sha256(prompt.numpy().tobytes()).hexdigest()
    again = capture(source, tmp_path / "again.zarr", prompt="Hello", max_new_tokens=3, temperature=0.7, seed=5)
    assert again.digest == trace.digest


def test_without_output_projection(folder, tmp_path, text_file):
    trace = forced(folder, tmp_path, text_file, output_projection=False)
    assert not trace.sequences[0].layer(0).has("output_projection")


def test_an_existing_trace_is_kept_without_force(folder, tmp_path, text_file):
    first = forced(folder, tmp_path, text_file)
    with pytest.raises(KvtoolError, match="already there") as caught:
        forced(folder, tmp_path, text_file, eval_tokens=14)
    assert caught.value.code == "output-exists"
    assert open_trace(tmp_path / "run.zarr").digest == first.digest
    assert forced(folder, tmp_path, text_file, eval_tokens=14, force=True).sequences[0].length == 74


def test_progress_counts_every_token(folder, tmp_path, text_file):
    seen = []
    forced(folder, tmp_path, text_file, chunk=20, progress=lambda stage, done, total: seen.append((stage, done, total)))
    assert [step for step in seen if step[0] == "capturing"] == [("capturing", n, 73) for n in (20, 40, 60, 73)]


def test_the_package_is_the_function_too(folder, tmp_path):
    trace = kvtool.capture(folder("llama"), tmp_path / "run.zarr", prompt="Hi", max_new_tokens=1)
    assert trace.sequences[0].length == 3
    assert kvtool.capture.capture is capture


def test_an_unknown_option_is_named(folder, tmp_path):
    with pytest.raises(KvtoolError, match="no option 'promt'") as caught:
        capture(folder("llama"), tmp_path / "run.zarr", promt="Hi")
    assert "did you mean prompt" in caught.value.hint


@pytest.mark.parametrize("mode", [{"chunk": None}, {"chunk": 1}])
def test_windows_longer_than_the_probe_are_checked_while_running(folder, tmp_path, text_file, monkeypatch, mode):
    """A window of 40 cannot show in 24 tokens, so its mask is held against it in the run."""
    trace = forced(folder, tmp_path, text_file, "mistral-wide", **mode)
    assert trace.sequences[0].layer(1).geometry.window == 40
    for window in (39, 41):
        monkeypatch.setattr("kvtool.capture.probe.window_of", lambda call, config, w=window: ("sliding", w))
        with pytest.raises(KvtoolError, match=f"should be sliding with {window} tokens"):
            forced(folder, tmp_path, text_file, "mistral-wide", out="wrong.zarr", **mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.zarr", "text.txt"]


def test_a_model_that_fails_is_named(folder, tmp_path, monkeypatch):
    import transformers

    def broken(*args, **kwargs):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", broken)
    with pytest.raises(KvtoolError, match="LlamaForCausalLM fails on 24 tokens: ValueError: shapes do not fit"):
        capture(folder("llama"), tmp_path / "run.zarr", prompt="Hi")
