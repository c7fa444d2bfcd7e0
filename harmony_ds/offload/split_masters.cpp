// fp32 values as bf16 weights and the 16 bits below them; see split_masters.py.
//
// Loops take a value as two halves of 16 bits, so that a vector holds as many as can be. They round like torch, but for NaNs
// and ties, which are rare: a piece that may have some is gone through again.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a value comes first");

namespace {
constexpr int64_t kPiece = 512;   // values that are gone through again at once
constexpr int64_t kRun = 32'768;  // values that a thread joins, steps and splits at once, while its core's cache holds them

// Part of a parameter: `count` weights from `start` on, and the places of all ties of the parameter, in order.
struct Block {
    uint16_t* weights;
    uint16_t* low;
    const int64_t* ties;
    int64_t tie_count;
    int64_t start;
    int64_t count;

    // The first tie at or after a place.
    const int64_t* tie_from(int64_t place) const { return std::lower_bound(ties, ties + tie_count, place); }
};
using Ties = std::vector<int64_t>;

// Write the values of a run.
void join(const Block& run, uint16_t* values) {
    const uint16_t *weights = run.weights + run.start, *low = run.low + run.start;
#pragma omp simd
    for (int64_t i = 0; i < run.count; ++i) {
        values[2 * i] = low[i];
        values[2 * i + 1] = weights[i] - (low[i] >> 15);  // rounding went up wherever the low bits are at least half,
    }
    const int64_t* end = run.tie_from(run.start + run.count);
    for (const int64_t* tie = run.tie_from(run.start); tie != end; ++tie)
        ++values[2 * (*tie - run.start) + 1];  // but for ties above their weight, where it went down
}

// Write the weights that values round to (to the nearest, ties to even) and the bits below; append ties above their weight.
void split(const Block& run, const uint16_t* values, Ties& ties) {
    uint16_t *weights = run.weights + run.start, *low = run.low + run.start;
    for (int64_t begin = 0; begin < run.count; begin += kPiece) {
        const int64_t end = std::min(run.count, begin + kPiece);
        uint16_t least = 0xFFFF;
#pragma omp simd reduction(min : least)
        for (int64_t i = begin; i < end; ++i) {
            const uint16_t below = values[2 * i], above = values[2 * i + 1];
            weights[i] = above + (below >> 15);
            low[i] = below;
            const uint16_t tie = below ^ 0x8000, finite = ~above & 0x7F80;  // 0 if it may be a tie; if it is not finite
            least = std::min(least, std::min(tie, finite));
        }
        for (int64_t i = begin; least == 0 && i < end; ++i) {
            const uint16_t below = values[2 * i], above = values[2 * i + 1];
            if ((above & 0x7F80) == 0x7F80 && ((above & 0x7F) | below)) {
                weights[i] = 0x7FC0, low[i] = 0;  // torch's NaN
            } else if (below == 0x8000 && above % 2 == 0) {
                weights[i] = above;
                ties.push_back(run.start + i);
            }
        }
    }
}

// Let threads do `work` for the runs of a block, each with room for its ties, which are returned.
template <typename Work>
std::vector<Ties> in_runs(const Block& block, int threads, Work work) {
    std::vector<Ties> found((block.count + kRun - 1) / kRun);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < int64_t(found.size()); ++i) {
        Block run = block;
        run.start += i * kRun;
        run.count = std::min(kRun, block.count - i * kRun);
        work(run, found[i]);
    }
    return found;
}

thread_local Ties new_ties;

// Make `found` the ties of a block in `new_ties`, among the parameter's others. Returns how many these are.
int keep_ties(const Block& block, const std::vector<Ties>& found) {
    new_ties.assign(block.ties, block.tie_from(block.start));
    for (const Ties& ties : found) new_ties.insert(new_ties.end(), ties.begin(), ties.end());
    new_ties.insert(new_ties.end(), block.tie_from(block.start + block.count), block.ties + block.tie_count);
    return new_ties.size();
}

