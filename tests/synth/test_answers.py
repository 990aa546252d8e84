"""Who must fail on each construction, who must not, and why. Evicted once, at the end of the prompt.

Errors are mean_layer_error. The wanted rows get half to nine tenths of the evaluated attention, so losing them is
an error near 1, and what keeps them stays far below.
"""

from __future__ import annotations

HISTORY = ("snapkv", "h2o", "tova", "observed-attention")  # rank by attention that past queries gave
STATISTICS = ("expected-attention", "capkv", "jacap")  # rank by a distribution fitted to past queries


def test_delayed_constraint_is_lost_by_everyone_who_asks_the_past(built, seed, look):
    """No query before the event attends to the prefix: attention so far ranks it last (HISTORY), and so does the
    distribution fitted to these queries (STATISTICS). StreamingLLM keeps 4 sinks, and the prefix starts behind them.
    The mass oracle sees the later queries. Protecting the first 36 rows repairs every policy, blind or not."""
    trace = built("delayed-constraint", seed)
    losers = (*HISTORY, *STATISTICS, "streaming-llm")
    found = look(trace, *losers, "oracle-mass")
    for policy in losers:
        assert found.kept(policy, "prefix") == 0
        assert found.error(policy) > 0.9
    assert found.kept("oracle-mass", "prefix") == 1
    assert found.error("oracle-mass") < 0.2
    repaired = look(trace, "snapkv", "streaming-llm", prefix=36)
    by_sinks = look(trace, "snapkv", "streaming-llm", sinks=36)
    for policy in ("snapkv", "streaming-llm"):
        assert repaired.kept(policy, "prefix") == by_sinks.kept(policy, "prefix") == 1
        assert max(repaired.error(policy), by_sinks.error(policy)) < 0.2


def test_a_needle_is_lost_by_attention_history_and_found_by_odd_keys(built, seed, look):
    """Past queries avoid the needle and its neighbours, so HISTORY drops it even after pooling. KeyDiff keeps keys
    that point away from the mean key, and this one lacks what all others share. KNorm keeps short keys, and this
    one is longer than the median. StreamingLLM's window starts far behind depth 0.5."""
    found = look(built("needle", seed), *HISTORY, "knorm", "streaming-llm", "keydiff", "oracle-mass")
    for policy in (*HISTORY, "knorm", "streaming-llm"):
        assert found.kept(policy, "needle") == 0
        assert found.error(policy) > 0.9
    for policy in ("keydiff", "oracle-mass"):
        assert found.kept(policy, "needle") == 1
        assert found.error(policy) < 0.1


def test_half_of_the_evidence_is_worse_than_none(built, seed, look):
    """Past queries read one of the two rows and avoid the other, so HISTORY keeps one. About half of the attention
    is lost then, and the output, a small difference of large values, becomes the one value alone: several times
    its own length off. StreamingLLM loses both rows, nearly twice the mass, and is only off by about the output
    itself. Evicted mass orders the two the wrong way round."""
    found = look(built("competing-evidence", seed), *HISTORY, "streaming-llm", "oracle-mass")
    for policy in HISTORY:
        assert found.kept(policy, "yes") == 1
        assert found.kept(policy, "no") == 0
        assert 0.35 < found.mass(policy) < 0.55
        assert found.error(policy) > 4
    assert found.kept("streaming-llm", "yes") == found.kept("streaming-llm", "no") == 0
    assert found.mass("streaming-llm") > 0.8
    assert found.error("streaming-llm") < 1.5
    assert found.error("oracle-mass") < 0.2


def test_losing_one_side_flips_the_output(built, seed, look):
    """Along the value's direction the full output takes the sign of the leader, which changes from step to step.
    Without one of the rows it has the other's sign at every step: wrong at half of them."""
    sequence = built("competing-evidence", seed).sequences[0]
    (yes,), (no,) = sequence.landmarks["yes"], sequence.landmarks["no"]
    layer = sequence.layer(0)
    logits = layer.queries[0, 512:520] @ layer.keys[0].T * layer.geometry.scale
    for place in range(8):
        seen = logits[place, : 513 + place]
        full = float(seen.softmax(0) @ layer.values[0, : 513 + place, 0])
        assert (full > 0) == (place % 2 == 0)
        for lost, sign in ((yes, -1), (no, 1)):
            without = seen.clone()
            without[lost] = float("-inf")
            assert sign * float(without.softmax(0) @ layer.values[0, : 513 + place, 0]) > 2


