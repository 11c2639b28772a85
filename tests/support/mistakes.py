"""Metadata mistakes, and the errors of calls that make one each."""

import torch

from calls import CALLS, gathered, mutated, named
from samples import bits_equal, pages


def rank(name):
    return lambda x: {name: x[name][None]}


def longer(name, dim=-1):
    """One more along a dimension."""
    return lambda x: {name: torch.cat([x[name], x[name].narrow(dim, 0, 1)], dim)}


def cast(name, dtype):
    return lambda x: {name: x[name].to(dtype)}


def moved(name):
    return lambda x: {name: x[name].to("meta")}


def swapped(name):
    """The same shape with the two innermost dimensions swapped in memory."""
    return lambda x: {name: x[name].transpose(-1, -2).contiguous().transpose(-1, -2)}


def spaced(name):
    """The same shape with every second element of the innermost dimension."""
    return lambda x: {name: x[name].repeat_interleave(2, dim=-1)[..., ::2]}


def overlapping(name):
    return lambda x: {name: x[name][:1].expand_as(x[name])}


def given(**values):
    return lambda x: values


def texts(device, label, *cases):
    """The error of each case, after the right call; nothing may have been written."""
    op, args, kwargs = CALLS[label](device)
    function = getattr(torch.ops.replayssm, op).default
    function(*args, **kwargs)  # a call that was accepted must not excuse the next
    good = kwargs | named(op, args, kwargs)
    before = {name: pages(good[name]).clone() for name in mutated(op, good)}
    lines = []
    for number, case in enumerate(cases):
        text = f"case {number} was accepted"
        try:
            function(**gathered(good | case(good)))
        except (ValueError, TypeError) as error:
            text = f"{type(error).__name__}: {error}"
        lines.append(text.replace(f"{device}:0", device).replace(device, "DEVICE"))
        for written, value in before.items():
            bits_equal(pages(good[written]), value, f"{written} after {text}")
    return "\n".join(lines)
