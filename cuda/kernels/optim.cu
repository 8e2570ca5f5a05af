// Updates of parameters, and sums over them: the arithmetic of src/optim of the crate rankgrad, in the same order, without fused
// multiply-add. Coefficients come from there too, so both give the same bits.

// ---- Updates ---------------------------------------------------------------------------------------------------------------------------

// One parameter in a launch over many: its elements, and the numbers of its step. Laid out as in src/rules.rs.
template <typename T> struct Segment {
    const T *p;
    T *out;
    const T *g;
    T *a, *b, *c;
    // Numbers of the rows that `g` has, of `width` elements each; null for a gradient of all elements.
    const i64 *rows;
    u64 width;
    // Elements of `g`.
    u64 length;
    // The first chunk of this segment, counted over all segments.
    u64 first;
    u64 flags;
    T k[12];
};

#define DECAY 1
#define FIRST 2
#define AHEAD 4
#define RECTIFIED 8

// Elements that a block updates.
#define CHUNK 16384

// The number of a segment's step, and the gradient to descend along; k[0] turns it round, k[1] is the weight of an L2 penalty.
template <typename T> struct Step {
    T k[12];
    u64 flags;
    __device__ T gradient(T g, T p) const {
        g = k[0] * g;
        return flags & DECAY ? g + k[1] * p : g;
    }
};

// From a (weight 0) to b (weight 1), from the nearer end.
template <typename T> __device__ inline T lerp(T a, T b, T weight) {
    return magnitude(weight) < T(0.5) ? a + weight * (b - a) : b - (b - a) * (T(1) - weight);
}

template <typename T> __device__ inline T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }

struct Sgd {
    static const int arrays = 0;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &, T &, T &) { return p - s.k[2] * s.gradient(g, p); }
};

struct Momentum {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &b, T &, T &) {
        g = s.gradient(g, p);
        b = s.flags & FIRST ? g : b * s.k[3] + s.k[4] * g;
        return p - s.k[2] * (s.flags & AHEAD ? g + s.k[3] * b : b);
    }
};

struct Adagrad {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &sum, T &, T &) {
        g = s.gradient(g, p);
        sum = sum + g * g;
        return p + s.k[2] * g / (root(sum) + s.k[3]);
    }
};

// k: 2 rest1, 3 beta2, 4 rest2, 5 step size, 6 correction, 7 eps, 8 shrink.
template <typename T> __device__ inline T average(const Step<T> &s, T p, T g, T &m, T &v) {
    g = s.gradient(g, p);
    m = lerp(m, g, s.k[2]);
    v = v * s.k[3] + s.k[4] * g * g;
    return p * s.k[8];
}

struct Adam {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &) {
        p = average(s, p, g, m, v);
        return p + s.k[5] * m / (root(v) / s.k[6] + s.k[7]);
    }
};

struct Amsgrad {
    static const int arrays = 3;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &largest) {
        p = average(s, p, g, m, v);
        largest = maximum(largest, v);
        return p + s.k[5] * m / (root(largest) / s.k[6] + s.k[7]);
    }
};

struct Adamax {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &norm, T &) {
        g = s.gradient(g, p);
        m = lerp(m, g, s.k[2]);
        norm = maximum(norm * s.k[3], magnitude(g) + s.k[4]);
        return p + s.k[5] * m / norm;
    }
};

struct Adadelta {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &square, T &moved, T &) {
        g = s.gradient(g, p);
        square = square * s.k[2] + s.k[3] * g * g;
        T delta = root(moved + s.k[5]) / root(square + s.k[5]) * g;
        moved = moved * s.k[2] + s.k[3] * delta * delta;
        return p - s.k[4] * delta;
    }
};

struct Asgd {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &ax, T &, T &) {
        p = p * s.k[2] + s.k[3] * s.gradient(g, p);
        ax = s.flags & FIRST ? p : ax + (p - ax) * s.k[4];
        return p;
    }
};

