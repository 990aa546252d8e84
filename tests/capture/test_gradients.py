"""Gradients by attention outputs against explicit Jacobians of models that kvtool never touched."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvtool.capture.cotangents import cotangents, pick
from kvtool.capture.generation import Feed
from kvtool.capture.gradient_plan import GradientPlan
from kvtool.capture.gradients import draw_gradients
from kvtool.capture.hook import observed
from kvtool.capture.kept_outputs import KeptOutputs
from kvtool.capture.probe import probe
from kvtool.capture.quiet import quiet
from kvtool.capture.rotation_watch import RotaryState
from kvtool.errors import KvtoolError

UNGATED = [
    *("llama", "llama-yarn", "llama-dynamic", "qwen3", "mistral", "gemma2", "gemma3", "gemma3n", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "phi3", "stablelm", "gpt2", "opt", "gptj", "smollm3", "cohere2", "glm4", "llama4"),
]
TOKENS = torch.randint(3, 300, (39,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPT = 23
SMALL = [3, 7, 1, 10, 0, 4, 4, 9, 2, 8, 5, 6]
SMALL_PROMPT = 5


def plain_logits(model, projections, shapes, tokens):
    """Logits [T, V] of an ordinary forward without a cache, and by layer the zeros [T, H * Dv] that were added to
    attention's outputs where they enter the output projection."""
    dtype = next(model.parameters()).dtype
    zeros = {
        layer: torch.zeros(len(tokens), h * d, dtype=dtype, requires_grad=True) for layer, (h, d) in shapes.items()
    }
    handles = [
        projections[layer].register_forward_pre_hook(lambda module, args, zero=zero: (args[0] + zero,))
        for layer, zero in zeros.items()
    ]
    try:
        return model(input_ids=torch.tensor([tokens])).logits[0], zeros
    finally:
        for handle in handles:
            handle.remove()


def expected(model, projections, shapes, tokens, drawn, draw, targets):
    """layer -> [H, T, Dv]: what draw number `draw` behind `targets`, some of `drawn`'s own, pulls back."""
    logits, zeros = plain_logits(model, projections, shapes, tokens)
    numbers = drawn.uniforms[draw, [t - drawn.how.targets[0] for t in targets]]
    if drawn.how.probe == "tokens":
        likely = logits.log_softmax(-1)
        total = sum(likely[t, y] for t, y in zip(targets, picked(logits[targets], numbers), strict=True))
    else:
        (cotangent,) = cotangents("signs", logits[targets], numbers[None])
        total = (cotangent * logits[targets]).sum()
    grads = torch.autograd.grad(total, list(zeros.values()))
    return {
        layer: grad.view(len(tokens), *shapes[layer]).transpose(0, 1) for layer, grad in zip(zeros, grads, strict=True)
    }


def picked(logits, numbers):
    """The tokens that `numbers` [n] draw from the distributions of `logits` [n, V]."""
    return [pick(p, u) for p, u in zip(logits.detach().to(torch.float64).softmax(-1), numbers.tolist(), strict=True)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def small(request):
    """2 layers, 2 heads, 11 tokens; (model, output projections, (H, Dv) by layer, geometries). gpt2 in float64."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    with quiet():
        if request.param == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=11, n_positions=32, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5, eos_token_id=2
            )
        else:
            config = transformers.LlamaConfig(
                vocab_size=11,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                initializer_range=0.5,
                max_position_embeddings=64,
            )
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        probed = probe(model)
    geometries = {layer: entry.geometry for layer, entry in probed.items()}
    shapes = {layer: (g.query_heads, g.value_dim) for layer, g in geometries.items()}
    projections = {layer: entry.projection for layer, entry in probed.items()}
    return (model.double() if request.param == "gpt2" else model), projections, shapes, geometries


class Keeping:
    """Observer of one forward over a whole text, which keeps what its attention gave."""

    def __init__(self, plan, prompt_length, layers):
        self.ran = {layer: KeptOutputs(plan.differentiated(prompt_length)) for layer in layers}

    def wants(self, layer):
        return layer in self.ran

    def see(self, call):
        self.ran[call.layer].push(call.output, 0)


def outputs_of(model, plan, tokens, prompt_length, layers):
    """By layer what the attention of an ordinary forward gives."""
    keeping, state = Keeping(plan, prompt_length, layers), RotaryState(model)
    with observed(model, keeping):
        Feed(model).push(tokens)
    state.restore()
    return keeping.ran


def drawn_of(model, plan, geometries):
    """Gradients of TOKENS behind a prompt that was fed before."""
    ran = outputs_of(model, plan, TOKENS, PROMPT, geometries)
    return draw_gradients(model, primed(model)[0], plan, TOKENS, PROMPT, geometries, ran)


def draw(small, plan):
    """Gradients of SMALL, from the cache that the plan's first evaluated step needs."""
    model, _, _, geometries = small
    feed = Feed(model)
    if plan.at == "continuation":
        feed.push(SMALL[:SMALL_PROMPT])
    ran = outputs_of(model, plan, SMALL, SMALL_PROMPT, geometries)
    return draw_gradients(model, feed, plan, SMALL, SMALL_PROMPT, geometries, ran)


def close(found, wanted, bound=2e-5):
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12)) < bound


