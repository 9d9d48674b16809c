"""Evaluate the policy of a run: return, interval, lengths, and a video of one episode.

``clusterenv evaluate runs/mine --episodes 100 --video best.mp4``
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import tyro
from gymnasium.wrappers import RecordVideo

import clusterenv
from clusterenv.errors import ConfigError
from pipelines.experiment import options
from pipelines.experiment.args import env_arguments
from pipelines.experiment.checks import Count, Natural, Options
from pipelines.experiment.directories import check_writable
from pipelines.experiment.evaluation import NUM_ENVS
from pipelines.experiment.jobs import job_files
from pipelines.tools.saved_policies import SavedPolicy, Version, load_run

__all__ = ["Args", "describe", "evaluate", "record"]


@dataclass(frozen=True)
class Args(Options):
    """Which policy to evaluate, and how."""

    run: tyro.conf.Positional[Path]  # directory of a run
    episodes: Count = 100  # to play
    version: Version | None = None  # default: the best if the run was evaluated, else the last
    seed: Natural = 0  # environment i gets seed + i
    stochastic: bool = False  # sample actions, as in training; default: the best action
    num_envs: Count = NUM_ENVS  # environments that are stepped together
    env_args: tuple[str, ...] | None = None  # of the environment: reward=score; default: the run's
    video: Path | None = None  # .mp4 or .gif file for one episode; needs clusterenv[video]
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine

    def __post_init__(self) -> None:
        super().__post_init__()
        env_arguments(self.env_args or (), "--env-args")
        if self.video is not None and self.video.suffix not in (".mp4", ".gif"):
            raise ConfigError(f"--video {self.video} is no .mp4 or .gif file: --video episode.mp4")
        if self.video is not None:
            check_writable(self.video, "--video ", "episode.mp4")


def evaluate(args: Args, saved: SavedPolicy | None = None) -> clusterenv.Evaluation:
    """Play the episodes, and write the video if one is asked for.

    Raises
    ------
    ConfigError
        If the run has no such version, or the video cannot be made.
    """
    saved = saved or load_run(args.run, args.version)
    if args.video is not None:
        _check_video(saved, args.video)
    with job_files(args.run):
        played = _play(args, saved, args.episodes, args.cluster)
    if args.video is not None:
        record(args, saved, args.video)
    return played


def record(args: Args, saved: SavedPolicy, video: Path) -> None:
    """Write a video of one episode: the evaluation's first.

    The worker that plays it is on this machine, whatever the cluster, and so is its file. A native
    vector environment takes no wrapper that records, so a single one with the same seed is played.
    """
    if saved.engine == "native":
        saved = saved._replace(engine="auto")
    with _beside(video) as folder:
        # The evaluator tries the policy for one step first; that is episode 0.
        wrapper = functools.partial(
            RecordVideo,
            video_folder=str(folder),
            episode_trigger=_is_first,
            name_prefix="played",
            disable_logger=True,
        )
        _play(args, saved, 1, None, wrappers=(wrapper,), render_mode="rgb_array")
        (written,) = folder.glob("*.mp4")
        if video.suffix == ".gif":
            written = _as_gif(written)
        written.replace(video)


def _as_gif(video: Path) -> Path:
    """Write the frames of a video to a GIF beside it."""
    from imageio_ffmpeg import get_ffmpeg_exe  # moviepy needs it too

    written = video.with_suffix(".gif")
    colours = "split[one][two];[one]palettegen[palette];[two][palette]paletteuse"
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-i", str(video), "-vf", colours]
    subprocess.run([*command, str(written)], check=True)
    return written


def _is_first(episode: int) -> bool:
    return episode == 1


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Make a directory on the same disk, for a file that is then moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".video-") as folder:
        yield Path(folder) / "frames"


def _play(
    args: Args, saved: SavedPolicy, episodes: int, cluster: str | None, **options: Any
) -> clusterenv.Evaluation:
    with clusterenv.Evaluator(
        saved.env,
        saved.policy,
        episodes=episodes,
        num_envs=args.num_envs,
        cluster=cluster,
        seed=args.seed,
        deterministic=not args.stochastic,
        engine=saved.engine,
        **env_arguments(_env_args(args, saved), "--env-args"),
        **options,
    ) as evaluator:
        evaluator.publish(saved.policy, 0)
        evaluator.wait()
        (played,) = evaluator.results()
    return played


def _env_args(args: Args, saved: SavedPolicy) -> tuple[str, ...]:
    """Return the arguments of the environment: by default those of the run's evaluations."""
    return saved.evaluated_with if args.env_args is None else args.env_args


def _check_video(saved: SavedPolicy, video: Path) -> None:
    """Raise unless a video of this run's environment can be made."""
    if importlib.util.find_spec("moviepy") is None:
        raise ConfigError(f"--video {video} needs moviepy: pip install 'clusterenv[video]'")
    if saved.engine not in ("auto", "gymnasium", "native"):
        raise ConfigError(
            f"--video {video}: environments of the engine {saved.engine!r} render no frames; "
            "leave --video out"
        )
    with contextlib.closing(gym.make(saved.env)) as env:
        modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        raise ConfigError(
            f"--video {video}: {saved.env} has no render mode 'rgb_array', only {modes}; leave "
            "--video out"
        )


def describe(
    args: Args, saved: SavedPolicy, played: clusterenv.Evaluation
) -> list[tuple[str, str]]:
    """Return what an evaluation has found, by label."""
    low, high = played.interval
    lengths = played.lengths
    env = " ".join([saved.env, *_env_args(args, saved)])
    said = [
        ("policy", f"{saved.path}, after {saved.steps:,} steps on {env}"),
        ("episodes", f"{len(played.returns):,}, {_way(args)}, seed {args.seed}"),
        ("return", f"{played.mean:.2f}, standard deviation {played.std:.2f}"),
        ("95 %", f"{low:.2f} to {high:.2f}"),
        ("length", f"{lengths.mean():.1f} steps, {lengths.min():,} to {lengths.max():,}"),
    ]
    return said if args.video is None else [*said, ("video", str(args.video))]


def _way(args: Args) -> str:
    return "sampled actions" if args.stochastic else "the best action each time"


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, evaluate and print."""
    args = options.read(Args, argv, description=__doc__, prog="clusterenv evaluate")
    saved = load_run(args.run, args.version)
    for label, text in describe(args, saved, evaluate(args, saved)):
        print(f"{label:>9}  {text}")
