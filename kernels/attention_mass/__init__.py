"""Column sums of attention over many queries, without the attention matrix."""

from kvtool.kernels.attention_mass.reference import AttentionBlock, attention_blocks, attention_mass

__all__ = ["AttentionBlock", "attention_blocks", "attention_mass"]
