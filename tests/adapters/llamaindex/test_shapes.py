"""Apps of many shapes, plain and accelerated on one server, do the same.

What an app is made of is LlamaIndex's; what is told here is where it stood in the way of a
run that goes ahead.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

if version("llama-index-core").startswith("0.12."):
    pytest.skip("core 0.12: `accelerate` is for 0.13 and 0.14", allow_module_level=True)

from llama_index.core.extractors import KeywordExtractor, TitleExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.response_synthesizers import Refine, TreeSummarize
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain

from .test_accelerate import Fan, Pair, engine, llm, nodes, pair

__all__ = ["llm", "pair"]


class Open(Workflow):
    """A Workflow whose one step is a function."""


@step(workflow=Open)
async def answer(ev: StartEvent) -> StopEvent:
    return StopEvent(result=await ev.tree.aget_response("Why?", ev.texts))


async def test_steps_that_are_functions_are_steps_of_the_accelerated_workflow(llm: Conure) -> None:
    given: Any = {"tree": TreeSummarize(llm=llm), "texts": [each.text for each in nodes()]}
    plain, fast = Open(), accelerate(Open())
    assert str(await fast.run(**given)) == str(await plain.run(**given))
    assert explain(fast).num_planned == len(explain(fast).calls) == 3


def test_an_accelerated_workflow_has_the_name_of_the_app(client: Client) -> None:
    class Local(Fan):
        pass

    app = Local(Conure(context_window=1300, client=client))
    assert accelerate(app).workflow_name == app.workflow_name


@pytest.mark.parametrize(
    "again",
    [
        accelerate,
        copy.copy,
        copy.deepcopy,
        lambda app: pickle.loads(pickle.dumps(app)),
    ],
    ids=["accelerate", "copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "make", [Refine, lambda llm: TitleExtractor(llm=llm), engine], ids=["refine", "title", "engine"]
)
def test_copies_of_an_accelerated_app_are_accelerated(
    make: Callable[..., Any], again: Callable[[Any], Any]
) -> None:
    llm = Conure(base_url="http://127.0.0.1:9", context_window=1300)
    llm._pages["default"] = {"id": "m", "max_model_len": 1300}
    app = make(llm=llm)
    made = again(accelerate(app))
    assert isinstance(made, type(app))
    assert vars(type(made))["__conure_of__"] is type(app)
    assert vars(made).keys() == vars(app).keys()


def test_an_app_that_is_accelerated_twice_is_planned(
    llm: Conure, pair: Callable[[Any], Pair]
) -> None:
    report = pair(accelerate(Refine(llm=llm))).same(lambda app: app.synthesize("Why?", nodes(3)))
    assert report.num_planned == len(report.calls) == 3


def test_the_extractors_of_an_ingestion_pipeline_are_planned_in_one_program(
    llm: Conure, pair: Callable[[Any], Pair]
) -> None:
    extractors: list[Any] = [
        TitleExtractor(llm=llm, show_progress=False),
        KeywordExtractor(llm=llm, show_progress=False),
    ]
    app = IngestionPipeline(transformations=extractors, disable_cache=True)
    report = pair(app).same(
        lambda app: [each.metadata for each in app.run(nodes=[n.node for n in nodes(4)])],
        in_order=False,
    )
    assert report.num_planned == len(report.calls) == 9
    assert report.num_wasted == 0
    assert len(report.programs) == 1
