"""Collectives as NCCL runs them: algorithm and protocol chosen by size, then bytes over each link, latency and rate.

A collective alone takes  L + x + 2 sqrt(FILL L x),  where x is the time of its bytes on the slowest link and L the
latency of its steps. The last term is a pipeline's: data in k chunks takes x + x/k to come through and pays L for the
first chunk and a share of L for each other one; with the best k the sum has this form.
"""

from __future__ import annotations

from math import sqrt

from zsim.cluster.nics import nics_of
from zsim.cluster.rings import rings
from zsim.cluster.routes import gpu_to_nic
from zsim.cluster.spec import Cluster
from zsim.cost import gloo, nccl
from zsim.cost.layouts import Groups, lay_out, parts_of
from zsim.cost.transfer import Transfer
from zsim.errors import InputError, NotModeled
from zsim.program.ops import Collective

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "send_recv")
GENERATIONS = {
    "Ampere": "ampere", "Ada": "ampere", "Hopper": "hopper", "Blackwell": "blackwell", "Blackwell Ultra": "blackwell",
    "CDNA3": "hopper", "CDNA4": "hopper",  # RCCL's model is NCCL's; the generation decides what LL can move
}  # fmt: skip

# Fitted together on the open points of validation/measured/collectives.csv (zsim validate collectives).
FILL = 0.18
START = 2e-6  # of the kernel, beside NCCL's base latencies
# A crossing of the network where one node's GPUs share proxies and NICs: 2 nodes of 8 take 36 to 39 us for 8 bytes, two
# lone GPUs 13 to 18.
SHARED_PROXY = 5e-6
# NCCL's latencies of the Simple protocol contain the slow start that is FILL's here.
LATENCY_SCALE = {"ll": 1.0, "ll128": 1.0, "simple": 0.42}

IDLE = Transfer(0.0, {}, 0.0, algorithm="none")  # a group of one


def lay(cluster: Cluster, work: Collective, groups: Groups, algorithm: str | None = None) -> Transfer:
    """The transfer of all `groups` running `work` at the same time; usage is the sum over the groups.

    `algorithm` ("ring/simple", or "ring" with the best protocol) overrides NCCL's choice.
    Raises NotModeled for a kind it does not know, InputError for an override that cannot run it.
    """
    if work.kind == "barrier":  # torch.distributed.barrier on NCCL is an all_reduce of one float
        return transfer(cluster, "all_reduce", 4.0, groups, algorithm)
    if work.kind not in KINDS:
        raise NotModeled(f"collective {work.kind!r}", accepted=", ".join(KINDS))
    return transfer(cluster, work.kind, work.payload_bytes, groups, algorithm)


def transfer(cluster: Cluster, kind: str, nbytes: float, groups: Groups, algorithm: str | None = None) -> Transfer:
    """As `lay`, for `nbytes` of payload per group (the full buffer).

    Algorithm and latency are those of the first group alone: a communicator does not know of the others.
    """
    if cluster.backend == "gloo":
        ranks = max(map(len, groups))
        return gloo.transfer(kind, nbytes, ranks, nccl.edge(kind, ranks), len(groups)) if ranks > 1 else IDLE
    one = groups[:1]
    shape = shape_of(cluster, one)
    if shape.ranks == 1:
        return IDLE
    name, protocol = choose(cluster, kind, nbytes, one, algorithm)
    alone = lay_out(cluster, one, name, kind)
    layout = lay_out(cluster, groups, name, kind) if len(groups) > 1 else alone
    wire = nccl.WIRE_BYTES[protocol]
    usage = {link: times * wire for link, times in layout.usage.items()} if wire != 1 else layout.usage
    scale = 1.0 if name.startswith("nvls") else LATENCY_SCALE[protocol]
    latency = START + scale * nccl.latency(name, protocol, kind, shape)
    latency += nccl.crossings(name, kind, shape) * (cluster.fabric.latency_s + SHARED_PROXY * (shape.local > 1))
    fill = 2 * sqrt(FILL * latency * nbytes * wire / alone.rate)
    return Transfer(nbytes, usage, latency + fill, layout.max_rate / wire, f"{name}/{protocol}")


def choose(cluster: Cluster, kind: str, nbytes: float, groups: Groups, override: str | None = None) -> tuple[str, str]:
    """The (algorithm, protocol) that NCCL's model finds fastest."""
    shape = shape_of(cluster, groups)
    found = nccl.candidates(kind, shape)
    if override:
        asked = tuple(override.split("/"))
        found = [pair for pair in found if pair[: len(asked)] == asked]
        if not found:
            able = ", ".join("/".join(pair) for pair in nccl.candidates(kind, shape))
            raise InputError(f"{override!r} cannot run {kind} here", field="algorithm", accepted=able)
    else:
        asked_for = [
            pair for pair in found if cluster.nccl_algo in (None, pair[0]) and cluster.nccl_proto in (None, pair[1])
        ]
        found = asked_for or found
    if len(found) == 1:
        return found[0]
    ring = lay_out(cluster, groups, "ring", kind).rate

    def estimate(pair: tuple[str, str]) -> float:
        tree = None
        if cluster.fabric.transport == "efa" and pair[0] == "tree":
            # AWS's plugin has its own tuner, which knows that between two nodes a tree moves half of what a ring does.
            tree = lay_out(cluster, groups, "tree", kind).rate
        return nccl.predicted(*pair, kind, shape, ring, nbytes, tree)

    return min(found, key=estimate)


def shape_of(cluster: Cluster, groups: Groups) -> nccl.Shape:
    """What NCCL would find out about the communicators of `groups` (about the least able one where they differ)."""
    key = ("shape", groups)
    if key in cluster._cache:
        return cluster._cache[key]
    held = {(cluster.node_templates[node], part) for node, parts in parts_of(cluster, groups).items() for part in parts}
    nvlink = nvswitch = gdr = True
    link_rate = nic_rate = float("inf")
    generations = set()
    for template, part in held:
        node = cluster.templates[template]
        if len(part.gpus) > 1:
            nvlink = nvlink and rings(node, part.gpus).type == "NVL"
        for gpu in part.gpus:
            generations.add(GENERATIONS.get(node.devices[gpu].architecture, "old"))
            switch = node.switch_of.get(gpu)
            multicasts = switch is not None and node.devices[gpu].vendor.lower() == "nvidia"
            nvswitch = nvswitch and multicasts and switch == node.switch_of.get(part.gpus[0])
            link_rate = min(link_rate, node.links[f"gpu{gpu}>{switch}"].bandwidth if switch else 0.0)
        if part.nodes > 1:
            nics = nics_of(node, part.gpus)
            gdr = gdr and all(not gpu_to_nic(node, part.gpus[0], nic, outward=True).staged for nic in nics)
            nic_rate = min(
                nic_rate, sum(link.bandwidth for link in node.links.values() if link.src in nics and link.kind == "nic")
            )
    cluster._cache[key] = nccl.Shape(
        ranks=max(part.ranks for _, part in held),
        nodes=max(part.nodes for _, part in held),
        generation=min(generations, key=("old", "ampere", "hopper", "blackwell").index),
        nvlink=nvlink,
        nvswitch=nvswitch,
        gdr=gdr,
        amd_cpu=cluster.host.vendor == "amd",
        link_rate=link_rate,
        nic_rate=nic_rate,
    )
    return cluster._cache[key]
