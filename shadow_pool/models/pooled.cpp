// Convolution, BatchNorm, 2x2 max pooling and ReLU of a training step as one operation each way.
//
// Tensors are [channels][rows][columns][records] in float32, the records padded with zeros to a multiple of 16. So
// vectors are full whatever the number of channels, and a channel's maps are still in a cache when they are normalized.

#include "norms.h"

#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
static const Long TALL = 6, MIDDLE = 4;  // channels whose sums, four vectors each, are in registers together
#else
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(8)));
static const Long TALL = 2, MIDDLE = 2;
#endif
static const Long LANES = sizeof(Floats) / sizeof(float), WIDE = 4, OFF = 4;
#define UNROLL _Pragma("GCC unroll 8")
#if defined(__AVX512F__)
#define IN_REGISTER(v) asm("" : "+v"(v))  // or GCC loads it anew for each product
#else
#define IN_REGISTER(v)
#endif

static inline Floats load(const float *p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, Floats v) { memcpy(p, &v, sizeof v); }

static inline Ints load(const uint8_t *p) {
    Bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, Ints);
}

static inline void store(uint8_t *p, Ints v) {
    Bytes b = __builtin_convertvector(v, Bytes);
    memcpy(p, &b, sizeof b);
}

static inline Floats zero_unless(Ints mask, Floats v) { return same_bits<Floats>(same_bits<Ints>(v) & mask); }

static inline Floats where(Ints mask, Floats yes, Floats no) {
    return same_bits<Floats>((same_bits<Ints>(yes) & mask) | (same_bits<Ints>(no) & ~mask));
}

static inline Ints where(Ints mask, Long yes, Ints no) { return (mask & (int32_t)yes) | (no & ~mask); }

struct Shape {  // of a convolution: `in` and `out` channels in each of its groups
    Long records, padded, groups, in, out, height, width, kernel_h, kernel_w, pad, out_height, out_width;
    Long map() const { return height * width * padded; }
    Long out_map() const { return out_height * out_width * padded; }
    Long pooled_map() const { return (out_height / 2) * (out_width / 2) * padded; }
    Long count() const { return out_height * out_width * records; }
    Long taps() const { return kernel_h * kernel_w; }
};

static constexpr inline Long least(Long a, Long b) { return a < b ? a : b; }
static constexpr inline Long most(Long a, Long b) { return a > b ? a : b; }

// ---------------------------------------------------------------- convolutions

// Along one axis: the taps of a kernel that reach from a pixel to one of the source, and which pixels those are.
struct Taps {
    Long first, count, source, move;

    static Taps forward(Long at, Long kernel, Long size, Long pad) {
        Long first = most(0, pad - at);
        return {first, most(0, least(kernel, size + pad - at) - first), at + first - pad, 1};
    }
    static Taps backward(Long at, Long kernel, Long size, Long pad) {
        Long first = most(0, at + pad - size + 1);
        return {first, most(0, least(kernel, at + pad + 1) - first), at + pad - first, -1};
    }
};

struct Maps {  // `channels` of them, from one to the next, from one row to the next
    const float *at;
    Long channels, map, row, padded;
};

// Weights of a group as a sum over its source's channels sees them: from one target to the next, from one channel.
struct Weights {
    const float *at;
    Long target, channel, width;
};

