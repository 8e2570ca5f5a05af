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

// ---- Exponentials, as src/tensor/float.rs of the crate rankgrad computes them -----------------------------------------------------------

template <typename T> struct Limits;
template <> struct Limits<float> {
    static constexpr float shift = 12582912.0f, high = 0.6933594f, low = -2.1219444e-4f, log2_e = 1.44269504088896340736f;
    static constexpr float least = -104.0f, most = 89.0f, one = 10.0f;
    static __device__ float power(float shifted) { return __builtin_bit_cast(float, (bits(shifted) + 127u) << 23); }
    static __device__ float series(float r) {
        float s = 0.0f;
        s = s * r + 1.0f / 40320.0f;
        s = s * r + 1.0f / 5040.0f;
        s = s * r + 1.0f / 720.0f;
        s = s * r + 1.0f / 120.0f;
        s = s * r + 1.0f / 24.0f;
        s = s * r + 1.0f / 6.0f;
        return s * r + 1.0f / 2.0f;
    }
};
template <> struct Limits<double> {
    static constexpr double shift = 6755399441055744.0, high = 0.6931471803691238, low = 1.9082149292705877e-10;
    static constexpr double log2_e = 1.44269504088896340736, least = -746.0, most = 710.0, one = 22.0;
    static __device__ double power(double shifted) { return __builtin_bit_cast(double, (bits(shifted) + 1023ull) << 52); }
    static __device__ double series(double r) {
        double s = 0.0;
        s = s * r + 1.0 / 87178291200.0;
        s = s * r + 1.0 / 6227020800.0;
        s = s * r + 1.0 / 479001600.0;
        s = s * r + 1.0 / 39916800.0;
        s = s * r + 1.0 / 3628800.0;
        s = s * r + 1.0 / 362880.0;
        s = s * r + 1.0 / 40320.0;
        s = s * r + 1.0 / 5040.0;
        s = s * r + 1.0 / 720.0;
        s = s * r + 1.0 / 120.0;
        s = s * r + 1.0 / 24.0;
        s = s * r + 1.0 / 6.0;
        return s * r + 1.0 / 2.0;
    }
};

template <typename T> __device__ inline T small(T r) { return r + r * (r * Limits<T>::series(r)); }

template <typename T> __device__ inline T exponential(T x) {
    typedef Limits<T> L;
    x = x > L::most ? L::most : x;
    x = x < L::least ? L::least : x;
    T n = x * L::log2_e + L::shift - L::shift;
    T r = x - n * L::high - n * L::low;
    T first = T(0.5) * n + L::shift, half = first - L::shift;
    T second = (n - half) + L::shift;
    return (small(r) + T(1)) * L::power(first) * L::power(second);
}

template <typename T> __device__ inline T hyperbolic_tangent(T x) {
    typedef Limits<T> L;
    T y = magnitude(x);
    y = y > L::one ? L::one : y;
    y = y + y;
    T shifted = y * L::log2_e + L::shift, n = shifted - L::shift;
    T r = y - n * L::high - n * L::low;
    T scale = L::power(shifted);
    T e = scale * small(r) + (scale - T(1));
    return with_sign(e / (e + T(2)), x);
}

// ---- Element by element ----------------------------------------------------------------------------------------------------------------

// Numbered as in src/ops.rs.
enum Unary { NEG, EXP, SQRT, ABS, TANH, SIGMOID, RELU, ADD_SCALAR, SUB_SCALAR, MUL_SCALAR, DIV_SCALAR, SQUARE };

template <typename T> __device__ inline T unary_of(u32 op, T x, T c) {
    switch (op) {
    case NEG: return -x;
    case EXP: return exponential(x);
    case SQRT: return root(x);
    case ABS: return magnitude(x);
    case TANH: return hyperbolic_tangent(x);
    case SIGMOID: return T(1) / (T(1) + exponential(-x));
    case RELU: return x < T(0) ? T(0) : x;
    case ADD_SCALAR: return x + c;
    case SUB_SCALAR: return x - c;
    case MUL_SCALAR: return x * c;
    case DIV_SCALAR: return x / c;
    default: return x * x;
    }
}

