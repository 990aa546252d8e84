"""Attention kernels under Triton's interpreter, against float64; a function returns what a test asserts.

An error is given in units of what one rounding of a weight could do: norms of outputs over max |v|, of errors over
m max |v|, m itself over m, angles over m max |v| / |f|. So one tolerance fits every row, and the worst row is told.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.attention_mass import reference as mass_reference
from kvtool.kernels.attention_mass import triton as mass_kernels
from kvtool.kernels.retained_attention import triton as kernels
from kvtool.kernels.retained_attention.reference import retained_attention
from kvtool.metrics.step_errors import measure

Case = dict[str, Any]
DEFAULT: Case = {
    "heads": 4, "kv": 2, "steps": 5, "tokens": 63, "dim": 16, "value_dim": 16, "dtype": "float32", "cells": 3,
    "window": None, "chunk": None, "softcap": None, "sinks": False, "sets": "mixed", "gap": None, "vectors": False,
    "pool": False, "which": "all", "block": None, "seed": 0,
}  # fmt: skip


def scene(**given: Any) -> tuple[tuple[Tensor, ...], Case]:
    """Positional and named arguments of `cell_errors`; floating tensors are exact in the storage dtype."""
    case = {**DEFAULT, **given}
    unknown = set(case) - set(DEFAULT)
    assert not unknown, unknown
    g = torch.Generator().manual_seed(case["seed"])
    stored = getattr(torch, case["dtype"])
    heads, kv, count, tokens = case["heads"], case["kv"], case["steps"], case["tokens"]
    q = torch.randn(heads, count, case["dim"], generator=g)
    k = torch.randn(kv, tokens, case["dim"], generator=g)
    v = torch.randn(kv, tokens, case["value_dim"], generator=g) + 0.5
    scale = 1.5 / math.sqrt(case["dim"])
    rows, steps = torch.arange(tokens), torch.arange(tokens - count, tokens)
    if case["pool"]:  # the candidates of an event, with holes; every later step sees all of them
        rows, steps = torch.arange(tokens) * 2, torch.arange(count) + 2 * tokens
    start = int(steps[0])
    first = torch.zeros_like(steps)
    if case["window"]:
        first = (steps - case["window"] + 1).clamp_min(0)
    if case["chunk"]:
        first = steps // case["chunk"] * case["chunk"]
    evict = torch.full((case["cells"], kv, tokens), 1 << 40, dtype=torch.int64)
    for cell in range(case["cells"]):
        gone = torch.rand(kv, tokens, generator=g) < (cell + 1) / (case["cells"] + 1)
        if case["sets"] == "everything":
            gone[:] = cell == 0  # evicted altogether, beside cells that keep all
        elif case["sets"] == "heavy":
            gone[:] = torch.tensor([cell % 2 == 0, *[cell % 2 == 1] * (tokens - 1)])  # the heavy token, or all others
        when = torch.randint(max(start - 2, 1), int(steps[-1]) + 2, (kv, tokens), generator=g)  # also inside the block
        evict[cell][gone] = (when if case["sets"] == "mixed" else torch.zeros_like(when))[gone]
    if case["gap"] is not None:  # token 0 lies `gap` above the others, exactly
        k[:, :, 0], q[:, :, 0] = 0.0, 1.0 / scale
        k[:, 0], k[:, 0, 0] = 0.0, float(case["gap"])
    named: Case = {"steps": steps, "rows": rows, "first_visible": first, "scale": scale, "softcap": case["softcap"]}
    named["sink_logits"] = torch.randn(heads, generator=g) if case["sinks"] else None
    named["which"], named["block"] = case["which"], case["block"]
    if case["vectors"]:
        named["projection"] = torch.randn(heads, case["value_dim"], 7, generator=g)
        named["gradients"] = torch.randn(2, heads, count, case["value_dim"], generator=g)
        named["gradient_rows"] = torch.arange(count) - 1
    return (q.to(stored), k.to(stored), v.to(stored), evict), named


def truth(arguments: tuple[Tensor, ...], named: Case) -> dict[str, Tensor]:
    """The float64 reference, and with it |f_R|."""
    q, k, v, evict = (one.double() if one.is_floating_point() else one for one in arguments)
    elsewhere = ("projection", "gradients", "gradient_rows", "which")
    wide = {
        name: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in named.items()
        if name not in elsewhere
    }
    blocks = list(retained_attention(q, k, v, evict, **wide))
    extra = {"output_gradients": named.get("gradients"), "gradient_rows": named.get("gradient_rows")}
    projection = named.get("projection")
    extra = {name: one.double() if one is not None and one.is_floating_point() else one for name, one in extra.items()}
    found = measure(
        blocks, named["steps"], len(evict), projection=None if projection is None else projection.double(), **extra
    )
    told = {
        name: torch.stack([getattr(cell, name) for cell in found])
        for name in ("squared_output", "squared_error", "mass", "gap", "cosine")
    }
    for name in ("layer_squared_error", "layer_squared_output", "gradient_dot"):
        if getattr(found[0], name) is not None:
            told[name] = torch.stack([getattr(cell, name) for cell in found])
    told["retained"] = torch.zeros_like(told["mass"])
    for block in blocks:
        told["retained"][block.cell, :, block.rows] = block.retained.norm(dim=-1)
    return told


def differences(found: Any, true: dict[str, Tensor], arguments: tuple[Tensor, ...], named: Case) -> dict[str, float]:
    """The worst row of every number, in the units above; infinite where NaNs or exact zeros differ."""
    largest = float(arguments[2].double().norm(dim=-1).max())
    mass, smallest = true["mass"], torch.minimum(true["squared_output"].sqrt(), true["retained"])
    units = {
        "squared_output": torch.tensor(largest).double(),
        "squared_error": mass * largest,
        "mass": mass,
        "gap": torch.tensor(largest).double(),
        "cosine": mass * largest / smallest + 1e-10,  # float64's own rounding of an angle
    }
    if "projection" in named:
        size = float(named["projection"].double().norm()) * largest
        units["layer_squared_error"] = mass.amax(1) * size
        units["layer_squared_output"] = torch.tensor(size).double()
        slope = named["gradients"].double().norm(dim=-1)[:, :, named["gradient_rows"].clamp_min(0)]  # [S, H, R]
        units["gradient_dot"] = mass[:, None] * largest * slope
    if named["which"] == "errors":
        for name in ("mass", "gap", "cosine"):
            assert bool(getattr(found, name).isnan().all()), name
            units.pop(name)
    worst = {}
    for name, unit in units.items():
        ours, theirs = getattr(found, name).double(), true[name]
        ours = ours.expand_as(theirs)
        if name not in ("mass", "gap", "gradient_dot"):
            ours, theirs = ours.sqrt(), theirs.sqrt()
        same = torch.equal(ours.isnan(), theirs.isnan())
        if name in ("mass", "squared_error", "cosine"):  # exactly 0 where nothing was lost
            same = same and bool(torch.where(mass == 0, ours.nan_to_num(0.0), 0.0).eq(0).all())
        ratio = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / unit)
        ratio = ratio[~theirs.isnan()]
        worst[name] = float(ratio.max()) if same and ratio.numel() else 0.0 if same else math.inf
        worst[name] = math.inf if math.isnan(worst[name]) else worst[name]
    return worst


def parity(cases: list[Case]) -> list[dict[str, float]]:
    answers = []
    for given in cases:
        arguments, named = scene(**given)
        found = kernels.cell_errors(*arguments, **named)
        answers.append(differences(found, truth(arguments, named), arguments, named))
    return answers


def one_wrong_number() -> dict[str, float]:
    """How far the worst row moves when a single input of the kernel is off."""
    arguments, named = scene(heads=6, tokens=111, steps=5, cells=3, sinks=True, window=90, dim=20, value_dim=20)
    true, moved = truth(arguments, named), {}
    for name in ("query", "key", "value", "evict_step", "cell", "row", "first_visible", "sink", "step"):
        q, k, v, evict = (one.clone() for one in arguments)
        also = {key: one.clone() if isinstance(one, Tensor) else one for key, one in named.items()}
        match name:
            case "query":
                q[5, 4, 19] += 0.1
            case "key":
                k[1, 108, 19] += 0.1
            case "value":
                v[1, 108, 19] += 0.1
            case "evict_step":
                evict[2, 1, 60] = 0 if evict[2, 1, 60] > 200 else 1 << 40
            case "cell":
                evict[2] = evict[1]
            case "row":
                also["rows"][0], also["rows"][50] = 50, 0
            case "first_visible":
                also["first_visible"][4] += 1
            case "sink":
                also["sink_logits"][5] += 0.1
            case "step":
                also["steps"][4] -= 1
        moved[name] = max(differences(kernels.cell_errors(q, k, v, evict, **also), true, arguments, named).values())
    return moved


def special() -> dict[str, Any]:
    """What does not fit a table: nothing asked, values that are no numbers, repeats, wrong arguments."""
    arguments, named = scene(tokens=40, vectors=True)
    q, k, v, evict = arguments
    plain = kernels.cell_errors(*arguments, **named)
    again = kernels.cell_errors(*arguments, **named)
    told: dict[str, Any] = {"repeats": all(torch.equal(getattr(plain, n).nan_to_num(9), getattr(again, n).nan_to_num(9))
                                           for n in ("squared_error", "cosine", "gradient_dot"))}  # fmt: skip
    none = kernels.cell_errors(q, k, v, evict[:0], **named)
    told["no_cells"] = list(none.squared_error.shape)
    bad = v.clone()
    bad[1, 39] = math.nan  # the newest token: seen by the last step alone, and kept or lost by it
    evict = evict.clone()
    evict[0, 1, 39], evict[1, 1, 39] = 0, 1 << 40
    found = kernels.cell_errors(q, k, bad, evict, **named)
    told["nan_output"] = found.squared_output.isnan().int().tolist()
    told["nan_error"] = found.squared_error[:2].isnan().int().tolist()
    told["layer_output"] = found.layer_squared_output.isnan().int().tolist()
    dead = k.clone()
    dead[:, 3] = math.nan
    hidden = {**named, "first_visible": named["first_visible"] * 0 + 4}
    clean = kernels.cell_errors(q, k, v, evict, **hidden).squared_error
    told["unseen_key"] = bool(torch.equal(kernels.cell_errors(q, dead, v, evict, **hidden).squared_error, clean))
    seen = kernels.cell_errors(q, dead, v, evict, **named).squared_output
    told["seen_key"] = bool(seen.isnan().all())
    blind = kernels.cell_errors(q, k, v, evict, **{**named, "first_visible": named["first_visible"] + 99})
    told["blind"] = [float(blind.squared_output.max()), float(blind.mass.max()), bool(blind.cosine.isnan().all())]
    told["messages"] = []
    for wrong in ((q.double(), k.double(), v.double(), evict), (q, k.half(), v, evict), (q[:3], k, v, evict),
                  (q, k, v, evict[:, :1]), (q, k, v, evict.float())):  # fmt: skip
        try:
            kernels.cell_errors(*wrong, **named)
        except Exception as error:
            told["messages"].append(f"{type(error).__name__}: {error}")
    return told


def through_the_doors() -> dict[str, Any]:
    """Both operations as the rest of the program calls them, with a card in use."""
    from kvtool.kernels.attention_mass import attention_mass
    from kvtool.kernels.device import find_card, using
    from kvtool.kernels.retained_attention import cell_errors

    arguments, named = scene(tokens=40, vectors=True)
    q, k, keep = mass_case(tokens=40)
    with using(find_card("interpreter")) as running:
        found = cell_errors(*arguments, **named)
        attention_mass(q, k, **keep)
        attention_mass(q.double(), k.double(), **keep)
    assert running is not None
    worst = max(differences(found, truth(arguments, named), arguments, named).values())
    return {"counts": running.log.counts, "worst": worst}


def mass_case(**given: Any) -> tuple[Tensor, Tensor, Case]:
    ragged = given.pop("ragged", False)
    evicted = given.pop("evicted", False)
    (q, k, _, evict), named = scene(**given)
    keep = {name: named[name] for name in ("steps", "rows", "first_visible", "scale", "softcap", "sink_logits")}
    if ragged:  # every KV head has its own pool
        steps = torch.randint(1, 3, k.shape[:2], generator=torch.Generator().manual_seed(1)).cumsum(1) - 1
        keep["rows"] = steps
    keep["evict_step"] = evict[0] if evicted else None
    return q, k, keep


def mass_true(q: Tensor, k: Tensor, named: Case) -> Tensor:
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in named.items()}
    return mass_reference.attention_mass(q.double(), k.double(), **wide)


def mass_parity(cases: list[Case]) -> list[float]:
    """The worst token's error relative to its own mass; infinite where one is 0 and the other is not."""
    answers = []
    for given in cases:
        q, k, named = mass_case(**given)
        found, true = mass_kernels.attention_mass(q, k, **named), mass_true(q, k, named)
        # Below what float32 can hold at all, a weight may vanish.
        ratio = torch.where(found == true, 0.0, (found - true).abs() / true.clamp_min(1e-34))
        answers.append(float(ratio.nan_to_num(math.inf).max()))
    return answers


