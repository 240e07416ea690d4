"""One small launch of every kernel, for NVIDIA's compute-sanitizer: `make sanitize`. Odd sizes: the masks matter."""

from __future__ import annotations

import itertools

import torch

from kernl.kernels.common import launches
from kernl.ops import (
    RelativePositionBias,
    add_layer_norm,
    add_rms_norm,
    attention,
    embedding_sum,
    gated_linear,
    layer_norm,
    linear,
    linear_attention,
    merged_linear,
    rms_norm,
)
from kernl.ops.attention import attention_op
from kernl.ops.attention_backward import Request, backward_implementations
from kernl.ops.attention_common import scoring_of_op


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def norms() -> None:
    for columns in (77, 20000):  # rows in registers, rows streamed
        weight, bias = normal(columns), normal(columns)
        layer_norm(normal(5, columns), weight, bias)
        add_layer_norm(normal(5, columns), normal(5, columns), weight, bias)
        torch.ops.kernl.layer_norm_of_sum(normal(5, columns), normal(5, columns), weight, bias, 1e-5)
        rms_norm(normal(5, columns), weight)
        add_rms_norm(normal(5, columns), normal(5, columns), weight)
        torch.ops.kernl.rms_norm_of_sum(normal(5, columns), normal(5, columns), weight, 1e-6, 0.0, torch.float16)


def embeddings() -> None:
    tokens = torch.randint(0, 11, (3, 5), device="cuda")
    embedding_sum([tokens, tokens], [normal(11, 77), normal(11, 77)])


def linears() -> None:
    for rows in (3, 70):
        linear(normal(rows, 72), normal(40, 72), normal(40), activation="gelu")
        linear(normal(rows, 77), normal(41, 77), normal(41))
        merged_linear(normal(rows, 72), [normal(40, 72)] * 3, [normal(40)] * 3)
    for rows in (5, 600):  # the gate in the product's launch, and in one of its own
        gated_linear(normal(rows, 72), normal(40, 72), normal(40, 72))


def linear_attentions() -> None:
    for causal, schedule in itertools.product((False, True), ("sequential", "chunkwise")):
        query, key, value = (normal(2, 150, 3, 40).requires_grad_() for _ in range(3))
        output = linear_attention(query, key, value, causal=causal, schedule=schedule)
        output.backward(torch.ones_like(output))


def attentions() -> None:
    for head_dim in (40, 64):
        query, key, value = normal(2, 3, 37, head_dim), normal(2, 3, 85, head_dim), normal(2, 3, 85, head_dim)
        lengths = torch.tensor([85, 0], device="cuda", dtype=torch.int32)
        holes = torch.rand(2, 85, device="cuda") > 0.5
        attention(query, key, value, key_padding=lengths)
        attention(query, key, value, key_padding=holes, is_causal=True)
        attention(query, key, value, attn_mask=normal(1, 3, 37, 85), hidden_rows="mean")
        attention(query, key, value, attn_mask=torch.rand(37, 85, device="cuda") > 0.5)
        bias = RelativePositionBias(normal(32, 3, dtype=torch.float32))
        slopes = torch.rand(3, device="cuda")
        attention(query, key, value, window=(9, 4), q_offset=torch.tensor(20, device="cuda"), alibi_slopes=slopes)
        attention(query, key, value, relative_position_bias=bias, softcap=5.0, key_padding=holes, hidden_rows="mean")

        # Decoding (shares of keys, and their combination), dropout, packed sequences, a bias beside a mask.
        few, cache = normal(1, 8, 2, head_dim), normal(1, 2, 1000, head_dim)
        attention(few, cache, cache, is_causal=True, q_offset=torch.tensor(700, device="cuda"), hidden_rows="mean")
        attention(query, key, value, dropout_p=0.2, is_causal=True)
        ends = [torch.tensor(numbers, device="cuda") for numbers in ([0, 20, 20, 37], [0, 40, 50, 85])]
        lengths = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 20, "max_seqlen_k": 40}
        attention(query[:1], key[:1], value[:1], is_causal=True, **lengths)
        attention(
            query,
            key,
            value,
            attn_mask=torch.rand(37, 85, device="cuda") > 0.5,
            mask_hides=True,
            bias=normal(1, 3, 37, 85),
            bias_before_scale=True,
            is_causal=True,
            prefix=torch.tensor([3, 60], device="cuda"),
            return_row_stats=True,
        )


def attention_gradients() -> None:
    """The kernels, whichever implementation calls would choose."""
    for head_dim in (40, 64):
        operands = [normal(2, heads, tokens, head_dim) for heads, tokens in ((4, 37), (2, 85), (2, 85))]
        mask, padding = normal(1, 4, 37, 85), torch.rand(2, 85, device="cuda") > 0.5
        for scoring, needs_mask_grad in (
            (scoring_of_op(None, padding, 0.2, True, "mean"), False),
            (scoring_of_op(mask, padding, 0.2, False, "zero"), True),
        ):
            output, logsumexp = attention_op(
                *operands, mask if needs_mask_grad else None, padding, 0.2, scoring.is_causal, scoring.hidden_rows
            )
            gradient = torch.randn_like(output)
            request = Request(*operands, scoring, output, logsumexp, gradient, None, needs_mask_grad, False)
            for name, run in backward_implementations(request)[0].items():
                if name != "pytorch":
                    run()


def main() -> None:
    torch.manual_seed(0)
    for run in (norms, embeddings, linears, linear_attentions, attentions, attention_gradients):
        run()
        torch.cuda.synchronize()
    for name, count in sorted(launches.items()):
        print(f"{name}: {count} launches")


if __name__ == "__main__":
    main()