// The gradient of the operand, from that of the result and what was saved: the operand for ABS and SQUARE, else the result.
template <typename T> __device__ inline T unary_slope(u32 op, T g, T s, T c) {
    switch (op) {
    case NEG: return -g;
    case EXP: return g * s;
    case SQRT: return g / (s + s);
    case ABS: return s > T(0) ? g : s < T(0) ? -g : g * T(0);
    case TANH: return g * (T(1) - s * s);
    case SIGMOID: return g * s * (T(1) - s);
    case RELU: return s <= T(0) ? T(0) : g;
    case MUL_SCALAR: return g * c;
    case DIV_SCALAR: return g / c;
    case SQUARE: return g * (s + s);
    default: return g;
    }
}

template <typename T> __device__ inline void unary(u32 op, const T *x, T *y, u64 n, T c) { EACH(i, n) store(y, i, unary_of(op, load(x, i), c)); }
KERNEL unary_f32(u32 op, const float *x, float *y, u64 n, float c) { unary(op, x, y, n, c); }
KERNEL unary_f64(u32 op, const double *x, double *y, u64 n, double c) { unary(op, x, y, n, c); }

template <typename T> __device__ inline void unary_gradient(u32 op, const T *g, const T *s, T *out, u64 n, T c) {
    EACH(i, n) store(out, i, unary_slope(op, load(g, i), load(s, i), c));
}
KERNEL unary_gradient_f32(u32 op, const float *g, const float *s, float *out, u64 n, float c) { unary_gradient(op, g, s, out, n, c); }
KERNEL unary_gradient_f64(u32 op, const double *g, const double *s, double *out, u64 n, double c) { unary_gradient(op, g, s, out, n, c); }

#define AXES 6
// Where the operands' elements are for each element of the result: strides of its axes, 0 where an operand is repeated.
struct Layout {
    u64 lengths[AXES], a[AXES], b[AXES];
};

enum Binary { ADD, SUB, MUL, DIV };

template <typename T> __device__ inline void binary(u32 op, const T *a, const T *b, T *out, u64 n, const Layout &layout) {
    EACH(i, n) {
        u64 rest = i, at_a = 0, at_b = 0;
        for (int axis = AXES - 1; axis >= 0; axis--) {
            u64 length = layout.lengths[axis];
            if (length == 1) continue;
            u64 place = rest % length;
            rest = rest / length;
            at_a += place * layout.a[axis];
            at_b += place * layout.b[axis];
        }
        T x = load(a, at_a), y = load(b, at_b);
        store(out, i, op == ADD ? x + y : op == SUB ? x - y : op == MUL ? x * y : x / y);
    }
}
KERNEL binary_f32(u32 op, const float *a, const float *b, float *out, u64 n, Layout layout) { binary(op, a, b, out, n, layout); }
KERNEL binary_f64(u32 op, const double *a, const double *b, double *out, u64 n, Layout layout) { binary(op, a, b, out, n, layout); }

// ---- Sums over the middle of [outer, length, inner] ------------------------------------------------------------------------------------

template <typename T> __device__ inline void sum_middle(const T *x, T *out, u64 outer, u64 length, u64 inner) {
    EACH(i, outer * inner) {
        const T *from = x + i / inner * length * inner + i % inner;
        T sum = 0;
        for (u64 k = 0; k < length; k++) sum = sum + load(from, k * inner);
        store(out, i, sum);
    }
}
KERNEL sum_middle_f32(const float *x, float *out, u64 outer, u64 length, u64 inner) { sum_middle(x, out, outer, length, inner); }
KERNEL sum_middle_f64(const double *x, double *out, u64 outer, u64 length, u64 inner) { sum_middle(x, out, outer, length, inner); }

