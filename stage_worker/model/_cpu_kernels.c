/* A decoder layer for bfloat16 on CPUs with AVX-512 and bfloat16: matrix products and the parts between them.
 *
 * Each function replaces several torch operators, whose calls cost more than their work at decode sizes. Pointers
 * come as integers from operations.py and layer_weights.py, which check shapes and strides. Nothing here allocates
 * more than the scores of a step and one head's packed keys and values.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_KERNELS 1
#include <immintrin.h>
#include <math.h>

#define KERNEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define INLINE static inline __attribute__((always_inline)) KERNEL

typedef uint16_t bf16;

INLINE __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE __m512 load16(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }

INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE void store16(bf16 *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, narrow(x)); }

INLINE __m512 rounded(__m512 x) { return widen(narrow(x)); }

/* exp for x <= 100, infinity from 89 on; 0 below -87. Cephes' expf: a polynomial of degree 6 around 0 after taking out 2^n. */
INLINE __m512 exp16(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, _mm512_setzero_ps());
}

/* ---- threads ---- */

/* OpenMP in the library that torch has loaded, so that both share their threads and `torch.set_num_threads` holds for
 * both. Without it everything runs on the calling thread. */
static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*most)(void), (*count)(void), (*index)(void);
} omp;

static void find_omp(void) {
    *(void **)&omp.most = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    *(void **)&omp.count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    *(void **)&omp.index = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    if (omp.most && omp.count && omp.index) *(void **)&omp.parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

static int64_t num_threads(void) { return omp.parallel ? omp.most() : 1; }

/* Number of parts for at most `most` of them. */
static int64_t num_parts(int64_t most) {
    const int64_t threads = most > 1 ? num_threads() : 1;
    return most < threads ? most : threads;
}

typedef void Work(const void *task, int64_t part, int64_t parts);
typedef struct {
    Work *work;
    const void *task;
} Job;

static void run_part(void *job) { ((Job *)job)->work(((Job *)job)->task, omp.index(), omp.count()); }

/* Runs the parts of a task, at most `parts`, on as many threads. */
static void in_parts(Work *work, const void *task, int64_t parts) {
    Job job = {work, task};
    if (parts > 1) omp.parallel(run_part, &job, (unsigned)parts, 0);
    else work(task, 0, 1);
}

/* ---- norm ---- */

KERNEL static void rms_norm(const bf16 *x, int64_t stride, const bf16 *weight, bf16 *out, int64_t out_stride,
                            int64_t rows, int64_t width, float eps) {
    for (int64_t row = 0; row < rows; row++, x += stride, out += out_stride) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += 16) {
            const __m512 v = load16(x + i);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / (float)width;
        const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
        for (int64_t i = 0; i < width; i += 16) {
            const __m512 unit = rounded(_mm512_mul_ps(load16(x + i), scale));
            store16(out + i, _mm512_mul_ps(unit, load16(weight + i)));
        }
    }
}

/* ---- rotary embedding, and keys and values into their pages ---- */

KERNEL static void rotate(bf16 *x, const bf16 *cosines, const bf16 *sines, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __m512 a = load16(x + i), b = load16(x + half + i);
        store16(x + i, _mm512_add_ps(rounded(_mm512_mul_ps(a, load16(cosines + i))),
                                     rounded(_mm512_mul_ps(b, load16(sines + i)))));
        store16(x + half + i, _mm512_add_ps(rounded(_mm512_mul_ps(b, load16(cosines + half + i))),
                                            rounded(_mm512_mul_ps(a, load16(sines + half + i)))));
    }
}

typedef struct {
    int64_t heads, kv_heads, head_dim, block_size;
} Shape;

/* Pages of one layer. A row is the key or the value of one token and head: bfloat16, or bytes with a scale. */
enum { IN_BF16, IN_INT8, IN_FP8 };
typedef struct {
    char *rows;
    float *scales; /* NULL in bfloat16 */
    int format;
} Pages;

INLINE void *row_at(Pages pages, int64_t row, int64_t head_dim) {
    return pages.rows + row * head_dim * (pages.format == IN_BF16 ? 2 : 1);
}

/* The values of the 128 bytes of float8_e4m3fn without a sign, as bfloat16. */
static bf16 fp8_values[128] __attribute__((aligned(64)));

static void fill_fp8_values(void) {
    for (int code = 0; code < 128; code++) {
        const float value = code == 127 ? NAN : code < 8 ? ldexpf((float)code, -9) : ldexpf(8.0f + code % 8, code / 8 - 10);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        fp8_values[code] = (bf16)(bits >> 16);
    }
}

/* 32 elements as bfloat16, exactly. */
INLINE __m512i unpack32(const char *p, const int format) {
    if (format == IN_INT8) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16))));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
    const __m512i *table = (const __m512i *)fp8_values;
    const __m512i below = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const __m512i above = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    const __mmask32 is_above = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(_mm512_mask_mov_epi16(below, is_above, above), sign);
}

/* Elements of consecutive rows as bfloat16, without their scales. */
KERNEL static void unpack(const char *p, bf16 *out, int64_t num_elements, int format) {
    if (format == IN_INT8)
        for (int64_t i = 0; i < num_elements; i += 32) _mm512_storeu_si512(out + i, unpack32(p + i, IN_INT8));
    else
        for (int64_t i = 0; i < num_elements; i += 32) _mm512_storeu_si512(out + i, unpack32(p + i, IN_FP8));
}

/* One row with its scale. */
KERNEL static void unpack_row(const char *p, float scale, bf16 *out, int64_t width, int format) {
    unpack(p, out, width, format);
    for (int64_t i = 0; i < width; i += 16) store16(out + i, _mm512_mul_ps(load16(out + i), _mm512_set1_ps(scale)));
}

/* 16 numbers of at most 448 as bytes of float8_e4m3fn, rounded to nearest, ties to even; any byte for NaN. */
INLINE __m128i to_fp8(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    const __m512i grown = _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7FFFF)), odd);
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(grown, 20), _mm512_set1_epi32((127 - 7) << 3));
    const __m512 size = _mm512_castsi512_ps(magnitude);
    const __m512i small = _mm512_cvtps_epi32(_mm512_mul_ps(size, _mm512_set1_ps(512.0f)));
    const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    const __m512i code = _mm512_mask_mov_epi32(normal, is_small, small);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 7)));
}

