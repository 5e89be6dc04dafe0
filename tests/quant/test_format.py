import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.quant.formats.format import ALIGNMENT, FORMATS, WEIGHT_DTYPES, FormatError, Layout, end_of, get_format
from moedge.quant.scratch import STRIP_WEIGHTS, TILE, scratch_nbytes, scratch_planes, strip_rows

SHAPES = st.tuples(st.integers(1, 5000), st.integers(1, 20).map(lambda blocks: blocks * 256))
LAYOUTS = st.builds(
    lambda name, shape, dtype: get_format(name).layout(shape, dtype),
    st.sampled_from(sorted(FORMATS)),
    SHAPES,
    st.sampled_from(WEIGHT_DTYPES),
)


@given(LAYOUTS)
def test_planes_are_aligned_and_apart_and_inside_the_buffer(layout: Layout) -> None:
    assert layout.nbytes % ALIGNMENT == 0
    assert layout.planes[0].offset == 0
    assert all(plane.offset % ALIGNMENT == 0 for plane in layout.planes)
    assert all(one.offset + one.nbytes <= next_.offset for one, next_ in pairwise(layout.planes))
    assert 0 <= layout.nbytes - (layout.planes[-1].offset + layout.planes[-1].nbytes) < ALIGNMENT


@given(LAYOUTS)
def test_every_plane_has_the_rows_of_the_matrix(layout: Layout) -> None:
    num_blocks = -(-layout.shape[0] // layout.row_block)
    assert {plane.shape[plane.row_axis] for plane in layout.planes} == {num_blocks * layout.row_block}


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("none", 16),
        ("int8", 8 + 32 / 2048),
        ("int4", 4.5 + 32 / 2048),
        ("nf4", 4.25),
        ("mxfp4", 4.25),
        ("int3", 3.5),
        ("vq2", 2.75),
    ],
    ids=str,
)
def test_bits_per_weight_are_those_promised(name: str, bits: float) -> None:
    shape = (1024, 2048)
    assert get_format(name).nbytes(shape, "bfloat16") * 8 / (1024 * 2048) == bits


def test_nf4_refuses_rows_that_blocks_would_cross() -> None:
    with pytest.raises(FormatError, match=r"\[8, 96\].*multiples of 64.*int8 or none"):
        get_format("nf4").layout((8, 96), "bfloat16")


@pytest.mark.parametrize("name", ["none", "int8"])
def test_other_formats_take_any_number_of_columns(name: str) -> None:
    assert get_format(name).layout((3, 7), "float32").planes[0].shape == (3, 7)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (64,), (2, 64, 64)])
def test_shapes_that_are_no_matrices_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match=r"matrices \[N, K\]"):
        get_format("nf4").layout(shape, "float32")


def test_weights_of_other_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match=r"float64.*float32, bfloat16, float16"):
        get_format("none").layout((1, 64), "float64")


def test_an_unknown_format_is_refused_with_the_list_of_those_there_are() -> None:
    with pytest.raises(FormatError, match=r"'int2' is unknown; use one of none, int8, int4, nf4, mxfp4\."):
        get_format("int2")


@given(LAYOUTS, st.sampled_from(WEIGHT_DTYPES), st.booleans())
def test_scratch_is_bounded_by_a_strip_and_a_tile(layout: Layout, dtype: str, deterministic: bool) -> None:
    num_columns = layout.shape[1]
    planes = scratch_planes(layout, dtype, deterministic)
    assert scratch_nbytes(layout, dtype, deterministic) == end_of(planes)
    rows = strip_rows(layout, deterministic)
    assert rows * num_columns <= STRIP_WEIGHTS
    assert rows % layout.row_block == 0
    strip = 4 * STRIP_WEIGHTS + STRIP_WEIGHTS // 2
    tile = 4 * TILE * (num_columns + rows)
    assert end_of(planes) <= strip + tile + len(planes) * ALIGNMENT


def test_a_plain_product_in_the_matrix_own_dtype_needs_no_scratch() -> None:
    layout = get_format("none").layout((4096, 4096), "bfloat16")
    assert scratch_nbytes(layout, "bfloat16", deterministic=False) == 0
    assert scratch_nbytes(layout, "float32", deterministic=False) > 0


def test_sizes_are_known_without_torch() -> None:
    code = "import sys, moedge.quant.formats.format, moedge.quant.scratch; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
