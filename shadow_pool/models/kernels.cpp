// BatchNorm, sum, ReLU and 2x2 max pooling of a training step in as few passes over memory as their definition allows.
//
// Tensors are rows of C channels, a multiple of 8, float32 or bf16; sums over a batch are in float32 within
// blocks of up to 64 rows and in double beyond. NaN goes through, as in torch.

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef long Long;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(8)));
struct bf16 {
    uint16_t bits;
};

static const Long LANES = 8, OFF = 4;

template <class To, class From>
static inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

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

static inline Ints load(const uint8_t *p) {
    Bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, Ints);
}

static inline void store(uint8_t *p, Ints v) {
    Bytes b = __builtin_convertvector(v, Bytes);
    memcpy(p, &b, sizeof b);
}

static inline Floats where(Ints mask, Floats yes, Floats no) {
    return same_bits<Floats>((same_bits<Ints>(yes) & mask) | (same_bits<Ints>(no) & ~mask));
}

static inline Ints where(Ints mask, Long yes, Ints no) { return (mask & (int32_t)yes) | (no & ~mask); }

static inline Floats zero_unless(Ints mask, Floats v) { return same_bits<Floats>(same_bits<Ints>(v) & mask); }

static inline Floats positive(Floats v) { return zero_unless(~(v <= 0), v); }

// What a step's backward needs to know of its forward, C of each; BatchNorm(x) = scale * x + shift.
struct Saved {
    float *mean, *inverse, *scale, *shift;
    Saved(float *kept, Long C) : mean(kept), inverse(kept + C), scale(kept + 2 * C), shift(kept + 3 * C) {}
};

struct Norm {  // a layer; its pointers are null where there is none
    const float *gamma, *beta;
    float *running_mean, *running_var;
    double momentum, eps;
};

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
    for (Long c = 0; c < C; c++) {
        double mean = means[c], var = squares[c] < 0 ? 0 : squares[c] / M;
        double inverse = 1 / sqrt(var + norm.eps);
        saved.mean[c] = mean;
        saved.inverse[c] = inverse;
        saved.scale[c] = norm.gamma[c] * inverse;
        saved.shift[c] = norm.beta[c] - norm.gamma[c] * inverse * mean;
        norm.running_mean[c] += norm.momentum * (mean - norm.running_mean[c]);
        norm.running_var[c] += norm.momentum * (var * M / (M - 1) - norm.running_var[c]);
    }
}

