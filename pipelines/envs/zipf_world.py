"""Maps, objects and pictures of Zipf's gridworld; all are fixed by the number of a map."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CELL", "MOST_OBJECTS", "SIDE", "VIEW", "Map", "World", "make_map", "make_world"]

ROOMS = 3
"""Rooms along one side of a map."""
ROOM = 3
"""Cells along one side of a room."""
SIDE = ROOMS * (ROOM + 1) + 1
"""Cells along one side of a map, walls included."""
VIEW = 7
"""Cells along one side of an observation, with the agent in the middle."""
CELL = 9
"""Pixels along one side of a cell."""
FIRST_SEED = 1234
"""Map ``i`` is made with this seed plus ``i``."""

FLOOR, WALL, AGENT = (0, 0, 0), (128, 128, 128), (255, 255, 255)
COLOURS = (
    *((255, 0, 0), (0, 255, 0), (64, 64, 255), (255, 255, 0)),
    *((255, 0, 255), (0, 255, 255), (255, 128, 0), (144, 96, 0)),
)
SHAPES = ("square", "frame", "diamond", "plus", "cross", "triangle")

# Of the 72 cells beside a wall, each of at most 12 doors takes 2; one is the start.
MOST_OBJECTS = 47

DIRECTIONS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
"""Change of row and column by each action: north, north-east, and so on clockwise."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]
Wall = tuple[int, int]
"""The two rooms that a wall lies between, the smaller number first."""


class Map(NamedTuple):
    """One map; cells are numbered row by row."""

    walls: Bools
    """Which cells are walls, ``[SIDE, SIDE]``."""
    doors: tuple[int, ...]
    """Cells in a wall that can be walked through."""
    start: int
    objects: tuple[int, ...]
    """The cell of each object, by its rank: object 0 is sought most often."""
    looks: tuple[tuple[str, int], ...]
    """Shape and colour of each object."""


class World(NamedTuple):
    """All maps as tables, so that a step only looks things up."""

    maps: tuple[Map, ...]
    moves: Ints
    """The cell that an action leads to, ``[map, cell, action]``."""
    contents: Ints
    """The object in a cell, or -1, ``[map, cell]``."""
    starts: Ints
    """``[map]``."""
    images: Pixels
    """Each map without agent, with a margin for the view, ``[map, y, x, 3]``."""
    tiles: Pixels
    """Pictures of the objects, ``[map, object, CELL, CELL, 3]``."""


@functools.lru_cache(maxsize=8)
def make_world(maps: int, objects: int) -> World:
    """Return the tables of this many maps, which nobody may change.

    Examples
    --------
    >>> make_world(2, 5).moves.shape
    (2, 169, 8)
    """
    made = tuple(make_map(FIRST_SEED + number, objects) for number in range(maps))
    contents = np.full((maps, SIDE * SIDE), -1, np.int64)
    for number, each in enumerate(made):
        contents[number, list(each.objects)] = np.arange(objects)
    tiles = np.stack([np.stack([_tile(*look) for look in each.looks]) for each in made])
    world = World(
        made,
        np.stack([_moves(each.walls) for each in made]),
        contents,
        np.array([each.start for each in made], np.int64),
        np.stack([_image(each, of) for each, of in zip(made, tiles, strict=True)]),
        tiles,
    )
    for table in world[1:]:
        table.setflags(write=False)  # environments share it
    return world