/* Rounds a row to elements in `out` and a scale, as kvcache/scaled_pages.py; returns the scale. */
KERNEL static float scale_row(const bf16 *row, char *out, int64_t width, int format) {
    const __m512i unsigned_bits = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i largest = _mm512_setzero_si512(); /* integers order magnitudes, and NaN above all */
    for (int64_t i = 0; i < width; i += 16)
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(load16(row + i)), unsigned_bits));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    scale /= format == IN_INT8 ? 127.0f : 448.0f;
    if (scale < 0x1p-126f) scale = 0x1p-126f;
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 ratio = _mm512_div_ps(load16(row + i), _mm512_set1_ps(scale));
        const __m128i codes = format == IN_INT8 ? _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(ratio)) : to_fp8(ratio);
        _mm_storeu_si128((__m128i *)(out + i), codes);
    }
    return scale;
}

/* A key or a value into its row of pages; afterwards `source` has what the pages hold. `row` is negative for none. */
KERNEL static void write_row(bf16 *source, Pages pages, int64_t row, int64_t head_dim) {
    if (pages.format == IN_BF16) {
        if (row >= 0)
            for (int64_t i = 0; i < head_dim; i += 32)
                _mm512_storeu_si512((bf16 *)row_at(pages, row, head_dim) + i, _mm512_loadu_si512(source + i));
        return;
    }
    char codes[256];
    const float scale = scale_row(source, codes, head_dim, pages.format);
    if (row >= 0) {
        memcpy(row_at(pages, row, head_dim), codes, (size_t)head_dim);
        pages.scales[row] = scale;
    }
    unpack_row(codes, scale, source, head_dim, pages.format);
}

KERNEL static void rotate_and_write(bf16 *qkv, int64_t stride, const bf16 *cosines, const bf16 *sines,
                                    int64_t angle_stride, const int64_t *slots, Pages pages, int64_t rows, Shape s) {
    for (int64_t row = 0; row < rows; row++, qkv += stride, cosines += angle_stride, sines += angle_stride) {
        for (int64_t head = 0; head < s.heads + s.kv_heads; head++)
            rotate(qkv + head * s.head_dim, cosines, sines, s.head_dim / 2);
        const int64_t slot = slots[row];
        const int64_t first = slot / s.block_size * 2 * s.kv_heads * s.block_size + slot % s.block_size;
        for (int64_t head = 0; head < 2 * s.kv_heads; head++)
            write_row(qkv + (s.heads + head) * s.head_dim, pages, slot < 0 ? -1 : first + head * s.block_size, s.head_dim);
    }
}

/* ---- attention of one query per sequence ---- */

/* Into the second level: the first takes no more than a few requests at a time and drops the others. */
INLINE void fetch(const char *p, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

/* The sums of 16 registers, in order. */
INLINE __m512 sums_of(const __m512 *v) {
    __m512 fours[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *x = v + 4 * i;
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
        const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xDD));
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

/* scores[t] = scale * query . keys[t] for num keys, with `parts` registers of 32 elements to a head. */
INLINE void dot_keys(const bf16 *query, const bf16 *keys, int64_t num, float scale, float *scores, const int parts) {
    __m512bh q[8];
    for (int i = 0; i < parts; i++) q[i] = (__m512bh)_mm512_loadu_si512(query + 32 * i);
    int64_t t = 0;
    for (; t + 16 <= num; t += 16) {
        __m512 sums[16];
        for (int k = 0; k < 16; k++) {
            sums[k] = _mm512_setzero_ps();
            for (int i = 0; i < parts; i++)
                sums[k] = _mm512_dpbf16_ps(sums[k], q[i], (__m512bh)_mm512_loadu_si512(keys + 32 * (parts * (t + k) + i)));
        }
        _mm512_storeu_ps(scores + t, _mm512_mul_ps(_mm512_set1_ps(scale), sums_of(sums)));
    }
    for (; t < num; t++) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < parts; i++)
            sum = _mm512_dpbf16_ps(sum, q[i], (__m512bh)_mm512_loadu_si512(keys + 32 * (parts * t + i)));
        scores[t] = scale * _mm512_reduce_add_ps(sum);
    }
}

INLINE void add_values(const float *weights, const bf16 *values, int64_t num, float *out, const int parts) {
    __m512 sums[16];
    for (int i = 0; i < 2 * parts; i++) sums[i] = _mm512_loadu_ps(out + 16 * i);
    for (int64_t t = 0; t < num; t++, values += 32 * parts) {
        const __m512 weight = _mm512_set1_ps(weights[t]);
        for (int i = 0; i < 2 * parts; i++) sums[i] = _mm512_fmadd_ps(weight, load16(values + 16 * i), sums[i]);
    }
    for (int i = 0; i < 2 * parts; i++) _mm512_storeu_ps(out + 16 * i, sums[i]);
}

#define FOR_PARTS(parts, call)                                                                              \
    switch (parts) {                                                                                        \
    case 1: { enum { P = 1 }; call; } break;                                                                \
    case 2: { enum { P = 2 }; call; } break;                                                                \
    case 3: { enum { P = 3 }; call; } break;                                                                \
    case 4: { enum { P = 4 }; call; } break;                                                                \
    default: { enum { P = 8 }; call; } break;                                                               \
    }

/* Turns scores into weights that sum up to 1. `num` is padded with room for 16. */
KERNEL static void softmax(float *scores, int64_t num) {
    float largest = -INFINITY;
    for (int64_t t = 0; t < num; t++) largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = num; t % 16; t++) scores[t] = -INFINITY;
    const __m512 shift = _mm512_set1_ps(largest);
    __m512 sums = _mm512_setzero_ps();
    for (int64_t t = 0; t < num; t += 16) {
        const __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), shift));
        sums = _mm512_add_ps(sums, e);
        _mm512_storeu_ps(scores + t, e);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sums));
    for (int64_t t = 0; t < num; t += 16)
        _mm512_storeu_ps(scores + t, _mm512_mul_ps(_mm512_loadu_ps(scores + t), factor));
}