// A row of TARGETS maps, VECTORS vectors a pixel.
template <Long TARGETS, Long VECTORS>
static void convolve_row(Maps source, Weights weights, Taps v, const Taps *xs, Long width, float *target, Long map) {
    for (Long x = 0; x < width; x++, target += source.padded) {
        Taps h = xs[x];
        Floats sums[TARGETS][VECTORS] = {};
        for (Long c = 0; c < source.channels; c++)
            for (Long i = 0; i < v.count; i++) {
                Long row = v.source + i * v.move, kernel_row = v.first + i;
                const float *from = source.at + c * source.map + row * source.row + h.source * source.padded;
                const float *by = weights.at + c * weights.channel + kernel_row * weights.width + h.first;
                for (Long j = 0; j < h.count; j++, from += h.move * source.padded, by++) {
                    Floats values[VECTORS];
                    UNROLL for (Long k = 0; k < VECTORS; k++) values[k] = load(from + k * LANES);
                    UNROLL for (Long t = 0; t < TARGETS; t++) {
                        float weight = by[t * weights.target];
                        UNROLL for (Long k = 0; k < VECTORS; k++) sums[t][k] += values[k] * weight;
                    }
                }
            }
        UNROLL for (Long t = 0; t < TARGETS; t++)
            UNROLL for (Long k = 0; k < VECTORS; k++) store(target + t * map + k * LANES, sums[t][k]);
    }
}

template <Long TARGETS>
static void convolve_records(Maps source, Weights weights, Taps v, const Taps *xs, Long width, float *target, Long map) {
    Long n = 0;
    for (; n + WIDE * LANES <= source.padded; n += WIDE * LANES, source.at += WIDE * LANES)
        convolve_row<TARGETS, WIDE>(source, weights, v, xs, width, target + n, map);
    for (; n < source.padded; n += LANES, source.at += LANES)
        convolve_row<TARGETS, 1>(source, weights, v, xs, width, target + n, map);
}

// All `targets` maps: row by row, since rows of the source stay in a cache meanwhile.
static void convolve(Maps source, Weights weights, const Taps *ys, Long height, const Taps *xs, Long width,
                     float *target, Long targets) {
    Long row = width * source.padded, map = height * row, each = weights.target;
    for (Long y = 0; y < height; y++, target += row) {
        Long t = 0;
        auto some = [&](Long count, auto records) {
            for (; t + count <= targets; t += count)
                records(source, Weights{weights.at + t * each, each, weights.channel, weights.width}, ys[y], xs, width,
                        target + t * map, map);
        };
        some(TALL, convolve_records<TALL>);
        some(MIDDLE, convolve_records<MIDDLE>);
        some(2, convolve_records<2>);
        some(1, convolve_records<1>);
    }
}

static void convolve_forward(const float *x, const float *weight, float *y, const Shape &s) {
    Taps ys[s.out_height], xs[s.out_width];
    for (Long at = 0; at < s.out_height; at++) ys[at] = Taps::forward(at, s.kernel_h, s.height, s.pad);
    for (Long at = 0; at < s.out_width; at++) xs[at] = Taps::forward(at, s.kernel_w, s.width, s.pad);
    convolve({x, s.in, s.map(), s.width * s.padded, s.padded}, {weight, s.in * s.taps(), s.taps(), s.kernel_w}, ys,
             s.out_height, xs, s.out_width, y, s.out);
}

static void convolve_backward(const float *gradient, const float *weight, float *to_x, const Shape &s) {
    Taps ys[s.height], xs[s.width];
    for (Long at = 0; at < s.height; at++) ys[at] = Taps::backward(at, s.kernel_h, s.out_height, s.pad);
    for (Long at = 0; at < s.width; at++) xs[at] = Taps::backward(at, s.kernel_w, s.out_width, s.pad);
    convolve({gradient, s.out, s.out_map(), s.out_width * s.padded, s.padded},
             {weight, s.taps(), s.in * s.taps(), s.kernel_w}, ys, s.height, xs, s.width, to_x, s.in);
}

