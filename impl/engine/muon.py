"""Steps sharded matrices with Muon, and all other parameters with AdamW.

Muon (Jordan et al., 2024; Moonlight, arXiv 2502.16982) orthogonalises the momentum of each matrix by Newton-Schulz
iterations, which need the whole matrix.  The masters (fp32 weights), the gradients and the momentum stay in shards, and
each rank updates the momentum of its shards element by element.  For the orthogonalisation, each matrix has an owner:
the rank that gets the momentum of the whole matrix.  :mod:`impl.plan.owners` chooses the owners.

In one step, the following happens to a matrix:

1. *Each rank computes its part of the momentum*, and encodes this part in the message to the matrix's owner.
2. *The owner decodes all parts* to their places in one buffer, and orthogonalises the matrix.
3. *The owner encodes the update* by parts, and each rank subtracts its part from its masters.

The arithmetic is that of ``torch.optim.Muon``.  If the model is on one rank and messages are in fp32 or bf16, the
weights are bit-equal to those of ``torch.optim.Muon``.  Messages in bf16 do not change the result, because
Newton-Schulz itself rounds its input to bf16, and returns bf16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from impl import ops
from impl.engine.elementwise_probe import bare_step, elementwise
from impl.engine.engine import Zero
from impl.engine.unit_planning import GroupOf, find_blocks
from impl.errors import ZeroError
from impl.plan.owners import MATRICES, Matrix, Part, owners_of
from impl.plan.traffic import MOMENTUM, UPDATE

_STEP_ADAMW: Final[Callable[..., Any]] = bare_step(AdamW)  # calls no hooks, so a step is reported once
_STATE: Final = "momentum_buffer"  # the name that torch.optim.Muon gives to the momentum


def hidden_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters inside a model's blocks (:func:`impl.zero.find_blocks`), except embeddings.

    Several modules may share a parameter.  The parameter's name is returned only if all of these modules are inside
    blocks, and none of these modules is an embedding.
    """
    inside = {module for block in find_blocks(model) for module in block.modules()}
    names: dict[nn.Parameter, str] = {}  # the name of each parameter's first holder, as shard() names it
    outer = set[nn.Parameter]()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():  # noqa: SLF001  # named_parameters() names one holder
            if parameter is not None:
                names.setdefault(parameter, f"{prefix}.{key}".removeprefix("."))
                if module not in inside or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    outer.add(parameter)
    return {name for parameter, name in names.items() if parameter not in outer}


def hidden_matrices(model: nn.Module) -> GroupOf:
    """Return a ``group_of`` function for :func:`impl.zero.shard` that puts a model's hidden matrices into group 1.

    The function takes the name of a parameter and the parameter, and returns the number of an optimizer group: 1 for
    hidden matrices, which Muon steps, and 0 for all other parameters.

    Hidden matrices are the 2-D parameters inside the model's blocks (:func:`impl.zero.find_blocks`), except embeddings.
    So group 0 has vectors, embeddings, and all parameters outside of blocks, such as the output head.
    """
    hidden = hidden_parameters(model)
    return lambda name, parameter: MATRICES if name in hidden and len(parameter.shape) == 2 else 0


def unknown_argument(kind: type[Optimizer], given: Iterable[str]) -> str | None:
    """Return an error text for the first name in ``given`` that is no argument of the optimizer class ``kind``.

    An example is ``'lrr' is no argument of AdamW: use one of ...``.  The caller puts the name of the call before this
    text, such as ``Muon(adamw=...):``.  Returns None if all names are known, or if the class accepts arguments of any
    name.
    """
    parameters = inspect.signature(kind).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    known = list(parameters)[1:]  # the first argument is the tensors to step
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return None
    return f"{unknown!r} is no argument of {kind.__name__}: use one of {', '.join(known)}, or remove it"