/* Room for the scores of a sequence, and for rows of a block with scales. */
typedef struct {
    float *scores; /* heads * room */
    float *scaled; /* block_size */
    bf16 *rows;    /* block_size * head_dim */
    int64_t room;
} Scratch;

static size_t scratch_bytes(int64_t room, Shape s) {
    const int64_t bytes = s.heads * room * (int64_t)sizeof(float) + s.block_size * (int64_t)sizeof(float)
                          + s.block_size * s.head_dim * (int64_t)sizeof(bf16);
    return (size_t)((bytes + 63) / 64 * 64);
}

static Scratch scratch_at(char *memory, int64_t room, Shape s) {
    float *scores = (float *)memory, *scaled = scores + s.heads * room;
    return (Scratch){scores, scaled, (bf16 *)(scaled + s.block_size), room};
}

/* Which keys of a sequence a page has: rows [low, high) counted from the first page of its table. */
typedef struct {
    int64_t first_row, low, high; /* first_row: of the page's first head of keys */
} PageRange;

INLINE PageRange page_range(const int64_t *table, int64_t page, int64_t begin, int64_t end, Shape s) {
    const int64_t first = page * s.block_size, after = first + s.block_size;
    const int64_t low = begin > first ? begin : first, high = end < after ? end : after;
    return (PageRange){table[page] * 2 * s.kv_heads * s.block_size + low - first, low, high};
}

/* Rows from `row` on as bfloat16, in place if the pages hold that, else in `scratch` and without scales. */
INLINE const bf16 *rows_of(Pages pages, int64_t row, int64_t num, Scratch scratch, int64_t head_dim) {
    if (pages.format == IN_BF16) return row_at(pages, row, head_dim);
    unpack(row_at(pages, row, head_dim), scratch.rows, num * head_dim, pages.format);
    return scratch.rows;
}

INLINE void multiply_floats(const float *a, const float *b, float *out, int64_t num) {
    for (int64_t t = 0; t < num; t++) out[t] = a[t] * b[t];
}

INLINE void fetch_head(Pages pages, int64_t row, Shape s) {
    fetch(row_at(pages, row, s.head_dim), s.block_size * s.head_dim * (pages.format == IN_BF16 ? 2 : 1));
}

/* One sequence: its keys [begin, end) counted from the first page of its table. */
KERNEL static void attend_one(const bf16 *query, Pages pages, const int64_t *table, int64_t begin, int64_t end,
                              bf16 *out, Scratch scratch, float scale, Shape s) {
    const int64_t group = s.heads / s.kv_heads, parts = s.head_dim / 32, room = scratch.room;
    const int64_t last = (end - 1) / s.block_size, values_row = s.kv_heads * s.block_size;
    float *scores = scratch.scores;
    for (int64_t page = begin / s.block_size; page <= last; page++) {
        const PageRange range = page_range(table, page, begin, end, s);
        const int64_t num = range.high - range.low, next = table[page < last ? page + 1 : page] * 2 * values_row;
        for (int64_t kv = 0; kv < s.kv_heads; kv++) {
            fetch_head(pages, next + kv * s.block_size, s);
            const int64_t row = range.first_row + kv * s.block_size;
            const bf16 *keys = rows_of(pages, row, num, scratch, s.head_dim);
            for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
                float *found = scores + head * room + range.low - begin;
                FOR_PARTS(parts, dot_keys(query + head * s.head_dim, keys, num, scale, found, P))
                if (pages.scales) multiply_floats(found, pages.scales + row, found, num);
            }
        }
    }
    float sums[64 * 256] __attribute__((aligned(64)));
    for (int64_t i = 0; i < s.heads * s.head_dim; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    for (int64_t head = 0; head < s.heads; head++) softmax(scores + head * room, end - begin);
    for (int64_t page = begin / s.block_size; page <= last; page++) {
        const PageRange range = page_range(table, page, begin, end, s);
        const int64_t num = range.high - range.low, next = table[page < last ? page + 1 : page] * 2 * values_row;
        for (int64_t kv = 0; kv < s.kv_heads; kv++) {
            fetch_head(pages, next + values_row + kv * s.block_size, s);
            const int64_t row = range.first_row + values_row + kv * s.block_size;
            const bf16 *values = rows_of(pages, row, num, scratch, s.head_dim);
            for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
                const float *weights = scores + head * room + range.low - begin;
                if (pages.scales) {
                    multiply_floats(weights, pages.scales + row, scratch.scaled, num);
                    weights = scratch.scaled;
                }
                FOR_PARTS(parts, add_values(weights, values, num, sums + head * s.head_dim, P))
            }
        }
    }
    for (int64_t i = 0; i < s.heads * s.head_dim; i += 16) store16(out + i, _mm512_load_ps(sums + i));
}

typedef struct {
    const bf16 *query;
    Pages pages;
    bf16 *out;
    const int64_t *tables, *ranges, *rows; /* rows may be NULL */
    char *memory; /* scratch_bytes for every part */
    int64_t query_stride, out_stride, width, batch, room;
    float scale;
    Shape shape;
} Decodes;

static void attend_some(const void *task, int64_t part, int64_t parts) {
    const Decodes *d = task;
    const Scratch scratch = scratch_at(d->memory + part * scratch_bytes(d->room, d->shape), d->room, d->shape);
    for (int64_t i = d->batch * part / parts; i < d->batch * (part + 1) / parts; i++) {
        const int64_t row = d->rows ? d->rows[i] : i, *range = d->ranges + 2 * i;
        attend_one(d->query + row * d->query_stride, d->pages, d->tables + i * d->width, range[0], range[1],
                   d->out + row * d->out_stride, scratch, d->scale, d->shape);
    }
}

/* ---- gate ---- */

/* silu(gate) * up; silu is rounded. */
INLINE __m512 gated(__m512 g, __m512 up) {
    const __m512 grown = exp16(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), g), _mm512_set1_ps(100.0f)));
    return _mm512_mul_ps(rounded(_mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), grown))), up);
}

KERNEL static void gate(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i += 16)
            store16(out + i, gated(load16(gate_up + i), load16(gate_up + width + i)));
}

