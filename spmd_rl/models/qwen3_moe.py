"""Qwen3 with experts: as dense Qwen3, with a mixture in place of the feed-forward of most layers."""

from __future__ import annotations

from spmd_rl.models.conversion import EXPERTS
from spmd_rl.models.decoder import Family
from spmd_rl.models.layers import unsupported_layers
from spmd_rl.models.moe import qwen_feed_forward
from spmd_rl.models.qwen3 import attention

QWEN3_MOE = Family("qwen3_moe", unsupported_layers, attention, qwen_feed_forward, EXPERTS)
