"""Models of states alone, in miniature. transformers does not know how long their cache is, and refuses most modes."""

from support.llm.miniatures.family import MHA, Family

ALONE = MHA | {"intermediate_size": None, "num_attention_heads": None, "max_position_embeddings": None}
MAMBAS = (
    Family("mamba", "mamba", ALONE | {"state_size": 8, "time_step_rank": 6}),
    Family("falcon-mamba", "falcon_mamba", ALONE | {"state_size": 8, "time_step_rank": 6}),
    Family("mamba2", "mamba2", ALONE | {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 24, "n_groups": 2,
                                        "chunk_size": 16}),
)  # fmt: skip