// to[t][j] += the products of map t of the gradient and the source shifted by j pixels, over a row of `length` values.
template <Long TARGETS, Long TAPS>
static void multiply(const float *source, const float *gradient, Long padded, Long map, Long length, Floats *to,
                     Long stride) {
    Floats sums[TARGETS][TAPS] = {};
    for (Long n = 0; n < length; n += LANES) {
        Floats own[TARGETS];
        UNROLL for (Long t = 0; t < TARGETS; t++) {
            own[t] = load(gradient + t * map + n);
            IN_REGISTER(own[t]);
        }
        UNROLL for (Long j = 0; j < TAPS; j++) {
            Floats value = load(source + j * padded + n);
            IN_REGISTER(value);
            UNROLL for (Long t = 0; t < TARGETS; t++) sums[t][j] += own[t] * value;
        }
    }
    UNROLL for (Long t = 0; t < TARGETS; t++) UNROLL for (Long j = 0; j < TAPS; j++) to[t * stride + j] += sums[t][j];
}

// The gradient of the weights of TARGETS maps; rows of the source have zeros around them.
template <Long TARGETS>
static void weigh(Maps source, const float *gradient, float *to_weight, Floats *sums, const Shape &s) {
    Long each = s.in * s.taps(), count = TARGETS * each, length = s.out_width * s.padded;
    for (Long k = 0; k < count; k++) sums[k] = Floats{};
    for (Long y = 0; y < s.out_height; y++, gradient += length) {
        Taps v = Taps::forward(y, s.kernel_h, s.height, s.pad);
        for (Long c = 0; c < s.in; c++)
            for (Long i = 0; i < v.count; i++) {
                const float *row = source.at + c * source.map + (v.source + i) * source.row;
                Floats *to = sums + (c * s.kernel_h + v.first + i) * s.kernel_w;
                Long j = 0;
                auto some = [&](Long taps, auto multiply_taps) {
                    for (; j + taps <= s.kernel_w; j += taps)
                        multiply_taps(row + j * s.padded, gradient, s.padded, s.out_map(), length, to + j, each);
                };
                some(5, multiply<TARGETS, 5>);
                some(3, multiply<TARGETS, 3>);
                some(1, multiply<TARGETS, 1>);
            }
    }
    for (Long k = 0; k < count; k++) {
        to_weight[k] = 0;
        for (Long lane = 0; lane < LANES; lane++) to_weight[k] += sums[k][lane];
    }
}

// x with `pad` columns of zeros on both sides of its rows, in `wide`.
static Maps widened(const float *x, float *wide, const Shape &s) {
    Long row = s.width * s.padded, border = s.pad * s.padded, wide_row = row + 2 * border;
    if (!s.pad) return {x, s.in, s.map(), row, s.padded};
    for (Long r = 0; r < s.in * s.height; r++, x += row) {
        float *to = wide + r * wide_row;
        memset(to, 0, border * sizeof(float));
        memcpy(to + border, x, row * sizeof(float));
        memset(to + border + row, 0, border * sizeof(float));
    }
    return {wide, s.in, s.height * wide_row, wide_row, s.padded};
}

static void convolve_weights(const float *x, const float *gradient, float *to_weight, float *wide, float *sums,
                             const Shape &s) {
    Maps source = widened(x, wide, s);
    Long t = 0;
    auto some = [&](Long count, auto weigh_some) {
        for (; t + count <= s.out; t += count)
            weigh_some(source, gradient + t * s.out_map(), to_weight + t * s.in * s.taps(), (Floats *)sums, s);
    };
    if (s.kernel_w < 5) some(TALL, weigh<TALL>);  // with five taps the sums would not fit into registers
    some(MIDDLE, weigh<MIDDLE>);
    some(2, weigh<2>);
    some(1, weigh<1>);
}

// ---------------------------------------------------------------- BatchNorm, pooling, ReLU

static inline void gather(Floats &lanes, double *sum) {
    for (Long lane = 0; lane < LANES; lane++) *sum += lanes[lane];
    lanes = Floats{};
}