/* ---- matrix products ----
 *
 * A weight [n, k] is packed in panels of 64 of its rows, as [panel][k / 2][64][2]; the last panel is filled up with
 * zeros. A tile computes up to 6 rows of x by one panel in registers, with sums in float32 in the order of k. So a
 * row's result does not depend on the other rows. While a panel is used, the next one is fetched into the second level.
 */

enum { TILE_ROWS = 6, PANEL = 64, PAIRS_PER_FETCH = 8 };

typedef struct {
    const char *at;
    int64_t lines; /* for every PAIRS_PER_FETCH */
} Ahead;

/* sums [rows, 16 * vectors] of a [rows, 2 * pairs] by b [pairs, step / 2, 2]. */
INLINE void tile(const bf16 *a, int64_t stride, const bf16 *b, int64_t step, int64_t pairs, Ahead ahead, float *sums,
                 int64_t sums_stride, const int rows, const int vectors) {
    __m512 total[TILE_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) total[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k += PAIRS_PER_FETCH) {
        for (int64_t i = 0; i < ahead.lines; i++, ahead.at += 64) _mm_prefetch(ahead.at, _MM_HINT_T1);
        const int64_t num = pairs - k < PAIRS_PER_FETCH ? pairs - k : PAIRS_PER_FETCH;
        for (int64_t j = 0; j < num; j++, b += step, a += 2) {
            __m512bh w[4];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) w[v] = (__m512bh)_mm512_loadu_si512(b + 32 * v);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, a + r * stride, sizeof pair);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) total[r][v] = _mm512_dpbf16_ps(total[r][v], x, w[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(sums + r * sums_stride + 16 * v, total[r][v]);
}

typedef void Tile(const bf16 *, int64_t, const bf16 *, int64_t, int64_t, Ahead, float *, int64_t);
#define TILE(ROWS, VECTORS)                                                                                 \
    KERNEL static void tile_##ROWS##_##VECTORS(const bf16 *a, int64_t stride, const bf16 *b, int64_t step,  \
                                               int64_t pairs, Ahead ahead, float *sums, int64_t sums_stride) { \
        tile(a, stride, b, step, pairs, ahead, sums, sums_stride, ROWS, VECTORS);                           \
    }
#define TILES(VECTORS) TILE(1, VECTORS) TILE(2, VECTORS) TILE(3, VECTORS) TILE(4, VECTORS) TILE(5, VECTORS) TILE(6, VECTORS)
TILES(2)
TILES(4)
static Tile *const NARROW[] = {NULL, tile_1_2, tile_2_2, tile_3_2, tile_4_2, tile_5_2, tile_6_2};
static Tile *const WIDE[] = {NULL, tile_1_4, tile_2_4, tile_3_4, tile_4_4, tile_5_4, tile_6_4};

/* The first row of block i of num, which divide `rows` evenly. */
INLINE int64_t block_begin(int64_t i, int64_t num, int64_t rows) {
    return i * (rows / num) + (i < rows % num ? i : rows % num);
}

/* `is_gated`: a panel has 32 rows of the gate, the first half of the weight, and the same 32 rows of the other half. */
static void pack(const bf16 *weight, bf16 *out, int64_t n, int64_t k, int is_gated) {
    const int64_t width = is_gated ? n / 2 : n, columns = is_gated ? PANEL / 2 : PANEL;
    for (int64_t begin = 0; begin < width; begin += columns, out += PANEL * k)
        for (int64_t c = 0; c < PANEL; c++) {
            const int64_t row = begin + c % columns;
            const uint32_t *source = (const uint32_t *)(weight + (row + c / columns * width) * k);
            for (int64_t pair = 0; pair < k / 2; pair++)
                ((uint32_t *)out)[pair * PANEL + c] = row < width ? source[pair] : 0;
        }
}

typedef struct {
    const bf16 *x, *bias, *residual; /* bias and residual may be NULL */
    const void *packed;
    bf16 *out;
    int64_t stride, rows, n, k; /* stride of x; n counts the weight's rows */
    int is_gated;
} Product;

INLINE __m512 load_some(const bf16 *p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }

INLINE __mmask16 first_of(int64_t num) { return num >= 16 ? 0xFFFF : num <= 0 ? 0 : (__mmask16)((1 << num) - 1); }

/* Columns from `begin` on of one row. */
INLINE void finish_sums(const float *sums, const Product *p, int64_t row, int64_t begin) {
    for (int64_t c = begin; c < begin + PANEL && c < p->n; c += 16, sums += 16) {
        const __mmask16 mask = first_of(p->n - c);
        __m512 total = _mm512_loadu_ps(sums);
        if (p->bias) total = _mm512_add_ps(total, load_some(p->bias + c, mask));
        if (p->residual) total = _mm512_add_ps(total, load_some(p->residual + row * p->n + c, mask));
        _mm256_mask_storeu_epi16(p->out + row * p->n + c, mask, narrow(total));
    }
}

INLINE void finish_gate(const float *sums, const Product *p, int64_t row, int64_t begin) {
    const int64_t width = p->n / 2;
    for (int64_t c = begin; c < begin + PANEL / 2 && c < width; c += 16, sums += 16) {
        const __mmask16 mask = first_of(width - c);
        __m512 g = _mm512_loadu_ps(sums), up = _mm512_loadu_ps(sums + PANEL / 2);
        if (p->bias) {
            g = _mm512_add_ps(g, load_some(p->bias + c, mask));
            up = _mm512_add_ps(up, load_some(p->bias + width + c, mask));
        }
        _mm256_mask_storeu_epi16(p->out + row * width + c, mask, narrow(gated(rounded(g), rounded(up))));
    }
}

/* The sums [rows, PANEL] of a panel, for rows from `row` on. */
INLINE void finish(const float *sums, const Product *p, int64_t row, int64_t rows, int64_t panel) {
    for (int64_t r = 0; r < rows; r++)
        if (p->is_gated) finish_gate(sums + r * PANEL, p, row + r, panel * PANEL / 2);
        else finish_sums(sums + r * PANEL, p, row + r, panel * PANEL);
}

/* Panels of a weight of n rows, see `pack`. */
INLINE int64_t num_panels(int64_t n, int is_gated) {
    return is_gated ? (n / 2 + PANEL / 2 - 1) / (PANEL / 2) : (n + PANEL - 1) / PANEL;
}