// A block of threads a row: each adds up its share, and then they halve.
template <typename T> __device__ inline void sum_rows(const T *x, T *out, u64 length) {
    __shared__ T parts[THREADS];
    const T *row = x + block() * length;
    T sum = 0;
    for (u64 i = thread(); i < length; i += THREADS) sum = sum + load(row, i);
    parts[thread()] = sum;
    barrier();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (thread() < half) parts[thread()] = parts[thread()] + parts[thread() + half];
        barrier();
    }
    if (thread() == 0) store(out, block(), parts[0]);
}
KERNEL sum_rows_f32(const float *x, float *out, u64 length) { sum_rows(x, out, length); }
KERNEL sum_rows_f64(const double *x, double *out, u64 length) { sum_rows(x, out, length); }

// ---- Matrix products -------------------------------------------------------------------------------------------------------------------

// Rows and columns that a block of threads computes, and those of each thread; terms that are in shared memory at a time.
#define TILE 64
#define SIDE 4
#define DEPTH 16

// Unrolled, so that the sums are in registers.
#define EACH_SIDE(i) _Pragma("unroll") for (u32 i = 0; i < SIDE; i++)

// `out = a * b`, or `weights[0] * other + weights[1] * (a * b)` where there is another. Strides of rows and columns, so that a transposed operand needs
// no copy. Laid out as in src/products.rs.
template <typename T> struct Product {
    const T *a, *b, *other;
    T *out;
    u64 m, k, n, of_a[2], of_b[2];
    // The first tile of this product, counted over all products.
    u64 first;
    // Half of it is computed, and written twice.
    u64 symmetric;
    T weights[2];
};

// Terms `start` on of rows `first` on, for each term those of all rows. Threads next to each other read elements that are.
template <typename T>
__device__ inline void stage(T (&part)[DEPTH][TILE + SIDE], const T *x, u64 first, u64 rows, u64 start, u64 terms, u64 row_stride, u64 term_stride) {
    for (u32 i = thread(); i < TILE * DEPTH; i += THREADS) {
        u32 row = term_stride == 1 ? i / DEPTH : i % TILE, term = term_stride == 1 ? i % DEPTH : i / TILE;
        bool inside = first + row < rows && start + term < terms;
        part[term][row] = inside ? load(x, (first + row) * row_stride + (start + term) * term_stride) : T(0);
    }
}

// One tile. The terms of each element are added from the first to the last, as in optim::arithmetic::product of the crate rankgrad.
template <typename T> __device__ inline void multiply(const Product<T> &p, u64 tile_row, u64 tile_column) {
    __shared__ __attribute__((aligned(16))) T left[DEPTH][TILE + SIDE], right[DEPTH][TILE + SIDE];
    if (p.symmetric && tile_row > tile_column) return;
    typedef typename Wide<T>::type W;
    const u32 wide = sizeof(W) / sizeof(T);
    u32 y = thread() / (TILE / SIDE) * SIDE, x = thread() % (TILE / SIDE) * SIDE;
    u64 row = tile_row * TILE + y, column = tile_column * TILE + x;
    T sums[SIDE][SIDE] = {};
    for (u64 start = 0; start < p.k; start += DEPTH) {
        stage(left, p.a, tile_row * TILE, p.m, start, p.k, p.of_a[0], p.of_a[1]);
        stage(right, p.b, tile_column * TILE, p.n, start, p.k, p.of_b[1], p.of_b[0]);
        barrier();
        if (row < p.m && column < p.n) {
#pragma unroll 4
            for (u32 term = 0; term < DEPTH; term++) {
                const W *a = (const W *)&left[term][y], *b = (const W *)&right[term][x];
                EACH_SIDE(i) EACH_SIDE(j) sums[i][j] = sums[i][j] + a[i / wide][i % wide] * b[j / wide][j % wide];
            }
        }
        barrier();
    }
    EACH_SIDE(i) EACH_SIDE(j) {
        if (row + i < p.m && column + j < p.n) {
            u64 place = (row + i) * p.n + column + j;
            T value = p.other ? p.weights[0] * load(p.other, place) + p.weights[1] * sums[i][j] : sums[i][j];
            store(p.out, place, value);
            if (p.symmetric && tile_row < tile_column) store(p.out, (column + j) * p.n + row + i, value);
        }
    }
}
KERNEL matmul_f32(Product<float> p) { multiply(p, block_y(), block()); }
KERNEL matmul_f64(Product<double> p) { multiply(p, block_y(), block()); }

