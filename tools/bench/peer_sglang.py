"""SGLang's kernels as peers: three ways to verify and commit, and decode."""

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import torch

from peers import FLA, Loaders, Prepare, Prepared, part, shell, stand_in

if TYPE_CHECKING:
    from problem import Problem

OPS = "sglang.kernels.ops"
LINEAR = f"{OPS}.attention.linear"
NO_JIT = "SGLang runs a CUDA kernel there, built by tvm-ffi; only its Triton ones run here"


def _not_here(*_, **__):
    raise NotImplementedError("this part of SGLang is not stood in for")


def load(folder: Path, module: str) -> ModuleType:
    """A kernel file, with the predicates that it asks its engine for answered here."""
    shell(
        folder, "sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.jit", OPS,
        f"{OPS}.attention", f"{OPS}.attention.fla", LINEAR, f"{OPS}.mamba", f"{OPS}.memory",
    )  # fmt: skip
    hip = bool(torch.version.hip)
    cuda = torch.cuda.is_available() and not hip
    arch = torch.cuda.get_device_properties(0).gcnArchName if hip else ""
    major, minor = torch.cuda.get_device_capability() if cuda else (0, 0)
    predicates = {
        "is_cuda": lambda: cuda,
        "is_hip": lambda: hip,
        "is_gfx95_supported": lambda: "gfx95" in arch,
        "is_sm90_supported": lambda: major == 9,
        "get_device_sm": lambda: 10 * major + minor,
        "get_device_core_count": _not_here,
        "torch_release": tuple(int(part) for part in torch.__version__.split(".")[:2]),
    }
    stand_in("sglang.srt.utils", **predicates, __path__=[])
    stand_in("sglang.srt.utils.common", **predicates)
    stand_in(
        "sglang.kernels.jit.utils", is_arch_support_pdl=lambda: major >= 9,
        cache_once=functools.cache, make_cpp_args=_not_here, load_jit=_not_here,
    )  # fmt: skip
    return importlib.import_module(module)


def _recurrent(folder: Path) -> Callable[..., Callable]:
    recurrent = load(folder, f"{LINEAR}.fused_sigmoid_gating_recurrent")

    def verify_of(p: "Problem", state: torch.Tensor) -> Callable[..., torch.Tensor]:
        """verify(layer, **options for what it keeps): outputs [N, HV, V]."""
        q, k, v, a, b = p.tokens
        a = a.flatten(2)  # KDA's gate inputs are one row a token
        cu_seqlens = torch.arange(p.B + 1, device=a.device, dtype=torch.int32) * p.model.D

        def verify(layer: int, **kept) -> torch.Tensor:
            return recurrent.fused_sigmoid_gating_delta_rule_update(
                A_log=p.A_log[layer], a=a[layer], dt_bias=p.dt_bias[layer],
                softplus_beta=1.0, softplus_threshold=20.0, q=q[layer, None],
                k=k[layer, None], v=v[layer, None], b=b[layer],
                initial_state_source=state[layer], initial_state_indices=p.slots,
                use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, is_kda=p.model.kda,
                lower_bound=p.model.lower_bound, disable_state_update=True, **kept,
            )[0]  # fmt: skip

        return verify

    return verify_of


def _rows(p: "Problem") -> torch.Tensor:
    return torch.arange(p.B, device=p.slots.device, dtype=torch.int32)


def _conv_pools(op: str, p: "Problem") -> dict[str, list[torch.Tensor]]:
    """The conv pools that a commit moves too; a fold and a step leave them alone."""
    if op != "commit":
        return {"conv": [], "intermediate_conv_window": []}
    states = [pool.clone() for pool in p.pools.conv_states]
    windows = (
        window.unfold(-1, pool.shape[-1], 1).movedim(-2, 2)  # [L, R, D, C, W-1], no copy
        for pool, window in zip(states, p.pools.conv_windows, strict=True)
    )
    return {"conv": states, "intermediate_conv_window": list(windows)}


