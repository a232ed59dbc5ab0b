"""Lets the reference show the comments ``#:`` above attributes, which griffe does not read."""

import ast
from typing import Any

import griffe

MARK = "#:"


class AttributeComments(griffe.Extension):
    """Takes the lines ``#:`` above an attribute for its docstring."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any
    ) -> None:
        if attr.docstring or attr.lineno is None or isinstance(node, griffe.ObjectNode):
            return
        first = last = attr.lineno - 1  # of the lines above, from 0
        lines = [line.strip() for line in attr.lines_collection[attr.filepath]]
        while first and lines[first - 1].startswith(MARK):
            first -= 1
        if text := " ".join(line.removeprefix(MARK).strip() for line in lines[first:last]):
            attr.docstring = griffe.Docstring(text, lineno=first + 1, parent=attr)