KERNEL static void multiply_some(const void *task, int64_t part, int64_t parts) {
    const Product *p = task;
    const int64_t blocks = (p->rows + TILE_ROWS - 1) / TILE_ROWS, pairs = p->k / 2;
    const int64_t lines = 2 * p->k, fetches = (pairs + PAIRS_PER_FETCH - 1) / PAIRS_PER_FETCH * blocks;
    const int64_t at_once = (lines + fetches - 1) / fetches, panels = num_panels(p->n, p->is_gated);
    const int64_t last = panels * (part + 1) / parts;
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t panel = panels * part / parts; panel < last; panel++) {
        const bf16 *b = (const bf16 *)p->packed + panel * PANEL * p->k;
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t row = block_begin(i, blocks, p->rows), num = block_begin(i + 1, blocks, p->rows) - row;
            const int64_t first = i * at_once * (fetches / blocks);
            const int is_fetching = panel + 1 < last && first < lines;
            const Ahead ahead = {(const char *)(b + PANEL * p->k) + 64 * first, is_fetching ? at_once : 0};
            WIDE[num](p->x + row * p->stride, p->stride, b, 2 * PANEL, pairs, ahead, sums, PANEL);
            finish(sums, p, row, num, panel);
        }
    }
}

enum { WEIGHTS_PER_PART = 1 << 17 };

static void multiply(const Product *p) {
    if (p->rows > 0) in_parts(multiply_some, p, num_parts(p->n * p->k / WEIGHTS_PER_PART));
}

/* ---- products with int4 weights ----
 *
 * A weight is (code - 8) * scale + offset, with a scale and an offset for each row and group of 32 columns. It is packed
 * as [panel][group], panels as above. A tile adds up codes times x within a group and scales the sums, all in float32;
 * the offset is multiplied by the sum of x. So weights are never rounded, and a row's result does not depend on the
 * other rows.
 */

enum { GROUP = 32, WORDS = GROUP / 8, FETCH_BYTES = 4096 };

typedef struct {
    uint32_t words[WORDS][PANEL]; /* 8 columns of a row: the even ones in the lower half, from the lowest bits up */
    bf16 scales[PANEL], offsets[PANEL];
} Int4Group;

KERNEL static void pack_int4(const uint8_t *codes, const bf16 *scales, const bf16 *offsets, Int4Group *out, int64_t n, int64_t k,
                      int is_gated) {
    const int64_t width = is_gated ? n / 2 : n, columns = is_gated ? PANEL / 2 : PANEL, groups = k / GROUP;
    memset(out, 0, num_panels(n, is_gated) * groups * sizeof *out);
    for (int64_t begin = 0; begin < width; begin += columns, out += groups)
        for (int64_t c = 0; c < PANEL; c++) {
            const int64_t row = begin + c % columns, source = row + c / columns * width;
            for (int64_t g = 0; row < width && g < groups; g++) {
                out[g].scales[c] = scales[source * groups + g];
                out[g].offsets[c] = offsets[source * groups + g];
                for (int64_t i = 0; i < GROUP; i++)
                    out[g].words[i / 8][c] |= (uint32_t)codes[source * k + g * GROUP + i] << (i % 8 / 2 * 4 + i % 2 * 16);
            }
        }
}

/* The sum of each group of a row of x. */
KERNEL static void add_groups(const bf16 *x, float *out, int64_t groups) {
    for (int64_t g = 0; g < groups; g++)
        out[g] = _mm512_reduce_add_ps(_mm512_add_ps(load16(x + g * GROUP), load16(x + g * GROUP + 16)));
}

/* sums [rows, PANEL] of x [rows, groups * GROUP] by b [groups]; x_sums [rows, groups] are of `add_groups`. */
INLINE void int4_tile(const bf16 *x, int64_t stride, const float *x_sums, const Int4Group *b, int64_t groups, float *sums,
                      const int rows) {
    enum { VECTORS = PANEL / 16 };
    /* -8 to 7, twice, since an index has 5 bits: the fifth belongs to the next code */
    const __m512i values = _mm512_set_epi64(
        0x40E040C040A04080, 0x404040003F800000, 0xBF80C000C040C080, 0xC0A0C0C0C0E0C100,
        0x40E040C040A04080, 0x404040003F800000, 0xBF80C000C040C080, 0xC0A0C0C0C0E0C100);
    for (int i = 0; i < rows * PANEL; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    for (int64_t g = 0; g < groups; g++, b++, x += GROUP) {
        __m512 total[TILE_ROWS][VECTORS];
        for (size_t i = 0; i < sizeof *b; i += 64) _mm_prefetch((const char *)b + FETCH_BYTES + i, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) total[r][v] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int w = 0; w < WORDS; w++) {
            __m512i word[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) word[v] = _mm512_loadu_si512(b->words[w] + 16 * v);
#pragma GCC unroll 8
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const __m512bh pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word[v], 4 * j), values);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        int32_t given;
                        memcpy(&given, x + r * stride + 8 * w + 2 * j, sizeof given);
                        total[r][v] = _mm512_dpbf16_ps(total[r][v], pair, (__m512bh)_mm512_set1_epi32(given));
                    }
                }
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const __m512 scale = load16(b->scales + 16 * v), offset = load16(b->offsets + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float *sum = sums + r * PANEL + 16 * v;
                const __m512 scaled = _mm512_fmadd_ps(total[r][v], scale, _mm512_load_ps(sum));
                _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_set1_ps(x_sums[r * groups + g]), offset, scaled));
            }
        }
    }
}

typedef void Int4Tile(const bf16 *, int64_t, const float *, const Int4Group *, int64_t, float *);
#define INT4_TILE(ROWS)                                                                                        \
    KERNEL static void int4_tile_##ROWS(const bf16 *x, int64_t stride, const float *x_sums, const Int4Group *b, \
                                        int64_t groups, float *sums) {                                          \
        int4_tile(x, stride, x_sums, b, groups, sums, ROWS);                                                    \
    }
