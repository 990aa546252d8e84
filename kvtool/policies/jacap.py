"""JaCap: capacity of the local Jacobian of attention."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.policies.capacity import Capacity


@dataclass(frozen=True)
class Jacap(Capacity):
    """Weighs a token by how strongly its attention responds to queries around the expected one, a (1 - a), times
    the spread of its logit, and keeps what adds most to the capacity of the linearised output.

    The weights are w_i = s^2 [a_i (1 - a_i)]^2 k_i^T diag(covariance) k_i with a = softmax(z / tau)
    at the expected query. It is `capacity` without parameters. Deviations: none known; the response
    of other tokens (competition) and a factor 1/tau^2 are left out as in the method itself. Cost:
    O(H·(e·D^2 + N·(D^2 + Dv^2) + Dv^3)).

    The page docs/policies.md explains every parameter.
    """
