"""The plugins in a lowered ONNX file: which, and with which attributes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from fp4deploy.plugins.tensorrt.definitions import NAMESPACE, PLUGINS, Attributes, Plugin


@dataclass(frozen=True)
class PluginNode:
    """One node: its plugin, and the attributes that the plugin is registered with."""

    name: str
    plugin: Plugin
    attributes: Attributes


def plugin_nodes(model: onnx.ModelProto | Path) -> list[PluginNode]:
    """All plugin nodes of a lowered file, in graph order."""
    graph = (onnx.load(model) if isinstance(model, Path) else model).graph
    found = []
    for node in graph.node:
        if node.domain == NAMESPACE:
            plugin = PLUGINS[node.op_type]
            given = {entry.name: list(entry.ints) for entry in node.attribute}
            found.append(PluginNode(node.name, plugin, {name: given[name] for name in plugin.attributes}))
    return found
