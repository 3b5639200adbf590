"""Init: constructs models that are larger than one rank's memory, block by block.

Every block is cut when its constructor returns, so that a rank holds no more than its slices and one block.
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

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire, wire_of
from impl.errors import ZeroError
from impl.parameters.presharded import Cut, cut_of
from impl.plan.policy import Policy

BlockOf = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[type[nn.Module]], bool]

WHOLE_BELOW: Final = 1024  # elements; to cut less saves nothing


class Init:
    """Context that cuts the parameters of constructors at once; all ranks must construct the same.

    While a constructor runs, the parameters of its module are whole.  Those of earlier modules are gathered
    when an operation uses them, on all ranks, and cut again when others are gathered or the outermost
    constructor returns.  After the context a use of them is an error, except under
    :class:`~impl.parameters.gathered.GatheredParameters`.

    Args:
        mesh: the ranks, which must draw the same random numbers; or torch's ``DeviceMesh`` of them.
        data_parallel_group: the ranks, in place of ``mesh``, as DeepSpeed's ``Init`` takes them: a process
            group, of which :meth:`Mesh.create` makes a mesh; ``shard()`` takes it as ``mesh=init.mesh``.
        policy: that the model will be sharded with; sharding with another one costs messages.
        blocks: classes of the model's blocks, or a function that says whether a class is one.  Each block is
            cut as a whole, the rest when the constructors of its modules return.
        wire: that sends messages; a plain one by default.
        remote_device: of new values and of slices; the mesh's by default, also as "none", which Megatron's
            ``--remote-device`` says; "meta" makes no values.
        enabled: False does nothing at all.
        whole_below: smaller parameters outside blocks stay whole until the model is sharded.
        seed: of torch's random numbers inside the context, which leave those outside as they were.

    Raises ZeroError: on entering inside another one; for a mesh and a group, or neither.  MeshError: for a
        group that is no mesh.  PolicyError: if the policy does not fit the topology.
    """

    def __init__(
        self,
        *,
        mesh: Mesh | DeviceMesh | None = None,
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
        self._gathered: list[Cut] = []  # whole now, the last used last
        self._contexts = contextlib.ExitStack()
        self._mesh, self._data_parallel_group, self._policy = mesh, data_parallel_group, policy or Policy()
        self.wire = functools.cache(lambda: wire_of(self.mesh, wire))  # when it is needed
        if enabled:
            self._policy.check(self.mesh.topology)
            self._device = _device_of(remote_device) or self.mesh.device

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh that was given, or of the group that was given."""
        match self._mesh, self._data_parallel_group:
            case None, None:
                raise ZeroError(
                    "Init has neither mesh= nor data_parallel_group=: pass one of them; all ranks are "
                    "data_parallel_group=dist.group.WORLD"
                )
            case None, group:
                return Mesh.create(group=group)
            case mesh, None:
                return Mesh.of(mesh)
        raise ZeroError("Init has both mesh= and data_parallel_group=: leave one of them out")

    def __enter__(self) -> Self:
        if not self.enabled:
            return self
        if active() is not None:
            raise ZeroError("Init inside Init: one of them says how the model is laid out")
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
        """Around a constructor of ``module``: cut its parameters after the outermost class's constructor."""
        if any(module is other for other in self._constructing):  # a base class's
            yield
            return
        self._constructing.append(module)
        try:
            yield
        finally:
            self._constructing.pop()
        if not any(map(self._is_block, self._constructing)):  # else the block is cut as a whole
            whole = self._is_block(module)
            self.cut(module, recurse=whole, at_least=0 if whole else self._whole_below)
        if not self._constructing:
            self._settle()

    def cut(self, module: nn.Module, *, recurse: bool, at_least: int = 0) -> None:
        """Cut the parameters of ``module`` that are not cut yet, of ``at_least`` elements each."""
        small = max(at_least, self._policy.memory.persist_below)
        for trainable in (True, False):
            parameters = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=recurse)
                # Plain ones with values; others are checked when the model is sharded.
                if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.is_floating_point()
                if parameter.requires_grad == trainable and parameter.numel() >= small
                if cut_of(parameter) is None
            }
            if parameters:
                kind = type(module).__name__
                Cut(kind, parameters, self._policy, mesh=self.mesh, wire=self.wire, on_use=self._use)

    def gather(self, cuts: Sequence[Cut]) -> None:
        """Gather ``cuts``; others are cut again, unless there are views of them."""
        self._settle(cuts)
        for cut in cuts:
            cut.gather()
            if cut not in self._gathered:
                self._gathered.append(cut)

    def _is_block(self, module: nn.Module) -> bool:
        kinds = self._blocks
        return isinstance(module, kinds) if isinstance(kinds, type | tuple) else kinds(type(module))

    def _use(self, cut: Cut, together: Sequence[Cut], name: str) -> None:
        """Gather the cuts of an operation that uses parameter ``name``, or refuse the use."""
        if active() is not self:
            raise ZeroError(
                f"parameter {name!r} is used after Init cut it: use it inside Init, or read or change it "
                "under GatheredParameters"
            )
        self.gather(together)

    def _settle(self, kept: Sequence[Cut] = (), *, viewed: bool = False) -> None:
        """Cut again what was gathered, except for ``kept``; where there are views, only if ``viewed``."""
        for cut in list(self._gathered):
            if cut not in kept and not cut.pinned and (viewed or not cut.viewed):
                cut.cut()
                self._gathered.remove(cut)