struct Lion {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &, T &) {
        g = s.gradient(g, p);
        T direction = sign(lerp(m, g, s.k[4]));
        m = lerp(m, g, s.k[5]);
        return p * s.k[2] - s.k[3] * direction;
    }
};

struct NAdam {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &) {
        g = s.gradient(g, p);
        m = lerp(m, g, s.k[2]);
        v = v * s.k[3] + s.k[4] * g * g;
        T r = root(v / s.k[6]) + s.k[7];
        return (p * s.k[8] + s.k[5] * g / r) + s.k[9] * m / r;
    }
};

struct RAdam {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &) {
        g = s.gradient(g, p);
        m = lerp(m, g, s.k[2]);
        v = v * s.k[3] + s.k[4] * g * g;
        T step = m / s.k[6] * s.k[5];
        if (s.flags & RECTIFIED) step = step * (s.k[9] / (root(v) + s.k[7])) * s.k[10];
        return p * s.k[8] - step;
    }
};

// k: 2 alpha, 3 rest, 4 lr, 5 eps, 6 momentum.
struct RmsProp {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &square, T &, T &) {
        g = s.gradient(g, p);
        square = square * s.k[2] + s.k[3] * g * g;
        return p - s.k[4] * g / (root(square) + s.k[5]);
    }
};

struct RmsPropCentered {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &square, T &mean, T &) {
        g = s.gradient(g, p);
        square = square * s.k[2] + s.k[3] * g * g;
        mean = lerp(mean, g, s.k[3]);
        return p - s.k[4] * g / (root(square - mean * mean) + s.k[5]);
    }
};

struct RmsPropMomentum {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &square, T &b, T &) {
        g = s.gradient(g, p);
        square = square * s.k[2] + s.k[3] * g * g;
        b = b * s.k[6] + g / (root(square) + s.k[5]);
        return p - s.k[4] * b;
    }
};

struct RmsPropCenteredMomentum {
    static const int arrays = 3;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &square, T &mean, T &b) {
        g = s.gradient(g, p);
        square = square * s.k[2] + s.k[3] * g * g;
        mean = lerp(mean, g, s.k[3]);
        b = b * s.k[6] + g / (root(square - mean * mean) + s.k[5]);
        return p - s.k[4] * b;
    }
};

struct Rprop {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &previous, T &size, T &) {
        g = s.gradient(g, p);
        T turn = g * previous;
        T factor = turn > T(0) ? s.k[3] : turn < T(0) ? s.k[2] : T(1);
        T x = size * factor;
        x = x < s.k[4] ? s.k[4] : x;
        size = x > s.k[5] ? s.k[5] : x;
        if (turn < T(0)) g = T(0);
        previous = g;
        return p - sign(g) * size;
    }
};

struct SparseAdam {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &) {
        g = s.gradient(g, p);
        m = (g - m) * s.k[2] + m;
        v = (g * g - v) * s.k[3] + v;
        return p + s.k[4] * (m / (root(v) + s.k[5]));
    }
};

// Moves the averages, and gives the direction. k: 2 to 4 the averages' weights, 5 step size, 6 and 9 corrections, 7 eps, 8 decay.
template <typename T> __device__ inline T lamb_direction(const Step<T> &s, T p, T g, T &m, T &v) {
    g = s.gradient(g, p);
    m = lerp(m, g, s.k[2]);
    v = v * s.k[3] + s.k[4] * g * g;
    return m / s.k[6] / (root(v / s.k[9]) + s.k[7]) + s.k[8] * p;
}

// When norms are known.
struct Lamb {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &m, T &v, T &) {
        return p + s.k[5] * lamb_direction(s, p, g, m, v);
    }
};

// What Muon's iterations begin with, before the division by a norm; `p` is the average of gradients, which stays as it is. k: 2 rest, 3 momentum.
struct MuonDirection {
    static const int arrays = 0;
    template <typename T> static __device__ T element(const Step<T> &s, T b, T g, T &, T &, T &) {
        g = s.k[0] * g;
        b = lerp(b, g, s.k[2]);
        return s.flags & AHEAD ? lerp(g, b, s.k[3]) : b;
    }
};
struct Divide {
    static const int arrays = 0;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T, T &, T &, T &) { return p / s.k[2]; }
};
// When iterations are done: `o` is what they came to. k: 4 shrink, 5 step size.
struct Muon {
    static const int arrays = 2;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &b, T &o, T &) {
        b = lerp(b, s.k[0] * g, s.k[2]);
        return p * s.k[4] + s.k[5] * o;
    }
};

