// What kernels need of CUDA's headers, for clang without them; and what several kernels share.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device, always_inline))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(n) __attribute__((launch_bounds(n)))
#define THREADS 256
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS) void

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

__device__ inline u32 thread() { return __nvvm_read_ptx_sreg_tid_x(); }
__device__ inline u64 block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
__device__ inline u64 block_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }
__device__ inline u64 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }
__device__ inline void barrier() { __syncthreads(); }

__device__ inline float root(float x) { return __nvvm_sqrt_rn_f(x); }
__device__ inline double root(double x) { return __nvvm_sqrt_rn_d(x); }
__device__ inline float magnitude(float x) { return __builtin_fabsf(x); }
__device__ inline double magnitude(double x) { return __builtin_fabs(x); }

// The larger of two numbers; NaN if either is.
template <typename T> __device__ inline T maximum(T a, T b) { return a > b || a != a ? a : b; }

// An element of memory that all threads see. Said of each access, since pointers come out of tables.
template <typename T> using Global = __attribute__((address_space(1))) T;
template <typename T> __device__ inline T load(const T *x, u64 i) { return ((const Global<T> *)x)[i]; }
template <typename T> __device__ inline void store(T *x, u64 i, T value) { ((Global<T> *)x)[i] = value; }

// As many elements as one access of 16 bytes takes.
template <typename T> struct Wide;
template <> struct Wide<float> { typedef float type __attribute__((ext_vector_type(4))); };
template <> struct Wide<double> { typedef double type __attribute__((ext_vector_type(2))); };

__device__ inline u32 bits(float x) { return __builtin_bit_cast(u32, x); }
__device__ inline u64 bits(double x) { return __builtin_bit_cast(u64, x); }
__device__ inline float with_sign(float x, float of) { return __builtin_bit_cast(float, (bits(x) & 0x7fffffffu) | (bits(of) & 0x80000000u)); }
__device__ inline double with_sign(double x, double of) {
    return __builtin_bit_cast(double, (bits(x) & 0x7fffffffffffffffull) | (bits(of) & 0x8000000000000000ull));
}

// The segment that a chunk belongs to: the last whose first chunk isn't behind it.
template <typename S> __device__ inline const S *find(const S *segments, u32 count, u64 chunk) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (load(&segments[middle].first, 0) <= chunk) low = middle;
        else high = middle;
    }
    return segments + low;
}
