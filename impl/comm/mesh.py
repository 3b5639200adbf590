"""Makes the process groups: the default group, and a group along each axis of a mesh.

No other file makes process groups.  A mesh is over all ranks, or over the ranks of one process group.  Torch numbers
all ranks of the job (*global* ranks); a mesh counts its own ranks from 0.  Meshes over different ranks share nothing:
each has its own process groups, shared memory and keys in the rendezvous' key-value store, and only the mesh's own
ranks take part in its calls.

A process must end its groups before the interpreter ends.  Gloo's threads may drop the tensors of a collective after
the collective's ``wait()`` has returned; a thread that does so while the interpreter ends aborts the process (status
-6, "terminate called without an active exception").  ``destroy_process_group()`` waits for these threads, but only if
nobody else holds a reference to the group.  Therefore a :class:`Mesh` has only weak references to its groups.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, since its functions' defaults would hold that group
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from impl.policy.topology import Axis, Topology, ranks_in_words
from impl.transport.group import Group, MeshError, no_group
from impl.transport.threads import ThreadRank, ThreadStore, current

# The usual names of device mesh dimensions along which ranks hold different parts of the model.
_NOT_DATA_PARALLEL: Final = frozenset({"tp", "pp", "cp", "sp", "ep", "etp"})
# The names that the dimension between nodes, and the dimension inside a node, may have in a device mesh.  The last two
# of each are those of HSDP in torch and in torchtitan, which replicate between nodes and shard inside them.
_NODE_NAMES: Final = ("node", "inter", "replicate", "dp_replicate")
_LOCAL_NAMES: Final = ("local", "intra", "shard", "dp_shard")


@contextlib.contextmanager
def default_group(backend: str, **options: Any) -> Iterator[None]:
    """Context that joins the default process group, and ends all process groups when the body has ended.

    The arguments are passed to ``torch.distributed.init_process_group``.

    If the body raises, groups are not ended, because ending them would wait for messages that other ranks no longer
    send.  The process must then report the error and exit with ``os._exit()``.
    """
    dist.init_process_group(backend, **options)
    yield
    dist.destroy_process_group()
    gc.collect()  # FSDP2 and DDP hold groups in reference cycles


def limit_nccl(timeout: timedelta) -> None:
    """Set NCCL's time-out in the default group, if the group has NCCL; gloo's time-out stays as it is."""
    group = c10d._get_default_group()  # noqa: SLF001
    for device in group._device_types:  # noqa: SLF001
        backend = group._get_backend(device)  # noqa: SLF001
        if backend.name() == "nccl":
            backend._set_default_timeout(timeout)  # noqa: SLF001


@dataclass(slots=True, eq=False)
class Mesh:
    """The ranks that train together, as one rank sees them: their topology, and this rank's number and device."""

    topology: Topology
    rank: int  # this rank's number in the mesh, ``node * ranks_per_node + local``
    device: torch.device
    # the global rank of each rank of the mesh; None if the mesh is over all ranks, in their order
    members: tuple[int, ...] | None = None
    backend: str | None = None  # the backend of the mesh's process groups; None: the default group's backend
    # this rank as a thread rank (:mod:`impl.simulate`), which has no process groups; None if the ranks are processes
    thread: ThreadRank | None = None
    _groups: dict[Axis, Group] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        topology: Topology | DeviceMesh | dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> Mesh:
        """Make a mesh of all ranks, or of the ranks of ``group``; exactly the ranks of the mesh must call this.

        Args:
            topology: the number of nodes and of ranks on each node; ranks are numbered node by node.  A device mesh or
                a process group may also be passed here, and is then taken as ``group``.  Without a topology, the nodes
                are read from the device mesh or from torchrun, as described below.
            device: the device of tensors.  With a device mesh, the default is the current device of the mesh's type.
                Without a device mesh, it is the current GPU if the backend is NCCL, and otherwise the CPU.
            group: the ranks: what ``dist.new_group([...])`` returned, or a device mesh; all ranks by default.

        In a device mesh of two dimensions, the dimension called ``node``, ``inter``, ``replicate`` or ``dp_replicate``
        is read as the nodes.  The dimension called ``local``, ``intra``, ``shard`` or ``dp_shard`` is read as the ranks
        of a node.  If the dimensions have no names, the first is read as the nodes.  With a device mesh of one
        dimension, and without a device mesh, torchrun's ``LOCAL_WORLD_SIZE`` is the number of ranks on a node.  Without
        this variable, all ranks share one node.

        Raises:
            MeshError: in each of these cases:

                - there is no default process group, or the ranks are threads;
                - an argument has another type, or both ``topology`` and ``group`` name a group;
                - the group's size is not ``topology.world``, or this rank is not in the group;
                - the nodes cannot be read from the device mesh or from torchrun;
                - the group has only some of the ranks, and NCCL was started with
                  ``init_process_group(device_id=...)``.
        """
        if current() is not None and not dist.is_initialized():
            raise MeshError("ranks that are threads have a mesh already: use the one that simulate() passes")
        if isinstance(topology, DeviceMesh | dist.ProcessGroup):
            if group is not None:
                kind = type(topology).__name__
                raise MeshError(f"topology is a {kind}, which determines the ranks: leave group= out")
            topology, group = None, topology
        elif not isinstance(topology, Topology | None):
            kind = type(topology).__name__
            raise MeshError(
                f"topology {topology!r} is a {kind}: expected a Topology, torch's DeviceMesh or a process group"
            )
        if isinstance(group, DeviceMesh):
            members, topology = _read(group, topology)
            kind, backend = group.device_type, dist.get_backend(group.get_group(0))
        else:
            members, backend = _ranks(group), dist.get_backend(group)
            kind, topology = "cuda" if backend == "nccl" else "cpu", topology or _placed(members)
        if len(members) != topology.world:
            raise MeshError(
                f"topology {topology} needs {topology.world} ranks, but the process group has {len(members)}: pass a "
                "topology of as many ranks as the group has"
            )
        if device is None:
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        everyone = members == tuple(range(dist.get_world_size()))
        bound = c10d._get_default_group().bound_device_id  # noqa: SLF001
        if backend == "nccl" and bound is not None and not everyone:
            raise MeshError(
                f"the mesh is over {len(members)} of {dist.get_world_size()} ranks, but after "
                "init_process_group(device_id=...) NCCL makes a group only if all ranks take part: leave device_id out"
            )
        return cls(
            topology,
            members.index(dist.get_rank()),
            device,
            None if everyone else members,
            None if backend == dist.get_backend() else backend,
        )

    @classmethod
    def of(cls, mesh: AnyMesh | None = None) -> Mesh:
        """Return the mesh of the ranks that ``mesh`` names, and make it if necessary.

        A :class:`Mesh` is returned as it is.  Anything else is passed to :meth:`create`.  All calls with the same ranks
        on the same nodes, the same device and the same backend return the same object, so that they share process
        groups.

        Args:
            mesh: a mesh, torch's ``DeviceMesh``, a process group, or a topology of all ranks; by default all ranks.

        Raises:
            MeshError: if ``mesh`` has another type, or if :meth:`create` cannot make the mesh.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, DeviceMesh | dist.ProcessGroup | Topology | None):
            _check_member(mesh)
            kind = type(mesh).__name__
            raise MeshError(
                f"mesh is a {kind}: expected zeropp.mesh(...), torch's DeviceMesh, a process group, or a Topology"
            )
        made = cls.create(mesh)
        known = _meshes.setdefault(c10d._get_default_group(), {})  # noqa: SLF001
        return known.setdefault((made.topology, made.device, made.members, made.backend), made)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The global rank of each rank of the mesh: the number that the rank has in torch's default group."""
        return self.members or tuple(range(self.topology.world))

    @property
    def counting(self) -> str:
        """A remark for the end of an error message: the ranks in the message are numbered as in this mesh.

        For a mesh of global ranks 4 and 5, the remark is a space and then ``(ranks as counted in the mesh of global
        ranks 4, 5)``.  For a mesh of all ranks it is empty, since the mesh's numbers are the global ranks.
        """
        if self.members is None:
            return ""
        return f" (ranks as counted in the mesh of global ranks {', '.join(map(str, self.members))})"

    def store(self) -> Store | ThreadStore | None:
        """Return the key-value store with which the ranks have found one another (torch's rendezvous).

        For a mesh over only some of the ranks, the returned store puts a prefix of this mesh before each key.

        Returns None if the mesh has one rank, or if there is no default process group.
        """
        if self.thread is not None:
            return self.thread.world.store if self.topology.world > 1 else None
        world = dist.group.WORLD if dist.is_initialized() and self.topology.world > 1 else None
        found = None if world is None else world.get_group_store()
        return found if found is None or self.members is None else PrefixStore(self._prefix, found)

    def claim(self, name: str) -> str | None:
        """Reserve ``name``, such as a folder's path, so that no mesh over other ranks of the job uses this name.

        Returns None if this mesh may use the name: the name was free, or a mesh over the same ranks had reserved it.
        Otherwise returns the ranks of the mesh that had reserved the name, as text such as ``global ranks 0 and 2``.
        """
        if self.thread is None and not dist.is_initialized():
            return None
        mine = f"global {ranks_in_words(self.global_ranks)}"
        store: Store | ThreadStore
        store = c10d._get_default_store() if self.thread is None else self.thread.world.store  # noqa: SLF001
        found: str = store.compare_set(f"zeropp/claims/{name}", "", mine).decode()
        return None if found == mine else found

    def has_group(self, axis: Axis) -> bool:
        """Return whether the group along ``axis`` has been made.

        If the result is True, :meth:`group` returns at once.  If it is False, :meth:`group` first makes the group, and
        waits until the other ranks do the same.
        """
        return axis in self._groups

    def group(self, axis: Axis, timeout: timedelta | None = None) -> Group:
        """Return this rank's group along ``axis``.

        The first call makes the group, and all ranks of the mesh must make this call.  ``timeout`` is the limit of the
        new group's operations; by default the backend's limit holds.
        """
        if axis not in self._groups:
            ranks = axis.group(self.rank)
            same_node = len({self.topology.node_of(rank) for rank in ranks}) == 1
            handle = no_group if self.thread else weakref.ref(self._process_group(axis, ranks, timeout))
            self._groups[axis] = Group(axis, ranks, ranks.index(self.rank), same_node, handle, self.counting)
        return self._groups[axis]

    def _process_group(
        self, axis: Axis, ranks: Sequence[int], timeout: timedelta | None
    ) -> dist.ProcessGroup:
        """Make the process group of ``ranks``, this rank's group along ``axis``."""
        if self.members is None:
            return self._enumerated(axis, timeout)
        return self._among(ranks, self.members, timeout)

    def _enumerated(self, axis: Axis, timeout: timedelta | None) -> dist.ProcessGroup:
        """Make this rank's process group along ``axis`` in a mesh over all ranks.

        Torch requires every rank to take part in making every group.  Therefore each rank makes all groups of the axis,
        in the same order.  If a rank does not call this, the others wait for half an hour, torch's own timeout.  To
        avoid this, :meth:`impl.comm.wire.Wire.group` first waits for all ranks, with a shorter timeout.
        """
        every = sorted(map(list, {axis.group(rank) for rank in range(self.topology.world)}))
        make = partial(dist.new_subgroups_by_enumeration, backend=self.backend, timeout=timeout)
        handle, _ = make(every)
        return handle  # type: ignore[no-any-return]

    def _among(
        self, ranks: Sequence[int], members: Sequence[int], timeout: timedelta | None
    ) -> dist.ProcessGroup:
        """Make the process group of ``ranks``, numbered as in the mesh; only these ranks call this.

        ``members`` has the global rank of each rank of the mesh.

        ``dist.new_group(use_local_synchronization=True)`` cannot be used.  It gives the group a name that contains the
        number of groups that the calling rank is in.  Two ranks that are in different numbers of groups would use
        different names, and wait for one another for ever.  Therefore this method calls the helper inside torch that
        makes a group of a given name.  The name contains the mesh, and how many groups the rank has made in this mesh.
        """
        store = c10d._get_default_store()  # noqa: SLF001
        number = PrefixStore(self._prefix, store).add(f"zeropp/groups/{self.rank}", 1)
        chosen = [members[rank] for rank in ranks]
        backend = dist.Backend(self.backend or dist.get_backend())
        handle, _ = c10d._new_process_group_helper(  # noqa: SLF001
            len(chosen),
            ranks.index(self.rank),
            chosen,
            backend,
            store,
            f"{self._prefix}/{number}/{chosen[0]}",  # type: ignore[arg-type]  # a name is text
            timeout=timeout or c10d._get_default_timeout(backend),  # noqa: SLF001
        )
        c10d._world.pg_group_ranks[handle] = {rank: index for index, rank in enumerate(chosen)}  # noqa: SLF001
        return handle  # type: ignore[no-any-return]

    @property
    def _prefix(self) -> str:
        """The prefix for the names of this mesh's process groups and for its keys in the rendezvous' store.

        Meshes over different ranks have different prefixes.
        """
        return f"zeropp/{hashlib.sha256(repr(self.global_ranks).encode()).hexdigest()[:16]}"