template <typename T> __device__ inline bool is_aligned(const T *pointer) { return ((u64)pointer & 15) == 0; }

// One pass over parameters, gradients and state, 16 bytes at a time where they lie so.
template <typename R, typename T> __device__ inline void update(const Segment<T> *segments, u32 count) {
    typedef typename Wide<T>::type W;
    const u64 wide = sizeof(W) / sizeof(T);
    const Segment<T> *segment = find(segments, count, block());
    Step<T> s;
    for (int i = 0; i < 12; i++) s.k[i] = load(segment->k, i);
    s.flags = load(&segment->flags, 0);
    const T *p = load(&segment->p, 0), *g = load(&segment->g, 0);
    T *out = load(&segment->out, 0), *a = load(&segment->a, 0), *b = load(&segment->b, 0), *c = load(&segment->c, 0);
    const i64 *rows = load(&segment->rows, 0);
    u64 width = load(&segment->width, 0), length = load(&segment->length, 0);
    u64 start = (block() - load(&segment->first, 0)) * CHUNK;
    u64 end = start + CHUNK < length ? start + CHUNK : length;
    bool aligned = is_aligned(p) && is_aligned(out) && is_aligned(g) && (R::arrays < 1 || is_aligned(a)) && (R::arrays < 2 || is_aligned(b)) &&
                   (R::arrays < 3 || is_aligned(c)) && (!rows || width % wide == 0);
    u64 whole = aligned ? end - (end - start) % wide : start;
    for (u64 i = start + thread() * wide; i < whole; i += THREADS * wide) {
        u64 place = (rows ? (u64)load(rows, i / width) * width + i % width : i) / wide;
        W P = load((const W *)p, place), G = load((const W *)g, i / wide), A = {}, B = {}, C = {};
        if (R::arrays > 0) A = load((const W *)a, place);
        if (R::arrays > 1) B = load((const W *)b, place);
        if (R::arrays > 2) C = load((const W *)c, place);
        for (u64 k = 0; k < wide; k++) {
            T x = A[k], y = B[k], z = C[k];
            P[k] = R::template element<T>(s, P[k], G[k], x, y, z);
            A[k] = x, B[k] = y, C[k] = z;
        }
        store((W *)out, place, P);
        if (R::arrays > 0) store((W *)a, place, A);
        if (R::arrays > 1) store((W *)b, place, B);
        if (R::arrays > 2) store((W *)c, place, C);
    }
    for (u64 i = whole + thread(); i < end; i += THREADS) {
        u64 place = rows ? (u64)load(rows, i / width) * width + i % width : i;
        T x = 0, y = 0, z = 0;
        if (R::arrays > 0) x = load(a, place);
        if (R::arrays > 1) y = load(b, place);
        if (R::arrays > 2) z = load(c, place);
        store(out, place, R::template element<T>(s, load(p, place), load(g, i), x, y, z));
        if (R::arrays > 0) store(a, place, x);
        if (R::arrays > 1) store(b, place, y);
        if (R::arrays > 2) store(c, place, z);
    }
}

#define RULE(name, R) \
    KERNEL name##_f32(const Segment<float> *segments, u32 count) { update<R>(segments, count); } \
    KERNEL name##_f64(const Segment<double> *segments, u32 count) { update<R>(segments, count); }