@pytest.mark.parametrize("probe", ["signs", "tokens"])
@pytest.mark.parametrize("at", ["continuation", "prompt", "all"])
def test_gradients_are_the_jacobians_rows_added_up(small, at, probe):
    model, projections, shapes, _ = small
    drawn = draw(small, GradientPlan(3, at=at, probe=probe))
    steps = {"continuation": range(5, 12), "prompt": range(5), "all": range(12)}[at]
    assert drawn.steps.tolist() == list(steps)
    assert (drawn.how.targets, drawn.how.steps, drawn.how.block) == ((steps.start, steps.stop), len(steps), len(steps))
    assert drawn.uniforms.shape == (3, len(steps))
    for s in range(3):
        # Rows behind the evaluated steps have no part in a target's prediction, so the whole text may run.
        wanted = expected(model, projections, shapes, SMALL, drawn, s, steps)
        for layer, array in drawn.arrays.items():
            assert array.shape == (3, 2, len(steps), 4)
            assert close(array[s], wanted[layer][:, steps.start : steps.stop])


@pytest.mark.parametrize("small", ["gpt2"], indirect=True)
def test_finite_differences_say_the_same(small):
    """Central differences of the log-probabilities in float64, one head, step and channel at a time."""
    model, projections, shapes, _ = small
    drawn = draw(small, GradientPlan(1, seed=9, probe="tokens"))
    picks = picked(model(input_ids=torch.tensor([SMALL])).logits[0, 5:], drawn.uniforms[0])
    for layer, head, step, channel in ((0, 0, 5, 1), (0, 1, 8, 3), (1, 0, 6, 0), (1, 1, 11, 2), (0, 1, 11, 0)):
        values = []
        for sign in (1e-5, -1e-5):
            shift = torch.zeros(len(SMALL), *shapes[layer], dtype=torch.float64)
            shift[step, head, channel] = sign
            handle = projections[layer].register_forward_pre_hook(
                lambda module, args, shift=shift: (args[0] + shift.flatten(1),)
            )
            likely = model(input_ids=torch.tensor([SMALL])).logits[0].log_softmax(-1)
            handle.remove()
            values.append(float(sum(likely[t, y] for t, y in zip(range(5, 12), picks, strict=True))))
        slope = (values[0] - values[1]) / 2e-5
        assert slope == pytest.approx(float(drawn.arrays[layer][0, head, step - 5, channel]), abs=1e-8)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 50])
def test_blocks_cut_later_terms_exactly(small, block):
    model, projections, shapes, _ = small
    whole, cut = draw(small, GradientPlan(2)), draw(small, GradientPlan(2, block=block))
    assert torch.equal(whole.uniforms, cut.uniforms)
    assert cut.how.block == min(block, 7)
    for s in range(2):
        for start in range(5, 12, block):
            inside = range(start, min(start + block, 12))
            wanted = expected(model, projections, shapes, SMALL, cut, s, inside)
            for layer, array in cut.arrays.items():
                assert close(array[s][:, start - 5 : inside.stop - 5], wanted[layer][:, start : inside.stop])
    if block < 7:
        assert not close(cut.arrays[0], whole.arrays[0], 0.01)


