"""Query rows on disk with SQL.

Collects from CartPole with three versions of a policy, the first of them random, into the journal
of a replay store. DuckDB then queries the directory: the return of each version, the rows of each
shard, and how the episodes ended. It reads the files in place; any other Arrow reader works too.

    pip install duckdb
    python examples/duckdb_analysis.py
    python examples/duckdb_analysis.py --directory runs/rows    # keep the rows
"""

from __future__ import annotations

import argparse
import tempfile

import duckdb
import torch
from torch import nn

import clusterenv
from clusterenv.store import ReplayStore

EPISODES = """
create view episodes as
select run, shard, incarnation, env, episode, min(version) as version,
    count(*) as length, sum(reward) as total
from rows group by run, shard, incarnation, env, episode
having min(step) = 0 and bool_or(terminated or truncated)  -- complete episodes
    and min(version) = max(version)  -- of a single version
"""
QUESTIONS = {
    "What was each version worth?": """
select version, count(*) as episodes, round(avg(total), 1) as mean_return,
    max(length) as longest
from episodes group by version order by version
""",
    "What did each shard do?": """
select shard, count(*) as rows, count(distinct env) as envs,
    sum((terminated or truncated)::int) as ends, max(version) as newest_version
from rows group by shard order by shard
""",
    # next_obs is set if no row has the next observation, such as at the end of an episode.
    "How did the episodes end?": """
select case when truncated then 'time limit' when abs(next_obs[1]) > 2.4 then 'left the track'
    else 'fell' end as how, count(*) as episodes, round(avg(step + 1), 1) as mean_length
from rows where terminated or truncated group by how order by episodes desc
""",
}


def collect(directory: str, cluster: str, num_envs: int, rollouts: int) -> None:
    """Collect with three versions into the journal."""
    network = nn.Linear(4, 2, bias=False)
    policy = clusterenv.policies.Categorical(network)
    direction = torch.tensor([0.0, 0.2, 1.0, 1.0])  # of the observation's four numbers
    store = ReplayStore(100_000, journal=directory)
    collector = clusterenv.Collector(
        "CartPole-v1", policy, num_envs=num_envs, horizon=128, cluster=cluster, seed=1
    )
    with store, collector:
        for gain in (0.0, 2.0, 20.0):  # how strongly it pushes towards the side it falls to
            with torch.no_grad():
                network.weight.copy_(torch.stack([-gain * direction, gain * direction]))
            collector.publish(policy)
            for _ in range(rollouts):
                for batch in collector.rollout():
                    store.add(batch)
            store.commit(gain=gain)  # committed rows survive a crash


def main() -> None:
    """Collect, then query."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--directory", help="where to keep the rows; default: a temporary directory"
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of each version")
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or temporary
        collect(directory, args.cluster, args.num_envs, args.rollouts)
        with duckdb.connect() as database:
            database.register("rows", clusterenv.open_dataset(directory))
            database.execute(EPISODES)
            for question, query in QUESTIONS.items():
                print(question)
                print(database.sql(query))


if __name__ == "__main__":
    main()
