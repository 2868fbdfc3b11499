// BatchNorm, sum and ReLU of a training step in as few passes over memory as their definition allows.
//
// Tensors are rows of C channels, a multiple of 8, float32 or bf16; sums over a batch are in float32 within
// blocks of up to 64 rows and in double beyond. NaN goes through, as in torch.

#include "norms.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
struct bf16 {
    uint16_t bits;
};

static const Long LANES = 8;

static inline Floats load(const float *p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Floats load(const bf16 *p) {
    Halves h;
    memcpy(&h, p, sizeof h);
#if defined(__AVX2__)
    Words bits = (Words)_mm256_cvtepu16_epi32((__m128i)h);
#else
    Words bits = __builtin_convertvector(h, Words);
#endif
    return same_bits<Floats>(bits << 16);
}

static inline void store(float *p, Floats v) { memcpy(p, &v, sizeof v); }

static inline void store(bf16 *p, Floats v) {  // to the nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    Halves h = (Halves)_mm256_cvtneps_pbh((__m256)v);
#else
    Words bits = same_bits<Words>(v), nan = same_bits<Words>(v != v);
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
#endif
    memcpy(p, &h, sizeof h);
}

static inline Floats zero_unless(Ints mask, Floats v) { return same_bits<Floats>(same_bits<Ints>(v) & mask); }

static inline Floats positive(Floats v) { return zero_unless(~(v <= 0), v); }

// Rows that are worked on together: what they hold of a few tensors fits into the nearest cache.
static inline Long block_of(Long C) { return C <= 128 ? 64 : C <= 1024 ? 8192 / C : 8; }

// apply(c)(at) for each row and eight channels; what depends on channels alone stays in registers.
template <class Apply>
static void each_row(Long M, Long C, Apply apply) {
    Long block = block_of(C);
    for (Long start = 0; start < M; start += block) {
        Long stop = start + block < M ? start + block : M;
        for (Long c = 0; c < C; c += LANES) {
            auto of_channels = apply(c);
            for (Long row = start; row < stop; row++) of_channels(row * C + c);
        }
    }
}

// What add(c, start)(at, a, b) adds to two vectors over the rows of each block: take(c, start, stop, a, b).
template <class Add, class Take>
static void sum_blocks(Long M, Long C, Add add, Take take) {
    Long block = block_of(C);
    for (Long start = 0; start < M; start += block) {
        Long stop = start + block < M ? start + block : M;
        for (Long c = 0; c < C; c += LANES) {
            auto of_channels = add(c, start);
            Floats a[4] = {}, b[4] = {};  // four sums at a time: one alone waits for itself
            Long row = start;
            for (; row + 3 < stop; row += 4)
                for (Long k = 0; k < 4; k++) of_channels((row + k) * C + c, a[k], b[k]);
            for (; row < stop; row++) of_channels(row * C + c, a[0], b[0]);
            take(c, start, stop, (a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]));
        }
    }
}

// The two sums over all rows.
template <class Add>
static void sum_rows(Long M, Long C, double *first, double *second, Add add) {
    for (Long c = 0; c < C; c++) first[c] = second[c] = 0;
    sum_blocks(
        M, C, [&](Long c, Long) { return add(c); },
        [&](Long c, Long, Long, Floats a, Floats b) {
            for (Long k = 0; k < LANES; k++) first[c + k] += a[k], second[c + k] += b[k];
        });
}

// The batch's statistics to `saved` and to the running ones; without a layer, what leaves x as it is.
template <class T>
static void normalize(const T *x, Long M, Long C, const Norm &norm, Saved saved) {
    if (!norm.gamma) {
        for (Long c = 0; c < C; c++) saved.scale[c] = 1, saved.shift[c] = 0;
        return;
    }
    double means[C], squares[C];
    // Squares around a block's first row, then blocks joined by the pairwise formula of Chan, Golub and LeVeque (1983):
    // around one point for all, a channel that is constant but for that point would lose its variance.
    sum_blocks(
        M, C,
        [=](Long c, Long start) {
            Floats center = load(x + start * C + c);
            return [=](Long at, Floats &a, Floats &b) {
                Floats d = load(x + at) - center;
                a += d;
                b += d * d;
            };
        },
        [&](Long c, Long start, Long stop, Floats a, Floats b) {
            double rows = stop - start, share = rows / stop;
            Floats center = load(x + start * C + c);
            for (Long k = 0; k < LANES; k++) {
                double offset = a[k] / rows, mean = center[k] + offset, own = b[k] - offset * a[k];
                if (start == 0) means[c + k] = squares[c + k] = 0;
                double ahead = mean - means[c + k];
                means[c + k] += ahead * share;
                squares[c + k] += own + ahead * ahead * start * share;
            }
        });
    for (Long c = 0; c < C; c++) settle(c, means[c], squares[c] / M, M, norm, saved);
}

// z = relu([BatchNorm](x) [+ other])
template <class T>
static void forward(const T *x, const T *other, T *z, Long M, Long C, Norm norm, float *kept) {
    Saved saved(kept, C);
    normalize(x, M, C, norm, saved);
    each_row(M, C, [&](Long c) {
        Floats scale = load(saved.scale + c), add = load(saved.shift + c);
        return [=](Long at) {
            Floats y = load(x + at) * scale + add;
            if (other) y += load(other + at);
            store(z + at, positive(y));
        };
    });
}

// z: the forward's, null where ReLU's zeros show from x; other: where its gradient goes, or null
template <class T>
static void backward(const T *gradient, const T *z, const T *x, T *to_x, T *other, Long M, Long C, float *kept,
                     float *gamma, float *beta) {
    Saved saved(kept, C);
    float shift[C], slope[C];
    double sums[2 * C];
    auto passing = [=](Long c) {
        Floats scale = load(saved.scale + c), add = load(saved.shift + c);
        return [=](Long at) {
            Floats g = load(gradient + at);
            return zero_unless(~((z ? load(z + at) : load(x + at) * scale + add) <= 0), g);
        };
    };
    sum_rows(M, C, sums, sums + C, [=](Long c) {
        auto passed = passing(c);
        Floats mean = load(saved.mean + c);
        return [=](Long at, Floats &a, Floats &b) {
            Floats g = passed(at);
            a += g;
            b += g * (load(x + at) - mean);
        };
    });
    for (Long c = 0; c < C; c++) {
        Line rest = finish(c, M, sums[c], sums[C + c], saved, gamma, beta);
        shift[c] = rest.shift, slope[c] = rest.slope;
    }
    each_row(M, C, [&](Long c) {
        auto passed = passing(c);
        Floats mean = load(saved.mean + c), scale = load(saved.scale + c), add = load(shift + c), times = load(slope + c);
        return [=](Long at) {
            Floats g = passed(at);
            if (other) store(other + at, g);
            store(to_x + at, g * scale + (add + times * (load(x + at) - mean)));
        };
    });
}

#define OF_TYPE(T)                                                                                                     \
    void forward_##T(const T *x, const T *other, T *z, Long M, Long C, Norm *norm, float *kept) {                      \
        forward(x, other, z, M, C, *norm, kept);                                                                       \
    }                                                                                                                  \
    void backward_##T(const T *gradient, const T *z, const T *x, T *to_x, T *other, Long M, Long C, float *kept,       \
                      float *gamma, float *beta) {                                                                     \
        backward(gradient, z, x, to_x, other, M, C, kept, gamma, beta);                                                \
    }

extern "C" {
OF_TYPE(float)
OF_TYPE(bf16)
}