// The two sums of what add(at, n)(a, b) adds, over a map; n is the first record of a vector.
template <class Add>
static void sum_map(const Shape &s, double *first, double *second, Add add) {
    *first = *second = 0;
    Floats a[2] = {}, b[2] = {};  // two sums at a time: one alone waits for itself
    for (Long y = 0; y < s.out_height; y++) {
        Long x = 0, at = y * s.out_width * s.padded;
        for (; x + 1 < s.out_width; x += 2, at += 2 * s.padded)
            for (Long n = 0; n < s.padded; n += LANES) add(at + n, n, a[0], b[0]), add(at + s.padded + n, n, a[1], b[1]);
        for (; x < s.out_width; x++, at += s.padded)
            for (Long n = 0; n < s.padded; n += LANES) add(at + n, n, a[0], b[0]);
        for (Long k = 0; k < 2; k++) gather(a[k], first), gather(b[k], second);
    }
}

static void normalize(const float *y, Long c, const float *valid, const Shape &s, const Norm &norm, Saved saved) {
    double sum, squares, count = s.count();
    sum_map(s, &sum, &squares, [=](Long at, Long, Floats &a, Floats &) { a += load(y + at); });
    float center = sum / count;
    sum_map(s, &sum, &squares, [=](Long at, Long n, Floats &a, Floats &b) {
        Floats d = (load(y + at) - center) * load(valid + n);
        a += d;
        b += d * d;
    });
    settle(c, center + sum / count, (squares - sum * sum / count) / count, count, norm, saved);
}

struct Corners {
    Long at[4];
};

// apply(corners, to, n) for the 2x2 squares of rows 2 i and 2 i + 1; what is left over at odd sizes belongs to none.
template <class Apply>
static void each_square(Long i, const Shape &s, Apply apply) {
    Long row = s.out_width * s.padded;
    for (Long j = 0; j < s.out_width / 2; j++)
        for (Long n = 0; n < s.padded; n += LANES) {
            Long at = 2 * i * row + 2 * j * s.padded + n;
            apply(Corners{{at, at + s.padded, at + row, at + row + s.padded}},
                  (i * (s.out_width / 2) + j) * s.padded + n, n);
        }
}

// z = relu(largest of each square of scale * y + shift); which: where it was, OFF for none
static void pool(const float *y, float *z, uint8_t *which, float scale, float shift, const float *valid,
                 const Shape &s) {
    for (Long i = 0; i < s.out_height / 2; i++)
        each_square(i, s, [=](Corners corners, Long to, Long n) {
            Floats best = load(y + corners.at[0]) * scale + shift;
            Ints from = {};
            for (Long k = 1; k < 4; k++) {
                Floats t = load(y + corners.at[k]) * scale + shift;
                Ints better = (t > best) | (t != t);
                best = where(better, t, best);
                from = where(better, k, from);
            }
            Ints off = best <= 0;
            store(z + to, zero_unless(~off, best) * load(valid + n));
            store(which + to, where(off, OFF, from));
        });
}

// From the gradient of a channel's z that of its y, of gamma and beta; y is null where there is no BatchNorm.
static void pool_backward(const float *gradient, const uint8_t *which, const float *y, float *to_y, Long c,
                          const float *valid, const Shape &s, Saved saved, float *gamma, float *beta) {
    float mean = y ? saved.mean[c] : 0, scale = saved.scale[c];
    double sum = 0, product = 0;
    for (Long i = 0; i < s.out_height / 2; i++) {
        Floats a = {}, b = {};
        each_square(i, s, [&](Corners corners, Long from, Long) {
            Ints chosen = load(which + from);
            Floats g = zero_unless(chosen < (int32_t)OFF, load(gradient + from));
            a += g;
            if (!y) return;
            Floats largest = load(y + corners.at[0]);
            for (Long k = 1; k < 4; k++) largest = where(chosen == (int32_t)k, load(y + corners.at[k]), largest);
            b += g * (largest - mean);
        });
        gather(a, &sum), gather(b, &product);
    }
    Line rest = {0, 0};
    if (y)
        rest = finish(c, s.count(), sum, product, saved, gamma, beta);
    else
        beta[c] = sum;
    auto besides = [=](Long at) { return y ? rest.shift + rest.slope * (load(y + at) - mean) : Floats{}; };
    for (Long i = 0; i < s.out_height / 2; i++)
        each_square(i, s, [=](Corners corners, Long from, Long n) {
            Floats g = load(gradient + from) * scale, keep = load(valid + n);
            Ints chosen = load(which + from);
            for (Long k = 0; k < 4; k++) {
                Floats own = zero_unless(chosen == (int32_t)k, g);
                store(to_y + corners.at[k], (own + besides(corners.at[k])) * keep);
            }
        });
    for (Long y_at = 0; y_at < s.out_height; y_at++)
        for (Long x = y_at < s.out_height / 2 * 2 ? s.out_width / 2 * 2 : 0; x < s.out_width; x++)
            for (Long n = 0, at = (y_at * s.out_width + x) * s.padded; n < s.padded; n += LANES)
                store(to_y + at + n, besides(at + n) * load(valid + n));
}