RULE(sgd, Sgd)
RULE(momentum, Momentum)
RULE(adagrad, Adagrad)
RULE(adam, Adam)
RULE(amsgrad, Amsgrad)
RULE(adamax, Adamax)
RULE(adadelta, Adadelta)
RULE(asgd, Asgd)
RULE(lion, Lion)
RULE(nadam, NAdam)
RULE(radam, RAdam)
RULE(rmsprop, RmsProp)
RULE(rmsprop_centered, RmsPropCentered)
RULE(rmsprop_momentum, RmsPropMomentum)
RULE(rmsprop_centered_momentum, RmsPropCenteredMomentum)
RULE(rprop, Rprop)
RULE(sparse_adam, SparseAdam)
RULE(lamb, Lamb)
RULE(muon_direction, MuonDirection)
RULE(divide, Divide)
RULE(muon, Muon)

// ---- Sums ------------------------------------------------------------------------------------------------------------------------------

// Sums have one shape, that of arithmetic::sum: blocks of 4,096 terms, each of eight lanes. A thread is a lane; the host adds the blocks up.
#define TERMS 4096
#define LANES 8

struct Magnitudes {
    template <typename T> static __device__ double term(T x) { return magnitude((double)x); }
    static __device__ double add(double sum, double term) { return sum + term; }
};
struct Squares {
    template <typename T> static __device__ double term(T x) { return (double)x * (double)x; }
    static __device__ double add(double sum, double term) { return sum + term; }
};
struct Largest {
    template <typename T> static __device__ double term(T x) { return magnitude((double)x); }
    static __device__ double add(double sum, double term) { return maximum(sum, term); }
};
// How many are infinite or NaN.
struct NotFinite {
    template <typename T> static __device__ double term(T x) { return x - x == T(0) ? 0.0 : 1.0; }
    static __device__ double add(double sum, double term) { return sum + term; }
};

// The sum of the lanes of a block, in all of its threads.
template <typename F> __device__ inline double join(double lane) {
    __shared__ double lanes[THREADS];
    barrier();
    lanes[thread()] = lane;
    barrier();
    const double *x = lanes + thread() / LANES * LANES;
    return F::add(F::add(F::add(x[0], x[1]), F::add(x[2], x[3])), F::add(F::add(x[4], x[5]), F::add(x[6], x[7])));
}

// An array in a launch over many. Laid out as in src/sums.rs.
template <typename T> struct Summed {
    const T *x;
    u64 length;
    // Its first block of terms, counted over all arrays.
    u64 first;
};

template <typename F, typename T> __device__ inline void sums(const Summed<T> *arrays, u32 count, u64 total, double *out) {
    u64 group = (block() * THREADS + thread()) / LANES;
    double lane = 0;
    if (group < total) {
        const Summed<T> *array = find(arrays, count, group);
        const T *x = load(&array->x, 0);
        u64 start = (group - load(&array->first, 0)) * TERMS, length = load(&array->length, 0);
        u64 end = start + TERMS < length ? start + TERMS : length;
        for (u64 i = start + thread() % LANES; i < end; i += LANES) lane = F::add(lane, F::term(load(x, i)));
    }
    double sum = join<F>(lane);
    if (group < total && thread() % LANES == 0) store(out, group, sum);
}

#define SUM(name, F) \
    KERNEL name##_f32(const Summed<float> *arrays, u32 count, u64 total, double *out) { sums<F>(arrays, count, total, out); } \
    KERNEL name##_f64(const Summed<double> *arrays, u32 count, u64 total, double *out) { sums<F>(arrays, count, total, out); }

SUM(magnitudes, Magnitudes)
SUM(squares, Squares)
SUM(largest, Largest)
SUM(not_finite, NotFinite)

