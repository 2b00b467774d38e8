/* What a decoder layer does between its matrix products, for bfloat16 on CPUs with AVX-512 and bfloat16.
 *
 * Each function replaces several torch operators, whose calls cost more than their work at decode sizes, and
 * attention reads keys and values where they lie in the pages. Pointers come as integers from
 * cpu_kernels.py, which checks shapes and strides; nothing here allocates more than one step's scores.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

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

KERNEL static void rotate_and_write(bf16 *qkv, int64_t stride, const bf16 *cosines, const bf16 *sines,
                                    int64_t angle_stride, const int64_t *slots, bf16 *pages, int64_t rows, Shape s) {
    for (int64_t row = 0; row < rows; row++, qkv += stride, cosines += angle_stride, sines += angle_stride) {
        for (int64_t head = 0; head < s.heads + s.kv_heads; head++)
            rotate(qkv + head * s.head_dim, cosines, sines, s.head_dim / 2);
        if (slots[row] < 0) continue;
        const bf16 *source = qkv + s.heads * s.head_dim;
        bf16 *target = pages + ((slots[row] / s.block_size) * 2 * s.kv_heads * s.block_size
                                + slots[row] % s.block_size) * s.head_dim;
        for (int64_t head = 0; head < 2 * s.kv_heads; head++)
            for (int64_t i = 0; i < s.head_dim; i += 32)
                _mm512_storeu_si512(target + head * s.block_size * s.head_dim + i,
                                    _mm512_loadu_si512(source + head * s.head_dim + i));
    }
}

/* ---- attention of one query per sequence ---- */

/* Into the second level: the first takes no more than a few requests at a time and drops the others. */
INLINE void fetch(const bf16 *p, int64_t num_elements) {
    for (int64_t i = 0; i < num_elements; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T1);
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

/* One sequence: its keys [begin, end) counted from the first page of its table. `scores` has heads * room. */
KERNEL static void attend_one(const bf16 *query, const bf16 *pages, const int64_t *table, int64_t begin,
                              int64_t end, bf16 *out, float *scores, int64_t room, float scale, Shape s) {
    const int64_t group = s.heads / s.kv_heads, head_size = s.block_size * s.head_dim;
    const int64_t page_size = 2 * s.kv_heads * head_size, parts = s.head_dim / 32;
    const int64_t last = (end - 1) / s.block_size;
    for (int64_t page = begin / s.block_size; page <= last; page++) {
        const bf16 *keys = pages + table[page] * page_size;
        const bf16 *next = pages + table[page < last ? page + 1 : page] * page_size;
        const int64_t first = page * s.block_size;
        const int64_t low = begin > first ? begin : first, high = end < first + s.block_size ? end : first + s.block_size;
        for (int64_t kv = 0; kv < s.kv_heads; kv++) {
            fetch(next + kv * head_size, head_size);
            for (int64_t g = 0; g < group; g++) {
                const int64_t head = kv * group + g;
                FOR_PARTS(parts, dot_keys(query + head * s.head_dim, keys + kv * head_size + (low - first) * s.head_dim,
                                          high - low, scale, scores + head * room + low - begin, P))
            }
        }
    }
    float sums[64 * 256] __attribute__((aligned(64)));
    for (int64_t i = 0; i < s.heads * s.head_dim; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    for (int64_t head = 0; head < s.heads; head++) softmax(scores + head * room, end - begin);
    for (int64_t page = begin / s.block_size; page <= last; page++) {
        const bf16 *values = pages + table[page] * page_size + page_size / 2;
        const bf16 *next = pages + table[page < last ? page + 1 : page] * page_size + page_size / 2;
        const int64_t first = page * s.block_size;
        const int64_t low = begin > first ? begin : first, high = end < first + s.block_size ? end : first + s.block_size;
        for (int64_t kv = 0; kv < s.kv_heads; kv++) {
            fetch(next + kv * head_size, head_size);
            for (int64_t g = 0; g < group; g++) {
                const int64_t head = kv * group + g;
                FOR_PARTS(parts, add_values(scores + head * room + low - begin,
                                            values + kv * head_size + (low - first) * s.head_dim, high - low,
                                            sums + head * s.head_dim, P))
            }
        }
    }
    for (int64_t i = 0; i < s.heads * s.head_dim; i += 16) store16(out + i, _mm512_load_ps(sums + i));
}

/* ---- gate ---- */

KERNEL static void gate(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width) {
    const __m512 one = _mm512_set1_ps(1.0f), largest = _mm512_set1_ps(100.0f);
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i += 16) {
            const __m512 g = load16(gate_up + i);
            const __m512 grown = exp16(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), g), largest));
            const __m512 silu = rounded(_mm512_div_ps(g, _mm512_add_ps(one, grown)));
            store16(out + i, _mm512_mul_ps(silu, load16(gate_up + width + i)));
        }
}

static int is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
           && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}
#endif

/* ---- Python ---- */

#define ADDRESS(type, value) ((type *)(uintptr_t)(value))
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
    address qkv, cosines, sines, slots, pages;
    number stride, angle_stride, rows;
    Shape s;
    number heads, kv_heads, head_dim, block_size;
    if (!PyArg_ParseTuple(args, "KLKKLKKL(LLLL)", &qkv, &stride, &cosines, &sines, &angle_stride, &slots, &pages, &rows,
                          &heads, &kv_heads, &head_dim, &block_size))
        return NULL;
    s = (Shape){heads, kv_heads, head_dim, block_size};
    Py_BEGIN_ALLOW_THREADS
    rotate_and_write(ADDRESS(bf16, qkv), stride, ADDRESS(bf16, cosines), ADDRESS(bf16, sines), angle_stride,
                     ADDRESS(int64_t, slots), ADDRESS(bf16, pages), rows, s);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_attend(PyObject *self, PyObject *args) {
    address query, pages, tables, ranges, rows, out;
    number query_stride, out_stride, batch, width, longest;
    number heads, kv_heads, head_dim, block_size;
    double scale;
    if (!PyArg_ParseTuple(args, "KLKKLKKKLLLd(LLLL)", &query, &query_stride, &pages, &tables, &width, &ranges, &rows,
                          &out, &out_stride, &batch, &longest, &scale, &heads, &kv_heads, &head_dim, &block_size))
        return NULL;
    const Shape s = {heads, kv_heads, head_dim, block_size};
    const int64_t room = (longest + 15) / 16 * 16;
    float *scores = malloc((size_t)(heads * room) * sizeof(float));
    if (scores == NULL) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < batch; i++) {
        const int64_t row = rows ? ADDRESS(int64_t, rows)[i] : i, *range = ADDRESS(int64_t, ranges) + 2 * i;
        attend_one(ADDRESS(bf16, query) + row * query_stride, ADDRESS(bf16, pages), ADDRESS(int64_t, tables) + i * width,
                   range[0], range[1], ADDRESS(bf16, out) + row * out_stride, scores, room, (float)scale, s);
    }
    Py_END_ALLOW_THREADS
    free(scores);
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
#endif

static PyMethodDef methods[] = {
    {"is_supported", py_is_supported, METH_NOARGS, "Whether this CPU has what the other functions use."},
#ifdef HAS_KERNELS
    {"rms_norm", py_rms_norm, METH_VARARGS, NULL},
    {"rotate_and_write", py_rotate_and_write, METH_VARARGS, NULL},
    {"attend", py_attend, METH_VARARGS, NULL},
    {"gate", py_gate, METH_VARARGS, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_cpu_kernels",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__cpu_kernels(void) { return PyModule_Create(&module); }