@pytest.mark.parametrize(("at", "block"), [("continuation", None), ("all", None), ("all", 4), ("continuation", 2)])
@pytest.mark.parametrize("targets", [(6, 7), (7, 10), (8, 12)])
def test_targets_restrict_and_nothing_flows_back_in_time(small, at, block, targets):
    model, projections, shapes, _ = small
    drawn = draw(small, GradientPlan(2, at=at, targets=targets, block=block))
    everything = draw(small, GradientPlan(2, at=at, block=block))
    first = 0 if at == "all" else 5
    assert (drawn.how.targets, drawn.how.steps) == (targets, targets[1] - targets[0])
    assert torch.equal(drawn.uniforms, everything.uniforms[:, targets[0] - first : targets[1] - first])
    for s in range(2):
        for start in range(first, 12, block or 99):
            stop = min(start + (block or 99), 12)
            inside = range(max(start, targets[0]), min(stop, targets[1]))
            for layer, array in drawn.arrays.items():
                part = array[s][:, start - first : stop - first]
                if not inside:
                    assert int(part.count_nonzero()) == 0
                    continue
                wanted = expected(model, projections, shapes, SMALL, drawn, s, inside)[layer][:, start:stop]
                assert close(part, wanted)
                assert int(part[:, inside.stop - start :].count_nonzero()) == 0
                assert bool((part[:, inside.stop - 1 - start] != 0).any())


def test_only_targets_in_the_prompt_part_of_all_steps(small):
    model, projections, shapes, _ = small
    drawn = draw(small, GradientPlan(1, at="all", targets=(1, 4)))
    wanted = expected(model, projections, shapes, SMALL, drawn, 0, range(1, 4))
    for layer, array in drawn.arrays.items():
        assert close(array[0], wanted[layer])
        assert int(array[0][:, 4:].count_nonzero()) == 0


@pytest.mark.parametrize("probe", ["signs", "tokens"])
def test_draws_have_mean_zero_and_the_fisher_information_as_second_moment(small, probe):
    """One target: the mean of g g^T is J^T (diag(p) - p p^T) J with the explicit Jacobian J of the logits."""
    model, projections, shapes, _ = small
    drawn = draw(small, GradientPlan(3000, targets=(8, 9), probe=probe))
    logits, zeros = plain_logits(model, projections, shapes, SMALL)
    jacobian = torch.cat(
        [
            torch.stack([torch.autograd.grad(value, zero, retain_graph=True)[0][8] for value in logits[8]])
            for zero in zeros.values()
        ],
        1,
    ).double()  # [V, layers * H * Dv]
    p = logits[8].detach().double().softmax(-1)
    fisher = jacobian.T @ (p.diag() - p[:, None] * p) @ jacobian
    found = torch.cat([array[:, :, 3].flatten(1) for array in drawn.arrays.values()], 1).double()
    assert float((found.T @ found / 3000 - fisher).norm() / fisher.norm()) < 0.1
    # The average of a vector of mean 0 is noise of 1 / sqrt(draws).
    assert float(found.mean(0).norm() / found.norm(dim=1).mean()) < 0.08


def test_draws_come_from_seed_sequence_draw_and_step(small):
    one, again = draw(small, GradientPlan(2, seed=4)), draw(small, GradientPlan(2, seed=4))
    more, other = draw(small, GradientPlan(5, seed=4)), draw(small, GradientPlan(2, seed=5))
    everywhere = draw(small, GradientPlan(2, at="all", seed=4))
    for layer in one.arrays:
        assert torch.equal(one.arrays[layer], again.arrays[layer])
        assert torch.equal(one.arrays[layer], more.arrays[layer][:2])
        assert not torch.equal(one.arrays[layer], other.arrays[layer])
    assert torch.equal(everywhere.uniforms[:, 5:], one.uniforms)
    assert not torch.equal(more.arrays[0][0], more.arrays[0][1])


