"""What ``fuzz.py`` calls: public callables, a right call of each, and values that may be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LEFT_OUT", "TARGETS", "VALUES", "Target"]

_VALUES = r"""
None ; True ; False ; ... ; NotImplemented
-1 ; 0 ; 1 ; 3 ; 10**9 ; 2**31 ; 2**63 ; 10**30 ; 10**400
0.5 ; 1.5 ; -0.1 ; nan ; inf ; -inf ; 1e308 ; 1j ; Decimal('1.5') ; Fraction(1, 2)
'' ; 'x' ; '.x:y' ; 'obs' ; 'a\0b' ; 'a\0.yaml' ; '\ud800' ; 'x' * 5000 ; b'' ; b'x' ; bytearray(2)
[] ; [1] ; ['x'] ; [None] ; [[1], [1, 2]] ; (0,) ; (1, 2, 3, 4) ; range(4)
{} ; {'x': 1} ; {1: object()} ; set() ; {1, 2} ; iter([1]) ; (n for n in 'ab')
object() ; int ; object ; Exception ; len ; lambda: 0 ; lambda *a, **k: 1 / 0
threading ; threading.Lock() ; datetime(2025, 1, 1)
np.int64(3) ; np.int8(-1) ; np.uint64(2**63) ; np.float32(0.5) ; np.float64('nan')
np.bool_(True) ; np.str_('x') ; np.array(3) ; np.array(0.5) ; np.array(None) ; np.ma.masked
np.zeros(0) ; np.zeros(4) ; np.zeros(4, bool) ; np.zeros((2, 2), np.int64) ; np.array([0, None])
np.zeros(2, 'datetime64[s]') ; np.array(['x', 'y']) ; np.full(4, 2**63, np.uint64)
np.zeros(2, [('a', int)]) ; torch.float32 ; torch.tensor(3) ; torch.zeros(4) ; torch.zeros(2, 2)
torch.zeros(2).bfloat16() ; torch.zeros(2, requires_grad=True) ; nn.Linear(4, 2) ; nn.Module()
a_file ; a_file / 'below' ; here / 'empty' ; str(here / 'new') ; saved ; os.fspath
World ; World() ; spaces.Discrete(2) ; spaces.Text(4) ; gym.spec('CartPole-v1')
policy ; batch ; other_batch ; schema ; client
Uniform() ; Stack(2) ; Ratio(2.0) ; clusterenv.Restarts() ; clusterenv.Never()
"""
VALUES = tuple(
    value.strip() for line in _VALUES.split("\n") for value in line.split(" ; ") if value
)
"""Python expressions; ``fuzz.py`` says what the names in them are."""


@dataclass(frozen=True)
class Target:
    """A callable, and how it is called rightly.

    Parameters
    ----------
    call
        A Python expression that gives the callable.
    right
        Arguments of a right call, as Python expressions.
    form
        What is made of the call, such as ``next({})`` for a generator.
    before
        A statement that comes first, and belongs to no call.
    more
        Names of further parameters, which the signature gathers in ``**options``.
    never
        Values that are right, and would start a cluster or take minutes, by parameter.
    weight
        How often it is chosen, compared with others.
    """

    call: str
    right: Mapping[str, str] = field(default_factory=dict)
    form: str = "{}"
    before: str = ""
    more: tuple[str, ...] = ()
    never: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight: float = 1.0


_RUNS = {"cluster": "client", "num_envs": "4", "shards": "2"}
_STARTS = {"cluster": ("None",)}
_BEGUN = (
    ("reset", {"seed": "1"}, "pass"),
    ("step", {"actions": "[2] * 4"}, "envs.reset()"),
    ("call", {"name": "'colour'"}, "pass"),
)
_SAVED = {"directory": "saved"}
_SMALL = {"capacity": "100"}
_LARGE = {"capacity": ("10**9", "2**31")}  # a directory takes as much of the disk

TARGETS = (
    # Clusters and environments
    Target("clusterenv.connect", {"cluster": "client"}, never=_STARTS),
    Target("clusterenv.make_vec", {"env": "World", **_RUNS}, never=_STARTS, weight=2),
    Target("clusterenv.env_spaces", {"env": "World"}),
    Target("envs.reset", {"seed": "1", "options": "{}"}, weight=2),
    Target("envs.step", {"actions": "[2] * 4"}, before="envs.reset()", weight=2),
    Target(
        "envs.send",
        {"actions": "[2, 2]", "env_ids": "[0, 3]"},
        form="received(envs, {})",
        before="envs.reset()",
    ),
    Target("envs.async_reset", {"seed": "1"}, form="received(envs, {})"),
    *(
        Target(f"envs.{kind}_async", right, form=f"({{}}, envs.{kind}_wait())", before=before)
        for kind, right, before in _BEGUN
    ),
    *(
        Target(
            f"envs.{kind}_wait",
            {"timeout": "5"},
            form=f"settled(lambda: {{}}, envs.{kind}_wait)",
            before=f"{before}; envs.{kind}_async({', '.join(right.values())})",
            weight=0.5,
        )
        for kind, right, before in _BEGUN
    ),
    Target("envs.call", {"name": "'colour'"}),
    Target("envs.get_attr", {"name": "'colour'"}),
    Target("envs.set_attr", {"name": "'colour'", "values": "1"}),
    Target("envs.close", {"timeout": "5"}, weight=0.2),
    # Collection
    Target(
        "clusterenv.Collector",
        {"env": "'CartPole-v1'", "policy": "policy", "horizon": "8", **_RUNS},
        form="collected({})",
        never=_STARTS,
        weight=3,
    ),
    Target("collector.collect", {"rows": "8"}, never={"rows": ("10**9",)}),
    Target("collector.publish", {"policy": "policy"}, more=("epsilon",)),
    # Shards come and go after the call: the next is made on another collector.
    Target("collector.scale", {"shards": "2"}, form="({}, collector.close())", weight=0.5),
    Target("collector.close", {"timeout": "5"}, weight=0.2),
    Target(
        "clusterenv.follow", {"client": "client", "run": "collector.name"}, form="next({}, None)"
    ),
    Target(
        "clusterenv.Evaluator",
        {"env": "'CartPole-v1'", "policy": "policy", "cluster": "client"},
        form="{}.close()",
        never=_STARTS,
    ),
    # Rules
    Target("clusterenv.Every", {"n": "4"}, form="{}.should_pull(3, 0.1)"),
    Target("clusterenv.Divergence", {"threshold": "0.1"}, form="{}.should_pull(3, 0.1)"),
    Target("clusterenv.Restarts", {"count": "5"}, form="{}.wait([0.0, 1.0, 2.0], 3.0)"),
    Target("clusterenv.EnvFaults", {"count": "5"}, form="{}.allows([0.0, 1.0], 2.0)"),
    # The on-policy store
    Target("clusterenv.RolloutStore", {"max_lag": "2"}, form="gathered({})"),
    Target("rollouts.add", {"batch": "batch", "newest_version": "1"}),
    # The off-policy store
    *(
        Target("ReplayStore", {**_SMALL, **more}, form="learned({})", never=_LARGE, weight=2)
        for more in (
            {},
            {"schema": "schema"},
            {"directory": "here / 'columns'"},
            {"journal": "here / 'rows'"},
        )
    ),
    Target("ReplayStore.load", _SAVED, form="learned({})", more=("seed", "ratio", "journal")),
    Target("store.add", {"batch": "batch"}, weight=2),
    Target("store.sample", {"n": "4", "columns": "['version']"}, weight=3),
    Target("store.update_priorities", {"indices": "[0, 1]", "priorities": "[0.5, 2]"}, weight=3),
    Target("store.may_sample", {"n": "4"}),
    Target("store.may_add", {"rows": "12"}),
    Target(
        "store.feed",
        {"source": "[batch]", "n": "4"},
        form="next({}, None)",
        more=("columns", "tensors"),
    ),
    Target("journaled.add", {"batch": "batch"}, form="({}, journaled.commit())"),
    Target("journaled.commit", {"note": "1"}, more=("step",)),
    Target("journaled.save", {"directory": "here / 'copy'"}),
    Target("Uniform", form="sampled({})"),
    Target("Prioritized", {"alpha": "0.6"}, form="sampled({})"),
    Target("NStep", {"n": "3", "gamma": "0.9"}, form="sampled({})"),
    Target("Sequences", {"length": "2", "burn_in": "1"}, form="sampled({})"),
    Target("Recent", {"n": "4", "uses": "2"}, form="sampled({}, None)"),
    Target("Ratio", {"samples_per_insert": "8"}, form="learned(ReplayStore(100, ratio={}))"),
    Target("Stack", {"size": "4"}, form="{}.frame((4, 6, 6))"),
    Target("Journal", {"directory": "here / 'own'"}, form="written({})"),
    Target("journal.append", {"batch": "batch"}, form="({}, journal.commit())"),
    Target("journal.commit", {"note": "{}"}),
    Target("clusterenv.open_dataset", _SAVED, form="{}.count_rows()"),
    Target("clusterenv.store.open_snapshot", _SAVED, form="list({}.batches())"),
    Target("clusterenv.store.is_store", _SAVED),
    Target(
        "clusterenv.to_minari",
        {**_SAVED, "dataset_id": "'fuzz/x-v0'", "env": "OfBatch()"},
        form="minari.delete_dataset({}.id)",
    ),
    Target("clusterenv.from_minari", {"dataset": "recorded", "directory": "here / 'from-minari'"}),
    Target("clusterenv.to_tensordict", {"columns": "batch.torch().columns"}),
    # Policies
    Target("policies.Categorical", {"module": "nn.Linear(4, 2)"}),
    Target("policies.Gaussian", {"module": "nn.Linear(4, 2)"}),
    Target(
        "policies.SquashedGaussian",
        {"module": "nn.Linear(4, 2)", "action_space": "spaces.Box(-1, 1, (1,))"},
    ),
    Target("policies.EpsilonGreedy", {"q_module": "nn.Linear(4, 2)"}),
    Target("policies.CleanRL", {"agent": "agent"}),
    Target("policies.PaperAgent", {"agent": "agent"}),
    Target("policies.save_policy", {"policy": "policy", "file": "here / 'mine.pt'"}),
    Target("policies.load_policy", {"run": "here / 'policy.pt'"}, form="acted({})"),
    Target("policies.Random", {"action_space": "spaces.Discrete(2)"}, form="acted({})"),
)

LEFT_OUT = {
    "ClusterEnv",  # made by make_vec
    # Returned by other calls:
    *(
        "Announcement",
        "Evaluation",
        "Batch",
        "Stats",
        "Rollout",
        "RolloutStats",
        "ReplayStats",
        "ShardInfo",
        "Snapshot",
        "SquashedNormal",
    ),
    # For subclasses, or given to them:
    *("Policy", "Context", "Decision", "Fragment", "Sampler", "Draw"),
}
"""Public classes and methods that are not called here."""
