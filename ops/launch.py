"""From tensors to kernel launches, the same for both GPU lowerings.

An op's arguments become a ``Plan``: which kernel, on what grid, with which sizes and
strides. A plan depends on metadata alone, so it is made, and its arguments checked,
once for every distinct metadata; after that a call costs a dictionary look-up and
the launch itself, a few microseconds against a hundred.

``lowering`` holds the kernels ``recur`` (verify and decode), ``fold``, ``gate``,
``store`` and ``scatter`` and the tables ``recur_tile`` and ``fold_tile``; the tuned one
also ``effective`` (verify, inexact) with ``effective_tile``, and ``streams``.

No kernel starts by programmatic dependent launch. It takes 0.6 us off each layer where
our kernels follow each other and nothing else runs, as in a benchmark; where engines
have other kernels in between it adds 0.5 us, and more where those let go early.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import select

# Contraction off: a fused multiply-add happens where the kernels say fma, nowhere
# else, whatever triton's default (it changes between releases).
_PINNED = {"enable_fp_fusion": False}

# Tokens staged together; more costs shared memory and gains nothing.
_MAX_BLOCK = 8

# What ``effective`` can take in: tokens, and key dims of a short and of a long window
# (more would spill registers).
_MAX_WINDOW, _MAX_KEY, _MAX_KEY_LONG = 16, 256, 224

# Plans kept per op. Serving meets a few dozen; a caller whose every batch has
# another shape must not grow memory without end.
_MAX_PLANS = 4096

Tensors = Sequence[Tensor | None]


class Plan(NamedTuple):
    """One launch: kernel(*tensors, *outputs, *scalars, *constants), for one metadata."""

    kernel: Any
    programs: tuple[int, int, int]
    scalars: tuple[int | float, ...]
    constants: dict[str, int | bool | str]
    warps: int
    outputs: tuple[tuple[Sequence[int], torch.dtype], ...] = ()

    def compile_and_launch(self, tensors: Tensors, outputs: Sequence[Tensor]) -> Any:
        """Launch through triton's own path; return the compiled kernel."""
        if 0 in self.programs:
            return None
        return self.kernel[self.programs](
            *tensors, *outputs, *self.scalars, **self.constants, num_warps=self.warps,
            **_PINNED,
        )  # fmt: skip


def launcher(
    check: Callable[..., object],
    arrange: Callable[..., tuple[tuple[Tensor | None, ...], tuple]],
    plan: Callable[..., Plan],
) -> Callable:
    """The CUDA kernel of an op.

    ``arrange`` puts the op's arguments in order: (tensors as the kernel takes them,
    absent ones None; the rest). ``plan(lowering, tensors, rest)`` makes the plan.
    """
    plans: dict[tuple, tuple[Plan, tuple, Any]] = {}

    def call(*args, **kwargs):
        tensors, rest = arrange(*args, **kwargs)
        pointers, metadata = [], [rest]
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                metadata.append(None)
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                # Alignment is part of what triton compiled for.
                metadata.append(
                    (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
                     pointer & 15 == 0)
                )  # fmt: skip
        key = tuple(metadata)
        made, constants, launch = plans.get(key, (None, None, None))
        if made is None or _differentiable(tensors):
            check(*args, **kwargs)
        index = tensors[0].get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return call(*args, **kwargs)
        if made is None:
            made = plan(select.kernels(index), tensors, rest)
        outputs = [
            torch.empty(shape, dtype=dtype, device=tensors[0].device)
            for shape, dtype in made.outputs
        ]
        if launch is None:
            compiled = made.compile_and_launch(tensors, outputs)
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            if compiled is not None:
                constants = (*made.scalars, *made.constants.values())
                plans[key] = made, constants, compiled[made.programs]
        else:
            pointers.extend(out.data_ptr() for out in outputs)
            launch(*pointers, *constants, stream=torch._C._cuda_getCurrentRawStream(index))
        if len(outputs) < 2:
            return outputs[0] if outputs else None
        return tuple(outputs)

    return call


def _differentiable(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in tensors if tensor is not None
    )


def _block(tokens: int) -> int:
    return min(_MAX_BLOCK, 1 << max(tokens - 1, 0).bit_length())


def _one_pass(lowering: Any, state: Tensor, length: int) -> bool:
    """Whether verify's outputs may come from effective queries: by shape alone."""
    *_, V, K = state.shape
    return (
        hasattr(lowering, "effective")
        and 2 <= length <= _MAX_WINDOW
        and state.dtype == torch.float32
        and K % 32 == 0
        and (_MAX_KEY if length <= _MAX_BLOCK else _MAX_KEY_LONG) >= K
        and V % 32 == 0
    )


def stride(tensor: Tensor | None, dim: int = 0) -> int:
    """A stride as kernels take it: 0 where the tensor or the dimension is absent."""
    return 0 if tensor is None or tensor.dim() <= dim else tensor.stride(dim)


