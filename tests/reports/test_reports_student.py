import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from reports.student import incomplete_beta, t_quantile, t_tail


@pytest.mark.parametrize("df", [1, 2, 3, 5, 9, 30, 86, 1000, 1e6])
@pytest.mark.parametrize("p", [0.5, 0.6, 0.9, 0.975, 0.99167, 0.9995, 1 - 1e-7, 0.025, 1e-6])
def test_t_quantile_is_scipys(p, df):
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-7, abs=1e-9)


def test_t_quantile_from_a_printed_table():
    assert t_quantile(0.975, 2) == pytest.approx(4.303, abs=5e-4)
    assert t_quantile(0.975, 10) == pytest.approx(2.228, abs=5e-4)


@given(st.floats(0, 1), st.floats(0.5, 500), st.floats(0.5, 500))
def test_incomplete_beta_is_scipys(x, a, b):
    assert incomplete_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=1e-8, abs=1e-12)


def test_far_tails_keep_their_digits():
    assert t_tail(60, 4) == pytest.approx(stats.t.sf(60, 4), rel=1e-9)


@pytest.mark.parametrize(("p", "df"), [(0, 3), (1, 3), (0.5, 0), (-1, 3)])
def test_nonsense_is_refused(p, df):
    with pytest.raises(ValueError, match="t quantile"):
        t_quantile(p, df)
