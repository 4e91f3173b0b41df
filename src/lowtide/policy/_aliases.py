"""Names that stand for groups of operators, as packets: every overload of each is meant.

The lists are names only, so that a policy can be read and checked without torch. Which of them the installed
torch knows is decided where operators are looked up (``lowtide.regions``): a name that this torch lacks is
skipped inside an alias and is an error when a user writes it.
"""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten._grouped_mm",
        "aten._scaled_mm",
        "aten._scaled_grouped_mm",
    ),
    "sdpa": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._scaled_dot_product_attention_math",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "aten._cudnn_attention_forward",
    ),
    "collective": (
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.broadcast",
        "_c10d_functional.wait_tensor",
    ),
}
"""Alias -> the operator packets it stands for."""

ROUTING_OPS: tuple[str, ...] = (
    "aten.topk",
    "aten.sort",
    "aten.argsort",
    "aten.argmax",
    "aten.argmin",
    "aten.bucketize",
    "aten.searchsorted",
    "aten.max.dim",
    "aten.min.dim",
    "aten.kthvalue",
    "aten.mode",
    "aten.median.dim",
    "aten.multinomial",
)
"""Operators whose integer results route tokens: packets, or overloads where others of the packet give no index.
Every kind of policy saves them: a router must not decide twice."""
