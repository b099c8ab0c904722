"""TorchPagedAllocator against a page table kept in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

PAGES = 12


def new_allocator(page_size):
    from vericache_sglang.platforms.cpu.paged_allocator import TorchPagedAllocator

    return TorchPagedAllocator(
        PAGES * page_size,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        kvcache=None,
        need_sort=False,
    )


class Requests:
    """Rows of slots, and the rules a correct allocator keeps them to."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.rows = {}

    def pages(self):
        return [
            s // self.page_size
            for row in self.rows.values()
            for s in row[:: self.page_size]
        ]

    def check(self, allocator):
        for row in self.rows.values():
            for at in range(0, len(row), self.page_size):
                page = row[at : at + self.page_size]
                assert page[0] % self.page_size == 0, "a page starts in the middle"
                assert page == list(range(page[0], page[0] + len(page)))
        pages = self.pages()
        assert len(set(pages)) == len(pages), "two requests share a page"
        assert 0 not in pages, "page 0 is for padding"
        free = set(allocator.get_all_free_pages().tolist())
        assert free | set(pages) == set(range(1, PAGES + 1))
        assert not free & set(pages)


def extend(allocator, requests, wanted, dtype=torch.int64):
    """Grow rows; returns whether it fitted. ``wanted``: name -> new length."""
    before = [len(requests.rows.get(name, [])) for name in wanted]
    after = list(wanted.values())
    last = [requests.rows[n][-1] if requests.rows.get(n) else -1 for n in wanted]
    slots = allocator.alloc_extend(
        torch.tensor(before, dtype=dtype),
        torch.tensor(before, dtype=dtype),
        torch.tensor(after, dtype=dtype),
        torch.tensor(after, dtype=dtype),
        torch.tensor(last, dtype=dtype),
        sum(after) - sum(before),
    )
    if slots is None:
        return False
    assert slots.dtype == torch.int64
    given = slots.tolist()
    for name, start, stop in zip(wanted, before, after, strict=True):
        requests.rows.setdefault(name, []).extend(given[: stop - start])
        del given[: stop - start]
    assert given == []
    return True


@settings(max_examples=120, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 4, 16]))
def test_any_sequence_keeps_the_books(data, page_size):
    allocator, requests = new_allocator(page_size), Requests(page_size)
    for step in range(data.draw(st.integers(1, 12))):
        names = data.draw(
            st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
        )
        if data.draw(st.booleans()):
            for name in names:
                row = requests.rows.pop(name, [])
                allocator.free(torch.tensor(row, dtype=torch.int64))
        else:
            grow = st.integers(0 if step else 1, 2 * page_size + 1)
            wanted = {n: len(requests.rows.get(n, [])) + data.draw(grow) for n in names}
            needed = sum(
                -(-length // page_size) - -(-len(requests.rows.get(n, [])) // page_size)
                for n, length in wanted.items()
            )
            free = len(allocator.get_all_free_pages())
            assert extend(allocator, requests, wanted) == (needed <= free)
        requests.check(allocator)
    for row in requests.rows.values():
        allocator.free(torch.tensor(row, dtype=torch.int64))
    assert allocator.available_size() == PAGES * page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_fills_the_last_page_first(page_size, dtype):
    allocator, requests = new_allocator(page_size), Requests(page_size)
    assert extend(allocator, requests, {"a": 1, "b": page_size}, dtype)
    for _ in range(page_size):
        lengths = torch.tensor(
            [len(r) + 1 for r in requests.rows.values()], dtype=dtype
        )
        last = torch.tensor([row[-1] for row in requests.rows.values()], dtype=dtype)
        slots = allocator.alloc_decode(lengths, lengths, last)
        for row, slot in zip(requests.rows.values(), slots.tolist(), strict=True):
            row.append(slot)
        requests.check(allocator)


@pytest.mark.parametrize("page_size", [4, 16])
def test_what_does_not_fit_takes_nothing(page_size):
    allocator, requests = new_allocator(page_size), Requests(page_size)
    assert extend(allocator, requests, {"a": (PAGES - 1) * page_size})
    free = allocator.get_all_free_pages().tolist()
    assert not extend(allocator, requests, {"b": 1, "c": 1})
    assert allocator.get_all_free_pages().tolist() == free
    full = torch.tensor([page_size + 1, page_size + 1])
    assert allocator.alloc_decode(full, full, torch.tensor([7, 11])) is None
    assert allocator.get_all_free_pages().tolist() == free
    assert extend(allocator, requests, {"b": page_size})
    requests.check(allocator)


def test_the_full_pool_still_fills_its_last_pages():
    allocator, requests = new_allocator(4), Requests(4)
    assert extend(allocator, requests, {"a": 4 * PAGES - 3})
    assert allocator.available_size() == 0
    assert extend(allocator, requests, {"a": 4 * PAGES})
    requests.check(allocator)
