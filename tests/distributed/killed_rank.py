"""qtool's command line, of which rank 1 is killed as soon as its first blocks are on disk:
``torchrun -m tests.distributed.killed_rank quantize ...``.
"""

import os
import signal
from typing import Any

import qtool.pipeline.quantize
from qtool.cli import main
from qtool.distributed import ranks
from qtool.io.write_behind import WriteBehind
from qtool.pipeline.streaming.shards import Shards

#: the shard that rank 1 does not begin: that of the third block
LAST = 4


class KilledShards(Shards):
    """Shards of which rank 1 makes those before :data:`LAST`."""

    def _block(self, blocks: Any, shard: int, missing: Any, writer: WriteBehind) -> None:
        if ranks.rank() == 1 and shard == LAST:
            writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._block(blocks, shard, missing, writer)


if __name__ == "__main__":
    qtool.pipeline.quantize.Shards = KilledShards  # type: ignore[misc]
    main()
