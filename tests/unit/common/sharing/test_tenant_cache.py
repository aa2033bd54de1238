"""A tenant that fills a cache displaces its own values."""

from services.common.sharing.tenant_cache import TenantCache


def test_the_tenant_that_holds_most_loses_its_oldest_value() -> None:
    cache: TenantCache[str, str] = TenantCache(100)
    cache.put("b", "small", "b", 10)
    displaced = [value for i in range(20) for value in cache.put("a", f"a{i}", f"a{i}", 30)]
    assert displaced == [f"a{i}" for i in range(17)]
    assert cache.get("small") == "b"
    assert cache.size == 100


def test_a_used_value_stays_longer() -> None:
    cache: TenantCache[str, int] = TenantCache(100, most_values=2)
    cache.put("", "a", 1, 1)
    cache.put("", "b", 2, 1)
    assert cache.get("a") == 1
    assert cache.put("", "c", 3, 1) == [2]


def test_a_value_larger_than_the_cache_displaces_all() -> None:
    cache: TenantCache[str, int] = TenantCache(100)
    cache.put("b", "b", 1, 10)
    assert cache.put("a", "a", 2, 500) == [1]
    assert cache.get("a") == 2
    assert cache.put("b", "b", 1, 10) == [2]


def test_a_replaced_or_dropped_value_counts_no_more() -> None:
    cache: TenantCache[str, int] = TenantCache(100)
    cache.put("a", "a", 1, 60)
    cache.put("b", "a", 2, 60)
    assert cache.size == 60
    assert cache.drop("a") == 2
    assert cache.drop("a") is None
    assert cache.size == len(cache) == 0
