"""Every second copy to the host fails, in its first layer or its last."""

from itertools import count

from vericache_sglang.kv.thread_transfers import ThreadTransfers


def install():
    """Fail where a layer is written, so that all before it is done and undone."""
    save, number = ThreadTransfers.save, count()

    def failing(self, blocks, image):
        turn = next(number)
        if turn % 2:
            bad, right = (0, image.layers - 1)[turn % 4 == 3], image.write

            def write(layer, keys, values):
                if layer == bad:
                    raise RuntimeError("injected: no copy engine")
                right(layer, keys, values)

            image.write = write
        return save(self, blocks, image)

    ThreadTransfers.save = failing
