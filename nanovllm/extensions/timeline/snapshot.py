"""The state of an engine at one moment, for those who look on."""

from typing import Any

from nanovllm.engine.llm_engine import LLMEngine


class SnapshotLLM(LLMEngine):
    def snapshot(self) -> dict[str, Any]:
        """Who waits and runs, by seq_id, and what the KV cache holds, by block: plain data, copied."""
        scheduler, pool = self.scheduler, self.scheduler.block_manager
        return {
            "waiting": [seq.seq_id for seq in scheduler.waiting],
            "running": [seq.seq_id for seq in scheduler.running],
            "block_tables": {seq.seq_id: [*seq.block_table] for seq in scheduler.running},
            "ref_counts": [block.ref_count for block in pool.blocks],
            "hashes": [block.hash for block in pool.blocks],
            "free": [*pool.free_block_ids],
        }