// Squares of LAMB's directions, which changes nothing: `first` counts blocks of terms here.
template <typename T> __device__ inline void lamb_squares(const Segment<T> *segments, u32 count, u64 total, double *out) {
    u64 group = (block() * THREADS + thread()) / LANES;
    double lane = 0;
    if (group < total) {
        const Segment<T> *segment = find(segments, count, group);
        Step<T> s;
        for (int i = 0; i < 12; i++) s.k[i] = load(segment->k, i);
        s.flags = load(&segment->flags, 0);
        const T *p = load(&segment->p, 0), *g = load(&segment->g, 0), *a = load(&segment->a, 0), *b = load(&segment->b, 0);
        u64 start = (group - load(&segment->first, 0)) * TERMS, length = load(&segment->length, 0);
        u64 end = start + TERMS < length ? start + TERMS : length;
        for (u64 i = start + thread() % LANES; i < end; i += LANES) {
            T m = load(a, i), v = load(b, i);
            double x = lamb_direction(s, load(p, i), load(g, i), m, v);
            lane = lane + x * x;
        }
    }
    double sum = join<Squares>(lane);
    if (group < total && thread() % LANES == 0) store(out, group, sum);
}
KERNEL lamb_squares_f32(const Segment<float> *segments, u32 count, u64 total, double *out) { lamb_squares(segments, count, total, out); }
KERNEL lamb_squares_f64(const Segment<double> *segments, u32 count, u64 total, double *out) { lamb_squares(segments, count, total, out); }

// ---- Adafactor -------------------------------------------------------------------------------------------------------------------------

// k: 2 weight of the averages, 3 least square, 4 step size, 5 shrink; k[0] turns gradients round. `a` is all of the variance, or the
// rows' of matrices of `width` columns, with `b` the columns' and `c` the means over rows, one a matrix of `flags` rows.

template <typename T> __device__ inline T adafactor_along(const Step<T> &s, T g, T estimate) {
    return s.k[0] * g * (T(1) / root(maximum(estimate, s.k[3])));
}

struct AdafactorVariance {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &v, T &, T &) {
        v = lerp(v, g * g, s.k[2]);
        return p;
    }
};
struct AdafactorStep {
    static const int arrays = 1;
    template <typename T> static __device__ T element(const Step<T> &s, T p, T g, T &v, T &, T &) {
        return p * s.k[5] + s.k[4] * adafactor_along(s, g, v);
    }
};
RULE(adafactor_variance, AdafactorVariance)
RULE(adafactor_step, AdafactorStep)

// The sum of `term(0)` to `term(n - 1)` by eight threads; all threads of the block must come here.
template <typename Term> __device__ inline double sum_by_lanes(u64 n, Term term) {
    double sum = 0;
    for (u64 start = 0; start < n; start += TERMS) {
        u64 end = start + TERMS < n ? start + TERMS : n;
        double lane = 0;
        for (u64 i = start + thread() % LANES; i < end; i += LANES) lane = lane + term(i);
        sum = sum + join<Squares>(lane);
    }
    return sum;
}

// Moves the average of each row; eight threads a row.
template <typename T> __device__ inline void adafactor_rows(const T *g, T *rows, u64 count, u64 columns, T weight) {
    u64 row = (block() * THREADS + thread()) / LANES;
    const T *x = g + (row < count ? row : 0) * columns;
    double sum = sum_by_lanes(columns, [x](u64 i) { double y = load(x, i); return y * y; });
    if (row < count && thread() % LANES == 0) store(rows, row, lerp(load(rows, row), (T)(sum / (double)columns), weight));
}
KERNEL adafactor_rows_f32(const float *g, float *rows, u64 count, u64 columns, float weight) { adafactor_rows(g, rows, count, columns, weight); }
KERNEL adafactor_rows_f64(const double *g, double *rows, u64 count, u64 columns, double weight) { adafactor_rows(g, rows, count, columns, weight); }

// Moves the average of each column of each matrix; a thread a column.
template <typename T> __device__ inline void adafactor_columns(const T *g, T *averages, u64 count, u64 rows, u64 columns, T weight) {
    u64 column = block() * THREADS + thread();
    if (column >= count) return;
    const T *x = g + column / columns * rows * columns + column % columns;
    double sum = 0;
    for (u64 row = 0; row < rows; row++) {
        double y = load(x, row * columns);
        sum = sum + y * y;
    }
    store(averages, column, lerp(load(averages, column), (T)(sum / (double)rows), weight));
}
KERNEL adafactor_columns_f32(const float *g, float *averages, u64 count, u64 rows, u64 columns, float weight) {
    adafactor_columns(g, averages, count, rows, columns, weight);
}
KERNEL adafactor_columns_f64(const double *g, double *averages, u64 count, u64 rows, u64 columns, double weight) {
    adafactor_columns(g, averages, count, rows, columns, weight);
}

