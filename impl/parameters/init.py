"""Defines Init, a context that constructs models that are larger than one rank's memory, block by block.

When the constructor of a block returns, the parameters of the block are cut: each rank keeps its slice and frees the
rest.  A rank thus holds no more than its slices and one whole block.  :func:`give_values` does the same for a model on
the meta device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.comm.mesh import AnyMesh, Mesh
from impl.comm.wire import Wire, wire_of
from impl.errors import ZeroError
from impl.parameters.presharded import Cut, cut_of
from impl.policy.policy import Policy

BlockOf = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[type[nn.Module]], bool]

WHOLE_BELOW: Final = 1024  # elements; cutting a smaller parameter would save next to nothing


class Init:
    """Context in which each module's parameters are cut to this rank's slices as soon as the module is constructed.

    While a constructor runs, the parameters of its module are whole.  All ranks must construct the same modules.

    An operation in the context may use parameters that are cut already.  They are then gathered, so all ranks must run
    the operation.  The gathered parameters are cut again when other parameters are gathered, or when the outermost
    constructor returns.

    Between the end of the context and ``shard()``, cut parameters may be used only under
    :class:`~impl.parameters.gathered.GatheredParameters`.

    Args:
        mesh: the ranks, in a form that :meth:`Mesh.of` accepts; by default all ranks.  All of these ranks must draw the
            same random numbers (see ``seed``).
        data_parallel_group: the ranks as a process group or as torch's ``DeviceMesh``, in place of ``mesh``; the
            argument has the same name in DeepSpeed's ``Init``.  Pass this group, or ``init.mesh``, to ``shard()`` as
            ``mesh=``.
        policy: the policy that the model will be sharded with.  If ``shard()`` gets another policy, it may have to send
            values between ranks to make other slices.
        blocks: the classes of the model's blocks, or a function that is called with a class and returns whether its
            modules are blocks.  The parameters of a block are cut when the block's constructor returns.  Other
            parameters are cut when the constructor of their own module returns.
        wire: the object through which ranks send messages; by default a new one.
        remote_device: the device of new values and of slices.  None, and "none" as in Megatron's
            ``--remote-device``, stand for the mesh's device.  On "meta", parameters have no values.
        enabled: False makes the context do nothing.
        whole_below: a number of elements.  Parameters that are outside of blocks and have fewer elements stay whole
            until the model is sharded.
        seed: the seed of torch's random numbers inside the context; the state of random numbers outside is
            not changed.

    Raises:
        ZeroError: if both a mesh and a group are given; for ``remote_device="nvme"``; on entering, if this thread is
            inside another ``Init``.
        MeshError: if no mesh can be made of ``mesh`` or ``data_parallel_group``.
        PolicyError: if the policy does not fit the topology.
    """

    def __init__(
        self,
        *,
        mesh: AnyMesh | None = None,
        data_parallel_group: dist.ProcessGroup | DeviceMesh | None = None,
        policy: Policy | None = None,
        blocks: BlockOf = (),
        wire: Wire | None = None,
        remote_device: torch.device | str | None = None,
        enabled: bool = True,
        whole_below: int = WHOLE_BELOW,
        seed: int | None = None,
    ) -> None:
        self._blocks, self._whole_below, self._seed, self.enabled = blocks, whole_below, seed, enabled
        self._constructing: list[nn.Module] = []
        # the groups of cut parameters (Cut) that are gathered now, in the order in which they were gathered
        self._gathered: list[Cut] = []
        self._contexts = contextlib.ExitStack()
        self._mesh, self._data_parallel_group, self._policy = mesh, data_parallel_group, policy or Policy()
        self.wire = functools.cache(lambda: wire_of(self.mesh, wire))  # made at the first call
        if enabled:
            self._policy.check(self.mesh.topology)
            self._device = _device_of(remote_device) or self.mesh.device

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh of the ranks given as ``mesh`` or ``data_parallel_group``; if neither was given, of all ranks."""
        if self._mesh is not None and self._data_parallel_group is not None:
            raise ZeroError("Init has both mesh= and data_parallel_group=: leave one of them out")
        return Mesh.of(self._data_parallel_group if self._mesh is None else self._mesh)

    def __enter__(self) -> Self:
        if not self.enabled:
            return self
        if active() is not None:
            raise ZeroError(
                "Init inside Init is refused, because only one Init can cut the model to slices: leave the inner or "
                "the outer Init out"
            )
        with contextlib.ExitStack() as stack:
            if self._seed is not None:
                devices = [self._device] if self._device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(self._seed)
            stack.enter_context(self._device)
            stack.enter_context(_watching())
            _thread.init = self
            stack.callback(setattr, _thread, "init", None)
            self._contexts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        self._constructing.clear()
        self._settle(viewed=True)

    @contextlib.contextmanager
    def constructing(self, module: nn.Module) -> Iterator[None]:
        """Context around a constructor call for ``module``; cuts the module's parameters to slices when the call
        returns.

        Nothing is cut in two cases:

        - The call is of a base class's constructor, inside the constructor of the module's own class.
        - The call is inside the constructor of a block.  The module's parameters are then cut together with the block.
        """
        if any(module is other for other in self._constructing):  # this is the constructor of a base class
            yield
            return
        self._constructing.append(module)
        try:
            yield
        finally:
            self._constructing.pop()
        if not any(map(self._is_block, self._constructing)):  # inside a block, nothing is cut before its end
            whole = self._is_block(module)
            self.cut(module, recurse=whole, at_least=0 if whole else self._whole_below)
        if not self._constructing:
            self._settle()

    def cut(self, module: nn.Module, *, recurse: bool, at_least: int = 0) -> None:
        """Cut the parameters of ``module`` that are not cut yet: keep this rank's slices, and free the rest.

        These parameters are not cut:

        - parameters with fewer elements than ``at_least`` or the policy's ``persist_below``;
        - parameters on the meta device;
        - parameters that are not floating-point numbers;
        - parameters of a subclass of ``nn.Parameter``.

        Args:
            module: the module.
            recurse: whether to cut also the parameters of the modules inside ``module``.
            at_least: the least number of elements that a parameter must have to be cut.
        """
        small = max(at_least, self._policy.memory.persist_below)
        for trainable in (True, False):
            parameters = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=recurse)
                # Only plain floating-point parameters with values; shard() checks all others.
                if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.is_floating_point()
                if parameter.requires_grad == trainable and parameter.numel() >= small
                if cut_of(parameter) is None
            }
            if parameters:
                kind = type(module).__name__
                Cut(kind, parameters, self._policy, mesh=self.mesh, wire=self.wire, on_use=self._use)

    def gather(self, cuts: Sequence[Cut]) -> None:
        """Gather the whole values of ``cuts``; a cut is a group of parameters of which each rank holds a slice.

        First, the whole values of all other cuts that are gathered now are freed, so that the rank has only its slices
        of these values.  A cut is not freed if views of its values still exist, or if one of its parameters is in an
        open GatheredParameters context.
        """
        self._settle(cuts)
        for cut in cuts:
            cut.gather()
            if cut not in self._gathered:
                self._gathered.append(cut)

    def _is_block(self, module: nn.Module) -> bool:
        kinds = self._blocks
        return isinstance(module, kinds) if isinstance(kinds, type | tuple) else kinds(type(module))

    def _use(self, cut: Cut, together: Sequence[Cut], name: str) -> None:
        """Gather the cuts ``together``, because an operation uses parameters of all of them.

        A cut is a group of parameters of which each rank holds a slice.  ``cut`` is one of ``together``.  ``name`` is
        the name of a parameter of ``cut``, for the error message.

        Raises:
            ZeroError: after this context has ended, or in another thread.
        """
        if active() is not self:
            raise ZeroError(
                f"parameter {name!r} was cut to slices by Init, and is used outside of Init: use it inside Init, or "
                "read or change it under GatheredParameters"
            )
        self.gather(together)

    def _settle(self, kept: Sequence[Cut] = (), *, viewed: bool = False) -> None:
        """Free the whole values of all cuts that are gathered now, and keep only this rank's slices of the values.

        A cut is a group of parameters of which each rank holds a slice.  A cut stays gathered in three cases:

        - The cut is in ``kept``.
        - One of its parameters is in an open GatheredParameters context.
        - Views of its values still exist, and ``viewed`` is False.
        """
        for cut in list(self._gathered):
            if cut not in kept and not cut.pinned and (viewed or not cut.viewed):
                cut.cut()
                self._gathered.remove(cut)


