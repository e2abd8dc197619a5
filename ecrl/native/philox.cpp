// Philox4x32-10 (Salmon et al. 2011): ten rounds on a 64-bit key and a 128-bit counter, for strided int64 tensors.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kLanes = 16;  // elements that are computed together, in vector registers

// Computes both 64-bit halves of the result for `kLanes` elements.
void ten_rounds(const int64_t* keys, const int64_t* lows, const int64_t* highs, int64_t* first, int64_t* last) {
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes], k0[kLanes], k1[kLanes];
    for (int i = 0; i < kLanes; i++) {
        c0[i] = uint32_t(lows[i]), c1[i] = uint32_t(uint64_t(lows[i]) >> 32);
        c2[i] = uint32_t(highs[i]), c3[i] = uint32_t(uint64_t(highs[i]) >> 32);
        k0[i] = uint32_t(keys[i]), k1[i] = uint32_t(uint64_t(keys[i]) >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < kLanes; i++) {
            const uint64_t a = uint64_t(c0[i]) * 0xD2511F53u, b = uint64_t(c2[i]) * 0xCD9E8D57u;
            c0[i] = uint32_t(b >> 32) ^ c1[i] ^ k0[i], c1[i] = uint32_t(b);
            c2[i] = uint32_t(a >> 32) ^ c3[i] ^ k1[i], c3[i] = uint32_t(a);
            k0[i] += 0x9E3779B9u, k1[i] += 0xBB67AE85u;
        }
    }
    for (int i = 0; i < kLanes; i++) {
        first[i] = int64_t(c0[i] | uint64_t(c1[i]) << 32);
        last[i] = int64_t(c2[i] | uint64_t(c3[i]) << 32);
    }
}

}  // namespace

// `strides` has two strides for each of key, low and high: the stride to the next row, and the stride to the next
// column. Results are contiguous.
extern "C" void philox(const int64_t* key, const int64_t* low, const int64_t* high, int64_t* first, int64_t* last,
                       int64_t rows, int64_t columns, const int64_t* strides) {
    int64_t keys[kLanes], lows[kLanes], highs[kLanes], ends[2][kLanes];
    const int64_t size = rows * columns;
    int64_t row = 0, column = 0;
    for (int64_t start = 0; start < size; start += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, size - start);
        for (int64_t i = 0; i < n; i++) {
            keys[i] = key[row * strides[0] + column * strides[1]];
            lows[i] = low[row * strides[2] + column * strides[3]];
            highs[i] = high[row * strides[4] + column * strides[5]];
            if (++column == columns) column = 0, row++;
        }
        for (int64_t i = n; i < kLanes; i++) keys[i] = lows[i] = highs[i] = 0;
        if (n == kLanes) {
            ten_rounds(keys, lows, highs, first + start, last + start);
        } else {
            ten_rounds(keys, lows, highs, ends[0], ends[1]);
            std::copy_n(ends[0], n, first + start);
            std::copy_n(ends[1], n, last + start);
        }
    }
}
