// DeepSpeed's CPU optimizers hold Python's global interpreter lock for a whole update (0.19.8: no gil_scoped_release in
// csrc/adam/cpu_adam.cpp), which starves the thread that feeds the device. These are the same functions, linked from
// the library that DeepSpeed built, bound once more so that the lock is free while they run.
// Not <torch/extension.h>, all of torch, which takes twice as long to compile.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

using at::Tensor;
using release = pybind11::call_guard<pybind11::gil_scoped_release>;

#if defined(HARMONY_ADAM)
int ds_adam_step(int id, size_t step, float lr, float beta1, float beta2, float epsilon, float weight_decay,
                 bool bias_correction, Tensor& param, Tensor& grad, Tensor& exp_avg, Tensor& exp_avg_sq);

// DeepSpeed's object multiplies the powers of beta1 and beta2 up from step to step, and computes them anew after a jump to
// another step, which rounds differently: what a step does would depend on when the process began. So it is sent to
// another step first, with nothing to update, and jumps every time.
int adam_update(int id, size_t step, float lr, float beta1, float beta2, float epsilon, float weight_decay,
                bool bias_correction, Tensor& param, Tensor& grad, Tensor& exp_avg, Tensor& exp_avg_sq) {
    Tensor none[4] = {at::empty({0}, param.options()), at::empty({0}, grad.options()),
                      at::empty({0}, exp_avg.options()), at::empty({0}, exp_avg_sq.options())};
    ds_adam_step(id, step + 2, lr, beta1, beta2, epsilon, weight_decay, bias_correction, none[0], none[1], none[2],
                 none[3]);
    return ds_adam_step(id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, param, grad, exp_avg,
                        exp_avg_sq);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adam_update", &adam_update, release()); }
#elif defined(HARMONY_ADAGRAD)
int ds_adagrad_step(int id, size_t step, float lr, float epsilon, float weight_decay, Tensor& param, Tensor& grad,
                    Tensor& exp_avg_sq);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adagrad_update", &ds_adagrad_step, release()); }
#elif defined(HARMONY_LION)
int ds_lion_step(int id, size_t step, float lr, float beta1, float beta2, float weight_decay, Tensor& param,
                 Tensor& grad, Tensor& exp_avg);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("lion_update", &ds_lion_step, release()); }
#endif