# The ranks that train together, in any form that :meth:`Mesh.of` reads.
AnyMesh = Mesh | DeviceMesh | dist.ProcessGroup | Topology

# For each default group, the meshes that Mesh.of() has made in it, by the four fields in which they may differ.
_meshes: MutableMapping[dist.ProcessGroup, dict[tuple[object, ...], Mesh]] = weakref.WeakKeyDictionary()


def make_mesh(
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> Mesh:
    """Make the mesh of all ranks, or of the ranks of ``group``; exactly the ranks of the mesh must call this.

    Args:
        nodes: the number of nodes; by default the number of ranks divided by ``ranks_per_node``.
        ranks_per_node: the number of ranks on each node; by default the number of ranks divided by ``nodes``.  If
            neither number is given, the nodes are read from the device mesh or from torchrun (:meth:`Mesh.create`).
        group: the ranks: what ``dist.new_group([...])`` returned, or torch's ``DeviceMesh``; all ranks by default.
        device: the device of tensors.  With a device mesh, the default is the current device of the mesh's type.
            Without a device mesh, it is the current GPU if the backend is NCCL, and otherwise the CPU.

    Raises:
        MeshError: if there are not ``nodes`` times ``ranks_per_node`` ranks, or if :meth:`Mesh.create` cannot make the
            mesh.
    """
    chosen = None if device is None else torch.device(device)
    if nodes is None and ranks_per_node is None:
        return Mesh.create(device=chosen, group=group)
    for name, number in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
        if number is not None and (type(number) is not int or number < 1):
            raise MeshError(f"{name}={number!r}: expected a number of 1 or more")
    ranks = group.size() if isinstance(group, DeviceMesh) else len(_ranks(group))
    each = ranks_per_node or max(1, ranks // (nodes or 1))
    return Mesh.create(Topology(nodes or max(1, ranks // each), each), chosen, group=group)


def _check_member(group: object) -> None:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise MeshError(
            f"global rank {dist.get_rank()} is not in the group: call this on the group's ranks alone"
        )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a process group, in the group's order; None stands for the default group.

    Raises:
        MeshError: if there is no default group, if ``group`` is not a process group, or if this rank is not in it.
    """
    if not dist.is_initialized():
        raise MeshError("there are no ranks yet: call torch.distributed.init_process_group() first")
    _check_member(group)
    if not isinstance(group, dist.ProcessGroup | None):
        kind = type(group).__name__
        raise MeshError(
            f"group is a {kind}: expected a process group, as dist.new_group([...]) returns it, or a DeviceMesh"
        )
    return tuple(dist.get_process_group_ranks(group))


def _read(device_mesh: DeviceMesh, topology: Topology | None) -> tuple[tuple[int, ...], Topology]:
    """Return (global ranks, topology) of a device mesh; the ranks are listed node by node.

    If ``topology`` is given, it is returned unchanged, and the ranks are listed in the order of ``device_mesh.mesh``.
    The device mesh may then have any number of dimensions, of any names, as long as all dimensions are data parallel.

    Raises:
        MeshError: if a dimension is not data parallel, such as ``tp``, or if this rank is not in the device mesh.
            Without a ``topology``, also if there are more than two dimensions, or two dimensions with unknown names.
    """
    ranks, names = device_mesh.mesh, device_mesh.mesh_dim_names or ()
    for name in names:
        if name in _NOT_DATA_PARALLEL:
            raise MeshError(
                f"the device mesh has a dimension {name!r}, along which ranks hold different parts of a model: "
                "pass its data parallel dimensions, such as device_mesh['dp']"
            )
    if topology is None and ranks.dim() == 2 and names:
        first, second = (_NODE_NAMES.count(name) - _LOCAL_NAMES.count(name) for name in names)
        if (first, second) not in ((1, -1), (-1, 1)):
            raise MeshError(
                f"the device mesh has dimensions {names[0]!r} and {names[1]!r}: name the dimension between "
                f"nodes {_one_of(_NODE_NAMES)}, and the dimension inside a node {_one_of(_LOCAL_NAMES)}, or pass "
                "zeropp.mesh(nodes=..., ranks_per_node=..., group=device_mesh)"
            )
        ranks = ranks if first == 1 else ranks.t()
    members: tuple[int, ...] = tuple(ranks.flatten().tolist())
    if (rank := dist.get_rank()) not in members:
        raise MeshError(
            f"global rank {rank} is not in the device mesh of {ranks_in_words(members)}: call this on these ranks "
            "alone"
        )
    match tuple(ranks.shape):
        case _ if topology is not None:
            return members, topology
        case (_,):
            return members, _placed(members)
        case (nodes, ranks_per_node):
            return members, Topology(nodes, ranks_per_node)
        case shape:
            raise MeshError(
                f"the device mesh of shape {shape} has {len(shape)} dimensions, expected one, or two (nodes, ranks of "
                "a node): pass some of its dimensions, such as device_mesh['dp'], or pass "
                "zeropp.mesh(nodes=..., ranks_per_node=..., group=device_mesh)"
            )


def _one_of(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def _placed(ranks: Sequence[int]) -> Topology:
    """Return the topology of the global ``ranks``, according to torchrun's variable ``LOCAL_WORLD_SIZE``.

    torchrun sets this variable to the number of ranks on a node, and puts neighbouring global ranks on the same node.
    Without the variable, all ranks count as ranks of one node.

    Raises:
        MeshError: if some node has more of ``ranks`` than another, if ``ranks`` are not listed node by node, or if
            ``LOCAL_WORLD_SIZE`` is not a number of 1 or more.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
    if not said.isdecimal() or not (each := int(said)):
        raise MeshError(f"LOCAL_WORLD_SIZE={said!r}: set it to the number of ranks on a node, 1 or more")
    nodes = [rank // each for rank in ranks]
    counts = Counter(nodes)
    if len(set(counts.values())) > 1 or nodes != sorted(nodes):
        raise MeshError(
            f"global ranks {', '.join(map(str, ranks))} are on nodes {', '.join(map(str, nodes))} "
            f"(LOCAL_WORLD_SIZE={each}), but each node must have equally many ranks, listed node by node: pass the "
            f"topology, such as zeropp.mesh(nodes=1, ranks_per_node={len(ranks)}, group=group)"
        )
    return Topology(len(counts), len(ranks) // len(counts))