template <typename T> __device__ inline void products(const Product<T> *table, u32 count) {
    const Product<T> *at = find(table, count, block());
    Product<T> p = {load(&at->a, 0), load(&at->b, 0), load(&at->other, 0), load(&at->out, 0), load(&at->m, 0), load(&at->k, 0), load(&at->n, 0),
                    {load(at->of_a, 0), load(at->of_a, 1)}, {load(at->of_b, 0), load(at->of_b, 1)}, load(&at->first, 0), load(&at->symmetric, 0),
                    {load(at->weights, 0), load(at->weights, 1)}};
    u64 tile = block() - p.first, wide = (p.n + TILE - 1) / TILE;
    multiply(p, tile / wide, tile % wide);
}
KERNEL products_f32(const Product<float> *table, u32 count) { products(table, count); }
KERNEL products_f64(const Product<double> *table, u32 count) { products(table, count); }

// ---- Cross entropy of rows of scores ---------------------------------------------------------------------------------------------------

// For each row the sum of exp(x - largest), and the target's score less the largest. Logarithms of the sums are the host's.
template <typename T> __device__ inline void cross_entropy(const T *x, const i64 *targets, T *sums, T *scores, u64 rows, u64 classes) {
    EACH(row, rows) {
        const T *from = x + row * classes;
        T most = load(from, 0);
        for (u64 k = 1; k < classes; k++) most = maximum(load(from, k), most);
        T sum = 0;
        for (u64 k = 0; k < classes; k++) sum = sum + exponential(load(from, k) - most);
        store(sums, row, sum);
        store(scores, row, load(from, (u64)load(targets, row)) - most);
    }
}
KERNEL cross_entropy_f32(const float *x, const i64 *targets, float *sums, float *scores, u64 rows, u64 classes) {
    cross_entropy(x, targets, sums, scores, rows, classes);
}
KERNEL cross_entropy_f64(const double *x, const i64 *targets, double *sums, double *scores, u64 rows, u64 classes) {
    cross_entropy(x, targets, sums, scores, rows, classes);
}

template <typename T>
__device__ inline void cross_entropy_gradient(const T *x, const i64 *targets, const T *sums, const T *g, T *out, u64 rows, u64 classes) {
    EACH(row, rows) {
        const T *from = x + row * classes;
        T most = load(from, 0);
        for (u64 k = 1; k < classes; k++) most = maximum(load(from, k), most);
        T loss = load(g, row), scale = loss / load(sums, row);
        u64 target = (u64)load(targets, row);
        for (u64 k = 0; k < classes; k++) {
            T share = exponential(load(from, k) - most) * scale;
            store(out, row * classes + k, k == target ? share - loss : share);
        }
    }
}
KERNEL cross_entropy_gradient_f32(const float *x, const i64 *targets, const float *sums, const float *g, float *out, u64 rows, u64 classes) {
    cross_entropy_gradient(x, targets, sums, g, out, rows, classes);
}
KERNEL cross_entropy_gradient_f64(const double *x, const i64 *targets, const double *sums, const double *g, double *out, u64 rows, u64 classes) {
    cross_entropy_gradient(x, targets, sums, g, out, rows, classes);
}

// ---- Rows of a table -------------------------------------------------------------------------------------------------------------------

template <typename T> __device__ inline void gather(const T *table, const i64 *rows, T *out, u64 n, u64 width) {
    EACH(i, n) store(out, i, load(table, (u64)load(rows, i / width) * width + i % width));
}
KERNEL gather_f32(const float *table, const i64 *rows, float *out, u64 n, u64 width) { gather(table, rows, out, n, width); }
KERNEL gather_f64(const double *table, const i64 *rows, double *out, u64 n, u64 width) { gather(table, rows, out, n, width); }
