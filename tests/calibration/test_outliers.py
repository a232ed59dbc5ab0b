import pytest
import torch

from qtool.calibration.outliers import median, to_median


def test_a_row_above_the_limit_counts_as_the_median():
    sizes = torch.tensor([1.0, 2, 3, 48, 49])
    assert to_median(sizes).tolist() == [1, 1, 1, 1, pytest.approx(3 / 49)]
    assert to_median(sizes, largest=10)[3] == pytest.approx(3 / 48)
    assert (to_median(torch.tensor([0.0, 0, 0, 1])) == 1).all()  # the median itself


def test_zeros_do_not_count():
    """They are dead channels, or stand behind the tokens of an expert that sees fewer."""
    sizes = torch.tensor([[1.0, 100, 2, 3, 0, 0, 0, 0], [5, 1, 4, 2, 3, 100, 7, 6], [0] * 8])
    assert median(sizes).tolist() == [[3], [5], [0]]
    factors = to_median(sizes)
    assert factors[0].tolist() == [1, pytest.approx(0.03), 1, 1, 1, 1, 1, 1]
    assert factors[1, 5] == pytest.approx(0.05) and (factors[2] == 1).all()
