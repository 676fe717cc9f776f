"""Pages that were in use come before those that never were: a cache takes the memory it needs."""

from overlap_spec.scheduler.pages import PageAllocator
from overlap_spec.scheduler.prefix import Node, PrefixTree


def test_freed_pages_come_first() -> None:
    pages = PageAllocator(20, PrefixTree(4))
    first = pages.take(3)
    assert (first, pages.touched) == ((1, 2, 3), 3)
    pages.free(first)
    assert set(pages.take(2)) < {1, 2, 3}
    assert pages.touched == 3
    assert set(pages.take(3)) & {4, 5} == {4, 5}
    assert (pages.touched, pages.in_use, pages.free_count) == (5, 5, 14)


def test_one_request_after_another_touches_no_more_than_one_needs() -> None:
    pages = PageAllocator(1000, PrefixTree(4))
    for _ in range(50):
        pages.free(pages.take(7))
    assert pages.touched == 7


def test_the_prefix_tree_gives_up_pages_only_where_none_is_left() -> None:
    tree = PrefixTree(4)
    pages = PageAllocator(4, tree)
    kept = pages.take(2)
    path: list[Node] = []
    tree.insert(range(8), kept, path, "")
    tree.release(path)
    assert pages.free_count == 3
    assert pages.take(1) == (3,)
    assert tree.idle_pages == 2
    assert set(pages.take(2)) == set(kept)
    assert (tree.idle_pages, pages.free_count, pages.in_use) == (0, 0, 3)


def test_what_was_computed_under_a_salt_is_found_under_it_alone() -> None:
    tree = PrefixTree(4)
    for salt, pages in (("a", (1, 2)), ("", (3, 4))):
        tree.insert(range(8), pages, [], salt)
    found = {salt: [n.page for n in tree.find(range(9), salt)] for salt in ("a", "b", "")}
    assert found == {"a": [1, 2], "b": [], "": [3, 4]}
