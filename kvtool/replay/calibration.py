"""Calibration: what another trace's gradients say of each layer, for policies that ask for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.files import located
from kvtool.layer import Geometry, Layer
from kvtool.trace import Trace, open_trace
from kvtool.trace.remote import is_address


@dataclass(frozen=True, eq=False)
class Calibration:
    """A trace of other texts with gradients.

    Attributes:
        name: its path as the policy names it.
    """

    name: str
    trace: Trace
    _found: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, name: str) -> Calibration:
        """Raises: KvtoolError, code `trace-lacks` for a trace without gradients, and what opening a trace raises."""
        if is_address(name):
            raise KvtoolError("usage", f"the calibration trace {name} is an address", "fetch it, and give its folder")
        trace = open_trace(located(name))
        if not any(sequence.gradients for sequence in trace.sequences):
            raise KvtoolError(
                "trace-lacks", f"the calibration trace {name} has no gradients", "capture it with --gradients 4"
            )
        return cls(name, trace)

    def missing(self, donor: Layer) -> str | None:
        """Why nothing can be said of this layer, or None.

        Gradients of the very text would know what follows the event, so a calibration text must be another.
        """
        layer = donor.geometry.layer
        if any(sequence.prompt_digest == donor.prompt_digest for sequence in self.trace.sequences):
            return f"the calibration trace {self.name} holds the same prompt, and its gradients know what follows"
        having = [s for s in self.trace.sequences if s.has_array("output_gradients", layer)]
        if not having:
            return f"the calibration trace {self.name} has no gradients of layer {layer}"
        for sequence in having:
            own = sequence.geometry(layer)
            if _shape(own) != _shape(donor.geometry):
                return f"layer {layer} has another shape in the calibration trace {self.name}"
        return None

    def information(self, layer_id: int) -> Tensor:
        """[H, Dv, Dv] float64, the mean of g g^T over all its draws, steps and sequences; computed once."""
        if layer_id not in self._found:
            total, count = torch.zeros(()), 0
            for sequence in self.trace.sequences:
                if not sequence.has_array("output_gradients", layer_id):
                    continue
                gradients = sequence.layer(layer_id, dtype=torch.float64).output_gradients
                assert gradients is not None
                if not bool(torch.isfinite(gradients).all()):
                    raise KvtoolError("not-finite", f"a gradient of layer {layer_id} in {self.name} is NaN or infinite")
                total = total + torch.einsum("shtd,shte->hde", gradients, gradients)
                count += gradients.shape[0] * gradients.shape[2]
            self._found[layer_id] = total / count
        return self._found[layer_id]

    def joined(self, layer: Layer) -> Layer:
        """`layer` with what is known of it here."""
        layer_id = layer.geometry.layer
        return layer.with_information(self.name, lambda: self.information(layer_id))


def _shape(geometry: Geometry) -> tuple[int, int]:
    return geometry.query_heads, geometry.value_dim
