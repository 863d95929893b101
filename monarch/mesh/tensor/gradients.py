"""Gradients in parts: functions with a backward of their own, and backward passes that give one gradient at a time."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree


def grad_function(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """A function that brings its own backward pass, for autograd to call; for remote functions and collectives, say.

    It returns `(result, backward)`. `backward` gets a gradient for each tensor of the result, and returns one, or None,
    for each tensor among the arguments, in their order.

    Raises (a call):
        TypeError: it returns something else.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        arranged: list[Any] = []

        class Apply(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
                for at, tensor in zip(places, tensors, strict=True):
                    leaves[at] = tensor
                given, named = pytree.tree_unflatten(leaves, spec)
                made = function(*given, **named)
                if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
                    raise TypeError(f"{function!r} returned {made!r}, where (result, backward) is needed")
                result, ctx.pull = made
                flat, tree = pytree.tree_flatten(result)
                arranged.extend((flat, tree))
                return tuple(leaf for leaf in flat if isinstance(leaf, torch.Tensor))

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                pulled = ctx.pull(*grads)
                return pulled if isinstance(pulled, (tuple, list)) else (pulled,)

        tensors = iter(Apply.apply(*[leaves[at] for at in places]))
        flat, tree = arranged
        return pytree.tree_unflatten([next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], tree)

    return run


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor],
    with_respect_to: Sequence[torch.Tensor],
    grad_roots: Sequence[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor | None]:
    """The gradients of `roots`, one for each of `with_respect_to`, in that order; None where there is no way.

    The backward pass goes on only as far as each gradient needs, so that what is done with one (its reduction, say)
    comes before the rest of it. Ask in the order in which they become ready: the last layers first.

    Args:
        grad_roots: gradients of the roots; ones where not given.
    """
    tops = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    grads = [torch.ones_like(top) for top in tops] if grad_roots is None else list(grad_roots)
    edges = [get_gradient_edge(top) for top in tops]
    backward = _Backward([edge.node for edge in edges])
    for edge, grad in zip(edges, grads, strict=True):
        backward.add(edge.node, edge.output_nr, grad)
    wanted = [get_gradient_edge(tensor) for tensor in with_respect_to]
    for edge in wanted:
        backward.keep(edge.node, edge.output_nr)
    for edge in wanted:
        yield backward.gradient(edge.node, edge.output_nr)


class _Backward:
    """A backward pass over the graph of autograd that can be halted after any node."""

    def __init__(self, tops: Sequence[Any]) -> None:
        self._missing: dict[Any, int] = {}  # edges into each node that have not been followed yet
        self._grads: dict[Any, dict[int, torch.Tensor]] = {}
        self._kept: dict[tuple[Any, int], torch.Tensor | None] = {}
        self._ready: list[tuple[int, int, Any]] = []  # latest node of the forward pass first
        self._done: set[Any] = set()
        todo = list(dict.fromkeys(tops))
        self._missing.update(dict.fromkeys(todo, 0))
        while todo:
            for node, _ in todo.pop().next_functions:
                if node is not None:
                    if node not in self._missing:
                        self._missing[node] = 0
                        todo.append(node)
                    self._missing[node] += 1
        for node in dict.fromkeys(tops):
            self._queue_if_ready(node)

    def _queue_if_ready(self, node: Any) -> None:
        if not self._missing[node]:
            heapq.heappush(self._ready, (-node._sequence_nr(), id(node), node))

    def add(self, node: Any, at: int, grad: torch.Tensor) -> None:
        shape = node._input_metadata[at].shape
        if grad.shape != torch.Size(shape):
            grad = grad.sum_to_size(shape)  # it was broadcast on the way forward
        grads = self._grads.setdefault(node, {})
        grads[at] = grads[at] + grad if at in grads else grad

    def keep(self, node: Any, at: int) -> None:
        self._kept[node, at] = None

    def gradient(self, node: Any, at: int) -> torch.Tensor | None:
        """Go on until the gradient of that output of a node is complete."""
        while node in self._missing and node not in self._done and self._ready:
            self._step(heapq.heappop(self._ready)[2])
        return self._kept[node, at]

    def _step(self, node: Any) -> None:
        self._done.add(node)
        grads = self._grads.pop(node, {})
        for at, grad in grads.items():
            if (node, at) in self._kept:
                self._kept[node, at] = grad
        if not node.next_functions:
            return  # a leaf
        given: Any = ()
        if grads:
            with torch.no_grad():
                count = len(node._input_metadata)
                run = node if callable(node) else node.apply  # of a torch.autograd.Function
                given = run(*[grads.get(at) for at in range(count)])
        results = given if isinstance(given, tuple) else (given,)
        for (following, at), grad in zip(
            node.next_functions, results or [None] * len(node.next_functions), strict=False
        ):
            if following is None:
                continue
            if grad is not None:
                self.add(following, at, grad)
            self._missing[following] -= 1
            self._queue_if_ready(following)