def _device_of(remote_device: torch.device | str | None) -> torch.device | None:
    """The device that ``remote_device`` names; None for the mesh's."""
    if remote_device == "nvme":
        raise ZeroError("remote_device='nvme': values are kept in memory only; use 'cpu'")
    return None if remote_device in (None, "none") else torch.device(remote_device)


def give_values(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    policy: Policy,
    initialise: Callable[[nn.Module], None] | None = None,
) -> None:
    """Initialise a model on the meta device, one block at a time, and cut each at once.

    Modules come after the modules that they hold, as constructors return: equal random numbers give the
    values of a model constructed with values.  Modules with values are left alone.
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
    """Its parameters and buffers by name, without those of its children."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _initialise(
    module: nn.Module, name: str, device: torch.device, initialise: Callable[[nn.Module], None] | None
) -> None:
    """Initialise the module's parameters and buffers on the meta device; they stay the same objects.

    Before that all bits are ones, a NaN that no arithmetic makes, or -1, to find elements left out.
    """
    reset = getattr(module, "reset_parameters", None)
    versions = {}
    for key, tensor in _tensors(module).items():
        if not tensor.is_meta:
            continue
        if initialise is None and not callable(reset):
            raise ZeroError(
                f"{name} ({type(module).__name__}) has {key!r} on the meta device "
                "and no reset_parameters(): give shard() an initialise function"
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
        left = (_bits(tensor).view(tensor.numel(), -1) == 0xFF).all(1)  # all bits of an element
        # Integers may all be -1, if they were written.
        missed = left.any() if tensor.is_floating_point() else left.all() and tensor._version == versions[key]  # noqa: SLF001
        if missed:
            raise ZeroError(
                f"{name} ({type(module).__name__}) was on the meta device, and was given no values for "
                f"{int(left.sum())} of {tensor.numel()} elements of {key!r}: write all of them in "
                "reset_parameters(), or give shard() an initialise function"
            )


def _bits(tensor: Tensor) -> Tensor:
    """View of its memory as uint8; writes to it do not count as changes of ``tensor``."""
    return tensor.detach().data.reshape(-1).view(torch.uint8)


# All constructors are watched while any thread is inside an Init, as no class announces its end.

_thread = threading.local()  # holds the Init of this thread
_lock = threading.Lock()
_watched: dict[type[nn.Module], Any] = {}  # original constructors
_inside: list[None] = []  # one element a context


def active() -> Init | None:
    """The Init that this thread is inside."""
    return getattr(_thread, "init", None)


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    with _lock:
        if not _inside:
            # New classes first: another thread may define one while the existing ones are walked.
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
    """Wrap the constructors of ``kind`` and its subclasses."""
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