def gate(lowering: Any, tensors: Tensors, rest: tuple) -> Plan:
    a, b, A_log, dt_bias = tensors
    (lower_bound,) = rest
    kda = a.dim() == 3
    elements, block = a.numel(), 256
    return Plan(
        lowering.gate,
        (-(-elements // block), 1, 1),
        (
            0.0 if lower_bound is None else lower_bound, elements,
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), A_log.stride(0),
            dt_bias.stride(0), stride(dt_bias, 1),
        ),
        {
            "HV": a.shape[1], "K": a.shape[2] if kda else 1,
            "SAFE": lower_bound is not None, "BLOCK": block,
        },
        4,
        ((a.shape, torch.float32), (b.shape, torch.float32)),
    )  # fmt: skip


def recur(lowering: Any, tensors: Tensors, rest: tuple) -> Plan:
    """verify, and with absent windows decode."""
    q, k, v, a, b, A_log, dt_bias, state, *windows, slots, cu_seqlens, rows = tensors
    scale, lower_bound, use_qk_l2norm, exact = rest
    (tokens, H, K), (HV, V) = q.shape, v.shape[1:]
    batch, kda, ragged = slots.shape[0], a.dim() == 3, cu_seqlens is not None
    length = tokens // batch if batch and not ragged else 0
    pool, _, capacity, _ = windows[0].shape if windows[0] is not None else (0,) * 4
    kernel, block = lowering.recur, _MAX_BLOCK if ragged else _block(length)
    if not exact and _one_pass(lowering, state, length):
        kernel, block = lowering.effective, _MAX_BLOCK if length <= _MAX_BLOCK else 16
        BV, warps = lowering.effective_tile(HV, K, V, batch, block)
    else:
        safe = lower_bound is not None
        BV, warps = lowering.recur_tile(HV, K, V, batch, kda, ragged, safe)
    tuned = {}
    if kernel is lowering.recur and hasattr(lowering, "streams"):
        tuned["ONE"] = not ragged and length <= block
        tuned["STREAM"] = lowering.streams(HV * batch, kda, windows[0] is None)
    # Ragged batches get one row of programs more: it zeroes uncovered tokens.
    heads = HV * (batch + ragged) if tokens else 0
    return Plan(
        kernel,
        (-(-V // BV) * heads, 1, 1),
        (
            K**-0.5 if scale is None else scale,
            0.0 if lower_bound is None else lower_bound,
            batch, tokens, length, state.shape[0], pool, capacity,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), A_log.stride(0),
            dt_bias.stride(0), stride(dt_bias, 1), state.stride(0),
            *(stride(window) for window in windows),
            slots.stride(0), stride(cu_seqlens), stride(rows),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": kda, "SAFE": lower_bound is not None,
            "L2NORM": use_qk_l2norm, "BV": BV, "TB": block, "NW": warps,
            **tuned,
        },
        warps,
        ((v.shape, v.dtype),),
    )  # fmt: skip


def fold(lowering: Any, tensors: Tensors, rest: tuple) -> Plan:
    *pools, slots, accept_lens, rows, track_indices, track_steps = tensors
    state, k_window, _, g_window, _ = pools
    (use_qk_l2norm,) = rest
    layered = state.dim() == 5
    layers = state.shape[0] if layered else 1
    HV, V, K = state.shape[-3:]
    H, capacity = k_window.shape[-3:-1]
    batch = slots.shape[0]
    kda = g_window.dim() - layered == 4
    BV, warps = lowering.fold_tile(HV, K, V, batch, kda)
    strides = [
        step
        for pool in pools
        for step in (pool.stride()[:2] if layered else (0, pool.stride(0)))
    ]
    return Plan(
        lowering.fold,
        (-(-V // BV) * HV * batch * layers if capacity else 0, 1, 1),
        (
            batch, state.shape[-4], k_window.shape[-4], capacity, *strides,
            slots.stride(0), accept_lens.stride(0), stride(rows),
            stride(track_indices), stride(track_steps),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": kda,
            "L2NORM": use_qk_l2norm, "BV": BV, "TB": _block(capacity), "NW": warps,
        },
        warps,
    )  # fmt: skip


def store(lowering: Any, tensors: Tensors, rest: tuple) -> Plan:
    k, v, g, beta, k_window, v_window, g_window, beta_window, rows, cu_seqlens = tensors
    (tokens, H, K), (HV, V) = k.shape, v.shape[1:]
    pool, _, capacity, _ = k_window.shape
    batch = rows.shape[0]
    ragged = cu_seqlens is not None
    length = tokens // batch if batch and not ragged else 0
    span = capacity if ragged else length
    return Plan(
        lowering.store,
        (span * HV * batch, 1, 1),
        (
            span, tokens, length, pool, capacity,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
            k_window.stride(0), v_window.stride(0), g_window.stride(0),
            beta_window.stride(0), rows.stride(0), stride(cu_seqlens),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": g.dim() == 3,
            "BK": 1 << (K - 1).bit_length(), "BV": 1 << (V - 1).bit_length(),
        },
        1,
    )  # fmt: skip


def scatter(lowering: Any, tensors: Tensors, rest: tuple) -> Plan:
    state, intermediate, slots, steps, sources, track_indices, track_steps = tensors
    layers, pool = state.shape[:2]
    _, rows, length = intermediate.shape[:3]
    size, batch, block = state.shape[2:].numel(), slots.shape[0], 2048
    return Plan(
        lowering.scatter,
        (layers * batch, -(-size // block), 1),
        (
            size, batch, pool, rows, length,
            state.stride(0), state.stride(1), *intermediate.stride()[:3],
            slots.stride(0), steps.stride(0), stride(sources),
            stride(track_indices), stride(track_steps),
        ),
        {"BLOCK": block},
        4,
    )  # fmt: skip
