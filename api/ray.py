"""moedge on Ray: `BatchModel` for Ray Data's `map_batches` (docs/jobs.md).

    import ray
    from moedge.ray import BatchModel

    rows = ray.data.read_parquet("prompts.parquet")
    rows.map_batches(BatchModel, **BatchModel.actor_options("Qwen/Qwen3-30B-A3B", ram="24GiB")).write_parquet("answers")

`moedge batch --ray ADDRESS`, and `run_batch(..., ray=ADDRESS)`, are jobs on a cluster; they need nothing from here.
"""

from .apps.cluster.batch_model import BatchModel

__all__ = ["BatchModel"]
