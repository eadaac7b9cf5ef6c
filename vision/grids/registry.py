"""Model types: which layout the visual tokens of a model have. Other models are served without grids."""

from __future__ import annotations

from mmspec.vision.grids.gemma import Gemma3Layout, Gemma4Layout
from mmspec.vision.grids.idefics3 import Idefics3Layout, SmolVLMLayout
from mmspec.vision.grids.internvl import InternVLLayout
from mmspec.vision.grids.layout import VisualLayout
from mmspec.vision.grids.llava import LlavaLayout
from mmspec.vision.grids.llava_next import LlavaNextLayout
from mmspec.vision.grids.llava_next_video import LlavaNextVideoLayout
from mmspec.vision.grids.llava_onevision import LlavaOnevisionLayout
from mmspec.vision.grids.mistral3 import Mistral3Layout
from mmspec.vision.grids.qwen2_5_vl import (
    Ernie45VLLayout,
    Glm4vLayout,
    HunYuanVLLayout,
    Qwen25VLLayout,
    VideoLlama3Layout,
)

_LAYOUT_CLASSES: tuple[type[VisualLayout], ...] = (
    LlavaLayout,
    LlavaNextLayout,
    LlavaNextVideoLayout,
    LlavaOnevisionLayout,
    Qwen25VLLayout,
    Glm4vLayout,
    Ernie45VLLayout,
    VideoLlama3Layout,
    HunYuanVLLayout,
    InternVLLayout,
    Idefics3Layout,
    SmolVLMLayout,
    Mistral3Layout,
    Gemma3Layout,
    Gemma4Layout,
)
VISUAL_LAYOUTS = {model_type: layout for layout in _LAYOUT_CLASSES for model_type in layout.model_types}
"""{model type: class} of the families whose visual grids are known."""