def primed(model):
    """A feed at the end of the prompt, the model's rotary state as before."""
    state = RotaryState(model)
    feed = Feed(model)
    feed.push(TOKENS[:PROMPT])
    state.restore()
    return feed, state


@pytest.mark.parametrize("name", UNGATED)
def test_every_architecture_against_an_untouched_forward(tiny, name):
    """Windows have forgotten the prompt, MLA, shared caches, sinks, softcaps, norms: all of them differentiate."""
    model = tiny(name)
    probed = probe(model)
    state = RotaryState(model)
    geometries = {layer: entry.geometry for layer, entry in probed.items()}
    drawn = drawn_of(model, GradientPlan(2), geometries)
    state.restore()
    shapes = {layer: (g.query_heads, g.value_dim) for layer, g in geometries.items()}
    projections = {layer: entry.projection for layer, entry in probed.items()}
    for s in range(2):
        wanted = expected(model, projections, shapes, TOKENS, drawn, s, range(PROMPT, 39))
        state.restore()
        for layer, array in drawn.arrays.items():
            assert close(array[s], wanted[layer][:, PROMPT:], 1e-3), layer


class Shift:
    """Observer that adds fixed numbers to one layer's attention outputs."""

    def __init__(self, layer, shift):
        self.layer, self.shift = layer, shift

    def wants(self, layer):
        return layer == self.layer

    def shifted(self, layer, output):
        return output + self.shift[None]

    def see(self, call):
        pass