INT4_TILE(1) INT4_TILE(2) INT4_TILE(3) INT4_TILE(4) INT4_TILE(5) INT4_TILE(6)
static Int4Tile *const INT4[] = {NULL,        int4_tile_1, int4_tile_2, int4_tile_3,
                                 int4_tile_4, int4_tile_5, int4_tile_6};

typedef struct {
    const Product *product;
    const float *x_sums; /* [rows, groups] */
} Int4Product;

KERNEL static void multiply_int4_some(const void *task, int64_t part, int64_t parts) {
    const Product *p = ((const Int4Product *)task)->product;
    const float *x_sums = ((const Int4Product *)task)->x_sums;
    const int64_t blocks = (p->rows + TILE_ROWS - 1) / TILE_ROWS, groups = p->k / GROUP;
    const int64_t panels = num_panels(p->n, p->is_gated);
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; panel++)
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t row = block_begin(i, blocks, p->rows), num = block_begin(i + 1, blocks, p->rows) - row;
            INT4[num](p->x + row * p->stride, p->stride, x_sums + row * groups,
                      (const Int4Group *)p->packed + panel * groups, groups, sums);
            finish(sums, p, row, num, panel);
        }
}

/* Returns 0 without memory. */
static int multiply_int4(const Product *p) {
    const int64_t groups = p->k / GROUP;
    float *x_sums = malloc((size_t)(p->rows * groups + 1) * sizeof(float));
    if (x_sums == NULL) return 0;
    for (int64_t row = 0; row < p->rows; row++) add_groups(p->x + row * p->stride, x_sums + row * groups, groups);
    const Int4Product task = {p, x_sums};
    in_parts(multiply_int4_some, &task, num_parts(p->n * p->k / WEIGHTS_PER_PART));
    free(x_sums);
    return 1;
}

/* ---- attention of several queries of one sequence ---- */

/* Keys and values of one head, packed like weights: [keys / 64][dim / 2][64][2] and [keys / 2][dim][2]. */
typedef struct {
    const bf16 *fresh; /* keys of the first head if there are no pages */
    int64_t fresh_stride;
    Pages pages;
    const int64_t *table;
    int64_t num;
} Keys;

/* The key or value of a token, in `buffer` if the pages have scales; NULL after the last token. */
INLINE const bf16 *key_of(const Keys *keys, int64_t token, int64_t head, bf16 *buffer, Shape s) {
    if (token >= keys->num) return NULL;
    if (keys->table == NULL) return keys->fresh + token * keys->fresh_stride + head * s.head_dim;
    const int64_t page = keys->table[token / s.block_size];
    const int64_t row = (page * 2 * s.kv_heads + head) * s.block_size + token % s.block_size;
    const void *found = row_at(keys->pages, row, s.head_dim);
    if (keys->pages.format == IN_BF16) return found;
    unpack_row(found, keys->pages.scales[row], buffer, s.head_dim, keys->pages.format);
    return buffer;
}

KERNEL static void pack_head(const Keys *keys, int64_t head, bf16 *packed_keys, bf16 *packed_values, Shape s) {
    const int64_t padded = (keys->num + PANEL - 1) / PANEL * PANEL, to_value = s.kv_heads;
    bf16 one[256], other[256];
    for (int64_t token = 0; token < padded; token++) {
        const uint32_t *source = (const uint32_t *)key_of(keys, token, head, one, s);
        uint32_t *target = (uint32_t *)packed_keys + token / PANEL * PANEL * s.head_dim / 2 + token % PANEL;
        for (int64_t pair = 0; pair < s.head_dim / 2; pair++) target[pair * PANEL] = source ? source[pair] : 0;
    }
    for (int64_t token = 0; token < padded; token += 2) {
        const bf16 *even = key_of(keys, token, head + to_value, one, s);
        const bf16 *odd = key_of(keys, token + 1, head + to_value, other, s);
        for (int64_t i = 0; i < s.head_dim; i += 16) {
            const __m256i none = _mm256_setzero_si256();
            const __m256i low = even ? _mm256_loadu_si256((const __m256i *)(even + i)) : none;
            const __m256i high = odd ? _mm256_loadu_si256((const __m256i *)(odd + i)) : none;
            _mm512_storeu_si512(packed_values + token * s.head_dim + 2 * i,
                                _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
        }
    }
}

/* Which of the 16 elements from t on are in [begin, end). */
INLINE __mmask16 within(int64_t t, int64_t begin, int64_t end) {
    if (t >= begin && t + 16 <= end) return 0xFFFF;
    return first_of(end - t) & ~first_of(begin - t);
}

/* Turns scores [begin, end) of a row into weights relative to the largest, zero up to `num`; returns their sum. */
KERNEL static float weights_of(const float *scores, bf16 *weights, int64_t begin, int64_t end, int64_t num, float scale) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 largest = none, sums = _mm512_setzero_ps();
    for (int64_t t = begin / 16 * 16; t < end; t += 16)
        largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(none, within(t, begin, end), scores + t));
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(_mm512_reduce_max_ps(largest) * scale);
    for (int64_t t = 0; t < num; t += 16) {
        const __mmask16 visible = within(t, begin, end);
        __m512 weight = _mm512_setzero_ps();
        if (visible) weight = _mm512_maskz_mov_ps(visible, exp16(_mm512_fmsub_ps(_mm512_loadu_ps(scores + t), factor, shift)));
        sums = _mm512_add_ps(sums, weight);
        store16(weights + t, weight);
    }
    return _mm512_reduce_add_ps(sums);
}

/* Room for one head: packed keys and values, and scores and weights of a block of queries. */
static size_t prompt_scratch_bytes(int64_t num_keys, int64_t head_dim) {
    const int64_t padded = (num_keys + PANEL - 1) / PANEL * PANEL;
    return (size_t)padded * (2 * head_dim * sizeof(bf16) + TILE_ROWS * (sizeof(float) + sizeof(bf16)));
}

typedef struct {
    const bf16 *query;
    bf16 *out;
    int64_t query_stride, out_stride, rows, window; /* the last `rows` keys are the queries' own; window 0: unlimited */
    float scale;
    Keys keys;
    void *scratch; /* prompt_scratch_bytes for every part */
    Shape shape;
} Prompt;

