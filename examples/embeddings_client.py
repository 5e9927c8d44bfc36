"""Embeddings, scores and reranking from a running server: python examples/embeddings_client.py [URL]

Any model answers; one made for it (an encoder, say) answers well.
"""

from __future__ import annotations

import sys

import httpx
from openai import OpenAI

TEXTS = ["The cat sleeps on the sofa.", "A kitten naps on a couch.", "Interest rates rose by half a point."]


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    vectors = [item.embedding for item in client.embeddings.create(model=model, input=TEXTS).data]
    print("size:  ", len(vectors[0]))
    for left in range(len(TEXTS)):
        row = [sum(a * b for a, b in zip(vectors[left], vectors[right])) for right in range(len(TEXTS))]
        print("cosine:", "  ".join(f"{value:6.3f}" for value in row), "", TEXTS[left])
    short = client.embeddings.create(model=model, input=TEXTS[0], dimensions=64).data[0].embedding
    print("cut to:", len(short))

    scores = httpx.post(f"{url}/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}, timeout=60).json()["data"]
    print("scores:", [round(item["score"], 3) for item in scores])
    ranked = httpx.post(f"{url}/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:]}, timeout=60).json()["results"]
    for result in ranked:
        print("rank:  ", round(result["relevance_score"], 3), result["document"]["text"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
