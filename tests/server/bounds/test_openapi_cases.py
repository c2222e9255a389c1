"""Selection of the operations that schemathesis tests without its coverage phase."""

from __future__ import annotations

from typing import Any

from .openapi_cases import recursive_operations


def operation(name: str, body: str | None = None) -> dict[str, Any]:
    """Return an operation whose request body is a component."""
    described: dict[str, Any] = {"operationId": name}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return described


def test_recursive_bodies_are_found() -> None:
    tree = {"properties": {"children": {"items": {"$ref": "#/components/schemas/Tree"}}}}
    holder = {"properties": {"tree": {"$ref": "#/components/schemas/Tree"}}}
    description = {
        "components": {"schemas": {"Tree": tree, "Holder": holder, "Flat": {"type": "object"}}},
        "paths": {
            "/direct": {"post": operation("direct", "Tree")},
            "/indirect": {"post": operation("indirect", "Holder"), "get": operation("read")},
            "/flat": {"post": operation("flat", "Flat")},
        },
    }
    assert recursive_operations(description) == ["direct", "indirect"]
