// Operations on tensors.

#define EACH(i, n) for (u64 i = block() * THREADS + thread(); i < (n); i += blocks() * THREADS)

template <typename T> __device__ inline void fill(T *x, u64 n, T value) { EACH(i, n) store(x, i, value); }
KERNEL fill_f32(float *x, u64 n, float value) { fill(x, n, value); }
KERNEL fill_f64(double *x, u64 n, double value) { fill(x, n, value); }
KERNEL fill_i64(i64 *x, u64 n, i64 value) { fill(x, n, value); }

// ---- Gradients -------------------------------------------------------------------------------------------------------------------------

template <typename T> __device__ inline void add(const T *a, const T *b, T *out, u64 n) { EACH(i, n) store(out, i, load(a, i) + load(b, i)); }
KERNEL add_f32(const float *a, const float *b, float *out, u64 n) { add(a, b, out, n); }
KERNEL add_f64(const double *a, const double *b, double *out, u64 n) { add(a, b, out, n); }

template <typename T> __device__ inline void scale(const T *a, T *out, u64 n, T factor) { EACH(i, n) store(out, i, load(a, i) * factor); }
KERNEL scale_f32(const float *a, float *out, u64 n, float factor) { scale(a, out, n, factor); }
KERNEL scale_f64(const double *a, double *out, u64 n, double factor) { scale(a, out, n, factor); }

template <typename T> __device__ inline void clamp(const T *a, T *out, u64 n, T most) {
    EACH(i, n) {
        T x = load(a, i);
        store(out, i, x > most ? most : x < -most ? -most : x);
    }
}
KERNEL clamp_f32(const float *a, float *out, u64 n, float most) { clamp(a, out, n, most); }
KERNEL clamp_f64(const double *a, double *out, u64 n, double most) { clamp(a, out, n, most); }

template <typename T, typename U> __device__ inline void cast(const T *a, U *out, u64 n) { EACH(i, n) store(out, i, (U)load(a, i)); }
KERNEL cast_f32_f64(const float *a, double *out, u64 n) { cast(a, out, n); }
KERNEL cast_f64_f32(const double *a, float *out, u64 n) { cast(a, out, n); }
KERNEL cast_f32_f32(const float *a, float *out, u64 n) { cast(a, out, n); }
KERNEL cast_f64_f64(const double *a, double *out, u64 n) { cast(a, out, n); }
