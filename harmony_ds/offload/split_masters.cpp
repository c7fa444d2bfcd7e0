// fp32 values as bf16 weights and the 16 bits below them; see split_masters.py.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {
constexpr int64_t kRun = 2048;  // values that are searched for ties at once, where there are any

// Exactly halfway above an even weight: rounding to even went down, and for all other values with these low bits, up.
inline bool is_tie(uint32_t value) { return (value & 0x1FFFFu) == 0x8000u; }
}  // namespace

extern "C" {

// Write the fp32 values of `count` weights to `values`. Ties come out as the value one weight lower.
void harmony_join(const uint16_t* weights, const uint16_t* low, uint32_t* values, int64_t count) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < count; ++i)
        // Rounding went up wherever the low bits are at least half.
        values[i] = ((uint32_t(weights[i]) - (low[i] >> 15)) << 16) | low[i];
}

// Write the weights that `count` values round to (to nearest, ties to even, as torch does), and the bits below. Returns how
// many are ties; `ties`, which has room for `count`, takes their places.
int64_t harmony_split(const uint32_t* values, uint16_t* weights, uint16_t* low, int64_t count, int64_t* ties) {
    std::vector<uint32_t> has_ties((count + kRun - 1) / kRun);
#pragma omp parallel for
    for (int64_t run = 0; run < int64_t(has_ties.size()); ++run) {
        uint32_t any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = run * kRun; i < std::min(count, (run + 1) * kRun); ++i) {
            uint32_t value = values[i];
            bool nan = (value & 0x7FFFFFFFu) > 0x7F800000u;
            weights[i] = nan ? 0x7FC0u : uint16_t((value + 0x7FFFu + ((value >> 16) & 1)) >> 16);
            low[i] = nan ? 0 : uint16_t(value);
            any |= uint32_t(is_tie(value));
        }
        has_ties[run] = any;
    }
    int64_t found = 0;
    for (int64_t run = 0; run < int64_t(has_ties.size()); ++run)
        for (int64_t i = run * kRun; has_ties[run] && i < std::min(count, (run + 1) * kRun); ++i)
            if (is_tie(values[i])) ties[found++] = i;
    return found;
}
}
