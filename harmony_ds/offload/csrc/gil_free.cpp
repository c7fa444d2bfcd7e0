// DeepSpeed's CPU optimizers hold Python's global interpreter lock for a whole update (0.19.8: no gil_scoped_release in
// csrc/adam/cpu_adam.cpp), which starves the thread that feeds the device. These are the same functions, linked from
// the library that DeepSpeed built, bound once more so that the lock is free while they run.
#include <torch/extension.h>

using torch::Tensor;
using release = pybind11::call_guard<pybind11::gil_scoped_release>;

#if defined(HARMONY_ADAM)
int ds_adam_step(int id, size_t step, float lr, float beta1, float beta2, float epsilon, float weight_decay,
                 bool bias_correction, Tensor& param, Tensor& grad, Tensor& exp_avg, Tensor& exp_avg_sq);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adam_update", &ds_adam_step, release()); }
#elif defined(HARMONY_ADAGRAD)
int ds_adagrad_step(int id, size_t step, float lr, float epsilon, float weight_decay, Tensor& param, Tensor& grad,
                    Tensor& exp_avg_sq);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adagrad_update", &ds_adagrad_step, release()); }
#elif defined(HARMONY_LION)
int ds_lion_step(int id, size_t step, float lr, float beta1, float beta2, float weight_decay, Tensor& param,
                 Tensor& grad, Tensor& exp_avg);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("lion_update", &ds_lion_step, release()); }
#endif
