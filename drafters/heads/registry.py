"""The methods of trained draft heads: `register` enters one, `find_method` finds it by the name in a head's config.

A folder of this package is a method; its `recipe.py` registers it. Other packages register theirs by an entry point of
the group `mmspec.drafters`, which is loaded when its name is asked for. Importing this module, or a recipe, imports
neither torch nor a network: the help of the command line lists them.
"""

from __future__ import annotations

import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.checkpoints.format import HeadMetadata
    from mmspec.drafters.heads.base.config import HeadConfig
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.heads.base.head import DraftHead
    from mmspec.drafters.training.batch import TrainBatch
    from mmspec.drafters.training.losses import LossInputs
    from mmspec.interfaces import SharedEmbeddings, TargetInfo

logger = logging.getLogger("mmspec")

ENTRY_POINTS = "mmspec.drafters"
"""Group of entry points: the name is that of the method, the value the module (or object in it) that registers it."""
EXPORT_FORMATS = ("vllm", "sglang", "speculators")
"""Layouts of serving engines that a method may write."""


Loss = Callable[["LossInputs"], "tuple[Tensor, dict[str, Any]]"]
"""(loss, metrics) of `mmspec.drafters.training.losses.LossInputs`."""


@dataclass(frozen=True)
class Recipe:
    """A drafter that `mmspec train --drafter NAME` trains.

    Attributes:
        name: of the drafter.
        help: what it is, for the help of the command.
        visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES` of
            `mmspec.drafters.heads.base.visual_inputs`, or "mixed" (`mmspec.drafters.training.batch.MIXED`).
        block_size: tokens per forward; `--set block` overrides it where it is more than one.
        scales: fields of the head's config as multiples of `--set ffn`.
        settings: further fields of the config.
        steps: the same of `--steps`.
        learning_rate: the same of `--lr`.
    """

    name: str
    help: str
    visual_mode: str
    block_size: int = 1
    scales: Mapping[str, float] = field(default_factory=lambda: {"intermediate_size": 1.0})
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1000
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class TrainSizes:
    """Options of `mmspec train` that decide the shape of a head; None for the default of the method.

    Attributes:
        num_layers: decoder layers of the target.
        block: tokens per forward.
        layers: hidden states that the head reads.
        head_layers: decoder layers of the head.
        draft_vocab: size of its vocabulary.
    """

    num_layers: int
    block: int | None = None
    layers: tuple[int, ...] | None = None
    head_layers: int = 1
    draft_vocab: int | None = None

    def layers_or(self, default: tuple[int, ...], number: int | None = None) -> tuple[int, ...]:
        """`layers`, checked, or the default.

        Raises:
            ValueError: they are not `number` layers (None: any number), or not of this target.
        """
        layers = self.layers or default
        if (number is not None and len(layers) != number) or min(layers) < 0 or max(layers) > self.num_layers:
            raise ValueError(
                f"--set layers must be {number or 'some'} of 0 to {self.num_layers} for this target; got "
                f"{','.join(map(str, layers))}"
            )
        return layers


@dataclass(frozen=True)
class HeadClasses:
    """What a method consists of.

    Attributes:
        config: class of the config, a dataclass.
        head: class of the network, of a config.
        drafter: class of the drafter, with the arguments of `HeadDrafter`.
        loss: None if it is not trained.
    """

    config: type[HeadConfig]
    head: Callable[[Any], DraftHead]
    drafter: Callable[..., HeadDrafter]
    loss: Loss | None = None


@dataclass(frozen=True)
class ExportInputs:
    """What a method writes for an engine.

    Attributes:
        drafter: with its head on the CPU.
        target: facts about its target.
        format_name: one of `EXPORT_FORMATS`.
        shared_embeddings: of the target, or None.
    """

    drafter: HeadDrafter
    target: TargetInfo
    format_name: str
    shared_embeddings: SharedEmbeddings | None

    def embeddings(self) -> SharedEmbeddings:
        """Those of the target.

        Raises:
            ValueError: they were not given.
        """
        if self.shared_embeddings is None:
            raise ValueError("such a head is exported with the target's embeddings: name the target (--target).")
        return self.shared_embeddings