/* A block of queries of one head. */
KERNEL static void attend_block(const Prompt *p, const Keys *keys, int64_t row, int64_t num, int64_t head, void *scratch,
                                Shape s) {
    const int64_t padded = (keys->num + PANEL - 1) / PANEL * PANEL, first_end = keys->num - p->rows + row + 1;
    const int64_t base = p->window && first_end > p->window ? (first_end - p->window) / PANEL * PANEL : 0;
    const int64_t span = first_end + num - 1 - base, panels = (span + PANEL - 1) / PANEL;
    const bf16 *packed_keys = (const bf16 *)scratch + base * s.head_dim, *packed_values = packed_keys + padded * s.head_dim;
    float *scores = (float *)((bf16 *)scratch + 2 * padded * s.head_dim), inverse[TILE_ROWS];
    bf16 *weights = (bf16 *)(scores + TILE_ROWS * padded);
    const bf16 *query = p->query + row * p->query_stride + head * s.head_dim;
    const Ahead none = {NULL, 0};
    for (int64_t i = 0; i < panels; i++)
        WIDE[num](query, p->query_stride, packed_keys + i * PANEL * s.head_dim, 2 * PANEL, s.head_dim / 2, none,
                  scores + i * PANEL, padded);
    for (int64_t r = 0; r < num; r++) {
        const int64_t end = first_end + r, begin = p->window && end > p->window ? end - p->window : 0;
        inverse[r] = 1.0f / weights_of(scores + r * padded, weights + r * padded, begin > base ? begin - base : 0,
                                       end - base, panels * PANEL, p->scale);
    }
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t c = 0; c < s.head_dim; c += PANEL) {
        const int is_wide = s.head_dim - c >= PANEL;
        (is_wide ? WIDE : NARROW)[num](weights, padded, packed_values + 2 * c, 2 * s.head_dim, (span + 1) / 2, none, sums,
                                       PANEL);
        for (int64_t r = 0; r < num; r++)
            for (int64_t i = 0; i < (is_wide ? PANEL : PANEL / 2); i += 16)
                store16(p->out + (row + r) * p->out_stride + head * s.head_dim + c + i,
                        _mm512_mul_ps(_mm512_load_ps(sums + r * PANEL + i), _mm512_set1_ps(inverse[r])));
    }
}

/* A part is some blocks of queries of some heads of keys, which several parts may pack. */
KERNEL static void attend_prompt_some(const void *task, int64_t part, int64_t parts) {
    const Prompt *p = task;
    const Shape s = p->shape;
    const int64_t padded = (p->keys.num + PANEL - 1) / PANEL * PANEL, group = s.heads / s.kv_heads;
    const int64_t blocks = (p->rows + TILE_ROWS - 1) / TILE_ROWS, splits = (parts + s.kv_heads - 1) / s.kv_heads;
    bf16 *scratch = (bf16 *)((char *)p->scratch + part * prompt_scratch_bytes(p->keys.num, s.head_dim));
    for (int64_t item = part; item < s.kv_heads * splits; item += parts) {
        const int64_t kv = item / splits;
        pack_head(&p->keys, kv, scratch, scratch + padded * s.head_dim, s);
        for (int64_t head = kv * group; head < (kv + 1) * group; head++)
            for (int64_t i = item % splits; i < blocks; i += splits) {
                const int64_t row = block_begin(i, blocks, p->rows);
                attend_block(p, &p->keys, row, block_begin(i + 1, blocks, p->rows) - row, head, scratch, s);
            }
    }
}

enum { SCORES_PER_PART = 1 << 14 };

/* Returns 0 without memory. */
static int attend_prompt(Prompt *p) {
    const int64_t parts = num_parts(p->rows * p->keys.num * p->shape.heads / SCORES_PER_PART);
    p->scratch = malloc((parts > 1 ? parts : 1) * prompt_scratch_bytes(p->keys.num, p->shape.head_dim));
    if (p->scratch == NULL) return 0;
    in_parts(attend_prompt_some, p, parts);
    free(p->scratch);
    return 1;
}

static int is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
           && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}
#endif

/* ---- Python ---- */

#define ADDRESS(type, value) ((type *)(uintptr_t)(value))
#define PAGES(rows, scales, format) ((Pages){ADDRESS(char, rows), ADDRESS(float, scales), format})
typedef unsigned long long address;
typedef long long number;

static PyObject *py_is_supported(PyObject *self, PyObject *unused) {
#ifdef HAS_KERNELS
    return PyBool_FromLong(is_supported());
#else
    Py_RETURN_FALSE;
#endif
}

