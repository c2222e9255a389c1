"""Plans of LlamaIndex's extractors of knowledge graph paths.

Only the exact classes in `PLANNERS` are planned. Each makes one call per node; the calls are
independent, and LlamaIndex makes `num_workers` at a time.

Invariant: the planned calls are the calls that the extractor makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llama_index.core.indices.property_graph import (
    DynamicLLMPathExtractor,
    SchemaLLMPathExtractor,
    SimpleLLMPathExtractor,
)
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

from .plan_builder import NotPlanned, PlanBuilder

PathExtractorPlanner: TypeAlias = Callable[[Any, PlanBuilder, Sequence[str]], None]


def plan_simple(
    extractor: SimpleLLMPathExtractor, builder: PlanBuilder, texts: Sequence[str]
) -> None:
    """Plan one call per text."""
    for text in texts:
        args = {"text": text, "max_knowledge_triplets": extractor.max_paths_per_chunk}
        builder.add(extractor.extract_prompt, args)


def plan_dynamic(
    extractor: DynamicLLMPathExtractor, builder: PlanBuilder, texts: Sequence[str]
) -> None:
    """Plan one call per text, with the types that are allowed."""
    args: dict[str, Any] = {
        "max_knowledge_triplets": extractor.max_triplets_per_chunk,
        "allowed_entity_types": _listed(extractor.allowed_entity_types, "entity types"),
        "allowed_relation_types": _listed(extractor.allowed_relation_types, "relation types"),
    }
    entity_props, relation_props = extractor.allowed_entity_props, extractor.allowed_relation_props
    if entity_props is not None and relation_props is not None:
        args["allowed_entity_properties"] = _listed(entity_props, "entity properties")
        args["allowed_relation_properties"] = _listed(relation_props, "relation properties")
    for text in texts:
        builder.add(extractor.extract_prompt, {"text": text, **args})


def plan_schema(
    extractor: SchemaLLMPathExtractor, builder: PlanBuilder, texts: Sequence[str]
) -> None:
    """Plan one call per text, whose answer matches the schema."""
    builder.output_cls = extractor.kg_schema_cls
    for text in texts:
        args = {"text": text, "max_triplets_per_chunk": extractor.max_triplets_per_chunk}
        builder.add(extractor.extract_prompt, args)


PLANNERS: dict[type[TransformComponent], PathExtractorPlanner] = {
    SimpleLLMPathExtractor: plan_simple,
    DynamicLLMPathExtractor: plan_dynamic,
    SchemaLLMPathExtractor: plan_schema,
}
"""The planner of each class; subclasses have none."""


def plan(
    extractor: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the calls of a path extractor in `acall`; see `synthesizers.plan`."""
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    nodes: Sequence[BaseNode] = arguments["nodes"]
    planner(
        extractor, builder, [node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
    )
    return []


def _listed(names: Sequence[str] | None, what: str) -> str:
    """Return the names as LlamaIndex prints them."""
    return ", ".join(names) if names else f"No {what} provided, You are free to define them."