// The mean over the rows' averages of each matrix, at least `least`; eight threads a matrix.
template <typename T> __device__ inline void adafactor_means(const T *averages, T *means, u64 count, u64 rows, T least) {
    u64 matrix = (block() * THREADS + thread()) / LANES;
    const T *x = averages + (matrix < count ? matrix : 0) * rows;
    double sum = sum_by_lanes(rows, [x](u64 i) { return (double)load(x, i); });
    if (matrix < count && thread() % LANES == 0) store(means, matrix, maximum((T)(sum / (double)rows), least));
}
KERNEL adafactor_means_f32(const float *averages, float *means, u64 count, u64 rows, float least) { adafactor_means(averages, means, count, rows, least); }
KERNEL adafactor_means_f64(const double *averages, double *means, u64 count, u64 rows, double least) { adafactor_means(averages, means, count, rows, least); }

// What a matrix's parameter is updated from. Laid out as in src/adafactor.rs.
template <typename T> struct Matrix {
    const T *p;
    T *out;
    const T *g, *row_var, *col_var, *means;
    u64 length, rows, columns;
    // Sign, least square, step size, shrink.
    T sign, floor, size, shrink;
};

template <typename T> __device__ inline T adafactor_direction(const Matrix<T> &m, u64 i) {
    u64 row = i / m.columns, column = i % m.columns, batch = row / m.rows;
    T estimate = load(m.row_var, row) * load(m.col_var, batch * m.columns + column) / load(m.means, batch);
    return m.sign * load(m.g, i) * (T(1) / root(maximum(estimate, m.floor)));
}

template <typename T> __device__ inline void adafactor_squares(const Matrix<T> &m, double *out) {
    u64 group = (block() * THREADS + thread()) / LANES;
    u64 start = group * TERMS, end = start + TERMS < m.length ? start + TERMS : m.length;
    double lane = 0;
    for (u64 i = start + thread() % LANES; i < end; i += LANES) {
        double x = adafactor_direction(m, i);
        lane = lane + x * x;
    }
    double sum = join<Squares>(lane);
    if (start < m.length && thread() % LANES == 0) store(out, group, sum);
}
KERNEL adafactor_squares_f32(Matrix<float> m, double *out) { adafactor_squares(m, out); }
KERNEL adafactor_squares_f64(Matrix<double> m, double *out) { adafactor_squares(m, out); }

// The squares of a vector's directions, from all of its variance.
template <typename T> __device__ inline void adafactor_vector_squares(const Matrix<T> &m, double *out) {
    u64 group = (block() * THREADS + thread()) / LANES;
    u64 start = group * TERMS, end = start + TERMS < m.length ? start + TERMS : m.length;
    double lane = 0;
    for (u64 i = start + thread() % LANES; i < end; i += LANES) {
        double x = m.sign * load(m.g, i) * (T(1) / root(maximum(load(m.row_var, i), m.floor)));
        lane = lane + x * x;
    }
    double sum = join<Squares>(lane);
    if (start < m.length && thread() % LANES == 0) store(out, group, sum);
}
KERNEL adafactor_vector_squares_f32(Matrix<float> m, double *out) { adafactor_vector_squares(m, out); }
KERNEL adafactor_vector_squares_f64(Matrix<double> m, double *out) { adafactor_vector_squares(m, out); }

template <typename T> __device__ inline void adafactor_matrix_step(const Matrix<T> &m) {
    for (u64 i = block() * THREADS + thread(); i < m.length; i += blocks() * THREADS)
        store(m.out, i, load(m.p, i) * m.shrink + m.size * adafactor_direction(m, i));
}
KERNEL adafactor_matrix_step_f32(Matrix<float> m) { adafactor_matrix_step(m); }
KERNEL adafactor_matrix_step_f64(Matrix<double> m) { adafactor_matrix_step(m); }