def exact(folder: Path) -> Prepare:
    """Recurrent verify with a ring of raw rows, their replay, and packed decode."""
    verify_of, decode = _recurrent(folder), _decode(folder)
    gdn = load(folder, f"{LINEAR}.gdn_replayssm_spec_fold")
    kda = load(folder, f"{LINEAR}.kda_replayssm_spec_decode")

    def prepare(op: str, p: "Problem") -> Prepared | None:
        if op == "decode":
            return decode(p)
        m = p.model
        # SGLang sizes its rings so: GDN's by the draft, KDA's a power of two from 2 D.
        T = max(16, 1 << (2 * m.D - 1).bit_length()) if m.kda else m.D
        (L, S), new, fp32 = p.state.shape[:2], p.tokens[0].new_empty, torch.float32
        gate = (m.K,) if m.kda else ()
        rings = {
            "replayssm_rawv": new(L, S, m.HV, T, m.V),
            "replayssm_rawk": new(L, S, m.H, T, m.K),
            "replayssm_g": new(L, S, m.HV, T, *gate, dtype=fp32),
            "replayssm_beta": new(L, S, m.HV, T, dtype=fp32),
        }
        state = p.state if op == "verify" else p.state.clone()
        verify_layer = verify_of(p, state)

        def verify() -> Iterator[torch.Tensor]:
            for layer in range(L):
                views = {name: ring[layer] for name, ring in rings.items()}
                yield verify_layer(layer, cache_ring=True, **views)

        convs = _conv_pools(op, p)
        pools = SimpleNamespace(temporal=state, **convs, **rings)
        rows, last = _rows(p), p.accept_lens - 1
        commit_rows = (
            kda.commit_kda_replayssm_after_verify if m.kda
            else gdn.commit_gdn_replayssm_fold_after_verify
        )  # fmt: skip

        def commit() -> None:
            commit_rows(
                spec_state=pools, state_batch_indices=p.slots, accept_lens=p.accept_lens,
                last_correct_step_indices=last, src_indices_raw=rows,
            )  # fmt: skip

        return part(op, verify, commit, lambda: state, convs["conv"])

    return prepare


def _decode(folder: Path) -> Callable[["Problem"], Prepared | None]:
    kernels = load(folder, f"{OPS}.attention.fla.fused_recurrent")
    jit_takes = load(folder, f"{OPS}.attention.kda_packed_decode").covered

    def prepare(p: "Problem") -> Prepared | None:
        m, B = p.model, p.B
        q, k, v, a, b = (x.unflatten(1, (B, m.D))[:, :, 0].flatten(2) for x in p.tokens)
        qkv, a, b = torch.cat((q, k, v), -1), a.contiguous(), b.contiguous()
        state, out = p.state.clone(), v.new_empty(m.layers, B, 1, m.HV, m.V)
        dt_bias = p.dt_bias.flatten(1)
        kernel, options = kernels.fused_recurrent_gated_delta_rule_packed_decode, {}
        if m.kda:
            kernel = kernels.fused_recurrent_kda_packed_decode
            options["lower_bound"] = m.lower_bound

        def inputs(layer: int) -> tuple[torch.Tensor, ...]:
            return qkv[layer], a[layer], b[layer], p.A_log[layer], dt_bias[layer]

        if m.kda and jit_takes(*inputs(0), state[0], out[0], p.slots, m.H):
            return None

        def layers() -> Iterator[torch.Tensor]:
            for layer in range(m.layers):
                kernel(
                    *inputs(layer), m.K**-0.5, state[layer], out[layer], p.slots,
                    use_qk_l2norm_in_kernel=True, **options,
                )  # fmt: skip
                yield out[layer, :, 0]

        # GDN's kernel rounds beta to the dtype of b: bf16, 2^-9.
        return Prepared(layers, lambda: state, tolerance=1e-5 if m.kda else 2**-8)

    return prepare


def pending_rows(length: int, D: int, L: int, accept_lens: torch.Tensor) -> torch.Tensor:
    """Rows that are pending in each ring, [L, B] int32, with neighbours a step apart.

    Without accepted tokens any number of rows may be pending: as if one were accepted.
    """
    accept_lens = accept_lens.clamp(min=1)
    period = (length - 2 * D) // accept_lens + 1  # steps until a ring is full
    layers = torch.arange(L, device=accept_lens.device)[:, None]
    requests = torch.arange(len(accept_lens), device=accept_lens.device)
    return ((layers + requests) % period * accept_lens).int()


