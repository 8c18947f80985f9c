"""df11 for ComfyUI: BF16 models, losslessly compressed in memory and on disk."""

from .nodes import NODES

NODE_CLASS_MAPPINGS = {name: node for name, (node, _) in NODES.items()}
NODE_DISPLAY_NAME_MAPPINGS = {name: title for name, (_, title) in NODES.items()}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
