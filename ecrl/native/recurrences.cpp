// Linear recurrences over time, on the rows of strided tensors of shape [rows, steps].
//
// The value that a step passes on is float64, so that float32 results do not collect rounding errors over time.
// `strides` has two strides per tensor, in the order of the arguments: the stride to the next row, and the stride to
// the next step. `varies` is true if a discount is a tensor with several values. Otherwise, each discount is one number
// for all rows and steps. `adjacent` is true if the stride to the next row is 1 in all tensors, as in time-major
// tensors. If `varies` is false, both strides of each discount are 0, and `adjacent` does not depend on them.

#include <algorithm>
#include <cstdint>

namespace {

// Rows that are computed together. Many adjacent rows fill vector registers and keep the memory access sequential. A
// few rows that are not adjacent are enough to hide the latency of the arithmetic.
constexpr int64_t kAdjacentRows = 1024, kSeparateRows = 8;

template <bool adjacent>
constexpr int64_t kRows = adjacent ? kAdjacentRows : kSeparateRows;

// The element of row `i` at one step, in a tensor whose rows are `stride` apart.
#define AT(data, stride) data[adjacent ? i : i * stride]

// Returns the product of a weight and a value, and 0 for a weight of 0, even if the value is infinite.
template <class T>
inline T weighted(T weight, T value) {
    const T product = weight * value;
    return weight == T(0) ? T(0) : product;
}

// One step of `n` rows: y = x + decay * carry * not cut, where a decay of 0 acts like a cut.
template <class T, bool adjacent, bool varies>
inline void recurrence_step(int64_t n, const int64_t* s, const T* __restrict__ x, const double* __restrict__ decay,
                            const uint8_t* __restrict__ cut, double* __restrict__ carry, T* __restrict__ y) {
    const double one_decay = *decay;
    for (int64_t i = 0; i < n; i++) {
        const double passed = weighted(varies ? AT(decay, s[2]) : one_decay, carry[i]);
        const double now = AT(x, s[0]) + (AT(cut, s[4]) ? 0.0 : passed);
        carry[i] = now;
        AT(y, s[8]) = T(now);
    }
}

template <class T, bool adjacent, bool varies>
void linear_recurrence(const T* x, const double* decay, const uint8_t* cut, const T* last, T* y, int64_t rows,
                       int64_t steps, const int64_t* s, bool reverse) {
    double carry[kRows<adjacent>];
    for (int64_t row = 0; row < rows; row += kRows<adjacent>) {
        const int64_t n = std::min(kRows<adjacent>, rows - row);
        for (int64_t i = 0; i < n; i++) carry[i] = last[(row + i) * s[6]];
        for (int64_t k = 0; k < steps; k++) {
            const int64_t t = reverse ? steps - 1 - k : k;
            recurrence_step<T, adjacent, varies>(n, s, x + row * s[0] + t * s[1], decay + row * s[2] + t * s[3],
                                                 cut + row * s[4] + t * s[5], carry, y + row * s[8] + t * s[9]);
        }
    }
}

// One step of `n` rows:
// delta     = reward + gamma * next_value * not terminated - value
// advantage = delta + decay * carry * not done
// target    = advantage + value
template <class T, bool adjacent, bool varies>
inline void gae_step(int64_t n, const int64_t* s, const T* __restrict__ reward, const T* __restrict__ value,
                     const T* __restrict__ next_value, const uint8_t* __restrict__ terminated,
                     const uint8_t* __restrict__ done, const double* __restrict__ gamma,
                     const double* __restrict__ decay, double* __restrict__ carry, T* __restrict__ advantage,
                     T* __restrict__ target) {
    const double one_gamma = *gamma, one_decay = *decay;
    for (int64_t i = 0; i < n; i++) {
        const T now = AT(value, s[2]);
        const T next = weighted(T(varies ? AT(gamma, s[10]) : one_gamma), AT(next_value, s[4]));
        const double passed = weighted(varies ? AT(decay, s[12]) : one_decay, carry[i]);
        const T delta = AT(reward, s[0]) - now + (AT(terminated, s[6]) ? T(0) : next);
        const double sum = delta + (AT(done, s[8]) ? 0.0 : passed);
        carry[i] = sum;
        AT(advantage, s[14]) = T(sum);
        AT(target, s[16]) = T(sum) + now;
    }
}

template <class T, bool adjacent, bool varies>
void gae(const T* reward, const T* value, const T* next_value, const uint8_t* terminated, const uint8_t* done,
         const double* gamma, const double* decay, T* advantage, T* target, int64_t rows, int64_t steps,
         const int64_t* s) {
    double carry[kRows<adjacent>];
    for (int64_t row = 0; row < rows; row += kRows<adjacent>) {
        const int64_t n = std::min(kRows<adjacent>, rows - row);
        std::fill_n(carry, n, 0.0);
        for (int64_t t = steps - 1; t >= 0; t--) {
            gae_step<T, adjacent, varies>(n, s, reward + row * s[0] + t * s[1], value + row * s[2] + t * s[3],
                                          next_value + row * s[4] + t * s[5], terminated + row * s[6] + t * s[7],
                                          done + row * s[8] + t * s[9], gamma + row * s[10] + t * s[11],
                                          decay + row * s[12] + t * s[13], carry, advantage + row * s[14] + t * s[15],
                                          target + row * s[16] + t * s[17]);
        }
    }
}

}  // namespace

// Defines the functions for one dtype.
#define EXPORT(T, name)                                                                                             \
    extern "C" void linear_recurrence_##name(const T* x, const double* decay, const uint8_t* cut, const T* last,    \
                                             T* y, int64_t rows, int64_t steps, const int64_t* strides,             \
                                             bool adjacent, bool varies, bool reverse) {                            \
        auto run = adjacent ? (varies ? linear_recurrence<T, true, true> : linear_recurrence<T, true, false>)       \
                            : (varies ? linear_recurrence<T, false, true> : linear_recurrence<T, false, false>);    \
        run(x, decay, cut, last, y, rows, steps, strides, reverse);                                                 \
    }                                                                                                               \
    extern "C" void gae_##name(const T* reward, const T* value, const T* next_value, const uint8_t* terminated,     \
                               const uint8_t* done, const double* gamma, const double* decay, T* advantage,         \
                               T* target, int64_t rows, int64_t steps, const int64_t* strides, bool adjacent,       \
                               bool varies) {                                                                       \
        auto run = adjacent ? (varies ? gae<T, true, true> : gae<T, true, false>)                                   \
                            : (varies ? gae<T, false, true> : gae<T, false, false>);                                \
        run(reward, value, next_value, terminated, done, gamma, decay, advantage, target, rows, steps, strides);    \
    }
EXPORT(float, float)
EXPORT(double, double)
