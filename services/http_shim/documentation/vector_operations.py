"""Operations of models that embed, score and classify."""

from collections.abc import Sequence

from services.http_shim.documentation.operation import Operation, generate, with_unversioned
from services.http_shim.vectors.embeddings import (
    EmbeddingBody,
    EmbeddingList,
    PoolingBody,
    PoolingList,
)
from services.http_shim.vectors.rankings import (
    Classification,
    ClassifyBody,
    RerankBody,
    Reranking,
    ScoreBody,
    ScoreList,
)

__all__ = ["VECTOR_OPERATIONS"]

VECTOR_OPERATIONS: Sequence[Operation] = (
    *with_unversioned(
        generate(
            path="/v1/embeddings",
            name="createEmbedding",
            summary="Embed texts; only with a model that makes embeddings.",
            body=EmbeddingBody,
            required=("input",),
            answer=EmbeddingList,
            example={"model": "default", "input": ["What is a mutex?", "A lock."]},
        )
    ),
    *with_unversioned(
        generate(
            path="/v1/rerank",
            name="rerank",
            summary="Order documents by how well they fit a query.",
            body=RerankBody,
            required=("query", "documents"),
            answer=Reranking,
            example={
                "model": "default",
                "query": "What is a mutex?",
                "documents": ["A lock.", "A fruit."],
            },
        )
    ),
    *with_unversioned(
        generate(
            path="/v1/score",
            name="score",
            summary="Score pairs of texts.",
            body=ScoreBody,
            required=("text_1", "text_2"),
            answer=ScoreList,
            example={"model": "default", "text_1": "A lock.", "text_2": ["A key.", "A fruit."]},
        )
    ),
    *with_unversioned(
        generate(
            path="/v1/classify",
            name="classify",
            summary="Sort texts into classes; only with a model that has a head for it.",
            body=ClassifyBody,
            required=("input",),
            answer=Classification,
            example={"model": "default", "input": ["What a day!", "A lock."]},
        )
    ),
    *with_unversioned(
        generate(
            path="/v1/pooling",
            name="pooling",
            summary="Embed texts without making the vectors' length 1, or embed their tokens.",
            body=PoolingBody,
            required=("input",),
            answer=PoolingList,
            example={"model": "default", "input": ["A lock."], "task": "token_embed"},
        )
    ),
)
