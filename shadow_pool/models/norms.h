// What the kernels know of a BatchNorm layer and of its statistics over a batch.

#include <cmath>
#include <cstdint>
#include <cstring>

typedef long Long;

template <class To, class From>
static inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

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

// A batch's statistics over `count` values of channel c, to `saved` and to the running ones.
static inline void settle(Long c, double mean, double var, double count, const Norm &norm, Saved saved) {
    if (var < 0) var = 0;
    double inverse = 1 / sqrt(var + norm.eps);
    saved.mean[c] = mean;
    saved.inverse[c] = inverse;
    saved.scale[c] = norm.gamma[c] * inverse;
    saved.shift[c] = norm.beta[c] - norm.gamma[c] * inverse * mean;
    double kept = 1 - norm.momentum;
    norm.running_mean[c] = kept * norm.running_mean[c] + norm.momentum * mean;
    norm.running_var[c] = kept * norm.running_var[c] + norm.momentum * var * count / (count - 1);
}

struct Line {
    float shift, slope;
};

// From the sums of a gradient and of the gradient times (x - mean): gamma's and beta's, and what x's has besides
// scale * gradient, as shift + slope * (x - mean).
static inline Line finish(Long c, double count, double sum, double product, Saved saved, float *gamma, float *beta) {
    product *= saved.inverse[c];
    beta[c] = sum;
    gamma[c] = product;
    return {float(-saved.scale[c] * sum / count), float(-saved.scale[c] * product * saved.inverse[c] / count)};
}