def make_map(seed: int, objects: int) -> Map:
    """Return the map of a seed; fewer objects are the first of more."""
    rng = np.random.default_rng(seed)
    walls = np.ones((SIDE, SIDE), np.bool_)
    for room in range(ROOMS * ROOMS):
        row, column = _corner(room)
        walls[row : row + ROOM, column : column + ROOM] = False
    doors = []
    for wall in _doors(rng):
        row, column = _door_cell(wall, int(rng.integers(ROOM)))
        walls[row, column] = False
        doors.append(row * SIDE + column)
    cells = rng.permutation(_places(walls, doors))
    looks = rng.permutation(len(SHAPES) * len(COLOURS))[:objects].tolist()
    return Map(
        walls,
        tuple(doors),
        int(cells[0]),
        tuple(cells[1 : objects + 1].tolist()),
        tuple((SHAPES[look % len(SHAPES)], look // len(SHAPES)) for look in looks),
    )


def _corner(room: int) -> tuple[int, int]:
    """Return the first row and column of a room."""
    return room // ROOMS * (ROOM + 1) + 1, room % ROOMS * (ROOM + 1) + 1


def _all_walls() -> list[Wall]:
    rooms = range(ROOMS * ROOMS)
    beside = [(room, room + 1) for room in rooms if room % ROOMS < ROOMS - 1]
    return beside + [(room, room + ROOMS) for room in rooms if room // ROOMS < ROOMS - 1]


def _doors(rng: np.random.Generator) -> list[Wall]:
    """Choose the walls that get a door: one of each room without any, then until all connect."""
    without = _all_walls()
    opened: list[Wall] = []

    def open_one(walls: list[Wall]) -> None:
        wall = walls[int(rng.integers(len(walls)))]
        without.remove(wall)
        opened.append(wall)

    for room in range(ROOMS * ROOMS):
        if not any(room in wall for wall in opened):
            open_one([wall for wall in without if room in wall])
    while not _connected(opened):
        open_one(without)
    return opened


def _connected(opened: list[Wall]) -> bool:
    reached = {0}
    while more := {room for wall in opened for room in wall if reached & {*wall}} - reached:
        reached |= more
    return len(reached) == ROOMS * ROOMS


def _door_cell(wall: Wall, along: int) -> tuple[int, int]:
    row, column = _corner(wall[0])
    beside = wall[1] == wall[0] + 1
    return (row + along, column + ROOM) if beside else (row + ROOM, column + along)


def _places(walls: Bools, doors: list[int]) -> list[int]:
    """Return the cells of rooms that have a wall and no door on their four sides."""
    places = []
    for cell in np.flatnonzero(~walls).tolist():
        around = [cell - SIDE, cell - 1, cell + 1, cell + SIDE]
        beside_wall = walls.reshape(-1)[around].any()
        if cell not in doors and beside_wall and not {*around} & {*doors}:
            places.append(cell)
    return places


def _moves(walls: Bools) -> Ints:
    """Return the cell after each action in each cell; in a wall nothing moves."""
    moves = np.repeat(np.arange(SIDE * SIDE)[:, None], len(DIRECTIONS), 1)
    for row, column in np.argwhere(~walls).tolist():
        for action, (down, right) in enumerate(DIRECTIONS):
            to = row + down, column + right
            # For a straight move one of the corners is the cell itself.
            corners_closed = walls[row + down, column] and walls[row, column + right]
            if not walls[to] and not corners_closed:
                moves[row * SIDE + column, action] = to[0] * SIDE + to[1]
    return moves


def _tile(shape: str, colour: int) -> Pixels:
    y, x = np.mgrid[:CELL, :CELL] - CELL // 2  # from the middle
    far, near = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
    mask = {
        "square": far <= 3,
        "frame": (far >= 3) & (far <= 4),
        "diamond": far + near <= 4,
        "plus": near <= 1,
        "cross": (far - near <= 1) & (far <= 3),
        "triangle": (2 * abs(x) <= y + 4) & (y <= 3),
    }[shape]
    return np.where(mask[..., None], COLOURS[colour], FLOOR).astype(np.uint8)


def _image(each: Map, tiles: Pixels) -> Pixels:
    """Draw a map without its agent; the margin of half a view is floor."""
    margin = VIEW // 2
    cells = np.pad(each.walls, margin)
    image = np.where(cells[..., None], WALL, FLOOR).astype(np.uint8)
    image = image.repeat(CELL, 0).repeat(CELL, 1)
    for cell, tile in zip(each.objects, tiles, strict=True):
        y, x = (cell // SIDE + margin) * CELL, (cell % SIDE + margin) * CELL
        image[y : y + CELL, x : x + CELL] = tile
    return image