def _device_of(remote_device: torch.device | str | None) -> torch.device | None:
    """Return the device that ``remote_device`` names; None for None and "none", so that the mesh's device is used.

    Raises:
        ZeroError: for "nvme", since values are kept in memory only.
    """
    if remote_device == "nvme":
        raise ZeroError(
            "remote_device='nvme' is not supported, because values are kept in memory only: use 'cpu'"
        )
    return None if remote_device in (None, "none") else torch.device(remote_device)


def give_values(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    policy: Policy,
    initialise: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give values to the modules of a model on the meta device, and keep only this rank's slices of the values.

    The parameters of a block are cut to slices as soon as all of them have values, so that no rank holds more than its
    slices and one whole block.  Modules that have values already are left alone.

    A module is initialised after the modules that it holds, which is the order in which constructors return.  Given the
    same random numbers, the model therefore gets the same values as if it had been constructed on a real device.

    Args:
        model: the model.
        blocks: the model's blocks.
        mesh: the ranks.
        policy: the policy that the model will be sharded with.
        initialise: is called with a module, and gives it values.  By default the module's ``reset_parameters()`` is
            called.

    Raises:
        ZeroError: if a module cannot be initialised, or if elements were left without a value.
    """
    fresh = {module for module in model.modules() if any(t.is_meta for t in _tensors(module).values())}
    if not fresh:
        return
    init = Init(mesh=mesh, policy=policy)
    done: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, *, inside: bool) -> None:
        done.add(module)
        block = module in blocks
        for key, child in module.named_children():
            if child not in done:
                visit(child, f"{name}.{key}" if name else key, inside=inside or block)
        if module in fresh:
            _initialise(module, name or "the model", mesh.device, initialise)
        if block and not fresh.isdisjoint(module.modules()):
            init.cut(module, recurse=True)
        elif module in fresh and not inside:
            init.cut(module, recurse=False)

    with init:
        visit(model, "", inside=False)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and buffers by name, without those of its children."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _initialise(
    module: nn.Module, name: str, device: torch.device, initialise: Callable[[nn.Module], None] | None
) -> None:
    """Move the module's parameters and buffers from the meta device to ``device``, and initialise them.

    Parameters and buffers of submodules, and those that have values already, are left alone.  The parameters and
    buffers stay the same objects.

    To find elements that get no value, all bits are set to ones before the initialisation runs.  An element whose bits
    are all ones afterwards counts as left out.  As a floating-point number, these bits are a NaN that no arithmetic
    produces.  As an integer, they may be a real value such as -1, so integers count as left out only if nothing was
    written to the tensor.

    Args:
        module: the module.
        name: the module's name in the model, for error messages.
        device: the device of the values.
        initialise: is called with the module, and gives it values.  By default the module's ``reset_parameters()`` is
            called.

    Raises:
        ZeroError: if the module has no ``reset_parameters()`` and ``initialise`` is None, or if elements were left out.
    """
    reset = getattr(module, "reset_parameters", None)
    versions = {}
    for key, tensor in _tensors(module).items():
        if not tensor.is_meta:
            continue
        if initialise is None and not callable(reset):
            raise ZeroError(
                f"{name} ({type(module).__name__}) has {key!r} on the meta device "
                "and no reset_parameters(): add this method, or give shard() an initialise function"
            )
        empty: Tensor = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
        _bits(tensor).fill_(0xFF)
        versions[key] = tensor._version  # noqa: SLF001
    if initialise is not None:
        initialise(module)
    elif reset is not None:
        reset()
    for key, tensor in _tensors(module).items():
        if key not in versions or not tensor.numel():
            continue
        # Whether all bits of an element are ones.
        left = (_bits(tensor).view(tensor.numel(), -1) == 0xFF).all(1)
        # Integers may have been set to -1, so they are only missed if nothing was written at all.
        missed = left.any() if tensor.is_floating_point() else left.all() and tensor._version == versions[key]  # noqa: SLF001
        if missed:
            raise ZeroError(
                f"{name} ({type(module).__name__}) was on the meta device, and its initialisation gave no values for "
                f"{int(left.sum())} of {tensor.numel()} elements of {key!r}: write all of them in "
                "reset_parameters(), or give shard() an initialise function"
            )


def _bits(tensor: Tensor) -> Tensor:
    """Return a uint8 view of the tensor's memory; writes to the view do not increment the tensor's version counter."""
    return tensor.detach().data.reshape(-1).view(torch.uint8)


# Torch has no hook for the end of a module's constructor.  Therefore, while any thread is inside an Init, the
# constructors of all module classes are wrapped.

_thread = threading.local()  # holds the Init that this thread is inside
_lock = threading.Lock()
_watched: dict[type[nn.Module], Any] = {}  # the original constructors of the wrapped classes
_inside: list[None] = []  # one element for each Init that a thread is inside


def active() -> Init | None:
    """Return the :class:`Init` whose context this thread is inside; None if there is none."""
    return getattr(_thread, "init", None)


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    """Context in which the constructor of every module class calls :meth:`Init.constructing`.

    This includes classes that are defined while the context is open.
    """
    with _lock:
        if not _inside:
            # Classes that are yet to be defined come first: another thread may define one while the existing classes
            # are walked.
            nn.Module.__init_subclass__ = classmethod(_watch_new)  # type: ignore[assignment,arg-type]
            for kind in type.__subclasses__(nn.Module):
                _watch(kind)
        _inside.append(None)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                del nn.Module.__init_subclass__
                for kind, original in _watched.items():
                    kind.__init__ = original  # type: ignore[method-assign]
                _watched.clear()


def _watch_new(kind: type[nn.Module], **options: Any) -> None:
    super(nn.Module, kind).__init_subclass__(**options)
    with _lock:
        _watch(kind)


def _watch(kind: type[nn.Module]) -> None:
    """Make the constructors of ``kind`` and of its subclasses call :meth:`Init.constructing`."""
    for sub in type.__subclasses__(kind):
        _watch(sub)
    if "__init__" not in vars(kind) or kind in _watched:
        return
    original = vars(kind)["__init__"]

    @functools.wraps(original)
    def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        init = active()
        with contextlib.nullcontext() if init is None else init.constructing(module):
            original(module, *args, **kwargs)

    _watched[kind] = original
    kind.__init__ = construct  # type: ignore[method-assign,assignment]