class HeadMethod(ABC):
    """A method of trained heads; only `name` and `classes` have no default.

    Attributes:
        name: that a head's config records.
        recipes: the drafters that can be trained.
        reads_layers: whether a head reads several hidden states of the target.
        trains_layers: whether it is trained with any number of layers of its own.
        speculators_types: values of `speculators_model_type` of published heads.
        published_keys: keys of published configs that it reads, besides those that all methods read.
        served: which engines serve it, for the help of `mmspec export`; empty for none.
        is_of_target: whether its heads are parts of a target's checkpoint: `head_of_target`, `load_for_target`.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[Recipe, ...]] = ()
    reads_layers: ClassVar[bool] = False
    trains_layers: ClassVar[bool] = False
    speculators_types: ClassVar[tuple[str, ...]] = ()
    published_keys: ClassVar[frozenset[str]] = frozenset()
    served: ClassVar[str] = ""
    is_of_target: ClassVar[bool] = False

    @abstractmethod
    def classes(self) -> HeadClasses:
        """Its classes, imported on demand."""

    # --- training -----------------------------------------------------------------------------------------------------

    def loss(self) -> Loss:
        """Its loss.

        Raises:
            ValueError: it is not trained.
        """
        if (loss := self.classes().loss) is None:
            raise ValueError(f"{self.name} heads are not trained here; the drafters are {', '.join(recipes())}.")
        return loss

    def train_config(self, shape: HeadConfig, recipe: Recipe, sizes: TrainSizes) -> HeadConfig:
        """The config of a head to be trained. Default: the target's shape with the sizes of the recipe.

        Args:
            shape: of the target's last decoder layer, `intermediate_size` that of `--set ffn`.
            recipe: one of `recipes`.
            sizes: the options of the command.

        Raises:
            ValueError: an option is not for this method.
        """
        self.check_sizes(sizes)
        block = sizes.block if sizes.block and recipe.block_size > 1 else recipe.block_size
        scaled = {name: round(scale * shape.intermediate_size) for name, scale in recipe.scales.items()}
        return self.classes().config.of(shape, block_size=block, **{**scaled, **recipe.settings})

    def check_sizes(self, sizes: TrainSizes) -> None:
        """Refuse options that are not for this method.

        Raises:
            ValueError: names the option.
        """
        if sizes.layers is not None and not self.reads_layers:
            raise ValueError("--set layers is for heads that read several hidden states; this one reads the last")
        if sizes.head_layers != 1 and not self.trains_layers:
            known = " and ".join(
                method.name for method in methods().values() if method.recipes and method.trains_layers
            )
            raise ValueError(f"--set head_layers is for {known} heads; this one has one layer, got {sizes.head_layers}")

    def head_of_target(self, target: TargetInfo, sizes: TrainSizes) -> DraftHead:
        """The head to be trained, of a method that `is_of_target`.

        Raises:
            ValueError: the target has none, or an option is not for this method.
        """
        raise ValueError(f"{self.name} heads are not part of a target.")

    def init_from_target(
        self, head: Any, batches: Iterator[TrainBatch], shared_embeddings: SharedEmbeddings, draft_ids: Tensor | None
    ) -> None:
        """Start a head from the target's answers, before the first step. Default: its random weights.

        Args:
            head: of this method.
            batches: the answers, in an order that is the same in every process.
            shared_embeddings: of the target.
            draft_ids: [V'] ids of the head's own vocabulary, or None.
        """
        return

    def load_for_target(self, folder: Path, metadata: HeadMetadata, target: TargetInfo, name: str) -> HeadDrafter:
        """The drafter of a trained head of a method that `is_of_target`.

        Raises:
            ValueError: it is not of this target, or damaged.
        """
        raise ValueError(f"{self.name} heads are not part of a target.")

    # --- files of others ----------------------------------------------------------------------------------------------

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        """Whether a published config and its tensors are of this method: 0 if not, else how many marks are there.

        Of several methods the one with the most marks reads the head. A `speculators_model_type` decides alone.
        """
        return 0

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        """The drafter of a head in a published layout.

        Args:
            values: its config.
            weights: its tensors.
            target: facts about the target.
            name: of the drafter.

        Raises:
            ValueError: the head does not fit the target, is incomplete, or uses an unsupported setting.
        """
        raise ValueError(f"{self.name} has no published layout.")

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        """Why an engine cannot serve a head; None if it can."""
        served = " and ".join(method.name for method in methods().values() if method.served)
        return f"no engine serves the architecture of {drafter.name!r}; {served} heads can be exported."

    def export(self, folder: Path, given: ExportInputs) -> None:
        """Write a head to a folder as an engine reads it, after `export_refusal` found nothing.

        Raises:
            ValueError: it needs the target's embeddings.
        """
        raise ValueError(f"{self.name} heads are not exported.")


METHODS: dict[str, HeadMethod] = {}
"""The registered methods by name; `methods` and `find_method` fill it."""
_FAILED: set[str] = set()
"""Entry points that cannot be loaded, of which a warning was given."""


def register(method: type[HeadMethod]) -> type[HeadMethod]:
    """Class decorator: enter a method.

    Raises:
        TypeError: it is no `HeadMethod` with a name and classes.
        ValueError: another method has its name.
    """
    if not (isinstance(method, type) and issubclass(method, HeadMethod)) or method.__abstractmethods__:
        raise TypeError(f"a method of heads is a class of mmspec's HeadMethod that defines classes(); got {method!r}.")
    if not isinstance(getattr(method, "name", None), str):
        raise TypeError(f"a HeadMethod has a name (str), which the config of its heads records; got {method!r}.")
    known = METHODS.get(method.name)
    if known is not None and type(known).__module__ != method.__module__:
        raise ValueError(f"a method {method.name!r} is registered by {type(known).__module__}; choose another name.")
    METHODS[method.name] = method()
    return method


@cache
def _import_own() -> None:
    """Import the recipes of this package."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg and module.name != "base":
            import_module(f"{__package__}.{module.name}.recipe")
    import_module("mmspec.drafters.mtp.recipe")


def _load_installed(name: str | None = None) -> None:
    """Load the entry points of a name, or all. One that fails is a warning: its package is not needed otherwise."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name in METHODS or point.value in _FAILED or name not in (None, point.name):
            continue
        try:
            point.load()
        except Exception as error:  # of a package of others
            _FAILED.add(point.value)
            reason = f"{type(error).__name__}: {error}"[:200]
            logger.warning("mmspec: draft heads %r of %s cannot be loaded (%s)", point.name, point.value, reason)


def methods() -> dict[str, HeadMethod]:
    """All methods by name, those of other packages included."""
    _import_own()
    _load_installed()
    return dict(METHODS)


def find_method(name: str) -> HeadMethod:
    """The method of that name.

    Raises:
        ValueError: there is none.
    """
    _import_own()
    if name not in METHODS:
        _load_installed(name)
    if name not in METHODS:
        raise ValueError(f"architecture must be one of {', '.join(METHODS)}; got {name!r}.")
    return METHODS[name]


def recipes() -> dict[str, tuple[HeadMethod, Recipe]]:
    """The drafters that can be trained, by name."""
    return {recipe.name: (method, recipe) for method in methods().values() for recipe in method.recipes}


def method_of(drafter: HeadDrafter) -> HeadMethod | None:
    """The method of a drafter and its head, by their exact classes; None for others, as a subclass of the user."""
    _import_own()
    for method in METHODS.values():
        classes = method.classes()
        if (classes.head, classes.drafter) == (type(drafter.head), type(drafter)):
            return method
    return None