def circular(length: int, folder: Path) -> Prepare:
    """Chunked verify on a ring of `length` rows, some of them committed but pending."""
    kernels = load(folder, f"{LINEAR}.gdn_replayssm_spec_decode")
    scatter = load(folder, f"{OPS}.mamba.mamba_state_scatter_triton")

    def prepare(op: str, p: "Problem") -> Prepared | None:
        """GDN with 2 D <= length; verify, commit and step.

        A commit updates a state once fewer than 2 D rows of its ring are free: every step,
        or one step in a few. A run costs the mean of these, because layers are a step apart:
        each has cursors of its own here, where SGLang has one set for all (kernels and
        launches are as many). verify runs with that mixture of pending rows, and leaves it
        as it is. At first they hold no key, no value and no decay: they change no result.
        """
        m, L, B = p.model, p.model.layers, p.B
        if m.kda or length < 2 * m.D or op not in ("verify", "commit", "step"):
            return None
        S, device, q, v = p.state.shape[1], p.state.device, p.tokens[0], p.tokens[2]
        # Layers are taken for requests: [L * S] slots and L * B rings, in one launch.
        state = (p.state if op == "verify" else p.state.clone()).flatten(0, 1)
        layers = torch.arange(L, device=device)[:, None]
        slots, accept = (layers * S + p.slots).flatten().int(), p.accept_lens.repeat(L)
        rings = torch.arange(L * B, device=device).int()
        cursors = {
            "write_pos": pending_rows(length, m.D, L, p.accept_lens).flatten(),
            "cache_base": torch.zeros_like(rings),
            "is_flush": torch.zeros_like(rings, dtype=torch.int8),
        }
        # Updates and keys are stored as a bf16 and what that lacks.
        d, d_low = v.new_zeros(2, L * B, m.HV, length, m.V)
        k, k_low = q.new_zeros(2, L * B, m.H, length, m.K)
        g = q.new_zeros(L * B, m.HV, length, dtype=torch.float32)
        cu_seqlens = torch.arange(B + 1, device=device, dtype=torch.int32) * m.D
        convs, rows, last = _conv_pools(op, p), _rows(p), p.accept_lens - 1

        def verify() -> Iterator[torch.Tensor]:
            for layer in range(L):
                own = slice(layer * B, layer * B + B)
                yield kernels.gdn_replayssm_spec_decode(
                    *(x[layer] for x in p.tokens), p.A_log[layer], p.dt_bias[layer], state,
                    d, k, g, rawv_cache=d_low, rawk_cache=k_low, beta_cache=None,
                    out=torch.empty_like(p.tokens[2][layer]), query_start_loc=cu_seqlens,
                    ssm_state_indices=slots[own], replay_indices=rings[own], **cursors,
                    max_cache_len=length, max_spec_len=m.D, null_block_id=-1,
                    launch_mode="verify",
                )  # fmt: skip

        def update_full() -> None:
            kernels.commit_gdn_replayssm_circular(
                checkpoint_state=state[None], d_cache=d[None], k_cache=k[None],
                g_cache=g[None], d_residual_cache=d_low[None], k_residual_cache=k_low[None],
                state_batch_indices=slots, replay_indices=rings, **cursors,
                accept_lens=accept, null_block_id=-1,
            )  # fmt: skip

        def commit() -> None:
            kernels.commit_gdn_replayssm_spec(
                **cursors, num_accepted=accept, replay_indices=rings, max_cache_len=length,
                max_spec_len=m.D, null_block_id=-1,
            )  # fmt: skip
            update_full()
            for pool, window in zip(*convs.values(), strict=True):
                scatter.fused_conv_window_scatter_with_mask(
                    pool, window, p.slots, last, rows
                )

        def committed() -> torch.Tensor:
            cursors["is_flush"].fill_(1)
            update_full()
            return state.unflatten(0, (L, S))

        # The updates come from products in tf32: 11 bits.
        return part(op, verify, commit, committed, convs["conv"], 2**-9)

    return prepare


def snapshot(folder: Path) -> Prepare:
    """Recurrent verify with a state stored per draft token, and the accepted one's copy."""
    verify_of = _recurrent(folder)
    scatter = load(folder, f"{OPS}.mamba.mamba_state_scatter_triton")

    def prepare(op: str, p: "Problem") -> Prepared | None:
        m = p.model
        if op not in ("verify", "commit", "step"):
            return None
        snapshots = p.state.new_empty(m.layers, p.B, m.D, m.HV, m.V, m.K)
        state = p.state if op == "verify" else p.state.clone()
        convs, rows, last = _conv_pools(op, p), _rows(p), p.accept_lens - 1
        pools = SimpleNamespace(temporal=state, intermediate_ssm=snapshots, **convs)
        verify_layer = verify_of(p, state)

        def verify() -> Iterator[torch.Tensor]:
            for layer in range(m.layers):
                yield verify_layer(
                    layer, intermediate_states_buffer=snapshots[layer],
                    intermediate_state_indices=rows, cache_steps=m.D,
                )  # fmt: skip

        def commit() -> None:
            scatter.scatter_mamba_states_after_mtp_verify(
                pools, p.slots, last, None, None, src_indices_raw=rows
            )

        return part(op, verify, commit, lambda: state, convs["conv"])

    return prepare


PEERS: Loaders = {
    "sglang": ("sglang", exact),
    "sglang-circular-16": ("sglang", functools.partial(circular, 16)),
    "sglang-circular-32": ("sglang", functools.partial(circular, 32)),
    "sglang-snapshot": ("sglang", snapshot),
    **FLA,
}
