"""Column sums of attention over many queries, without the attention matrix."""

from kvtool.kernels.attention_mass import reference
from kvtool.kernels.attention_mass.reference import AttentionBlock
from kvtool.kernels.device import door

__all__ = ["AttentionBlock", "attention_blocks", "attention_mass"]

attention_blocks = door("attention_mass", reference.attention_blocks)
attention_mass = door("attention_mass", reference.attention_mass)