def check_arguments(muon: Mapping[str, Any], adamw: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments of ``torch.optim.Muon`` and ``torch.optim.AdamW``.

    Returns Muon's options: the arguments ``muon``, and torch's defaults for options that are not in ``muon``.

    Raises:
        ValueError: if torch refuses an argument.
        ZeroError: for an argument that torch does not know, or if ``adamw`` is no mapping.
    """
    if not isinstance(adamw, Mapping):
        raise ZeroError(
            f"Muon(adamw={adamw!r}): expected a table of AdamW's arguments, such as {{'lr': 3e-4}}"
        )
    for kind, given, where in ((torch.optim.Muon, muon, "Muon(...)"), (AdamW, adamw, "Muon(adamw=...)")):
        if (unknown := unknown_argument(kind, given)) is not None:
            raise ZeroError(f"{where}: {unknown}")
    AdamW([nn.Parameter(torch.zeros(1))], **adamw)
    optimizer = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **muon)
    (options,) = optimizer.param_groups
    # Torch checks these only in a step.
    _zeropower_via_newtonschulz(
        torch.zeros(1, 1), options["ns_coefficients"], options["ns_steps"], options["eps"]
    )
    return optimizer.defaults


class WithAdamW(Optimizer):
    """Base class of optimizers that step some matrices with Muon, and all other parameters with torch's AdamW.

    Args:
        matrices: parameter groups for Muon.
        others: parameter groups for AdamW.
        muon: arguments of ``torch.optim.Muon``, which checks them.
        adamw: arguments of ``torch.optim.AdamW``, which checks them.
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
    ) -> None:
        options = check_arguments(muon, adamw)
        self._adamw = AdamW(list(others) or [{"params": []}], **adamw)
        groups = [options | group | {"matrices": True} for group in matrices]
        groups += [group | {"matrices": False} for group in self._adamw.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the matrices with Muon, and all other parameters with AdamW.

        If ``closure`` is given, it is called first, to compute the loss and its gradients, and the loss is returned.
        Otherwise None is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_matrices([group for group in self.param_groups if group["matrices"]])
        # Loading a state replaces groups and states, so they are handed over in every step.
        self._adamw.param_groups = [group for group in self.param_groups if not group["matrices"]]
        self._adamw.state = self.state
        _STEP_ADAMW(self._adamw)
        return loss

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Step the matrices with Muon; a subclass defines this method, which :meth:`step` calls.

        ``groups`` are the parameter groups that hold the matrices.  The call is under ``torch.no_grad()``.
        """
        raise NotImplementedError


class _Sent(NamedTuple):
    """Says which part of a matrix this rank holds in its shard, and where the part is in messages.

    The matrix's owner, the rank that orthogonalises the whole matrix, gets the part's momentum in one message and sends
    the part's update in another.
    """

    part: Part
    owner: int  # index of the matrix's owner among the ranks that share one copy of the states
    momentum: slice  # the part's bytes in the buffer of this rank's messages to owners
    update: slice  # the part's bytes in the message that comes back from the owner


class _Held(NamedTuple):
    """The parts of one unit's matrices that this rank holds in its shard; a unit is a group of parameters."""

    master: nn.Parameter  # (n,) the elements of the unit's matrices in this rank's shard
    start: int  # index in the shard of the first element of ``master``
    parts: list[_Sent]


class _Piece(NamedTuple):
    """Says where one part of a matrix is in the matrix and in messages; this rank orthogonalises the matrix.

    The part's *holder* is the rank that has the part in its shard: another rank, or this rank itself.
    """

    holder: int  # index of the rank that holds the part, among the ranks that share one copy of the states
    place: slice  # the part's elements in the matrix
    momentum: slice  # the part's bytes in the message from the holder
    update: slice  # the part's bytes in the buffer of this rank's messages to holders


@elementwise  # Muon is not elementwise, but it gets the whole of each matrix from the other ranks' shards
class Muon(WithAdamW):
    """Steps the masters (fp32 weights) of a sharded model: matrices with Muon, all other parameters with AdamW.

    Shard the model so that its matrices are in an optimizer group of their own::

        zero = zeropp.shard(model, policy=policy, group_of=zeropp.hidden_matrices(model))
        optimizer = zeropp.Muon(zero, lr=0.02, momentum=0.95, adamw={"lr": 3e-4})

    All ranks must call ``step()`` together.  Each matrix has an owner, the rank that orthogonalises it.  The policy's
    field ``owned`` has the codecs of the messages to and from owners.

    Args:
        zero: the engine.
        adamw: arguments of ``torch.optim.AdamW``, which steps all other parameters; torch's defaults if not given.
        group: the number that ``group_of`` returned for the matrices.
        options: arguments of ``torch.optim.Muon``: ``lr``, ``weight_decay``, ``momentum``, ``nesterov``,
            ``ns_coefficients``, ``eps``, ``ns_steps`` and ``adjust_lr_fn``.

    Raises:
        ZeroError: if ``zero`` is no engine, if no trained parameter is in the group, if a parameter of the group is no
            matrix, if masters are offloaded, or if torch does not know an argument.
        ValueError: if torch refuses an argument.
    """

    def __init__(
        self,
        zero: Zero,
        *,
        adamw: Mapping[str, Any] | None = None,
        group: int = MATRICES,
        **options: Any,
    ) -> None:
        if not isinstance(zero, Zero):
            raise ZeroError(
                f"Muon got a {type(zero).__name__}: expected the engine that zeropp.shard() returned"
            )
        mesh, geometries = zero.wire.mesh, [unit.geometry for unit in zero.units]
        found = owners_of(zero.policy, mesh.topology, geometries, group)
        if found is None:
            raise ZeroError(
                f"Muon: no trained parameter is in optimizer group {group}: call "
                "shard(..., group_of=zeropp.hidden_matrices(model)), or use AdamW"
            )
        self.owners, self._zero, me = found, zero, found.axis.digit(mesh.rank)
        numbers = {slot.spec.group for geometry in geometries for slot in geometry.slots}
        groups = zero.param_groups({number: {"matrices": number == group} for number in numbers})
        super().__init__(
            [each for each in groups if each["matrices"]],
            [each for each in groups if not each["matrices"]],
            options,
            adamw or {},
        )
        ops.prepare(mesh.device, zero.policy.owned)
        if found.axis.size > 1:
            zero.wire.make_groups([found.axis])
        self._held, self._owned = self._find_held(me, group), self._find_owned(me)
        # Two buffers, fp32, which are used again for each unit and matrix.  ``_direction`` first has the values that
        # this rank sends to owners, and later the orthogonalised part that an owner has sent back.  ``_whole`` has one
        # whole matrix that this rank orthogonalises.
        spans = [held.master.numel() for held in self._held]
        wholes = [matrix.slot.spec.numel for matrix, _ in self._owned]
        self._direction, self._whole = (
            torch.empty(max(sizes, default=0), dtype=torch.float32, device=mesh.device)
            for sizes in (spans, wholes)
        )
        zero.units[0].meter.add("owned", self._direction.nbytes + self._whole.nbytes)

    def _find_held(self, me: int, group: int) -> list[_Held]:
        """Return which parts of each unit's matrices are in this rank's shard.

        A unit is a group of parameters.  The list has one entry for each unit with matrices.  ``me`` is this rank's
        index among the ranks that share one copy of the states.  ``group`` is the number of the optimizer group of the
        matrices.
        """
        owners, sent = self.owners, dict[int, _Sent]()
        for owner in range(owners.axis.size):
            base = sum(owners.to_owners[me][:owner])
            frames = owners.frames(me, owner, owners.momentum), owners.frames(me, owner, owners.update)
            for (part, *there), (_, *back) in zip(*frames, strict=True):
                sent[part.matrix] = _Sent(part, owner, slice(base + there[0], base + there[1]), slice(*back))
        held = []
        # A rank without any part of a unit's matrices has an empty master, which gets a state like all others.
        for index in sorted({matrix.unit for matrix in owners.matrices}):
            parts = [each for number, each in sorted(sent.items()) if owners.matrices[number].unit == index]
            unit = self._zero.units[index]
            spans = unit.geometry.spans(self._zero.wire.mesh.rank)
            for (number, start, _), (_, master) in zip(spans, unit.master_shard.masters, strict=True):
                if number == group:
                    held.append(_Held(master, start, parts))
        return held

    def _find_owned(self, me: int) -> list[tuple[Matrix, list[_Piece]]]:
        """Return (matrix, parts) for each matrix that this rank orthogonalises.

        ``parts`` has an entry for each rank that holds a part of the matrix in its shard.  The entry says where the
        part is in the matrix, and in the messages from and to that rank.

        ``me`` is this rank's index among the ranks that share one copy of the states.
        """
        owners = self.owners
        pieces: dict[int, list[_Piece]] = {
            number: [] for number, matrix in enumerate(owners.matrices) if matrix.owner == me
        }
        for holder in range(owners.axis.size):
            base = sum(owners.from_owners[me][:holder])
            frames = owners.frames(holder, me, owners.momentum), owners.frames(holder, me, owners.update)
            for (part, *there), (_, *back) in zip(*frames, strict=True):
                place = slice(part.first, part.first + part.numel)
                out = slice(base + back[0], base + back[1])
                pieces[part.matrix].append(_Piece(holder, place, slice(*there), out))
        return [(owners.matrices[number], each) for number, each in pieces.items()]

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Step this rank's parts of all matrices with Muon; all ranks must call it.

        ``groups`` has exactly one parameter group, with Muon's options.
        """
        (options,), owners, wire = groups, self.owners, self._zero.wire
        with wire.calling("optimizer.step()"):
            there = wire.uneven_all_to_all(owners.axis, owners.to_owners, MOMENTUM, owners.digest)
            for held in self._held:
                self._send_momentum(held, options, there.send)
            there.post()
            momentum = there.parts()
            back = wire.uneven_all_to_all(owners.axis, owners.from_owners, UPDATE, owners.digest)
            for matrix, pieces in self._owned:
                self._orthogonalise(matrix, pieces, options, momentum, back.send)
            there.close()
            back.post()
            updates = back.parts()
            for held in self._held:
                self._apply(held, options, updates)
            back.close()

    def _send_momentum(self, held: _Held, options: Mapping[str, Any], messages: Tensor) -> None:
        """Update the momentum of one unit's matrices, and encode it for the ranks that orthogonalise the matrices.

        A unit is a group of parameters.  ``held`` has the parts of its matrices in this rank's shard.  ``messages`` is
        the buffer of all messages from this rank to the matrices' owners (the ranks that orthogonalise them); the
        momentum of each part is encoded to its place in this buffer.  With Nesterov momentum, the message has the
        gradient mixed with the momentum.  If the masters (fp32 weights) have no gradient, their momentum does not
        change, and zeros are sent, since the owners expect a message.  ``options`` are Muon's options.
        """
        gradient = held.master.grad
        if gradient is None:
            for sent in held.parts:
                messages[sent.momentum].zero_()
            return
        state, momentum = self.state[held.master], options["momentum"]
        if _STATE not in state:
            state[_STATE] = torch.zeros_like(gradient)
        direction: Tensor = state[_STATE].lerp_(gradient, 1 - momentum)
        if options["nesterov"]:
            direction = torch.lerp(gradient, direction, momentum, out=self._direction[: gradient.numel()])
        for sent in held.parts:
            first = sent.part.start - held.start
            ops.encode(
                self.owners.momentum, direction[first : first + sent.part.numel], messages[sent.momentum]
            )

    def _orthogonalise(
        self,
        matrix: Matrix,
        pieces: Sequence[_Piece],
        options: Mapping[str, Any],
        momentum: Sequence[Tensor],
        messages: Tensor,
    ) -> None:
        """Orthogonalise the momentum of one matrix, and encode the result in ``messages`` for the ranks with its parts.

        Args:
            matrix: the matrix.
            pieces: the matrix's parts, each with its holder (the rank that has the part in its shard).
            options: Muon's options.
            momentum: the messages that this rank has received, with encoded parts of the momentum.  Each message is at
                the index of the holder that has sent it.
            messages: the buffer of all messages from this rank to holders.
        """
        whole = self._whole[: matrix.slot.spec.numel]
        for piece in pieces:
            ops.decode(self.owners.momentum, momentum[piece.holder][piece.momentum], whole[piece.place])
        shaped = whole.view(matrix.shape)
        shaped.copy_(
            _zeropower_via_newtonschulz(
                shaped, options["ns_coefficients"], options["ns_steps"], options["eps"]
            )
        )
        for piece in pieces:
            ops.encode(self.owners.update, whole[piece.place], messages[piece.update])

    def _apply(self, held: _Held, options: Mapping[str, Any], updates: Sequence[Tensor]) -> None:
        """Step the fp32 weights of one unit's matrices in this rank's shard: weight decay, then Muon's update.

        A unit is a group of parameters.

        Args:
            held: the parts of the unit's matrices that this rank holds.  If they have no gradient, nothing is done.
            options: Muon's options, such as ``lr``.
            updates: the message of each owner, by the owner's index.  An owner is a rank that has orthogonalised
                matrices; its message has the updates for this rank's parts of these matrices.
        """
        if held.master.grad is None:
            return
        rate = float(options["lr"])
        held.master.mul_(1 - rate * options["weight_decay"])
        for sent in held.parts:
            first, update = sent.part.start - held.start, self._direction[: sent.part.numel]
            ops.decode(self.owners.update, updates[sent.owner][sent.update], update)
            shape = torch.Size(self.owners.matrices[sent.part.matrix].shape)
            adjusted = _adjust_lr(rate, options["adjust_lr_fn"], shape)
            held.master[first : first + sent.part.numel].add_(update, alpha=-adjusted)