def test_only_the_newest_queries_follow_a_phase_shift(built, seed, look):
    """Seven eighths of the past point at the first passage. Statistics over all of it (rope_mean, prompt) keep
    that passage and lose the second; a window of 32 queries and a quick moving average describe the new phase, and
    SnapKV's and TOVA's newest queries are of it too. At tau=1, since tau=10 flattens attention until both fit."""
    stale = ("jacap:tau=1.0", "jacap:tau=1.0,statistics=prompt")
    fresh = ("jacap:tau=1.0,statistics=window:32", "jacap:tau=1.0,statistics=ema:0.95", "snapkv", "tova")
    found = look(built("phase-shift", seed), *stale, *fresh, "oracle-mass")
    for policy in stale:
        assert found.kept(policy, "before") > 0.9
        assert found.kept(policy, "after") < 0.1
        assert found.error(policy) > 0.8
    for policy in (*fresh, "oracle-mass"):
        assert found.kept(policy, "after") == 1
        assert found.error(policy) < 0.25


def test_h2o_remembers_the_former_phase(built, seed, look):
    """Attention summed over all steps still favours the first passage when the budget is one tenth: the second
    had one eighth of the time to collect any."""
    found = look(built("phase-shift", seed), "h2o", "tova", ratio="0.9", window=4)
    assert found.kept("h2o", "after") == 0
    assert found.kept("h2o", "before") > 0.4
    assert found.error("h2o") > 0.8
    assert found.error("tova") < 0.25


def test_a_saturated_token_has_no_capacity_and_is_all_there_is(built, seed, look):
    """JaCap weighs response: [a (1 - a)]^2 times the variance of the logit under the queries. The derivative is
    near 0 and the logit the same for every query, so the weight is 0 and the token that makes the output goes
    first, at tau 10 and at tau 1, unless it is protected. Whoever weighs attention itself keeps it."""
    trace = built("saturated-token", seed)
    capacity = ("jacap", "jacap:tau=1.0")
    found = look(trace, *capacity, "h2o", "snapkv", "tova", "expected-attention")
    for policy in capacity:
        assert found.kept(policy, "saturated") == 0
        assert found.error(policy) > 0.9
    for policy in ("h2o", "snapkv", "tova", "expected-attention"):
        assert found.kept(policy, "saturated") == 1
        assert found.error(policy) < 0.1
    shielded = look(trace, "jacap", prefix=17)
    assert shielded.kept("jacap", "saturated") == 1
    assert shielded.error("jacap") < 0.1


def test_a_heavy_sink_must_stay_although_it_says_nothing(built, seed, look):
    """A pure window loses row 0: its 60 % go to the others, whose outputs grow by 2.5, an error of about 1.5.
    One protected row removes it. The mass lost to the window falls by exactly the sink's share."""
    trace = built("heavy-sink", seed)
    bare = look(trace, "streaming-llm:sinks=0", ratio="0.5", sinks=0)
    kept = look(trace, "streaming-llm:sinks=0", ratio="0.5", sinks=1)
    policy = "streaming-llm:sinks=0"
    assert bare.kept(policy, "sink") == 0
    assert bare.error(policy) > 1.2
    assert kept.kept(policy, "sink") == 1
    assert kept.error(policy) < 0.25
    # one further row is lost for the sink's place, and it has next to no attention
    assert abs(bare.mass(policy) - kept.mass(policy) - 0.6) < 0.01


def test_leverage_keeps_the_rare_direction(built, seed, look):
    """More tokens than the budget holds get a little more attention than the rare one, so HISTORY and Expected
    Attention keep the crowd. They share one value direction: its leverage is spread over all of them, while the
    rare token has its own alone (CapKV, JaCap)."""
    found = look(built("redundant-values", seed), *HISTORY, "expected-attention", "capkv", "jacap:ridge=relative")
    for policy in (*HISTORY, "expected-attention"):
        assert found.kept(policy, "rare") == 0
        assert found.error(policy) > 0.8
    for policy in ("capkv", "jacap:ridge=relative"):
        assert found.kept(policy, "rare") == 1
        assert found.error(policy) < 0.65
