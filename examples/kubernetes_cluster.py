"""Run on Kubernetes, through the operator of dask-kubernetes.

The tests have no Kubernetes: they check only the manifest and ``--dry-run``.

``kubernetes.yaml``, next to this file, describes the cluster and its network policy. The head
connects directly to every worker, so it must be able to reach the pods' addresses: run it in a
pod with the label ``clusterenv-head: "true"`` and an account that may create and read DaskCluster
resources, services and pods.

    pip install 'clusterenv[kubernetes]'
    python examples/kubernetes_cluster.py --dry-run             # show what would be created
    kubectl apply -f examples/kubernetes.yaml
    python examples/kubernetes_cluster.py --existing            # use a running cluster
    python examples/kubernetes_cluster.py --image you/rl:1      # create a cluster, then delete it

The operator's clusters use plain TCP, unlike those that ClusterEnv starts, which use TLS. See
docs/security.md for the consequences. The manifest's NetworkPolicy admits only the cluster's pods.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
import yaml

import clusterenv

MANIFEST = Path(__file__).with_name("kubernetes.yaml")


def read(manifest: Path, workers: int, image: str | None) -> dict[str, Any]:
    """Return the DaskCluster of a manifest with this number of workers; raise if it is invalid."""
    documents = [each for each in yaml.safe_load_all(manifest.read_text()) if each]
    found = [each for each in documents if each.get("kind") == "DaskCluster"]
    if len(found) != 1:
        raise ValueError(f"{manifest} must hold one DaskCluster, it holds {len(found)}")
    resource: dict[str, Any] = found[0]
    parts = resource["spec"]
    selected = parts["scheduler"]["service"]["selector"]["dask.org/cluster-name"]
    if selected != resource["metadata"]["name"]:
        raise ValueError(f"the service selects {selected!r}, which is not the cluster's name")
    parts["worker"]["replicas"] = workers
    for part in ("worker", "scheduler"):
        (container,) = parts[part]["spec"]["containers"]
        container["image"] = image or container["image"]
    return resource


def collect(cluster: Any, shards: int, rows: int) -> None:
    """Collect with an untrained network, and print statistics."""
    policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    with clusterenv.Collector(
        "CartPole-v1", policy, num_envs=16 * shards, horizon=64, shards=shards, cluster=cluster
    ) as collector:
        collector.collect(rows)
        stats = collector.stats()
    print(f"{stats.rows:,} rows, {stats.episodes:,} episodes, return {np.mean(stats.returns):.1f}")
    print(f"steps/s of each shard: {[round(rate) for rate in stats.steps_per_second]}")


def main() -> None:
    """Create or find the cluster, and collect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=4, help="workers, one shard on each")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--image", help="default: the image of the manifest")
    parser.add_argument("--namespace", help="default: the current namespace")
    parser.add_argument("--existing", action="store_true", help="use a running cluster")
    parser.add_argument("--dry-run", action="store_true", help="print the resource only")
    args = parser.parse_args()

    resource = read(MANIFEST, args.shards, args.image)
    if args.dry_run:
        print(yaml.safe_dump(resource, sort_keys=False))
        print(f"# {resource['metadata']['name']}: {args.shards} workers, nothing was created")
        return

    from dask_kubernetes.operator import KubeCluster  # imported here: a dry run does not need it

    dask.config.set({"clusterenv.timeout.workers": "10 min"})  # nodes may have to pull the image
    if args.existing:
        cluster = KubeCluster.from_name(resource["metadata"]["name"], namespace=args.namespace)
    else:
        cluster = KubeCluster(custom_cluster_spec=resource, namespace=args.namespace)
    with cluster:
        collect(cluster, args.shards, args.rows)


if __name__ == "__main__":
    main()