// What DeepSpeed takes as at::Tensor, which holds such a pointer and nothing else.
using Tensor = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

Tensor tensor_of(float* values, int64_t count) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), count * sizeof(float), c10::DataPtr(values, c10::kCPU));
    const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    auto tensor = Tensor::make(std::move(storage), keys, caffe2::TypeMeta::Make<float>());
    tensor->set_sizes_contiguous({count});
    return tensor;
}

// Step a block by `step`, given one of `ids` and N tensors: values, and of `others` its gradient and states. Each thread has an
// id of its own, of an object of DeepSpeed's that its steps write to. Returns how many ties the parameter has then.
template <size_t N, typename Step>
int step_runs(const Block& block, float* const* others, const int* ids, int threads, Step step) {
    return keep_ties(block, in_runs(block, threads, [&](const Block& run, Ties& ties) {
        thread_local std::vector<float> values(kRun);
        auto halves = reinterpret_cast<uint16_t*>(values.data());
        std::array<Tensor, N> tensors{tensor_of(values.data(), run.count)};
        for (size_t i = 1; i < N; ++i) tensors[i] = tensor_of(others[i - 1] + run.start - block.start, run.count);
        join(run, halves);
        step(ids[omp_get_thread_num()], tensors);
        split(run, halves, ties);
    }));
}

using Adam = int(int, size_t, float, float, float, float, float, bool, Tensor&, Tensor&, Tensor&, Tensor&);
using Lion = int(int, size_t, float, float, float, float, Tensor&, Tensor&, Tensor&);
using Adagrad = int(int, size_t, float, float, float, Tensor&, Tensor&, Tensor&);
}  // namespace

extern "C" {

void harmony_join(const Block* block, uint16_t* values) {
    in_runs(*block, omp_get_max_threads(),
            [=](const Block& run, Ties&) { join(run, values + 2 * (run.start - block->start)); });
}

// Returns how many ties the parameter has then.
int harmony_split(const Block* block, const uint16_t* values) {
    return keep_ties(*block, in_runs(*block, omp_get_max_threads(), [=](const Block& run, Ties& ties) {
        split(run, values + 2 * (run.start - block->start), ties);
    }));
}

// Write the ties of the parameter that this thread has written to last.
void harmony_ties(int64_t* places) { std::copy(new_ties.begin(), new_ties.end(), places); }

// DeepSpeed's steps; see `step_runs`.
int harmony_adam_step(const Block* block, float* const* others, const int* ids, int threads, Adam* step, size_t count,
                      float lr, float beta1, float beta2, float epsilon, float decay, bool correct) {
    auto call = [=](int id, size_t count, auto& t) {
        step(id, count, lr, beta1, beta2, epsilon, decay, correct, t[0], t[1], t[2], t[3]);
    };
    std::array<Tensor, 4> nothing;
    nothing.fill(tensor_of(nullptr, 0));
    for (int i = 0; i < threads; ++i) call(ids[i], count + 2, nothing);  // see GilFreeOp
    return step_runs<4>(*block, others, ids, threads, [=](int id, auto& t) { call(id, count, t); });
}

int harmony_lion_step(const Block* block, float* const* others, const int* ids, int threads, Lion* step, size_t count,
                      float lr, float beta1, float beta2, float decay) {
    return step_runs<3>(*block, others, ids, threads, [=](int id, auto& t) {
        step(id, count, lr, beta1, beta2, decay, t[0], t[1], t[2]);
    });
}

int harmony_adagrad_step(const Block* block, float* const* others, const int* ids, int threads, Adagrad* step,
                         size_t count, float lr, float epsilon, float decay) {
    return step_runs<3>(*block, others, ids, threads, [=](int id, auto& t) {
        step(id, count, lr, epsilon, decay, t[0], t[1], t[2]);
    });
}
}