// From the sums of a gradient and of the gradient times (x - mean): gamma's and beta's, and what x's has besides
// scale * gradient, as shift + slope * (x - mean).
static void finish(Long M, Long C, Saved saved, const double *sums, float *gamma, float *beta, float *shift,
                   float *slope) {
    for (Long c = 0; c < C; c++) {
        double sum = sums[c], product = sums[C + c] * saved.inverse[c];
        beta[c] = sum;
        gamma[c] = product;
        shift[c] = -saved.scale[c] * sum / M;
        slope[c] = -saved.scale[c] * product * saved.inverse[c] / M;
    }
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
    finish(M, C, saved, sums, gamma, beta, shift, slope);
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

struct Corners {
    Long at[4];
};

struct Squares {  // of 2x2 pixels in N maps of H rows and W columns; what is left over at odd sizes belongs to none
    Long N, H, W, C;
    Long count() const { return N * (H / 2) * (W / 2); }
    // apply(c)(corners, where the square's own value is)
    template <class Apply>
    void each(Apply apply) const {
        for (Long n = 0; n < N; n++)
            for (Long i = 0; i < H / 2; i++)
                for (Long c = 0; c < C; c += LANES) {
                    auto of_channels = apply(c);
                    Long upper = (n * H + 2 * i) * W * C + c, to = (n * (H / 2) + i) * (W / 2) * C + c;
                    for (Long j = 0; j < W / 2; j++, upper += 2 * C, to += C)
                        of_channels({upper, upper + C, upper + W * C, upper + W * C + C}, to);
                }
    }
    // apply(at, c)
    template <class Apply>
    void left_over(Apply apply) const {
        for (Long n = 0; n < N; n++)
            for (Long i = 0; i < H; i++)
                for (Long j = i < H / 2 * 2 ? W / 2 * 2 : 0; j < W; j++)
                    for (Long c = 0; c < C; c += LANES) apply(((n * H + i) * W + j) * C + c, c);
    }
};

// z = relu(largest of each square of [BatchNorm](x)); largest: the x that is it; which: where it was, OFF for none
template <class T>
static void pool_forward(const T *x, T *z, T *largest, uint8_t *which, Squares squares, Norm norm, float *kept) {
    Long C = squares.C;
    Saved saved(kept, C);
    normalize(x, squares.N * squares.H * squares.W, C, norm, saved);
    squares.each([&](Long c) {
        Floats scale = load(saved.scale + c), add = load(saved.shift + c);
        return [=](Corners corners, Long to) {
            Floats best = load(x + corners.at[0]), y = best * scale + add;
            Ints from = {};
            for (Long k = 1; k < 4; k++) {
                Floats value = load(x + corners.at[k]), t = value * scale + add;
                Ints better = (t > y) | (t != t);
                y = where(better, t, y);
                best = where(better, value, best);
                from = where(better, k, from);
            }
            Ints off = y <= 0;
            store(z + to, zero_unless(~off, y));
            store(largest + to, best);
            store(which + to, where(off, OFF, from));
        };
    });
}

template <class T>
static void pool_backward(const T *gradient, const T *x, const T *largest, const uint8_t *which, T *to_x,
                          Squares squares, float *kept, bool normalized, float *gamma, float *beta) {
    Long C = squares.C;
    Saved saved(kept, C);
    float shift[C], slope[C];
    double sums[2 * C];
    if (normalized) {
        sum_rows(squares.count(), C, sums, sums + C, [=](Long c) {
            Floats mean = load(saved.mean + c);
            return [=](Long at, Floats &a, Floats &b) {
                Floats g = zero_unless(load(which + at) < (int32_t)OFF, load(gradient + at));
                a += g;
                b += g * (load(largest + at) - mean);
            };
        });
        finish(squares.N * squares.H * squares.W, C, saved, sums, gamma, beta, shift, slope);
    }
    auto rest = [&](Long c) {
        Floats mean = {}, add = {}, times = {};
        if (normalized) mean = load(saved.mean + c), add = load(shift + c), times = load(slope + c);
        return [=](Long at) { return normalized ? add + times * (load(x + at) - mean) : Floats{}; };
    };
    squares.each([&](Long c) {
        auto besides = rest(c);
        Floats scale = load(saved.scale + c);
        return [=](Corners corners, Long from) {
            Floats g = load(gradient + from) * scale;
            Ints chosen = load(which + from);
            for (Long k = 0; k < 4; k++)
                store(to_x + corners.at[k], zero_unless(chosen == (int32_t)k, g) + besides(corners.at[k]));
        };
    });
    squares.left_over([&](Long at, Long c) { store(to_x + at, rest(c)(at)); });
}

#define OF_TYPE(T)                                                                                                     \
    void forward_##T(const T *x, const T *other, T *z, Long M, Long C, Norm *norm, float *kept) {                      \
        forward(x, other, z, M, C, *norm, kept);                                                                       \
    }                                                                                                                  \
    void backward_##T(const T *gradient, const T *z, const T *x, T *to_x, T *other, Long M, Long C, float *kept,       \
                      float *gamma, float *beta) {                                                                     \
        backward(gradient, z, x, to_x, other, M, C, kept, gamma, beta);                                                \
    }                                                                                                                  \
    void pool_forward_##T(const T *x, T *z, T *largest, uint8_t *which, Squares *squares, Norm *norm, float *kept) {   \
        pool_forward(x, z, largest, which, *squares, *norm, kept);                                                     \
    }                                                                                                                  \
    void pool_backward_##T(const T *gradient, const T *x, const T *largest, const uint8_t *which, T *to_x,             \
                           Squares *squares, float *kept, int normalized, float *gamma, float *beta) {                 \
        pool_backward(gradient, x, largest, which, to_x, *squares, kept, normalized, gamma, beta);                     \
    }

extern "C" {
OF_TYPE(float)
OF_TYPE(bf16)
}
