// Operations on tensors.

#define EACH(i, n) for (u64 i = block() * THREADS + thread(); i < (n); i += blocks() * THREADS)

template <typename T> __device__ inline void fill(T *x, u64 n, T value) { EACH(i, n) store(x, i, value); }
KERNEL fill_f32(float *x, u64 n, float value) { fill(x, n, value); }
KERNEL fill_f64(double *x, u64 n, double value) { fill(x, n, value); }
KERNEL fill_i64(i64 *x, u64 n, i64 value) { fill(x, n, value); }