def test_a_gate_behind_attention_is_differentiated_through(tiny):
    """No projection shows the output itself: central differences at the attention function."""
    model = tiny("qwen3_next")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    plan = GradientPlan(1, probe="tokens")
    drawn = drawn_of(model, plan, geometries)
    picks = torch.tensor(picked(primed(model)[0].logits(TOKENS[PROMPT:]), drawn.uniforms[0]))
    assert list(drawn.arrays) == [3]
    gradient = drawn.arrays[3][0].transpose(0, 1)  # [n, H, Dv]
    random = torch.Generator().manual_seed(8)
    for _ in range(4):
        # Half of the gradient's numbers, so that the slope stands out of float32's noise.
        direction = gradient * (torch.rand(gradient.shape, generator=random) < 0.5) / gradient.norm()
        values = []
        for sign in (5e-3, -5e-3):
            feed = primed(model)[0]
            with observed(model, Shift(3, sign * direction)):
                likely = feed.logits(TOKENS[PROMPT:]).double().log_softmax(-1)
            values.append(float(likely.gather(1, picks[:, None]).sum()))
        slope = float((gradient * direction).sum())
        assert (values[0] - values[1]) / 1e-2 == pytest.approx(slope, rel=3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_have_gradients_in_their_own_dtype(tiny, dtype):
    geometries = {layer: entry.geometry for layer, entry in probe(tiny("gpt2")).items()}
    exact = drawn_of(tiny("gpt2"), GradientPlan(1), geometries)
    model = tiny("gpt2", dtype)
    drawn = drawn_of(model, GradientPlan(1), geometries)
    assert drawn.arrays[0].dtype == dtype
    assert bool(torch.isfinite(drawn.arrays[0]).all())
    # The last step sees its own target only.
    assert close(drawn.arrays[2][0, :, 15].float(), exact.arrays[2][0, :, 15], 0.15)


def test_a_model_without_a_graph_is_refused(tiny, monkeypatch):
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    feed, ran = primed(model)[0], outputs_of(model, GradientPlan(1), TOKENS, PROMPT, geometries)
    forward = model.forward
    monkeypatch.setattr(model, "forward", torch.no_grad()(forward))
    with pytest.raises(KvtoolError, match="LlamaForCausalLM cannot be differentiated") as error:
        draw_gradients(model, feed, GradientPlan(1), TOKENS, PROMPT, geometries, ran)
    assert error.value.code == "model-unsupported"


class Off:
    """Outputs as they were kept, but for one row."""

    def __init__(self, kept, row):
        self.kept, self.row = kept, row

    def of(self, steps):
        rows = self.kept.of(steps).clone()
        if self.row in steps:
            rows[self.row - steps.start] *= 1.5
        return rows


@pytest.mark.parametrize(
    ("plan", "seen", "unseen"),
    [
        (GradientPlan(1), (PROMPT, 30, 38), (0, PROMPT - 1)),
        (GradientPlan(1, block=3), (PROMPT, 29, 38), (PROMPT - 1,)),
        (GradientPlan(1, at="prompt"), (0, 9, PROMPT - 1), (PROMPT, 38)),
        (GradientPlan(1, at="all"), (0, PROMPT, 38), ()),
        (GradientPlan(1, at="all", targets=(9, 11), block=4), (8, 9, 10), (7, 11, 38)),
        (GradientPlan(1, targets=(25, 28)), (PROMPT, 25, 27), (28, 38)),
    ],
)
def test_every_row_that_gradients_pass_through_is_held_against_the_run(tiny, plan, seen, unseen):
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    start = plan.differentiated(PROMPT)[0]

    def attempt(row):
        ran = outputs_of(model, plan, TOKENS, PROMPT, geometries)
        feed = primed(model)[0] if plan.at == "continuation" else Feed(model)
        return draw_gradients(model, feed, plan, TOKENS, PROMPT, geometries, {**ran, 1: Off(ran[1], row)})

    assert start <= min(seen)
    for row in seen:
        with pytest.raises(KvtoolError, match="those of layer 1 are off by 0") as error:
            attempt(row)
        assert error.value.code == "model-unsupported"
    for row in unseen:
        assert attempt(row).steps.numel()


def test_nothing_to_hold_against_is_no_agreement(tiny):
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    plan = GradientPlan(1)
    ran = outputs_of(model, plan, TOKENS, PROMPT, geometries)
    nothing, short = KeptOutputs((PROMPT, None)), KeptOutputs((PROMPT, 30))
    short.push(ran[1].of(range(PROMPT, 39)), PROMPT)
    for bad in (nothing, short):
        with pytest.raises(AssertionError, match="the outputs of steps 23:39 were not kept"):
            draw_gradients(model, primed(model)[0], plan, TOKENS, PROMPT, geometries, {**ran, 1: bad})
    with pytest.raises(KeyError):
        draw_gradients(model, primed(model)[0], plan, TOKENS, PROMPT, geometries, {0: ran[0]})


def test_outputs_are_kept_across_forwards_and_not_beyond_the_end():
    everything = torch.arange(20.0)[:, None, None]
    for first, stop in ((0, None), (3, None), (3, 11), (0, 1), (7, 8), (12, 20)):
        kept = KeptOutputs((first, stop))
        for low, high in ((0, 5), (5, 6), (6, 12), (12, 20)):
            kept.push(everything[low:high], low)
        end = stop or 20
        assert kept.of(range(first, end)).flatten().tolist() == list(range(first, end))
        assert kept.of(range(end - 1, end)).flatten().tolist() == [end - 1]
        for steps in (range(first, end + 1), range(first - 1, end)):
            with pytest.raises(AssertionError):
                kept.of(steps)


@pytest.mark.parametrize(
    ("plan", "lengths"),
    [
        (GradientPlan(1, block=5, targets=(PROMPT, 28)), [5]),
        (GradientPlan(1, at="all", targets=(3, PROMPT)), [PROMPT]),
        (GradientPlan(1, at="all", block=20, targets=(20, 22)), [20, 3]),
    ],
)
def test_nothing_runs_behind_the_last_target(tiny, monkeypatch, plan, lengths):
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    ran = outputs_of(model, plan, TOKENS, PROMPT, geometries)
    feed = primed(model)[0] if plan.at == "continuation" else Feed(model)
    seen, forward = [], model.forward

    def counted(input_ids, **rest):
        seen.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model, "forward", counted)
    draw_gradients(model, feed, plan, TOKENS, PROMPT, geometries, ran)
    assert seen == lengths
