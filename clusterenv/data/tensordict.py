"""Conversion to TensorDicts with TorchRL's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clusterenv.errors import ArgumentTypeError, ConfigError, shown

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["to_tensordict"]

_OF_STEP = ("reward", "terminated", "truncated")
_RENAMED = {"weights": "priority_weight", "indices": "index"}


def to_tensordict(columns: Mapping[str, Any]) -> TensorDict:
    """Return a sample of a :class:`clusterenv.ReplayStore`, or other columns, as a TensorDict.

    | column | key |
    |---|---|
    | `obs` | `"observation"` |
    | `obs.<key>` of Dict and Tuple observations | `"<key>"`; nested for nested spaces |
    | `next_obs`, `next_obs.<key>` | the same below `"next"` |
    | `reward`, `terminated`, `truncated` | the same below `"next"`, with a last dimension of 1 |
    | `terminated` or `truncated` | `("next", "done")`, likewise |
    | `log_prob` | `"action_log_prob"` or `"sample_log_prob"`, whichever TorchRL's losses read |
    | `weights`, `indices` | `"priority_weight"`, `"index"` |
    | `action` and all others | their own names |

    Parameters
    ----------
    columns
        Tensors or arrays by name. The dimensions of ``reward``, with which all of them begin,
        become the batch size. The result shares the memory of the tensors.

    Raises
    ------
    ConfigError
        If tensordict, which comes with TorchRL, is not installed.
    ArgumentTypeError
        If ``columns`` are not tensors or arrays of the same rows, or lack one of ``reward``,
        ``terminated`` and ``truncated``.

    Examples
    --------
    >>> flags = torch.tensor([False, True])
    >>> rows = {"obs": torch.zeros(2, 4), "next_obs": torch.ones(2, 4), "reward": torch.ones(2)}
    >>> found = to_tensordict({**rows, "terminated": flags, "truncated": ~flags})
    >>> found["next", "done"].shape, found["next", "observation"].shape
    (torch.Size([2, 1]), torch.Size([2, 4]))
    """
    try:
        from tensordict import TensorDict
        from tensordict.nn import composite_lp_aggregate
    except ImportError as error:
        raise ConfigError("a TensorDict needs TorchRL: pip install torchrl") from error
    log_prob = "sample_log_prob" if composite_lp_aggregate() else "action_log_prob"
    try:
        found = _renamed(columns, log_prob)
        return TensorDict(found, batch_size=found["next", "reward"].shape[:-1])
    except Exception as error:
        raise ArgumentTypeError(
            f"columns={shown(columns)} must be tensors or arrays with the same rows, reward, "
            f"terminated and truncated among them ({error!r}): to_tensordict(store.sample(64))"
        ) from error


def _renamed(columns: Mapping[str, Any], log_prob: str) -> dict[tuple[str, ...], Tensor]:
    tensors = {name: torch.as_tensor(column) for name, column in columns.items()}
    found: dict[tuple[str, ...], Tensor] = {}
    for name, tensor in tensors.items():
        if name in _OF_STEP:
            found["next", name] = tensor.unsqueeze(-1)
        else:
            root, *path = name.split(".")
            observed = tuple(path) or ("observation",)
            if root == "obs":
                found[observed] = tensor
            elif root == "next_obs":
                found["next", *observed] = tensor
            elif name == "log_prob":
                found[(log_prob,)] = tensor
            else:
                found[(_RENAMED.get(name, name),)] = tensor
    found["next", "done"] = found["next", "terminated"] | found["next", "truncated"]
    return found
