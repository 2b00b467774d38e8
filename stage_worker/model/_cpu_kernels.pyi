"""Addresses are integers; strides and sizes count elements. See `native_operations`."""

# (heads, kv_heads, head_dim, block_size)
Shape = tuple[int, int, int, int]
# Addresses of a layer's rows and of their scales (0: none), and one of the formats
Pages = tuple[int, int, int]
IN_BF16: int
IN_INT8: int
IN_FP8: int

def is_supported() -> bool: ...
def num_threads() -> int: ...
def rms_norm(
    x: int, stride: int, weight: int, out: int, out_stride: int, rows: int, width: int, eps: float, /
) -> None: ...
def rotate_and_write(
    qkv: int,
    stride: int,
    cosines: int,
    sines: int,
    angle_stride: int,
    slots: int,
    pages: Pages,
    rows: int,
    shape: Shape,
    /,
) -> None: ...
def attend(
    query: int,
    query_stride: int,
    pages: Pages,
    tables: int,
    table_width: int,
    ranges: int,
    rows: int,
    out: int,
    out_stride: int,
    batch: int,
    longest: int,
    scale: float,
    shape: Shape,
    /,
) -> None: ...
def pack(weight: int, out: int, n: int, k: int, is_gated: bool, /) -> None: ...
def multiply(
    x: int,
    stride: int,
    packed: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    n: int,
    k: int,
    is_gated: bool,
    /,
) -> None: ...
def pack_int4(codes: int, scales: int, offsets: int, out: int, n: int, k: int, is_gated: bool, /) -> None: ...
def multiply_int4(
    x: int,
    stride: int,
    packed: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    n: int,
    k: int,
    is_gated: bool,
    /,
) -> None: ...
def attend_prompt(
    query: int,
    query_stride: int,
    fresh: int,
    fresh_stride: int,
    pages: Pages,
    table: int,
    out: int,
    out_stride: int,
    num_queries: int,
    num_keys: int,
    window: int,
    scale: float,
    shape: Shape,
    /,
) -> None: ...
def gate(gate_up: int, out: int, rows: int, width: int, /) -> None: ...
