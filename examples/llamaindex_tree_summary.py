"""A LlamaIndex tree summary of a short story, its calls planned ahead.

The synthesizer is ordinary LlamaIndex: it summarises the text chunk by chunk, one call after
the other, and then the summaries. `accelerate` gives back the same synthesizer; when it
begins, all chunks and the summary of their summaries are submitted as one program, and its
calls find their answers there.

Start a server first: `conure serve`. Needs `pip install conure[llamaindex]`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from pathlib import Path

from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import NodeWithScore, TextNode

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain
from conure.server.program.errors import ConureError

TEXT = Path(__file__).parent / "texts" / "tell_tale_heart.txt"
QUESTION = "How does the narrator try to show that he is sane?"


def main() -> int:
    """Summarises the story twice, plain and accelerated, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--url", help="of the server; default: CONURE_URL or 127.0.0.1:8400")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each summary")
    parser.add_argument("--window", type=int, default=900, help="tokens that a call may use")
    options = parser.parse_args()
    text = TEXT.read_text(encoding="utf-8")
    nodes = [NodeWithScore(node=TextNode(text=part)) for part in text.split("\n\n") if part.strip()]
    try:
        with Client(options.url) as client:
            llm = Conure(
                client=client,
                temperature=0,
                max_tokens=options.max_tokens,
                context_window=options.window,
            )
            plain = TreeSummarize(llm=llm)
            fast = accelerate(plain)
            answers = []
            for name, app in (("plain", plain), ("accelerated", fast)):
                began = time.perf_counter()
                answers.append(str(app.synthesize(QUESTION, nodes=nodes)))
                print(f"{name:12} {time.perf_counter() - began:6.2f} s")
            report = explain(fast)
            receipt = client.attach(report.programs[0]).receipt()
    except ConureError as problem:
        print(f"llamaindex_tree_summary: {problem}", file=sys.stderr)
        return 1
    print(textwrap.fill(answers[1], 90, initial_indent="  ", subsequent_indent="  "))
    print(f"same answer  {'yes' if answers[0] == answers[1] else 'no'}")
    print(f"calls        {len(report.calls)}, {report.num_planned} from the plan")
    tokens = receipt.prompt_tokens
    print(f"prompt       {tokens.logical} tokens, {tokens.computed} computed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