def mass_one_wrong() -> dict[str, float]:
    q, k, named = mass_case(heads=6, tokens=111, steps=17, sinks=True, window=90, evicted=True, dim=20)
    true, moved = mass_true(q, k, named), {}
    for name in ("query", "key", "evict_step", "first_visible", "sink", "step"):
        a, b, also = q.clone(), k.clone(), {n: x.clone() if isinstance(x, Tensor) else x for n, x in named.items()}
        match name:
            case "query":
                a[5, 16, 19] += 0.1
            case "key":
                b[1, 108, 19] += 0.1
            case "evict_step":
                also["evict_step"][1, 60] = 0 if also["evict_step"][1, 60] > 200 else 1 << 40
            case "first_visible":
                also["first_visible"][16] += 1
            case "sink":
                also["sink_logits"][5] += 0.1
            case "step":
                also["steps"][16] -= 1
        found = mass_kernels.attention_mass(a, b, **also)
        moved[name] = float(((found - true).abs() / true.clamp_min(1e-30)).nan_to_num(math.inf).max())
    return moved


def mass_special() -> dict[str, Any]:
    q, k, named = mass_case(tokens=40)
    dead = k.clone()
    dead[:, 3] = math.nan
    hidden = {**named, "first_visible": named["first_visible"] * 0 + 4}
    blind = {**named, "first_visible": named["first_visible"] + 99}
    ones = torch.zeros(1, 3000, 16, dtype=torch.bfloat16)
    keys = torch.zeros(1, 40, 16, dtype=torch.bfloat16)
    steps = torch.arange(40, 3040)
    long = mass_kernels.attention_mass(
        ones, keys, steps=steps, rows=torch.arange(40), first_visible=steps * 0, scale=1.0
    )
    return {
        "unseen_key": bool(torch.equal(mass_kernels.attention_mass(q, dead, **hidden),
                                       mass_kernels.attention_mass(q, k, **hidden))),
        "seen_key": bool(mass_kernels.attention_mass(q, dead, **named).isnan().any()),
        "blind": float(mass_kernels.attention_mass(q, k, **blind).abs().max()),
        "no_queries": float(mass_kernels.attention_mass(q[:, :0], k, **{**named, "steps": named["steps"][:0],
                            "first_visible": named["first_visible"][:0]}).abs().max()),
        "long": float((long - 75.0).abs().max()),
    }  # fmt: skip