// ---------------------------------------------------------------- all of it, group by group

static void mark_valid(float *valid, const Shape &s) {
    for (Long n = 0; n < s.padded; n++) valid[n] = n < s.records;
}

extern "C" {

// Without vectors of eight and fused multiplications torch, which brings its own, is many times as fast.
extern const long pooled_is_fast;
#if defined(__AVX2__) && defined(__FMA__)
const long pooled_is_fast = 1;
#else
const long pooled_is_fast = 0;
#endif

// z = relu(2x2 maxima of [BatchNorm](convolution of x)). Without BatchNorm norm->beta is the convolution's bias, or null,
// and y has room for one group. which: where maxima were, OFF for none.
void pooled_forward_float(const float *x, const float *weight, float *y, float *z, uint8_t *which, Shape *shape,
                          Norm *norm, float *kept) {
    const Shape &s = *shape;
    float valid[s.padded];
    mark_valid(valid, s);
    Saved saved(kept, s.groups * s.out);
    for (Long g = 0; g < s.groups; g++) {
        float *own = norm->gamma ? y + g * s.out * s.out_map() : y;
        convolve_forward(x + g * s.in * s.map(), weight + g * s.out * s.in * s.taps(), own, s);
        for (Long c = g * s.out; c < (g + 1) * s.out; c++, own += s.out_map()) {
            saved.scale[c] = 1, saved.shift[c] = norm->beta ? norm->beta[c] : 0;
            if (norm->gamma) normalize(own, c, valid, s, *norm, saved);
            pool(own, z + c * s.pooled_map(), which + c * s.pooled_map(), saved.scale[c], saved.shift[c], valid, s);
        }
    }
}

// y is null where there is no BatchNorm, to_x where nobody asks for it. Room: to_y for the gradient of one group's
// convolution, wide for its input between zeros, sums for TALL * in * taps vectors.
void pooled_backward_float(const float *gradient, const float *x, const float *weight, const float *y,
                           const uint8_t *which, float *to_x, float *to_weight, float *to_y, float *wide, float *sums,
                           Shape *shape, float *kept, float *gamma, float *beta) {
    const Shape &s = *shape;
    float valid[s.padded];
    mark_valid(valid, s);
    Saved saved(kept, s.groups * s.out);
    for (Long g = 0; g < s.groups; g++) {
        for (Long o = 0, c = g * s.out; o < s.out; o++, c++)
            pool_backward(gradient + c * s.pooled_map(), which + c * s.pooled_map(), y ? y + c * s.out_map() : nullptr,
                          to_y + o * s.out_map(), c, valid, s, saved, gamma, beta);
        Long weights = g * s.out * s.in * s.taps(), maps = g * s.in * s.map();
        convolve_weights(x + maps, to_y, to_weight + weights, wide, sums, s);
        if (to_x) convolve_backward(to_y, weight + weights, to_x + maps, s);
    }
}
}