#ifdef HAS_KERNELS
static PyObject *py_rms_norm(PyObject *self, PyObject *args) {
    address x, weight, out;
    number stride, out_stride, rows, width;
    double eps;
    if (!PyArg_ParseTuple(args, "KLKKLLLd", &x, &stride, &weight, &out, &out_stride, &rows, &width, &eps)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rms_norm(ADDRESS(bf16, x), stride, ADDRESS(bf16, weight), ADDRESS(bf16, out), out_stride, rows, width, (float)eps);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_rotate_and_write(PyObject *self, PyObject *args) {
    address qkv, cosines, sines, slots, pages, scales;
    number stride, angle_stride, rows;
    int format;
    Shape s;
    number heads, kv_heads, head_dim, block_size;
    if (!PyArg_ParseTuple(args, "KLKKLK(KKi)L(LLLL)", &qkv, &stride, &cosines, &sines, &angle_stride, &slots, &pages,
                          &scales, &format, &rows, &heads, &kv_heads, &head_dim, &block_size))
        return NULL;
    s = (Shape){heads, kv_heads, head_dim, block_size};
    Py_BEGIN_ALLOW_THREADS
    rotate_and_write(ADDRESS(bf16, qkv), stride, ADDRESS(bf16, cosines), ADDRESS(bf16, sines), angle_stride,
                     ADDRESS(int64_t, slots), PAGES(pages, scales, format), rows, s);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_attend(PyObject *self, PyObject *args) {
    address query, pages, scales, tables, ranges, rows, out;
    number query_stride, out_stride, batch, width, longest;
    number heads, kv_heads, head_dim, block_size;
    int format;
    double scale;
    if (!PyArg_ParseTuple(args, "KL(KKi)KLKKKLLLd(LLLL)", &query, &query_stride, &pages, &scales, &format, &tables, &width,
                          &ranges, &rows, &out, &out_stride, &batch, &longest, &scale, &heads, &kv_heads, &head_dim,
                          &block_size))
        return NULL;
    Decodes decodes = {ADDRESS(bf16, query), PAGES(pages, scales, format), ADDRESS(bf16, out), ADDRESS(int64_t, tables),
                       ADDRESS(int64_t, ranges), ADDRESS(int64_t, rows), NULL, query_stride, out_stride, width, batch,
                       (longest + 15) / 16 * 16, (float)scale, {heads, kv_heads, head_dim, block_size}};
    const int64_t parts = num_parts(batch);
    decodes.memory = malloc((size_t)(parts > 1 ? parts : 1) * scratch_bytes(decodes.room, decodes.shape));
    if (decodes.memory == NULL) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    in_parts(attend_some, &decodes, parts);
    Py_END_ALLOW_THREADS
    free(decodes.memory);
    Py_RETURN_NONE;
}

static PyObject *py_gate(PyObject *self, PyObject *args) {
    address gate_up, out;
    number rows, width;
    if (!PyArg_ParseTuple(args, "KKLL", &gate_up, &out, &rows, &width)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    gate(ADDRESS(bf16, gate_up), ADDRESS(bf16, out), rows, width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_pack(PyObject *self, PyObject *args) {
    address weight, out;
    number n, k;
    int is_gated;
    if (!PyArg_ParseTuple(args, "KKLLp", &weight, &out, &n, &k, &is_gated)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack(ADDRESS(bf16, weight), ADDRESS(bf16, out), n, k, is_gated);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_multiply(PyObject *self, PyObject *args) {
    address x, packed, bias, residual, out;
    number stride, rows, n, k;
    int is_gated;
    if (!PyArg_ParseTuple(args, "KLKKKKLLLp", &x, &stride, &packed, &bias, &residual, &out, &rows, &n, &k, &is_gated))
        return NULL;
    const Product product = {ADDRESS(bf16, x), ADDRESS(bf16, bias), ADDRESS(bf16, residual), ADDRESS(void, packed),
                             ADDRESS(bf16, out), stride, rows, n, k, is_gated};
    Py_BEGIN_ALLOW_THREADS
    multiply(&product);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_pack_int4(PyObject *self, PyObject *args) {
    address codes, scales, offsets, out;
    number n, k;
    int is_gated;
    if (!PyArg_ParseTuple(args, "KKKKLLp", &codes, &scales, &offsets, &out, &n, &k, &is_gated)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_int4(ADDRESS(uint8_t, codes), ADDRESS(bf16, scales), ADDRESS(bf16, offsets), ADDRESS(Int4Group, out), n, k,
              is_gated);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_multiply_int4(PyObject *self, PyObject *args) {
    address x, packed, bias, residual, out;
    number stride, rows, n, k;
    int is_gated, is_done;
    if (!PyArg_ParseTuple(args, "KLKKKKLLLp", &x, &stride, &packed, &bias, &residual, &out, &rows, &n, &k, &is_gated))
        return NULL;
    const Product product = {ADDRESS(bf16, x), ADDRESS(bf16, bias), ADDRESS(bf16, residual), ADDRESS(void, packed),
                             ADDRESS(bf16, out), stride, rows, n, k, is_gated};
    Py_BEGIN_ALLOW_THREADS
    is_done = multiply_int4(&product);
    Py_END_ALLOW_THREADS
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_attend_prompt(PyObject *self, PyObject *args) {
    address query, fresh, pages, scales, table, out;
    number query_stride, fresh_stride, out_stride, rows, num_keys, window;
    number heads, kv_heads, head_dim, block_size;
    int format;
    double scale;
    if (!PyArg_ParseTuple(args, "KLKL(KKi)KKLLLLd(LLLL)", &query, &query_stride, &fresh, &fresh_stride, &pages, &scales,
                          &format, &table, &out, &out_stride, &rows, &num_keys, &window, &scale, &heads, &kv_heads,
                          &head_dim, &block_size))
        return NULL;
    const Keys keys = {ADDRESS(bf16, fresh), fresh_stride, PAGES(pages, scales, format), ADDRESS(int64_t, table), num_keys};
    Prompt prompt = {ADDRESS(bf16, query), ADDRESS(bf16, out), query_stride, out_stride, rows, window, (float)scale, keys,
                     NULL, {heads, kv_heads, head_dim, block_size}};
    int is_done;
    Py_BEGIN_ALLOW_THREADS
    is_done = attend_prompt(&prompt);
    Py_END_ALLOW_THREADS
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_num_threads(PyObject *self, PyObject *unused) { return PyLong_FromLongLong(num_threads()); }
#endif

static PyMethodDef methods[] = {
    {"is_supported", py_is_supported, METH_NOARGS, "Whether this CPU has what the other functions use."},
#ifdef HAS_KERNELS
    {"rms_norm", py_rms_norm, METH_VARARGS, NULL},
    {"rotate_and_write", py_rotate_and_write, METH_VARARGS, NULL},
    {"attend", py_attend, METH_VARARGS, NULL},
    {"gate", py_gate, METH_VARARGS, NULL},
    {"pack", py_pack, METH_VARARGS, NULL},
    {"multiply", py_multiply, METH_VARARGS, NULL},
    {"pack_int4", py_pack_int4, METH_VARARGS, NULL},
    {"multiply_int4", py_multiply_int4, METH_VARARGS, NULL},
    {"attend_prompt", py_attend_prompt, METH_VARARGS, NULL},
    {"num_threads", py_num_threads, METH_NOARGS, "Threads of products and attention when called from this thread."},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_cpu_kernels",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__cpu_kernels(void) {
#ifdef HAS_KERNELS
    find_omp();
    fill_fp8_values();
#endif
    PyObject *created = PyModule_Create(&module);
#ifdef HAS_KERNELS
    if (created && (PyModule_AddIntMacro(created, IN_BF16) || PyModule_AddIntMacro(created, IN_INT8)
                    || PyModule_AddIntMacro(created, IN_FP8)))
        Py_CLEAR(created);
#endif
    return created;
}
